"""What a family's root-mean-square norm computes, found by trying its module.

Shapes: N columns.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import nn

from moegraft.cpu_backend import NormSpec, Runtime
from moegraft.operators.cpu import element_name

_EPSILONS = ("variance_epsilon", "eps", "epsilon")  # the attribute that holds it, by family
_TOLERANCE = 1e-5  # relative, in float32
_ROUNDED_OTHERWISE = 0.02  # share of 16-bit results that may differ by a last bit, as sums in another order make them


def normalised(runtime: Runtime, spec: NormSpec, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """The norm of every row of `x` (..., N), contiguous and on the CPU, in the dtype of `x` and `weight` (N,)."""
    out = torch.empty_like(x)
    runtime.norm_at(spec, x.data_ptr(), 0 if weight is None else weight.data_ptr(), x.numel() // x.shape[-1], out.data_ptr())
    return out


def epsilon_name(module: nn.Module) -> str | None:
    """The attribute that says what the norm adds to the mean of squares."""
    return next((name for name in _EPSILONS if isinstance(getattr(module, name, None), int | float)), None)


def spec_of(module: nn.Module, runtime: Runtime, dtype: torch.dtype, columns: int) -> NormSpec | None:
    """The kernel's form of `module` for rows of `columns` in `dtype`, or None where none gives what the module gives on random rows."""
    name = epsilon_name(module)
    if name is None:
        return None
    epsilon = float(getattr(module, name))
    generator = torch.Generator().manual_seed(0)
    # Small rows among them, on which epsilon tells.
    rows = torch.randn(8, columns, generator=generator) * torch.logspace(-4, 1, 8)[:, None]
    weight = torch.randn(columns, generator=generator)
    for offset, rounds_first in itertools.product((0.0, 1.0), (True, False)):
        if _gives(module, runtime, (epsilon, offset, rounds_first), (rows, weight)) and (
            dtype == torch.float32 or _gives(module, runtime, (epsilon, offset, rounds_first), (rows.to(dtype), weight.to(dtype)))
        ):
            return NormSpec(element_name(dtype), columns, epsilon, offset, rounds_first)
    return None


def _gives(module: nn.Module, runtime: Runtime, form: tuple[float, float, bool], probe: tuple[torch.Tensor, torch.Tensor]) -> bool:
    rows, weight = probe
    given = weight if module._parameters.get("weight") is not None else None
    try:
        with torch.no_grad():
            expected = type(module).forward(_stand_in(module, given), rows)  # no hook is told
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False
    if not isinstance(expected, torch.Tensor) or expected.shape != rows.shape or expected.dtype != rows.dtype:
        return False
    found = normalised(runtime, NormSpec(element_name(rows.dtype), rows.shape[-1], *form), rows, given)
    if rows.dtype == torch.float32:
        return float((found - expected).norm()) <= _TOLERANCE * float(expected.norm())
    same = float((found == expected).float().mean())
    return same >= 1 - _ROUNDED_OTHERWISE and torch.allclose(found.float(), expected.float(), rtol=0.02)


def _stand_in(module: nn.Module, weight: torch.Tensor | None) -> Any:
    """The module with another weight; the module itself, which may have no weights yet, stays as it is."""
    made = copy.copy(module)
    made.__dict__ = {**module.__dict__, "_parameters": dict(module._parameters)}
    if weight is not None:
        made._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    return made
