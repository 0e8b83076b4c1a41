"""Recurrent and convolution states of many sequences, in one block of memory for each tensor of a layer.

A sequence has a place: a row of each block. Where the sequences of a forward pass have consecutive places, the pass computes in their rows,
without a copy; sequences are moved until they have, which costs one exchange when a sequence has left, and nothing while the same ones go
on. A checkpoint is a copy of a sequence's states after one of its tokens, in a place of its own: another sequence can begin there, and
nowhere else, as no token can be removed from states.

While drafts are verified, a pass leaves the states of its rows as they are, and writes those after each of its tokens beside them: a
sequence then gets those after the last token that it keeps.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from transformers import Cache

from moegraft.operators.decode.cache import StateName
from moegraft.operators.decode.states import state_tensors

if TYPE_CHECKING:
    from moegraft.operators.decode.pages import PagedSequence

_MOST_VIEWS = 16  # sets of rows that are kept, so that recorded steps find the same tensors again


class LostStatesError(Exception):
    """A sequence's states are not those after its last token: a forward pass over them has failed, or tokens were removed."""


class StatePool:
    """Places for the states of running sequences and of checkpoints.

    Attributes:
        place_bytes: of one place in all layers.
        data: each layer's states, (places, ...) in the cache's dtype and on its device, by the name of the tensor in a cache.

    Args:
        example: a cache of the model that holds tokens.
        running: places for sequences.
        checkpoints: places for checkpoints.
        past_rows, past_tokens: sequences of a pass, and its tokens, after each of which their states can be kept.

    Raises:
        ValueError: the states have more than one row for a sequence.
        RuntimeError: there is not enough memory.
    """

    def __init__(self, example: Cache, *, running: int, checkpoints: int, past_rows: int = 0, past_tokens: int = 0) -> None:
        self.place_bytes = 0
        self.past_rows, self.past_tokens = past_rows, past_tokens
        self.data: dict[StateName, torch.Tensor] = {}
        self._past: dict[StateName, torch.Tensor] = {}  # (tokens, rows, ...)
        self._past_views: dict[int, dict[int, dict[tuple[str, int, int], torch.Tensor]]] = {}
        for name, tensor in state_tensors(example).items():
            if tensor.shape[0] != 1:
                raise ValueError(f"a layer's states have {tensor.shape[0]} rows for one sequence")
            self.data[name] = tensor.new_empty(running + checkpoints, *tensor.shape[1:])
            self._past[name] = tensor.new_empty(past_tokens, past_rows, *tensor.shape[1:])
            self.place_bytes += tensor.nbytes
        self._running: list[PagedSequence | None] = [None] * running  # the sequence of each place
        self._free = list(range(running, running + checkpoints))  # a heap, of checkpoints
        self._views: dict[tuple[int, int], dict[StateName, torch.Tensor]] = {}
        self.checkpoints = checkpoints

    @property
    def running(self) -> int:
        """Sequences that have a place."""
        return len(self._running) - self._running.count(None)

    @property
    def full(self) -> bool:
        return None not in self._running

    @property
    def kept(self) -> int:
        """Checkpoints."""
        return self.checkpoints - len(self._free)

    def enter(self, sequence: PagedSequence, checkpoint: int | None = None) -> None:
        """Give a sequence a place, with the states of a checkpoint or those before the first token; the pool must not be full."""
        place = self._running.index(None)
        for data in self.data.values():
            if checkpoint is None:
                data[place].zero_()
            else:
                data[place] = data[checkpoint]
        self._running[place] = sequence
        sequence.place, sequence.states_at = place, sequence.tokens

    def leave(self, sequence: PagedSequence) -> None:
        """Take the place of a sequence; it keeps its checkpoints."""
        assert sequence.place is not None, "a sequence leaves once"
        self._running[sequence.place] = None
        sequence.place = None

    def save(self, sequence: PagedSequence) -> bool:
        """Add a checkpoint after the last token of a sequence; return False if there is no place for it."""
        assert sequence.place is not None, "the sequence has states"
        require_states(sequence)
        if sequence.tokens in sequence.checkpoints or not sequence.tokens:
            return True
        if not self._free:
            return False
        place = heapq.heappop(self._free)
        for data in self.data.values():
            data[place] = data[sequence.place]
        sequence.checkpoints[sequence.tokens] = place
        return True

    def drop(self, sequence: PagedSequence, tokens: int) -> None:
        """Drop a sequence's checkpoint after `tokens` tokens."""
        heapq.heappush(self._free, sequence.checkpoints.pop(tokens))

    def rows(self, sequences: Sequence[PagedSequence]) -> Mapping[StateName, torch.Tensor]:
        """Return the states of some sequences in place, (B, ...) each, for which sequences may move."""
        for sequence in sequences:
            require_states(sequence)
        first = self._line_up(sequences)
        key = first, len(sequences)
        if key not in self._views:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            self._views[key] = {name: _part(data, first, len(sequences)) for name, data in self.data.items()}
        return self._views[key]

    def past(self, rows: int) -> Mapping[int, Mapping[tuple[str, int, int], torch.Tensor]]:
        """Return where a pass over `rows` sequences writes their states after each token, (B, ...) each, by layer."""
        assert rows <= self.past_rows, "there is room for these rows"
        if rows not in self._past_views:
            found: dict[int, dict[tuple[str, int, int], torch.Tensor]] = {}
            for token in range(self.past_tokens):
                for (number, name, index), data in self._past.items():
                    found.setdefault(number, {})[name, index, token] = _part(data[token], 0, rows)
            self._past_views[rows] = found
        return self._past_views[rows]

    def mark(self, sequences: Sequence[PagedSequence]) -> None:
        """Keep the states of sequences, to which `return_to` goes back after steps of a draft."""
        for row, sequence in enumerate(sequences):
            require_states(sequence)
            for name, data in self.data.items():
                self._past[name][0, row] = data[sequence.place]
            sequence.past = sequence.tokens, row

    def return_to(self, sequence: PagedSequence, tokens: int) -> None:
        """Give a sequence the states after `tokens` tokens, of those kept since a mark or in the latest pass."""
        if sequence.past is None or sequence.states_at == tokens:
            return
        first, row = sequence.past
        if 0 <= tokens - first < self.past_tokens:
            for name, data in self.data.items():
                data[sequence.place] = self._past[name][tokens - first, row]
            sequence.states_at = tokens

    def copied(self, sequences: Sequence[PagedSequence]) -> dict[StateName, torch.Tensor]:
        """Return copies of the states of some sequences, (B, ...) each."""
        for sequence in sequences:
            require_states(sequence)
        places = [sequence.place for sequence in sequences]
        return {name: data[places] for name, data in self.data.items()}

    def write(self, sequences: Sequence[PagedSequence], states: Mapping[StateName, torch.Tensor]) -> None:
        """Replace the states of some sequences by (B, ...) each."""
        places = [sequence.place for sequence in sequences]
        for name, data in self.data.items():
            data[places] = states[name]

    def _line_up(self, sequences: Sequence[PagedSequence]) -> int:
        """Give sequences consecutive places in their order, with as few moves as possible; return the first place."""
        last = len(self._running) - len(sequences)
        places = [sequence.place for sequence in sequences]
        starts = Counter(min(max(0, place - row), last) for row, place in enumerate(places) if place is not None)
        first = starts.most_common(1)[0][0]
        for place, sequence in enumerate(sequences, first):
            if sequence.place != place:
                self._exchange(sequence, place)
        return first

    def _exchange(self, sequence: PagedSequence, place: int) -> None:
        other, old = self._running[place], sequence.place
        assert old is not None, "the sequence has a place"
        for data in self.data.values():
            held = None if other is None else data[place].clone()
            data[place] = data[old]
            if held is not None:
                data[old] = held
        self._running[place], self._running[old] = sequence, other
        sequence.place = place
        if other is not None:
            other.place = old


def require_states(sequence: PagedSequence) -> None:
    """Raise LostStatesError where the states of a sequence are not those after its last token."""
    if sequence.states_at != sequence.tokens:
        raise LostStatesError("the states of a sequence were lost in a forward pass that failed")


def _part(data: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Return `count` rows of `data`; on the CPU as a tensor with a storage of its own, which recorded steps know their memory by."""
    if data.device.type != "cpu":
        return data[first : first + count]
    rows = data.view(data.shape[0], -1).view(torch.uint8).numpy()[first : first + count]
    return torch.from_numpy(rows).view(data.dtype).view(count, *data.shape[1:])
