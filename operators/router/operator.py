"""`cpu_router`: the experts of a few tokens, chosen by the C++ kernel."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import MethodType
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from moegraft.cpu_backend import RouterSpec, Runtime
from moegraft.operators.base import BuildContext, InPlaceOperator
from moegraft.operators.cpu import describe, is_plain
from moegraft.operators.router.form import Biases, RouterForm, form_of, routed

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


class CpuRouter(InPlaceOperator):
    """A router of up to 8 tokens in one call: logits, scores, the choice and its weights.

    The module stays, with its weight, which is read as it is stored; families that widen it to float32 for each call (DeepSeek-V3's)
    move five times the bytes. By which rule it chooses is found by trying it. More tokens, tensors on a GPU, gradients, other dtypes
    and graphs of `torch.compile` are the module's own, as before. Logits are summed in another order than PyTorch's: where rounding makes
    two of them equal, the first expert is chosen.
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
        spec = form.spec(weight, Biases.of(module, weight.shape[0]))
        module.__dict__["_moegraft_router"] = RouterState(self._runtime, spec, form)
        module.forward = MethodType(_forward, module)
        self._placed = True

    def placement(self) -> str:
        return f"router: {self.name}, {f'the CPU ({describe(self._runtime)})' if self._placed else 'as before'}"


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`forward` of a router that has its choice from the kernel."""
    if not torch.compiler.is_compiling() and len(args) == 1 and not kwargs:
        state: RouterState = self._moegraft_router  # type: ignore[assignment] # `ready` put it there
        weight = self._parameters["weight"]
        x = args[0]
        assert weight is not None, "it had one when it was tried"
        if (
            type(x) is torch.Tensor
            and x.dtype == weight.dtype
            and x.is_cpu
            and weight.is_cpu
            and x.shape[-1] == weight.shape[1]
            and x.numel() <= FEW_TOKENS * weight.shape[1]
            and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        ):
            parts = routed(state.runtime, state.spec, state.form, x.reshape(-1, weight.shape[1]).contiguous(), weight)
            placed: list[torch.Tensor | None] = [None, None, None]
            for at, part in zip(state.form.order, parts, strict=True):
                placed[at] = part
            return tuple(placed)
    return type(self).forward(self, *args, **kwargs)
