"""Draft, verify, accept: the decoding loop that `generate` runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.logits_process import SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from moegraft.operators.speculative.acceptance import AcceptanceRule, Adaptive, DraftToken, Greedy, Sampling
from moegraft.operators.speculative.answer import Answer
from moegraft.operators.speculative.drafting import Drafter
from moegraft.operators.speculative.options import SpeculativeOptions
from moegraft.operators.speculative.rollback import CacheMark, longest_rewind, why_not_rewindable
from moegraft.operators.speculative.schedule import Schedule
from moegraft.operators.speculative.spans import Spans, unseen
from moegraft.operators.speculative.statistics import Round, Statistics

# They remember what they were called with, so calls for tokens that may be dropped again would change what they do.
REMEMBERING_PROCESSORS = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


@dataclass(frozen=True, slots=True)
class SpeculativeDecoding:
    """Decoding of one sequence, as a callable for `generate(custom_generate=...)`.

    A round drafts n tokens with the model's cache, takes them out of it again, feeds them all at once to the full model, and
    lets stand what the acceptance rule lets stand. The last token of a round is always the full model's own: the one in place
    of the first draft token that fell, or one more where none did.
    """

    options: SpeculativeOptions
    drafter: Drafter
    schedule: Schedule
    statistics: Statistics
    say_once: Callable[[str], None]
    streamer: BaseStreamer | None = None
    clock: Callable[[], float] = time.perf_counter  # seconds
    spans: Spans = unseen

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
        answer = Answer(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, self.streamer)
        rule = self._rule(bool(generation_config.do_sample))
        logits = answer.read_prompt()
        scores = answer.process(answer.input_ids, logits)
        answer.append(rule.pick(scores), scores, logits)
        answer.advance(1)
        longest = self._longest_draft(answer, logits_processor)
        self.schedule.begin()
        while not answer.finished:
            done = self._round(answer, rule, min(longest, answer.room - 1))
            self.schedule.record(done)
            self.statistics.add(done)
        return answer.result()

    def _rule(self, samples: bool) -> AcceptanceRule:
        lossless = Sampling() if samples else Greedy()
        if self.options.mode == "lossless":
            return lossless
        return Adaptive(lossless, self.options.confidence, self.options.tolerance, self.options.unverified)

    def _longest_draft(self, answer: Answer, processors: LogitsProcessorList) -> int:
        """The longest draft that can be taken back out of the cache; 0, said once, where none can."""
        remembering = next((type(processor).__name__ for processor in processors if isinstance(processor, REMEMBERING_PROCESSORS)), None)
        reason = f"{remembering} remembers its calls" if remembering else why_not_rewindable(answer.cache)
        if reason is not None or answer.cache is None:
            self.say_once(reason or "the model keeps no cache")
            return 0
        longest = longest_rewind(answer.cache)
        return self.options.max_draft if longest is None else max(0, longest - 1)  # verifying feeds one token more

    def _round(self, answer: Answer, rule: AcceptanceRule, limit: int) -> Round:
        start = self.clock()
        planned = self.schedule.plan(limit)
        mark = CacheMark(answer.cache) if planned > 0 and answer.cache is not None else None
        try:
            drafts = self._draft(answer, rule, planned) if mark is not None else []
            drafted = self.clock()
            if mark is not None:
                with self.spans("rollback"):
                    mark.rewind()
            judged, accepted, emitted = self._verify(answer, rule, drafts)
            if mark is not None:
                with self.spans("rollback") as details:
                    details["kept"] = emitted
                    mark.rewind(keep=emitted)
        except BaseException:  # Ctrl-C too: whoever holds the cache finds it as it was before the round
            if mark is not None:
                mark.rewind()
            raise
        answer.advance(emitted)
        draft_ms, verify_ms = (drafted - start) * 1e3, (self.clock() - drafted) * 1e3
        return Round([draft.confidence for draft in drafts], judged, accepted, emitted, draft_ms, verify_ms)

    def _draft(self, answer: Answer, rule: AcceptanceRule, planned: int) -> list[DraftToken]:
        with self.spans("draft") as details:
            drafts = self.drafter.draft(answer, rule, planned, self.schedule.goes_on)
            details["tokens"] = len(drafts)
        return drafts

    def _verify(self, answer: Answer, rule: AcceptanceRule, drafts: list[DraftToken]) -> tuple[int, int, int]:
        """How many drafts were judged, how many stood, and by how many tokens the text grew."""
        with self.spans("verify" if drafts else "plain step") as details:
            logits = answer.forward([draft.token for draft in drafts], feed=len(drafts) + 1)
            before = answer.length
            judged, accepted = self._judge(answer, rule, drafts, logits)
            if drafts:
                details |= {"drafted": len(drafts), "accepted": accepted}
        return judged, accepted, answer.length - before

    def _judge(self, answer: Answer, rule: AcceptanceRule, drafts: list[DraftToken], logits: torch.Tensor) -> tuple[int, int]:
        """Writes the tokens of a round from the full model's logits (drafts + 1, V); how many drafts were judged and accepted."""
        for accepted, draft in enumerate(drafts):
            scores = answer.process(answer.input_ids, logits[accepted])
            stands = rule.accepts(draft, scores)
            token = draft.token if stands else rule.instead(draft, scores)
            self._note_cost(rule, draft if stands else None, scores, logits[accepted], token)
            answer.append(token, scores, logits[accepted])
            if not stands:
                return accepted + 1, accepted
            if answer.finished:
                return accepted + 1, accepted + 1
        scores = answer.process(answer.input_ids, logits[-1])
        token = rule.pick(scores)
        if drafts:
            self._note_cost(rule, None, scores, logits[-1], token)
        answer.append(token, scores, logits[-1])
        return len(drafts), len(drafts)

    def _note_cost(self, rule: AcceptanceRule, draft: DraftToken | None, scores: torch.Tensor, logits: torch.Tensor, token: int) -> None:
        if isinstance(rule, Adaptive):
            agreement = 1.0 if draft is None else rule.agreement(draft, scores)
            self.statistics.add_lossy(float(logits.log_softmax(-1)[token]), agreement)
