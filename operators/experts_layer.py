"""The sizes of one layer of experts in its model, and the checks of a sparsity and a thresholds file against them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from moegraft.operators.errors import ThresholdsError, UnsupportedModelError
from moegraft.operators.layout import read_layout, why_unsupported
from moegraft.operators.thresholds import SparsityOptions, Thresholds, read_thresholds, routed_target

TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k", "num_selected_experts")
SHARED_DOWN = ("down_proj", "output_linear")  # names of the down projection of shared experts


@dataclass(frozen=True, slots=True)
class ExpertsLayer:
    """The sizes of one layer; `top_k` is the number of experts per token, `shared_intermediate` that of the shared experts' neurons."""

    path: str
    num_experts: int
    hidden: int
    intermediate: int
    shared_intermediate: int
    top_k: int

    def routed_target(self, options: SparsityOptions) -> float:
        """Return the share of this layer's routed neurons to leave out.

        Raises:
            ValueError: the target cannot be reached.
        """
        return routed_target(options, top_k=self.top_k, intermediate=self.intermediate, shared_intermediate=self.shared_intermediate)

    def draft_target(self, options: SparsityOptions, draft: float) -> float:
        """Return the share of this layer's routed neurons that drafts leave out, for a `draft_sparsity`.

        Raises:
            ValueError: the share cannot be reached, or is not above the target of `options`.
        """
        if draft <= options.target:
            raise ValueError(
                f"draft_sparsity {draft:g} is not above the target of sparsity, {options.target:g}: such drafts leave out no more"
            )
        return self.routed_target(replace(options, target=draft))

    def why_unfit(self, thresholds: Thresholds) -> str | None:
        """Return why a thresholds file is not for this layer, or None where it is."""
        made_for = f"made for '{thresholds.model}' ({thresholds.model_type})"
        found = thresholds.layers.get(self.path)
        if found is None:
            return f"{made_for}: it has no layer {self.path}"
        theirs = (found.num_experts, found.hidden, found.intermediate, found.shared_intermediate, thresholds.top_k)
        ours = (self.num_experts, self.hidden, self.intermediate, self.shared_intermediate, self.top_k)
        names = ("experts", "hidden", "intermediate", "shared neurons", "experts per token")
        for name, their, our in zip(names, theirs, ours, strict=True):
            if their != our:
                return f"{made_for}: {self.path} has {their} {name} there and {our} in this model"
        return None


def experts_layer(path: str, model: nn.Module) -> ExpertsLayer:
    """Return the layer at `path` of a model with its own modules, which may be on meta.

    Raises:
        UnsupportedModelError: the number of experts per token is not known.
    """
    layout = read_layout(model.get_submodule(path))
    config: Any = model.config
    return ExpertsLayer(
        path, layout.num_experts, layout.hidden, layout.intermediate, shared_intermediate(path, model), experts_per_token(config)
    )


def experts_per_token(config: PretrainedConfig) -> int:
    """Return the number of experts per token.

    Raises:
        UnsupportedModelError: the config does not state it.
    """
    text: Any = config.get_text_config()
    found = next((value for name in TOP_K_NAMES if isinstance(value := getattr(text, name, None), int)), None)
    if found is None:
        raise UnsupportedModelError(f"the config of {config.model_type} does not state the number of experts per token")
    return found


def shared_intermediate(path: str, model: nn.Module) -> int:
    """Return the number of shared neurons beside the experts at `path`: in the same block or, as in Granite, in the same layer."""
    block, _, _ = path.rpartition(".")
    layer, _, _ = block.rpartition(".")
    for owner in (block, layer):
        shared = [child for name, child in model.get_submodule(owner).named_children() if "shared" in name]
        downs = [module for child in shared for name, module in child.named_modules() if name.rpartition(".")[2] in SHARED_DOWN]
        found = sum(int(module.in_features) for module in downs if hasattr(module, "in_features"))
        if found:
            return found
    return 0


def sparsity_errors(options: SparsityOptions, draft: float | None, paths: Sequence[str], model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield each option of a rule's `sparsity` that the layers at `paths` cannot fulfil, such as `sparsity.target`, with the reason.

    Args:
        draft: the share of neurons that drafts leave out, where they leave out more.
        model: the model with its own modules, which may be on meta.
    """
    if not (options.target or draft):
        return
    try:
        # Unsupported layers have an error of their own.
        layers = [experts_layer(path, model) for path in paths if why_unsupported(model.get_submodule(path)) is None]
        targets = [layer.routed_target(options) if draft is None else layer.draft_target(options, draft) for layer in layers]
    except (UnsupportedModelError, ValueError) as error:
        yield "sparsity.target", str(error)
        return
    if options.thresholds is not None:
        try:
            _check_file(options.thresholds, layers, targets)
        except ThresholdsError as error:
            yield "sparsity.thresholds", str(error)


def _check_file(path: Path, layers: Sequence[ExpertsLayer], targets: Sequence[float]) -> None:
    """Check a thresholds file against the layers.

    Raises:
        ThresholdsError: the file cannot be read, is not for these layers, or does not reach a target.
    """
    thresholds = read_thresholds(path)
    for layer, target in zip(layers, targets, strict=True):
        reason = layer.why_unfit(thresholds)
        if reason is not None:
            raise ThresholdsError(f"{path}: {reason}; calibrate this one with moegraft calibrate")
        if target > thresholds.grid[-1]:
            raise ThresholdsError(f"{path}: its last share is {thresholds.grid[-1]:g}, below the target of {target:.4g} of routed neurons")
