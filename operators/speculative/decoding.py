"""The decoding loop that `generate` runs with drafts: draft, verify, accept; and the drafters."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.logits_process import SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils.generic import ModelOutput

from moegraft.operators.draft import DraftSettings, DraftSwitch
from moegraft.operators.generation import GeneratedText
from moegraft.operators.speculative.acceptance import AcceptanceRule, Adaptive, DraftToken, Greedy, Sampling
from moegraft.operators.speculative.options import SpeculativeOptions
from moegraft.operators.speculative.rollback import CacheMark, longest_rewind, unsupported_cache_reason
from moegraft.operators.speculative.schedule import DraftSchedule, Round, Statistics

if TYPE_CHECKING:
    from moegraft.operators.step_program.steps import StepPrograms

# These keep state from call to call, so calls for tokens that are rejected later would change their results.
STATEFUL_PROCESSORS = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
NGRAM = 3  # tokens at the end of a text that are looked up in it, at most
_NO_OUTPUT = ModelOutput()  # for updates that only count tokens

# Called with "draft", "rollback", "verify" or "plain step"; the context covers that phase and yields its details, to be filled in.
Trace = Callable[[str], AbstractContextManager[dict[str, object]]]


def no_trace(name: str) -> AbstractContextManager[dict[str, object]]:
    """Record nothing."""
    return nullcontext({})


@dataclass(frozen=True, slots=True)
class SpeculativeDecoding:
    """Decoding of one sequence, as a callable for `generate(custom_generate=...)`.

    A round drafts n tokens with the model's cache, removes them from the cache, feeds them to the full model in one pass, and keeps the
    tokens that the acceptance rule accepts. The last token of a round is always the full model's own: it replaces the first rejected
    draft token, or follows the last one where all were accepted.
    """

    options: SpeculativeOptions
    drafter: Drafter
    schedule: DraftSchedule
    statistics: Statistics
    switch: DraftSwitch
    warn_once: Callable[[str], None]
    streamer: BaseStreamer | None = None
    steps: StepPrograms | None = None
    given_cache: bool = False  # by the caller
    clock: Callable[[], float] = time.perf_counter  # seconds
    trace: Trace = no_trace

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        text = GeneratedText(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, self.streamer)
        text.continue_by(self.steps, given_cache=self.given_cache)
        lossless: Greedy | Sampling = Sampling() if generation_config.do_sample else Greedy()
        rule: AcceptanceRule = lossless
        if self.options.mode == "adaptive":
            rule = Adaptive(lossless, self.options.confidence, self.options.tolerance)
        logits = text.prefill()
        scores = text.process(text.input_ids, logits)
        text.append(rule.pick(scores), scores, logits)
        text.advance(1)
        longest = self._longest_draft(text, logits_processor)
        self.schedule.begin()
        with text:
            while not text.finished:
                done = self._round(text, rule, min(longest, text.remaining - 1))
                self.schedule.record(done)
                self.statistics.add(done)
            return text.result()

    def _longest_draft(self, text: GeneratedText, processors: LogitsProcessorList) -> int:
        """Return the longest draft that can be removed from the cache; 0, with a warning, where no draft can."""
        stateful = next((type(processor).__name__ for processor in processors if isinstance(processor, STATEFUL_PROCESSORS)), None)
        reason = f"{stateful} keeps state from call to call" if stateful else unsupported_cache_reason(text.cache)
        if reason is not None or text.cache is None:
            self.warn_once(reason or "the model keeps no cache")
            return 0
        longest = longest_rewind(text.cache)
        return self.options.max_draft if longest is None else max(0, longest - 1)  # verification feeds one more token

    def _round(self, text: GeneratedText, rule: AcceptanceRule, limit: int) -> Round:
        start, before, preparations = self.clock(), text.length, self.switch.preparations
        planned = self.schedule.plan(limit)
        mark = CacheMark(cache) if planned > 0 and (cache := text.cache) is not None else None
        drafts: list[DraftToken] = []
        try:
            if mark is not None:
                with self.trace("draft") as details:
                    drafts = self.drafter.draft(text, rule, planned, self.schedule.continues)
                    details["tokens"] = len(drafts)
            drafted = self.clock()
            if mark is not None:
                with self.trace("rollback"):
                    mark.rewind()
            with self.trace("verify" if drafts else "plain step") as details:
                logits = text.forward([draft.token for draft in drafts], feed=len(drafts) + 1) if drafts else text.step()[None]
                compared, accepted = self._accept(text, rule, drafts, logits)
                if drafts:
                    details |= {"drafted": len(drafts), "accepted": accepted}
            generated = text.length - before
            if mark is not None:
                with self.trace("rollback") as details:
                    details["kept"] = generated
                    mark.rewind(keep=generated)
        except BaseException:  # Ctrl-C too: the caller's cache is restored to its state before the round
            if mark is not None:
                mark.rewind()
            raise
        text.advance(generated)
        draft_ms, verify_ms = (drafted - start) * 1e3, (self.clock() - drafted) * 1e3
        prepared = self.switch.preparations != preparations
        return Round([draft.confidence for draft in drafts], compared, accepted, generated, draft_ms, verify_ms, prepared)

    def _accept(self, text: GeneratedText, rule: AcceptanceRule, drafts: list[DraftToken], logits: torch.Tensor) -> tuple[int, int]:
        """Append the tokens of a round by the full model's logits (drafts + 1, V); return the numbers of compared and accepted drafts."""

        def append(token: int, scores: torch.Tensor, row: torch.Tensor, accepted: DraftToken | None) -> None:
            if drafts and isinstance(rule, Adaptive):
                agreement = 1.0 if accepted is None else rule.agreement(accepted, scores)
                self.statistics.add_lossy(float(row.log_softmax(-1)[token]), agreement)
            text.append(token, scores, row)

        for position, draft in enumerate(drafts):
            scores = text.process(text.input_ids, logits[position])
            if not rule.accepts(draft, scores):
                append(rule.replacement(draft, scores), scores, logits[position], None)
                return position + 1, position
            append(draft.token, scores, logits[position], draft)
            if text.finished:
                return position + 1, position + 1
        scores = text.process(text.input_ids, logits[-1])
        append(rule.pick(scores), scores, logits[-1], None)
        return len(drafts), len(drafts)


