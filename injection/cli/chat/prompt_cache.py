"""Keys and values of the conversation so far, so that a turn computes only what is new in its prompt."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class PromptCache:
    """One cache and the tokens it holds.

    Kept only for models whose every layer attends to everything: sliding windows and recurrent states have forgotten what
    going back would need, so their conversations are read anew each turn.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._cache: DynamicCache | None = None

    def take(self, token_ids: list[int]) -> tuple[DynamicCache | None, int]:
        """The cache cut to what it shares with `token_ids`, and that many tokens; the last token is never shared.

        The cache is given away: what `generate` makes of it comes back through `keep`, or is lost with an interrupted answer.
        """
        cache, held = self._cache, self._token_ids
        self.drop()
        shared = _shared_tokens(held, token_ids[:-1])
        if cache is None or not shared:
            return None, 0
        if shared < len(held):
            cache.crop(shared - len(held))  # negative: that many tokens are removed; older versions read 0 as "all"
        return cache, shared

    def keep(self, token_ids: list[int], cache: Any) -> None:
        """Takes what `generate` returned; `token_ids` are prompt and answer, whose last token it has not read."""
        if type(cache) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in cache.layers):
            return
        self._cache, self._token_ids = cache, token_ids[: cache.get_seq_length()]

    def drop(self) -> None:
        self._cache, self._token_ids = None, []


def _shared_tokens(held: list[int], wanted: list[int]) -> int:
    shared = 0
    for mine, other in zip(held, wanted, strict=False):
        if mine != other:
            break
        shared += 1
    return shared
