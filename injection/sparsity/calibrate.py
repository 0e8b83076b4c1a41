"""`calibrate`: thresholds for a model from a text, and what leaving neurons out by them costs on text they were not made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from moegraft.injection.graft import Injection
from moegraft.injection.model_source import ModelSource, meta_skeleton
from moegraft.injection.rulefile import RuleFile
from moegraft.injection.sparsity.cost import Trial, judge
from moegraft.injection.sparsity.targets import ExpertsLayer, experts_layer
from moegraft.injection.stream import Stream, open_weights
from moegraft.injection.verify.layers import injection_of
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.registry import OperatorRegistry
from moegraft.operators.sparse.calibration import Calibration, calibrating, quantiles
from moegraft.operators.sparse.layer import LayerSparsity, sparsity_of
from moegraft.operators.sparse.options import Counts, Mode, SparsityOptions
from moegraft.operators.sparse.thresholds import GRID, LayerThresholds, Thresholds, weights_hash

LEAST_TOKENS = 64
WHOLE = SparsityOptions(0.0, "routed")
Advance = Callable[[int], None]


def _silent(tokens: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """How a calibration is run.

    Attributes:
        targets: tried on the held-out text.
        counts, mode: of those targets, as rules have them.
        window: tokens of one forward pass.
        held_out: share of the text, its end, that only judges.
    """

    targets: tuple[float, ...] = (0.5, 0.7, 0.85)
    counts: Counts = "routed"
    mode: Mode = "layer"
    window: int = 512
    held_out: float = 0.2

    def __post_init__(self) -> None:
        for target in self.targets:
            SparsityOptions(target, self.counts)
            if not target:
                raise ValueError("target 0 leaves nothing out: there is nothing to measure")
        if self.window < 2:
            raise ValueError(f"window must be 2 or more, not {self.window}")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is a share between 0 and 1, not {self.held_out}")


@dataclass(frozen=True, slots=True)
class TextSource:
    """What a calibration was made from, for its file.

    Attributes:
        model: as the user names it.
        layers: of the stock model, in its order.
        weights: their `weights_hash`, by path.
        text_sha256: of the text's bytes.
    """

    model: str
    model_type: str
    layers: Sequence[ExpertsLayer]
    weights: Mapping[str, str]
    text_sha256: str


def sparse_rules(rules: RuleFile, registry: OperatorRegistry, sparsity: SparsityOptions = WHOLE) -> RuleFile:
    """The rules with `sparsity` wherever an operator has that option; by default every neuron, in the layout that can leave some out.

    Raises:
        UnsupportedModelError: no rule names such an operator.
    """
    found = []
    changed = 0
    for rule in rules.rules:
        options: Any = rule.options
        if rule.operator is not None and any(field.name == "sparsity" for field in fields(registry[rule.operator].options_type)):
            options = replace(options, sparsity=sparsity)
            changed += 1
        found.append(replace(rule, options=options))
    if not changed:
        raise UnsupportedModelError(
            f"{rules.files[0]}: none of its rules names an operator that can leave neurons out; give the experts to hybrid_experts"
        )
    return replace(rules, rules=tuple(found))


def describe_source(model: PreTrainedModel, source: ModelSource, *, name: str, text_sha256: str) -> TextSource:
    """What identifies an injected model's sparse layers, read off the checkpoint that it was loaded from.

    Raises:
        UnsupportedModelError: no layer of the model can leave neurons out.
    """
    operators = {path: operator for path, operator in injection_of(model).operators.items() if sparsity_of(operator) is not None}
    if not operators:
        raise UnsupportedModelError("no layer of this model can leave neurons out; load it with 'sparsity' in its rules")
    skeleton = meta_skeleton(source, torch.float32)
    stream = Stream(source, open_weights(source, skeleton), skeleton, operators)
    layers = [experts_layer(path, skeleton) for path in operators]
    weights = {layer.path: weights_hash(stream.source(layer.path), layer.num_experts) for layer in layers}
    return TextSource(name, str(source.config.model_type), layers, weights, text_sha256)


def sparse_layers(model: PreTrainedModel) -> dict[str, LayerSparsity]:
    """The layers of an injected model that can leave neurons out, by path."""
    injection = getattr(model, "moegraft", None)
    operators = injection.operators if isinstance(injection, Injection) else {}
    return {path: found for path, operator in operators.items() if (found := sparsity_of(operator)) is not None}


def collect(
    model: PreTrainedModel, layers: Sequence[ExpertsLayer], windows: Sequence[torch.Tensor], advance: Advance = _silent
) -> Calibration:
    """One pass over `windows`, each (T,) int64, with every neuron computed; `advance(tokens)` is called after each."""
    found = sparse_layers(model)
    sizes = {layer.path: (layer.num_experts, layer.intermediate) for layer in layers}
    with calibrating({path: found[path] for path in sizes}, sizes) as made:
        for window in windows:
            run_base(model, window)
            advance(len(window))
    return made


def window_of(model: PreTrainedModel, wanted: int) -> int:
    """`wanted` tokens, or as many as the model was made for."""
    bound = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(wanted, bound) if isinstance(bound, int) and bound > 0 else wanted


def run_base(model: PreTrainedModel, window: torch.Tensor) -> None:
    """A forward pass without the head, whose logits nobody asked for."""
    with torch.inference_mode():
        model.base_model(input_ids=window[None].to(model.device), use_cache=False)


def cut(model: PreTrainedModel, ids: torch.Tensor, options: CalibrationOptions) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The windows that make thresholds and those that judge them.

    Raises:
        UnsupportedModelError: the text has fewer than `LEAST_TOKENS` tokens.
    """
    if len(ids) < LEAST_TOKENS:
        raise UnsupportedModelError(f"the text has {len(ids)} tokens; {LEAST_TOKENS} are needed, and some ten thousand say more")
    window = min(window_of(model, options.window), len(ids) // 4)  # at least four, so that both sides have one
    windows = [part for part in ids.split(window) if len(part) > 1]
    wanted = options.held_out * sum(map(len, windows))
    judging = 1
    while sum(map(len, windows[-judging:])) < wanted and judging < len(windows) - 1:
        judging += 1
    return windows[:-judging], windows[-judging:]


def calibrate(
    model: PreTrainedModel, about: TextSource, ids: torch.Tensor, options: CalibrationOptions, advance: Advance = _silent
) -> tuple[Thresholds, Calibration]:
    """Thresholds of every layer in `about`, with what the targets cost.

    Args:
        model: as `optimize_and_load` gives it for `sparse_rules`.
        ids: (T,) int64, the text.
        advance: called with tokens; in all `work_tokens` of them.

    Raises:
        UnsupportedModelError: the text is too short, a target cannot be reached, or the model computes what is not finite.
    """
    making, judging = cut(model, ids, options)
    routed = [_routed_targets(about.layers, target, options) for target in options.targets]
    calibration = collect(model, about.layers, making, advance)
    found = Thresholds(
        model=about.model,
        model_type=about.model_type,
        text_sha256=about.text_sha256,
        tokens=sum(map(len, making)),
        held_out_tokens=sum(map(len, judging)),
        top_k=about.layers[0].top_k,
        layers={layer.path: _layer_thresholds(layer, calibration, about) for layer in about.layers},
        all_layers=quantiles(calibration.all_bins(), GRID),
    )
    trials = [
        Trial(
            target,
            options.counts,
            options.mode,
            {path: (found.threshold(path, share, options.mode), share) for path, share in shares.items()},
        )
        for target, shares in zip(options.targets, routed, strict=True)
    ]
    return replace(found, held_out=tuple(judge(model, about.layers, sparse_layers(model), trials, judging, advance))), calibration


def work_tokens(model: PreTrainedModel, ids: torch.Tensor, options: CalibrationOptions) -> int:
    """What a calibration will report to `advance` in all."""
    making, judging = cut(model, ids, options)
    return sum(map(len, making)) + sum(map(len, judging)) * (1 + len(options.targets))


def _routed_targets(layers: Sequence[ExpertsLayer], target: float, options: CalibrationOptions) -> dict[str, float]:
    try:
        targets = {layer.path: layer.routed_target(SparsityOptions(target, options.counts)) for layer in layers}
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error
    if max(targets.values()) > GRID[-1]:
        raise UnsupportedModelError(f"target {target:g} means {max(targets.values()):.4g} of the routed neurons; {GRID[-1]:g} is the most")
    return targets


def _layer_thresholds(layer: ExpertsLayer, calibration: Calibration, about: TextSource) -> LayerThresholds:
    bins = calibration.layers[layer.path].bins
    if not bins.any():
        raise UnsupportedModelError(f"no token reached {layer.path}: its thresholds cannot be found from text alone")
    return LayerThresholds(
        layer.num_experts, layer.hidden, layer.intermediate, layer.shared_intermediate, about.weights[layer.path], quantiles(bins, GRID)
    )
