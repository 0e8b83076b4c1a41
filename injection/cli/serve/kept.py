"""What the model knows of the conversations that were last served."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache

from moegraft.injection.cli.chat.prompt_cache import PromptCache

KEPT = 4  # conversations; each holds at most a context of keys and values


class KeptConversations:
    """A few caches, of which a request takes the one that shares most with its prompt."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._caches: list[PromptCache] = []  # the one used last at the end

    def take(self, token_ids: list[int]) -> tuple[DynamicCache | None, int]:
        """A cache that holds the beginning of `token_ids`, and how much of it."""
        best = max(self._caches, key=lambda cache: cache.shared(token_ids), default=None)
        if best is None or 2 * best.shared(token_ids) < len(best.held[0]):
            return None, 0  # a common greeting is no reason to cut another conversation short
        self._caches.remove(best)
        return best.take(token_ids)

    def keep(self, token_ids: list[int], cache: Any) -> None:
        kept = PromptCache()
        kept.keep(token_ids, cache)
        if kept.held[1] is not None and self._most:
            self._caches = [*self._caches, kept][-self._most :]

    def drop(self) -> None:
        self._caches.clear()
