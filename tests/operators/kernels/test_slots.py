"""Experts in slots against the eager reference, from the bytes that the CPU kernel packs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch
from support import combinations
from support.kernel_cases import TOLERANCE, WEIGHT_TYPES, Layer, make_batch, make_layer, make_stored_layer, relative_error
from support.triton_cases import DEVICE, INTERPRETED, ROUNDED

from moegraft.cpu_backend import GateSpec, activations
from moegraft.operators.kernels.slots import MOST_TOKENS, SlotExperts

PATHS = ("decode", "grouped")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# GPT-OSS's gate, with limits that some values reach
CLAMPED = GateSpec("silu", alpha=1.702, gate_limit=1.0, act_limit=0.6, up_limit=0.8, up_offset=1.0)
SHAPES = [
    # tokens, top_k, experts, hidden, intermediate
    (1, 2, 4, 64, 64),  # decode: whole blocks
    (2, 2, 4, 72, 40),  # columns and neurons that are no multiple of 32
    (1, 1, 2, 288, 32),  # int4: two steps of the product, the second one group long
]


def arena_of(layer: Layer, spare: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """An arena with the layer's experts at the back of it, in reverse order, before them slots full of NaN; and each expert's slot."""
    count = layer.shape.num_experts
    packed = torch.from_numpy(layer.packed.buffer.copy()).view(count, -1)
    arena = torch.full((count + spare, packed.shape[1]), 0xFF, dtype=torch.uint8)
    arena[spare:] = packed.flip(0)
    return arena.to(DEVICE), torch.arange(count - 1, -1, -1, dtype=torch.int32) + spare


def forward(layer: Layer, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, path: str | None, weight_type: str) -> torch.Tensor:
    """`index` is that of experts, -1: not here."""
    arena, slot_of = arena_of(layer)
    slots = torch.where(index >= 0, slot_of[index.clamp(min=0)], -1).to(torch.int32)
    out = torch.full(x.shape, float("nan"), device=DEVICE)
    experts = SlotExperts(layer.shape, layer.spec, weight_type)
    experts.forward(x.to(DEVICE), arena, slots.to(DEVICE), weights.to(DEVICE), out, path)
    return out.cpu()


def limit(path: str, dtype: torch.dtype) -> float:
    return TOLERANCE["float32"] if path == "decode" else ROUNDED[dtype]


@pytest.mark.parametrize(("path", "shape", "weight_type"), combinations(PATHS, SHAPES, WEIGHT_TYPES), ids=str)
def test_every_weight_type(shape: tuple[int, ...], weight_type: str, path: str) -> None:
    tokens, top_k, num_experts, hidden, intermediate = shape
    layer = make_layer(weight_type, num_experts, hidden, intermediate)
    batch = make_batch(tokens, top_k, layer)
    assert relative_error(forward(layer, *batch, path, weight_type), layer.reference(*batch)) <= limit(path, torch.float32)


@pytest.mark.parametrize(("path", "dtype", "weight_type"), combinations(PATHS, DTYPES, WEIGHT_TYPES), ids=str)
def test_every_activation_dtype(weight_type: str, dtype: torch.dtype, path: str) -> None:
    layer = make_layer(weight_type, 3, 64, 40)
    batch = make_batch(2, 2, layer, dtype)
    assert relative_error(forward(layer, *batch, path, weight_type), layer.reference(*batch)) <= limit(path, dtype)


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_several_whole_steps_on_tensor_cores(weight_type: str) -> None:
    """The loop over columns is pipelined, and nothing is masked: on Hopper old Tritons make wrong products of it."""
    layer = make_layer(weight_type, 3, 1024, 512)
    dtype = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter takes as long for either
    batch = make_batch(5, 2, layer, dtype)
    assert relative_error(forward(layer, *batch, "grouped", weight_type), layer.reference(*batch)) <= limit("grouped", dtype)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("weight_type", "hidden", "intermediate"),
    [
        ("mxfp4", 96, 32),  # three column blocks
        ("q3_k+float16", 256, 32),  # down has units of another size
        ("int4_g32+q5_0", 64, 32),  # both with fields that are not in words
        ("fp8", 128, 128),
        ("iq3_xxs+nvfp4", 256, 128),  # the second has no grid
    ],
)
def test_formats_of_files(weight_type: str, hidden: int, intermediate: int, path: str) -> None:
    layer = make_stored_layer(weight_type, 3, hidden, intermediate, bias=True)
    batch = make_batch(1 if path == "decode" else 3, 2, layer)
    assert relative_error(forward(layer, *batch, path, weight_type), layer.reference(*batch)) <= limit(path, torch.float32)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
def test_biases_limits_and_offset(gated: bool, path: str) -> None:
    layer = make_layer("int8", 3, 72, 40, gated=gated, bias=True, spec=CLAMPED if gated else GateSpec("relu2"))
    batch = make_batch(3, 2, layer)
    assert relative_error(forward(layer, *batch, path, "int8"), layer.reference(*batch)) <= limit(path, torch.float32)


@pytest.mark.parametrize(("path", "gated", "activation"), combinations(PATHS, [True, False], activations()))
def test_every_activation(path: str, gated: bool, activation: str) -> None:
    layer = make_layer("float32", 2, 32, 32, gated=gated, spec=GateSpec(activation))
    batch = make_batch(1, 1, layer)
    assert relative_error(forward(layer, *batch, path, "float32"), layer.reference(*batch)) <= limit(path, torch.float32)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "absent",
    [
        [[False, False], [True, False], [False, True]],  # some
        [[False, False], [True, True], [False, False]],  # a token with no expert here
        [[True, True], [True, True], [True, True]],  # nothing is here: zeros
    ],
    ids=["some", "a whole token", "all"],
)
def test_experts_that_are_not_here(absent: list[list[bool]], path: str) -> None:
    layer = make_layer("bfloat16", 4, 64, 40)
    x, index, weights = make_batch(3, 2, layer)
    index = index.masked_fill(torch.tensor(absent), -1)
    found = forward(layer, x, index, weights, path, "bfloat16")
    assert relative_error(found, layer.reference(x, index, weights)) <= limit(path, torch.float32)
    assert torch.equal(found[(index < 0).all(1)], torch.zeros_like(found[(index < 0).all(1)]))


@pytest.mark.parametrize("weight_type", ["bfloat16", "int4"])
def test_all_tokens_on_one_expert(weight_type: str) -> None:
    """One expert fills several blocks of pairs, the others none."""
    layer = make_layer(weight_type, 3, 64, 40)
    x, _, weights = make_batch(37, 1, layer)
    index = torch.ones(37, 1, dtype=torch.int64)
    assert relative_error(forward(layer, x, index, weights, "grouped", weight_type), layer.reference(x, index, weights)) <= ROUNDED[x.dtype]


def test_larger_blocks_of_pairs() -> None:
    """More than 32 pairs an expert, with 16-bit activations: blocks of 64."""
    layer = make_layer("int8", 2, 64, 40)
    batch = make_batch(140, 1, layer, torch.float16)
    assert relative_error(forward(layer, *batch, "grouped", "int8"), layer.reference(*batch)) <= ROUNDED[torch.float16]


@pytest.mark.parametrize("path", PATHS)
def test_equal_inputs_give_equal_bits(path: str) -> None:
    layer = make_layer("int4", 4, 64, 64)
    batch = make_batch(3, 4, layer)
    assert torch.equal(forward(layer, *batch, path, "int4"), forward(layer, *batch, path, "int4"))


def test_weights_of_any_dtype() -> None:
    layer = make_layer("float32", 3, 32, 32)
    x, index, weights = make_batch(2, 2, layer)
    for path in PATHS:
        found = forward(layer, x, index, weights.bfloat16(), path, "float32")
        assert relative_error(found, layer.reference(x, index, weights.bfloat16())) <= limit(path, torch.float32)


def test_no_tokens_and_no_choices() -> None:
    layer = make_layer("float32", 2, 32, 32)
    x, index, weights = make_batch(3, 1, layer)
    assert forward(layer, x[:0], index[:0], weights[:0], None, "float32").shape == (0, 32)
    assert torch.equal(forward(layer, x, index[:, :0], weights[:, :0], None, "float32"), torch.zeros(3, 32))


def test_long_prompts_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraft.operators.kernels.slots.MOST_TOKENS", 4)
    layer = make_layer("float32", 3, 32, 32)
    batch = make_batch(10, 2, layer)
    assert relative_error(forward(layer, *batch, None, "float32"), layer.reference(*batch)) <= ROUNDED[torch.float32]


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("hidden_states", lambda x: x[:, :16], "hidden_states"),
        ("hidden_states", lambda x: x.double(), "float64"),
        ("hidden_states", lambda x: x.T.contiguous().T, "contiguous"),
        ("slots", lambda x: x.long(), "int32"),
        ("slots", lambda x: x[:2], "slots"),
        ("arena", lambda x: x[:, 64:], "arena"),
        ("arena", lambda x: x.repeat(1, 2)[:, : x.shape[1]], "contiguous"),
        ("out", lambda x: x.double(), "out must be float32"),
    ],
)
def test_wrong_arguments_are_named(name: str, change, says: str) -> None:  # type: ignore[no-untyped-def]
    layer = make_layer("float32", 2, 32, 32)
    x, index, weights = make_batch(3, 1, layer)
    arena, _ = arena_of(layer)
    given = {"hidden_states": x, "arena": arena, "slots": index.int(), "top_k_weights": weights, "out": torch.zeros_like(x)}
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=says):
        SlotExperts(layer.shape, layer.spec, "float32").forward(**given)


@pytest.mark.parametrize("weight_type", ["bfloat16", "int4"])
def test_pairs_are_grouped_by_the_experts_of_a_layer(weight_type: str) -> None:
    """Not by the slots of all layers, of which there are thousands."""
    layer = make_layer(weight_type, 4, 64, 40)
    x, index, weights = make_batch(9, 2, layer)
    index[0, 0], index[3, 1] = -1, 4  # padded
    arena, slot_of = arena_of(layer)
    slot_of[2] = -1
    inside = (index >= 0) & (index < 4)
    slots = torch.where(inside, slot_of[index.clamp(0, 3)], -1).to(torch.int32)
    out = torch.empty(x.shape, device=DEVICE)
    experts = SlotExperts(layer.shape, layer.spec, weight_type)
    experts.forward(x.to(DEVICE), arena, slots.to(DEVICE), weights.to(DEVICE), out, "grouped", experts=index.to(DEVICE))
    expected = layer.reference(x, torch.where(slots >= 0, index, -1), weights)
    assert relative_error(out.cpu(), expected) <= ROUNDED[torch.float32]


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[2], [0, 3], [1]], [[3, 1]], [[0], []]], ids=str)
def test_experts_are_computed_as_they_arrive(parts: list[list[int]]) -> None:
    layer = make_layer("int8", 4, 64, 40)
    x, index, weights = make_batch(9, 2, layer)
    index[0, 0] = -1
    index[5] = -1  # a token with no expert
    arena, slot_of = arena_of(layer)
    call = SlotExperts(layer.shape, layer.spec, "int8").begin(x.to(DEVICE), arena, index.to(DEVICE), weights.to(DEVICE))
    assert call is not None
    for part in parts:
        here = torch.full((4,), -1, dtype=torch.int32)
        here[part] = slot_of[part]
        pairs = int(torch.isin(index, torch.tensor(part)).sum())
        if pairs:
            call.add(here.to(DEVICE), len(part), pairs)
    out = torch.empty(x.shape, device=DEVICE)
    call.finish(out)
    computed = torch.tensor([expert for part in parts for expert in part])
    expected = layer.reference(x, torch.where(torch.isin(index, computed), index, -1), weights)
    assert relative_error(out.cpu(), expected) <= ROUNDED[torch.float32]


def test_few_and_very_many_tokens_are_not_computed_in_parts() -> None:
    layer = make_layer("int8", 4, 64, 40)
    arena, _ = arena_of(layer)
    for tokens in (0, 1, 4, MOST_TOKENS + 1):
        x, index, weights = make_batch(tokens, 2, layer)
        assert SlotExperts(layer.shape, layer.spec, "int8").begin(x, arena, index, weights) is None
