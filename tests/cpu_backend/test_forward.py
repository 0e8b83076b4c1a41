"""The forward pass against the eager reference, on every instruction set of this machine."""

from __future__ import annotations

import pytest
import torch
from support.kernel_cases import ROUNDING, TOLERANCE, WEIGHT_TYPES, make_batch, make_layer, relative_error, sqnr_db

from moegraft.cpu_backend import GateSpec, Runtime, activations

SHAPES = [
    # tokens, top_k, experts, hidden, intermediate
    (1, 2, 4, 64, 64),  # decode
    (1, 1, 1, 32, 32),  # one block of everything
    (7, 4, 8, 72, 40),  # H and I are multiples of no block
    (3, 2, 4, 33, 17),  # odd sizes: a pair of columns is half padding
    (2, 2, 2, 5, 3),  # smaller than one group
    (5, 4, 4, 64, 96),  # K = E: every expert has every token
    (13, 1, 2, 96, 64),  # one token more than the largest tile
    (70, 3, 5, 128, 64),  # several tiles an expert, of unequal length
    (64, 1, 16, 64, 32),  # some experts with no token
]


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_reference(runtime: Runtime, weight_type: str, shape: tuple[int, ...]) -> None:
    tokens, top_k, num_experts, hidden, intermediate = shape
    layer = make_layer(weight_type, num_experts, hidden, intermediate)
    batch = make_batch(tokens, top_k, layer)
    assert relative_error(layer.forward(runtime, *batch), layer.reference(*batch)) <= TOLERANCE[weight_type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_half_activations_are_rounded_once(runtime: Runtime, weight_type: str, dtype: torch.dtype) -> None:
    layer = make_layer(weight_type, 4, 136, 72)  # the last vector of a row is partly filled
    batch = make_batch(9, 3, layer, dtype)
    assert relative_error(layer.forward(runtime, *batch), layer.reference(*batch)) <= TOLERANCE[weight_type] + ROUNDING[dtype]


@pytest.mark.parametrize("tokens", range(1, 17))
def test_every_tile_width_gives_the_same_bits(runtime: Runtime, tokens: int) -> None:
    # A token's result must not depend on the tokens beside it, or batched and single decoding would drift apart.
    runtime = Runtime(threads=2, isa=runtime.isa, matrix_tokens=0)  # the matrix kernel's are in test_matrix.py
    for weight_type in WEIGHT_TYPES:
        layer = make_layer(weight_type, 1, 64, 32)
        x, index, weights = make_batch(tokens, 1, layer, torch.bfloat16)
        together = layer.forward(runtime, x, index, weights)
        alone = torch.cat([layer.forward(runtime, x[t : t + 1], index[t : t + 1], weights[t : t + 1]) for t in range(tokens)])
        assert torch.equal(together, alone)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("activation", activations())
def test_every_activation(runtime: Runtime, activation: str, gated: bool) -> None:
    for spec in (GateSpec(activation), GateSpec(activation, alpha=1.702)):
        layer = make_layer("float32", 3, 48, 40, gated=gated, bias=True, spec=spec)
        batch = make_batch(6, 2, layer)
        assert relative_error(layer.forward(runtime, *batch), layer.reference(*batch)) <= TOLERANCE["float32"]


@pytest.mark.parametrize(
    "spec",
    [
        GateSpec("silu", alpha=1.702, gate_limit=7.0, up_limit=7.0, up_offset=1.0),  # GPT-OSS
        GateSpec("silu", gate_limit=0.3, act_limit=0.2, up_limit=0.1, up_offset=0.5),  # every limit is met
        GateSpec("gelu_tanh", act_limit=0.0),  # act is at most zero
    ],
    ids=str,
)
def test_gate_limits(runtime: Runtime, spec: GateSpec) -> None:
    layer = make_layer("float32", 3, 48, 40, bias=True, spec=spec)
    batch = make_batch(6, 2, layer)
    assert relative_error(layer.forward(runtime, *batch), layer.reference(*batch)) <= TOLERANCE["float32"]


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
def test_biases(runtime: Runtime, weight_type: str, gated: bool) -> None:
    layer = make_layer(weight_type, 4, 80, 56, gated=gated, bias=True)
    batch = make_batch(9, 2, layer)
    assert relative_error(layer.forward(runtime, *batch), layer.reference(*batch)) <= TOLERANCE[weight_type]


def test_extreme_activations_of_silu(runtime: Runtime) -> None:
    # exp overflows and underflows inside silu: -1e30 must give 0, 1e30 itself.
    layer = make_layer("float32", 1, 32, 32, gated=False)
    for part, matrix in (("up", torch.eye(32)), ("down", torch.eye(32))):
        layer.packed.pack(0, part, matrix.numpy())
    values = torch.tensor([-1e30, -1e4, -104.0, -89.0, -88.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 88.0, 89.0, 104.0, 1e4, 1e30])
    x = torch.zeros(1, 32)
    x[0, : len(values)] = values
    out = layer.forward(runtime, x, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))[0, : len(values)]
    torch.testing.assert_close(out, torch.nn.functional.silu(values.double()).float(), rtol=1e-6, atol=1e-36)


