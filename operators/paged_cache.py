"""Keys and values of many sequences in pages of one pool (PagedAttention: Kwon et al. 2023, arXiv:2309.06180, section 4).

A page holds the keys and values of `PAGE_TOKENS` tokens: a part of each layer's memory, under one number. A sequence has the pages that its
tokens fill, in any order, so that its memory follows its own length: at most one page is partly empty. Sequences join, leave and share a
common beginning without a copy of anything but one page.

Attention reads keys where they are, by a table of pages (`Runtime.paged_attention`). That needs an attention operator which knows these
tables: the states that `PagedLayer.update` returns have the layer as their attribute `pages`, and the operator reports with `take` that it
has appended and read them. A forward pass that leaves the states of a layer unread fails, as its model computes attention in another way.

Pages were chosen over two simpler forms. Rows in classes of capacity double in size and waste half of it; groups of rows of similar length,
each with little padding, need a forward pass each, and then read the weights as often. Layers with a sliding window keep all tokens of a
sequence, so that another can begin with any part of them.
"""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from moegraft.operators.decode.cache import own

# Half a page is empty in each sequence. With pages of 16, attention to 8 texts of 2048 tokens takes 5 % longer (EPYC Zen 4).
PAGE_TOKENS = 32


class UnreadPagesError(Exception):
    """The model's attention did not read the pages of a layer."""


class NoPagesError(Exception):
    """The pool has no free page."""


@dataclass(eq=False, slots=True)
class PagedSequence:
    """The pages of one sequence, in order, how many tokens they hold, and how often it has lost pages."""

    tokens: int = 0
    pages: list[int] = field(default_factory=list)
    losses: int = 0


