"""Where drafts come from: the model with fewer experts, or the text itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from moegraft.operators.draft import DraftSettings, DraftSwitch
from moegraft.operators.speculative.acceptance import AcceptanceRule, DraftToken
from moegraft.operators.speculative.answer import Answer


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
