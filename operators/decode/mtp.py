"""Multi-token prediction: layers of a checkpoint that predict the tokens after the next one (DeepSeek-V3, arXiv:2412.19437, section 2.2).

`mtp_layers` builds the layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from moegraft.operators.decode.acceptance import AcceptanceRule, DraftToken
from moegraft.operators.decode.cache import adopt
from moegraft.operators.decode.drafts import Drafter, draw
from moegraft.operators.decode.loop import DecodedSequence
from moegraft.operators.decode.mtp_layers import foresees_experts, layers_cache, mtp_layers
from moegraft.operators.decode.rollback import CacheMark, longest_rewind
from moegraft.operators.decode.states import has_states
from moegraft.operators.draft import DraftSwitch

if TYPE_CHECKING:
    from moegraft.operators.decode.replay import StepReplay
    from moegraft.operators.offload.model_experts import ModelEngines

MANY = 8  # waiting states that a draft feeds in one step; more are a prompt
MOST_WAITING = 512  # states, which take memory


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

    Attributes:
        caches: of each layer, with these entries.
        waiting: of each layer, the states (1, T, H) before it of positions without an entry.
        position: of the body's next state; -1 while layers are fed, as after an interrupt nothing goes on from there.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._layers = mtp_layers(model)
        self.last = len(self._layers.layers) - 1
        self.caches = [_layer_cache(model, number) for number in range(self.last + 1)]
        self.waiting: list[list[torch.Tensor]] = [[] for _ in self.caches]
        self.position = 0

    def rows(self, number: int) -> int:
        return sum(each.shape[1] for each in self.waiting[number])

    def add(self, states: torch.Tensor, position: int) -> None:
        """Add states (1, T, H) of the body, after which `position` is that of its next one."""
        self.waiting[0].append(states)
        self.position = position

    def go_back_to(self, position: int) -> bool:
        """Remove what was computed of tokens from `position` on; return False where windows or states do not allow it."""
        layers: list[Any] = [cache.layers[-1] for cache in self.caches]
        if position >= self.position or any(type(layer) is not DynamicLayer for layer in layers):
            return position == self.position
        end = self.position
        for number, layer in enumerate(layers):
            end -= self.rows(number)
            if (extra := min(end - (position - 1 - number), layer.get_seq_length())) > 0:
                layer.crop(-extra)
        self.waiting, self.position = [[] for _ in self.caches], position
        return True

    def settle(self, ids: torch.Tensor) -> None:
        """Feed the layers the states whose tokens are in a sequence `ids` (1, L) before its last token, but the latest one of each."""
        position, self.position = self.position, -1
        for number in range(self.last + 1):
            size = self.rows(number) - 1
            if size < 1:
                continue
            before = torch.cat(self.waiting[number], dim=1)
            mark = CacheMark(self.caches[number], MANY + self.last) if size <= MANY else None
            states, _ = self.feed(number, before[:, :size], ids[:, :-1])
            if mark is not None:
                mark.rewind(keep=size)
            self.entered(number, before[:, size:], states)
        self.position = position

    def entered(self, number: int, left: torch.Tensor, states: torch.Tensor) -> None:
        """Note that layer `number` has entries of all states before it but those `left`, and gives the next layer `states`."""
        self.waiting[number] = [left] if left.shape[1] else []
        if number < self.last and states.shape[1]:
            self.waiting[number + 1].append(states)

    def feed(
        self, number: int, states: torch.Tensor, ids: torch.Tensor, replay: StepReplay | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed a layer states (1, T, H), each with one of the last T tokens of `ids`.

        Returns:
            Its own states, and the logits after the last one, (V,) float32.
        """
        end, size = ids.shape[1], states.shape[1]
        arguments = {
            "input_ids": ids[:, -size:],
            "states": states,
            "position_ids": torch.arange(end - size, end, device=ids.device)[None],
            "layer": number,
            "past_key_values": self.caches[number],
        }
        found: Any = (
            self._step(**arguments) if replay is None else replay.forward(self._model, self._step, (), arguments, between_steps=True)
        )
        return found.hidden_states[-1], found.logits[0, -1].to(torch.float32)

    def _step(
        self, input_ids: torch.Tensor, states: torch.Tensor, position_ids: torch.Tensor, layer: int, past_key_values: Any
    ) -> CausalLMOutputWithPast:
        """The forward pass of a layer, with the outputs of a model of which it is the only layer."""
        made = self._layers.forward_layer(layer, states, position_ids=position_ids, mtp_cache=past_key_values, input_ids=input_ids)
        logits = self._layers._project_to_logits(made[:, -1:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values, hidden_states=(made,))


def _streams_of(model: PreTrainedModel, cache: Any, position: int) -> MtpStreams:
    """Return what was computed of the first `position` tokens of a cache, which the caller owns from then on; else empty streams."""
    earlier: MtpStreams | None = mtp_layers(model).streams.pop(cache, None)
    return earlier if earlier is not None and earlier.go_back_to(position) else MtpStreams(model)


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
        confidence: a draft ends after a token of lower probability.
        replay: what replays the steps of a layer, as it does those of the body; None where nothing does.
        engines: load what the verification of a draft will probably need while it is drawn; None where no experts are on a GPU.
    """

    feeds = False  # the model's cache
    reads_hidden_states = True

    def __init__(
        self,
        model: PreTrainedModel,
        confidence: float,
        switch: DraftSwitch,
        replay: StepReplay | None,
        engines: ModelEngines | None,
    ) -> None:
        self._model = model
        self._engines = engines if foresees_experts(model) else None
        self._confidence = confidence
        self._switch = switch
        self._replay = replay
        self._streams: MtpStreams | None = None

    def begin(self, sequence: DecodedSequence) -> None:
        states = sequence.hidden_states
        assert states is not None, "the sequence was asked for them"
        self._streams = _streams_of(self._model, sequence.cache, sequence.length - 1 - states.shape[1])
        self.keep(sequence, states.shape[1])
        if self._streams.rows(0) > MANY:  # now: a round that measures drafts does not measure the prompt
            self._streams.settle(sequence.input_ids)

    def keep(self, sequence: DecodedSequence, tokens: int) -> None:
        streams, states = self._streams, sequence.hidden_states
        assert streams is not None and states is not None, "the sequence was asked for them"
        streams.add(states[:, :tokens], sequence.length - 1)
        if streams.rows(0) > MOST_WAITING:
            streams.settle(sequence.input_ids)

    def end(self, sequence: DecodedSequence) -> None:
        if sequence.cache is not None:
            mtp_layers(self._model).streams[sequence.cache] = self._streams

    def draft(
        self, sequence: DecodedSequence, rule: AcceptanceRule, length: int, continues: Callable[[Sequence[float]], bool]
    ) -> list[DraftToken]:
        streams = self._streams
        assert streams is not None, "the sequence has begun"
        last, caches = streams.last, streams.caches
        longest = longest_rewind(caches[last])
        if longest is not None:
            length = min(length, longest - last)
        if last and any(has_states(cache.layers[-1]) for cache in caches):
            length = min(length, last + 1)  # states after a pass over several tokens are those before its first
        if length < 1:
            return []
        if any(streams.rows(number) > MANY for number in range(last + 1)):  # after plain steps: the next draft will take less time
            self._switch.preparations += 1
            streams.settle(sequence.input_ids)
        marks: list[tuple[CacheMark, int]] = []
        drafted: torch.Tensor | None = None  # (1, at most k, H), the states of a layer whose tokens are drafts

        def logits_after(tokens: Sequence[int]) -> torch.Tensor:
            nonlocal drafted
            depth, ids = len(tokens), sequence.followed_by(tokens)
            if depth > last:
                assert drafted is not None, "the last layer was fed"
                if not last and depth == 1:
                    marks.append((CacheMark(caches[last], 2), 0))
                drafted, logits = streams.feed(last, drafted[:, -1:], ids, self._replay)
                return logits
            fed = torch.cat([*streams.waiting[depth], *([] if drafted is None else [drafted])], dim=1)
            waiting, kept = streams.rows(depth), max(fed.shape[1] - depth, 0)
            mark = CacheMark(caches[depth], MANY + last, singly=fed.shape[1] == 1)
            if depth:
                marks.append((mark, kept))
            states, logits = streams.feed(depth, fed, ids, self._replay)
            if not depth:
                mark.rewind(keep=kept)
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
            drafts = draw(sequence, rule, length, continues, self._confidence, logits_expecting)
            streams.position = position
            return drafts
        finally:
            for mark, kept in marks:
                mark.rewind(keep=kept)