class PagePool:
    """The memory of all pages, which are counted: a page is free when no sequence uses it.

    The memory is reserved at once, and an operating system that commits memory on first use commits pages that were used: the lowest free
    pages are given first. Nothing moves, so that recorded decode steps stay valid.

    Attributes:
        data: of each layer, (pages, elements) of the cache's dtype: a page's keys (KV heads, PAGE_TOKENS, columns), then its values. The
            pages of a layer are side by side, so that a pass uses few pages of virtual memory.
        value_starts: of each layer's values in a page, in elements.
        table: (sequences, most pages of one) int64, the pages of the sequences of the current forward pass.
        held: (sequences,) int64, their tokens before it.
        pages: their number.
        page_bytes: of one page in all layers.

    Args:
        example: a cache of the model that holds tokens; its layers' keys and values have the forms to store.
        most_sequences: in one forward pass.
        most_tokens: of one sequence.

    Raises:
        ValueError: a layer's keys and values cannot be stored in pages.
        RuntimeError: there is not enough memory.
    """

    def __init__(self, example: DynamicCache, pages: int, *, most_sequences: int, most_tokens: int) -> None:
        forms: list[tuple[list[int], torch.dtype]] = []
        for layer in example.layers:
            keys: Any = getattr(layer, "keys", None)
            values: Any = getattr(layer, "values", None)
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or keys is None or keys.shape[1] != values.shape[1]:
                raise ValueError(f"a layer's cache is a {type(layer).__name__}, which has no pages")
            sizes = [PAGE_TOKENS * states.shape[1] * states.shape[3] for states in (keys, values)]
            if keys.dtype != values.dtype:
                raise ValueError("keys and values have several dtypes")
            forms.append((sizes, keys.dtype))
        self.pages = pages
        self.page_bytes: int = sum(sum(sizes) * dtype.itemsize for sizes, dtype in forms)
        self.value_starts = [sizes[0] for sizes, _ in forms]
        self.data = [torch.empty(pages, sum(sizes), dtype=dtype) for sizes, dtype in forms]
        self.table = torch.zeros(most_sequences, -(-most_tokens // PAGE_TOKENS), dtype=torch.int64)
        self.held = torch.zeros(most_sequences, dtype=torch.int64)
        # The memory of both, which NumPy writes in a tenth of the time where caches are cold.
        self.table_numbers, self.held_numbers = self.table.numpy(), self.held.numpy()
        self._uses = [0] * pages
        self._free = list(range(pages))  # a heap

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._uses) - len(self._free)

    def grow(self, sequence: PagedSequence, tokens: int) -> None:
        """Give a sequence pages for `tokens` tokens in all.

        Raises:
            NoPagesError: not enough are free; the sequence is unchanged.
        """
        needed = pages_of(tokens) - len(sequence.pages)
        if needed > len(self._free):
            raise NoPagesError(f"{needed} pages are needed, and {len(self._free)} are free")
        for _ in range(needed):
            page = heapq.heappop(self._free)
            self._uses[page] = 1
            sequence.pages.append(page)

    def begin_with(self, other: PagedSequence, tokens: int) -> PagedSequence:
        """Return a sequence with the first `tokens` tokens of another: it shares whole pages, and has a copy of the last one.

        Raises:
            NoPagesError: there is no page for the copy.
        """
        assert tokens <= other.tokens, "the other sequence has the tokens"
        whole, rest = divmod(tokens, PAGE_TOKENS)
        found = PagedSequence(whole * PAGE_TOKENS, other.pages[:whole])
        for page in found.pages:
            self._uses[page] += 1
        if rest:
            try:
                self.grow(found, tokens)
            except NoPagesError:
                self.release(found)
                raise
            for layer in self.data:
                layer[found.pages[whole]] = layer[other.pages[whole]]
            found.tokens = tokens
        return found

    def crop(self, sequence: PagedSequence, tokens: int) -> None:
        """Drop all but the first `tokens` tokens, and pages that hold none."""
        sequence.tokens = min(sequence.tokens, tokens)
        self._drop(sequence, pages_of(sequence.tokens))

    def release(self, sequence: PagedSequence) -> None:
        """Drop all of a sequence."""
        sequence.tokens = 0
        self._drop(sequence, 0)

    def _drop(self, sequence: PagedSequence, kept: int) -> None:
        gone, sequence.pages = sequence.pages[kept:], sequence.pages[:kept]
        sequence.losses += bool(gone)
        for page in gone:
            self._uses[page] -= 1
            if not self._uses[page]:
                heapq.heappush(self._free, page)


def pages_of(tokens: int) -> int:
    """Return how many pages `tokens` tokens take."""
    return -(-tokens // PAGE_TOKENS)


class PagedLayer(CacheLayerMixin):
    """One layer of a `PagedCache`.

    Attributes:
        data, value_start: of the layer, as in `PagePool`.
        window: tokens that a query attends to; 0: all.
    """

    def __init__(self, cache: PagedCache, number: int, window: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = weakref.ref(cache)
        self._number = number
        self.value_start = cache.pool.value_starts[number]
        self.window = window
        self.is_sliding = window > 0
        self.is_initialized = True

    @property
    def pool(self) -> PagePool:
        return self._owner.pool

    @property
    def data(self) -> torch.Tensor:
        return self.pool.data[self._number]

    @property
    def _owner(self) -> PagedCache:
        cache = self._cache()
        assert cache is not None, "a layer is used with its cache"
        return cache

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new states, for an operator that finds this layer as their attribute `pages`, appends them and reads the pages."""
        self._owner.unread.add(self._number)
        for states in (key_states, value_states):
            states.pages = self  # type: ignore[attr-defined] # read by the operator
        return key_states, value_states

    def take(self) -> None:
        """Note that the states of the last `update` are in the pages and were attended to."""
        self._owner.unread.discard(self._number)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def get_seq_length(self) -> int:
        return self._owner.longest

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # no mask is read


class PagedCache(Cache):
    """The sequences of one forward pass after another, which may be any of a pool's.

    Attributes:
        serial: that no other cache has.
        longest: tokens of the longest sequence before the current pass.
        unread: layers whose states no operator has read yet.

    Args:
        windows: of each layer: tokens that a query attends to; 0: all.
    """

    def __init__(self, pool: PagePool, windows: Sequence[int]) -> None:
        self.pool = pool
        super().__init__(layers=[PagedLayer(self, number, window) for number, window in enumerate(windows)])
        self.serial = next(_serials)
        self.longest = 0
        self.unread: set[int] = set()
        own(self)
        self._sequences: list[PagedSequence] = []
        self._shown: list[tuple[PagedSequence, int, int]] = []  # the rows of the table, with their numbers of pages and losses

    def begin(self, sequences: Iterable[PagedSequence], tokens: int) -> None:
        """Prepare a forward pass over `tokens` new tokens of each sequence, which is a row of the pass.

        Raises:
            NoPagesError: the pool is full.
        """
        self._sequences = list(sequences)
        pool = self.pool
        for sequence in self._sequences:
            pool.grow(sequence, sequence.tokens + tokens)
        shown = [(sequence, len(sequence.pages), sequence.losses) for sequence in self._sequences]
        for row, (sequence, pages, losses) in enumerate(shown):
            if row >= len(self._shown) or self._shown[row] != (sequence, pages, losses):
                pool.table_numbers[row, :pages] = sequence.pages
        self._shown = shown
        lengths = [sequence.tokens for sequence in self._sequences]
        pool.held_numbers[: len(lengths)] = lengths
        self.longest = max(lengths)
        self.unread.clear()

    def finish(self, tokens: int) -> None:
        """Count the tokens of a forward pass that has succeeded.

        Raises:
            UnreadPagesError: a layer's states were not read.
        """
        if self.unread:
            raise UnreadPagesError(f"{len(self.unread)} of {len(self.layers)} layers do not read keys and values in pages")
        for sequence in self._sequences:
            sequence.tokens += tokens


_serials = itertools.count()


def windows_of(example: DynamicCache) -> list[int]:
    """Return the sliding window of each layer of a cache; 0 for full attention."""
    found = []
    for layer in example.layers:
        window: Any = getattr(layer, "sliding_window", 0)
        found.append(int(window or 0))
    return found
