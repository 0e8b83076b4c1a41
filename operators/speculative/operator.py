"""`speculative_draft`: a model whose `generate` drafts with few of its experts and verifies with all of them."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList, StopStringCriteria
from transformers.generation.configuration_utils import GenerationMode

from moegraft.operators.base import BatchDrafts, DraftedRow, ModelOperator, call_arguments
from moegraft.operators.context import InjectionContext
from moegraft.operators.draft import DraftSwitch
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.speculative.decoding import (
    Drafter,
    ExpertsDrafter,
    NgramDrafter,
    SpeculativeDecoding,
    Trace,
    continuation,
    no_trace,
)
from moegraft.operators.speculative.options import SpeculativeOptions
from moegraft.operators.speculative.rollback import unsupported_model_reason
from moegraft.operators.speculative.schedule import DraftSchedule, FixedSchedule, MarginalSchedule, Round, Statistics
from moegraft.operators.timeline import Timeline, round_spans

logger = logging.getLogger(__name__)

FIXED_CACHES = ("paged", "quantized", "offloaded", "offloaded_static")  # tokens cannot be removed from them
SERVED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class ScheduledBatchDrafts(BatchDrafts):
    """Drafts for a server's batches. Batches of up to 1, 2, 4, 8, ... texts have a schedule each, as the costs of drafts grow with them.

    A schedule compares the time of a round with that of a plain step of the same batch, by the mean of tokens that its texts gained. Where
    drafts do not pay at a size, it switches them off at that size alone.
    """

    def __init__(
        self, options: SpeculativeOptions, switch: DraftSwitch, statistics: Statistics, new_schedule: Callable[[], DraftSchedule]
    ) -> None:
        self._options = options
        self._switch = switch
        self._statistics = statistics
        self._new_schedule = new_schedule
        self._schedules: dict[int, DraftSchedule] = {}
        self._rounds = 0
        self._preparations = 0  # of the switch, at the end of the last round

    @property
    def longest(self) -> int:
        return self._options.max_draft

    def plan(self, texts: int, limit: int) -> int:
        return self._schedule(texts).plan(max(limit, 0))

    def lookup(self, token_ids: Sequence[int], length: int) -> list[int] | None:
        if self._options.draft != "ngram":
            return None
        return continuation(torch.tensor(token_ids), self._options.ngram, length)

    def drafting(self) -> AbstractContextManager[None]:
        return self._switch.drafting(self._options.settings)

    def continues(self, confidences: Sequence[float]) -> bool:
        return confidences[-1] >= self._options.confidence and self._current.continues(confidences)

    def record(self, rows: Sequence[DraftedRow], draft_ms: float, verify_ms: float) -> None:
        prepared, self._preparations = self._preparations != self._switch.preparations, self._switch.preparations
        rounds = [Round(row.confidences, row.compared, row.accepted, row.generated, draft_ms, verify_ms, prepared) for row in rows]
        for each in rounds:
            self._statistics.add(replace(each, draft_ms=draft_ms / len(rows), verify_ms=verify_ms / len(rows)))
        # The pass was as long as the longest draft, of which the schedule learns one, alternately.
        longest = max(len(each.confidences) for each in rounds)
        examples = [each for each in rounds if len(each.confidences) == longest]
        self._rounds += 1
        mean = sum(each.generated for each in rounds) / len(rounds)
        self._schedule(len(rows)).record(replace(examples[self._rounds % len(examples)], generated=mean))

    def state(self) -> str | None:
        """Describe the schedules in a few words for users; None before any was used."""
        found = [f"batches of up to {texts}: {schedule.state()}" for texts, schedule in sorted(self._schedules.items())]
        return "; ".join(found) or None

    def _schedule(self, texts: int) -> DraftSchedule:
        size = 1 << (texts - 1).bit_length()
        if size not in self._schedules:
            self._schedules[size] = self._new_schedule()
        self._current = self._schedules[size]
        return self._current


class SpeculativeDraft(ModelOperator):
    """Self-speculative decoding over one KV cache (SS-MoE, WWW 2026; acceptance after Leviathan et al. 2023, arXiv:2211.17192).

    `generate` takes its usual arguments. Greedy and sampled decoding of one sequence use drafts; all other calls are decoded without
    them, with the reason in the log.
    """

    name = "speculative_draft"
    options_type = SpeculativeOptions
    summary = "drafts tokens with fewer experts, or by n-gram lookup, and verifies them with all experts in one pass"
    uncaptured = "tokens are drafted with fewer experts and verified several at once"

    def __init__(self, options: SpeculativeOptions, switch: DraftSwitch) -> None:
        super().__init__(options)
        self._switch = switch
        self._statistics = Statistics()
        self.clock: Callable[[], float] = time.perf_counter  # times the rounds
        self.trace: Trace = no_trace
        self._schedule = self._new_schedule()
        self._batches = ScheduledBatchDrafts(options, switch, self._statistics, self._new_schedule)

    def _new_schedule(self) -> DraftSchedule:
        length = self.options.max_draft
        return MarginalSchedule(length) if self.options.schedule == "marginal" else FixedSchedule(length)

    def batch_drafts(self) -> BatchDrafts | None:
        return self._batches if self.options.mode == "lossless" else None

    def record_rounds(self, timelines: Sequence[Timeline]) -> bool:
        self.trace = partial(round_spans, timelines) if timelines else no_trace
        return True

    @classmethod
    def unsupported_reason(cls, module: nn.Module, options: SpeculativeOptions) -> str | None:
        reason = super().unsupported_reason(module, options)
        if reason is not None:
            return reason
        assert isinstance(module, PreTrainedModel), "others do not generate text"
        return unsupported_model_reason(module.config)

    @classmethod
    def draft_sparsity(cls, options: SpeculativeOptions) -> float | None:
        return options.draft_sparsity

    @classmethod
    def build(cls, module: nn.Module, options: SpeculativeOptions, context: InjectionContext) -> Self:
        return cls(options, context.draft_switch)

    def check(self) -> None:
        if self.options.draft == "experts" and not self._switch.layers:
            raise UnsupportedModelError(
                "speculative_draft drafts with fewer experts, and no rule replaces experts by an operator that can run fewer; "
                "add a rule with 'match: {kind: experts}' and 'class: hybrid_experts', or write 'draft: ngram'"
            )
        if self.options.draft_sparsity is not None and not self._switch.sparse_layers:
            raise UnsupportedModelError(
                "draft_sparsity leaves neurons of experts out, and no rule gives experts a 'sparsity'; give them one, "
                "such as 'sparsity: {target: 0, scope: routed}', which leaves neurons out only in drafts"
            )
        if self.options.experts != "any" and not self._switch.resident_layers:
            self.warn_once(f"experts: {self.options.experts} has no effect, as no expert is resident on a GPU")
        if self.options.mode == "adaptive":
            self.warn_once("mode: adaptive changes the text that is generated; its statistics report by how much")

    def generate(self, model: PreTrainedModel, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = call_arguments(plain, args, kwargs)
        config = effective_config(model, arguments)
        reason = plain_decoding_reason(model, arguments, config)
        if reason is not None:
            self.warn_once(f"decoding without drafts: {reason}")
            return plain(**arguments)
        drafter: Drafter = ExpertsDrafter(self._switch, self.options.settings, self.options.confidence)
        if self.options.draft == "ngram":
            drafter = NgramDrafter(self.options.ngram)
        decoding = SpeculativeDecoding(
            options=self.options,
            drafter=drafter,
            schedule=self._schedule,
            statistics=self._statistics,
            switch=self._switch,
            warn_once=lambda why: self.warn_once(f"decoding without drafts: {why}"),
            streamer=arguments.get("streamer"),
            clock=self.clock,
            trace=self.trace,
        )
        result = plain(**with_stop_strings(arguments, config), custom_generate=decoding)
        if self.options.mode == "adaptive":
            logger.info("speculative_draft: %s", self._statistics.line())
        return result

    def statistics(self) -> Mapping[str, object]:
        """Return acceptance by position, tokens per round, ms of drafts and verifications, and the cost of a lossy mode, over all calls."""
        return {**self._statistics.as_mapping(), "schedule": self._batches.state() or self._schedule.state()}

    def placement(self) -> str:
        options = self.options
        experts = f"{options.draft_top_k} expert{'' if options.draft_top_k == 1 else 's'} per token"
        drafter = experts if options.draft == "experts" else f"n-grams of up to {options.ngram} tokens"
        return f"draft: {self.name}, {options.mode}, {drafter}, {self.statistics()['schedule']}; {self._statistics.line()}"


def effective_config(model: PreTrainedModel, arguments: Mapping[str, Any]) -> GenerationConfig:
    """Return the generation config of a call: its arguments override its `generation_config`, which overrides the model's."""
    own = model.generation_config
    config = copy.deepcopy(own) if isinstance(own, GenerationConfig) else GenerationConfig()
    given = arguments.get("generation_config")
    if isinstance(given, GenerationConfig):
        config.update(**{name: value for name, value in given.to_dict().items() if value is not None})
    config.update(**arguments)
    return config