class Drafter(ABC):
    """Proposes how a text continues. The caller removes from the model's cache the tokens that the drafter fed."""

    @abstractmethod
    def draft(
        self, text: GeneratedText, rule: AcceptanceRule, length: int, continues: Callable[[Sequence[float]], bool]
    ) -> list[DraftToken]:
        """Return at most `length` tokens; after each, `continues` decides on the next from q of all tokens so far."""


class ExpertsDrafter(Drafter):
    """The model itself with fewer experts per token (SS-MoE, algorithm 1), over the same cache."""

    def __init__(self, switch: DraftSwitch, settings: DraftSettings, confidence: float) -> None:
        self._switch = switch
        self._settings = settings
        self._confidence = confidence

    def draft(
        self, text: GeneratedText, rule: AcceptanceRule, length: int, continues: Callable[[Sequence[float]], bool]
    ) -> list[DraftToken]:
        drafts: list[DraftToken] = []
        confidences: list[float] = []
        with self._switch.drafting(self._settings):
            while len(drafts) < length:
                tokens = [draft.token for draft in drafts]
                logits = text.forward(tokens, feed=1)[0]
                scores = text.process(text.followed_by(tokens), logits)
                draft = DraftToken(rule.pick(scores), scores.softmax(-1))
                drafts.append(draft)
                confidences.append(draft.confidence)
                if draft.token in text.end_tokens or confidences[-1] < self._confidence or not continues(confidences):
                    break
        return drafts


class NgramDrafter(Drafter):
    """The tokens that followed an earlier occurrence of the text's latest tokens (prompt lookup, Saxena 2023), without a forward pass."""

    def draft(
        self, text: GeneratedText, rule: AcceptanceRule, length: int, continues: Callable[[Sequence[float]], bool]
    ) -> list[DraftToken]:
        tokens = continuation(text.input_ids[0], length)
        end = next((index + 1 for index, token in enumerate(tokens) if token in text.end_tokens), len(tokens))
        return [DraftToken(token) for token in tokens[:end]]


def continuation(text: torch.Tensor, length: int) -> list[int]:
    """Return up to `length` tokens that followed an earlier occurrence of the last tokens of `text` (L,), at most `NGRAM` of them."""
    if length < 1:
        return []
    for size in range(min(NGRAM, text.numel() - 1), 0, -1):
        earlier = text[:-1].unfold(0, size, 1)  # every run of `size` tokens with a token after it
        places = (earlier == text[-size:]).all(dim=1).nonzero()
        if places.numel():
            start = int(places[-1]) + size
            return [int(token) for token in text[start : start + length]]
    return []
