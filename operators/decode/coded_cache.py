"""The cache of one call of `generate` as codes of 8 bits, in pages that only it uses and that attention reads in place.

The sequences of a batch are equally long. Page p of sequence b of a layer is number p * B + b, so that a layer grows at its end. An
operator that knows pages takes the new states of each layer, appends them and reads the pages, as with those of a server (pages.py).

Native programs bind the memory of the pages, as they do that of any cache of moegraft's own (cache.py), and bind it again when it has
grown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from moegraft.operators.decode.cache import CacheBuffers, ForeignCacheError, StateName
from moegraft.operators.decode.native.fit import Affine
from moegraft.operators.decode.native.record import is_recorded
from moegraft.operators.decode.pages import PAGE_TOKENS, LayerInPages, UnreadPagesError, pages_of, token_bytes

if TYPE_CHECKING:
    from moegraft.operators.decode.native.fit import CacheTensor

CODABLE = (DynamicLayer, DynamicSlidingWindowLayer)  # layers of a cache whose keys and values can be codes, without states beside them
_GROWTH = 8  # a cache grows by an eighth of its pages, and by at least as many


class CodedBuffers(CacheBuffers):
    """The memory of a `CodedCache`, and the pages that all of its layers have; `room` counts those of each sequence.

    Attributes:
        table: the numbers of the pages, (B, room) int64.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clear(0)

    def __reduce__(self) -> tuple[Any, ...]:
        return *super().__reduce__(), {"room": self.room, "table": self.table}

    def clear(self, batch: int) -> None:
        """Begin with as many sequences, which have no page."""
        self.version += 1
        self.room, self.table = 0, torch.empty(batch, 0, dtype=torch.int64)

    def reserve(self, tokens: int) -> None:
        """Make sure that sequences of so many tokens have pages."""
        needed, (batch, room) = pages_of(tokens), self.table.shape
        if needed > room:
            self.version += 1  # first: programs bind again even if this is interrupted
            room = max(needed, room + max(_GROWTH, room // _GROWTH))
            self.table = torch.arange(room) * batch + torch.arange(batch)[:, None]
        self.room = room  # also where this was interrupted before

    def hold(self, cache: Any, grown: Sequence[CacheTensor], tokens: int, position: int, held_tokens: int) -> None:
        if grown:
            raise ForeignCacheError("a cache of codes has another tensor that grows")
        for layer in cache.coded.values():
            layer.reserve(held_tokens + tokens)

    def sized_by_room(self, cache: Any) -> Mapping[StateName, tuple[Affine, ...]]:
        """Return the sizes of the pages of each layer and of their tables."""
        batch, sizes = self.table.shape[0], {}
        for number, layer in cache.coded.items():
            sizes[number, "data"] = Affine(0, 0, batch), Affine(layer.data.shape[1])
            sizes[number, "table"] = Affine(batch), Affine(0, 0, 1)
        return sizes

    def steps_left(self, tokens: int) -> int:
        cache: Any = None if self.cache is None else self.cache()
        held = 0 if cache is None else max(layer.tokens for layer in cache.coded.values())
        return self.room * PAGE_TOKENS - held - tokens


class CodedLayer(LayerInPages):
    """Keys and values of one layer, from the first states on that it is given.

    Args:
        buffers: of the cache.
        window: tokens that a query attends to; 0: all.
    """

    is_croppable = True

    def __init__(self, buffers: CodedBuffers, window: int) -> None:
        super().__init__(window)
        self.tokens = 0
        self.gathers = False
        self._buffers = buffers
        self._held = torch.zeros(0, dtype=torch.int64)  # by its name no state of the cache, as each pass makes its own

    @property
    def held(self) -> torch.Tensor:  # type: ignore[override] # not to be set
        return self._held

    @property
    def nbytes(self) -> int:
        return self.data.nbytes if self.is_initialized else 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if not key_states.is_cpu:
            raise ValueError("a cache of codes is read by the kernels of a CPU, and the model's keys are on another device")
        if self._buffers.table.shape[0] != key_states.shape[0]:  # the first layer of new sequences
            self._buffers.clear(key_states.shape[0])
        self._buffers.version += 1
        start, size = (PAGE_TOKENS * token_bytes(states, coded=True) for states in (key_states, value_states))
        self.value_start = start
        self.data, self.table = torch.empty(0, start + size, dtype=torch.int8), self._buffers.table
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new states (B, KV heads, T, D) for an operator that appends them.

        Raises:
            UnreadPagesError: no operator took those of the pass before.
            ValueError: the cache has another number of sequences.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch = self.table.shape[0]
        if batch != key_states.shape[0]:
            raise ValueError(f"the cache holds {batch} sequence{'' if batch == 1 else 's'}, and the pass has {key_states.shape[0]}")
        if self._new is not None:
            raise UnreadPagesError("no operator reads keys and values that are stored as codes: give attention the operator cpu_attention")
        self._held = torch.full((batch,), self.tokens)
        self.tokens += key_states.shape[2]
        self.reserve(self.tokens)
        return self._offered(key_states, value_states)

    def reserve(self, tokens: int) -> None:
        """Make sure that there is memory for so many tokens of each sequence."""
        self._buffers.reserve(tokens)
        pages = self._buffers.table.numel()
        if len(self.data) != pages:
            grown = self.data.new_empty(pages, self.data.shape[1])
            grown[: len(self.data)] = self.data
            self.data, self.table = grown, self._buffers.table

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
        self._buffers.clear(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"expected a negative number of tokens to remove, found {tokens_to_remove}")
        self.tokens = max(0, self.tokens + tokens_to_remove)
        self._new = None  # of a pass that was interrupted

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("the sequences of a cache of codes keep their places: beam search needs another cache")

    batch_repeat_interleave = batch_select_indices = reorder_cache

    def shows(self, mask: torch.Tensor, queries: int) -> bool:
        """Return whether a mask (B or 1, heads or 1, T, S) shows what the pages do: all earlier tokens, or those of the window.

        A step is recorded without padding (`NativePrograms.describe`), and nothing in Python may read what it computes.
        """
        if is_recorded():
            return True
        at = torch.arange(self.tokens - queries, self.tokens)[:, None]
        keys = torch.arange(mask.shape[3])
        expected = (keys <= at) & (keys > at - self.window if self.window else True)
        shown = mask if mask.dtype == torch.bool else mask == 0
        return bool((shown == expected).all())


class CodedCache(Cache):
    """A cache whose attention layers hold codes.

    Args:
        layers: of an empty `DynamicCache` of the model; those without keys and values stay as they are.
    """

    def __init__(self, layers: list[Any]) -> None:
        self.moegraft = CodedBuffers()
        windows = (int(getattr(layer, "sliding_window", None) or 0) for layer in layers)
        replaced = [
            CodedLayer(self.moegraft, window) if type(layer) in CODABLE else layer for layer, window in zip(layers, windows, strict=True)
        ]
        super().__init__(layers=replaced)

    @property
    def coded(self) -> dict[int, CodedLayer]:
        """The layers that hold codes, by number; a model may leave some unused."""
        return {number: layer for number, layer in enumerate(self.layers) if isinstance(layer, CodedLayer) and layer.is_initialized}
