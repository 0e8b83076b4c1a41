"""The choice of a token: by scores over a large vocabulary, and by the acceptance rules of speculative decoding.

Scores give what transformers' processors and `torch.multinomial` give, in less time. With 151,936 tokens, sorting their scores takes 12 ms
on a CPU and a random number with a logarithm for each of them 4 ms, where a decode step of six layers of Qwen3-30B-A3B in int4 takes 16.
Few tokens can be chosen, and only they are sorted and compared here.

Of the rules, in the terms of the papers: q is the draft's distribution and p the full model's, each after every logits processor.

Shapes: V tokens of the vocabulary, N tokens that may be chosen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

_GROUP = 64  # scores of which the largest is taken first


@dataclass(frozen=True)
class Scores:
    """The scores of the next token, after every logits processor.

    Attributes:
        values: (N,), float32 as a rule; a processor may return another type.
        tokens: whose they are, (N,) int64 ascending; None: of all V. No other token can be chosen.
        size: V.
    """

    values: torch.Tensor
    tokens: NDArray[np.int64] | None
    size: int

    @classmethod
    def of_all(cls, values: torch.Tensor) -> Scores:
        """Return those of the whole vocabulary, (V,)."""
        return cls(values, None, len(values))

    @cached_property
    def probabilities(self) -> torch.Tensor:
        """Those of the tokens, (N,)."""
        return self.values.softmax(-1)

    def likeliest(self) -> int:
        """Return the token with the highest score, the first of equal ones."""
        values = self.values
        plain = values.is_cpu and values.dtype == torch.float32 and not values.requires_grad
        return self._token(int(values.numpy().argmax() if plain else values.argmax()))  # NumPy's needs 10 of 50 us

    def probability(self, token: int) -> float:
        """Return that of any token of the vocabulary."""
        place = self._place(token)
        return 0.0 if place is None else float(self.probabilities[place])

    def draw(self) -> int:
        """Return a token by its probability.

        Raises:
            RuntimeError: the probabilities are no numbers.
        """
        return self._draw(self.probabilities)

    def draw_beyond(self, other: Scores) -> int:
        """Return a token drawn from max(0, p - q), normalised, for the probabilities p of these scores and q of others.

        It is one of p where nothing is left, as where p equals q up to rounding.
        """
        theirs = other.probabilities
        if other.tokens is not None:
            theirs = theirs.new_zeros(other.size).index_copy(0, torch.from_numpy(other.tokens), theirs)
        if self.tokens is not None:
            theirs = theirs[torch.from_numpy(self.tokens)]
        return self._draw_left((self.probabilities - theirs).clamp(min=0))

    def draw_other(self, token: int) -> int:
        """Return a token drawn from p without that of `token`, which is drawn where no other has a probability."""
        left, place = self.probabilities.clone(), self._place(token)
        if place is not None:
            left[place] = 0
        return self._draw_left(left)

    def _draw_left(self, weights: torch.Tensor) -> int:
        return self._draw(weights) if weights.sum() > 0 else self.draw()

    def _draw(self, weights: torch.Tensor) -> int:
        """Return the token that `torch.multinomial` draws from the weights (N,) and zeros for the rest of the vocabulary.

        It divides them by exponential random numbers and takes the largest (a race of exponential clocks). Those are -log(1 - u) >= u of
        uniform numbers u in float64, so that few tokens can be ahead of the likeliest, and only theirs are computed.
        """
        if not weights.is_cpu or weights.dtype != torch.float32:
            return self._token(int(torch.multinomial(weights, 1)))
        values: NDArray[np.float32] = weights.numpy()
        if not 0 < values.sum() < np.inf:
            torch.multinomial(weights, 1)  # raises the error
        uniform: NDArray[np.float64] = torch.empty(self.size, dtype=torch.float64).uniform_().numpy()
        uniform = uniform if self.tokens is None else uniform[self.tokens]
        likeliest = values.argmax()
        latest = -np.log1p(-uniform[likeliest]) / values[likeliest] * (1 + 1e-5)  # what rounding to float32 may change is less
        places = (uniform <= latest * values).nonzero()[0]
        clocks = -np.log1p(-uniform[places]).astype(np.float32)
        return self._token(int(places[(values[places] / clocks).argmax()]))

    def _token(self, place: int) -> int:
        return place if self.tokens is None else int(self.tokens[place])

    def _place(self, token: int) -> int | None:
        if self.tokens is None:
            return token
        place = int(np.searchsorted(self.tokens, token))
        return place if place < len(self.tokens) and self.tokens[place] == token else None


def shortening(processors: Sequence[Any]) -> int:
    """Return how many processors come before the first from which on they leave few tokens and look at no others; all if none does."""
    kinds = (TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
    first = len(processors)
    while first and type(processors[first - 1]) in kinds and processors[first - 1].filter_value == -torch.inf:
        first -= 1
    if first < len(processors) and type(processors[first]) is MinPLogitsWarper:
        return len(processors)
    return first


def shorten(scores: torch.Tensor, processors: Sequence[Any]) -> Scores:
    """Return what the processors of `shortening` leave of scores `(V,)`, float32 on the CPU.

    Of tokens with equal scores at the border of a nucleus, other ones may stay: the sort of transformers' warper is not stable.
    """
    first, *rest = processors
    tokens = largest(scores.numpy(), first.top_k) if type(first) is TopKLogitsWarper else _nucleus(scores, first)
    if tokens is None:
        tokens, rest = np.arange(len(scores)), list(processors)
    values = torch.from_numpy(scores.numpy()[tokens])[None]
    for processor in rest:
        values = processor(None, values)
    return Scores(values[0], tokens, len(scores))


def largest(scores: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return the ascending ids of the `count` largest of scores `(V,)`, and of all that equal the last of them.

    Scores of -inf count only where all are.
    """
    tokens = np.arange(len(scores))
    groups = len(scores) // _GROUP
    if groups > count:  # as many groups have a score that is not below the last of their largest ones
        tokens = _reaching(scores, np.partition(scores[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0), -count)[-count])
    if not len(tokens):
        return np.arange(len(scores))
    values, count = scores[tokens], min(count, len(tokens))
    kept: NDArray[np.int64] = tokens[_reaching(values, np.partition(values, -count)[-count])]
    return kept if len(kept) else tokens


