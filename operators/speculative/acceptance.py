"""Which draft tokens are accepted: the rules of speculative decoding, in the terms of the papers.

q is the draft's distribution and p the full model's, each (V,), after every logits processor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DraftToken:
    """One drafted token.

    Attributes:
        probabilities: q, (V,) float32 that sums to 1; None where the draft names one token and no distribution.
    """

    token: int
    probabilities: torch.Tensor | None = None

    @property
    def confidence(self) -> float:
        """q of the token itself; 1 where there is no distribution."""
        return 1.0 if self.probabilities is None else float(self.probabilities[self.token])


class AcceptanceRule(ABC):
    """Compares draft tokens with the full model's processed scores, (V,) float32."""

    @abstractmethod
    def pick(self, scores: torch.Tensor) -> int:
        """Return a token by the model's own choice alone."""

    @abstractmethod
    def accepts(self, draft: DraftToken, scores: torch.Tensor) -> bool:
        """Return whether `draft` is accepted."""

    @abstractmethod
    def replacement(self, draft: DraftToken, scores: torch.Tensor) -> int:
        """Return the token in place of `draft`, which was rejected."""


class Greedy(AcceptanceRule):
    """Accept the token of plain greedy decoding, and replace every other by it."""

    def pick(self, scores: torch.Tensor) -> int:
        return int(scores.argmax())

    def accepts(self, draft: DraftToken, scores: torch.Tensor) -> bool:
        return draft.token == self.pick(scores)

    def replacement(self, draft: DraftToken, scores: torch.Tensor) -> int:
        return self.pick(scores)


class Sampling(AcceptanceRule):
    """Accept with probability min(1, p / q), else sample from max(0, p - q), normalised.

    The accepted text is distributed as p, whatever q is: Leviathan et al. 2023 (arXiv:2211.17192), algorithm 1 and appendix A.1.
    """

    def pick(self, scores: torch.Tensor) -> int:
        return int(torch.multinomial(scores.softmax(-1), 1))

    def accepts(self, draft: DraftToken, scores: torch.Tensor) -> bool:
        return float(torch.rand(())) * draft.confidence < float(scores.softmax(-1)[draft.token])

    def replacement(self, draft: DraftToken, scores: torch.Tensor) -> int:
        residual = scores.softmax(-1)
        if draft.probabilities is None:
            residual[draft.token] = 0
        else:
            residual = (residual - draft.probabilities).clamp(min=0)
        # All zero only where p equals q but for rounding, and rounding rejected a token.
        return int(torch.multinomial(residual, 1)) if residual.sum() > 0 else self.pick(scores)


@dataclass(frozen=True, slots=True)
class Adaptive(AcceptanceRule):
    """Accept a confident draft token to which the full model does not give much less; else take the model's own choice.

    SS-MoE, algorithm 1: accept if `q > confidence and p / q > 1 - tolerance`. With `unverified`, also accept every token with
    `q > unverified`. Changes the text that is generated.
    """

    lossless: Greedy | Sampling
    confidence: float
    tolerance: float
    unverified: float | None

    def pick(self, scores: torch.Tensor) -> int:
        return self.lossless.pick(scores)

    def accepts(self, draft: DraftToken, scores: torch.Tensor) -> bool:
        q = draft.confidence
        if self.unverified is not None and q > self.unverified:
            return True
        if self.tolerance <= 0:
            return self.lossless.accepts(draft, scores)
        p = float(scores.softmax(-1)[draft.token])
        return q > self.confidence and p > (1 - self.tolerance) * q

    def replacement(self, draft: DraftToken, scores: torch.Tensor) -> int:
        return self.lossless.pick(scores) if self.tolerance > 0 else self.lossless.replacement(draft, scores)

    def agreement(self, draft: DraftToken, scores: torch.Tensor) -> float:
        """Return the probability with which the lossless rule accepts a token that this one accepted; 1 where it was the one that did."""
        if self.tolerance <= 0 and (self.unverified is None or draft.confidence <= self.unverified):
            return 1.0
        if isinstance(self.lossless, Greedy):
            return float(self.lossless.accepts(draft, scores))
        return min(1.0, float(scores.softmax(-1)[draft.token]) / draft.confidence)
