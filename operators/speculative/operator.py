"""`speculative_draft`: a model whose `generate` drafts with few of its experts and verifies with all of them.

What a call of `generate` asks for, and whether drafting can serve it.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StoppingCriteriaList, StopStringCriteria
from transformers.generation.configuration_utils import GenerationMode

from moegraft.operators.base import BuildContext, ModelOperator
from moegraft.operators.draft import DraftSwitch
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.speculative.decoding import Drafter, ExpertsDrafter, NgramDrafter, SpeculativeDecoding
from moegraft.operators.speculative.options import Spans, SpeculativeOptions, unseen
from moegraft.operators.speculative.rollback import why_model_not_rewindable
from moegraft.operators.speculative.schedule import FixedSchedule, MarginalSchedule, Schedule, Statistics

PLAIN_CACHES = ("paged", "quantized", "offloaded", "offloaded_static")
SERVED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def effective_config(model: PreTrainedModel, arguments: Mapping[str, Any]) -> GenerationConfig:
    """The generation config of a call: what it gives, over its own config, over the model's."""
    own = model.generation_config
    config = copy.deepcopy(own) if isinstance(own, GenerationConfig) else GenerationConfig()
    given = arguments.get("generation_config")
    if isinstance(given, GenerationConfig):
        config.update(**{name: value for name, value in given.to_dict().items() if value is not None})
    config.update(**arguments)
    return config


def why_plain(model: PreTrainedModel, arguments: Mapping[str, Any], config: GenerationConfig) -> str | None:
    """Why a call is decoded without drafts, or None when they can serve it."""
    if arguments.get("custom_generate") is not None:
        return "the call brings a decoding loop of its own (custom_generate)"
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    if mode not in SERVED_MODES:
        return f"{mode.value.replace('_', ' ')} does not draft this way"
    return _why_plain_inputs(arguments, config) or _why_plain_settings(model, arguments, config)


def _why_plain_inputs(arguments: Mapping[str, Any], config: GenerationConfig) -> str | None:
    inputs = arguments.get("inputs")
    ids = inputs if inputs is not None else arguments.get("input_ids")
    if arguments.get("inputs_embeds") is not None:
        return "the prompt is given as embeddings"
    if isinstance(ids, torch.Tensor) and ids.shape[0] > 1:
        return f"a batch of {ids.shape[0]} sequences accepts different numbers of tokens"
    if (config.num_return_sequences or 1) > 1:
        return f"num_return_sequences={config.num_return_sequences} makes a batch"
    return None


def _why_plain_settings(model: PreTrainedModel, arguments: Mapping[str, Any], config: GenerationConfig) -> str | None:
    if config.use_cache is False:
        return "use_cache=False leaves nothing to verify against"
    if config.cache_implementation in PLAIN_CACHES:
        return f"a cache of kind {config.cache_implementation} cannot be rolled back"
    if arguments.get("negative_prompt_ids") is not None or (config.guidance_scale or 1) != 1:
        return "classifier-free guidance runs the model inside a logits processor"
    if config.output_attentions or config.output_hidden_states:
        return "attentions and hidden states are wanted step by step"
    if config.prefill_chunk_size is not None or config.token_healing or arguments.get("synced_gpus"):
        return "prefill_chunk_size, token_healing and synced_gpus need transformers' own loop"
    if getattr(model.generation_config, "stop_strings", None):
        return "the model's own generation config has stop strings, which cannot reach a decoding loop"
    return None


def with_stop_strings(arguments: dict[str, Any], config: GenerationConfig) -> dict[str, Any]:
    """The same call with its stop strings as a stopping criterion: `generate` gives no tokenizer to decoding loops.

    Raises:
        ValueError: stop strings without the tokenizer.
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
    def unsupported_reason(cls, module: nn.Module, options: SpeculativeOptions) -> str | None:
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
                "such as 'sparsity: {target: 0, scope: routed}', which leaves none out but in drafts"
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
