"""MTP layers over the sequences that a server decodes together (mtp.py has those of a single one).

Their keys and values are in the pages of the model's own layers: the entry of a state has the place of the state's token, so that what a
sequence has for its longest text is enough for both, and a prefix has the entries that were made of it. The states of each forward pass
wait in a stream until the tokens after them are known and a draft needs the entries, or until they are many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import Cache, PreTrainedModel

from moegraft.operators.decode.mtp import MANY
from moegraft.operators.decode.mtp_layers import foresees_experts, layers_cache, mtp_layers
from moegraft.operators.decode.pages import PagedCache, PagedSequence, PagePool
from moegraft.operators.draft import DraftSwitch

if TYPE_CHECKING:
    from moegraft.operators.offload.model_experts import ModelEngines

MOST_WAITING = 256  # states of a sequence without drafts, which are then fed in one pass


@torch.no_grad()
def example_cache(model: PreTrainedModel) -> Cache:
    """Return a cache of a model's MTP layers that holds a token."""
    cache: Cache = layers_cache(model)
    layers, place = mtp_layers(model), torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    states = torch.zeros(1, 1, layers.config.hidden_size, dtype=model.dtype, device=model.device)
    for number in range(len(layers.layers)):
        layers.forward_layer(number, states, position_ids=place, mtp_cache=cache, input_ids=place)
    return cache


@dataclass(eq=False, slots=True)
class _Stream:
    """What MTP layers have not computed yet of one sequence.

    Attributes:
        ids: the tokens that the model has computed, or a prefix had.
        waiting: of each layer, the states (T, H) before it of the latest positions, which have no entry.
        fed: of each layer, the first of these positions.
        made: the states (T, H) of the layer that ran last: the first one's last state, then those of the draft.
    """

    ids: list[int]
    waiting: list[list[torch.Tensor]]
    fed: list[int]
    made: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Feed:
    """States (T, H) of a sequence for a layer, which get entries from `first` on."""

    sequence: PagedSequence
    states: torch.Tensor
    first: int
    text: Sequence[int]


