"""What a rule's `sparsity` means for one layer of a model, and whether a thresholds file is for that model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from moegraft.injection.routing import experts_per_token, shared_intermediate
from moegraft.operators.experts.layout import read_layout
from moegraft.operators.sparse.options import SparsityOptions, routed_target
from moegraft.operators.sparse.thresholds import Thresholds
from moegraft.operators.speculative.options import SpeculativeOptions


@dataclass(frozen=True, slots=True)
class ExpertsLayer:
    """One layer of experts as thresholds see it."""

    path: str
    num_experts: int
    hidden: int
    intermediate: int
    shared_intermediate: int
    top_k: int

    def routed_target(self, options: SparsityOptions) -> float:
        """The share of this layer's routed neurons to leave out.

        Raises:
            ValueError: the target cannot be reached.
        """
        return routed_target(options, top_k=self.top_k, intermediate=self.intermediate, shared_intermediate=self.shared_intermediate)

    def draft_target(self, options: SparsityOptions, draft: float) -> float:
        """The share of this layer's routed neurons that drafts leave out, for a `draft_sparsity`.

        Raises:
            ValueError: it cannot be reached, or is not above what is always left out.
        """
        if draft <= options.target:
            raise ValueError(
                f"draft_sparsity {draft:g} is not above the target of sparsity, {options.target:g}: such drafts leave out no more"
            )
        return self.routed_target(replace(options, target=draft))

    def why_unfit(self, thresholds: Thresholds) -> str | None:
        """Why a thresholds file says nothing of this layer, or None when it does."""
        about = f"made for '{thresholds.model}' ({thresholds.model_type})"
        found = thresholds.layers.get(self.path)
        if found is None:
            return f"{about}: it has no layer {self.path}"
        theirs = (found.num_experts, found.hidden, found.intermediate, found.shared_intermediate, thresholds.top_k)
        ours = (self.num_experts, self.hidden, self.intermediate, self.shared_intermediate, self.top_k)
        names = ("experts", "hidden", "intermediate", "shared neurons", "experts a token")
        for name, their, our in zip(names, theirs, ours, strict=True):
            if their != our:
                return f"{about}: {self.path} has {their} {name} there and {our} in this model"
        return None


def experts_layer(path: str, model: nn.Module) -> ExpertsLayer:
    """The layer at `path` of a model with its own modules, which may be on meta.

    Raises:
        UnsupportedModelError: how many experts a token has is not known.
    """
    layout = read_layout(model.get_submodule(path))
    config: Any = model.config
    return ExpertsLayer(
        path, layout.num_experts, layout.hidden, layout.intermediate, shared_intermediate(path, model), experts_per_token(config)
    )


def sparsity_options(options: object) -> SparsityOptions | None:
    """The `sparsity` of an operator's options; None where it is off or the operator has none."""
    found = getattr(options, "sparsity", None)
    return found if isinstance(found, SparsityOptions) else None


def draft_sparsity(options: Iterable[object]) -> float | None:
    """The `draft_sparsity` among the options of a model's operators."""
    return next((each.draft_sparsity for each in options if isinstance(each, SpeculativeOptions)), None)
