"""The next token of each of several answers, every one by its own request's rules and random numbers."""

from __future__ import annotations

import torch

from moegraft.injection.cli.serve.job import Ask


def generator(seed: int, device: torch.device) -> torch.Generator:
    made = torch.Generator(device=device)
    made.manual_seed(seed)
    return made


def choose(logits: torch.Tensor, ask: Ask, numbers: torch.Generator) -> int:
    """The token after `logits` (V,) float32: the likeliest, or one drawn as `ask` says."""
    if ask.temperature == 0:
        return int(logits.argmax())
    scores = logits / ask.temperature
    if 0 < ask.top_k < scores.numel():
        scores = scores.masked_fill(scores < scores.topk(ask.top_k).values[-1], -torch.inf)
    if ask.top_p < 1:
        ordered, index = scores.sort(descending=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # the likeliest token always stays
        scores = scores.scatter(0, index[before >= ask.top_p], -torch.inf)
    return int(torch.multinomial(scores.softmax(-1), 1, generator=numbers))
