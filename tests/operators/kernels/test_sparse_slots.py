"""Every path through experts in slots in the sparse layout equals the eager reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch
from support import combinations
from support.kernel_cases import TOLERANCE, WEIGHT_TYPES, Layer, make_batch, make_layer, relative_error
from support.triton_cases import DEVICE, ROUNDED

from moegraft.cpu_backend import GateSpec
from moegraft.operators.kernels.sparse_slots import SLOT_PATHS, SparseSlotExperts
from moegraft.operators.reference import reference_activation

CLAMPED = GateSpec("silu", alpha=1.702, gate_limit=1.0, act_limit=0.6, up_limit=0.8, up_offset=1.0)
NO_NEURON = 1e9


def threshold_for(layer: Layer, x: torch.Tensor, share: float) -> float:
    """Return a threshold that about this share of the neurons does not reach, in the widest gap nearby."""
    ordered = magnitudes(layer, x).flatten().sort().values
    middle = int(share * len(ordered))
    near = ordered[middle - 6 : middle + 6]
    gap = int((near[1:] - near[:-1]).argmax())
    return float((near[gap] + near[gap + 1]) / 2)


def magnitudes(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Return `|act(gate)|`, (E, T, I) float64."""
    part = "gate" if "gate" in layer.seen else "up"
    rows = torch.einsum("eih,th->eti", layer.seen[part].double(), x.double())
    if part in layer.biases:
        rows += layer.biases[part].double()[:, None]
    spec = layer.spec
    return reference_activation(spec.activation, rows.clamp(max=spec.gate_limit), spec.alpha).clamp(max=spec.act_limit).abs()


def active_counts(layer: Layer, x: torch.Tensor, index: torch.Tensor, threshold: float) -> tuple[int, int]:
    chosen = magnitudes(layer, x)[index.clamp_min(0), torch.arange(len(x))[:, None]][index >= 0]
    return int((chosen >= threshold).sum()), chosen.numel()


@dataclass
class Run:
    """The experts of a layer in slots in reverse order, after one slot of NaN."""

    layer: Layer
    weight_type: str

    def __post_init__(self) -> None:
        packed = torch.from_numpy(self.layer.packed.buffer.copy()).view(self.layer.shape.num_experts, -1)
        self.arena = torch.cat([torch.full_like(packed[:1], 0xFF), packed.flip(0)]).to(DEVICE)
        shape = (self.layer.shape, self.layer.spec, self.weight_type, torch.device(DEVICE))
        self.experts = SparseSlotExperts(*shape)

    def slots(self, index: torch.Tensor) -> torch.Tensor:
        return torch.where(index >= 0, self.layer.shape.num_experts - index, -1).to(torch.int32).to(DEVICE)

    def __call__(
        self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, threshold: float, path: str | None = "pair"
    ) -> torch.Tensor:
        self.experts.set_threshold(threshold)
        out = torch.full(x.shape, float("nan"), device=DEVICE)
        self.experts.forward(x.to(DEVICE), self.arena, self.slots(index), weights.to(DEVICE), out, path)
        return out.cpu()


def run(
    layer: Layer, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, threshold: float, weight_type: str, path: str | None = "pair"
) -> torch.Tensor:
    """Return the output; checks the counts."""
    prepared = Run(layer, weight_type)
    found = prepared(x, index, weights, threshold, path)
    assert prepared.experts.take_counts() == active_counts(layer, x, index, threshold)
    return found


