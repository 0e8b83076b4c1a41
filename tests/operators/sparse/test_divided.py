"""One call computed in part by the CPU and in part by kernels out of slots, each without the neurons below one threshold."""

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
from moegraft.operators.offload.executors import CpuPart, HostTokens
from moegraft.operators.offload.model_experts import EngineParts
from moegraft.operators.sparsity import SparseLayers
from moegraft.operators.thresholds import SparsityOptions

EXPERTS, SLOTS = 5, {1: 2, 3: 0, 4: 1}  # experts in slots


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("weight_type", ["bfloat16", "int8"])
def test_both_parts_leave_out_the_same_neurons(weight_type: str, drafting: bool) -> None:
    layer = make_layer(weight_type, EXPERTS, 64, 40, sparse=True)
    # With int8 the CPU rounds what it multiplies: the band around the threshold is left empty.
    x, index, weights = make_batch(3, 2, layer)
    rows = torch.einsum("eih,th->eti", layer.seen["gate"].double(), x.double())
    magnitudes = (rows * rows.sigmoid()).abs().flatten().sort().values
    near = magnitudes[300:360]
    gap = int((near[1:] / near[:-1]).argmax())
    threshold = float((near[gap] * near[gap + 1]).sqrt())
    switch, runtime = DraftSwitch(), Runtime(1)
    sparsity = SparseLayers().join(SparsityOptions(0.5, "routed"), switch)
    parts = EngineParts(DEVICE, [layer.packed], [], runtime, [sparsity])
    held = torch.zeros(3, layer.packed.expert_bytes, dtype=torch.uint8)
    for expert, slot in SLOTS.items():
        held[slot] = torch.from_numpy(layer.packed.buffer.copy()).view(EXPERTS, -1)[expert]
    parts.use(SimpleNamespace(arena=SimpleNamespace(array=None, tensor=held.flatten().to(DEVICE))))  # type: ignore[arg-type]
    if drafting:
        sparsity.set_threshold(1e9, 0.5)
        sparsity.set_draft_threshold(threshold, 0.5)
    else:
        sparsity.set_threshold(threshold, 0.5)
    tokens = HostTokens(x, index.numpy(), weights.numpy())
    with switch.drafting(DraftSettings(2, sparsity=0.5)) if drafting else nullcontext():
        cpu = CpuPart(runtime, layer.packed, tokens, torch.full_like(x, float("nan")), sparsity)
        execution = parts.cuda_execution(cpu, tokens, x.to(DEVICE), weights.to(DEVICE), parts.kernels_for(0))
    there = np.array(sorted(SLOTS))
    execution.on_gpu(there, np.array([SLOTS[expert] for expert in there.tolist()], np.int32))()
    wait = execution.on_cpu(np.setdiff1d(np.arange(EXPERTS), there))()
    assert wait is not None
    wait()
    execution.join(SimpleNamespace(wait=lambda: None), ())  # type: ignore[arg-type]
    expected = layer.reference(x, index, weights, threshold=threshold)
    limit = TOLERANCE["float32"] if weight_type == "bfloat16" else 2e-2
    assert relative_error(execution.result.cpu(), expected) <= limit
    if not drafting:
        chosen = (rows * rows.sigmoid()).abs()[index.T, torch.arange(3)]  # (K, T, I)
        assert sparsity.counts.tolist() == [int((chosen >= threshold).sum()), 3 * 2 * 40]
        assert sparsity.counts.tolist()[1] == 3 * 2 * 40, "the device's are taken once"