def plain_decoding_reason(model: PreTrainedModel, arguments: Mapping[str, Any], config: GenerationConfig) -> str | None:
    """Return why a call must be decoded without drafts, or None where drafts can serve it."""
    if arguments.get("custom_generate") is not None:
        return "the call has a decoding loop of its own (custom_generate)"
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    inputs = arguments.get("inputs")
    ids = inputs if inputs is not None else arguments.get("input_ids")
    if mode not in SERVED_MODES:
        return f"{mode.value.replace('_', ' ')} cannot use these drafts"
    if arguments.get("inputs_embeds") is not None:
        return "the prompt is given as embeddings"
    if isinstance(ids, torch.Tensor) and ids.shape[0] > 1:
        return f"a batch of {ids.shape[0]} sequences accepts different numbers of tokens"
    if (config.num_return_sequences or 1) > 1:
        return f"num_return_sequences={config.num_return_sequences} makes a batch"
    if config.use_cache is False:
        return "use_cache=False leaves nothing to verify against"
    if config.cache_implementation in FIXED_CACHES:
        return f"a cache of kind {config.cache_implementation} cannot be rolled back"
    if arguments.get("negative_prompt_ids") is not None or (config.guidance_scale or 1) != 1:
        return "classifier-free guidance runs the model inside a logits processor"
    if config.output_attentions or config.output_hidden_states:
        return "the call returns attentions or hidden states of each step"
    if config.prefill_chunk_size is not None or config.token_healing or arguments.get("synced_gpus"):
        return "prefill_chunk_size, token_healing and synced_gpus need transformers' own loop"
    if getattr(model.generation_config, "stop_strings", None):
        return "the model's own generation config has stop strings, which a custom decoding loop does not receive"
    return None


def with_stop_strings(arguments: dict[str, Any], config: GenerationConfig) -> dict[str, Any]:
    """Return the call's arguments with its stop strings as a stopping criterion: `generate` gives decoding loops no tokenizer.

    Raises:
        ValueError: the call has stop strings but no tokenizer.
    """
    if not config.stop_strings:
        return arguments
    tokenizer = arguments.get("tokenizer")
    if tokenizer is None:
        raise ValueError("stop_strings are text: pass the model's tokenizer to generate as well")
    given = arguments.get("generation_config")
    if isinstance(given, GenerationConfig):
        given = copy.deepcopy(given)
        given.stop_strings = None
    criteria = StoppingCriteriaList([*(arguments.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, config.stop_strings)])
    rest = {name: value for name, value in arguments.items() if name != "stop_strings"}
    return {**rest, "generation_config": given, "stopping_criteria": criteria}
