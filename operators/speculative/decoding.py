"""Draft, verify, accept: the decoding loop that `generate` runs.

The one text that a call of `generate` writes: its tokens, its cache and what the caller wants to know of each step.

Where drafts come from: the model with fewer experts, or the text itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.logits_process import SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils.generic import ModelOutput

from moegraft.operators.draft import DraftSettings, DraftSwitch
from moegraft.operators.speculative.acceptance import AcceptanceRule, Adaptive, DraftToken, Greedy, Sampling
from moegraft.operators.speculative.options import Spans, SpeculativeOptions, unseen
from moegraft.operators.speculative.rollback import CacheMark, longest_rewind, why_not_rewindable
from moegraft.operators.speculative.schedule import Round, Schedule, Statistics


class Answer:
    """One sequence under way. The cache holds all tokens but the last whenever no forward pass is running."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,  # (1, prompt) int64
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        streamer: BaseStreamer | None,
    ) -> None:
        self._model: Any = model  # torch types every attribute of a module as a tensor
        self.input_ids = input_ids
        self._processors: Any = logits_processor  # typed for CPU tensors of one class
        self._criteria = stopping_criteria
        self._config: Any = generation_config
        self._kwargs = model_kwargs
        self._streamer = streamer
        self._scores: list[torch.Tensor] = []
        self._logits: list[torch.Tensor] = []
        self.finished = False
        ends = [criterion.eos_token_id for criterion in stopping_criteria if isinstance(criterion, EosTokenCriteria)]
        self.end_tokens: frozenset[int] = frozenset(token for tokens in ends for token in tokens.tolist())

    @property
    def length(self) -> int:
        return int(self.input_ids.shape[1])

    @property
    def room(self) -> int:
        """Tokens that may still be written."""
        return int(self._config.max_length) - self.length

    @property
    def cache(self) -> Cache | None:
        return self._kwargs.get("past_key_values")

    def read_prompt(self) -> torch.Tensor:
        """Feeds the prompt, past what the cache has of it; logits of its last token, (V,) float32."""
        outputs = self._model._prefill(self.input_ids, self._config, self._kwargs)
        # Notes the cache that the model made; lengths are noted by `advance`.
        self._kwargs = self._model._update_model_kwargs_for_generation(outputs, self._kwargs, num_new_tokens=0)
        return _float(outputs.logits[0, -1])

    def forward(self, tokens: Sequence[int], feed: int) -> torch.Tensor:
        """Feeds the last `feed` tokens of the text followed by `tokens`; their logits, (feed, V) float32."""
        kwargs, ids = self._kwargs, self.with_tokens(tokens)
        if tokens:
            kwargs = self._model._update_model_kwargs_for_generation(ModelOutput(), dict(kwargs), num_new_tokens=len(tokens))
        inputs = self._model.prepare_inputs_for_generation(ids, next_sequence_length=feed, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = feed
        return _float(self._model(**inputs, return_dict=True).logits[0, -feed:])

    def with_tokens(self, tokens: Sequence[int]) -> torch.Tensor:
        """(1, length + tokens) int64: the text as it would be with `tokens` after it."""
        if not tokens:
            return self.input_ids
        return torch.cat([self.input_ids, self.input_ids.new_tensor([tokens])], dim=-1)

    def process(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """What every logits processor makes of the logits (V,) after `input_ids`; processors may write in place, so on a copy."""
        scores: torch.Tensor = self._processors(input_ids, logits[None].clone())[0]
        return scores

    def append(self, token: int, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Writes one token and asks whether the text ends with it."""
        self.input_ids = self.with_tokens([token])
        if self._config.return_dict_in_generate and self._config.output_scores:
            self._scores.append(scores[None])
        if self._config.return_dict_in_generate and self._config.output_logits:
            self._logits.append(logits[None].clone())
        self.finished = bool(self._criteria(self.input_ids, tuple(self._scores) if self._config.output_scores else None).all())
        if self._streamer is not None:
            self._streamer.put(self.input_ids[0, -1:].cpu())

    def advance(self, tokens: int) -> None:
        """Notes that the text grew by `tokens`, for masks and positions."""
        self._kwargs = self._model._update_model_kwargs_for_generation(ModelOutput(), self._kwargs, num_new_tokens=tokens)

    def result(self) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """What `generate` returns."""
        if self._streamer is not None:
            self._streamer.end()
        if not self._config.return_dict_in_generate:
            return self.input_ids
        return GenerateDecoderOnlyOutput(
            sequences=self.input_ids,  # type: ignore[arg-type]
            scores=tuple(self._scores) if self._config.output_scores else None,  # type: ignore[arg-type]
            logits=tuple(self._logits) if self._config.output_logits else None,  # type: ignore[arg-type]
            past_key_values=self.cache,
        )


def _float(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.float32)


class Drafter(Protocol):
    """Proposes how a text goes on. What it feeds to the model's cache its caller takes out again."""

    def draft(self, answer: Answer, rule: AcceptanceRule, length: int, goes_on: Callable[[Sequence[float]], bool]) -> list[DraftToken]:
        """At most `length` tokens; asks `goes_on` after each, with the q of all so far."""
        ...


class ExpertsDrafter:
    """The model itself with fewer experts a token (SS-MoE, algorithm 1), over the same cache."""

    def __init__(self, switch: DraftSwitch, settings: DraftSettings, confidence: float) -> None:
        self._switch = switch
        self._settings = settings
        self._confidence = confidence

    def draft(self, answer: Answer, rule: AcceptanceRule, length: int, goes_on: Callable[[Sequence[float]], bool]) -> list[DraftToken]:
        tokens: list[int] = []
        drafts: list[DraftToken] = []
        confidences: list[float] = []
        with self._switch.drafting(self._settings):
            while len(drafts) < length:
                logits = answer.forward(tokens, feed=1)[0]
                scores = answer.process(answer.with_tokens(tokens), logits)
                draft = DraftToken(rule.pick(scores), scores.softmax(-1))
                drafts.append(draft)
                tokens.append(draft.token)
                confidences.append(draft.confidence)
                if draft.token in answer.end_tokens or confidences[-1] < self._confidence or not goes_on(confidences):
                    break
        return drafts


class NgramDrafter:
    """What followed the last time the text's latest tokens occurred in it (prompt lookup, Saxena 2023); costs no forward pass."""

    def __init__(self, ngram: int) -> None:
        self._ngram = ngram

    def draft(self, answer: Answer, rule: AcceptanceRule, length: int, goes_on: Callable[[Sequence[float]], bool]) -> list[DraftToken]:
        tokens = continuation(answer.input_ids[0], self._ngram, length)
        end = next((index + 1 for index, token in enumerate(tokens) if token in answer.end_tokens), len(tokens))
        return [DraftToken(token) for token in tokens[:end]]


def continuation(text: torch.Tensor, ngram: int, length: int) -> list[int]:
    """Up to `length` tokens that followed the latest earlier place of the longest run, up to `ngram`, that ends `text` (L,)."""
    if length < 1:
        return []
    for size in range(min(ngram, text.numel() - 1), 0, -1):
        earlier = text[:-1].unfold(0, size, 1)  # every run of `size` tokens that something follows
        places = (earlier == text[-size:]).all(dim=1).nonzero()
        if places.numel():
            start = int(places[-1]) + size
            return [int(token) for token in text[start : start + length]]
    return []


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
