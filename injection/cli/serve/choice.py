"""The next token of each of several answers, every one by its own request's rules and random numbers."""

from __future__ import annotations

import torch

from moegraft.injection.cli.serve.job import Ask


def generator(seed: int, device: torch.device) -> torch.Generator:
    made = torch.Generator(device=device)
    made.manual_seed(seed)
    return made


def usable(logits: torch.Tensor) -> torch.Tensor:
    """Whether a token can be chosen after each row of `logits` (..., V): (...) bool, false of NaN, +inf, or nothing but -inf."""
    return logits.amax(-1).isfinite()  # a NaN is the largest of its row


def choose(logits: torch.Tensor, ask: Ask, numbers: torch.Generator) -> int:
    """The token after `logits` (V,) float32: the likeliest, or one drawn as `ask` says."""
    if ask.greedy:
        return int(logits.argmax())
    scores = logits / ask.temperature
    if 0 < ask.top_k < scores.numel():
        scores = scores.masked_fill(scores < scores.topk(ask.top_k).values[-1], -torch.inf)
    if ask.top_p < 1:
        ordered, index = scores.sort(descending=True)
        probabilities = ordered.softmax(-1)
        left_out = probabilities.cumsum(-1) - probabilities >= ask.top_p
        left_out[0] = False  # the likeliest token always stays
        scores = scores.scatter(0, index[left_out], -torch.inf)
    return int(torch.multinomial(scores.softmax(-1), 1, generator=numbers))
