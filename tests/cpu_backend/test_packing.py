"""Packing: round trips, GGUF's block semantics, external buffers and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.kernel_cases import make_batch, make_layer

from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts, PackedLinear, Runtime

SHAPE = ExpertsShape(2, 72, 40)  # no multiple of a block


def q8_0(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    groups = values.reshape(len(values), -1, 32)
    scale = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    scaled = groups * inverse
    away = np.floor(np.abs(scaled).astype(np.float64) + 0.5)  # in float32, the number below 0.5 would become 1
    return (np.sign(scaled) * away).astype(np.int8).reshape(values.shape), scale[..., 0].astype(np.float16)


def q4_0(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    groups = values.reshape(len(values), -1, 32)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
    scale = extreme / np.float32(-8)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    codes = np.minimum(15, (groups * inverse + np.float32(8.5)).astype(np.int8)) - 8
    return codes.astype(np.int8).reshape(values.shape), scale[..., 0].astype(np.float16)


@pytest.mark.parametrize(("weight_type", "dtype"), [("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_floats_round_trip_exactly(weight_type: str, dtype: torch.dtype) -> None:
    packed = PackedExperts(SHAPE, GateSpec(), weight_type)
    for part, size in (("gate", (40, 72)), ("up", (40, 72)), ("down", (72, 40))):
        matrix = torch.randn(size).to(dtype)
        matrix[0, 0], matrix[1, 1] = 1e-6, -0.0  # a float16 subnormal, a negative zero
        packed.pack(1, part, matrix.view(torch.uint16).numpy() if dtype == torch.bfloat16 else matrix.numpy())
        assert torch.equal(torch.from_numpy(packed.unpack(1, part)), matrix.float())


@pytest.mark.parametrize("weight_type", ["float16", "bfloat16"])
def test_rounding_is_to_nearest_even_as_in_torch(weight_type: str) -> None:
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(64, 64, generator=generator) * 10.0 ** torch.randint(-9, 6, (64, 64), generator=generator)
    matrix[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38])
    linear = PackedLinear(64, 64, weight_type)
    linear.pack(matrix.numpy())
    expected = matrix.to(getattr(torch, weight_type)).float()
    assert torch.equal(torch.from_numpy(linear.unpack()).nan_to_num(1.5), expected.nan_to_num(1.5))


@pytest.mark.parametrize(("weight_type", "quantise"), [("int8", q8_0), ("int4", q4_0)])
def test_quantisation_equals_ggufs(weight_type: str, quantise) -> None:  # type: ignore[no-untyped-def]
    matrix = np.random.default_rng(0).standard_normal((48, 96), dtype=np.float32)
    matrix[3, :32] = 0.0  # a group of zeros has scale zero
    extreme = np.float32({"int8": 127, "int4": -8}[weight_type])  # of a group whose scale is 1: ties, and the numbers beside them
    ties = np.linspace(-abs(extreme) + 0.5, abs(extreme) - 1.5, 31).round() + np.float32(0.5)
    for group, values in enumerate((ties, np.nextafter(ties, 0), np.nextafter(ties, 2 * ties))):
        matrix[4, 32 * group : 32 * group + 32] = np.append(values, extreme)
    matrix[4, [0, 32, 33]] = np.nextafter(np.float32([0.5, 0.5, -0.5]), np.float32([1, 0, 0]))
    codes, scales = quantise(matrix)
    ours, theirs = PackedLinear(48, 96, weight_type), PackedLinear(48, 96, weight_type)
    ours.pack(matrix)
    theirs.pack_quantized(codes, scales)
    expected = (codes.reshape(48, 3, 32) * scales[..., None].astype(np.float32)).reshape(48, 96)
    np.testing.assert_array_equal(theirs.unpack(), expected)
    np.testing.assert_array_equal(ours.unpack(), expected)


@pytest.mark.parametrize(("weight_type", "low"), [("int8", -128), ("int4", -8)])
def test_every_code_round_trips(weight_type: str, low: int) -> None:
    codes = np.random.default_rng(1).integers(low, -low, (32, 64), dtype=np.int8)
    scales = np.full((32, 2), 0.5, np.float16)
    linear = PackedLinear(32, 64, weight_type)
    linear.pack_quantized(codes, scales)
    np.testing.assert_array_equal(linear.unpack(), codes * np.float32(0.5))


@pytest.mark.parametrize("weight_type", ["int8", "int4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_stay_not_finite(weight_type: str, bad: float) -> None:
    matrix = np.ones((4, 64), np.float32)
    matrix[2, 40] = bad
    linear = PackedLinear(4, 64, weight_type)
    linear.pack(matrix)
    finite = np.isfinite(linear.unpack())
    assert not finite[2, 32:].any()
    assert finite[:2].all()
    assert finite[2, :32].all()


def test_packed_bytes_per_expert() -> None:
    shape = ExpertsShape(128, 2048, 768)
    weights = 3 * 2048 * 768
    assert PackedExperts.expert_bytes_for(shape, "bfloat16") == weights * 2
    assert PackedExperts.expert_bytes_for(shape, "int8") == weights * 34 // 32
    assert PackedExperts.expert_bytes_for(shape, "int4") == weights * 18 // 32
    packed = PackedExperts(SHAPE, GateSpec(), "int4")
    assert packed.nbytes == 2 * packed.expert_bytes == packed.buffer.nbytes
    assert packed.expert_bytes % 64 == 0
    assert packed.buffer.ctypes.data % 64 == 0


def test_a_buffer_serves_another_object_without_a_copy(runtimes: dict[str, Runtime]) -> None:
    layer = make_layer("int8", bias=True)
    view = layer.packed.buffer[:]
    view.flags.writeable = False
    again = PackedExperts(layer.shape, layer.spec, "int8", view)
    assert again.weights_ready
    layer_again = make_layer("int8", bias=True)
    layer_again.packed = again
    batch = make_batch(3, 2, layer)
    runtime = runtimes["scalar"]
    assert torch.equal(layer.forward(runtime, *batch), layer_again.forward(runtime, *batch))
    with pytest.raises(ValueError, match="read-only"):
        again.pack(0, "up", np.zeros((64, 64), np.float32))


def test_packed_mask_shows_missing_parts(runtimes: dict[str, Runtime]) -> None:
    packed = PackedExperts(ExpertsShape(2, 32, 32, bias=True), GateSpec(), "float32")
    packed.pack(0, "gate", np.zeros((32, 32), np.float32))
    packed.pack_bias(0, "down", np.zeros(32, np.float32))
    assert packed.packed_mask.tolist() == [0b100001, 0]
    assert not packed.weights_ready
    out = np.empty((1, 32), np.float32)
    with pytest.raises(ValueError, match="expert 0 is used before its up, down, gate bias, up bias was packed"):
        runtimes["scalar"].forward(packed, out, np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32), out.copy())


MATRIX = np.zeros((40, 72), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: p.pack(2, "gate", MATRIX), ValueError, "expert 2 is out of range: there are 2"),
        (lambda p: p.pack(-1, "gate", MATRIX), ValueError, "expert -1 is out of range"),
        (lambda p: p.pack(0, "gates", MATRIX), ValueError, "unknown part 'gates'; known are gate, up, down"),
        (lambda p: p.pack(0, "down", MATRIX), ValueError, r"part 'down': expected shape \(72, 40\), found \(40, 72\)"),
        (lambda p: p.pack(0, "gate", MATRIX[0]), ValueError, "expected 2 dimensions"),
        (lambda p: p.pack(0, "gate", np.zeros((72, 40), np.float32).T), ValueError, "not C-contiguous"),
        (lambda p: p.pack(0, "gate", MATRIX.astype(np.float64)), TypeError, "expected dtype float32, .*, found float64"),
        (lambda p: p.pack(0, "gate", MATRIX.astype(">f4")), TypeError, "found >f4"),
        (lambda p: p.pack(0, "gate", MATRIX.tolist()), TypeError, r"pack\(\): argument 'array': expected a numpy.ndarray, found list"),
        (lambda p: p.pack_bias(0, "gate", np.zeros(40, np.float32)), ValueError, "no biases"),
        (
            lambda p: p.pack_quantized(0, "gate", np.zeros((40, 72), np.int8), np.zeros((40, 2), np.float16)),
            ValueError,
            "multiple of 32",
        ),
        (lambda p: PackedExperts(SHAPE, GateSpec(), "int3"), ValueError, "unknown weight type 'int3'; known are float32"),
        (
            lambda p: PackedExperts(SHAPE, GateSpec(), "int8", np.zeros(64, np.uint8)),
            ValueError,
            r"expected a buffer of \d+ bytes, found 64",
        ),
        (lambda p: PackedExperts(SHAPE, GateSpec(), "int8", [0]), TypeError, "numpy array of uint8"),
        (lambda p: p.unpack(0, "up"), ValueError, "part 'up' of expert 0 was never packed"),
        (lambda p: GateSpec("swish"), ValueError, "unknown activation 'swish'"),
        (lambda p: GateSpec(up_limit=-1.0), ValueError, "up_limit"),
        (lambda p: ExpertsShape(0, 1, 1), ValueError, "at least 1"),
        (lambda p: PackedLinear(1, 0, "int8"), ValueError, "at least 1"),
    ],
)
def test_wrong_arguments_are_refused(call, error: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        call(PackedExperts(SHAPE, GateSpec(), "float32"))


def test_wrong_codes_are_refused() -> None:
    linear = PackedLinear(2, 64, "int4")
    with pytest.raises(ValueError, match="code 8 is not an int4"):
        linear.pack_quantized(np.full((2, 64), 8, np.int8), np.ones((2, 2), np.float16))
    with pytest.raises(ValueError, match=r"scales: expected shape \(2, 2\), one for each 32 columns of codes, found \(2, 3\)"):
        linear.pack_quantized(np.zeros((2, 64), np.int8), np.ones((2, 3), np.float16))
    with pytest.raises(ValueError, match="the weights are float32; use pack"):
        PackedLinear(2, 64, "float32").pack_quantized(np.zeros((2, 64), np.int8), np.ones((2, 2), np.float16))


def test_ungated_experts_have_no_gate() -> None:
    packed = PackedExperts(ExpertsShape(1, 32, 32, gated=False), GateSpec("relu2"), "float32")
    with pytest.raises(ValueError, match="ungated: there is no part 'gate'"):
        packed.pack(0, "gate", np.zeros((32, 32), np.float32))


def test_specs_are_immutable_and_hashable() -> None:
    assert GateSpec("gelu", alpha=1.702) == GateSpec("gelu", alpha=1.702) != GateSpec("gelu")
    assert hash(SHAPE) == hash(ExpertsShape(2, 72, 40))
    assert GateSpec("gelu", alpha=1.702).alpha == 1.702
    assert SHAPE != 3
    with pytest.raises(AttributeError):
        SHAPE.hidden = 3  # type: ignore[misc]
