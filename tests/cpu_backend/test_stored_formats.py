"""Formats of files: values to the last bit, and the forward pass against float64 on every instruction set of this machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.k_quants import KINDS, SAFETENSORS, any_blocks, dequantised, gguf
from support.kernel_cases import PARTS, ROUNDING, as_array, make_batch, relative_error, sqnr_db
from support.kernel_cases import make_stored_layer as make_layer

from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts, PackedLinear, Runtime
from moegraft.operators.weight_formats import FORMATS

TYPES = (*KINDS, *SAFETENSORS)
PAIRS = ("q4_k+q6_k", "mxfp4+q2_k")
TOLERANCE = 2e-2  # activations are rounded to 8 bits, as for int8 and int4
SHAPES = [
    # tokens, top_k, experts, hidden, intermediate
    (1, 2, 4, 256, 256),  # decode, one super-block
    (0, 1, 1, 256, 256),  # no token
    (5, 4, 4, 512, 256),  # K = E: every expert has every token
    (16, 1, 2, 256, 512),  # about one largest tile per expert
    (70, 3, 5, 512, 256),  # several tiles an expert, of unequal length
    (40, 1, 16, 256, 256),  # some experts with no token
]


@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("rows", [1, 32, 70])
def test_values_are_those_of_the_file_to_the_last_bit(weight_type: str, rows: int) -> None:
    for blocks in (any_blocks((rows, 768), weight_type, seed=rows), np.zeros_like(any_blocks((rows, 768), weight_type, seed=0))):
        linear = PackedLinear(rows, 768, weight_type)
        linear.pack_blocks(blocks)
        np.testing.assert_array_equal(linear.unpack(), dequantised(blocks, weight_type))


@pytest.mark.parametrize("weight_type", TYPES)
def test_every_bit_of_a_block_is_used(weight_type: str) -> None:
    """Blocks have scales of every kind: also subnormal, infinite and NaN."""
    cols = 256 * 64
    blocks = np.random.default_rng(5).integers(0, 256, any_blocks((3, cols), weight_type, 0).shape, np.uint8)
    linear = PackedLinear(3, cols, weight_type)
    linear.pack_blocks(blocks)
    with np.errstate(all="ignore"):
        expected = dequantised(blocks, weight_type)
    # An exponent is always finite, as are three bytes of a float.
    assert weight_type in ("mxfp4", "fp8", "nvfp4") or not np.isfinite(expected).all()
    np.testing.assert_array_equal(linear.unpack(), expected)


@pytest.mark.parametrize("weight_type", (*TYPES, *PAIRS))
def test_experts_hold_the_values_of_the_file(weight_type: str) -> None:
    layer = make_layer(weight_type, 2, 256, 512, random=True)
    for part in PARTS:
        assert torch.equal(layer.seen[part], layer.weights[part]), part


@pytest.mark.parametrize(
    ("weight_type", "shape"), [(pair, shape) for pair in PAIRS for shape in SHAPES] + [(kind, SHAPES[0]) for kind in TYPES], ids=str
)
def test_matches_the_reference(runtime: Runtime, weight_type: str, shape: tuple[int, ...]) -> None:
    tokens, top_k, num_experts, hidden, intermediate = shape
    layer = make_layer(weight_type, num_experts, hidden, intermediate)
    batch = make_batch(tokens, top_k, layer)
    assert relative_error(layer.forward(runtime, *batch), layer.reference(*batch)) <= TOLERANCE


@pytest.mark.parametrize(
    ("weight_type", "hidden", "intermediate"),
    [
        ("q4_k+int8", 256, 40),  # I is no multiple of 256, where files use another type; gate and up rows do not fill a block
        ("q6_k+int4", 512, 72),
        ("int8+q6_k", 72, 256),  # rows of down do not fill a block
        ("bfloat16+q4_k", 33, 256),
        ("q6_k+float32", 256, 17),
        ("q6_k+q4_k", 256, 256),
        ("mxfp4", 96, 160),  # blocks of 32, an odd number of them
        ("iq4_nl+int8", 32, 40),
        ("int8+q5_1", 72, 32),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gate_and_down_of_different_types(runtime: Runtime, weight_type: str, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
    layer = make_layer(weight_type, 3, hidden, intermediate, bias=True)
    batch = make_batch(19, 2, layer, dtype)
    assert relative_error(layer.forward(runtime, *batch), layer.reference(*batch)) <= TOLERANCE + ROUNDING[dtype]


def test_ungated_experts_with_biases(runtime: Runtime) -> None:
    layer = make_layer("q4_k+q6_k", 2, 256, 256, gated=False, bias=True)
    batch = make_batch(5, 2, layer)
    assert relative_error(layer.forward(runtime, *batch), layer.reference(*batch)) <= TOLERANCE


@pytest.mark.parametrize(
    ("weight_type", "tokens", "dtype"),
    [("q4_k", tokens, dtype) for tokens in (0, 1, 5, 16, 70) for dtype in ROUNDING] + [(kind, 19, torch.bfloat16) for kind in TYPES],
    ids=str,
)
def test_linears_match_float64(runtime: Runtime, weight_type: str, tokens: int, dtype: torch.dtype) -> None:
    blocks = any_blocks((45, 512), weight_type, seed=2)
    linear = PackedLinear(45, 512, weight_type)
    linear.pack_blocks(blocks)
    bias = torch.randn(45, generator=torch.Generator().manual_seed(1))
    linear.pack_bias(bias.numpy())
    x = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = torch.full((tokens, 45), float("nan"), dtype=dtype)
    runtime.linear(linear, as_array(x), as_array(out))
    expected = x.double() @ torch.from_numpy(dequantised(blocks, weight_type)).double().T + bias
    assert relative_error(out, expected) <= TOLERANCE + ROUNDING[dtype]


@pytest.mark.parametrize("weight_type", [name for name in TYPES if name not in ("fp8", "fp8_rows")])
def test_many_tokens_have_the_results_of_one_to_the_last_bit(runtimes: dict[str, Runtime], weight_type: str) -> None:
    """FP8 has another kernel for many tokens."""
    linear = PackedLinear(45, 768, weight_type)
    linear.pack_blocks(any_blocks((45, 768), weight_type, seed=4))
    x = torch.randn(41, 768, generator=torch.Generator().manual_seed(0))
    for isa in runtimes:
        tiles, out, single = Runtime(threads=2, isa=isa, matrix_tokens=0), torch.empty(41, 45), torch.empty(1, 45)
        tiles.linear(linear, as_array(x), as_array(out))
        for token in (0, 17, 40):
            tiles.linear(linear, as_array(x[token : token + 1]), as_array(single))
            assert torch.equal(single[0], out[token]), isa


@pytest.mark.parametrize("weight_type", ["fp8", "fp8_rows"])
def test_float8_keeps_precision_of_small_and_large_activations(runtime: Runtime, weight_type: str) -> None:
    """Vector kernels form its products far below their size."""
    blocks = any_blocks((33, 512), weight_type, seed=5)
    linear = PackedLinear(33, 512, weight_type)
    linear.pack_blocks(blocks)
    weights = torch.from_numpy(dequantised(blocks, weight_type)).double()
    for tokens in (1, 3):
        x = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(0))
        for size in (1e-9, 1e9):
            out = torch.empty(tokens, 33)
            runtime.linear(linear, as_array(size * x), as_array(out))
            assert relative_error(out, (size * x).double() @ weights.T) <= 1e-5


@pytest.mark.parametrize("weight_type", TYPES)
def test_scales_of_zero_and_nan_stay_in_their_rows(runtime: Runtime, weight_type: str) -> None:
    form = FORMATS[weight_type].scale_form
    if form not in ("float16", "float32"):
        pytest.skip("an exponent is neither, and four rows of FP8 share a scale")
    size = 2 if form == "float16" else 4
    blocks = any_blocks((40, 512), weight_type, seed=3)
    in_blocks = blocks.reshape(40, -1, FORMATS[weight_type].block_bytes)
    for offset, _ in FORMATS[weight_type].unit_scales:
        in_blocks[33, :, offset : offset + size] = 0
        in_blocks[5, 0, offset : offset + size] = np.array([np.nan], form).view(np.uint8)
    linear = PackedLinear(40, 512, weight_type)
    linear.pack_blocks(blocks)
    for tokens in (1, 20):
        x, out = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(0)), torch.empty(tokens, 40)
        runtime.linear(linear, as_array(x), as_array(out))
        expected = x.double() @ torch.from_numpy(dequantised(blocks, weight_type)).double().T
        others = [row for row in range(40) if row != 5]
        assert out[:, 5].isnan().all() and not out[:, 33].any()
        assert relative_error(out[:, others], expected[:, others]) <= TOLERANCE


@pytest.mark.parametrize("weight_type", (*TYPES, *PAIRS))
def test_precision_equals_that_of_int8_and_int4(runtime: Runtime, weight_type: str) -> None:
    """Only activations are rounded, as with int8 and int4."""
    layer = make_layer(weight_type, 4, 512, 256, random=True)
    batch = make_batch(8, 2, layer)
    assert sqnr_db(layer.forward(runtime, *batch), layer.reference(*batch)) >= 37.0


@pytest.mark.parametrize("weight_type", PAIRS)
def test_padded_slots_are_skipped(runtime: Runtime, weight_type: str) -> None:
    layer = make_layer(weight_type, 3, 256, 256)
    x, index, weights = make_batch(5, 2, layer)
    index[0, 1], index[2, 0], index[3] = -1, 3, -1
    kept = (index >= 0) & (index < 3)
    expected = layer.reference(x, index.clamp(0, 2), weights * kept)
    out = layer.forward(runtime, x, index, weights)
    assert relative_error(out, expected) <= TOLERANCE
    assert not out[3].any()


@pytest.mark.parametrize("weight_type", PAIRS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_stay_in_their_token(runtime: Runtime, weight_type: str, value: float) -> None:
    layer = make_layer(weight_type, 2, 256, 256)
    x, index, weights = make_batch(3, 2, layer)
    x[1, 7] = value
    out = layer.forward(runtime, x, index, weights)
    assert not torch.isfinite(out[1]).any()
    assert relative_error(out[[0, 2]], layer.reference(x, index, weights)[[0, 2]]) <= TOLERANCE


@pytest.mark.parametrize("weight_type", PAIRS)
def test_thread_count_changes_no_bit(weight_type: str) -> None:
    layer = make_layer(weight_type, 6, 256, 256)
    for tokens in (1, 5, 80):
        batch = make_batch(tokens, 3, layer, torch.bfloat16)
        results = [layer.forward(Runtime(threads=threads), *batch) for threads in (1, 3)]
        assert torch.equal(*results)


@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("tokens", [1, 11])
def test_instruction_sets_agree(runtimes: dict[str, Runtime], weight_type: str, tokens: int) -> None:
    layer = make_layer(weight_type, 2, 512, 256, random=True)
    batch = make_batch(tokens, 1, layer)
    oracle = layer.forward(runtimes["scalar"], *batch).double()
    for isa in runtimes:
        tiles = Runtime(threads=2, isa=isa, matrix_tokens=0)  # the matrix kernel does not round activations to 8 bits
        # An activation at the boundary between two codes may be rounded either way.
        assert relative_error(layer.forward(tiles, *batch), oracle) <= 5e-3, isa


def test_packed_bytes_per_expert() -> None:
    shape, matrix = ExpertsShape(128, 2048, 768), 2048 * 768
    assert PackedExperts.expert_bytes_for(shape, "q4_k") == 3 * matrix * 144 // 256
    assert PackedExperts.expert_bytes_for(shape, "q6_k") == 3 * matrix * 210 // 256
    assert PackedExperts.expert_bytes_for(shape, "q4_k+q6_k") == matrix * (2 * 144 + 210) // 256
    assert PackedLinear.nbytes_for(64, 512, "q6_k") == 64 * 420
    for name in KINDS:
        weights, size = gguf.GGML_QUANT_SIZES[KINDS[name]]
        assert (weights, size) == (FORMATS[name].block_weights, FORMATS[name].block_bytes)
        assert PackedLinear.nbytes_for(64, 1024, name) == 64 * 1024 // weights * size


def test_a_buffer_serves_another_object_without_a_copy(runtimes: dict[str, Runtime]) -> None:
    layer = make_layer("q4_k+q6_k", 2, 256, 256)
    assert layer.packed.weight_type == "q4_k+q6_k"
    assert [layer.packed.weight_type_of(part) for part in PARTS] == ["q4_k", "q4_k", "q6_k"]
    view = layer.packed.buffer[:]
    view.flags.writeable = False
    batch = make_batch(3, 2, layer)
    first = layer.forward(runtimes["scalar"], *batch)
    layer.packed = PackedExperts(layer.shape, layer.spec, "q4_k+q6_k", view)
    assert torch.equal(layer.forward(runtimes["scalar"], *batch), first)


SHAPE = ExpertsShape(2, 256, 512)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda p: PackedExperts(ExpertsShape(1, 256, 96), GateSpec(), "q4_k"),
            ValueError,
            "q4_k needs a multiple of 256 columns, found 96",
        ),
        (
            lambda p: PackedExperts.expert_bytes_for(ExpertsShape(1, 64, 256), "q6_k"),
            ValueError,
            "q6_k needs a multiple of 256 columns, found 64",
        ),
        (lambda p: PackedExperts(SHAPE, GateSpec(), "q4_k", sparse=True), ValueError, "the sparse layout does not support q4_k; use int8"),
        (
            lambda p: PackedExperts(SHAPE, GateSpec(), "int8+int4", sparse=True),
            ValueError,
            r"the sparse layout does not support int8\+int4",
        ),
        (lambda p: PackedExperts(SHAPE, GateSpec(), "q4_k+q9_k"), ValueError, "unknown weight type 'q9_k'"),
        (lambda p: PackedLinear(8, 128, "q6_k"), ValueError, "q6_k needs a multiple of 256 columns, found 128"),
        (lambda p: p.pack(0, "gate", np.zeros((512, 256), np.float32)), ValueError, "pack: the weights are q4_k; use pack_blocks"),
        (
            lambda p: p.pack_quantized(0, "gate", np.zeros((512, 256), np.int8), np.zeros((512, 8), np.float16)),
            ValueError,
            "the weights are q4_k; use pack_blocks",
        ),
        (lambda p: p.pack_blocks(0, "down", np.zeros((256, 144), np.uint8)), ValueError, "the weights are int8; use pack or pack_q"),
        (
            lambda p: p.pack_blocks(0, "up", np.zeros((512, 210), np.uint8)),
            ValueError,
            "blocks: expected 144 bytes in each row for 256 columns of q4_k, found 210",
        ),
        (
            lambda p: p.pack_blocks(0, "up", np.zeros((511, 144), np.uint8)),
            ValueError,
            r"expected shape \(512, 256\), found \(511, 256\)",
        ),
        (lambda p: p.pack_blocks(0, "up", np.zeros((512, 144), np.int8)), TypeError, "expected dtype uint8, found int8"),
        (lambda p: p.weight_type_of("gates"), ValueError, "unknown part"),
    ],
)
def test_wrong_arguments_are_refused(call, error: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        call(PackedExperts(SHAPE, GateSpec(), "q4_k+int8"))
