"""A block's shared experts, run while the CPU and the link are busy with the routed ones.

Blocks of transformers 5 call router, routed experts and shared experts one after another, so that the GPU's work on one waits for the
CPU's on the other. The first pass through a block is watched. Where it calls its shared experts *after* the routed ones (DeepSeek, GLM-4,
Nemotron), they are run between handing the routed ones over and waiting for them, and the block gets the result when it asks. Where it
calls them *before* (Qwen2, Qwen3-Next), router and routed experts are run at that call already. What is handed out is what was asked for:
the same module on the very same tensor, and both ways gave the same bits when they were watched. Any other block is left as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal
from weakref import ref

import torch
from torch import nn

from moegraft.operators.structure import SHARED_NAMES

Order = Literal["unknown", "after", "before", "other"]
Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]


def shared_experts_of(block: nn.Module) -> nn.Module | None:
    """None where a block has none, where they take more than tokens, or somebody has replaced their forward pass."""
    found = (getattr(block, name, None) for name in SHARED_NAMES)
    return next((module for module in found if isinstance(module, nn.Module) and _takes_tokens_alone(module)), None)


def _takes_tokens_alone(module: nn.Module) -> bool:
    return "forward" not in vars(module) and len(inspect.signature(module.forward).parameters) == 1


class Once:
    """A call that is made once, by whoever comes first."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


class Early:
    """A module that can be run before it is called; the call on the same tensor then gets the result.

    Attributes:
        on_call: asked at calls that find no result; what it returns, unless None, is the call's.
        last: what the last call got and gave.
    """

    def __init__(self, module: nn.Module, on_call: Callable[[torch.Tensor], Any] | None = None) -> None:
        self.on_call = on_call
        self.last: tuple[torch.Tensor, Any] | None = None
        self._module = ref(module)
        self._plain: Callable[..., Any] = type(module).forward
        self._ready: tuple[torch.Tensor, int, Any] | None = None
        signature, plain, held, early = inspect.signature(module.forward), self._plain, self._module, ref(self)

        def forward(*args: Any, **kwargs: Any) -> Any:
            alive = early()
            return plain(held(), *args, **kwargs) if alive is None else alive._called(args, kwargs)

        forward.__signature__ = signature  # type: ignore[attr-defined] # callers look at what a forward pass takes
        module.forward = forward  # holds neither the module nor this: a model goes when its last reference does

    def run(self, x: torch.Tensor) -> Any:
        """The module on `x`, now; its hooks are left to the call."""
        return self._plain(self._module(), x)

    def keep(self, x: torch.Tensor, result: Any) -> None:
        """For the call on `x`."""
        self._ready = x, _version(x), result

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ready, self._ready = self._ready, None
        single = len(args) == 1 and not kwargs and not torch.compiler.is_compiling()
        if single and ready is not None and same(args[0], ready[0]) and _version(args[0]) == ready[1]:
            return _shaped(ready[2], args[0])
        if single and self.on_call is not None and not torch.is_grad_enabled():
            found = self.on_call(args[0])
            if found is not None:
                return found
        result = self._plain(self._module(), *args, **kwargs)
        self.last = (args[0], result) if single else None
        return result


class SharedOverlap:
    """One block's order of calls, and what was run ahead of them.

    Args:
        compute: the routed experts as the block calls them; None when they are gone.
        note: told what the router got and gave where its hooks have not run yet.
    """

    def __init__(self, shared: nn.Module, router: nn.Module, compute: Compute, note: Callable[[torch.Tensor, Any], None]) -> None:
        self.order: Order = "unknown"
        self._shared = Early(shared, self._asked)
        self._router = Early(router)
        self._compute = compute
        self._note = note
        self._trial: tuple[torch.Tensor, Any] | None = None
        self._asked_on: torch.Tensor | None = None  # the shared experts, before the routed ones
        self._places = (0, 0)  # of ids and weights in what the router returns
        self._between: Once | None = None
        self._done: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def ready(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor | None:
        """The routed experts' result, where it was computed already."""
        done, self._done = self._done, None
        if done is not None and all(same(*pair) for pair in zip((hidden_states, top_k_index, top_k_weights), done[:3], strict=True)):
            return done[3]
        if self.order == "unknown" and self._asked_on is not None:
            asked_on, self._asked_on = self._asked_on, None
            self.order = "before" if self._routes(asked_on, hidden_states, top_k_index, top_k_weights) else "other"
        return None

    def start(self, hidden_states: torch.Tensor) -> Once | None:
        """What is to be run when the routed experts have been handed over."""
        if self._between is not None:
            return self._between
        if self.order == "after":
            return Once(lambda: self._shared.keep(hidden_states, self._shared.run(hidden_states)))
        if self.order == "unknown":
            if self._trial is not None:
                self.order, self._trial = "other", None  # nobody has asked since the last time
            else:
                self._trial = hidden_states, self._shared.run(hidden_states)
        return None

    def _asked(self, x: torch.Tensor) -> Any:
        if self.order == "before" and x.dim() == 2:
            return self._ahead(x)
        if self.order != "unknown":
            return None
        trial, self._trial = self._trial, None
        if trial is None:
            self._asked_on = x
            return None
        result = self._shared.run(x)
        alike = same(x, trial[0]) and isinstance(trial[1], torch.Tensor) and torch.equal(_shaped(trial[1], x), result)
        self.order = "after" if alike else "other"
        return result

    def _ahead(self, x: torch.Tensor) -> Any:
        routed = self._router.run(x)
        index, weights = (routed[place] for place in self._places)
        shared: list[Any] = []
        self._between = Once(lambda: shared.append(self._shared.run(x)))
        self._note(x, routed)
        try:
            computed = self._compute(x, index, weights)
            self._between()
        finally:
            self._between = None
        self._router.keep(x, routed)
        if computed is not None:
            self._done = x, index, weights, computed
        return shared[0]

    def _routes(self, asked_on: torch.Tensor, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> bool:
        """Whether all three were called on one tensor, and the router alone said which experts, and would again."""
        last, self._router.last = self._router.last, None
        if last is None or not (same(asked_on, hidden_states) and same(last[0], hidden_states) and isinstance(last[1], tuple)):
            return False
        places = [_place(last[1], wanted) for wanted in (top_k_index, top_k_weights)]
        if None in places:
            return False
        self._places = places[0] or 0, places[1] or 0
        again = self._router.run(hidden_states)
        return all(torch.equal(again[place], last[1][place]) for place in self._places)


def same(one: Any, other: torch.Tensor) -> bool:
    """Whether two tensors, whatever their shapes, are the same values at the same place."""
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
    """(T, H) as `x` has its tokens, (B, S, H)."""
    return result.view(*x.shape[:-1], result.shape[-1]) if isinstance(result, torch.Tensor) else result


def _place(outputs: tuple[Any, ...], wanted: torch.Tensor) -> int | None:
    return next((place for place, output in enumerate(outputs) if isinstance(output, torch.Tensor) and same(output, wanted)), None)