def test_no_tokens(runtime: Runtime) -> None:
    layer = make_layer()
    batch = make_batch(0, 2, layer)
    assert layer.forward(runtime, *batch).shape == (0, 64)


def test_padded_slots_are_skipped(runtime: Runtime) -> None:
    layer = make_layer()
    x, index, weights = make_batch(6, 3, layer)
    index[:, 1] = -1
    index[2, 0] = layer.shape.num_experts
    index[4] = -1  # a token with no expert at all
    weights[:, 1] = float("nan")  # the weight of a padded slot is not read
    expected = layer.reference(x, index, weights.nan_to_num())
    out = layer.forward(runtime, x, index, weights)
    assert relative_error(out, expected) <= TOLERANCE["float32"]
    assert torch.equal(out[4], torch.zeros(64))


def test_all_tokens_on_one_expert(runtime: Runtime) -> None:
    layer = make_layer("int8", 8, 64, 64)
    x, index, weights = make_batch(400, 1, layer)  # more than one segment of pairs
    index[:] = 5
    assert relative_error(layer.forward(runtime, x, index, weights), layer.reference(x, index, weights)) <= TOLERANCE["int8"]


def test_a_batch_of_several_passes(runtime: Runtime) -> None:
    layer = make_layer("float32", 4, 32, 32)
    x, index, weights = make_batch(2048 + 3, 2, layer)
    assert relative_error(layer.forward(runtime, x, index, weights), layer.reference(x, index, weights)) <= TOLERANCE["float32"]


def test_a_token_may_choose_one_expert_twice(runtime: Runtime) -> None:
    layer = make_layer()
    x, index, weights = make_batch(3, 2, layer)
    index[:, 1] = index[:, 0]
    assert relative_error(layer.forward(runtime, x, index, weights), layer.reference(x, index, weights)) <= TOLERANCE["float32"]


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_stay_in_their_token(runtime: Runtime, weight_type: str, value: float) -> None:
    layer = make_layer(weight_type, 2, 64, 40)  # I below a multiple of 32: padded neurons must not leak
    x, index, weights = make_batch(3, 2, layer)
    x[1, 7] = value
    out = layer.forward(runtime, x, index, weights)
    assert not torch.isfinite(out[1]).any()
    assert relative_error(out[[0, 2]], layer.reference(x, index, weights)[[0, 2]]) <= TOLERANCE[weight_type]


def test_infinity_is_not_turned_into_nan_by_padding(runtime: Runtime) -> None:
    layer = make_layer("float32", 1, 32, 3, gated=False, spec=GateSpec("identity"))
    for part in ("up", "down"):
        layer.packed.pack(0, part, layer.weights[part][0].abs().numpy())
    x = torch.ones(1, 32)
    x[0, 0] = float("inf")
    out = layer.forward(runtime, x, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    assert torch.equal(out, torch.full((1, 32), float("inf")))


@pytest.mark.parametrize(("weight_type", "least_original_db", "least_seen_db"), [("int8", 34.0, 37.0), ("int4", 15.0, 37.0)])
def test_quantised_precision(runtime: Runtime, weight_type: str, least_original_db: float, least_seen_db: float) -> None:
    layer = make_layer(weight_type, 8, 512, 256)
    batch = make_batch(16, 4, layer)
    out = layer.forward(runtime, *batch)
    seen, original = layer.reference(*batch), layer.reference(*batch, original=True)
    assert sqnr_db(out, seen) >= least_seen_db
    assert sqnr_db(out, original) >= least_original_db
    # The error of quantised activations is small beside that of quantised weights.
    if weight_type == "int4":
        assert sqnr_db(out, original) >= sqnr_db(seen, original) - 0.5


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_thread_count_changes_no_bit(weight_type: str) -> None:
    layer = make_layer(weight_type, 6, 160, 96)
    for tokens in (1, 5, 80):
        batch = make_batch(tokens, 3, layer, torch.bfloat16)
        results = [layer.forward(Runtime(threads=threads), *batch) for threads in (1, 2, 3, 7)]
        assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize("tokens", [1, 30])
def test_instruction_sets_agree(runtimes: dict[str, Runtime], weight_type: str, tokens: int) -> None:
    layer = make_layer(weight_type, 4, 96, 64)
    batch = make_batch(tokens, 2, layer)
    oracle = layer.forward(runtimes["scalar"], *batch).double()
    for isa in runtimes:
        tiles = Runtime(threads=2, isa=isa, matrix_tokens=0)  # the matrix kernel does not round activations to 8 bits
        # An activation at the boundary between two codes may be rounded either way.
        limit = 5e-3 if weight_type.startswith("int") else 5e-7
        assert relative_error(layer.forward(tiles, *batch), oracle) <= limit, isa
