"""What a call of `generate` asks for, and whether drafting can serve it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList, StopStringCriteria
from transformers.generation.configuration_utils import GenerationMode

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
