"""Custom operations, so that `torch.compile` can put operators into a graph.

A graph can hold a number but no Python object, so an operator that is to be traced takes a number from `register`. The table below is the
only state outside of models, and holds its operators weakly.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch

_operators: WeakValueDictionary[int, Any] = WeakValueDictionary()  # of several kinds, each with a `compute` of its own signature
_numbers = itertools.count()


def register(operator: Any) -> int:
    """Return a number under which graphs call `operator.compute` for as long as the operator lives.

    - experts: `compute(hidden_states (T, H), top_k_index (T, K) int64, top_k_weights (T, K)) -> (T, H)`, and in a backward pass
      `gradients(gradient (T, H), hidden_states, top_k_index, top_k_weights)`, those of the hidden states and of the weights;
    - linear layers: `compute(x (..., in_features)) -> (..., out_features)`, and `gradient(gradient (..., out_features))`;
    - attention: `compute((query (B, heads, T, D), key (B, KV heads, S, D), value), mask, sinks, scale, softcap, causal)
      -> (B, T, heads, D of values)`.
    """
    number = next(_numbers)
    _operators[number] = operator
    return number


# A CUDA graph would replay stale results of a computation on the CPU.
_tags = (torch.Tag.cudagraph_unsafe,)


def _experts(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, number: int) -> torch.Tensor:
    """The experts registered under `number`."""
    routed: torch.Tensor = _operators[number].compute(hidden_states, top_k_index, top_k_weights)
    return routed


experts = torch.library.custom_op("moegraft::experts", _experts, mutates_args=(), tags=_tags)


@experts.register_fake
def _(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, number: int) -> torch.Tensor:
    return hidden_states.new_empty(hidden_states.shape)


@torch.library.custom_op("moegraft::linear", mutates_args=(), tags=_tags)
def linear(x: torch.Tensor, out_features: int, number: int) -> torch.Tensor:
    """The linear layer registered under `number`."""
    y: torch.Tensor = _operators[number].compute(x)
    return y


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
    """The attention registered under `number`; for inference only: its callers leave calls with gradients to PyTorch."""
    out: torch.Tensor = _operators[number].compute((query, key, value), mask, sinks, scale, softcap, causal)
    return out


@attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: object) -> torch.Tensor:
    batch, heads, queries, _ = query.shape
    return query.new_empty(batch, queries, heads, value.shape[3])


def without_dispatch(target: Any) -> Any:
    """Return the function of an operation of this file that a recorded step calls, without PyTorch's 100 us around it; else `target`."""
    return _experts if target is torch.ops.moegraft.experts.default else target


def needs_gradient(*inputs: torch.Tensor) -> bool:
    """Return whether autograd expects a gradient through what is computed from `inputs`."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)


# Operations of their own, so that a graph may contain a backward pass: only running one is an error where an operator has none.


@torch.library.custom_op("moegraft::experts_gradient", mutates_args=(), tags=_tags)
def _experts_gradient(
    gradient: torch.Tensor, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the hidden states and of the routing weights of the experts registered under `number`."""
    found: tuple[torch.Tensor, torch.Tensor] = _operators[number].gradients(gradient, hidden_states, top_k_index, top_k_weights)
    return found


@_experts_gradient.register_fake
def _(
    gradient: torch.Tensor, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return hidden_states.new_empty(hidden_states.shape), top_k_weights.new_empty(top_k_weights.shape)


@torch.library.custom_op("moegraft::linear_gradient", mutates_args=(), tags=_tags)
def _linear_gradient(gradient: torch.Tensor, in_features: int, number: int) -> torch.Tensor:
    """The gradient of the input of the linear layer registered under `number`."""
    found: torch.Tensor = _operators[number].gradient(gradient)
    return found


@_linear_gradient.register_fake
def _(gradient: torch.Tensor, in_features: int, number: int) -> torch.Tensor:
    return gradient.new_empty((*gradient.shape[:-1], in_features))


# The context is torch's, which has no public type. Inputs are kept, and no activations: a backward pass computes these again.
def _experts_setup(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.number = inputs[3]


def _experts_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor, None]:
    hidden_states, top_k_weights = _experts_gradient(gradient, *ctx.saved_tensors, ctx.number)
    return hidden_states, None, top_k_weights, None


def _linear_setup(ctx: Any, inputs: tuple[torch.Tensor, int, int], output: torch.Tensor) -> None:
    ctx.in_features, ctx.number = inputs[0].shape[-1], inputs[2]


def _linear_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return _linear_gradient(gradient, ctx.in_features, ctx.number), None, None


experts.register_autograd(_experts_backward, setup_context=_experts_setup)
linear.register_autograd(_linear_backward, setup_context=_linear_setup)
