"""`cpu_norm`: root-mean-square norms by the C++ kernel."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from moegraft.cpu_backend import NormSpec, Runtime
from moegraft.operators.base import BuildContext, InPlaceOperator
from moegraft.operators.cpu import describe, is_plain
from moegraft.operators.in_place import as_it_was, compute_by
from moegraft.operators.norm.form import epsilon_name, normalised, spec_of

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
    def refuse(cls, module: nn.Module, options: CpuNormOptions) -> str | None:
        return None  # one that computes something of its own is left as it is, which a load finds out

    @classmethod
    def build(cls, module: nn.Module, options: CpuNormOptions, context: BuildContext) -> Self:
        return cls(context.shared(Runtime, lambda: Runtime(threads=context.threads)))

    def ready(self, model: PreTrainedModel, path: str) -> None:
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
