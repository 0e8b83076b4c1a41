"""The passes over the cache of one sequence, which are taken back where drafts are rejected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers import Cache

from moegraft.operators.decode.rollback import CacheMark

if TYPE_CHECKING:
    from moegraft.operators.decode.replay import StepReplay


def passes_over(cache: Cache | None, replay: StepReplay | None) -> CachedPasses:
    """Return the passes over a cache, those of `replay` if it replays the model's steps; `cache` is None where a model keeps none."""
    return CachedPasses(cache) if cache is None or replay is None else replay.passes(cache)


class CachedPasses:
    """A cache, and the passes of its model that feed tokens to it.

    Here the model computes each of them, between `leave` and `note`. `NativePasses` (native/steps.py) computes what it can itself, by
    `follow` and `greedy`; the cache then has the tokens after `close`.

    Args:
        cache: which nothing else uses meanwhile; None where a model keeps none.

    Attributes:
        hidden_states: the last ones of the latest native pass, (B, T, H); None where its program was recorded without them.
        step_ns: the time of each step of the latest `greedy`.
    """

    def __init__(self, cache: Cache | None) -> None:
        self.cache = cache
        self.hidden_states: torch.Tensor | None = None
        self.step_ns: Sequence[int] = ()
        self._new_mark: Callable[[Cache], CacheMark] | None = None  # while passes may be taken back
        self._mark: CacheMark | None = None  # from the first pass of the model on

    def follow(self, tokens: Sequence[int], states: torch.Tensor | None = None) -> torch.Tensor | None:
        """Feed some tokens of one sequence, or one of each of several, in a native pass.

        Args:
            states: what an MTP layer is given beside the tokens, (1, T, H).

        Returns:
            The logits, (R, V) float32 until the next pass over as many; None where the model must compute them.
        """
        return None

    def greedy(self, token: int, count: int, ends: Sequence[int], *, hidden: bool) -> list[int]:
        """Of one sequence: feed a token, the likeliest one after it, and so on; return the likeliest after each.

        At most `count`, none after one of `ends`, and as many as a user who interrupts them does not wait for; none at all where the model
        must compute a pass. `hidden`: whether `hidden_states` has those of each step, (1, T, H).
        """
        return []

    def leave(self) -> None:
        """Let the cache have all tokens, for a pass of the model."""
        if self._new_mark is not None and self._mark is None:
            assert self.cache is not None, "only passes over a cache are taken back"
            self._mark = self._new_mark(self.cache)

    def note(self) -> bool:
        """Note that the model has computed a pass over the cache; return whether one over as many tokens may follow natively."""
        return False

    def close(self) -> None:
        """Let the cache have all tokens, before anything else may happen to it."""

    def mark(self, longest: int, *, singly: bool) -> None:
        """Let `rewind` take back the passes that follow; the arguments are those of `CacheMark`."""
        self._mark, self._new_mark = None, partial(CacheMark, longest=longest, singly=singly)

    def unmark(self) -> None:
        """Let the passes that follow stand."""
        self._new_mark = self._mark = None

    def rewind(self, keep: int = 0) -> None:
        """Keep the first `keep` tokens since the mark, which were fed in one pass from it on, and take back the later ones.

        Nothing is taken back without a mark.
        """
        if self._mark is not None:
            self._mark.rewind(keep)
