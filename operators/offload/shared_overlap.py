"""Shared-expert overlap: a block's shared experts run while the CPU and the link, or other processes, are busy with the routed ones.

Blocks of transformers 5 call router, routed experts and shared experts one after another, so that one device's or process's work waits
for another's. The first pass through a block is observed. Where it calls its shared experts *after* the routed ones (DeepSeek, GLM-4,
Nemotron), they are run between handing the routed ones over and waiting for them, and the block's own call gets the result. Where it
calls them *before* (Qwen2, Qwen3-Next), router and routed experts are run within that call already. A result is only used for the call
it stands in for: the same module on the very same tensor; and when the block was observed, both ways gave the same bits. Any other block
is left as it is.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, Literal
from weakref import WeakMethod, ref

import torch
from torch import nn

from moegraft.operators.structure import SHARED_NAMES

Order = Literal["unknown", "after", "before", "other"]
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Callable[[], None] | None], torch.Tensor]
Record = Callable[[torch.Tensor, Any], None]


def overlap_in(
    block: nn.Module, router: nn.Module | None, experts: Experts, record: Record | None = None, *, unwatched: bool = False
) -> SharedOverlap | None:
    """Return the overlap of a block's shared experts with its routed ones; None where it has none, or other code has replaced one."""
    shared = shared_experts_of(block)
    if shared is None or router is None or "forward" in vars(router):
        return None
    return SharedOverlap(shared, router, experts, record, unwatched=unwatched)


def shared_experts_of(block: nn.Module) -> nn.Module | None:
    """Return a block's shared experts; None where it has none, or they take more than tokens, or their forward pass was replaced."""
    for name in SHARED_NAMES:
        module = getattr(block, name, None)
        if isinstance(module, nn.Module) and "forward" not in vars(module) and len(inspect.signature(module.forward).parameters) == 1:
            return module
    return None


class _OverlapState(threading.local):
    """What one thread's pass through a block has begun; a thread finds its own, in the beginning that of the class."""

    trial: tuple[torch.Tensor, Any] | None = None  # the shared experts' input and result, run ahead to be compared
    shared_input: torch.Tensor | None = None  # of the shared experts, where they were called before the routed ones
    routed: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # inputs and result, run ahead


