"""Keys and values of the conversation so far, so that a turn computes only what is new in its prompt."""

from __future__ import annotations

import logging
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, QuantizedCache

logger = logging.getLogger(__name__)
KEPT_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


class PromptCache:
    """One cache and the tokens it holds.

    Layers that attend to everything can be cut back to any earlier token. A sliding window that has moved on, and a quantised cache, can
    only be continued, so a turn that changes what was said is read anew; recurrent states are not kept at all. The log says so, once.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._cache: DynamicCache | None = None
        self._said: set[str] = set()

    @property
    def held(self) -> tuple[list[int], DynamicCache | None]:
        """The tokens that the cache has read, and the cache."""
        return self._token_ids, self._cache

    def shared(self, token_ids: list[int]) -> int:
        """How many tokens of this prompt need not be read; the last token always is."""
        return _shared_tokens(self._token_ids, token_ids[:-1])

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
            if isinstance(cache, QuantizedCache) or any(_moved_on(layer) for layer in cache.layers):
                what = "in a quantised cache" if isinstance(cache, QuantizedCache) else "behind a sliding window"
                self._say_once(f"the conversation changed {what}, which cannot go back: it is read anew")
                return None, 0
            cache.crop(shared - len(held))  # negative: that many tokens are removed; older versions read 0 as "all"
        return cache, shared

    def keep(self, token_ids: list[int], cache: Any) -> None:
        """Takes what `generate` returned; `token_ids` are prompt and answer, whose last token it has not read."""
        kinds = {type(layer) for layer in getattr(cache, "layers", ())}
        known = type(cache) is DynamicCache and kinds <= set(KEPT_LAYERS)
        if not known and not isinstance(cache, QuantizedCache):
            names = ", ".join(sorted(kind.__name__ for kind in kinds - set(KEPT_LAYERS))) or type(cache).__name__
            self._say_once(f"each turn reads the whole conversation anew: a cache of {names} cannot be taken up again")
            return
        self._cache, self._token_ids = cache, token_ids[: cache.get_seq_length()]

    def drop(self) -> None:
        self._cache, self._token_ids = None, []

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning("%s", message)


def _moved_on(layer: Any) -> bool:
    """Whether a sliding window has let tokens go."""
    return type(layer) is DynamicSlidingWindowLayer and layer.cumulative_length >= layer.sliding_window


def _shared_tokens(held: list[int], wanted: list[int]) -> int:
    shared = 0
    for mine, other in zip(held, wanted, strict=False):
        if mine != other:
            break
        shared += 1
    return shared
