"""One call that is divided between the CPU and kernels over slots, both without the neurons below one threshold."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch
from support.kernel_cases import TOLERANCE, make_batch, make_layer, relative_error
from support.triton_cases import DEVICE

from moegraft.cpu_backend import Runtime
from moegraft.operators.draft import DraftSettings, DraftSwitch
from moegraft.operators.offload.executors import CallExecutor, EngineLayers, Tokens
from moegraft.operators.sparsity import SparseLayers, SparsityOptions

EXPERTS, SLOTS = 5, {1: 2, 3: 0, 4: 1}  # experts in slots


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("weight_type", ["bfloat16", "int8"])
def test_both_parts_leave_out_the_same_neurons(weight_type: str, drafting: bool) -> None:
    layer = make_layer(weight_type, EXPERTS, 64, 40, sparse=True)
    # With int8 the CPU rounds activations, so no activation is near the threshold.
    x, index, weights = make_batch(3, 2, layer)
    rows = torch.einsum("eih,th->eti", layer.seen["gate"].double(), x.double())
    magnitudes = (rows * rows.sigmoid()).abs().flatten().sort().values
    near = magnitudes[300:360]
    gap = int((near[1:] / near[:-1]).argmax())
    threshold = float((near[gap] * near[gap + 1]).sqrt())
    switch, runtime = DraftSwitch(), Runtime(1)
    sparsity = SparseLayers().join(SparsityOptions(0.5, "routed"), switch)
    held = torch.zeros(3, layer.packed.expert_bytes, dtype=torch.uint8)
    for expert, slot in SLOTS.items():
        held[slot] = torch.from_numpy(layer.packed.buffer.copy()).view(EXPERTS, -1)[expert]
    slots = SimpleNamespace(tensor=held.flatten().to(DEVICE))
    layers = EngineLayers(torch.device(DEVICE), runtime, [layer.packed], [], [sparsity], slots)  # type: ignore[arg-type]
    if drafting:
        sparsity.set_threshold(1e9, 0.5)
        sparsity.set_draft_threshold(threshold)
    else:
        sparsity.set_threshold(threshold, 0.5)
    host, on_device = Tokens(x, index, weights), Tokens(x.to(DEVICE), index.to(DEVICE), weights.to(DEVICE))
    with switch.drafting(DraftSettings(2, sparsity=0.5)) if drafting else nullcontext():
        executor = CallExecutor(layers, layer.packed, sparsity, layers.kernels[0], host, on_device)
    there = np.array(sorted(SLOTS))
    executor.on_gpu(there, np.array([SLOTS[expert] for expert in there.tolist()], np.int32))()
    wait = executor.on_cpu(np.setdiff1d(np.arange(EXPERTS), there))()
    assert wait is not None
    wait()
    executor.join(SimpleNamespace(wait=lambda: None), ())  # type: ignore[arg-type]
    expected = layer.reference(x, index, weights, threshold=threshold)
    limit = TOLERANCE["float32"] if weight_type == "bfloat16" else 2e-2
    assert relative_error(executor.result.cpu(), expected) <= limit
    if not drafting:
        chosen = (rows * rows.sigmoid()).abs()[index.T, torch.arange(3)]  # (K, T, I)
        assert sparsity.counts.tolist() == [int((chosen >= threshold).sum()), 3 * 2 * 40]
        assert sparsity.counts.tolist()[1] == 3 * 2 * 40, "the device's are taken once"
