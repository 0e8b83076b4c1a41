"""The keys and values of several sequences of different lengths in one cache."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel


class Batch:
    """Sequences that are decoded together, one token per step. Shorter ones begin with padding, which is masked.

    Rows are in the order of `add`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model  # torch types every attribute of a module as a tensor
        self._cache: DynamicCache | None = None
        self._padding: list[int] = []  # tokens before each sequence

    def __len__(self) -> int:
        return len(self._padding)

    def add(self, cache: DynamicCache) -> None:
        """Append the cache of one sequence. If that fails, as for lack of memory, the other sequences are unchanged."""
        if self._cache is None:
            self._cache, self._padding = cache, [0]
            return
        mine, new = self._cache.get_seq_length(), cache.get_seq_length()
        length = max(mine, new)
        try:
            for layer, other in zip(_layers(self._cache), _layers(cache), strict=True):
                pairs = [(getattr(layer, name), getattr(other, name)) for name in ("keys", "values")]
                joined = [torch.cat([pad(states, (0, 0, length - states.shape[-2], 0)) for states in pair]) for pair in pairs]
                layer.keys, layer.values = joined
        except Exception:
            for layer in _layers(self._cache):  # views, which need no memory
                layer.keys, layer.values = (states[: len(self), :, states.shape[-2] - mine :] for states in (layer.keys, layer.values))
            raise
        self._padding = [*(padding + length - mine for padding in self._padding), length - new]

    def copy(self, row: int) -> DynamicCache:
        """Return a copy of one sequence's cache, without padding."""
        assert self._cache is not None, "there is a sequence to copy"
        copied, padding = DynamicCache(config=self._model.config.get_text_config(decoder=True)), self._padding[row]
        for layer, other in zip(_layers(self._cache), _layers(copied), strict=True):
            other.update(layer.keys[row : row + 1, :, padding:].clone(), layer.values[row : row + 1, :, padding:].clone())
        return copied

    def remove(self, row: int) -> None:
        """Remove one sequence."""
        assert self._cache is not None, "there is a sequence to remove"
        self._padding.pop(row)
        common = min(self._padding, default=0)
        rest = [index for index in range(len(self._padding) + 1) if index != row]
        if rest:
            for layer in _layers(self._cache):
                layer.keys, layer.values = layer.keys[rest, :, common:], layer.values[rest, :, common:]
        self._padding = [padding - common for padding in self._padding]
        if not rest:
            self._cache = None

    def step(self, tokens: list[int]) -> torch.Tensor:
        """Compute one token of each sequence; return the logits of the next ones, (B, V) float32."""
        assert self._cache is not None and len(tokens) == len(self), "one token for each sequence"
        device, length = self._model.device, self._cache.get_seq_length() + 1
        padding = torch.tensor(self._padding, device=device)
        arguments: dict[str, Any] = {}
        if any(self._padding):
            arguments["attention_mask"] = (torch.arange(length, device=device)[None] >= padding[:, None]).long()
        output = self._model(
            input_ids=torch.tensor(tokens, device=device)[:, None],
            position_ids=(length - 1 - padding)[:, None],
            past_key_values=self._cache,
            use_cache=True,
            **arguments,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits


def cut(cache: DynamicCache, tokens: int) -> DynamicCache:
    """Crop every layer to the first `tokens`, also after a failed forward pass that left layers of different lengths."""
    for layer in _layers(cache):
        layer.keys, layer.values = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]
    return cache


def _layers(cache: DynamicCache) -> list[Any]:
    return cache.layers  # without a common type
