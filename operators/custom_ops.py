"""The kernels as operations that `torch.compile` can put into a graph.

A graph can hold a number but no Python object, so an operator that is to be traced takes a number from `register`; the table
below is the one piece of state outside models, and holds its operators weakly.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from moegraft.operators.errors import UnsupportedModelError


class ExpertsKernel(Protocol):
    """What computes a layer's experts: (T, H), (T, K) int64, (T, K) -> (T, H)."""

    def compute(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor: ...


class LinearKernel(Protocol):
    """What computes a linear layer: (..., in_features) -> (..., out_features)."""

    out_features: int

    def compute(self, x: torch.Tensor) -> torch.Tensor: ...


class AttentionKernel(Protocol):
    """What computes attention: (B, heads, T, D), twice (B, KV heads, S, D) -> (B, T, heads, D of values)."""

    def compute(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        scale: float,
        softcap: float,
        causal: bool,
    ) -> torch.Tensor: ...


_experts: WeakValueDictionary[int, ExpertsKernel] = WeakValueDictionary()
_linears: WeakValueDictionary[int, LinearKernel] = WeakValueDictionary()
_attentions: WeakValueDictionary[int, AttentionKernel] = WeakValueDictionary()
_numbers = itertools.count()


def register_experts(kernel: ExpertsKernel) -> int:
    """A number under which graphs call `kernel` for as long as it lives."""
    number = next(_numbers)
    _experts[number] = kernel
    return number


def register_linear(kernel: LinearKernel) -> int:
    """A number under which graphs call `kernel` for as long as it lives."""
    number = next(_numbers)
    _linears[number] = kernel
    return number


def register_attention(kernel: AttentionKernel) -> int:
    """A number under which graphs call `kernel` for as long as it lives."""
    number = next(_numbers)
    _attentions[number] = kernel
    return number


# A CUDA graph would replay stale results of a computation on the CPU.
_tags = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("moegraft::experts", mutates_args=(), tags=_tags)
def experts(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, number: int) -> torch.Tensor:
    """The experts registered under `number`."""
    return _experts[number].compute(hidden_states, top_k_index, top_k_weights)


@experts.register_fake
def _(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, number: int) -> torch.Tensor:
    return hidden_states.new_empty(hidden_states.shape)


@torch.library.custom_op("moegraft::linear", mutates_args=(), tags=_tags)
def linear(x: torch.Tensor, out_features: int, number: int) -> torch.Tensor:
    """The linear layer registered under `number`."""
    return _linears[number].compute(x)


@linear.register_fake
def _(x: torch.Tensor, out_features: int, number: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.custom_op("moegraft::attention", mutates_args=(), tags=_tags)
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    causal: bool,
    number: int,
) -> torch.Tensor:
    """The attention registered under `number`; for inference only: who traces leaves calls with gradients to PyTorch."""
    return _attentions[number].compute((query, key, value), mask, sinks, scale, softcap, causal)


@attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    causal: bool,
    number: int,
) -> torch.Tensor:
    batch, heads, queries, _ = query.shape
    return query.new_empty(batch, queries, heads, value.shape[3])


def needs_gradient(*inputs: torch.Tensor) -> bool:
    """Whether autograd expects a gradient through what is computed from `inputs`."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)


@torch.library.custom_op("moegraft::no_gradient", mutates_args=())
def _no_gradient(gradient: torch.Tensor, in_features: int) -> torch.Tensor:
    """Stands where a gradient would be computed: a graph may hold it, only a backward pass that runs is an error.

    Raises:
        UnsupportedModelError: always.
    """
    raise UnsupportedModelError("the operators of an injected model have no gradient: train the stock model, or run under torch.no_grad()")


@_no_gradient.register_fake
def _(gradient: torch.Tensor, in_features: int) -> torch.Tensor:
    return gradient.new_empty((*gradient.shape[:-1], in_features))


# The context is torch's, which has no public type.
def _experts_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return _no_gradient(gradient, gradient.shape[-1]), None, None, None


def _linear_setup(ctx: Any, inputs: tuple[torch.Tensor, int, int], output: torch.Tensor) -> None:
    ctx.in_features = inputs[0].shape[-1]


def _linear_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return _no_gradient(gradient, ctx.in_features), None, None


experts.register_autograd(_experts_backward)
linear.register_autograd(_linear_backward, setup_context=_linear_setup)
