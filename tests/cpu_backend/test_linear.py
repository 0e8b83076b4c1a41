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


def test_refusals(runtime: Runtime) -> None:
    linear = PackedLinear(8, 16, "float32")
    x, out = np.zeros((2, 16), np.float32), np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match="before its weights were packed"):
        runtime.linear(linear, x, out)
    linear.pack(np.zeros((8, 16), np.float32))
    with pytest.raises(ValueError, match=r"out has shape \(2, 16\) where \(2, 8\)"):
        runtime.linear(linear, x, x.copy())
    with pytest.raises(ValueError, match=r"x has shape \(2, 8\) where \(tokens, 16\)"):
        runtime.linear(linear, out, out)
    with pytest.raises(TypeError, match="out has dtype uint16 where the input's, float32"):
        runtime.linear(linear, x, np.zeros((2, 8), np.uint16))
