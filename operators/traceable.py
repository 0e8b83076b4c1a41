"""The kernels as operations that `torch.compile` can put into a graph.

A graph can hold a number but no Python object, so an operator that is to be traced takes a number from `register`; the table
below is the one piece of state outside models, and holds its operators weakly.
"""

from __future__ import annotations

import itertools
from typing import Protocol
from weakref import WeakValueDictionary

import torch


class ExpertsKernel(Protocol):
    """What computes a layer's experts: (T, H), (T, K) int64, (T, K) -> (T, H)."""

    def compute(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor: ...


class LinearKernel(Protocol):
    """What computes a linear layer: (..., in_features) -> (..., out_features)."""

    out_features: int

    def compute(self, x: torch.Tensor) -> torch.Tensor: ...


_experts: WeakValueDictionary[int, ExpertsKernel] = WeakValueDictionary()
_linears: WeakValueDictionary[int, LinearKernel] = WeakValueDictionary()
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
