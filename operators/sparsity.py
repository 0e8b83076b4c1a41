"""Neurons of experts that are left out: the option `sparsity`, its file of thresholds, and the layers of a running model.

A thresholds file gives, for a grid of shares, the `|act(gate)|` below which this share of a layer's neurons lies, and the text that it was
measured on. It is JSON, so that people can read it and a checkpoint can include it. It belongs to the weights of one model and is refused
for any other. A running model counts what is left out, and warns when it drifts from the target.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moegraft.operators.atomic_file import write_file
from moegraft.operators.draft import DraftSwitch
from moegraft.operators.errors import ThresholdsError, UnsupportedModelError
from moegraft.operators.layout import experts_per_token, read_layout, shared_intermediate, why_unsupported
from moegraft.operators.weights import WeightSource

logger = logging.getLogger(__name__)
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
        for each in fields(layer):
            value = getattr(layer, each.name)
            if each.name not in ("weights", "quantiles") and not (isinstance(value, int) and value >= 0):
                raise ValueError(f"{each.name} of {name} is {value!r}")
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


WINDOW_TOKENS = 1024  # tokens between two checks: over fewer tokens, the share varies between passages of one text
DRIFT = 0.02  # largest difference from the target without a warning

# Called with top_k_index (T, K) and act(gate) (T, K, I) float32, whose rows of padded slots are arbitrary.
Observer = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class InForce:
    """The sparsity of one call: it leaves out neurons below `threshold`, and adds active and all neurons to `counts` (2,) int64."""

    threshold: float
    counts: NDArray[np.int64]


class DeviceSparsity(Protocol):
    """A layer's kernels on a GPU, whose module imports this one."""

    def set_threshold(self, threshold: float, *, drafting: bool = False) -> None: ...

    def take_counts(self) -> tuple[int, int]: ...


class LayerSparsity:
    """The threshold of one layer of experts, which its operator reads in every forward pass, and the counts of its neurons.

    Drafts may have a threshold of their own, which applies while the calling thread drafts.

    Attributes:
        threshold: the threshold of `|act(gate)|`; 0 computes every neuron.
        routed_target: the target share of routed neurons to leave out; 0 before the threshold is set.
        counts: (2,) int64, neurons that reached the threshold and all neurons. CPU kernels add to it; reading it adds a GPU's counts.
        observer: called by the operator with every activation while it is set.
        window_tokens: since the drift was last checked.
    """

    def __init__(self, options: SparsityOptions, group: SparsityGroup, switch: DraftSwitch | None) -> None:
        self.options = options
        self.threshold = 0.0
        self._counts: NDArray[np.int64] = np.zeros(2, np.int64)
        self._switch = switch
        self._draft_threshold: float | None = None
        self._draft_counts: NDArray[np.int64] = np.zeros(2, np.int64)
        self._on_device: DeviceSparsity | None = None
        self.observer: Observer | None = None
        self._group = group
        self.window_tokens = 0
        self.routed_target = 0.0

    @property
    def achieved(self) -> float | None:
        """The share of routed neurons left out so far; None before the first token."""
        return achieved(self.counts)

    @property
    def counts(self) -> NDArray[np.int64]:
        if self._on_device is not None:
            self._counts += self._on_device.take_counts()
        return self._counts

    @property
    def drafting(self) -> bool:
        """Whether the calling thread drafts with a sparsity of its own."""
        settings = None if self._switch is None else self._switch.settings
        return settings is not None and settings.sparsity is not None

    def in_force(self) -> InForce:
        """Return the sparsity of a call of this thread on the CPU."""
        if not self.drafting:
            return InForce(self.threshold, self._counts)
        assert self._draft_threshold is not None, "set when the model was loaded"
        return InForce(self._draft_threshold, self._draft_counts)

    def attach(self, on_device: DeviceSparsity) -> None:
        """Use the kernels of a GPU from now on."""
        self._on_device = on_device
        on_device.set_threshold(self.threshold)
        if self._draft_threshold is not None:
            on_device.set_threshold(self._draft_threshold, drafting=True)

    def set_draft_threshold(self, threshold: float) -> None:
        """Set the threshold of drafts, which leave out more neurons."""
        self._draft_threshold = threshold
        if self._on_device is not None:
            self._on_device.set_threshold(threshold, drafting=True)

    def set_threshold(self, threshold: float, routed_target: float, counts: NDArray[np.int64] | int = 0) -> None:
        """Set the threshold, its target and the counts."""
        self.threshold = threshold
        self.counts[:] = counts
        self.routed_target = self._group.routed_target = routed_target
        if self._on_device is not None:
            self._on_device.set_threshold(threshold)
        self._group.restart()

    def begin(self, tokens: int) -> None:
        """Count a forward pass over `tokens` tokens before it runs, when all layers have finished the earlier passes."""
        if self.drafting:
            return
        if self.routed_target and self.window_tokens >= WINDOW_TOKENS:
            self._group.check_drift()
        self.window_tokens += tokens

    def describe(self) -> str:
        """Describe the target for users."""
        if not self.options.target:
            return "every neuron in a layout that can leave some out"
        return f"without the {100 * self.options.target:g} % of {self.options.scope} neurons that matter least"

    def statistics(self) -> Mapping[str, object]:
        """Return the thresholds and the shares left out, by name."""
        figures: dict[str, object] = {"threshold": self.threshold, "routed_sparsity": self.achieved, "neurons": int(self.counts[1])}
        if self._draft_threshold is not None:
            figures |= {"draft_threshold": self._draft_threshold, "draft_routed_sparsity": achieved(self._draft_counts)}
        return figures