def limit(path: str, tokens: int, dtype: torch.dtype) -> float:
    """Return the tolerance; few tokens on the path by pairs are computed in float32."""
    return TOLERANCE["float32"] if path == "pair" and tokens <= 4 else ROUNDED[dtype]


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize(
    ("path", "shape"),
    [
        # tokens, top_k, experts, hidden, intermediate
        ("pair", (2, 2, 3, 64, 40)),  # most lanes of the one chunk are padding
        ("pair", (1, 1, 2, 544, 32)),  # two chunks, the second of one group
        ("pair", (5, 1, 2, 72, 40)),  # gates on tensor cores; columns that are no multiple of a group
        ("dense", (2, 1, 2, 544, 40)),
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
    assert relative_error(expected, layer.reference(x, index, weights)) > 0.01  # the threshold changes the result
    found = run(layer, x, index, weights, threshold, weight_type, path)
    assert relative_error(found, expected) <= limit(path, tokens, torch.float32)


@pytest.mark.parametrize("path", SLOT_PATHS)
@pytest.mark.parametrize(
    "shape",
    [
        # tokens, top_k, experts, hidden, intermediate
        (1, 1, 1, 32, 32),  # the smallest layer
        (1, 4, 4, 288, 16),  # K = E
        (3, 2, 5, 33, 7),  # odd sizes
        (1, 1, 2, 32, 2080),  # more neurons than a program reads at once
    ],
    ids=str,
)
def test_odd_and_small_sizes(shape: tuple[int, ...], path: str) -> None:
    tokens, top_k, num_experts, hidden, intermediate = shape
    layer = make_layer("float32", num_experts, hidden, intermediate, sparse=True)
    x, index, weights = make_batch(tokens, top_k, layer)
    threshold = threshold_for(layer, x, 0.7)
    expected = layer.reference(x, index, weights, threshold=threshold)
    assert relative_error(run(layer, x, index, weights, threshold, "float32", path), expected) <= limit(path, 5, torch.float32)


@pytest.mark.parametrize(("weight_type", "form", "path"), combinations(["bfloat16", "int4"], ["clamped", "ungated"], SLOT_PATHS))
def test_forms_of_experts(weight_type: str, form: str, path: str) -> None:
    gated = form == "clamped"
    spec = CLAMPED if gated else GateSpec("relu2")
    layer = make_layer(weight_type, 3, 72, 40, gated=gated, bias=True, spec=spec, sparse=True)
    x, index, weights = make_batch(3, 2, layer)
    threshold = threshold_for(layer, x, 0.4 if gated else 0.7)
    expected = layer.reference(x, index, weights, threshold=threshold)
    found = run(layer, x, index, weights, threshold, weight_type, path)
    assert relative_error(found, expected) <= limit(path, 3, torch.float32)


@pytest.mark.parametrize(("dtype", "tokens", "path"), combinations([torch.float16, torch.bfloat16], [1, 5], SLOT_PATHS), ids=str)
def test_half_activations(tokens: int, dtype: torch.dtype, path: str) -> None:
    layer = make_layer("int8", 3, 64, 40, sparse=True)
    x, index, weights = make_batch(tokens, 1, layer, dtype)
    expected = layer.reference(x, index, weights, threshold=0.0)
    assert relative_error(run(layer, x, index, weights, 0.0, "int8", path), expected) <= limit(path, tokens, dtype)


@pytest.mark.parametrize("path", SLOT_PATHS)
def test_absent_experts_and_tokens_without_active_neurons_are_skipped(path: str) -> None:
    layer = make_layer("int8", 3, 64, 40, sparse=True)
    x, index, weights = make_batch(3, 2, layer)
    index[0, 1] = index[1] = -1
    found = run(layer, x, index, weights, 0.0, "int8", path)
    assert relative_error(found, layer.reference(x, index, weights)) <= limit(path, 3, torch.float32)
    assert torch.equal(found[1], torch.zeros(64))
    assert torch.equal(run(layer, x, index, weights, NO_NEURON, "int8", path), torch.zeros(3, 64))


@pytest.mark.parametrize("path", SLOT_PATHS)
def test_no_active_neuron_leaves_the_bias_of_down(path: str) -> None:
    layer = make_layer("float32", 3, 64, 40, bias=True, sparse=True)
    x, index, weights = make_batch(3, 2, layer)
    expected = layer.reference(x, index, weights, threshold=NO_NEURON)
    assert relative_error(run(layer, x, index, weights, NO_NEURON, "float32", path), expected) <= TOLERANCE["float32"]


@pytest.mark.parametrize(("weight_type", "path"), combinations(["bfloat16", "int4"], SLOT_PATHS))
def test_one_expert_with_more_pairs_than_a_block(weight_type: str, path: str) -> None:
    """All tokens choose one expert, which has more neurons than a program's rows."""
    layer = make_layer(weight_type, 3, 40, 72, sparse=True)
    x, index, weights = make_batch(19, 1, layer)
    index = torch.full_like(index, 2)
    threshold = threshold_for(layer, x, 0.9)
    expected = layer.reference(x, index, weights, threshold=threshold)
    assert relative_error(run(layer, x, index, weights, threshold, weight_type, path), expected) <= ROUNDED[torch.float32]


@pytest.mark.parametrize("path", SLOT_PATHS)
def test_all_experts_absent(path: str) -> None:
    layer = make_layer("float32", 2, 32, 32, sparse=True)
    x, index, weights = make_batch(2, 1, layer)
    assert torch.equal(run(layer, x, torch.full_like(index, -1), weights, 0.1, "float32", path), torch.zeros(2, 32))


@pytest.mark.parametrize("path", SLOT_PATHS)
def test_a_nan_reaches_the_output_of_its_token_alone(path: str) -> None:
    layer = make_layer("float32", 2, 32, 32, sparse=True)
    x, index, weights = make_batch(2, 1, layer)
    index[:] = 1
    x[1, 3] = float("nan")
    found = Run(layer, "float32")(x, index, weights, NO_NEURON, path)
    assert not found[0].isnan().any()
    assert found[1].isnan().all()


@pytest.mark.parametrize("path", SLOT_PATHS)
def test_equal_inputs_give_equal_bits(path: str) -> None:
    layer = make_layer("int4", 3, 64, 40, sparse=True)
    x, index, weights = make_batch(6, 2, layer)
    assert torch.equal(run(layer, x, index, weights, 0.2, "int4", path), run(layer, x, index, weights, 0.2, "int4", path))


@pytest.mark.parametrize("path", SLOT_PATHS)
def test_the_output_has_any_dtype(path: str) -> None:
    layer = make_layer("bfloat16", 3, 64, 40, sparse=True)
    x, index, weights = make_batch(3, 2, layer, torch.bfloat16)
    prepared = Run(layer, "bfloat16")
    out = torch.empty_like(x).to(DEVICE)
    prepared.experts.forward(x.to(DEVICE), prepared.arena, prepared.slots(index), weights.to(DEVICE), out, path)
    assert relative_error(out.cpu(), layer.reference(x, index, weights)) <= 2 * ROUNDED[torch.bfloat16]


@pytest.mark.parametrize("path", SLOT_PATHS)
def test_long_batches_are_computed_in_parts(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraft.operators.kernels.sparse_slots.MOST_TOKENS", 3)
    layer = make_layer("float32", 2, 32, 32, sparse=True)
    x, index, weights = make_batch(7, 2, layer)
    assert relative_error(run(layer, x, index, weights, 0.0, "float32", path), layer.reference(x, index, weights)) <= ROUNDED[torch.float32]


@pytest.mark.parametrize(("tokens", "path"), [(6, "pair"), (7, "dense")])
def test_the_batch_decides_the_path(tokens: int, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraft.operators.kernels.sparse_slots.PAIR_TOKENS", 6)  # ten times as many take seconds in the interpreter
    layer = make_layer("bfloat16", 2, 32, 32, sparse=True)
    x, index, weights = make_batch(tokens, 1, layer)
    found = {name: run(layer, x, index, weights, 0.0, "bfloat16", name) for name in ("pair", "dense", None)}
    assert torch.equal(found[None], found[path])
    assert not torch.equal(found["pair"], found["dense"]), "the two round differently"


def test_reported_activations_equal_those_of_the_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraft.operators.kernels.sparse_slots.MOST_TOKENS", 4)  # two parts
    layer = make_layer("float32", 2, 64, 40, sparse=True)
    x, index, _ = make_batch(6, 1, layer)
    prepared = Run(layer, "float32")
    parts = list(prepared.experts.activations(x.to(DEVICE), prepared.arena, prepared.slots(index)))
    assert [len(slots) for slots, _ in parts] == [4, 2]
    acted = torch.cat([part for _, part in parts]).cpu()
    rows = torch.einsum("tih,th->ti", layer.seen["gate"][index[:, 0]], x)
    torch.testing.assert_close(acted[:, 0], rows * torch.sigmoid(rows), rtol=1e-4, atol=1e-5)


def test_another_arena_is_refused() -> None:
    layer = make_layer("float32", 2, 64, 40, sparse=True)
    x, index, _ = make_batch(3, 1, layer)
    prepared = Run(layer, "float32")
    with pytest.raises(ValueError, match="arena"):
        prepared.experts.forward(x, prepared.arena[:, :-64].contiguous(), index.int(), torch.ones(3, 1), torch.zeros_like(x))
