"""The cache of one call of `generate` as codes of 8 bits, in pages that only it uses and that attention reads in place.

The sequences of a batch are equally long. Page p of sequence b of a layer is number p * B + b, so that a layer grows at its end. An
operator that knows pages takes the new states of each layer, appends them and reads the pages, as with those of a server (pages.py).

Native programs bind the memory of the pages, as they do that of any cache of moegraft's own (cache.py), and bind it again when it has
grown.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from moegraft.operators.decode.cache import CacheBuffers
from moegraft.operators.decode.native.record import is_recorded
from moegraft.operators.decode.pages import PAGE_TOKENS, LayerInPages, UnreadPagesError, pages_of, token_bytes

if TYPE_CHECKING:
    from moegraft.operators.decode.native.fit import CacheTensor

CODABLE = (DynamicLayer, DynamicSlidingWindowLayer)  # layers of a cache whose keys and values can be codes, without states beside them
_GROWTH = 8  # a layer grows by an eighth of its pages, and by at least as many
_LEAST_WIDTH = 1024  # pages of a sequence in a table, which is a constant of native programs


@lru_cache(maxsize=8)
def _table(batch: int, width: int) -> torch.Tensor:
    """Return the numbers of the first `width` pages of each sequence, (batch, width) int64, which nothing writes to."""
    return torch.arange(batch * width).view(width, batch).T.contiguous()


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
        # Underscores: these are no states of the cache to programs, but a constant and what a pass computes from the number of tokens.
        self._table, self._held = _table(1, _LEAST_WIDTH), torch.zeros(1, dtype=torch.int64)

    @property
    def table(self) -> torch.Tensor:  # type: ignore[override] # not to be set
        return self._table

    @property
    def held(self) -> torch.Tensor:  # type: ignore[override]
        return self._held

    @property
    def pages(self) -> int:
        """Those of each sequence."""
        return len(self.data) // self._batch if self.is_initialized else 0

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
        self._table = _table(self._batch, _LEAST_WIDTH)
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
        self._held = torch.full((self._batch,), self.tokens)
        self.tokens += key_states.shape[2]
        self.reserve(pages_of(self.tokens))
        return self._offered(key_states, value_states)

    def reserve(self, pages: int) -> None:
        """Make sure that each sequence has at least so many pages."""
        have = self.pages
        if pages > have:
            have = max(pages, have + max(_GROWTH, have // _GROWTH))
            grown = self.data.new_empty(have * self._batch, self.data.shape[1])
            grown[: len(self.data)] = self.data
            self.data = grown
            if have > self._table.shape[1]:
                self._table = _table(self._batch, 1 << (have - 1).bit_length())

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length if is_recorded() else self.tokens + query_length, 0  # no mask is read in a step that is recorded

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
        """Return whether a mask (B or 1, heads or 1, T, S) shows what the pages do: all earlier tokens, or those of the window.

        A step is recorded without padding, and nothing in Python may read what it computes.
        """
        if is_recorded():
            return True
        at = torch.arange(self.tokens - queries, self.tokens)[:, None]
        keys = torch.arange(mask.shape[3])
        expected = (keys <= at) & (keys > at - self.window if self.window else True)
        shown = mask if mask.dtype == torch.bool else mask == 0
        return bool((shown == expected).all())


class CodedBuffers(CacheBuffers):
    """The memory of a `CodedCache`; `room` counts the pages of a sequence. Any of its layers' memory that is new changes `version`."""

    def __init__(self) -> None:
        super().__init__()
        self._bound: list[torch.Tensor] = []  # the pages of each layer, which programs know

    def hold(self, cache: Any, grown: Sequence[CacheTensor], tokens: int, position: int, held_tokens: int) -> None:
        layers = _coded(cache)
        needed = max([pages_of(held_tokens + tokens), *(layer.pages for layer in layers)])
        for layer in layers:
            layer.reserve(needed)
        pools = [layer.data for layer in layers]
        if len(pools) != len(self._bound) or any(one is not other for one, other in zip(pools, self._bound, strict=True)):
            self.version += 1  # first: programs bind again even if this is interrupted
            self._bound, self.room = pools, min((layer.pages for layer in layers), default=0)
        super().hold(cache, grown, tokens, position, held_tokens)

    def steps_left(self, tokens: int) -> int:
        cache = None if self.cache is None else self.cache()
        held = max((layer.tokens for layer in _coded(cache)), default=0)
        return min(super().steps_left(tokens), self.room * PAGE_TOKENS - held - tokens)


def _coded(cache: Any) -> list[CodedLayer]:
    """Return the layers that hold codes."""
    return [] if cache is None else [layer for layer in cache.layers if isinstance(layer, CodedLayer) and layer.is_initialized]


class CodedCache(Cache):
    """A cache whose attention layers hold codes.

    Args:
        layers: of an empty `DynamicCache` of the model; those without keys and values stay as they are.
    """

    def __init__(self, layers: list[Any]) -> None:
        windows = (int(getattr(layer, "sliding_window", None) or 0) for layer in layers)
        replaced = [CodedLayer(window) if type(layer) in CODABLE else layer for layer, window in zip(layers, windows, strict=True)]
        super().__init__(layers=replaced)
        self.moegraft = CodedBuffers()

    @property
    def serial(self) -> int:
        """The width of the table, a constant of native programs; as that of `PagedCache`."""
        return max((layer.table.shape[1] for layer in _coded(self)), default=0)
