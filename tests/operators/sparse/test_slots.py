"""Experts in slots in the CPU kernel's sparse layout, from the bytes that it packs, against the eager reference."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch
from support.kernel_cases import TOLERANCE, WEIGHT_TYPES, Layer, make_batch, make_layer, relative_error
from support.triton_cases import DEVICE, ROUNDED

from moegraft.cpu_backend import GateSpec
from moegraft.operators.reference import reference_activation
from moegraft.operators.sparse.slots import SLOT_PATHS, SparseSlotExperts

BLOCK_PATHS = ("union", "dense")
CLAMPED = GateSpec("silu", alpha=1.702, gate_limit=1.0, act_limit=0.6, up_limit=0.8, up_offset=1.0)


def threshold_for(layer: Layer, x: torch.Tensor, share: float) -> float:
    """One that about that share of the neurons does not reach, in the widest gap near it."""
    ordered = magnitudes(layer, x).flatten().sort().values
    middle = int(share * len(ordered))
    near = ordered[middle - 6 : middle + 6]
    gap = int((near[1:] - near[:-1]).argmax())
    return float((near[gap] + near[gap + 1]) / 2)


def magnitudes(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """`|act(gate)|` (E, T, I) float64."""
    part = "gate" if "gate" in layer.seen else "up"
    rows = torch.einsum("eih,th->eti", layer.seen[part].double(), x.double())
    if part in layer.biases:
        rows += layer.biases[part].double()[:, None]
    spec = layer.spec
    return reference_activation(spec.activation, rows.clamp(max=spec.gate_limit), spec.alpha).clamp(max=spec.act_limit).abs()


def run(
    layer: Layer, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, threshold: float, weight_type: str, path: str = "pair"
) -> torch.Tensor:
    count = layer.shape.num_experts
    packed = torch.from_numpy(layer.packed.buffer.copy()).view(count, -1)
    arena = torch.cat([torch.full_like(packed[:1], 0xFF), packed.flip(0)]).to(DEVICE)  # the first slot holds NaN
    slots = torch.where(index >= 0, count - index, -1).to(torch.int32)
    experts = SparseSlotExperts(layer.shape, layer.spec, weight_type, torch.device(DEVICE))
    experts.set_threshold(threshold, 0.0)
    out = torch.full(x.shape, float("nan"), device=DEVICE)
    experts.forward(x.to(DEVICE), arena, slots.to(DEVICE), weights.to(DEVICE), out, path)
    chosen = magnitudes(layer, x)[index.clamp_min(0), torch.arange(len(x))[:, None]][index >= 0]
    assert experts.take_counts() == (int((chosen >= threshold).sum()), chosen.numel())
    return out.cpu()


def limit(path: str, tokens: int, dtype: torch.dtype) -> float:
    """Few tokens by pairs are computed in float32 throughout."""
    return TOLERANCE["float32"] if path == "pair" and tokens <= 4 else ROUNDED[dtype]


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize(
    ("path", "shape"),
    [
        # tokens, top_k, experts, hidden, intermediate
        ("pair", (2, 2, 3, 64, 40)),  # most lanes of the one chunk are padding
        ("pair", (1, 1, 2, 544, 32)),  # two chunks, the second of one group
        ("pair", (5, 1, 2, 72, 40)),  # gates on tensor cores; columns that are no multiple of a group
        ("union", (1, 1, 2, 544, 32)),
        ("dense", (2, 1, 2, 544, 40)),
        ("union", (5, 1, 2, 72, 40)),
        ("dense", (5, 1, 2, 72, 40)),
    ],
    ids=str,
)
def test_every_weight_type(path: str, shape: tuple[int, ...], weight_type: str) -> None:
    tokens, top_k, num_experts, hidden, intermediate = shape
    layer = make_layer(weight_type, num_experts, hidden, intermediate, sparse=True)
    x, index, weights = make_batch(tokens, top_k, layer)
    threshold = threshold_for(layer, x, 0.8)
    expected = layer.reference(x, index, weights, threshold=threshold)
    assert relative_error(expected, layer.reference(x, index, weights)) > 0.01  # the threshold does something
    found = run(layer, x, index, weights, threshold, weight_type, path)
    assert relative_error(found, expected) <= limit(path, tokens, torch.float32)


@pytest.mark.parametrize("path", SLOT_PATHS)
@pytest.mark.parametrize("form", ["clamped", "ungated"])
@pytest.mark.parametrize("weight_type", ["bfloat16", "int4"])
def test_forms_of_experts(weight_type: str, form: str, path: str) -> None:
    gated = form == "clamped"
    spec = CLAMPED if gated else GateSpec("relu2")
    layer = make_layer(weight_type, 3, 72, 40, gated=gated, bias=True, spec=spec, sparse=True)
    x, index, weights = make_batch(3, 2, layer)
    threshold = threshold_for(layer, x, 0.4 if gated else 0.7)
    expected = layer.reference(x, index, weights, threshold=threshold)
    found = run(layer, x, index, weights, threshold, weight_type, path)
    assert relative_error(found, expected) <= limit(path, 3, torch.float32)


@pytest.mark.parametrize("path", SLOT_PATHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 5])
def test_half_activations(tokens: int, dtype: torch.dtype, path: str) -> None:
    layer = make_layer("int8", 3, 64, 40, sparse=True)
    x, index, weights = make_batch(tokens, 1, layer, dtype)
    expected = layer.reference(x, index, weights, threshold=0.0)
    assert relative_error(run(layer, x, index, weights, 0.0, "int8", path), expected) <= limit(path, tokens, dtype)


@pytest.mark.parametrize("path", SLOT_PATHS)
def test_absent_experts_and_no_active_neuron(path: str) -> None:
    layer = make_layer("int8", 3, 64, 40, sparse=True)
    x, index, weights = make_batch(3, 2, layer)
    index[0, 1] = index[1] = -1
    found = run(layer, x, index, weights, 0.0, "int8", path)
    assert relative_error(found, layer.reference(x, index, weights)) <= limit(path, 3, torch.float32)
    assert torch.equal(found[1], torch.zeros(64))
    assert torch.equal(run(layer, x, index, weights, 1e9, "int8", path), torch.zeros(3, 64))


@pytest.mark.parametrize("path", BLOCK_PATHS)
@pytest.mark.parametrize("weight_type", ["bfloat16", "int4"])
def test_more_pairs_than_a_block_holds(weight_type: str, path: str) -> None:
    """All tokens on one expert; more neurons than a program's rows."""
    layer = make_layer(weight_type, 3, 40, 72, sparse=True)
    x, index, weights = make_batch(19, 1, layer)
    index = torch.full_like(index, 2)
    threshold = threshold_for(layer, x, 0.9)
    expected = layer.reference(x, index, weights, threshold=threshold)
    assert relative_error(run(layer, x, index, weights, threshold, weight_type, path), expected) <= ROUNDED[torch.float32]


