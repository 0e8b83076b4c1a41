"""The matrix kernels of prompts, on every instruction set of this machine that has some; AMX over emulated tiles: test_sanitizers.py."""

from __future__ import annotations

import pytest
import torch
from support.kernel_cases import ROUNDING, as_array, make_batch, make_stored_layer, relative_error
from support.kernel_cases import make_layer as make_plain_layer

from moegraft.cpu_backend import PackedLinear, Runtime
from moegraft.operators.weight_formats import FORMATS

TYPES = ("bfloat16", *(name for name, found in FORMATS.items() if found.scaled))
# Against float64 on the same weights. Weights of integers are expanded to 8 bits of mantissa, activations rounded to as many.
TOLERANCE = {"bfloat16": 4e-3} | dict.fromkeys(TYPES[1:], 6e-3)
# These round activations to 8 bits in groups of 32, as the tiles do.
TO_CODES = ("neon_i8mm", "neon_bf16")
# From one token on.
RUNTIMES = {isa: runtime for isa in Runtime.available_isas() if (runtime := Runtime(2, isa=isa, matrix_tokens=1)).matrix_tokens}
CASES = [(isa, weight_type) for isa, runtime in RUNTIMES.items() for weight_type in TYPES if weight_type in runtime.matrix_tokens]
every_kernel = pytest.mark.parametrize(("isa", "weight_type"), CASES)


def tolerance(isa: str, weight_type: str) -> float:
    return 2e-2 if isa in TO_CODES and weight_type != "bfloat16" else TOLERANCE[weight_type]


def make_layer(weight_type: str, num_experts: int, hidden: int, intermediate: int, **options):  # type: ignore[no-untyped-def]
    make = make_stored_layer if FORMATS[weight_type].stored else make_plain_layer
    return make(weight_type, num_experts, hidden, intermediate, **options)


@every_kernel
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "hidden", "intermediate"),
    [
        (1, 1, 1, 256, 256),  # one row of a tile
        (13, 1, 2, 256, 256),  # a tile partly filled
        (40, 2, 3, 512, 256),  # two and three tiles an expert
        (150, 2, 2, 512, 256),  # several passes, of unequal width
        (60, 1, 16, 256, 256),  # different numbers of tiles, some experts with no token
    ],
)
def test_matches_the_reference(isa: str, weight_type: str, tokens: int, top_k: int, experts: int, hidden: int, intermediate: int) -> None:
    layer = make_layer(weight_type, experts, hidden, intermediate)
    batch = make_batch(tokens, top_k, layer, torch.bfloat16)
    error = relative_error(layer.forward(RUNTIMES[isa], *batch), layer.reference(*batch))
    assert error <= tolerance(isa, weight_type) + ROUNDING[torch.bfloat16]


@every_kernel
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
def test_odd_sizes_and_biases(isa: str, weight_type: str, gated: bool) -> None:
    if FORMATS[weight_type].stored:
        pytest.skip("sizes are multiples of a block")
    for tokens, hidden, intermediate in ((70, 33, 17), (20, 72, 40), (9, 300, 72)):
        layer = make_layer(weight_type, 2, hidden, intermediate, gated=gated, bias=True)
        batch = make_batch(tokens, 1, layer, torch.bfloat16)
        error = relative_error(layer.forward(RUNTIMES[isa], *batch), layer.reference(*batch))
        assert error <= tolerance(isa, weight_type) + ROUNDING[torch.bfloat16]


@every_kernel
def test_a_token_does_not_depend_on_the_others(isa: str, weight_type: str) -> None:
    layer = make_layer(weight_type, 2, 256, 256)
    x, index, weights = make_batch(160, 1, layer, torch.bfloat16)
    index[:] = 0
    alone = torch.cat([layer.forward(RUNTIMES[isa], x[t : t + 1], index[t : t + 1], weights[t : t + 1]) for t in (0, 7, 31)])
    for count in (32, 49, 90, 160):  # one pass, several, and several segments
        order = torch.cat([torch.tensor([0, 7, 31]), torch.arange(32, 32 + count - 3) % 160])[torch.randperm(count)]
        together = layer.forward(RUNTIMES[isa], x[order], index[order].contiguous(), weights[order].contiguous())
        for row, token in zip(alone, (0, 7, 31), strict=True):
            assert all(torch.equal(together[place], row) for place in (order == token).nonzero().flatten())


