"""Keys and values of many sequences in pages of one pool (PagedAttention: Kwon et al. 2023, arXiv:2309.06180, section 4).

A page holds the keys and values of `PAGE_TOKENS` tokens: a part of each layer's memory, under one number. A sequence has the pages that its
tokens fill, in any order, so that its memory follows its own length: at most one page is partly empty. Sequences join, leave and share a
common beginning without a copy of anything but one page.

An attention operator that knows the table of pages reads keys where they are (`Runtime.paged_attention`). For any other attention, on any
device, a layer appends the new states itself and gathers each row's keys and values from its pages: [padding][earlier tokens][new tokens].
Distances between a row's tokens are then those of its text, so that the masks which transformers makes of a 2-D attention mask are right
for every row, those of sliding windows as well. Gathering copies what appending to a padded batch would copy in every step. A layer gathers
until an operator has taken its states for the first time.

Pages were chosen over two simpler forms. Rows in classes of capacity double in size and waste half of it; groups of rows of similar length,
each with little padding, need a forward pass each, and then read the weights as often. Layers with a sliding window keep all tokens of a
sequence, so that another can begin with any part of them.

Pages may hold codes of 8 bits, of which each row, a token's keys or values of one head, has a float32 scale: 0.52 of the bytes of 16-bit
keys and values of 128 columns. The operator reads the codes themselves, so that a step takes less time where it waits for the memory.
Nothing gathers these: an operator that reads pages has to take the states of each layer from the first pass on.

Recurrent and convolution states do not grow with a text: they are beside the pages, in a place for each sequence (state_pool.py). The rows
of a pass have equally many new tokens, so that nothing is padded in layers with states.
"""

from __future__ import annotations

import heapq
import itertools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from moegraft.operators.decode.cache import StateName, adopt
from moegraft.operators.decode.state_pool import StatePool
from moegraft.operators.decode.states import FLAGS, has_states, keeps_nothing, past_of, show_past

SCALE_BYTES = 4  # of a row of codes
# Half a page is empty in each sequence. With pages of 16, attention to 8 texts of 2048 tokens takes 5 % longer (EPYC Zen 4).
PAGE_TOKENS = 32
IN_PAGES = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


class UnreadPagesError(Exception):
    """An operator that reads pages left those of a layer unread."""


class NoPagesError(Exception):
    """The pool has no free page."""


@dataclass(eq=False, slots=True)
class PagedSequence:
    """The pages of one sequence, in order, how many tokens they hold, and how often it has lost pages.

    Attributes:
        position_shift: of the positions of later tokens: several tokens of an image may share a position.

    Of a model with recurrent states:

    Attributes:
        place: of its states; None if it has none.
        states_at: the tokens after which these are; -1 while a forward pass changes them.
        checkpoints: the places of copies, by the tokens after which they are.
        past: the tokens after which the first of the states that were kept last are, and the row of the sequence among them.
    """

    tokens: int = 0
    pages: list[int] = field(default_factory=list)
    losses: int = 0
    position_shift: int = 0
    place: int | None = None
    states_at: int = 0
    checkpoints: dict[int, int] = field(default_factory=dict)
    past: tuple[int, int] | None = None


