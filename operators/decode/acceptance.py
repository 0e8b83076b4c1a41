"""The acceptance rules of speculative decoding, in the terms of the papers.

q is the draft's distribution and p the full model's, each over the vocabulary, after every logits processor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from moegraft.operators.decode.sampling import Scores


@dataclass(frozen=True)
class DraftToken:
    """One drafted token.

    Attributes:
        scores: those of q; None where the drafter gives no distribution.
    """

    token: int
    scores: Scores | None = None

    @cached_property
    def confidence(self) -> float:
        """The draft's probability of the token; 1 where there is no distribution."""
        return 1.0 if self.scores is None else self.scores.probability(self.token)


class AcceptanceRule(ABC):
    """A rule that compares draft tokens with the full model's processed scores."""

    @abstractmethod
    def pick(self, scores: Scores) -> int:
        """Return the full model's own token."""

    @abstractmethod
    def accepts(self, draft: DraftToken, scores: Scores) -> bool:
        """Return whether `draft` is accepted."""

    @abstractmethod
    def replacement(self, draft: DraftToken, scores: Scores) -> int:
        """Return the token that replaces the rejected `draft`."""

    def note(self, token: int, logits: torch.Tensor, scores: Scores, accepted: DraftToken | None) -> None:  # noqa: B027
        """Note a token of a round with drafts, by the full model's logits (V,); `accepted`: the draft that it is, else None."""


class Greedy(AcceptanceRule):
    """Accept the token of plain greedy decoding, and replace every other token by it."""

    def pick(self, scores: Scores) -> int:
        return scores.likeliest()

    def accepts(self, draft: DraftToken, scores: Scores) -> bool:
        return draft.token == self.pick(scores)

    def replacement(self, draft: DraftToken, scores: Scores) -> int:
        return self.pick(scores)


class Sampling(AcceptanceRule):
    """Accept with probability min(1, p / q), else sample from max(0, p - q), normalised.

    The accepted text is distributed as p, whatever q is: Leviathan et al. 2023 (arXiv:2211.17192), algorithm 1 and appendix A.1.
    """

    def pick(self, scores: Scores) -> int:
        return scores.draw()

    def accepts(self, draft: DraftToken, scores: Scores) -> bool:
        return float(torch.rand(())) * draft.confidence < scores.probability(draft.token)

    def replacement(self, draft: DraftToken, scores: Scores) -> int:
        if draft.scores is None:
            return scores.draw_other(draft.token)
        return scores.draw_beyond(draft.scores)


@dataclass(frozen=True, slots=True)
class Adaptive(AcceptanceRule):
    """Accept a confident draft token unless its probability p is much lower than q (SS-MoE, algorithm 1). It changes the generated text.

    A token is accepted if `q > confidence and p / q > 1 - tolerance`.
    """

    lossless: AcceptanceRule
    confidence: float
    tolerance: float
    count: Callable[[float, float], object] | None = None  # of tokens of rounds with drafts: log probability and agreement

    def pick(self, scores: Scores) -> int:
        return self.lossless.pick(scores)

    def accepts(self, draft: DraftToken, scores: Scores) -> bool:
        q, p = draft.confidence, scores.probability(draft.token)
        return q > self.confidence and p > (1 - self.tolerance) * q

    def replacement(self, draft: DraftToken, scores: Scores) -> int:
        return self.lossless.pick(scores)

    def note(self, token: int, logits: torch.Tensor, scores: Scores, accepted: DraftToken | None) -> None:
        if self.count is not None:
            self.count(float(logits.log_softmax(-1)[token]), 1.0 if accepted is None else self.agreement(accepted, scores))

    def agreement(self, draft: DraftToken, scores: Scores) -> float:
        """Return the probability that the lossless rule accepts a token that this rule accepted."""
        if isinstance(self.lossless, Greedy):
            return float(self.lossless.accepts(draft, scores))
        return min(1.0, scores.probability(draft.token) / draft.confidence)