class SharedOverlap:
    """The overlap in one block; several threads may run it. The routed experts are then called through `forward`.

    Args:
        experts: the forward pass of the routed experts, whose last argument is what to call while they are waited for.
        record: given the router's input and output where its hooks have not run yet.
        unwatched: leave a pass that a dispatch mode watches as it is; its caller then does not call `forward`.

    Attributes:
        order: when the block calls its shared experts; `other` where they cannot overlap.
    """

    def __init__(
        self,
        shared: nn.Module,
        router: nn.Module,
        experts: Experts,
        record: Record | None = None,
        *,
        unwatched: bool = False,
    ) -> None:
        self.order: Order = "unknown"
        self._shared = PrecomputedModule(shared, self._shared_called)
        self._router = PrecomputedModule(router)
        self._router.observed = True
        self._experts = experts
        self._record = record
        self._unwatched = unwatched
        self._positions = (0, 0)  # of ids and weights in what the router returns
        self._state = _OverlapState()

    def _decide(self, order: Order) -> None:
        self.order = order
        self._router.observed = False
        self._router.last = None

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Return the routed experts' result for (T, H), (T, K), (T, K), which may have been computed ahead of this call."""
        inputs = hidden_states, top_k_index, top_k_weights
        if not len(hidden_states):
            return self._experts(*inputs, None)
        routed, self._state.routed = self._state.routed, None
        if routed is not None and all(map(_same, inputs, routed[:3])):
            return routed[3]
        if self.order == "unknown" and self._state.shared_input is not None:
            shared_input, self._state.shared_input = self._state.shared_input, None
            self._decide("before" if self._can_run_ahead(shared_input, *inputs) else "other")
        return self._experts(*inputs, self._begin(hidden_states))

    def _begin(self, hidden_states: torch.Tensor) -> Callable[[], None] | None:
        """Return what runs the shared experts, once: to be called when the routed experts have been handed over."""
        if self.order == "after":
            return cache(lambda: self._shared.keep(hidden_states, self._shared.run(hidden_states)))
        if self.order == "unknown":
            if self._state.trial is not None:
                self._state.trial = None
                self._decide("other")  # the shared experts were not called since the last time
            else:
                self._state.trial = hidden_states, self._shared.run(hidden_states)
        return None

    def _shared_called(self, x: torch.Tensor) -> Any:
        if not x.numel() or (self._unwatched and torch._C._len_torch_dispatch_stack() > 0):
            return None
        if self.order == "before" and x.dim() == 2:
            return self._run_ahead(x)
        if self.order != "unknown":
            return None
        trial, self._state.trial = self._state.trial, None
        if trial is None:
            self._state.shared_input = x
            return None
        result = self._shared.run(x)
        equal = _same(x, trial[0]) and isinstance(trial[1], torch.Tensor) and torch.equal(_shaped(trial[1], x), result)
        self._decide("after" if equal else "other")
        return result

    def _run_ahead(self, x: torch.Tensor) -> Any:
        """Run router and routed experts on the shared experts' input, and return the shared experts' result."""
        routing = self._router.run(x)
        index, weights = (routing[position] for position in self._positions)
        shared: list[Any] = []
        launch = cache(lambda: shared.append(self._shared.run(x)))
        if self._record is not None:
            self._record(x, routing)
        self._state.routed = x, index, weights, self._experts(x, index, weights, launch)
        launch()
        self._router.keep(x, routing)
        return shared[0]

    def _can_run_ahead(
        self, shared_input: torch.Tensor, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> bool:
        """Whether all three modules were called on one tensor, and the router alone determined the routing, and would again."""
        last, self._router.last = self._router.last, None
        if last is None or not (_same(shared_input, hidden_states) and _same(last[0], hidden_states) and isinstance(last[1], tuple)):
            return False
        routing = last[1]
        positions = [_position(routing, top_k_index), _position(routing, top_k_weights)]
        if positions[0] is None or positions[1] is None:
            return False
        self._positions = positions[0], positions[1]
        again = self._router.run(hidden_states)
        return all(torch.equal(again[position], routing[position]) for position in self._positions)


class _PrecomputedState(threading.local):
    kept: tuple[torch.Tensor, int, Any] | None = None  # input, its version, and result


class PrecomputedModule:
    """A module that can be run before it is called; the call on the same tensor then gets the result.

    Args:
        on_call: a method that is asked at calls that find no result; what it returns, unless None, is the call's result. Its object is
            not kept alive.

    Attributes:
        observed: whether `last` is wanted, which keeps the tensors of a pass until the next one.
        last: input and output of the last call.
    """

    def __init__(self, module: nn.Module, on_call: Callable[[torch.Tensor], Any] | None = None) -> None:
        self.observed = False
        self.last: tuple[torch.Tensor, Any] | None = None
        self._on_call = None if on_call is None else WeakMethod(on_call)
        self._module = ref(module)
        self._state = _PrecomputedState()
        signature, weak_module, weak_self = inspect.signature(module.forward), self._module, ref(self)

        def forward(*args: Any, **kwargs: Any) -> Any:
            ahead = None if torch.compiler.is_compiling() else weak_self()
            return _plain(weak_module(), *args, **kwargs) if ahead is None else ahead._called(args, kwargs)

        forward.__signature__ = signature  # type: ignore[attr-defined] # callers inspect what a forward pass takes
        module.forward = forward  # holds neither the module nor this: a model is freed with its last reference

    def run(self, x: torch.Tensor) -> Any:
        """Run the module on `x` now; its hooks are left to the call."""
        return _plain(self._module(), x)

    def keep(self, x: torch.Tensor, result: Any) -> None:
        """Keep a result for the call on `x`."""
        self._state.kept = x, _version(x), result

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept, self._state.kept = self._state.kept, None
        single = len(args) == 1 and not kwargs
        if single and kept is not None and _same(args[0], kept[0]) and _version(args[0]) == kept[1]:
            return _shaped(kept[2], args[0])
        on_call = self._on_call() if single and self._on_call is not None and not torch.is_grad_enabled() else None
        if on_call is not None:
            found = on_call(args[0])
            if found is not None:
                return found
        result = _plain(self._module(), *args, **kwargs)
        self.last = (args[0], result) if single and self.observed else None
        return result


def _plain(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a module without its hooks; an operator may have given it another class since it was wrapped."""
    return type(module).forward(module, *args, **kwargs)


def _same(one: Any, other: torch.Tensor) -> bool:
    """Whether two tensors, whatever their shapes, are the same values at the same address."""
    return (
        isinstance(one, torch.Tensor)
        and one.data_ptr() == other.data_ptr()
        and one.numel() == other.numel()
        and one.dtype == other.dtype
        and one.is_contiguous()
        and other.is_contiguous()
    )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _shaped(result: Any, x: torch.Tensor) -> Any:
    """(T, H) with the leading dimensions of `x`, (B, S, H)."""
    return result.view(*x.shape[:-1], result.shape[-1]) if isinstance(result, torch.Tensor) else result


def _position(outputs: tuple[Any, ...], wanted: torch.Tensor) -> int | None:
    return next((position for position, output in enumerate(outputs) if _same(output, wanted)), None)
