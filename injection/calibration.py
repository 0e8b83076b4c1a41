"""Calibration: sparsity thresholds from a text, or for a model that is loaded, their cost on held-out text, and a record of the routing."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from moegraft.injection.injected import sparse_layers
from moegraft.injection.meta_model import ModelSource, meta_skeleton, open_weights, read_tokenizer
from moegraft.injection.planning import Plan
from moegraft.injection.rules import RuleFile
from moegraft.injection.texts import read_text
from moegraft.injection.verify import compare_logits, logits_of
from moegraft.operators.errors import CheckpointError, ThresholdsError, UnsupportedModelError
from moegraft.operators.registry import OperatorRegistry
from moegraft.operators.router_maps import RouterMaps, fit_maps, named_shares, save_maps
from moegraft.operators.routing_trace import Trace, record_trace
from moegraft.operators.sparsity import (
    FILE_NAME,
    GRID,
    ExpertsLayer,
    HeldOut,
    LayerSparsity,
    LayerThresholds,
    Mode,
    Scope,
    SparsityOptions,
    Thresholds,
    experts_layer,
    read_thresholds,
    weights_hash,
    whole,
)
from moegraft.operators.weights import WeightSource

LOWEST, HIGHEST = -24, 8  # log2 of the range of magnitudes that the bins cover
PER_OCTAVE = 256  # bins per factor of two: a threshold is exact to 0.27 %
BINS = (HIGHEST - LOWEST) * PER_OCTAVE


class ActivationHistogram:
    """Histogram of `|act(gate)|` of one layer in logarithmic bins.

    Attributes:
        bins: (BINS,) int64. The first bin also counts all smaller magnitudes, zeros included; the last bin all larger ones.
    """

    def __init__(self, num_experts: int) -> None:
        self.bins: NDArray[np.int64] = np.zeros(BINS, np.int64)
        self._num_experts = num_experts

    def add(self, top_k_index: torch.Tensor, acted: torch.Tensor) -> None:
        """Count the activations of one forward pass.

        Args:
            top_k_index: (T, K) expert ids; -1 and E are padded slots.
            acted: (T, K, I) float32, `act(gate)`.

        Raises:
            UnsupportedModelError: an activation is not finite.
        """
        real = (top_k_index >= 0) & (top_k_index < self._num_experts)
        magnitudes = acted[real.to(acted.device)].abs().float()
        if not bool(torch.isfinite(magnitudes).all()):
            raise UnsupportedModelError("an activation is not finite: thresholds cannot be found for a model that computes NaN or infinity")
        # Zeros become a magnitude of the first bin, so that their logarithm is finite.
        octaves = magnitudes.clamp_min(2.0 ** (LOWEST - 1)).log2_().sub_(LOWEST).mul_(PER_OCTAVE)
        numbers = octaves.floor_().clamp_(0, BINS - 1).to(torch.int64).flatten()
        self.bins += torch.bincount(numbers, minlength=BINS).cpu().numpy()


def quantiles(bins: NDArray[np.int64], shares: Sequence[float]) -> tuple[float, ...]:
    """Return, for each share, the threshold below which at least that share of the magnitudes in `bins` lies, exact to one bin.

    Raises:
        ValueError: nothing was counted.
    """
    total = int(bins.sum())
    if not total:
        raise ValueError("no activation was counted")
    wanted = np.ceil(np.asarray(shares) * total)
    positions = np.searchsorted(np.cumsum(bins), np.maximum(wanted, 1))
    return tuple((2.0 ** (LOWEST + (positions + 1) / PER_OCTAVE)).tolist())


def all_bins(histograms: Mapping[str, ActivationHistogram]) -> NDArray[np.int64]:
    """Return the histogram of all layers together, (BINS,) int64."""
    total: NDArray[np.int64] = np.sum([histogram.bins for histogram in histograms.values()], axis=0)
    return total


logger = logging.getLogger(__name__)

LEAST_TOKENS = 64
HELD_OUT = 0.2  # of a text, at its end, for evaluation alone
WHOLE = SparsityOptions(0.0, "routed")
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """Options of a calibration.

    Attributes:
        targets: sparsity to evaluate on the held-out text.
        scope, mode: of these targets, as in rules.
        window: tokens of one forward pass.
    """

    targets: tuple[float, ...] = (0.5, 0.7, 0.85)
    scope: Scope = "routed"
    mode: Mode = "layer"
    window: int = 512

    def __post_init__(self) -> None:
        for target in self.targets:
            SparsityOptions(target, self.scope)
            if not target:
                raise ValueError("target 0 leaves no neuron out; give a target above 0")
        if self.window < 2:
            raise ValueError(f"window must be 2 or more, not {self.window}")


def sparse_rules(rules: RuleFile, registry: OperatorRegistry) -> RuleFile:
    """Return the rules with the sparse layout, and no neuron left out, for every operator that supports it.

    Raises:
        UnsupportedModelError: no operator of the rules supports it.
    """
    with_sparsity = []
    changed = False
    for rule in rules.rules:
        options: Any = rule.options
        if rule.operator is not None and "sparsity" in {field.name for field in fields(registry[rule.operator].options_type)}:
            changed = True
            try:
                options = replace(options, sparsity=WHOLE)
            except ValueError as error:
                raise UnsupportedModelError(str(error)) from error
        with_sparsity.append(replace(rule, options=options))
    if not changed:
        raise UnsupportedModelError(
            f"{rules.files[0]}: no operator of these rules can leave neurons out; use hybrid_experts for the experts"
        )
    return replace(rules, rules=tuple(with_sparsity))


def calibrate(
    model: PreTrainedModel,
    source: ModelSource,
    ids: torch.Tensor,
    options: CalibrationOptions,
    advance: Advance = lambda tokens: None,
    *,
    name: str,
    text_sha256: str,
) -> Thresholds:
    """Find the thresholds of every layer that can leave neurons out, and evaluate the targets.

    Args:
        model: from `optimize_and_load` with `sparse_rules`.
        source: the checkpoint that it was loaded from.
        ids: the text, (T,) int64.
        advance: called with a number of tokens; the sum is `work_tokens`.
        name: of the model, as the user names it.
        text_sha256: of the text's bytes.

    Raises:
        UnsupportedModelError: no layer of the model can leave neurons out, the text is too short, a target cannot be reached, or
            activations are not finite.
    """
    states = sparse_layers(model)
    if not states:
        raise UnsupportedModelError("no layer of this model can leave neurons out; load it with 'sparsity' in its rules")
    skeleton = meta_skeleton(source, torch.float32)
    weights, experts = open_weights(source, skeleton), [experts_layer(path, skeleton) for path in states]
    hashes = {layer.path: weights_hash(weights.source(layer.path, "experts"), layer.num_experts) for layer in experts}
    calibrating_windows, judging_windows = cut(model, ids, options)
    targets = {target: _routed_targets(experts, target, options) for target in options.targets}
    histograms = collect(model, experts, calibrating_windows, advance)
    layers = {}
    for layer in experts:
        bins = histograms[layer.path].bins
        if not bins.any():
            raise UnsupportedModelError(f"no token of the text reaches {layer.path}: its thresholds cannot be calibrated")
        sizes = (layer.num_experts, layer.hidden, layer.intermediate, layer.shared_intermediate)
        layers[layer.path] = LayerThresholds(*sizes, hashes[layer.path], quantiles(bins, GRID))
    thresholds = Thresholds(
        model=name,
        model_type=str(source.config.model_type),
        text_sha256=text_sha256,
        tokens=sum(map(len, calibrating_windows)),
        held_out_tokens=sum(map(len, judging_windows)),
        top_k=experts[0].top_k,
        layers=layers,
        all_layers=quantiles(all_bins(histograms), GRID),
    )
    runs = [
        _TargetRun(target, {path: (thresholds.threshold(path, share, options.mode), share) for path, share in shares.items()})
        for target, shares in targets.items()
    ]
    with whole(states.values()):
        for window in judging_windows:
            for state in states.values():
                state.set_threshold(0.0, 0.0)
            dense = logits_of(model, window)
            advance(len(window))
            for run in runs:
                run.add(model, experts, states, window, dense)
                advance(len(window))
    return replace(thresholds, held_out=tuple(run.result(options) for run in runs))


def work_tokens(model: PreTrainedModel, ids: torch.Tensor, options: CalibrationOptions) -> int:
    """Return the sum of tokens that a calibration reports to `advance`."""
    calibrating_windows, judging_windows = cut(model, ids, options)
    return sum(map(len, calibrating_windows)) + sum(map(len, judging_windows)) * (1 + len(options.targets))


def cut(model: PreTrainedModel, ids: torch.Tensor, options: CalibrationOptions) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the windows for calibration and those for evaluation.

    Raises:
        UnsupportedModelError: the text has fewer than `LEAST_TOKENS` tokens.
    """
    if len(ids) < LEAST_TOKENS:
        raise UnsupportedModelError(f"the text has {len(ids)} tokens; at least {LEAST_TOKENS} are needed, and some ten thousand are better")
    window = min(window_of(model, options.window), len(ids) // 4)  # at least four, so that both sides have one
    windows = [part for part in ids.split(window) if len(part) > 1]
    wanted = HELD_OUT * sum(map(len, windows))
    judging = 1
    while sum(map(len, windows[-judging:])) < wanted and judging < len(windows) - 1:
        judging += 1
    return windows[:-judging], windows[-judging:]


def window_of(model: PreTrainedModel, wanted: int) -> int:
    """Return `wanted` tokens, or the length of the model's context if that is less."""
    bound = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(wanted, bound) if isinstance(bound, int) and bound > 0 else wanted


def windows_of(model: PreTrainedModel, ids: torch.Tensor, window: int, advance: Advance) -> Iterator[torch.Tensor]:
    """Yield a text, (T,) int64, in parts of `window` tokens, or of the model's context; `advance(tokens)` is called after each."""
    for part in ids.split(window_of(model, window)):
        yield part
        advance(len(part))


def collect(
    model: PreTrainedModel, layers: Sequence[ExpertsLayer], windows: Sequence[torch.Tensor], advance: Advance = lambda tokens: None
) -> dict[str, ActivationHistogram]:
    """Collect the activations of one pass over `windows`, each (T,) int64, with every neuron; `advance(tokens)` is called after each."""
    every = sparse_layers(model)
    histograms = {layer.path: ActivationHistogram(layer.num_experts) for layer in layers}
    states = {path: every[path] for path in histograms}
    with whole(states.values()):
        try:
            for path, state in states.items():
                state.observer = histograms[path].add
            for window in windows:
                with torch.inference_mode():  # without the head, as no logits are needed
                    model.base_model(input_ids=window[None].to(model.device), use_cache=False)
                advance(len(window))
        finally:
            for state in states.values():
                state.observer = None
    return histograms


def record_routing(model: PreTrainedModel, ids: torch.Tensor, window: int, source: str, advance: Advance = lambda tokens: None) -> Trace:
    """Record the routing of a text, (T,) int64, window by window.

    Args:
        source: a description of model and text.
        advance: called with a number of tokens; the sum is T.

    Raises:
        UnsupportedModelError: the text is empty, or no layer has a router.
        TraceError: layers differ in experts or in experts per token.
    """
    if not len(ids):
        raise UnsupportedModelError("the text has no tokens: there is no routing to record")
    return record_trace(model, windows_of(model, ids, window, advance), source)


def fit_router_maps(
    model: PreTrainedModel, ids: torch.Tensor, window: int, path: Path, advance: Advance = lambda tokens: None
) -> list[tuple[float, float]]:
    """Fit router maps to the first four fifths of a text, (T,) int64, and write them.

    Returns:
        By the number of layers ahead, the share of the experts of the last fifth that routers and maps name.

    Raises:
        UnsupportedModelError: the text is too short, or the model has no routers that maps could stand for.
    """
    fitted, rest = ids[: len(ids) * 4 // 5], ids[len(ids) * 4 // 5 :]
    if not len(fitted) or not len(rest):
        raise UnsupportedModelError(f"the text has {len(ids)} tokens: too few to fit router maps to, and to measure them with")
    save_maps(fit_maps(model, windows_of(model, fitted, window, advance)), path)
    return named_shares(model, windows_of(model, rest, window, advance), RouterMaps(path))


def _routed_targets(layers: Sequence[ExpertsLayer], target: float, options: CalibrationOptions) -> dict[str, float]:
    """Return the share of routed neurons that each layer leaves out for a target, by path."""
    try:
        targets = {layer.path: layer.routed_target(SparsityOptions(target, options.scope)) for layer in layers}
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error
    if max(targets.values()) > GRID[-1]:
        raise UnsupportedModelError(
            f"target {target:g} means {max(targets.values()):.4g} of the routed neurons; at most {GRID[-1]:g} is possible"
        )
    return targets


@dataclass(slots=True)
class _TargetRun:
    """The evaluation of one target against the model with every neuron: sums over the held-out windows.

    Attributes:
        layers: each layer's threshold and target share of routed neurons, by path.
    """

    target: float
    layers: Mapping[str, tuple[float, float]]
    dense_nats: float = 0.0
    nats: float = 0.0
    predicted: int = 0
    agreed: float = 0.0
    positions: int = 0
    left_out: float = 0.0
    routed_neurons: float = 0.0
    shared_neurons: float = 0.0

    def add(
        self,
        model: PreTrainedModel,
        layers: Sequence[ExpertsLayer],
        states: Mapping[str, LayerSparsity],
        window: torch.Tensor,
        dense: torch.Tensor,
    ) -> None:
        for path, (threshold, share) in self.layers.items():
            states[path].set_threshold(threshold, share)
        comparison = compare_logits(dense, logits_of(model, window), window)
        self.dense_nats += math.log(comparison.stock_perplexity) * (len(window) - 1)
        self.nats += math.log(comparison.injected_perplexity) * (len(window) - 1)
        self.predicted += len(window) - 1
        self.agreed += comparison.top1_agreement * len(window)
        self.positions += len(window)
        for layer in layers:
            active, neurons = states[layer.path].counts.tolist()
            self.left_out += neurons - active
            self.routed_neurons += neurons
            self.shared_neurons += neurons * layer.shared_intermediate / (layer.top_k * layer.intermediate)

    def result(self, options: CalibrationOptions) -> HeldOut:
        neurons = self.routed_neurons + (self.shared_neurons if options.scope == "total" else 0.0)
        return HeldOut(
            target=self.target,
            scope=options.scope,
            mode=options.mode,
            achieved=self.left_out / neurons,
            dense_perplexity=math.exp(self.dense_nats / self.predicted),
            perplexity=math.exp(self.nats / self.predicted),
            agreement=self.agreed / self.positions,
        )


@dataclass(frozen=True, slots=True)
class _SparseLayer:
    """One layer that will leave neurons out.

    Attributes:
        file: has the layer's thresholds; None if they have to be calibrated.
        targets: shares of the routed neurons to leave out: always, and then in drafts if the rules set a share for these.
    """

    layer: ExpertsLayer
    options: SparsityOptions
    file: Path | None
    targets: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SparsitySetup:
    """The sparse layers of a model and their thresholds files, before weights are read.

    Attributes:
        windows: the bundled text as tokens, (T,) int64 each; empty if no layer needs a calibration.
    """

    layers: tuple[_SparseLayer, ...]
    files: Mapping[Path, Thresholds]
    windows: tuple[torch.Tensor, ...]

    def check_weights(self, source_of: Callable[[str], WeightSource]) -> None:
        """
        Raises:
            ThresholdsError: a file was made from other weights than those of `source_of(path)`.
        """
        for sparse in self.layers:
            if sparse.file is None:
                continue
            thresholds, path = self.files[sparse.file], sparse.layer.path
            if thresholds.layers[path].weights != weights_hash(source_of(path), sparse.layer.num_experts):
                raise ThresholdsError(
                    f"{sparse.file}: made from the weights of '{thresholds.model}', and those of {path} differ "
                    "(a checkpoint that has been rounded since differs as well); calibrate this model with moegraft calibrate"
                )

    def apply(self, model: PreTrainedModel) -> None:
        """Set the threshold of every sparse layer of the loaded model; calibrate the layers without a file."""
        if not self.layers:
            return
        states = sparse_layers(model)
        calibrated = self._calibrate(model) if self.windows else {}
        for sparse in self.layers:
            path, targets = sparse.layer.path, sparse.targets
            if sparse.file is None:
                thresholds = calibrated[path]
            else:
                thresholds = [self.files[sparse.file].threshold(path, target, sparse.options.mode) for target in targets]
            states[path].set_threshold(thresholds[0], targets[0])
            if len(targets) > 1:
                states[path].set_draft_threshold(thresholds[1])

    def _calibrate(self, model: PreTrainedModel) -> dict[str, list[float]]:
        """Return a threshold for each target of each layer, by path."""
        start = time.perf_counter()
        layers = [sparse for sparse in self.layers if sparse.file is None]
        made = collect(model, [sparse.layer for sparse in layers], self.windows)
        thresholds = {}
        for sparse in layers:
            path = sparse.layer.path
            bins = all_bins(made) if sparse.options.mode == "global" else made[path].bins
            if not bins.any():
                raise ThresholdsError(f"{path}: no token reaches this layer in a calibration; remove its sparsity, or set 'thresholds'")
            thresholds[path] = [quantiles(bins, [target])[0] if target else 0.0 for target in sparse.targets]
        logger.warning(
            "sparsity: there is no thresholds file, so %d layers were calibrated on %d tokens of a bundled text (%.1f s); "
            "'moegraft calibrate --text FILE' writes a file from your text and reports what the sparsity costs",
            len(layers),
            sum(map(len, self.windows)),
            time.perf_counter() - start,
        )
        return thresholds


def prepare_sparsity(plan: Plan, model: PreTrainedModel, folder: Path | None, *, trust_remote_code: bool = False) -> SparsitySetup:
    """Read every thresholds file that a plan needs.

    Args:
        model: with its stock modules; it may be on meta.
        folder: the model's checkpoint; None if it has none.

    Raises:
        ThresholdsError: a file is not for this model, or there is no file and no tokenizer for a calibration.
    """
    default_file = folder / FILE_NAME if folder is not None and (folder / FILE_NAME).is_file() else None
    drafts = (swap.traits.draft_sparsity for swap in plan.swaps)
    draft = next((share for share in drafts if share is not None), None)
    layers = []
    for swap in plan.swaps:
        options = swap.traits.sparsity
        if options is not None and (options.target or draft is not None):
            layer = experts_layer(swap.module, model)
            drafted = () if draft is None else (layer.draft_target(options, draft),)
            targets = (layer.routed_target(options), *drafted)
            layers.append(_SparseLayer(layer, options, options.thresholds or default_file, targets))
    files = {path: read_thresholds(path) for path in dict.fromkeys(sparse.file for sparse in layers) if path is not None}
    for sparse in layers:
        reason = None if sparse.file is None else sparse.layer.why_unfit(files[sparse.file])
        if reason is not None:
            raise ThresholdsError(f"{sparse.file}: {reason}; calibrate this model with moegraft calibrate")
    for path in files:
        logger.debug("sparsity: thresholds from %s", path)
    missing = any(sparse.file is None for sparse in layers)
    return SparsitySetup(tuple(layers), files, _bundled_windows(model, folder, trust_remote_code) if missing else ())


def _bundled_windows(model: PreTrainedModel, folder: Path | None, trust_remote_code: bool) -> tuple[torch.Tensor, ...]:
    fix = "set 'thresholds' of 'sparsity' to a file that moegraft calibrate wrote"
    if folder is None:
        raise ThresholdsError(f"sparsity has no thresholds, and the model has no folder with a tokenizer to calibrate with; {fix}")
    try:
        tokenizer = read_tokenizer(folder, trust_remote_code=trust_remote_code)
    except CheckpointError as error:
        raise ThresholdsError(f"sparsity has no thresholds, and a calibration is not possible: {error}; {fix}") from error
    ids = torch.tensor(tokenizer(read_text("calibration"), verbose=False)["input_ids"])
    return tuple(ids.split(window_of(model, CalibrationOptions().window)))
