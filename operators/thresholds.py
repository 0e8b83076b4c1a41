"""The option `sparsity`, the thresholds file that it refers to, and the checks of both against the layers of a model.

A thresholds file gives, for a grid of shares, the `|act(gate)|` below which this share of a layer's neurons lies, and the text that it was
measured on. It is JSON, so that people can read it and a checkpoint can include it. It belongs to the weights of one model and is refused
for any other.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from torch import nn

from moegraft.operators.atomic_file import write_file
from moegraft.operators.errors import ThresholdsError, UnsupportedModelError
from moegraft.operators.layout import experts_per_token, read_layout, shared_intermediate, why_unsupported
from moegraft.operators.weights import WeightSource

Scope = Literal["routed", "total"]
Mode = Literal["layer", "global"]


@dataclass(frozen=True, slots=True)
class SparsityOptions:
    """Leave out the neurons of an expert whose `|act(gate)|` is below a threshold. It changes the model's output.

    Attributes:
        target: share of neurons to leave out, from 0 (none, in a layout that can leave some out) to below 1.
        scope: the neurons that the share counts. `routed` counts those of a token's routed experts; `total` also counts those of the
            shared experts, which are always computed, so that the routed experts must be sparser.
        thresholds: a file that `moegraft calibrate` wrote, by default `moegraft_thresholds.json` in the model's own folder. Without a
            file, a short calibration runs when the model is loaded.
        mode: `layer` gives every layer the target; `global` uses one threshold for all layers, which reach the target together.
    """

    renamed_options: ClassVar[Mapping[str, str]] = {"counts": "scope"}

    target: float
    scope: Scope
    thresholds: Path | None = None
    mode: Mode = "layer"

    def __post_init__(self) -> None:
        if not 0 <= self.target < 1:
            hint = f"; write {self.target / 100:g}" if 1 < self.target < 100 else ""
            raise ValueError(f"target is a share from 0 to below 1, not {self.target:g}{hint}")


FORMAT = "moegraft-thresholds/1"
CRITERION = "abs_act_gate"
FILE_NAME = "moegraft_thresholds.json"  # in a model's own folder
# Shares of neurons at which thresholds are stored; thresholds between them are interpolated.
GRID = (*(step / 100 for step in range(100)), 0.995, 0.999)


@dataclass(frozen=True, slots=True)
class LayerThresholds:
    """One layer of experts.

    Attributes:
        shared_intermediate: neurons of the layer's shared experts, 0 where there are none.
        weights: the result of `weights_hash`.
        quantiles: the threshold at each share of the grid.
    """

    num_experts: int
    hidden: int
    intermediate: int
    shared_intermediate: int
    weights: str
    quantiles: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The effect of a target on text that the thresholds were not made from.

    Attributes:
        achieved: share of neurons left out, of the same scope as the target.
        agreement: share of positions with the same most likely next token as without sparsity.
    """

    target: float
    scope: Scope
    mode: Mode
    achieved: float
    dense_perplexity: float
    perplexity: float
    agreement: float


@dataclass(frozen=True, slots=True)
class Thresholds:
    """A thresholds file.

    Attributes:
        model, model_type: the model's name as the user gave it, and the type in its config.
        text_sha256, tokens, held_out_tokens: the text, and the numbers of tokens of it for calibration and for evaluation.
        top_k: experts per token.
        layers: the layers by the path of their experts module.
        all_layers: the quantiles of all layers together, for mode `global`.
    """

    model: str
    model_type: str
    text_sha256: str
    tokens: int
    held_out_tokens: int
    top_k: int
    layers: Mapping[str, LayerThresholds]
    all_layers: tuple[float, ...]
    held_out: tuple[HeldOut, ...] = ()
    grid: tuple[float, ...] = GRID

    def threshold(self, module: str, routed_target: float, mode: Mode) -> float:
        """Return the `|act(gate)|` below which a neuron of `module` is left out; 0 for a target of 0.

        Raises:
            ValueError: the target is above the last share of the grid.
        """
        if routed_target == 0:
            return 0.0
        if routed_target > self.grid[-1]:
            raise ValueError(f"a share of {routed_target:.4g} of the routed neurons is above the file's last, {self.grid[-1]:g}")
        quantiles = self.layers[module].quantiles if mode == "layer" else self.all_layers
        # By logarithms: activations spread over orders of magnitude.
        return float(np.exp2(np.interp(routed_target, self.grid, np.log2(quantiles))))


