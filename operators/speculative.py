"""`speculative_draft`: a model whose `generate` drafts with few of its experts, or other drafters, and verifies with all experts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from moegraft.operators.base import DecodeLoss, Footprint, ModelOperator, Traits
from moegraft.operators.context import InjectionContext
from moegraft.operators.decode.drafts import Drafter, Drafting, ExpertsDrafter, NgramDrafter, Trace, no_trace
from moegraft.operators.decode.loop import generate
from moegraft.operators.decode.mtp import MtpDrafter
from moegraft.operators.decode.mtp_layers import mtp_layers, share_with_mtp, why_no_mtp
from moegraft.operators.decode.rollback import unsupported_model_reason
from moegraft.operators.draft import NGRAM, BatchDrafts, DraftSettings
from moegraft.operators.eagle3 import Eagle3Checkpoint, add_eagle3_head, why_no_states
from moegraft.operators.errors import CheckpointError, UnsupportedModelError
from moegraft.operators.layout import experts_per_token
from moegraft.operators.linear import WEIGHT_TYPES
from moegraft.operators.schedule import DraftSchedule, FixedSchedule, MarginalSchedule, Statistics
from moegraft.operators.structure import calls_all_rows, is_experts
from moegraft.operators.timeline import Timeline, round_spans


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A drafter with a checkpoint of its own.

    Attributes:
        model: the folder of an EAGLE-3 head that was trained for this model, from the rule file's folder.
        weights: the type that its linear layers are packed to, as of `quantized_linear`. It changes drafts a little, and never the text.
    """

    model: Path
    weights: WEIGHT_TYPES = "int8"

    def __str__(self) -> str:
        return str(self.model)


