"""`cpu_norm`: root-mean-square norms by the C++ kernel."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import MethodType
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from moegraft.cpu_backend import NormSpec, Runtime
from moegraft.operators.base import BuildContext, InPlaceOperator
from moegraft.operators.cpu import describe, is_plain
from moegraft.operators.norm.form import normalised, spec_of

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
    columns: int


class CpuNorm(InPlaceOperator):
    """A root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467) in one call where PyTorch makes eight.

    The module stays, with its weight. What it computes, whether weights are stored around 0 or 1 and where it rounds, is found by trying
    it on random rows. Tensors on a GPU, gradients, other dtypes and graphs of `torch.compile` are the module's own, as before.
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
        columns = weight.numel()
        spec = spec_of(module, self._runtime, weight.dtype, columns)
        if spec is None:
            logger.info("cpu_norm: %s (%s) computes something of its own and stays as it is", path, type(module).__name__)
            return
        module.__dict__["_moegraft_norm"] = NormState(self._runtime, spec, weight.dtype, columns)
        module.forward = MethodType(_forward, module)
        self._placed = True

    def placement(self) -> str:
        return f"norm: {self.name}, {f'the CPU ({describe(self._runtime)})' if self._placed else 'as before'}"


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`forward` of a module that has its norm from the kernel."""
    if not torch.compiler.is_compiling() and len(args) == 1 and not kwargs:
        state: NormState = self._moegraft_norm  # type: ignore[assignment] # `ready` put it there
        x, weight = args[0], self._parameters["weight"]
        if (
            type(x) is torch.Tensor
            and x.dtype == state.dtype == weight.dtype  # type: ignore[union-attr]
            and x.is_cpu
            and weight.is_cpu  # type: ignore[union-attr]
            and x.is_contiguous()
            and x.shape[-1] == state.columns
            and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))  # type: ignore[union-attr]
        ):
            return normalised(state.runtime, state.spec, x, weight)
    return type(self).forward(self, *args, **kwargs)
