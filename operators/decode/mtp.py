"""Multi-token prediction: layers of a checkpoint that predict the tokens after the next one (DeepSeek-V3, arXiv:2412.19437, section 2.2).

`mtp_layers` builds the layers. `MtpStreams` has what they computed of one sequence, `PagedStreams` of those that a server decodes together.
Of these, keys and values are in the pages of the model's own layers: the entry of a state has the place of the state's token, so that what
a sequence has for its longest text is enough for both, and a prefix has the entries that were made of it. The states of each forward pass
wait in a stream until the tokens after them are known and a draft needs the entries, or until they are many.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from moegraft.operators.base import CACHE
from moegraft.operators.decode.cache import adopt
from moegraft.operators.decode.drafts import Drafter, draw
from moegraft.operators.decode.loop import DecodedSequence
from moegraft.operators.decode.mtp_layers import foresees_experts, layers_cache, mtp_layers
from moegraft.operators.decode.pages import PagedCache, PagedSequence, PagePool
from moegraft.operators.decode.rollback import longest_rewind, passes_over
from moegraft.operators.decode.sampling import AcceptanceRule, DraftToken
from moegraft.operators.decode.states import has_states
from moegraft.operators.draft import DraftSwitch

if TYPE_CHECKING:
    from moegraft.operators.decode.replay import StepReplay
    from moegraft.operators.offload.model_experts import ModelEngines

MANY = 8  # waiting states that a draft feeds in one step; more are a prompt
MOST_WAITING = 512  # states, which take memory
MOST_WAITING_OF_ONE = 256  # states of a server's sequence without drafts, which are then fed in one pass


@functools.cache
def _layer_cache_class() -> Any:
    from transformers.cache_utils import MtpCache

    class LayerCache(MtpCache):
        """The cache of one MTP layer, the last in it; those before it stay empty, as modules address layers by their number."""

        def get_seq_length(self, layer_idx: int = -1) -> int:
            return super().get_seq_length(len(self.layers) - 1)

    return LayerCache


def _layer_cache(model: PreTrainedModel, number: int) -> Any:
    """Return an empty cache of moegraft's own for one MTP layer, as a program appends to a cache whose length is its position."""
    cache = layers_cache(model)
    cache.__class__ = _layer_cache_class()
    cache.layers = [DynamicLayer() for _ in range(number)] + [cache.layers[number]]
    return adopt(cache)


