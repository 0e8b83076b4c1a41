"""Which draft tokens stand: the rules of speculative decoding, one class a rule, in the terms of the papers.

q is the draft's distribution and p the full model's, each (V,), after every logits processor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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


class AcceptanceRule(Protocol):
    """Judges draft tokens by the full model's processed scores, (V,) float32."""

    def pick(self, scores: torch.Tensor) -> int:
        """A token by the model's own choice alone."""
        ...

    def accepts(self, draft: DraftToken, scores: torch.Tensor) -> bool: ...

    def instead(self, draft: DraftToken, scores: torch.Tensor) -> int:
        """The token in place of `draft`, which was not accepted."""
        ...


class Greedy:
    """Accept what plain greedy decoding would say; where the draft differs, say that."""

    def pick(self, scores: torch.Tensor) -> int:
        return int(scores.argmax())

    def accepts(self, draft: DraftToken, scores: torch.Tensor) -> bool:
        return draft.token == self.pick(scores)

    def instead(self, draft: DraftToken, scores: torch.Tensor) -> int:
        return self.pick(scores)


class Sampling:
    """Accept with probability min(1, p / q), else sample from max(0, p - q), normalised.

    What comes out is distributed as p, whatever q is: Leviathan et al. 2023 (arXiv:2211.17192), algorithm 1 and appendix A.1.
    """

    def pick(self, scores: torch.Tensor) -> int:
        return _sample(scores.softmax(-1))

    def accepts(self, draft: DraftToken, scores: torch.Tensor) -> bool:
        return float(torch.rand(())) * draft.confidence < float(scores.softmax(-1)[draft.token])

    def instead(self, draft: DraftToken, scores: torch.Tensor) -> int:
        residual = scores.softmax(-1)
        if draft.probabilities is None:
            residual[draft.token] = 0
        else:
            residual = (residual - draft.probabilities).clamp(min=0)
        # All zero only where p is q but for rounding, and a token was refused by that rounding.
        return _sample(residual if residual.sum() > 0 else scores.softmax(-1))


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Accept a token the draft is sure of and the full model does not think much less of; else say what the model says.

    SS-MoE, algorithm 1: accept if `q > confidence and p / q > 1 - tolerance`. With `unverified`, also accept whatever has
    `q > unverified`. Changes what the model says.
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

    def instead(self, draft: DraftToken, scores: torch.Tensor) -> int:
        return self.lossless.pick(scores) if self.tolerance > 0 else self.lossless.instead(draft, scores)

    def agreement(self, draft: DraftToken, scores: torch.Tensor) -> float:
        """The probability with which the lossless rule accepts a token that this one accepted; 1 where it was the one that did."""
        if self.tolerance <= 0 and (self.unverified is None or draft.confidence <= self.unverified):
            return 1.0
        if isinstance(self.lossless, Greedy):
            return float(self.lossless.accepts(draft, scores))
        return min(1.0, float(scores.softmax(-1)[draft.token]) / draft.confidence)


def _sample(probabilities: torch.Tensor) -> int:
    return int(torch.multinomial(probabilities, 1))
