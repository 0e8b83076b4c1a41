"""The thresholds of a running model's layers, counts of the neurons left out, and a warning when these drift from the target."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.operators.draft import DraftSwitch
from moegraft.operators.thresholds import SparsityOptions

logger = logging.getLogger(__name__)
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
        self._draft_target = 0.0
        self._draft_counts: NDArray[np.int64] = np.zeros(2, np.int64)
        self._on_device: DeviceSparsity | None = None
        self.observer: Observer | None = None
        self._group = group
        self.window_tokens = 0
        self.routed_target = 0.0

    @property
    def target_in_force(self) -> float:
        """The target share of routed neurons for calls of this thread."""
        return self._draft_target if self.drafting else self.routed_target

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

    def set_draft_threshold(self, threshold: float, routed_target: float) -> None:
        """Set the threshold of drafts, which leave out more neurons."""
        self._draft_threshold, self._draft_target = threshold, routed_target
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