class PagedStreams:
    """The MTP layers of a model over the sequences of a pool.

    Args:
        example: from `example_cache`, whose layers' keys and values the pool stores from its layer `first` on.
        longest: tokens of a draft.
        switch: counts feeding many states as preparation, after which the next draft takes less time.
        engines: load what the verification of drafts will probably need while they are drawn; None where no experts are on a GPU.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pool: PagePool,
        example: Cache,
        *,
        first: int,
        longest: int,
        switch: DraftSwitch | None = None,
        engines: ModelEngines | None = None,
        offers_pages: bool = True,
    ) -> None:
        self.cache = PagedCache(pool, example, first=first, offers_pages=offers_pages)
        self.longest = longest
        self._layers = mtp_layers(model)
        self._last = len(self._layers.layers) - 1
        self._switch = switch
        self._engines = engines if foresees_experts(model) else None
        self._device = model.device
        self._streams: dict[PagedSequence, _Stream] = {}

    def begin(self, sequence: PagedSequence, token_ids: Sequence[int]) -> None:
        """Begin a sequence, which has its first tokens of a prefix: states come from those after them on."""
        start = sequence.tokens
        self._streams[sequence] = _Stream(list(token_ids[:start]), [[] for _ in self._layers.layers], [start] * (self._last + 1))

    def end(self, sequence: PagedSequence) -> None:
        del self._streams[sequence]

    def crop(self, sequence: PagedSequence, tokens: int) -> None:
        """Forget the states of the latest pass from token `tokens` on."""
        stream = self._streams[sequence]
        if (more := len(stream.ids) - tokens) > 0:
            del stream.ids[tokens:]
            latest = stream.waiting[0]
            assert latest[-1].shape[0] >= more, "only tokens of the latest pass are removed"
            latest[-1] = latest[-1][:-more]

    def note(self, sequences: Sequence[PagedSequence], token_ids: Sequence[Sequence[int]], states: torch.Tensor) -> None:
        """Take the hidden states (B, T, H) of a pass over tokens (B, T) of some sequences."""
        streams = [self._streams[sequence] for sequence in sequences]
        many = [each for each, stream in zip(sequences, streams, strict=True) if len(stream.ids) - stream.fed[0] >= MOST_WAITING]
        self._settle([(each, self._streams[each].ids) for each in many])  # before the new ones, of which some may be removed
        for stream, ids, new in zip(streams, token_ids, states, strict=True):
            stream.ids += ids
            stream.waiting[0].append(new)
        if states.shape[1] > self.longest + 1:  # part of a prompt
            self._settle([(sequence, stream.ids) for sequence, stream in zip(sequences, streams, strict=True)])

    def logits(self, sequences: Sequence[PagedSequence], texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logits (B, V) float32 after texts: a sequence's tokens, one that is not computed, and equally many of a draft.

        The sequences have pages for the longest draft.
        """
        streams = [self._streams[sequence] for sequence in sequences]
        drafted = len(texts[0]) - len(streams[0].ids) - 1
        number = min(drafted, self._last)
        if drafted:
            feeds = []
            for sequence, stream, text in zip(sequences, streams, texts, strict=True):
                assert stream.made is not None, "a draft begins without tokens"
                states = stream.made[-1:]  # the last layer's own
                if drafted <= self._last:
                    states = torch.cat([*stream.waiting[number], *([stream.made] if number > 1 else [])])
                feeds.append(_Feed(sequence, states, len(text) - 1 - number - len(states), text))
            for stream, made in zip(streams, self._feed(number, feeds, padded=True), strict=True):
                stream.made = made
        else:
            if self._switch is not None and any(len(stream.ids) - stream.fed[0] > max(MANY, self.longest + 1) for stream in streams):
                self._switch.preparations += 1
            self._settle(list(zip(sequences, texts, strict=True)), padded=True)
        last = torch.stack([stream.made[-1:] for stream in streams if stream.made is not None])
        if self._engines is not None:
            self._engines.expect(last)
        logits: torch.Tensor = self._layers._project_to_logits(last)[:, -1]
        return logits.float()

    def _settle(self, rows: Sequence[tuple[PagedSequence, Sequence[int]]], *, padded: bool = False) -> None:
        """Feed each layer all states of sequences whose tokens are in their texts."""
        if not rows:
            return
        for number in range(self._last + 1):
            feeds = []
            for sequence, text in rows:
                stream = self._streams[sequence]
                first, before = stream.fed[number], stream.waiting[number]
                size = min(sum(map(len, before)), len(text) - 1 - number - first)
                if size > 0:
                    whole = torch.cat(before)
                    stream.waiting[number], stream.fed[number] = [whole[size:]], first + size
                    feeds.append(_Feed(sequence, whole[:size], first, text))
            for feed, made in zip(feeds, self._feed(number, feeds, padded=padded), strict=True):
                stream = self._streams[feed.sequence]
                if number == 0:
                    stream.made = made[-1:]
                if number < self._last:
                    stream.waiting[number + 1].append(made)

    def _feed(self, number: int, feeds: Sequence[_Feed], *, padded: bool) -> list[torch.Tensor]:
        """Feed a layer states, each with the token `number` + 1 positions after it; return its own states, (T, H) of each sequence.

        Those of several sequences are computed together if they are equally many, or `padded` where they are few: what a row is padded
        with follows its own states, and its entries are overwritten later.
        """
        made: dict[int, torch.Tensor] = {}
        groups: dict[tuple[int, int], list[int]] = {}
        for index, feed in enumerate(feeds):
            size = 0 if padded and len(feed.states) <= self.longest + 1 else len(feed.states)
            groups.setdefault((size, feed.first if self.cache.gathers else 0), []).append(index)  # gathered keys have no mask for padding
        for group in groups.values():
            rows = [feeds[index] for index in group]
            most = max(len(row.states) for row in rows)
            self.cache.begin([row.sequence for row in rows], most, held=[row.first for row in rows])
            states = [torch.cat([row.states, row.states[-1:].expand(most - len(row.states), -1)]) for row in rows]
            ids = [list(row.text[row.first + number + 1 :][: len(row.states)]) for row in rows]
            places = torch.tensor([row.first for row in rows])[:, None] + torch.arange(number + 1, number + 1 + most)
            found = self._layers.forward_layer(
                number,
                torch.stack(states),
                position_ids=places.to(self._device),
                mtp_cache=self.cache,
                input_ids=torch.tensor([row + row[-1:] * (most - len(row)) for row in ids], device=self._device),
            )
            self.cache.require_read()
            made |= {index: found[row, : len(feeds[index].states)] for row, index in enumerate(group)}
        return [made[index] for index in range(len(feeds))]
