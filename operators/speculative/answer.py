"""The one text that a call of `generate` writes: its tokens, its cache and what the caller wants to know of each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils.generic import ModelOutput


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
