"""The sparsity thresholds of a model's layers: from a file, or from a short calibration while the model is loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from moegraft.injection.model_source import read_tokenizer
from moegraft.injection.planning import Plan
from moegraft.injection.texts import read_text
from moegraft.operators.activations import quantiles
from moegraft.operators.errors import CheckpointError, ThresholdsError
from moegraft.operators.experts_layer import ExpertsLayer, experts_layer
from moegraft.operators.thresholds import FILE_NAME, SparsityOptions, Thresholds, read_thresholds, weights_hash
from moegraft.operators.weights import WeightSource

logger = logging.getLogger(__name__)


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
        from moegraft.injection.calibration import sparse_layers

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
                states[path].set_draft_threshold(thresholds[1], targets[1])

    def _calibrate(self, model: PreTrainedModel) -> dict[str, list[float]]:
        """Return a threshold for each target of each layer, by path."""
        from moegraft.injection.calibration import collect

        start = time.perf_counter()
        layers = [sparse for sparse in self.layers if sparse.file is None]
        made = collect(model, [sparse.layer for sparse in layers], self.windows)
        found = {}
        for sparse in layers:
            path = sparse.layer.path
            bins = made.all_bins() if sparse.options.mode == "global" else made.layers[path].bins
            if not bins.any():
                raise ThresholdsError(f"{path}: no token reaches this layer in a calibration; remove its sparsity, or set 'thresholds'")
            found[path] = [quantiles(bins, [target])[0] if target else 0.0 for target in sparse.targets]
        logger.warning(
            "sparsity: there is no thresholds file, so %d layers were calibrated on %d tokens of a bundled text (%.1f s); "
            "'moegraft calibrate --text FILE' writes a file from your text and reports what the sparsity costs",
            len(layers),
            sum(map(len, self.windows)),
            time.perf_counter() - start,
        )
        return found


def prepare_sparsity(plan: Plan, model: PreTrainedModel, folder: Path | None, *, trust_remote_code: bool = False) -> SparsitySetup:
    """Read every thresholds file that a plan needs.

    Args:
        model: with its stock modules; it may be on meta.
        folder: the model's checkpoint; None if it has none.

    Raises:
        ThresholdsError: a file is not for this model, or there is no file and no tokenizer for a calibration.
    """
    own = folder / FILE_NAME if folder is not None and (folder / FILE_NAME).is_file() else None
    drafts = (swap.traits.draft_sparsity for swap in plan.swaps)
    draft = next((share for share in drafts if share is not None), None)
    layers = []
    for swap in plan.swaps:
        options = swap.traits.sparsity
        if options is not None and (options.target or draft is not None):
            layer = experts_layer(swap.module, model)
            drafted = () if draft is None else (layer.draft_target(options, draft),)
            targets = (layer.routed_target(options), *drafted)
            layers.append(_SparseLayer(layer, options, options.thresholds or own, targets))
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
    from moegraft.injection.calibration import CalibrationOptions, window_of

    try:
        tokenizer = read_tokenizer(folder, trust_remote_code=trust_remote_code)
    except CheckpointError as error:
        raise ThresholdsError(f"sparsity has no thresholds, and a calibration is not possible: {error}; {fix}") from error
    ids = torch.tensor(tokenizer(read_text("calibration"), verbose=False)["input_ids"])
    return tuple(ids.split(window_of(model, CalibrationOptions().window)))
