"""The options of `speculative_draft`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moegraft.operators.draft import DraftSettings


@dataclass(frozen=True, slots=True)
class SpeculativeOptions:
    """Options of `speculative_draft`.

    Attributes:
        draft: what drafts: `experts`, the model itself with fewer experts per token; or `ngram`, the text so far, by what followed the
            last time its latest tokens occurred.
        draft_top_k: experts per token while drafting.
        draft_sparsity: share of neurons to leave out while drafting, counted as the experts' `sparsity` counts its target, and above
            it. For a draft by sparsity alone give `draft_top_k` all experts of a token; for a text that sparsity does not change, give
            the experts `target: 0`.
        max_draft: the largest draft length, in tokens.
        schedule: `marginal` drafts only as far as measured to pay, and not at all where it does not; `fixed` always drafts
            `max_draft` tokens.
        mode: `lossless` leaves greedy text and sampled distribution as they are (bfloat16 sums of several tokens at once may turn a near
            tie of greedy text, as in any assisted generation); `adaptive` accepts more and changes both.
        confidence: a draft ends after a token of lower probability. In adaptive mode no such token is accepted.
        tolerance: adaptive mode accepts a token of draft probability q and full probability p where `p / q > 1 - tolerance`.
        unverified: adaptive mode also accepts, whatever p is, each token with q above this.
        experts: `resident` drafts only with experts that are resident on a GPU, so that a draft transfers no weights: the likeliest of
            all that are. `resident_chosen`: only with those of them that the router chose for the token.
        verify_prefetch: while drafting, load onto the GPU what the verification should need; not with `prefetch: none`.
        renormalise: scale the weights of the experts that draft to the sum of all. Off by default: it lowered the acceptance rate
            (`benchmarks/results/speculative_acceptance.csv`).
        ngram: the longest run of tokens that `draft: ngram` looks up.
    """

    draft: Literal["experts", "ngram"] = "experts"
    draft_top_k: int = 1
    draft_sparsity: float | None = None
    max_draft: int = 5
    schedule: Literal["fixed", "marginal"] = "marginal"
    mode: Literal["lossless", "adaptive"] = "lossless"
    confidence: float = 0.0
    tolerance: float = 0.0
    unverified: float | None = None
    experts: Literal["any", "resident", "resident_chosen"] = "any"
    verify_prefetch: bool = True
    renormalise: bool = False
    ngram: int = 3

    def __post_init__(self) -> None:
        for name in ("draft_top_k", "max_draft", "ngram"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if not 0 <= self.confidence < 1:
            raise ValueError(f"confidence is a probability from 0 to below 1, not {self.confidence}")
        if not 0 <= self.tolerance <= 1:
            raise ValueError(f"tolerance is a share from 0 to 1, not {self.tolerance}")
        if self.unverified is not None and not 0 < self.unverified < 1:
            raise ValueError(f"unverified is a probability between 0 and 1, not {self.unverified}")
        if self.draft_sparsity is not None and not 0 < self.draft_sparsity < 1:
            raise ValueError(f"draft_sparsity is a share between 0 and 1, not {self.draft_sparsity:g}")
        lossy = self.tolerance > 0 or self.unverified is not None
        if self.mode == "lossless" and lossy:
            name = "tolerance" if self.tolerance > 0 else "unverified"
            raise ValueError(f"{name} changes the text that is generated; it needs 'mode: adaptive'")
        if self.mode == "adaptive" and not lossy:
            raise ValueError("mode adaptive needs a tolerance above 0, such as 0.3, or 'unverified'")
        if self.draft == "ngram" and (self.confidence > 0 or self.mode == "adaptive"):
            raise ValueError("draft ngram has no probabilities: remove 'confidence' and 'mode: adaptive'")
        if self.draft == "ngram" and self.draft_sparsity is not None:
            raise ValueError("draft ngram runs no experts: remove 'draft_sparsity'")

    @property
    def settings(self) -> DraftSettings:
        """How experts run while drafting."""
        return DraftSettings(
            self.draft_top_k,
            renormalise=self.renormalise,
            resident=self.experts != "any",
            chosen_only=self.experts == "resident_chosen",
            verify_prefetch=self.verify_prefetch,
            sparsity=self.draft_sparsity,
        )
