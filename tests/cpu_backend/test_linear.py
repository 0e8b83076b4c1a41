"""Packed linears against float64, on every instruction set of this machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.kernel_cases import ROUNDING, TOLERANCE, WEIGHT_TYPES, as_array, relative_error

from moegraft.cpu_backend import PackedLinear, Runtime

SHAPES = [
    (1, 64, 64),  # decode
    (3, 33, 70),  # sizes that are multiples of no block
    (25, 96, 160),  # three tiles, of unequal length
    (0, 32, 32),  # no token
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(runtime: Runtime, weight_type: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    tokens, rows, cols = shape
    generator = torch.Generator().manual_seed(0)
    linear = PackedLinear(rows, cols, weight_type)
    linear.pack(torch.randn(rows, cols, generator=generator).numpy())
    bias = torch.randn(rows, generator=generator)
    linear.pack_bias(bias.numpy())
    x = torch.randn(tokens, cols, generator=generator).to(dtype)
    out = torch.full((tokens, rows), float("nan"), dtype=dtype)
    runtime.linear(linear, as_array(x), as_array(out))
    expected = x.double() @ torch.from_numpy(linear.unpack()).double().T + bias
    assert relative_error(out, expected) <= TOLERANCE[weight_type] + ROUNDING[dtype]


def test_wrong_arguments_are_refused(runtime: Runtime) -> None:
    linear = PackedLinear(8, 16, "float32")
    x, out = np.zeros((2, 16), np.float32), np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match="before its weights were packed"):
        runtime.linear(linear, x, out)
    linear.pack(np.zeros((8, 16), np.float32))
    with pytest.raises(ValueError, match=r"out: expected shape \(2, 8\), found \(2, 16\)"):
        runtime.linear(linear, x, x.copy())
    with pytest.raises(ValueError, match=r"x: expected shape \(..., 16\), found \(2, 8\)"):
        runtime.linear(linear, out, out)
    with pytest.raises(TypeError, match="out: expected dtype float32, found uint16"):
        runtime.linear(linear, x, np.zeros((2, 8), np.uint16))


def test_tensors_of_any_rank_are_read_in_place(runtime: Runtime) -> None:
    linear = PackedLinear(8, 16, "float32")
    linear.pack(torch.randn(8, 16).numpy())
    x = torch.nn.Parameter(torch.randn(2, 3, 16).bfloat16())  # a subclass that requires a gradient
    out, expected = torch.empty(2, 3, 8, dtype=torch.bfloat16), torch.empty(6, 8, dtype=torch.bfloat16)
    runtime.linear(linear, x, out)
    runtime.linear(linear, as_array(x.detach().view(6, 16)), as_array(expected))
    assert torch.equal(out.view(6, 8), expected)
    runtime.linear(linear, x[1], out[0])  # views of a larger tensor
    assert torch.equal(out[0], expected[3:])


@pytest.mark.parametrize(
    ("x", "out", "error", "message"),
    [
        (torch.zeros(2, 32)[:, ::2], torch.zeros(2, 8), ValueError, "x is not C-contiguous"),
        (torch.zeros(2, 16), torch.zeros(8, 2).T, ValueError, "out is not C-contiguous"),
        (torch.zeros(2, 16, dtype=torch.float64), torch.zeros(2, 8), TypeError, "x: expected dtype float32, float16 or bfloat16"),
        (torch.zeros(2, 16).half(), torch.zeros(2, 8), TypeError, "out: expected dtype float16, found float32"),
        (torch.zeros(3, 2, 16), torch.zeros(2, 3, 8), ValueError, r"out: expected shape \(3, 2, 8\), found \(2, 3, 8\)"),
        (torch.zeros([1] * 7), torch.zeros(1, 8), ValueError, "x: expected at most 6 dimensions, found 7"),
        (torch.tensor(1.0), torch.zeros(1, 8), ValueError, r"x: expected shape \(..., 16\), found \(\)"),
        ([1.0], torch.zeros(1, 8), TypeError, "x: expected a torch.Tensor or numpy.ndarray, found list"),
        (np.zeros((2, 16), np.float32), np.broadcast_to(np.float32(0), (2, 8)), ValueError, "out is"),
    ],
)
def test_unsuitable_tensors_are_refused(runtime: Runtime, x: object, out: object, error: type[Exception], message: str) -> None:
    linear = PackedLinear(8, 16, "float32")
    linear.pack(np.zeros((8, 16), np.float32))
    with pytest.raises(error, match=message):
        runtime.linear(linear, x, out)  # type: ignore[arg-type]
