"""`cpu_norm`: root-mean-square norms by the C++ kernel.

What a family's root-mean-square norm computes, found by trying its module.

Shapes: N columns.
"""

from __future__ import annotations

import copy
import itertools
import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from moegraft.cpu_backend import NormSpec, Runtime
from moegraft.operators.base import InPlaceOperator
from moegraft.operators.context import InjectionContext
from moegraft.operators.cpu import describe, element_name, is_plain
from moegraft.operators.cpu_ops.in_place import as_it_was, compute_by

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


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CpuNormOptions:
    """`cpu_norm` has no options."""


@dataclass(frozen=True, slots=True)
class NormState:
    """What the calls of one norm share."""

    runtime: Runtime
    spec: NormSpec
    dtype: torch.dtype
    shape: torch.Size  # of the weight
    epsilon_name: str
    epsilon: float


class CpuNorm(InPlaceOperator):
    """A root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467) in one call where PyTorch makes eight.

    The module stays, with its weight. What it computes, whether weights are stored around 0 or 1 and where it rounds, is found by trying
    it on random rows. Tensors on a GPU, gradients, other dtypes or sizes than at load and graphs of `torch.compile` are the module's own,
    as before.
    """

    name = "cpu_norm"
    kind = "norm"
    options_type = CpuNormOptions
    summary = "root-mean-square norms by the C++ kernel, on the CPU"

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = runtime
        self._placed = False

    @classmethod
    def unsupported_reason(cls, module: nn.Module, options: CpuNormOptions) -> str | None:
        return None  # one that computes something of its own is left as it is, which a load finds out

    @classmethod
    def build(cls, module: nn.Module, options: CpuNormOptions, context: InjectionContext) -> Self:
        return cls(context.runtime)

    def on_model_loaded(self, model: PreTrainedModel, path: str) -> None:
        module = model.get_submodule(path)
        weight = module._parameters.get("weight")
        if weight is None or not is_plain(weight):
            logger.info("cpu_norm: %s has no weight on the CPU and stays as it is", path)
            return
        name = epsilon_name(module)
        spec = spec_of(module, self._runtime, weight.dtype, weight.numel())
        if name is None or spec is None:
            logger.info("cpu_norm: %s (%s) computes something of its own and stays as it is", path, type(module).__name__)
            return
        state = NormState(self._runtime, spec, weight.dtype, weight.shape, name, getattr(module, name))
        compute_by(module, _forward, state)
        self._placed = True

    def set_aside(self, module: nn.Module) -> AbstractContextManager[None]:
        return as_it_was(module)

    def placement(self) -> str:
        return f"norm: {self.name}, {f'the CPU ({describe(self._runtime)})' if self._placed else 'as before'}"


def _forward(module: nn.Module, state: NormState, x: Any) -> torch.Tensor | None:
    """What the kernel gives for `x`; None for what is left to the module."""
    weight = module._parameters["weight"]
    if (
        torch.compiler.is_compiling()
        or type(x) is not torch.Tensor
        or weight is None
        or not x.dtype == weight.dtype == state.dtype
        or not x.shape[-1:] == weight.shape == state.shape
        or not (is_plain(x) and is_plain(weight))
        or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        or module.__dict__.get(state.epsilon_name) != state.epsilon
    ):
        return None
    return normalised(state.runtime, state.spec, x, weight)
