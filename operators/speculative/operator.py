"""`speculative_draft`: a model whose `generate` drafts with few of its experts and verifies with all of them."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from moegraft.operators.base import BuildContext, ModelOperator
from moegraft.operators.draft import DraftSwitch
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.speculative.decoding import SpeculativeDecoding
from moegraft.operators.speculative.drafting import Drafter, ExpertsDrafter, NgramDrafter
from moegraft.operators.speculative.options import SpeculativeOptions
from moegraft.operators.speculative.requests import effective_config, why_plain, with_stop_strings
from moegraft.operators.speculative.rollback import why_model_not_rewindable
from moegraft.operators.speculative.schedule import FixedSchedule, MarginalSchedule, Schedule
from moegraft.operators.speculative.spans import Spans, unseen
from moegraft.operators.speculative.statistics import Statistics

logger = logging.getLogger(__name__)


class SpeculativeDraft(ModelOperator):
    """Self-speculative decoding over one KV cache (SS-MoE, WWW 2026; acceptance after Leviathan et al. 2023, arXiv:2211.17192).

    `generate` takes what it always takes. Greedy and sampled decoding of one sequence draft and verify; everything else is
    decoded plainly, and the log says why, once for each reason.
    """

    name = "speculative_draft"
    options_type = SpeculativeOptions
    summary = "drafts tokens with fewer experts, or by n-gram lookup, and verifies them with all experts in one pass"
    uncaptured = "tokens are drafted with fewer experts, and verified several at once"

    def __init__(self, options: SpeculativeOptions, switch: DraftSwitch) -> None:
        super().__init__()
        self.options = options
        self._switch = switch
        self._statistics = Statistics()
        self.clock: Callable[[], float] = time.perf_counter  # what rounds are timed by
        self.spans: Spans = unseen
        self._said: set[str] = set()
        marginal = options.schedule == "marginal"
        self._schedule: Schedule = MarginalSchedule(options.max_draft) if marginal else FixedSchedule(options.max_draft)

    @classmethod
    def refuse(cls, module: nn.Module, options: SpeculativeOptions) -> str | None:
        if not isinstance(module, PreTrainedModel) or not isinstance(module, GenerationMixin):
            return f"{type(module).__name__} does not generate text"
        if module.config.is_encoder_decoder:
            return "it has an encoder and a decoder"
        return why_model_not_rewindable(module.config)

    @classmethod
    def build(cls, module: nn.Module, options: SpeculativeOptions, context: BuildContext) -> Self:
        return cls(options, context.shared(DraftSwitch, DraftSwitch))

    def check(self) -> None:
        if self.options.draft == "experts" and not self._switch.layers:
            raise UnsupportedModelError(
                "speculative_draft drafts with fewer experts, and no rule puts an operator in the place of experts that can run fewer; "
                "add a rule with 'match: {kind: experts}' and 'class: hybrid_experts', or write 'draft: ngram'"
            )
        if self.options.draft_sparsity is not None and not self._switch.sparse_layers:
            raise UnsupportedModelError(
                "draft_sparsity leaves neurons of experts out, and no rule gives experts a 'sparsity'; give them one, "
                "such as 'sparsity: {target: 0, counts: routed}', which leaves none out but in drafts"
            )
        if self.options.experts != "any" and not self._switch.resident_layers:
            self._say_once(f"experts: {self.options.experts} means any expert here, as none has a slot on a GPU")
        if self.options.mode == "adaptive":
            self._say_once("mode: adaptive changes what the model says; its statistics report by how much")

    def generate(self, model: PreTrainedModel, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(plain).bind_partial(*args, **kwargs).arguments
        arguments = {**bound, **bound.pop("kwargs", {})}
        config = effective_config(model, arguments)
        reason = why_plain(model, arguments, config)
        if reason is not None:
            self._say_once(f"decoding plainly: {reason}")
            return plain(**arguments)
        decoding = SpeculativeDecoding(
            options=self.options,
            drafter=self._drafter(),
            schedule=self._schedule,
            statistics=self._statistics,
            say_once=lambda why: self._say_once(f"decoding plainly: {why}"),
            streamer=arguments.get("streamer"),
            clock=self.clock,
            spans=self.spans,
        )
        result = plain(**with_stop_strings(arguments, config), custom_generate=decoding)
        if self.options.mode == "adaptive":
            logger.info("speculative_draft: %s", self._statistics.line())
        return result

    def _drafter(self) -> Drafter:
        if self.options.draft == "ngram":
            return NgramDrafter(self.options.ngram)
        return ExpertsDrafter(self._switch, self.options.settings, self.options.confidence)

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning("speculative_draft: %s", message)

    def statistics(self) -> Mapping[str, object]:
        """What drafting did so far in this process: acceptance by position, tokens a round, ms in draft and verify, and its cost."""
        return {**self._statistics.as_mapping(), "schedule": self._schedule.state()}

    def placement(self) -> str:
        options = self.options
        who = f"{options.draft_top_k} experts a token" if options.draft == "experts" else f"n-grams of up to {options.ngram} tokens"
        return f"draft: {self.name}, {options.mode}, {who}, {self._schedule.state()}; {self._statistics.line()}"

    def extra_repr(self) -> str:
        return ", ".join(f"{field.name}={getattr(self.options, field.name)}" for field in dataclasses.fields(self.options))