class MtpStreams:
    """What the MTP layers of a model have computed of one sequence.

    Layer k has an entry for each position whose token k + 1 positions on is in the sequence.

    Args:
        replay: what replays the steps of a layer, as it does those of the body; None where nothing does.

    Attributes:
        passes: of each layer, over a cache with these entries.
        waiting: of each layer, the states (1, T, H) before it of positions without an entry, `rows` in all.
        position: of the body's next state; -1 while layers are fed, as after an interrupt nothing goes on from there.
    """

    def __init__(self, model: PreTrainedModel, replay: StepReplay | None = None) -> None:
        self._model = model
        self._layers = mtp_layers(model)
        self._replay = replay
        self.last = len(self._layers.layers) - 1
        self.passes = [passes_over(_layer_cache(model, number), replay) for number in range(self.last + 1)]
        self.waiting: list[list[torch.Tensor]] = [[] for _ in self.passes]
        self.rows = [0] * (self.last + 1)
        self.position = 0

    @property
    def caches(self) -> list[Any]:
        """Those of the layers, with all entries."""
        for passes in self.passes:
            passes.close()
        return [passes.cache for passes in self.passes]

    def add(self, states: torch.Tensor, position: int) -> None:
        """Add states (1, T, H) of the body, after which `position` is that of its next one."""
        self.waiting[0].append(states)
        self.rows[0] += states.shape[1]
        self.position = position

    def go_back_to(self, position: int) -> bool:
        """Remove what was computed of tokens from `position` on; return False where windows or states do not allow it."""
        caches = self.caches
        layers: list[Any] = [cache.layers[-1] for cache in caches]
        if position > self.position or (position < self.position and any(type(layer) is not DynamicLayer for layer in layers)):
            return False
        if position < self.position:
            end = self.position
            for number, layer in enumerate(layers):
                end -= self.rows[number]
                if (extra := min(end - (position - 1 - number), layer.get_seq_length())) > 0:
                    layer.crop(-extra)
            self.waiting, self.rows, self.position = [[] for _ in caches], [0] * len(caches), position
        return True

    def go_on(self, replay: StepReplay | None) -> None:
        """Begin to extend the sequence in another call."""
        self._replay, self.passes = replay, [passes_over(cache, replay) for cache in self.caches]

    def settle(self, ids: torch.Tensor) -> None:
        """Feed the layers the states whose tokens are in a sequence `ids` (1, L) before its last token, but the latest one of each."""
        position, self.position = self.position, -1
        for number in range(self.last + 1):
            size = self.rows[number] - 1
            if size < 1:
                continue
            before = torch.cat(self.waiting[number], dim=1)
            if size <= MANY:
                self.passes[number].mark(MANY + self.last, singly=True)
            states, _ = self.feed(number, before[:, :size], ids[0, -1 - size : -1].tolist(), ids.shape[1] - 1, steps=False)
            if size <= MANY:
                self.passes[number].rewind(keep=size)
                self.passes[number].unmark()
            self.entered(number, before[:, size:], states)
        self.position = position

    def entered(self, number: int, left: torch.Tensor, states: torch.Tensor) -> None:
        """Note that layer `number` has entries of all states before it but those `left`, and gives the next layer `states`."""
        self.waiting[number], self.rows[number] = [left] if left.shape[1] else [], left.shape[1]
        if number < self.last and states.shape[1]:
            self.waiting[number + 1].append(states)
            self.rows[number + 1] += states.shape[1]

    def feed(
        self, number: int, states: torch.Tensor, tokens: Sequence[int], end: int, *, steps: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed a layer states (1, T, H), each with one of T tokens, after which `end` is the position of the next one.

        Args:
            steps: whether such a pass is a step that may be replayed.

        Returns:
            Its own states, and the logits after the last one, (V,) float32 until the next such pass.
        """
        passes = self.passes[number]
        if steps and (followed := passes.follow(tokens, states)) is not None:
            assert passes.hidden_states is not None, "every pass of a layer returns them"
            return passes.hidden_states, followed[-1]
        passes.leave()
        arguments: dict[str, Any] = {
            "input_ids": torch.tensor([tokens], device=states.device),
            "states": states,
            "position_ids": torch.arange(end - len(tokens), end, device=states.device)[None],
            "layer": number,
            CACHE: passes.cache,
        }
        found: Any = (
            self._replay.forward(self._model, self._step, (), arguments, between_steps=True)
            if steps and self._replay is not None
            else self._step(**arguments)
        )
        passes.note()
        return found.hidden_states[-1], found.logits[0, -1].to(torch.float32)

    def _step(
        self, input_ids: torch.Tensor, states: torch.Tensor, position_ids: torch.Tensor, layer: int, **cache: Any
    ) -> CausalLMOutputWithPast:
        """The forward pass of a layer, with the outputs of a model of which it is the only layer."""
        made = self._layers.forward_layer(layer, states, position_ids=position_ids, mtp_cache=cache[CACHE], input_ids=input_ids)
        logits = self._layers._project_to_logits(made[:, -1:])
        return CausalLMOutputWithPast(logits=logits, **cache, hidden_states=(made,))


def _streams_of(model: PreTrainedModel, cache: Any, position: int, replay: StepReplay | None = None) -> MtpStreams:
    """Return what was computed of the first `position` tokens of a cache, which the caller owns from then on; else empty streams."""
    earlier: MtpStreams | None = mtp_layers(model).streams.pop(cache, None)
    if earlier is None or not earlier.go_back_to(position):
        return MtpStreams(model, replay)
    earlier.go_on(replay)
    return earlier


def read_chunk(model: PreTrainedModel, cache: Any, ids: torch.Tensor, states: torch.Tensor) -> None:
    """Let the MTP layers of a model read a chunk of a prompt, which the model has computed into `cache`.

    Args:
        ids: (1, L), the prompt up to the token after the chunk.
        states: (1, T, H), the last hidden states of the chunk.
    """
    position = ids.shape[1] - 1
    streams = _streams_of(model, cache, position - states.shape[1])
    streams.add(states, position)
    streams.settle(ids)
    mtp_layers(model).streams[cache] = streams


class MtpDrafter(Drafter):
    """The MTP layers: layer k predicts the token k + 2 positions after a state of the body, from it and the k + 1 tokens between them.

    Drafts longer than there are layers feed the last layer's own states back to it. What drafts add to the layers' caches is removed.

    Args:
        replay: what replays the steps of a layer, as it does those of the body; None where nothing does.
        engines: load what the verification of a draft will probably need while it is drawn; None where no experts are on a GPU.
    """

    feeds = False  # the model's cache
    reads_hidden_states = True

    def __init__(self, model: PreTrainedModel, switch: DraftSwitch, replay: StepReplay | None, engines: ModelEngines | None) -> None:
        self._model = model
        self._engines = engines if foresees_experts(model) else None
        self._switch = switch
        self._replay = replay
        self._streams: MtpStreams | None = None
        self._longest: int | None = None  # draft that can be removed from the last layer's cache
        self._has_states = False

    def begin(self, sequence: DecodedSequence) -> None:
        states = sequence.hidden_states
        assert states is not None, "the sequence was asked for them"
        self._streams = _streams_of(self._model, sequence.cache, sequence.length - 1 - states.shape[1], self._replay)
        self.keep(sequence, states.shape[1])
        self._longest = longest_rewind(self._streams.caches[-1])
        self._has_states = any(has_states(cache.layers[-1]) for cache in self._streams.caches)

    def keep(self, sequence: DecodedSequence, tokens: int) -> None:
        streams, states = self._streams, sequence.hidden_states
        assert streams is not None and states is not None, "the sequence was asked for them"
        streams.add(states[:, :tokens], sequence.length - 1)
        if streams.rows[0] > MOST_WAITING:
            streams.settle(sequence.input_ids)

    def end(self, sequence: DecodedSequence) -> None:
        if sequence.cache is not None and self._streams is not None:
            self._streams.go_on(None)
            mtp_layers(self._model).streams[sequence.cache] = self._streams

    def draft(
        self, sequence: DecodedSequence, rule: AcceptanceRule, length: int, continues: Callable[[Sequence[float]], bool]
    ) -> list[DraftToken]:
        streams = self._streams
        assert streams is not None, "the sequence has begun"
        last = streams.last
        length = length if self._longest is None else min(length, self._longest - last)
        if self._has_states and last:
            length = min(length, last + 1)  # states after a pass over several tokens are those before its first
        if length < 1:
            return []
        if max(streams.rows) > MANY:  # the prompt, or plain steps: the next draft will take less time
            self._switch.preparations += 1
            streams.settle(sequence.input_ids)
        marked: dict[int, int] = {}  # entries that layers keep, of those that the draft adds
        drafted: torch.Tensor | None = None  # (1, at most k, H), the states of a layer whose tokens are drafts

        def logits_after(tokens: Sequence[int]) -> torch.Tensor:
            nonlocal drafted
            depth, end = len(tokens), sequence.length + len(tokens)
            if depth > last:
                assert drafted is not None, "the last layer was fed"
                if not last and depth == 1:
                    streams.passes[last].mark(2, singly=True)
                    marked[last] = 0
                drafted, logits = streams.feed(last, drafted[:, -1:], tokens[-1:], end)
                return logits
            fed = torch.cat([*streams.waiting[depth], *([] if drafted is None else [drafted])], dim=1)
            waiting, kept = streams.rows[depth], max(fed.shape[1] - depth, 0)
            passes = streams.passes[depth]
            passes.mark(MANY + last, singly=fed.shape[1] == 1)
            if depth:
                marked[depth] = kept
            states, logits = streams.feed(depth, fed, sequence.latest(tokens, fed.shape[1]), end)
            if not depth:
                passes.rewind(keep=kept)
                passes.unmark()
            streams.entered(depth, fed[:, kept:waiting], states[:, :kept])
            drafted = states[:, kept if last else -1 :]
            return logits

        def logits_expecting(tokens: Sequence[int]) -> torch.Tensor:
            logits = logits_after(tokens)
            if self._engines is not None and drafted is not None:
                self._engines.expect(drafted[:, -1:])
            return logits

        position, streams.position = streams.position, -1
        try:
            drafts = draw(sequence, rule, length, continues, logits_expecting)
            streams.position = position
            return drafts
        finally:
            for number, kept in marked.items():
                streams.passes[number].rewind(keep=kept)
                streams.passes[number].unmark()


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

    def copied(self) -> _Stream:
        return _Stream(self.ids[:], [each[:] for each in self.waiting], self.fed[:], self.made)


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

    def note(self, sequences: Sequence[PagedSequence], token_ids: Sequence[Sequence[int]], states: Sequence[torch.Tensor]) -> None:
        """Take the hidden states of a pass over tokens of some sequences: T tokens and (T, H) of each. If that fails, nothing changes."""
        streams = [self._streams[sequence] for sequence in sequences]
        many = [each for each, stream in zip(sequences, streams, strict=True) if len(stream.ids) - stream.fed[0] >= MOST_WAITING_OF_ONE]
        parts = [each for each, ids in zip(sequences, token_ids, strict=True) if len(ids) > self.longest + 1]  # of prompts
        before = [stream.copied() for stream in streams] if many or parts else []
        try:
            self._settle([(each, self._streams[each].ids) for each in many])  # before the new ones, of which some may be removed
            for stream, ids, new in zip(streams, token_ids, states, strict=True):
                stream.ids += ids
                stream.waiting[0].append(new)
            self._settle([(each, self._streams[each].ids) for each in parts])
        except BaseException:
            self._streams.update(zip(sequences, before, strict=True))
            raise

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
