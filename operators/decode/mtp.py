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

from moegraft.operators.decode.cache import adopt
from moegraft.operators.decode.drafts import Drafter, draw
from moegraft.operators.decode.loop import DecodedSequence
from moegraft.operators.decode.mtp_layers import foresees_experts, layers_cache, mtp_layers
from moegraft.operators.decode.rollback import longest_rewind, passes_over
from moegraft.operators.decode.sampling import AcceptanceRule, DraftToken
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
            "past_key_values": passes.cache,
        }
        found: Any = (
            self._replay.forward(self._model, self._step, (), arguments, between_steps=True)
            if steps and self._replay is not None
            else self._step(**arguments)
        )
        passes.note()
        return found.hidden_states[-1], found.logits[0, -1].to(torch.float32)

    def _step(
        self, input_ids: torch.Tensor, states: torch.Tensor, position_ids: torch.Tensor, layer: int, past_key_values: Any
    ) -> CausalLMOutputWithPast:
        """The forward pass of a layer, with the outputs of a model of which it is the only layer."""
        made = self._layers.forward_layer(layer, states, position_ids=position_ids, mtp_cache=past_key_values, input_ids=input_ids)
        logits = self._layers._project_to_logits(made[:, -1:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values, hidden_states=(made,))


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
            drafts = draw(sequence, rule, length, continues, self._confidence, logits_expecting)
            streams.position = position
            return drafts
        finally:
            for number, kept in marked.items():
                streams.passes[number].rewind(keep=kept)
                streams.passes[number].unmark()
