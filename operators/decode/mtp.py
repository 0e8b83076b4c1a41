"""Multi-token prediction: layers of a checkpoint that predict the tokens after the next one (DeepSeek-V3, arXiv:2412.19437, section 2.2).

`mtp_layers` builds the layers.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from moegraft.operators.decode.acceptance import AcceptanceRule, DraftToken
from moegraft.operators.decode.drafts import Drafter, draw
from moegraft.operators.decode.loop import DecodedSequence
from moegraft.operators.decode.mtp_layers import mtp_layers, new_mtp_cache
from moegraft.operators.decode.rollback import CacheMark, longest_rewind
from moegraft.operators.draft import DraftSwitch

MANY = 8  # tokens that a draft feeds before its own; more count as preparation


@dataclass(slots=True)
class _Streams:
    """What MTP layers have computed of one sequence.

    Attributes:
        cache: of each layer, those entries whose tokens are in the sequence.
        waiting: of each layer, the states (1, T, H) before it, up to the latest, of positions without an entry.
        latest: the first layer's last state (1, 1, H).
        position: of the body's next state.
    """

    cache: Any
    waiting: list[list[torch.Tensor]]
    position: int
    latest: torch.Tensor | None = None


class MtpDrafter(Drafter):
    """The MTP layers: layer k predicts the token k + 2 positions after a state of the body, from it and the k + 1 tokens between them.

    Drafts longer than there are layers feed the last layer's own states back to it. What drafts add to the layers' caches is removed.

    Args:
        confidence: a draft ends after a token of lower probability.
        kept: what was computed of texts that a later call may go on with, by the model's cache.
    """

    feeds = False  # the model's cache
    reads_hidden_states = True

    def __init__(self, model: PreTrainedModel, confidence: float, switch: DraftSwitch, kept: MutableMapping[Any, _Streams]) -> None:
        self._layers = mtp_layers(model)
        self._confidence = confidence
        self._switch = switch
        self._kept = kept
        self._streams = _Streams(new_mtp_cache(model.config), [[] for _ in self._layers.layers], 0)
        self._last = len(self._layers.layers) - 1

    def begin(self, sequence: DecodedSequence) -> None:
        states = sequence.hidden_states
        assert states is not None, "the sequence was asked for them"
        first = sequence.length - 1 - states.shape[1]
        earlier = self._kept.pop(sequence.cache, None)
        if earlier is not None and earlier.position == first:
            self._streams = earlier
        self.keep(sequence, states.shape[1])
        self._settle_all(sequence)  # now: a round that measures drafts does not measure the prompt

    def keep(self, sequence: DecodedSequence, tokens: int) -> None:
        assert sequence.hidden_states is not None, "the sequence was asked for them"
        self._streams.waiting[0].append(sequence.hidden_states[:, :tokens])
        self._streams.position = sequence.length - 1

    def end(self, sequence: DecodedSequence) -> None:
        if sequence.cache is not None:
            self._kept[sequence.cache] = self._streams

    def draft(
        self, sequence: DecodedSequence, rule: AcceptanceRule, length: int, continues: Callable[[Sequence[float]], bool]
    ) -> list[DraftToken]:
        streams = self._streams
        longest = longest_rewind(streams.cache)
        if longest is not None:
            length = min(length, longest - self._last)
        if length < 1:
            return []
        if sum(each.shape[1] for each in streams.waiting[0]) > MANY:  # plain steps came before: the next draft will take less time
            self._switch.preparations += 1
        self._settle_all(sequence)
        marks: list[CacheMark] = []
        assert streams.latest is not None, "the prompt has a token"
        states: torch.Tensor = streams.latest

        def logits_after(tokens: Sequence[int]) -> torch.Tensor:
            nonlocal states
            number = min(len(tokens), self._last)
            if len(tokens) == len(marks) <= self._last:
                marks.append(CacheMark(Cache(layers=[streams.cache.layers[number]]), 2))
                if number:
                    states = torch.cat([*streams.waiting[number], *([states] if number > 1 else [])], dim=1)
            if tokens:
                fed = states if len(tokens) <= self._last else states[:, -1:]
                states = self._feed(number, fed, sequence.followed_by(tokens))
            logits: torch.Tensor = self._layers._project_to_logits(states[:, -1:])[0, -1]
            return logits.to(torch.float32)

        try:
            return draw(sequence, rule, length, continues, self._confidence, logits_after)
        finally:
            for mark in marks:
                mark.rewind()

    def _settle_all(self, sequence: DecodedSequence) -> None:
        for number in range(self._last + 1):
            self._settle(number, sequence.input_ids)

    def _settle(self, number: int, ids: torch.Tensor) -> None:
        """Feed a layer all states whose tokens are in the sequence `ids`: of the layers after the first, the latest one's is not."""
        waiting = self._streams.waiting
        size = sum(each.shape[1] for each in waiting[number]) - (number > 0)
        if size < 1:
            return
        before = torch.cat(waiting[number], dim=1)
        states = self._feed(number, before[:, :size], ids)
        waiting[number] = [before[:, size:]]
        if number == 0:
            self._streams.latest = states[:, -1:]
        if number < self._last:
            waiting[number + 1].append(states)

    def _feed(self, number: int, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Feed a layer states (1, T, H), each with one of the last T tokens of `ids`; return its own states."""
        end, size = ids.shape[1], states.shape[1]
        positions = torch.arange(end - size, end, device=ids.device)[None]
        made: torch.Tensor = self._layers.forward_layer(
            number, states, position_ids=positions, mtp_cache=self._streams.cache, input_ids=ids[:, -size:]
        )
        return made