@every_kernel
def test_values_that_are_not_finite_stay_in_their_token(isa: str, weight_type: str) -> None:
    layer = make_layer(weight_type, 1, 256, 256)
    x, index, weights = make_batch(40, 1, layer, torch.bfloat16)
    expected = layer.forward(RUNTIMES[isa], x, index, weights)
    x[11, 7], x[30, 9] = float("nan"), float("inf")
    out = layer.forward(RUNTIMES[isa], x, index, weights)
    kept = [t for t in range(40) if t not in (11, 30)]
    assert torch.equal(out[kept], expected[kept]) and not torch.isfinite(out[[11, 30]]).any()


@every_kernel
def test_each_segment_has_the_kernel_that_its_tokens_call_for(isa: str, weight_type: str) -> None:
    """Experts with few tokens keep the vector tiles beside others of the same call that have many."""
    tiles, matrix, mixed = (Runtime(2, isa=isa, matrix_tokens=tokens) for tokens in (0, 1, 6))
    layer = make_layer(weight_type, 3, 256, 256)
    x, index, weights = make_batch(20, 1, layer, torch.bfloat16)
    index[:] = torch.tensor([0] * 3 + [1] * 12 + [2] * 5)[:, None]
    outs = [layer.forward(runtime, x, index, weights) for runtime in (tiles, matrix, mixed)]
    few = (index != 1).flatten()
    assert torch.equal(outs[2][few], outs[0][few]) and torch.equal(outs[2][~few], outs[1][~few])


@pytest.mark.parametrize("weight_type", ["bfloat16+q4_k", "int8+q6_k", "q6_k+int8", "q4_k+q6_k"])
@pytest.mark.parametrize("isa", RUNTIMES)
def test_gate_and_down_of_different_types(isa: str, weight_type: str) -> None:
    """Where one of them has no matrix kernel, its activations are rounded to 8 bits."""
    layer = make_stored_layer(weight_type, 2, 256, 256, bias=True)
    batch = make_batch(50, 1, layer, torch.bfloat16)
    assert relative_error(layer.forward(RUNTIMES[isa], *batch), layer.reference(*batch)) <= 2e-2 + ROUNDING[torch.bfloat16]


@every_kernel
@pytest.mark.parametrize("threads", [1, 3])
def test_thread_count_changes_no_bit(isa: str, weight_type: str, threads: int) -> None:
    layer = make_layer(weight_type, 4, 256, 256)
    batch = make_batch(90, 2, layer, torch.bfloat16)
    other = Runtime(threads, isa=isa, matrix_tokens=1)
    assert torch.equal(layer.forward(RUNTIMES[isa], *batch), layer.forward(other, *batch))


@every_kernel
def test_linears(isa: str, weight_type: str) -> None:
    if FORMATS[weight_type].stored:
        pytest.skip("sizes are multiples of a block; test_stored_formats.py has them")
    for tokens, rows, cols in ((1, 45, 64), (30, 70, 2048 + 96), (230, 33, 4096 + 33)):  # one part of the columns, two, and three
        generator = torch.Generator().manual_seed(0)
        linear = PackedLinear(rows, cols, weight_type)
        linear.pack(torch.randn(rows, cols, generator=generator).numpy())
        bias = torch.randn(rows, generator=generator)
        linear.pack_bias(bias.numpy())
        x = torch.randn(tokens, cols, generator=generator).bfloat16()
        out = torch.full((tokens, rows), float("nan"), dtype=torch.bfloat16)
        RUNTIMES[isa].linear(linear, as_array(x), as_array(out))
        expected = x.double() @ torch.from_numpy(linear.unpack()).double().T + bias
        assert relative_error(out, expected) <= tolerance(isa, weight_type) + ROUNDING[torch.bfloat16]