def weights_hash(source: WeightSource, num_experts: int) -> str:
    """Return a hash that identifies a layer's weights on any machine: the float32 values of three rows of three experts' first matrix."""
    if source.packed_from:
        return source.packed_from
    digest = hashlib.sha256()
    part = source.parts()[0]  # the gate, or up where there is none
    for expert in sorted({0, num_experts // 2, num_experts - 1}):
        piece = source.read(part, expert)
        rows = piece[[0, len(piece) // 2, len(piece) - 1]]
        digest.update(rows.detach().float().contiguous().numpy().astype("<f4").tobytes())
    return digest.hexdigest()[:32]


def write_thresholds(thresholds: Thresholds, path: Path) -> None:
    """Write the file.

    Raises:
        OSError: the file cannot be written.
    """
    body = {"format": FORMAT, "criterion": CRITERION, **asdict(thresholds)}
    text = json.dumps(_rounded(body), indent=1, allow_nan=False)
    # Each list of numbers takes one line: the quantiles of 48 layers are 5,000 numbers.
    text = re.sub(r"\[[-+.,\s\de]+\]", lambda found: " ".join(found[0].split()), text)
    write_file(path, text + "\n")


def _rounded(value: Any) -> Any:
    """Round numbers to six digits, which is finer than the histogram that they come from."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list | tuple) else value


def read_thresholds(path: Path) -> Thresholds:
    """Read a thresholds file.

    Raises:
        ThresholdsError: the file does not exist, is not a thresholds file of this version, or is damaged.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ThresholdsError(f"{path}: no such file; write it with: moegraft calibrate --out {path.name}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ThresholdsError(f"{path}: cannot be read ({error}); write it again with moegraft calibrate") from error
    if not isinstance(body, dict) or body.pop("format", None) != FORMAT:
        raise ThresholdsError(f"{path}: not a thresholds file of format {FORMAT}; write it again with moegraft calibrate")
    criterion = body.pop("criterion", None)
    if criterion != CRITERION:
        raise ThresholdsError(f"{path}: its thresholds are for {criterion!r}, but operators compare {CRITERION}")
    try:
        return _parsed(body)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ThresholdsError(f"{path}: damaged ({error}); write it again with moegraft calibrate") from error


def _parsed(body: dict[str, Any]) -> Thresholds:
    layers = {name: LayerThresholds(**{**layer, "quantiles": _numbers(layer["quantiles"])}) for name, layer in body["layers"].items()}
    # Older files have the scope under the key `counts`.
    held_out = [HeldOut(**{"scope" if name == "counts" else name: value for name, value in row.items()}) for row in body["held_out"]]
    given: dict[str, Any] = {**body, "layers": layers, "held_out": tuple(held_out)}
    thresholds = Thresholds(**{**given, "all_layers": _numbers(body["all_layers"]), "grid": _numbers(body["grid"])})
    _check_numbers("grid", thresholds.grid, len(thresholds.grid), least=0.0)
    _check_numbers("all_layers", thresholds.all_layers, len(thresholds.grid))
    for name, layer in layers.items():
        _check_numbers(f"quantiles of {name}", layer.quantiles, len(thresholds.grid))
        for field in fields(layer):
            value = getattr(layer, field.name)
            if field.name not in ("weights", "quantiles") and not (isinstance(value, int) and value >= 0):
                raise ValueError(f"{field.name} of {name} is {value!r}")
    if not (isinstance(thresholds.top_k, int) and thresholds.top_k > 0):
        raise ValueError(f"top_k is {thresholds.top_k!r}")
    return thresholds


def _numbers(values: Any) -> tuple[float, ...]:
    """Return a list of numbers with integers as floats: NumPy has no logarithm of long integers."""
    return tuple(float(value) if type(value) is int else value for value in values)


def _check_numbers(name: str, values: Sequence[float], count: int, *, least: float = math.ulp(0.0)) -> None:
    """Raise ValueError where a list is not `count` finite, ascending numbers of at least `least`."""
    if len(values) != count or not count:
        raise ValueError(f"{name} has {len(values)} numbers where the grid has {count}")
    if not all(isinstance(value, int | float) and least <= value < math.inf for value in values):
        raise ValueError(f"{name} has a value that is not a number{' above 0' if least else ' of at least 0'}")
    if any(left > right for left, right in pairwise(values)):
        raise ValueError(f"{name} is not in ascending order")


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

        A token passes `top_k * intermediate` routed neurons and `shared_intermediate` shared ones, so `total = routed * K I / (K I +
        I_shared)` (which agrees with the published table of Qwen3.5-35B-A3B).

        Raises:
            ValueError: the scope includes shared neurons, which are always computed, and the target cannot be reached.
        """
        if options.scope == "routed" or not self.shared_intermediate:
            return options.target
        routed = self.top_k * self.intermediate
        most = routed / (routed + self.shared_intermediate)
        if options.target >= most:
            raise ValueError(
                f"target {options.target:g} of all neurons cannot be reached: shared neurons are always computed, so the target must be "
                f"below {most:.3f}; lower it, or set scope: routed"
            )
        return options.target / most

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
        layer = thresholds.layers.get(self.path)
        if layer is None:
            return f"{made_for}: it has no layer {self.path}"
        theirs = (layer.num_experts, layer.hidden, layer.intermediate, layer.shared_intermediate, thresholds.top_k)
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
    """Raise ThresholdsError where a file of thresholds cannot be read, is not for these layers, or does not reach a target."""
    thresholds = read_thresholds(path)
    for layer, target in zip(layers, targets, strict=True):
        reason = layer.why_unfit(thresholds)
        if reason is not None:
            raise ThresholdsError(f"{path}: {reason}; calibrate this one with moegraft calibrate")
        if target > thresholds.grid[-1]:
            raise ThresholdsError(f"{path}: its last share is {thresholds.grid[-1]:g}, below the target of {target:.4g} of routed neurons")
