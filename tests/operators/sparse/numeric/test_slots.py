"""Experts in slots in the CPU kernel's sparse layout, from the bytes that it packs, against the eager reference."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import TOLERANCE, WEIGHT_TYPES, Layer, make_batch, make_layer, relative_error
from triton_cases import DEVICE, ROUNDED

from moegraft.cpu_backend import GateSpec
from moegraft.operators.experts.reference import reference_activation
from moegraft.operators.sparse.slots import SparseSlotExperts

CLAMPED = GateSpec("silu", alpha=1.702, gate_limit=1.0, act_limit=0.6, up_limit=0.8, up_offset=1.0)


def threshold_for(layer: Layer, x: torch.Tensor, share: float) -> float:
    """One that about that share of the neurons does not reach, in the widest gap near it."""
    part = "gate" if "gate" in layer.seen else "up"
    rows = torch.einsum("eih,th->eti", layer.seen[part].double(), x.double())
    if part in layer.biases:
        rows += layer.biases[part].double()[:, None]
    spec = layer.spec
    acted = reference_activation(spec.activation, rows.clamp(max=spec.gate_limit), spec.alpha).clamp(max=spec.act_limit)
    magnitudes = acted.abs().flatten().sort().values
    middle = int(share * len(magnitudes))
    near = magnitudes[middle - 6 : middle + 6]
    gap = int((near[1:] - near[:-1]).argmax())
    return float((near[gap] + near[gap + 1]) / 2)


def run(layer: Layer, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, threshold: float, weight_type: str) -> torch.Tensor:
    count = layer.shape.num_experts
    packed = torch.from_numpy(layer.packed.buffer.copy()).view(count, -1)
    arena = torch.cat([torch.full_like(packed[:1], 0xFF), packed.flip(0)]).to(DEVICE)  # the first slot holds NaN
    slots = torch.where(index >= 0, count - index, -1).to(torch.int32)
    experts = SparseSlotExperts(layer.shape, layer.spec, weight_type, torch.device(DEVICE))
    experts.set_threshold(threshold, 0.0)
    out = torch.full(x.shape, float("nan"), device=DEVICE)
    experts.forward(x.to(DEVICE), arena, slots.to(DEVICE), weights.to(DEVICE), out)
    active, neurons = experts.take_counts()
    assert neurons == int((index >= 0).sum()) * layer.shape.intermediate
    assert active <= neurons
    return out.cpu()


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize(
    "shape",
    [
        # tokens, top_k, experts, hidden, intermediate
        (2, 2, 3, 64, 40),  # most lanes of the one chunk are padding
        (1, 1, 2, 544, 32),  # two chunks, the second of one group
        (5, 1, 2, 72, 40),  # gates on tensor cores; columns that are no multiple of a group
    ],
    ids=str,
)
def test_every_weight_type(shape: tuple[int, ...], weight_type: str) -> None:
    tokens, top_k, num_experts, hidden, intermediate = shape
    layer = make_layer(weight_type, num_experts, hidden, intermediate, sparse=True)
    x, index, weights = make_batch(tokens, top_k, layer)
    threshold = threshold_for(layer, x, 0.8)
    limit = TOLERANCE["float32"] if tokens <= 4 else ROUNDED[torch.float32]
    expected = layer.reference(x, index, weights, threshold=threshold)
    assert relative_error(run(layer, x, index, weights, threshold, weight_type), expected) <= limit


@pytest.mark.parametrize("form", ["clamped", "ungated"])
@pytest.mark.parametrize("weight_type", ["bfloat16", "int4"])
def test_forms_of_experts(weight_type: str, form: str) -> None:
    gated = form == "clamped"
    spec = CLAMPED if gated else GateSpec("relu2")
    layer = make_layer(weight_type, 3, 72, 40, gated=gated, bias=True, spec=spec, sparse=True)
    x, index, weights = make_batch(3, 2, layer)
    threshold = threshold_for(layer, x, 0.4 if gated else 0.7)
    expected = layer.reference(x, index, weights, threshold=threshold)
    assert relative_error(run(layer, x, index, weights, threshold, weight_type), expected) <= TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 5])
def test_half_activations(tokens: int, dtype: torch.dtype) -> None:
    layer = make_layer("int8", 3, 64, 40, sparse=True)
    x, index, weights = make_batch(tokens, 1, layer, dtype)
    expected = layer.reference(x, index, weights, threshold=0.0)
    limit = TOLERANCE["float32"] if tokens <= 4 else ROUNDED[dtype]
    assert relative_error(run(layer, x, index, weights, 0.0, "int8"), expected) <= limit


def test_absent_experts_and_no_active_neuron() -> None:
    layer = make_layer("int8", 3, 64, 40, sparse=True)
    x, index, weights = make_batch(3, 2, layer)
    index[0, 1] = index[1] = -1
    found = run(layer, x, index, weights, 0.0, "int8")
    assert relative_error(found, layer.reference(x, index, weights)) <= TOLERANCE["float32"]
    assert torch.equal(found[1], torch.zeros(64))
    assert torch.equal(run(layer, x, index, weights, 1e9, "int8"), torch.zeros(3, 64))


def test_activations_and_another_arena() -> None:
    layer = make_layer("float32", 2, 64, 40, sparse=True)
    x, index, _ = make_batch(3, 1, layer)
    experts = SparseSlotExperts(layer.shape, layer.spec, "float32", torch.device(DEVICE))
    arena = torch.from_numpy(layer.packed.buffer.copy()).view(2, -1).to(DEVICE)
    acted = experts.activations(x.to(DEVICE), arena, index.to(torch.int32).to(DEVICE)).cpu()
    rows = torch.einsum("tih,th->ti", layer.seen["gate"][index[:, 0]], x)
    torch.testing.assert_close(acted[:, 0], rows * torch.sigmoid(rows), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="arena"):
        experts.forward(x, arena[:, :-64].contiguous(), index.int(), torch.ones(3, 1), torch.zeros_like(x))