class PagePool:
    """The memory of all pages, which are counted: a page is free when no sequence uses it.

    The memory is reserved at once, and an operating system that commits memory on first use commits pages that were used: the lowest free
    pages are given first. Nothing moves, so that recorded decode steps stay valid.

    Attributes:
        data: of each layer with keys and values, by its number, (pages + 1, elements) in the cache's dtype and on its device: a page's keys
            (KV heads, PAGE_TOKENS, columns), then its values. The pages of a layer are side by side, so that a pass uses few pages of
            virtual memory. The last page is no sequence's: it has the zeros that rows are padded with. Codes are int8; behind those of a
            head are their scales, (PAGE_TOKENS,) float32.
        coded: whether pages hold codes.
        value_starts: of each layer's values in a page, in elements.
        table: (sequences, most pages of one) int64, the pages of the sequences of the current forward pass.
        held: (sequences,) int64, their tokens before it.
        pages: their number.
        page_bytes: of one page in all layers.
        states: the recurrent states; None if the model has none.

    Args:
        example: a cache of the model that holds tokens; its layers' keys and values have the forms to store.
        most_sequences: in one forward pass.
        most_tokens: of one sequence.
        coded: whether pages hold codes.
        cleared: layers with zeros in a page that a sequence gets, as some tokens of a text may have no keys and values there.

    Raises:
        ValueError: a layer's keys and values cannot be stored in pages.
        RuntimeError: there is not enough memory.
    """

    def __init__(
        self,
        example: Cache,
        pages: int,
        *,
        most_sequences: int,
        most_tokens: int,
        coded: bool,
        states: StatePool | None,
        cleared: Sequence[int],
    ) -> None:
        self.pages = pages
        self.page_bytes = 0
        self.states = states
        self.coded = coded
        self.data: dict[int, torch.Tensor] = {}
        self.value_starts: dict[int, int] = {}
        self._cleared = cleared
        for number, layer in enumerate(example.layers):
            if type(layer) is LinearAttentionLayer or keeps_nothing(layer):
                continue
            keys: Any = getattr(layer, "keys", None)
            values: Any = getattr(layer, "values", None)
            if type(layer) not in IN_PAGES or keys is None or keys.shape[1] != values.shape[1]:
                raise ValueError(f"a layer's cache is a {type(layer).__name__}, which has no pages")
            if keys.dtype != values.dtype:
                raise ValueError("keys and values have several dtypes")
            if coded and not keys.is_cpu:
                raise ValueError("pages of codes are read by the kernels of a CPU, and a layer's cache is on another device")
            dtype = torch.int8 if coded else keys.dtype
            start, size = (PAGE_TOKENS * token_bytes(states, coded=coded) // dtype.itemsize for states in (keys, values))
            data = torch.empty(pages + 1, start + size, dtype=dtype, device=keys.device)
            data[pages].zero_()
            self.data[number], self.value_starts[number] = data, start
            self.page_bytes += data[pages].nbytes
        self.table = torch.zeros(most_sequences, -(-most_tokens // PAGE_TOKENS), dtype=torch.int64)
        self.held = torch.zeros(most_sequences, dtype=torch.int64)
        # The memory of both, which NumPy writes in a tenth of the time where caches are cold.
        self.table_numbers, self.held_numbers = self.table.numpy(), self.held.numpy()
        self.shown: list[tuple[PagedSequence, int, int]] = []  # the rows of the table, with their numbers of pages and losses
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
            for number in self._cleared:
                self.data[number][page].zero_()

    def fork(self, other: PagedSequence, tokens: int) -> PagedSequence:
        """Return a sequence with the first `tokens` tokens of another: it shares whole pages, and has a copy of the last one.

        Raises:
            NoPagesError: there is no page for the copy.
        """
        assert tokens <= other.tokens, "the other sequence has the tokens"
        whole, rest = divmod(tokens, PAGE_TOKENS)
        sequence = PagedSequence(whole * PAGE_TOKENS, other.pages[:whole])
        for page in sequence.pages:
            self._uses[page] += 1
        if rest:
            try:
                self.grow(sequence, tokens)
            except NoPagesError:
                self.release(sequence)
                raise
            for layer in self.data.values():
                layer[sequence.pages[whole]] = layer[other.pages[whole]]
            sequence.tokens = tokens
        return sequence

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


def token_bytes(states: torch.Tensor, *, coded: bool) -> int:
    """Return the bytes in pages of one token's keys or values, of which `states`, (1, KV heads, S, columns), are an example."""
    _, heads, _, columns = states.shape
    return heads * (columns + SCALE_BYTES if coded else columns * states.dtype.itemsize)


def pages_of(tokens: int) -> int:
    """Return how many pages `tokens` tokens take."""
    return -(-tokens // PAGE_TOKENS)


class LayerInPages(CacheLayerMixin):
    """One layer of a cache whose keys and values are in pages.

    The states that `update` returns have the layer as their attribute `pages`. An operator that knows pages calls `take` for the new ones,
    appends them and reads the pages. It must do so in every later pass as well.

    Attributes:
        data, value_start: of the layer, as in `PagePool`.
        table, held: of the sequences of the current pass, as in `PagePool`.
        window: tokens that a query attends to; 0: all.
        gathers: whether keys and values are gathered from the pages, as no operator has taken the states of this layer yet.
        ragged: whether the tokens of the pass are one row, (1, KV heads, T, D), and each has a row of the table.
    """

    data: torch.Tensor
    value_start: int
    table: torch.Tensor
    held: torch.Tensor
    gathers: bool
    ragged = False

    def __init__(self, window: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None  # states that no operator has taken
        self.window = window
        self.is_sliding = window > 0

    def _offered(self, *states: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states of an `update`, of which an operator may take the new ones."""
        keys, values = states
        self._new = (keys, values) if new is None else new
        for each in states:
            each.pages = self  # type: ignore[attr-defined] # read by the operator
        return keys, values

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new states of the last `update` to an operator, which appends them to the pages and attends to these."""
        assert self._new is not None, "new states are taken once"
        new, self._new = self._new, None
        return new

    def shows(self, mask: torch.Tensor, queries: int) -> bool:
        """Return whether a mask of a pass shows what the pages do."""
        return True  # its owner makes none that shows anything else


class PagedLayer(LayerInPages):
    """One layer of a `PagedCache`."""

    def __init__(self, cache: PagedCache, number: int, window: int) -> None:
        super().__init__(window)
        self._cache = weakref.ref(cache)
        self._number = number
        self.value_start = cache.pool.value_starts[number]
        self.gathers = not cache.pool.coded
        self.is_initialized = True

    @property
    def pool(self) -> PagePool:
        return self._owner.pool

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override] # not to be set
        return self.pool.data[self._number]

    @property
    def table(self) -> torch.Tensor:  # type: ignore[override]
        return self.pool.table

    @property
    def held(self) -> torch.Tensor:  # type: ignore[override]
        return self.pool.held

    @property
    def ragged(self) -> bool:  # type: ignore[override]
        return self._owner.ragged

    @property
    def _owner(self) -> PagedCache:
        cache = self._cache()
        assert cache is not None, "a layer is used with its cache"
        return cache

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new states (B, KV heads, T, D) for an operator that appends them, or all of each row's, (B, KV heads, S, D)."""
        cache = self._owner
        states = new = key_states, value_states
        if self.gathers:
            length, first = self.get_mask_sizes(key_states.shape[2])
            states = cache.gathered(self.data, new, first, length)
        else:
            cache.unread.add(self._number)
        return self._offered(*states, new=new) if cache.offers_pages or not self.gathers else states

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        new = super().take()
        self.gathers = False
        self._owner.unread.discard(self._number)
        return new

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def get_seq_length(self) -> int:
        return self._owner.longest

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if not self._owner.gathers:
            return query_length, 0  # no mask is read
        earlier = self._owner.longest
        kept = min(earlier, self.window - 1) if self.window else earlier
        return kept + query_length, earlier - kept


class StateLayer(LinearAttentionLayer):
    """A layer of a `PagedCache` with recurrent or convolution states: those of the rows of a pass, which have earlier tokens, or zeros.

    Args:
        example: the layer of a cache that holds tokens.
    """

    def __init__(self, example: LinearAttentionLayer) -> None:
        super().__init__(number_of_states=example.number_of_states)
        for name in FLAGS:
            setattr(self, name, dict(getattr(example, name)))
        self.dtype, self.device = example.dtype, example.device


class PagedStateLayer(StateLayer, PagedLayer):  # type: ignore[override] # transformers combines its classes in the same way
    """A layer of a `PagedCache` that has states beside keys and values."""

    is_compileable = False

    def __init__(self, cache: PagedCache, number: int, window: int, example: LinearAttentionLayer) -> None:
        PagedLayer.__init__(self, cache, number, window)
        StateLayer.__init__(self, example)

    lazy_initialization = PagedLayer.lazy_initialization  # type: ignore[assignment]


class PagedCache(Cache):
    """The sequences of one forward pass after another, which may be any of a pool's.

    Attributes:
        serial: that no other cache has.
        offers_pages: whether an operator may take the states of a layer that gathers, and then has to in all later passes.
        longest: tokens of the longest sequence before the current pass.
        ragged: whether the current pass has any number of tokens of each sequence, in one row.
        unread: layers whose states an operator has to read in this pass.

    Args:
        example: a cache of the model that holds tokens, from which the pool was made.
        first: the number of its first layer in the pool.
    """

    def __init__(self, pool: PagePool, example: Cache, *, first: int = 0, offers_pages: bool) -> None:
        self.pool = pool
        super().__init__(layers=[self._layer(number, layer) for number, layer in enumerate(example.layers, first)])
        self._paged = [layer for layer in self.layers if isinstance(layer, PagedLayer)]
        self.serial = next(_serials)
        self.offers_pages = offers_pages
        self.longest = self._tokens = 0
        self.ragged = False
        self.unread: set[int] = set()
        adopt(self)
        self._sequences: list[PagedSequence] = []
        self._places: dict[object, torch.Tensor] = {}  # of the states of this pass, which layers of one form share
        self._state_pool = pool.states if any(map(has_states, self.layers)) else None
        self._states: Mapping[StateName, torch.Tensor] = {}  # recurrent ones, of the rows of this pass
        self._copied = False  # whether these are copies
        self._past: Mapping[int, Mapping[tuple[str, int, int], torch.Tensor]] = {}  # where those after each token of this pass are kept

    def _layer(self, number: int, example: Any) -> Any:
        window = int(getattr(example, "sliding_window", None) or 0)
        if number not in self.pool.data:
            return StateLayer(example) if has_states(example) else type(example)()
        return PagedStateLayer(self, number, window, example) if has_states(example) else PagedLayer(self, number, window)

    @property
    def gathers(self) -> bool:
        """Whether keys and values of any layer are gathered, so that masks are read."""
        return any(layer.gathers for layer in self._paged)

    @property
    def is_linear(self) -> list[bool]:
        """Of each layer, whether it has recurrent states alone; transformers knows its own classes only."""
        return [type(layer) is StateLayer for layer in self.layers]

    def begin(
        self,
        sequences: Iterable[PagedSequence],
        tokens: int,
        *,
        held: Sequence[int] | None = None,
        ragged: bool = False,
        copies: bool = False,
        keeps_past: bool = False,
    ) -> None:
        """Prepare a forward pass over `tokens` new tokens of each sequence, which is a row of the pass.

        Args:
            held: tokens of each before these; by default all that it has.
            ragged: whether the pass has one row, of as many tokens as there are `sequences`, of which each may be several of them. Without
                recurrent states, in layers that an operator reads.
            copies: whether the pass has copies of recurrent states, so that the sequences keep theirs if it fails.
            keeps_past: whether the pass keeps the states after each token, for `StatePool.return_to`.

        Raises:
            NoPagesError: the pool is full.
            LostStatesError: an earlier pass over a sequence has failed.
        """
        self._sequences, self._tokens, self.ragged = list(sequences), tokens, ragged
        pool = self.pool
        lengths = [sequence.tokens for sequence in self._sequences] if held is None else list(held)
        for sequence, length in zip(self._sequences, lengths, strict=True):
            pool.grow(sequence, length + tokens)
        shown = [(sequence, len(sequence.pages), sequence.losses) for sequence in self._sequences]
        for row, (sequence, pages, losses) in enumerate(shown):
            if row >= len(pool.shown) or pool.shown[row] != (sequence, pages, losses):
                pool.table_numbers[row, :pages] = sequence.pages
        pool.shown = shown
        pool.held_numbers[: len(lengths)] = lengths
        self.longest = max(lengths)
        self.unread.clear()
        self._places.clear()
        if self._state_pool is not None:
            self._show_states(self._state_pool, copies)
            self._past = self._state_pool.past(len(lengths)) if keeps_past else {}
            for number, layer in enumerate(self.layers):
                if has_states(layer):
                    show_past(layer, dict(self._past.get(number, {})))  # a program may put its own tensors in place

    def _show_states(self, pool: StatePool, copies: bool) -> None:
        states = pool.copied(self._sequences) if copies else pool.rows(self._sequences)
        if states is not self._states:
            for (number, attribute, index), tensor in states.items():
                vars(self.layers[number])[attribute][index] = tensor
        self._states, self._copied = states, copies
        if not copies:
            for sequence in self._sequences:
                sequence.states_at = -1

    def abandon(self) -> None:
        """Take back `begin` where nothing was computed after it."""
        if self._state_pool is not None:
            for sequence in self._sequences:
                sequence.states_at = sequence.tokens

    def arguments(self) -> dict[str, torch.Tensor]:
        """Return what the model needs beside the tokens of the prepared pass: positions, and a mask if gathered rows are padded."""
        held = self.pool.held[: len(self._sequences), None]
        shifts = torch.tensor([[sequence.position_shift] for sequence in self._sequences])
        positions = held + shifts + torch.arange(self._tokens)
        found = {"position_ids": positions.T if self.ragged else positions}
        if self.gathers and bool((held != self.longest).any()):
            found["attention_mask"] = (torch.arange(self.longest + self._tokens) >= self.longest - held).long()
        return found

    def gathered(
        self, data: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor], first: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a layer's new keys and values (B, KV heads, T, D); return those of `length` columns of the rows, each padded to `longest`.

        Args:
            data: of the layer.
            first: the first of these columns; the last one is the last new token.
        """
        keys, values = new
        unit = math.gcd(keys.shape[3], values.shape[3])
        rows = data.view(-1, unit)  # copied whole, which takes a tenth of the time of indexing the pages on a CPU
        found, start = [], 0
        for states in new:
            batch, heads, tokens, columns = states.shape
            form = first, start, heads, columns, unit, *data.shape, data.device
            if form not in self._places:
                position = torch.arange(first, first + length) - self.longest + self.pool.held[:batch, None]
                page = self.pool.table[:batch].gather(1, position.clamp(min=0) // PAGE_TOKENS)
                page[position < 0] = self.pool.pages
                token = page * data.shape[1] + position % PAGE_TOKENS * columns + start  # (B, S)
                head = token[:, None] + PAGE_TOKENS * columns * torch.arange(heads)[:, None]
                self._places[form] = ((head[..., None] + torch.arange(0, columns, unit)) // unit).to(data.device)
            place = self._places[form]  # (B, KV heads, S, units)
            rows.index_copy_(0, place[:, :, -tokens:].flatten(), states.reshape(-1, unit))
            found.append(rows.index_select(0, place.flatten()).view(batch, heads, length, columns))
            start += PAGE_TOKENS * heads * columns
        return found[0], found[1]

    def finish(self) -> None:
        """Count the tokens of a forward pass that has succeeded.

        Raises:
            UnreadPagesError: a layer's states were not read.
        """
        self.require_read()
        for sequence in self._sequences:
            sequence.tokens += self._tokens
        if self._state_pool is not None:
            states = self._states
            for (number, attribute, index), tensor in states.items():
                held = vars(self.layers[number])[attribute][index]
                if held is not tensor:  # replaced by one that a program owns
                    tensor.copy_(held)
                    self._states = {}
            if self._copied:
                self._state_pool.write(self._sequences, states)
            for number, past in self._past.items():
                for name, place in past.items():
                    if (kept := past_of(self.layers[number])[name]) is not place:
                        place.copy_(kept)
            for row, sequence in enumerate(self._sequences):
                sequence.states_at = sequence.tokens - (self._tokens if self._past else 0)
                if self._past:
                    sequence.past = sequence.states_at + 1, row

    def require_read(self) -> None:
        """
        Raises:
            UnreadPagesError: a layer's states were not read in this pass.
        """
        if self.unread:
            raise UnreadPagesError(f"attention left the keys and values of {len(self.unread)} of {len(self.layers)} layers unread")


_serials = itertools.count()