def _reaching(scores: NDArray[np.float32], least: np.float32) -> NDArray[np.int64]:
    """Return the places of scores that are not below `least`, nor -inf; those that are no numbers are among them."""
    return (scores != -np.inf if least == -np.inf else ~(scores < least)).nonzero()[0]


def likely(probabilities: NDArray[np.float32], top_p: float) -> NDArray[np.int64]:
    """Return the ascending ids `(N,)` of tokens among which the nucleus for `top_p` is, given the probabilities `(V,)` of all tokens.

    A token of less than (1 - top_p) / V is not in it: all such tokens together have less than 1 - top_p, and the nucleus leaves out as many
    of the unlikeliest tokens as have that.
    """
    return (probabilities >= (1 - top_p) / len(probabilities)).nonzero()[0]


def _nucleus(scores: torch.Tensor, warper: TopPLogitsWarper) -> NDArray[np.int64] | None:
    """Return the ascending ids of the tokens that the warper leaves of scores `(V,)`; None where it has to look at all."""
    probabilities: NDArray[np.float32] = scores.softmax(-1).numpy()
    tokens = likely(probabilities, warper.top_p)
    if len(tokens) < warper.min_tokens_to_keep:  # a larger minimum, or scores that are no numbers
        return None
    tokens = tokens[scores.numpy()[tokens].argsort(kind="stable")]
    shares = probabilities[tokens]
    probabilities[tokens] = 0
    stays = probabilities.sum(dtype=np.float64) + shares.cumsum() > 1 - warper.top_p  # from the unlikeliest token on
    stays[-warper.min_tokens_to_keep :] = True
    kept: NDArray[np.int64] = np.sort(tokens[stays])
    return kept


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

    def replacement(self, draft: DraftToken, scores: Scores) -> int:
        """Return the token that replaces the rejected `draft`, by default the full model's own."""
        return self.pick(scores)

    def note(self, token: int, logits: torch.Tensor, scores: Scores, accepted: DraftToken | None) -> None:  # noqa: B027
        """Note a token of a round with drafts, by the full model's logits (V,); `accepted`: the draft that it is, else None."""


class Greedy(AcceptanceRule):
    """Accept the token of plain greedy decoding, and replace every other token by it."""

    def pick(self, scores: Scores) -> int:
        return scores.likeliest()

    def accepts(self, draft: DraftToken, scores: Scores) -> bool:
        return draft.token == self.pick(scores)


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

    def note(self, token: int, logits: torch.Tensor, scores: Scores, accepted: DraftToken | None) -> None:
        if self.count is not None:
            self.count(float(logits.log_softmax(-1)[token]), 1.0 if accepted is None else self.agreement(accepted, scores))

    def agreement(self, draft: DraftToken, scores: Scores) -> float:
        """Return the probability that the lossless rule accepts a token that this rule accepted."""
        if isinstance(self.lossless, Greedy):
            return float(self.lossless.accepts(draft, scores))
        return min(1.0, scores.probability(draft.token) / draft.confidence)
