"""The options of `speculative_draft`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moegraft.operators.draft import DraftSettings
from moegraft.operators.linear import WEIGHT_TYPES


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A drafter with a checkpoint of its own.

    Attributes:
        model: the folder of an EAGLE-3 head that was trained for this model, from the rule file's folder.
        weights: the type that its linear layers are packed to, as of `quantized_linear`. It changes drafts a little, and never the text.
    """

    model: Path
    weights: WEIGHT_TYPES = "int8"

    def __str__(self) -> str:
        return str(self.model)


@dataclass(frozen=True, slots=True)
class SpeculativeOptions:
    """Options of `speculative_draft`.

    Attributes:
        draft: the drafter. `experts` is the model itself with fewer experts per token; `ngram` continues the text as it continued the
            last time that its latest tokens occurred; `mtp` computes the multi-token prediction layers of the checkpoint, which other
            rules replace like those of the body; `{model: FOLDER}` computes an EAGLE-3 head.
        draft_top_k: experts per token while drafting.
        draft_sparsity: share of neurons to leave out while drafting, in the scope of the experts' `sparsity` and above its target. To
            draft by sparsity alone, set `draft_top_k` to all experts of a token; to leave the verified text unchanged, give the experts
            `target: 0`.
        max_draft: the largest draft length, in tokens.
        schedule: `marginal` drafts only as many tokens as pay by measurement, possibly none; `fixed` always drafts `max_draft` tokens.
        mode: `lossless` preserves greedy text and the distribution of sampled text (as in any assisted generation, bfloat16 rounding may
            change a near tie of greedy text); `adaptive` accepts more tokens and changes both.
        confidence: a draft ends after a token of lower probability. Adaptive mode does not accept such a token.
        tolerance: adaptive mode accepts a token of draft probability q and full probability p where `p / q > 1 - tolerance`.
        experts: `resident` drafts only with the likeliest experts among those resident on a GPU, so that a draft transfers no weights.
    """

    draft: Literal["experts", "ngram", "mtp"] | DraftHead = "experts"
    draft_top_k: int = 1
    draft_sparsity: float | None = None
    max_draft: int = 5
    schedule: Literal["fixed", "marginal"] = "marginal"
    mode: Literal["lossless", "adaptive"] = "lossless"
    confidence: float = 0.0
    tolerance: float = 0.0
    experts: Literal["any", "resident"] = "any"

    def __post_init__(self) -> None:
        for name in ("draft_top_k", "max_draft"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if not 0 <= self.confidence < 1:
            raise ValueError(f"confidence is a probability from 0 to below 1, not {self.confidence}")
        if not 0 <= self.tolerance <= 1:
            raise ValueError(f"tolerance is a share from 0 to 1, not {self.tolerance}")
        if self.draft_sparsity is not None and not 0 < self.draft_sparsity < 1:
            raise ValueError(f"draft_sparsity is a share between 0 and 1, not {self.draft_sparsity:g}")
        if self.mode == "lossless" and self.tolerance > 0:
            raise ValueError("tolerance changes the generated text; it needs 'mode: adaptive'")
        if self.mode == "adaptive" and not self.tolerance:
            raise ValueError("mode adaptive needs a tolerance above 0, such as 0.3")
        if self.draft == "ngram" and (self.confidence > 0 or self.mode == "adaptive"):
            raise ValueError("draft ngram has no probabilities: remove 'confidence' and 'mode: adaptive'")
        if self.draft != "experts" and (self.draft_sparsity is not None or self.experts == "resident"):
            option = "draft_sparsity" if self.draft_sparsity is not None else "experts: resident"
            raise ValueError(f"draft {self.draft} runs none of the model's own experts: remove '{option}'")

    @property
    def by_layers(self) -> bool:
        """Whether layers draft that are not of the model's body, and read its states: MTP layers or a head."""
        return self.draft == "mtp" or isinstance(self.draft, DraftHead)

    @property
    def settings(self) -> DraftSettings:
        """How experts run while drafting."""
        return DraftSettings(self.draft_top_k, resident=self.experts == "resident", sparsity=self.draft_sparsity)
