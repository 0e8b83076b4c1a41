"""The cache of one call of `generate` as codes of 8 bits, in pages that only it uses and that attention reads in place.

The sequences of a batch are equally long. Page p of sequence b of a layer is number p * B + b, so that a layer grows at its end. An
operator that knows pages takes the new states of each layer, appends them and reads the pages, as with those of a server (pages.py).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, QuantizedCache

from moegraft.operators.decode.pages import PAGE_TOKENS, LayerInPages, UnreadPagesError, pages_of, token_bytes

CODABLE = (DynamicLayer, DynamicSlidingWindowLayer)  # layers of a cache whose keys and values can be codes, without states beside them
_GROWTH = 8  # a layer grows by an eighth of its pages, and by at least as many


class CodedLayer(LayerInPages):
    """Keys and values of one layer, from the first states on that it is given.

    Args:
        window: tokens that a query attends to; 0: all.
    """

    is_croppable = True

    def __init__(self, window: int = 0) -> None:
        super().__init__(window)
        self.tokens = 0
        self.gathers = False

    @property
    def nbytes(self) -> int:
        return self.data.nbytes if self.is_initialized else 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if not key_states.is_cpu:
            raise ValueError("a cache of codes is read by the kernels of a CPU, and the model's keys are on another device")
        self._batch = key_states.shape[0]
        start, size = (PAGE_TOKENS * token_bytes(states, coded=True) for states in (key_states, value_states))
        self.value_start = start
        self.data = torch.empty(0, start + size, dtype=torch.int8)
        self.table = torch.empty(self._batch, 0, dtype=torch.int64)
        self.held = torch.zeros(self._batch, dtype=torch.int64)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new states (B, KV heads, T, D) for an operator that appends them.

        Raises:
            UnreadPagesError: no operator took those of the pass before.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._new is not None:
            raise UnreadPagesError("no operator reads keys and values that are stored as codes: give attention the operator cpu_attention")
        self.held.fill_(self.tokens)
        self.tokens += key_states.shape[2]
        have, needed = self.table.shape[1], pages_of(self.tokens)
        if needed > have:
            have = max(needed, have + max(_GROWTH, have // _GROWTH))
            grown = self.data.new_empty(have * self._batch, self.data.shape[1])
            grown[: len(self.data)] = self.data
            self.data, self.table = grown, torch.arange(have * self._batch).view(have, self._batch).T.contiguous()
        return self._offered(key_states, value_states)

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def reset(self) -> None:
        self.tokens = 0
        self._new = None
        self.is_initialized = False  # the next sequences may be more

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"expected a negative number of tokens to remove, found {tokens_to_remove}")
        self.tokens = max(0, self.tokens + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("the sequences of a cache of codes keep their places: beam search needs another cache")

    batch_repeat_interleave = batch_select_indices = reorder_cache

    def shows(self, mask: torch.Tensor, queries: int) -> bool:
        """Return whether a mask (B or 1, heads or 1, T, S) shows what the pages do: all earlier tokens, or those of the window."""
        at = torch.arange(self.tokens - queries, self.tokens)[:, None]
        keys = torch.arange(mask.shape[3])
        expected = (keys <= at) & (keys > at - self.window if self.window else True)
        shown = mask if mask.dtype == torch.bool else mask == 0
        return bool((shown == expected).all())


class CodedCache(QuantizedCache):
    """A cache whose attention layers hold codes.

    Args:
        layers: of an empty `DynamicCache` of the model; those without keys and values stay as they are.
    """

    unrecorded = "the cache holds codes, and grows: native programs record those of a server alone"

    def __init__(self, layers: list[Any]) -> None:
        windows = (int(getattr(layer, "sliding_window", None) or 0) for layer in layers)
        replaced = [CodedLayer(window) if type(layer) in CODABLE else layer for layer, window in zip(layers, windows, strict=True)]
        Cache.__init__(self, layers=replaced)  # the class in between makes layers of full attention alone
