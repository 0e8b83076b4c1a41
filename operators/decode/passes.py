"""The passes over the cache of one sequence: in native programs where they follow each other, and taken back where drafts are rejected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache

from moegraft.operators.decode.rollback import CacheMark

if TYPE_CHECKING:
    from moegraft.operators.decode.native.steps import Continuation
    from moegraft.operators.decode.replay import StepReplay


class CachedPasses:
    """A cache, and the passes of its model that feed tokens to it.

    `follow` computes a pass in a native program. Where it cannot, the caller lets the model compute it between `leave` and
    `note`. The cache shows the tokens of native passes after `close`.

    Args:
        cache: which nothing else uses meanwhile; None where a model keeps none.
        replay: of the model's passes; None where nothing replays them.

    Attributes:
        length: tokens that have been fed and not been taken back.
        continuation: the native passes; None where there are none.
    """

    def __init__(self, cache: Cache | None, replay: StepReplay | None) -> None:
        self.cache = cache
        self.continuation: Continuation | None = None if replay is None or cache is None else replay.continuation(cache)
        self.length = 0 if self.continuation is None else int(self.continuation.position)
        self._marked = 0  # the length to which `rewind` returns
        self._marking: dict[str, Any] | None = None  # arguments of a `CacheMark`, which is made before a pass of the model
        self._mark: CacheMark | None = None

    @property
    def hidden_states(self) -> torch.Tensor | None:
        """The last ones of the latest native pass, (1, T, H)."""
        return None if self.continuation is None else self.continuation.hidden_states

    def follow(self, tokens: Sequence[int], states: torch.Tensor | None = None) -> torch.Tensor | None:
        """Feed tokens; return their logits, (R, V) float32 until the next pass over as many, or None where the model must compute them.

        Args:
            states: what an MTP layer is given beside the tokens, (1, T, H).
        """
        if self.continuation is None:
            return None
        try:
            return self.continuation.step(self.length, tokens, states, rewinds=self._marking is not None)
        finally:
            self.count()

    def count(self) -> None:
        """Count what native passes have fed, also where an interrupt follows them."""
        if self.continuation is not None:
            self.length = max(self.length, self.continuation.position)

    def leave(self) -> None:
        """Let the cache have all tokens, for a pass of the model."""
        if self._marking is not None and self._mark is None:
            assert self.cache is not None, "only passes over a cache are taken back"
            if self.continuation is not None:
                self.continuation.advance(self._marked)
            self._mark = CacheMark(self.cache, **self._marking)
        self.close()

    def note(self, tokens: int) -> None:
        """Note that the model has fed `tokens` tokens."""
        self.length += tokens
        if self.continuation is not None:
            self.continuation.note()

    def close(self) -> None:
        """Let the cache have all tokens."""
        if self.continuation is not None:
            self.continuation.close(self.length)

    def mark(self, longest: int, *, singly: bool) -> None:
        """Let `rewind` take back the passes that follow; the arguments are those of `CacheMark`."""
        self._marked, self._mark, self._marking = self.length, None, {"longest": longest, "singly": singly}

    def unmark(self) -> None:
        """Let the passes that follow stand."""
        self._marking = self._mark = None

    def rewind(self, keep: int = 0) -> None:
        """Keep the first `keep` tokens since the mark, which were fed in one pass from it on, and take back the later ones.

        Nothing is taken back without a mark.
        """
        if self._marking is None:
            return
        self.length = self._marked + keep
        if self.continuation is not None:
            self.continuation.position = min(self.continuation.position, self.length)
        if self._mark is not None:
            self.close()
            self._mark.rewind(keep)
