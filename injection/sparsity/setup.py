"""How the layers of one model get their thresholds while it is loaded: from a file that is for its weights, or by calibrating."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from moegraft.injection.plan import Plan
from moegraft.injection.sparsity.calibrate import CalibrationOptions, collect, sparse_layers, window_of
from moegraft.injection.sparsity.targets import ExpertsLayer, draft_sparsity, experts_layer, sparsity_options
from moegraft.injection.sparsity.text import CALIBRATION_TEXT
from moegraft.injection.tokenizer import read_tokenizer
from moegraft.operators.errors import CheckpointError, ThresholdsError
from moegraft.operators.sparse.calibration import quantiles
from moegraft.operators.sparse.options import SparsityOptions
from moegraft.operators.sparse.thresholds import FILE_NAME, Thresholds, read_thresholds, weights_hash
from moegraft.operators.weights import WeightSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _SparseSwap:
    """One layer that will leave neurons out; `file` has its thresholds, None where they have to be found.

    Attributes:
        draft: what drafts leave out, as the options count; None: no more than is always left out.
    """

    layer: ExpertsLayer
    options: SparsityOptions
    file: Path | None
    draft: float | None

    @property
    def targets(self) -> tuple[float, ...]:
        """Shares of routed neurons: what is always left out, and what drafts leave out."""
        always = self.layer.routed_target(self.options)
        return (always,) if self.draft is None else (always, self.layer.draft_target(self.options, self.draft))


@dataclass(frozen=True, slots=True)
class SparsitySetup:
    """All that is decided before weights are read.

    Attributes:
        windows: (T,) int64 each, the bundled text; none where no layer needs a calibration.
    """

    swaps: tuple[_SparseSwap, ...]
    files: Mapping[Path, Thresholds]
    windows: tuple[torch.Tensor, ...]

    def check_weights(self, source_of: Callable[[str], WeightSource]) -> None:
        """
        Raises:
            ThresholdsError: a file was made from other weights than those that `source_of(path)` gives.
        """
        for swap in self.swaps:
            if swap.file is None:
                continue
            thresholds = self.files[swap.file]
            if thresholds.layers[swap.layer.path].weights != weights_hash(source_of(swap.layer.path), swap.layer.num_experts):
                raise ThresholdsError(
                    f"{swap.file}: made from other weights: those of {swap.layer.path} are not the ones of '{thresholds.model}' "
                    "(nor is a checkpoint that was rounded since); calibrate this model with moegraft calibrate"
                )

    def apply(self, model: PreTrainedModel) -> None:
        """Gives every layer of the loaded model its threshold, and calibrates those without a file."""
        states = sparse_layers(model)
        found = self._calibrated(model) if self.windows else {}
        for swap in self.swaps:
            path, targets, file = swap.layer.path, swap.targets, swap.file
            thresholds = (
                found[path] if file is None else [self.files[file].threshold(path, target, swap.options.mode) for target in targets]
            )
            states[path].set_threshold(thresholds[0], targets[0])
            if swap.draft is not None:
                states[path].set_draft_threshold(thresholds[1], targets[1])

    def _calibrated(self, model: PreTrainedModel) -> dict[str, list[float]]:
        """By layer, a threshold for each of its targets."""
        start = time.perf_counter()
        swaps = [swap for swap in self.swaps if swap.file is None]
        made = collect(model, [swap.layer for swap in swaps], self.windows)
        found = {}
        for swap in swaps:
            bins = made.all_bins() if swap.options.mode == "global" else made.layers[swap.layer.path].bins
            if not bins.any():
                raise ThresholdsError(f"{swap.layer.path}: text does not reach this layer; leave its experts whole, or give 'thresholds'")
            found[swap.layer.path] = [quantiles(bins, [target])[0] if target else 0.0 for target in swap.targets]
        logger.warning(
            "sparsity: no thresholds file, so %d layers were calibrated on %d tokens of a bundled text (%.1f s); "
            "'moegraft calibrate --text FILE' writes a file from a text like yours and says what the sparsity costs",
            len(swaps),
            sum(map(len, self.windows)),
            time.perf_counter() - start,
        )
        return found


def prepare_sparsity(the_plan: Plan, model: PreTrainedModel, folder: Path | None, *, trust_remote_code: bool = False) -> SparsitySetup:
    """Reads every thresholds file that a plan needs.

    Args:
        model: with its own modules; it may be on meta.
        folder: the model's checkpoint; None where it has none.

    Raises:
        ThresholdsError: a file is not for this model, or there is none and nothing to calibrate with.
    """
    swaps = tuple(_sparse_swaps(the_plan, model, folder))
    files = {path: read_thresholds(path) for path in dict.fromkeys(swap.file for swap in swaps) if path is not None}
    for swap in swaps:
        reason = None if swap.file is None else swap.layer.why_unfit(files[swap.file])
        if reason is not None:
            raise ThresholdsError(f"{swap.file}: {reason}; calibrate this one with moegraft calibrate")
    for path in files:
        logger.info("sparsity: thresholds of %s", path)
    missing = any(swap.file is None for swap in swaps)
    return SparsitySetup(swaps, files, _bundled_windows(model, folder, trust_remote_code) if missing else ())


def _sparse_swaps(the_plan: Plan, model: PreTrainedModel, folder: Path | None) -> Iterable[_SparseSwap]:
    own = folder / FILE_NAME if folder is not None and (folder / FILE_NAME).is_file() else None
    draft = draft_sparsity(swap.options for swap in the_plan.swaps)
    for swap in the_plan.swaps:
        options = sparsity_options(swap.options)
        if options is not None and (options.target or draft is not None):
            yield _SparseSwap(experts_layer(swap.module, model), options, options.thresholds or own, draft)


def _bundled_windows(model: PreTrainedModel, folder: Path | None, trust_remote_code: bool) -> tuple[torch.Tensor, ...]:
    """
    Raises:
        ThresholdsError: there is no tokenizer.
    """
    mend = "give the file's path as 'thresholds' of 'sparsity'; moegraft calibrate writes it"
    if folder is None:
        raise ThresholdsError(f"sparsity has no thresholds, and this model no folder with a tokenizer to calibrate with; {mend}")
    try:
        tokenizer = read_tokenizer(folder, trust_remote_code=trust_remote_code)
    except CheckpointError as error:
        raise ThresholdsError(f"sparsity has no thresholds, and cannot calibrate: {error}; {mend}") from error
    ids = torch.tensor(tokenizer(CALIBRATION_TEXT, verbose=False)["input_ids"])
    return tuple(ids.split(window_of(model, CalibrationOptions().window)))
