"""The rounds of decoding with drafts: draft, verify, accept; and the drafters."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor

from moegraft.operators.decode.loop import DecodedSequence, accept, choose
from moegraft.operators.decode.rollback import longest_rewind, unsupported_cache_reason
from moegraft.operators.decode.sampling import AcceptanceRule, Adaptive, DraftToken, Greedy
from moegraft.operators.decode.states import drop_past
from moegraft.operators.draft import DraftSettings, DraftSwitch, NgramIndex
from moegraft.operators.schedule import DraftSchedule, Round, Statistics

# These keep state from call to call, so calls for tokens that are rejected later would change their results.
STATEFUL_PROCESSORS = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


# Called with "draft", "rollback", "verify" or "plain step"; the context covers that phase and yields its details, to be filled in.
Trace = Callable[[str], AbstractContextManager[dict[str, object]]]


def no_trace(name: str) -> AbstractContextManager[dict[str, object]]:
    """Record nothing."""
    return nullcontext({})


@dataclass(slots=True)
class Drafting:
    """The rounds of a model that drafts.

    A round drafts n tokens with the model's cache, removes them from the cache, feeds them to the full model in one pass, and keeps the
    tokens that the acceptance rule accepts. The last token of a round is always the full model's own: it replaces the first rejected
    draft token, or follows the last one where all were accepted.
    """

    max_draft: int  # tokens
    drafter: Drafter
    schedule: DraftSchedule
    statistics: Statistics
    switch: DraftSwitch
    warn_once: Callable[[str], None]  # of the reason why a call is decoded without drafts
    confidence: float = 0.0  # of a token; a draft ends after one of lower probability
    tolerance: float = 0.0  # of the adaptive rule; 0: the lossless one
    verification: DraftSettings | None = None  # how experts run in the full model's pass over a draft; None: as always
    clock: Callable[[], float] = time.perf_counter  # seconds
    trace: Trace = no_trace
    _longest: int = field(default=0, init=False)  # draft that can be removed from the cache
    _greedy: bool = field(default=False, init=False)

    def begin(self, sequence: DecodedSequence, lossless: AcceptanceRule, processors: LogitsProcessorList) -> AcceptanceRule:
        """Begin to extend a sequence whose prompt is computed; return the rule of its rounds."""
        self.schedule.begin()
        self._greedy = type(lossless) is Greedy
        self._longest = self._longest_draft(sequence, processors)
        if self._longest:
            self.drafter.begin(sequence)
        return Adaptive(lossless, self.confidence, self.tolerance, self.statistics.add_lossy) if self.tolerance else lossless

    def _longest_draft(self, sequence: DecodedSequence, processors: LogitsProcessorList) -> int:
        """Return the longest draft that can be removed from the cache; 0, with a warning, where no draft can."""
        stateful = next((type(processor).__name__ for processor in processors if isinstance(processor, STATEFUL_PROCESSORS)), None)
        cache = sequence.cache
        reason = f"{stateful} keeps state from call to call" if stateful else unsupported_cache_reason(cache)
        if sequence.rotary_limit == 0:
            reason = "rotary embeddings that depend on the length of a text are others in a pass over a draft than in a step"
        if reason is not None or cache is None:
            self.warn_once(reason or "the model keeps no cache")
            return 0
        longest = longest_rewind(cache)
        return self.max_draft if longest is None else max(0, longest - 1)  # verification feeds one more token

    def end(self, sequence: DecodedSequence) -> None:
        """Free what the rounds of a sequence kept in its cache."""
        if self._longest:
            self.drafter.end(sequence)
        if (cache := sequence.cache) is not None:
            drop_past(cache)

    def _continues(self, confidences: Sequence[float]) -> bool:
        return confidences[-1] >= self.confidence and self.schedule.continues(confidences)

    def round(self, sequence: DecodedSequence, rule: AcceptanceRule) -> None:
        """Extend a sequence by one token or more, and learn from it."""
        start, before, preparations = self.clock(), sequence.length, self.switch.preparations
        planned = self.schedule.plan(min(self._longest, sequence.draftable))
        drafts: list[DraftToken] = []
        step_ns: Sequence[int] = ()  # of plain steps that were computed without anything else in between
        if planned > 0:  # the memory of past states stays the same in all rounds
            sequence.passes.mark(self._longest + 1, singly=self.drafter.feeds)
        try:
            if planned > 0:
                with self.trace("draft") as details:
                    drafts = self.drafter.draft(sequence, rule, planned, self._continues)
                    details["tokens"] = len(drafts)
            drafted = self.clock()
            if planned > 0 and self.drafter.feeds:
                with self.trace("rollback"):
                    sequence.passes.rewind()
            if not drafts:
                sequence.passes.unmark()
            with self.trace("verify" if drafts else "plain step") as details:
                compared = accepted = 0
                if drafts:
                    with nullcontext() if self.verification is None else self.switch.drafting(self.verification):
                        logits = sequence.forward([draft.token for draft in drafts], feed=len(drafts) + 1)
                    compared, accepted = accept(sequence, rule, drafts, logits)
                    details |= {"drafted": len(drafts), "accepted": accepted}
                else:
                    most = 1 if planned else self.schedule.plain_steps() if self._longest else sequence.remaining
                    step_ns = sequence.extend(most) if self._greedy else ()
                    if not step_ns:
                        choose(sequence, rule, sequence.forward([], feed=1)[0])
            generated = sequence.length - before
            if self._longest:
                self.drafter.keep(sequence, generated)
            if drafts:
                with self.trace("rollback") as details:
                    details["kept"] = generated
                    sequence.passes.rewind(keep=generated)
        except BaseException:  # Ctrl-C too: the caller's cache is restored to its state before the round
            sequence.passes.rewind()
            raise
        finally:
            sequence.passes.unmark()
        draft_ms, verify_ms = (drafted - start) * 1e3, (self.clock() - drafted) * 1e3
        prepared = self.switch.preparations != preparations
        if len(step_ns) > 1:
            per_ns = (draft_ms + verify_ms) / sum(step_ns)
            rounds = [Round((), 0, 0, 1, 0.0, per_ns * ns, prepared) for ns in step_ns]
        else:
            rounds = [Round([draft.confidence for draft in drafts], compared, accepted, generated, draft_ms, verify_ms, prepared)]
        for done in rounds:
            self.schedule.record(done)
            self.statistics.add(done)


class Drafter(ABC):
    """Proposes how a sequence continues.

    Attributes:
        feeds: whether it feeds tokens to the model's cache, from which the caller removes them.
        reads_hidden_states: whether the sequence keeps the hidden states of each pass for `begin` and `keep`.
    """

    feeds: ClassVar[bool] = True
    reads_hidden_states: ClassVar[bool] = False

    def begin(self, sequence: DecodedSequence) -> None:  # noqa: B027 # optional
        """Prepare for a sequence whose prompt is computed."""

    @abstractmethod
    def draft(
        self, sequence: DecodedSequence, rule: AcceptanceRule, length: int, continues: Callable[[Sequence[float]], bool]
    ) -> list[DraftToken]:
        """Return at most `length` tokens; after each, `continues` decides on the next from q of all tokens so far."""

    def keep(self, sequence: DecodedSequence, tokens: int) -> None:  # noqa: B027 # optional
        """Note that the sequence keeps the first `tokens` tokens of the latest pass of the full model."""

    def end(self, sequence: DecodedSequence) -> None:  # noqa: B027 # optional
        """Note that the call ends, and that another one may go on with the sequence's cache."""


