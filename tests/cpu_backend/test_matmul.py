"""Products with weights read in place against float64, on every instruction set of this machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.kernel_cases import as_array, relative_error

from moegraft.cpu_backend import Runtime

ROUNDING = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
SHAPES = [
    (16, 1, 128, 512),  # queries of 16 heads to latents
    (3, 8, 512, 33),  # latents to values, as many rows as the kernel takes at once
    (2, 11, 7, 5),  # more than that; multiples of no vector
    (1, 1, 1, 1),
    (2, 3, 40, 0),
]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(runtime: Runtime, shape: tuple[int, int, int, int], transposed: bool, dtype: torch.dtype) -> None:
    batch, rows, inner, cols = shape
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, batch, inner + 3, generator=generator).to(dtype).transpose(0, 1)[..., :inner]  # strides of a view
    weight = (
        torch.randn(batch, cols + 2, inner, generator=generator) if transposed else torch.randn(batch, inner + 2, cols, generator=generator)
    )
    b = weight.to(dtype)[:, :cols].mT if transposed else weight.to(dtype)[:, :inner]
    out = torch.full((rows, batch, cols), float("nan"), dtype=dtype).transpose(0, 1)
    runtime.matmul(as_array(a), as_array(b), as_array(out))
    if cols:
        assert relative_error(out, a.double() @ b.double()) <= ROUNDING[dtype]


def test_refusals(runtime: Runtime) -> None:
    def refused(message: str, error: type[Exception] = ValueError, **changes: object) -> None:
        given = {"a": np.zeros((2, 3, 4), np.float32), "b": np.zeros((2, 4, 5), np.float32), "out": np.zeros((2, 3, 5), np.float32)}
        with pytest.raises(error, match=message):
            runtime.matmul(**{**given, **changes})

    refused("do not fit together", b=np.zeros((2, 3, 5), np.float32))
    refused("expected 3 dimensions", a=np.zeros((3, 4), np.float32))
    refused("differ in dtype", TypeError, b=np.zeros((2, 4, 5), np.float16))
    refused("rows of a and out must be contiguous", a=np.zeros((2, 4, 3), np.float32).transpose(0, 2, 1))
    refused("contiguous in no dimension", b=np.zeros((2, 4, 5, 2), np.float32)[..., 0])