@dataclass(eq=False, slots=True)
class SparsityGroup:
    """The layers of one model that share a target."""

    options: SparsityOptions
    layers: list[LayerSparsity] = field(default_factory=list)
    routed_target: float = 0.0
    _before: NDArray[np.int64] = field(default_factory=lambda: np.zeros(2, np.int64))
    _warned: bool = False

    def restart(self) -> None:
        """Start a new window."""
        self._before = total_counts(self.layers)
        for layer in self.layers:
            layer.window_tokens = 0

    def check_drift(self) -> None:
        """Warn once when the share left out since the last check differs from the target by more than DRIFT."""
        share = achieved(total_counts(self.layers) - self._before)
        self.restart()
        if share is None or self._warned or abs(share - self.routed_target) <= DRIFT:
            return
        self._warned = True
        logger.warning(
            "sparsity: %.1f %% of the routed neurons are left out, where the target is %.1f %%: this text differs from the one that the "
            "thresholds were calibrated on; moegraft calibrate --text FILE calibrates on your own text",
            100 * share,
            100 * self.routed_target,
        )


class SparseLayers:
    """All layers of one model that leave neurons out, by target (`context.sparse_layers`)."""

    def __init__(self) -> None:
        self._groups: dict[SparsityOptions, SparsityGroup] = {}

    def join(self, options: SparsityOptions, switch: DraftSwitch | None = None) -> LayerSparsity:
        """Create the state of one more layer; `switch` reports when the layer drafts."""
        group = self._groups.setdefault(options, SparsityGroup(options))
        layer = LayerSparsity(options, group, switch)
        group.layers.append(layer)
        return layer

    def form(self) -> tuple[float, ...] | None:
        """Return the thresholds of all layers for calls of this thread; None while one of them is observed."""
        layers = [layer for group in self._groups.values() for layer in group.layers]
        if any(layer.observer is not None for layer in layers):
            return None
        return tuple([layer.in_force().threshold for layer in layers])

    def begin(self, tokens: int) -> None:
        """Count a forward pass that ran without the layers' own calls of `begin`, as a replayed step does."""
        for group in self._groups.values():
            for layer in group.layers:
                layer.begin(tokens)

    def statistics(self) -> list[Mapping[str, object]]:
        """Return the share that the layers of each target left out together."""
        return [
            {
                "target": group.options.target,
                "scope": group.options.scope,
                "layers": len(group.layers),
                "routed_target": group.routed_target,
                "routed_sparsity": achieved(total_counts(group.layers)),
            }
            for group in self._groups.values()
        ]


def total_counts(layers: Iterable[LayerSparsity]) -> NDArray[np.int64]:
    """Return the counts of several layers together, (2,) int64: active neurons, and all neurons."""
    return sum((layer.counts for layer in layers), np.zeros(2, np.int64))


def achieved(counts: NDArray[np.int64]) -> float | None:
    """Return the share of neurons that were left out, given the counts (2,) of active and all neurons; None without counts."""
    active, neurons = counts.tolist()
    return 1 - active / neurons if neurons else None


@contextmanager
def whole(layers: Iterable[LayerSparsity]) -> Iterator[None]:
    """Compute every neuron in the body, unless it sets a threshold again, without checks of the drift; then restore the thresholds."""
    before = [(layer, layer.threshold, layer.routed_target, layer.counts.copy()) for layer in layers]
    for layer, *_ in before:
        layer.set_threshold(0.0, 0.0)
    try:
        yield
    finally:
        for layer, threshold, target, counts in before:
            layer.set_threshold(threshold, target, counts)