def draw(
    sequence: DecodedSequence,
    rule: AcceptanceRule,
    length: int,
    continues: Callable[[Sequence[float]], bool],
    logits_after: Callable[[Sequence[int]], torch.Tensor],
) -> list[DraftToken]:
    """Return the tokens that a drafter picks from its own logits, (V,) float32 after the tokens so far."""
    drafts: list[DraftToken] = []
    confidences: list[float] = []
    while len(drafts) < length:
        tokens = [draft.token for draft in drafts]
        scores = sequence.process(tokens, logits_after(tokens))
        draft = DraftToken(rule.pick(scores), scores)
        drafts.append(draft)
        confidences.append(draft.confidence)  # which computes q, before the next pass overwrites the logits
        if draft.token in sequence.end_tokens or not continues(confidences):
            break
    return drafts


class ExpertsDrafter(Drafter):
    """The model itself with fewer experts per token (SS-MoE, algorithm 1), over the same cache."""

    def __init__(self, switch: DraftSwitch, settings: DraftSettings) -> None:
        self._switch = switch
        self._settings = settings

    def draft(
        self, sequence: DecodedSequence, rule: AcceptanceRule, length: int, continues: Callable[[Sequence[float]], bool]
    ) -> list[DraftToken]:
        with self._switch.drafting(self._settings):
            return draw(sequence, rule, length, continues, lambda tokens: sequence.forward(tokens, feed=1)[0])


class NgramDrafter(Drafter):
    """The tokens that followed an earlier occurrence of the latest tokens (prompt lookup, Saxena 2023), without a forward pass."""

    feeds = False
    _index: NgramIndex

    def begin(self, sequence: DecodedSequence) -> None:
        self._index = NgramIndex()

    def draft(
        self, sequence: DecodedSequence, rule: AcceptanceRule, length: int, continues: Callable[[Sequence[float]], bool]
    ) -> list[DraftToken]:
        self._index.append(sequence.input_ids[0, len(self._index.tokens) :].tolist())
        tokens = self._index.continuation(length)
        end = next((index + 1 for index, token in enumerate(tokens) if token in sequence.end_tokens), len(tokens))
        return [DraftToken(token) for token in tokens[:end]]