@dataclass(frozen=True, slots=True)
class SpeculativeOptions:
    """Options of `speculative_draft`.

    Attributes:
        draft: the drafter. `experts` is the model itself with fewer experts per token; `ngram` continues the text as it continued the
            last time that its latest tokens occurred; `mtp` computes the multi-token prediction layers of the checkpoint, which other
            rules replace like those of the body; `{model: FOLDER}` computes an EAGLE-3 head.
        draft_top_k: experts per token while drafting.
        draft_sparsity: share of neurons to leave out while drafting, in the scope of the experts' `sparsity` and above its target. To
            draft by sparsity alone, set `draft_top_k` to all experts of a token; to leave the verified text unchanged, give the experts
            `target: 0`.
        max_draft: the largest draft length, in tokens.
        schedule: `marginal` drafts only as many tokens as pay by measurement, possibly none; `fixed` always drafts `max_draft` tokens.
        mode: `lossless` preserves greedy text and the distribution of sampled text (as in any assisted generation, bfloat16 rounding may
            change a near tie of greedy text); `adaptive` accepts more tokens and changes both.
        confidence: a draft ends after a token of lower probability. Adaptive mode does not accept such a token.
        tolerance: adaptive mode accepts a token of draft probability q and full probability p where `p / q > 1 - tolerance`.
        expert_budget: in adaptive mode, how many experts of a layer verify a draft (MoE-Spec, arXiv:2602.16052): those with the largest
            weights over its tokens; the others are left out. By default all that its tokens choose.
    """

    draft: Literal["experts", "ngram", "mtp"] | DraftHead = "experts"
    draft_top_k: int = 1
    draft_sparsity: float | None = None
    max_draft: int = 5
    schedule: Literal["fixed", "marginal"] = "marginal"
    mode: Literal["lossless", "adaptive"] = "lossless"
    confidence: float = 0.0
    tolerance: float = 0.0
    expert_budget: int | None = None

    def __post_init__(self) -> None:
        for name in ("draft_top_k", "max_draft"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if not 0 <= self.confidence < 1:
            raise ValueError(f"confidence is a probability from 0 to below 1, not {self.confidence}")
        if not 0 <= self.tolerance <= 1:
            raise ValueError(f"tolerance is a share from 0 to 1, not {self.tolerance}")
        if self.draft_sparsity is not None and not 0 < self.draft_sparsity < 1:
            raise ValueError(f"draft_sparsity is a share between 0 and 1, not {self.draft_sparsity:g}")
        if self.mode == "lossless" and self.tolerance > 0:
            raise ValueError("tolerance changes the generated text; it needs 'mode: adaptive'")
        if self.mode == "adaptive" and not self.tolerance and self.expert_budget is None:
            raise ValueError("mode adaptive needs a tolerance above 0, such as 0.3, or an expert_budget")
        if self.expert_budget is not None and self.expert_budget < 1:
            raise ValueError(f"expert_budget must be 1 or more, not {self.expert_budget}")
        if self.expert_budget is not None and self.mode == "lossless":
            raise ValueError("expert_budget changes the generated text; it needs 'mode: adaptive'")
        if self.draft == "ngram" and (self.confidence > 0 or self.tolerance > 0):
            raise ValueError("draft ngram has no probabilities: remove 'confidence' and 'tolerance'")
        if self.draft != "experts" and self.draft_sparsity is not None:
            raise ValueError(f"draft {self.draft} runs none of the model's own experts: remove 'draft_sparsity'")

    @property
    def by_layers(self) -> bool:
        """Whether layers draft that are not of the model's body, and read its states: MTP layers or a head."""
        return self.draft == "mtp" or isinstance(self.draft, DraftHead)

    @property
    def settings(self) -> DraftSettings:
        """How experts run while drafting."""
        return DraftSettings(self.draft_top_k, self.draft_sparsity)

    @property
    def verification(self) -> DraftSettings | None:
        """How experts run while a draft is verified; None for all that its tokens choose."""
        return None if self.expert_budget is None else DraftSettings(budget=self.expert_budget)


logger = logging.getLogger(__name__)


def why_no_fewer_experts(model: PreTrainedModel) -> str | None:
    """Return why a stock model, which may be on meta, cannot draft with fewer experts; None where it can."""
    advice = "write 'draft: ngram', or give 'draft_sparsity' or an EAGLE-3 head"
    try:
        if experts_per_token(model.config) == 1:
            return f"draft experts computes fewer experts of a token, and each token has one; {advice}"
    except UnsupportedModelError:  # the number is not stated
        pass
    for path, module in model.named_modules():
        if is_experts(path, module) and calls_all_rows(module):
            return (
                f"draft experts computes fewer experts of a token, and {type(module).__name__} has an input of its own for each; {advice}"
            )
    return None


class SpeculativeDraft(ModelOperator):
    """Self-speculative decoding over one KV cache (SS-MoE, WWW 2026; acceptance after Leviathan et al. 2023, arXiv:2211.17192).

    `generate` takes its usual arguments. Greedy and sampled decoding of one sequence use drafts; all other calls are decoded without
    them, with the reason in the log.
    """

    name = "speculative_draft"
    options_type = SpeculativeOptions
    summary = "drafts tokens by fewer experts, MTP layers, an EAGLE-3 head or n-grams, and verifies them with all experts in one pass"
    uncaptured = "tokens are drafted with fewer experts and verified several at once"

    def __init__(self, options: SpeculativeOptions, context: InjectionContext) -> None:
        super().__init__(options)
        self._context = context
        self._switch = switch = context.draft_switch
        self._statistics = Statistics()
        self.clock: Callable[[], float] = time.perf_counter  # times the rounds
        self.trace: Trace = no_trace
        self._schedule = self._new_schedule()
        self._batches = BatchDrafts(
            switch,
            self._statistics,
            self._new_schedule,
            longest=options.max_draft,
            by_ngrams=options.draft == "ngram",
            by_mtp_layers=options.by_layers,
            settings=options.settings,
            confidence=options.confidence,
        )

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
        if isinstance(options.draft, DraftHead):
            reason = why_no_states(type(module).__name__)
            if reason is not None:
                return reason
            try:
                Eagle3Checkpoint.open(options.draft.model, module.config)
            except CheckpointError as error:
                return str(error)
        if options.draft == "mtp" and mtp_layers(module) is None:
            return why_no_mtp(type(module).__name__, module.config) or (
                "draft mtp computes the checkpoint's own MTP layers, and there are none: a safetensors checkpoint has them in the layers "
                "after the last or under 'mtp.', a GGUF file in blocks after the last with 'nextn' tensors, and a model in memory has lost "
                "them; load a checkpoint that has them, or draft with 'experts' or 'ngram'"
            )
        if options.draft == "experts" and options.draft_sparsity is None:
            reason = why_no_fewer_experts(module)
        return reason or unsupported_model_reason(module)

    @classmethod
    def traits(cls, options: SpeculativeOptions) -> Traits:
        drafting = options.settings if options.draft == "experts" else None
        identity, loss = "", None
        if options.expert_budget is not None:
            identity = f"expert_budget {options.expert_budget}"
            text = f"at most {options.expert_budget} experts of a layer verify a draft of {options.max_draft} tokens"
            loss = DecodeLoss(text, options.max_draft + 1, options.verification)
        return Traits(
            identity, draft_sparsity=options.draft_sparsity, drafts=True, mtp=options.draft == "mtp", drafting=drafting, decode_loss=loss
        )

    @classmethod
    def footprint(cls, module: nn.Module, options: SpeculativeOptions, dtype: torch.dtype) -> Footprint:
        assert isinstance(module, PreTrainedModel), "unsupported_reason refuses all others"
        if not isinstance(options.draft, DraftHead):
            return super().footprint(module, options, dtype)
        return Footprint({"cpu": Eagle3Checkpoint.open(options.draft.model, module.config).nbytes(options.draft.weights, dtype)})

    @classmethod
    def build(cls, module: nn.Module, options: SpeculativeOptions, context: InjectionContext) -> Self:
        return cls(options, context)

    @classmethod
    def conflict(cls, model: nn.Module, options: SpeculativeOptions, traits: Mapping[str, Sequence[Traits]]) -> str | None:
        experts = [each for of_module in traits.values() for each in of_module]
        if not any(each.narrows for each in experts):
            fix = "no rule replaces experts by an operator that can run fewer; add one with 'kind: experts' and 'class: hybrid_experts'"
            if options.draft == "experts":
                return f"it drafts with fewer experts, and {fix}, or write 'draft: ngram'"
            if options.expert_budget is not None:
                return f"expert_budget limits the experts that verify a draft, and {fix}"
        if options.draft_sparsity is not None and not any(each.sparsity is not None for each in experts):
            return (
                "draft_sparsity leaves neurons of experts out, and no rule gives experts a 'sparsity'; give them one, "
                "such as 'sparsity: {target: 0, scope: routed}', which leaves neurons out only in drafts"
            )
        return None

    def on_model_loaded(self, model: PreTrainedModel, path: str) -> None:
        if self.options.tolerance:
            self.warn_once("mode: adaptive changes the text that is generated; its statistics report by how much")
        if self.options.draft == "mtp":
            share_with_mtp(model)
        elif isinstance(self.options.draft, DraftHead):
            add_eagle3_head(model, self.options.draft.model, self.options.draft.weights, self._context)

    def _drafter(self, model: PreTrainedModel) -> Drafter:
        options = self.options
        if options.draft == "ngram":
            return NgramDrafter()
        if options.by_layers:
            return MtpDrafter(model, self._switch, self._context.replay, self._context.gpu_engines_in_use)
        return ExpertsDrafter(self._switch, options.settings)

    def generate(self, model: PreTrainedModel, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        drafting = Drafting(
            max_draft=self.options.max_draft,
            drafter=self._drafter(model),
            schedule=self._schedule,
            statistics=self._statistics,
            switch=self._switch,
            warn_once=lambda reason: self.warn_once(f"decoding without drafts: {reason}"),
            confidence=self.options.confidence,
            tolerance=self.options.tolerance,
            verification=self.options.verification,
            clock=self.clock,
            trace=self.trace,
        )
        result = generate(self._context.replay, model, plain, args, kwargs, drafting)
        if self.options.tolerance:
            logger.debug("speculative_draft: %s", self._statistics.line())
        return result

    def statistics(self) -> Mapping[str, object]:
        """Return acceptance by position, tokens per round, ms of drafts and verifications, and the cost of a lossy mode, over all calls."""
        return {**self._statistics.as_mapping(), "schedule": self._batches.state() or self._schedule.state()}

    def placement(self) -> str:
        options = self.options
        drafters = {
            "experts": f"{options.draft_top_k} expert{'' if options.draft_top_k == 1 else 's'} per token",
            "ngram": f"n-grams of up to {NGRAM} tokens",
            "mtp": "MTP layers",
        }
        draft = options.draft
        drafter = f"EAGLE-3 head {draft}, {draft.weights} weights" if isinstance(draft, DraftHead) else drafters[draft]
        return f"draft: {self.name}, {options.mode}, {drafter}, {self.statistics()['schedule']}; {self._statistics.line()}"
