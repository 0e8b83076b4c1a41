"""`cpu_router`: the experts of a few tokens, chosen by the C++ kernel."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from moegraft.cpu_backend import RouterSpec, Runtime
from moegraft.operators.base import BuildContext, InPlaceOperator
from moegraft.operators.cpu import describe, is_plain
from moegraft.operators.in_place import as_it_was, compute_by
from moegraft.operators.router.form import Biases, RouterForm, form_of, routed, top_k_name, vectors_of

logger = logging.getLogger(__name__)

FEW_TOKENS = 8  # a prompt's routers are a product of matrices, which PyTorch computes well


@dataclass(frozen=True, slots=True)
class CpuRouterOptions:
    """`cpu_router` has no options."""


@dataclass(frozen=True, slots=True)
class RouterState:
    """What the calls of one router share."""

    runtime: Runtime
    spec: RouterSpec
    form: RouterForm
    dtype: torch.dtype
    shape: torch.Size  # of the weight
    top_k_name: str
    biases: Mapping[str, tuple[int, int]]  # which tensors the spec has copies of: where they were, and their versions

    def holds(self, module: nn.Module) -> bool:
        """Whether the module still says what was copied from it."""
        return module.__dict__.get(self.top_k_name) == self.form.top_k and all(
            _mark(module._parameters.get(name, module._buffers.get(name))) == mark for name, mark in self.biases.items()
        )


def _mark(tensor: torch.Tensor | None) -> tuple[int, int]:
    """Another once a tensor was replaced or, outside of inference mode, written to."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)


class CpuRouter(InPlaceOperator):
    """A router of up to 8 tokens in one call: logits, scores, the choice and its weights.

    The module stays, with its weight, which is read as it is stored; families that widen it to float32 for each call (DeepSeek-V3's)
    move five times the bytes. By which rule it chooses is found by trying it. More tokens, tensors on a GPU, gradients, other dtypes or
    sizes than at load, graphs of `torch.compile`, and a module whose `top_k` or biases have changed are left to the module, as before.
    Logits are summed in another order than PyTorch's: where rounding makes two of them equal, the first expert is chosen.
    """

    name = "cpu_router"
    kind = "router"
    options_type = CpuRouterOptions
    summary = "the router's choice of experts for a few tokens by the C++ kernel, on the CPU"

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = runtime
        self._placed = False

    @classmethod
    def refuse(cls, module: nn.Module, options: CpuRouterOptions) -> str | None:
        return None  # one that chooses by a rule of its own is left as it is, which a load finds out

    @classmethod
    def build(cls, module: nn.Module, options: CpuRouterOptions, context: BuildContext) -> Self:
        return cls(context.shared(Runtime, lambda: Runtime(threads=context.threads)))

    def ready(self, model: PreTrainedModel, path: str) -> None:
        module = model.get_submodule(path)
        weight = module._parameters.get("weight")  # some have it in a layer of their own
        form = form_of(module, self._runtime) if weight is not None and weight.dim() == 2 and is_plain(weight) else None
        if weight is None or form is None:
            logger.info("cpu_router: %s (%s) chooses by a rule of its own, or elsewhere, and stays as it is", path, type(module).__name__)
            return
        name, experts = top_k_name(module), weight.shape[0]
        assert name is not None, "no form was found without"
        marks = {name: _mark(tensor) for name, tensor in vectors_of(module, experts).items()}
        spec = form.spec(weight, Biases.of(module, experts))
        compute_by(module, _forward, RouterState(self._runtime, spec, form, weight.dtype, weight.shape, name, marks))
        self._placed = True

    def set_aside(self, module: nn.Module) -> AbstractContextManager[None]:
        return as_it_was(module)

    def placement(self) -> str:
        return f"router: {self.name}, {f'the CPU ({describe(self._runtime)})' if self._placed else 'as before'}"


def _forward(module: nn.Module, state: RouterState, x: Any) -> tuple[torch.Tensor, ...] | None:
    """What the kernel chooses for `x`; None for what is left to the module."""
    weight = module._parameters["weight"]
    if (
        torch.compiler.is_compiling()
        or type(x) is not torch.Tensor
        or weight is None
        or not x.dtype == weight.dtype == state.dtype
        or weight.shape != state.shape
        or not (x.dim() == 2 or (x.dim() == 3 and state.form.flattens))
        or x.shape[-1] != weight.shape[1]
        or x.numel() > FEW_TOKENS * weight.shape[1]
        or not (x.is_cpu and is_plain(weight))
        or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        or not state.holds(module)
    ):
        return None
    parts = routed(state.runtime, state.spec, state.form, x.reshape(-1, x.shape[-1]).contiguous(), weight)
    placed: list[torch.Tensor] = [*parts]
    for at, part in zip(state.form.order, parts, strict=True):
        placed[at] = part
    return tuple(placed)