@pytest.mark.parametrize("path", SLOT_PATHS)
def test_nobody_here(path: str) -> None:
    layer = make_layer("float32", 2, 32, 32, sparse=True)
    x, index, weights = make_batch(2, 1, layer)
    assert torch.equal(run(layer, x, torch.full_like(index, -1), weights, 0.1, "float32", path), torch.zeros(2, 32))


@pytest.mark.parametrize("path", SLOT_PATHS)
def test_a_nan_is_seen_and_stays_in_its_token(path: str) -> None:
    layer = make_layer("float32", 2, 32, 32, sparse=True)
    x, index, weights = make_batch(2, 1, layer)
    index[:] = 1
    x[1, 3] = float("nan")
    count = layer.shape.num_experts
    arena = torch.from_numpy(layer.packed.buffer.copy()).view(count, -1).to(DEVICE)
    experts = SparseSlotExperts(layer.shape, layer.spec, "float32", torch.device(DEVICE))
    experts.set_threshold(1e9, 0.0)
    out = torch.zeros_like(x).to(DEVICE)
    experts.forward(x.to(DEVICE), arena, index.int().to(DEVICE), weights.to(DEVICE), out, path)
    assert not out[0].isnan().any()
    assert out[1].isnan().all()


@pytest.mark.parametrize("path", BLOCK_PATHS)
def test_equal_inputs_give_equal_bits(path: str) -> None:
    layer = make_layer("int4", 3, 64, 40, sparse=True)
    x, index, weights = make_batch(6, 2, layer)
    assert torch.equal(run(layer, x, index, weights, 0.2, "int4", path), run(layer, x, index, weights, 0.2, "int4", path))


def test_a_path_is_chosen_for_each_part_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraft.operators.sparse.slots.MOST_TOKENS", 3)
    layer = make_layer("float32", 2, 32, 32, sparse=True)
    x, index, weights = make_batch(7, 2, layer)
    asked: list[tuple[int, int]] = []

    def choose(experts: SparseSlotExperts, tokens: int, top_k: int) -> str:
        asked.append((tokens, top_k))
        return BLOCK_PATHS[len(asked) % 2]

    arena = torch.from_numpy(layer.packed.buffer.copy()).view(2, -1).to(DEVICE)
    experts = SparseSlotExperts(layer.shape, layer.spec, "float32", torch.device(DEVICE), choose)
    out = torch.empty_like(x).to(DEVICE)
    experts.forward(x.to(DEVICE), arena, index.int().to(DEVICE), weights.to(DEVICE), out)
    assert asked == [(3, 2), (3, 2), (1, 2)]
    assert relative_error(out.cpu(), layer.reference(x, index, weights)) <= ROUNDED[torch.float32]


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
