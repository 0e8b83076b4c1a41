"""The thresholds of a model's layers while it runs, counts of the neurons left out, and a warning when they drift from the target."""

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
WINDOW_TOKENS = 1024  # between two checks: the shares of fewer tokens scatter from passage to passage of one text
DRIFT = 0.02

# Called with top_k_index (T, K) and act(gate) (T, K, I) float32; rows of padded slots are arbitrary.
Observer = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class InForce:
    """What one call leaves out: neurons below `threshold`; those that reach it are added to `counts` (2,) int64."""

    threshold: float
    counts: NDArray[np.int64]


class DeviceSparsity(Protocol):
    """A layer's kernels on a GPU; they import this module, which therefore cannot import them."""

    def set_threshold(self, threshold: float, sparsity: float, *, drafting: bool = False) -> None: ...

    def take_counts(self) -> tuple[int, int]: ...


class LayerSparsity:
    """The threshold of one layer of experts, which its operator reads in every forward pass, and the count of what reached it.

    Drafts may have a threshold of their own. It applies while the calling thread draws one, so that nothing has to be restored however
    the draft ends.

    Attributes:
        threshold: of `|act(gate)|`; 0 computes every neuron.
        routed_target: the share of routed neurons that is to be left out; 0 before the threshold is set.
        counts: (2,) int64: neurons that reached the threshold, and all that were looked at. Kernels on the CPU add to it, and reading it
            adds what a GPU counted.
        observer: while it is set, the operator shows it every activation.
    """

    def __init__(self, options: SparsityOptions, group: SparsityGroup, switch: DraftSwitch | None = None) -> None:
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
        self._window_tokens = 0  # since the drift was last checked
        self.routed_target = 0.0

    @property
    def target_in_force(self) -> float:
        """The share of routed neurons that a call of the calling thread is to leave out."""
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
        """Whether the calling thread draws a draft with a sparsity of its own."""
        settings = None if self._switch is None else self._switch.settings
        return settings is not None and settings.sparsity is not None

    def in_force(self) -> InForce:
        """Return what a call of the calling thread leaves out on the CPU."""
        if not self.drafting:
            return InForce(self.threshold, self._counts)
        assert self._draft_threshold is not None, "set when the model was loaded"
        return InForce(self._draft_threshold, self._draft_counts)

    def attach(self, on_device: DeviceSparsity) -> None:
        """The kernels of this layer run there from now on."""
        self._on_device = on_device
        on_device.set_threshold(self.threshold, self.routed_target)
        if self._draft_threshold is not None:
            on_device.set_threshold(self._draft_threshold, self._draft_target, drafting=True)

    def set_draft_threshold(self, threshold: float, routed_target: float) -> None:
        """Set the threshold of drafts that leave out more."""
        self._draft_threshold, self._draft_target = threshold, routed_target
        if self._on_device is not None:
            self._on_device.set_threshold(threshold, routed_target, drafting=True)

    def set_threshold(self, threshold: float, routed_target: float, counts: NDArray[np.int64] | int = 0) -> None:
        """Set the threshold for a target, and the counts."""
        self.threshold = threshold
        self.counts[:] = counts
        self.routed_target = self._group.routed_target = routed_target
        if self._on_device is not None:
            self._on_device.set_threshold(threshold, routed_target)
        self._group.restart()

    def begin(self, tokens: int) -> None:
        """Note a forward pass over `tokens` tokens, before it runs; all layers have run the ones before by then."""
        if self.drafting:
            return
        if self.routed_target and self._window_tokens >= WINDOW_TOKENS:
            self._group.check_drift()
        self._window_tokens += tokens

    def restart_window(self) -> None:
        self._window_tokens = 0

    def describe(self) -> str:
        """Return what it is meant to leave out, as text."""
        if not self.options.target:
            return "every neuron in a layout that can leave some out"
        return f"without the {100 * self.options.target:g} % of {self.options.scope} neurons that matter least"

    def statistics(self) -> Mapping[str, object]:
        """Return what it leaves out, by name."""
        found: dict[str, object] = {"threshold": self.threshold, "routed_sparsity": self.achieved, "neurons": int(self.counts[1])}
        if self._draft_threshold is not None:
            found |= {"draft_threshold": self._draft_threshold, "draft_routed_sparsity": achieved(self._draft_counts)}
        return found


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
            layer.restart_window()

    def check_drift(self) -> None:
        """Warn once when the share left out since the last check is off the target."""
        share = achieved(total_counts(self.layers) - self._before)
        self.restart()
        if share is None or self._warned or abs(share - self.routed_target) <= DRIFT:
            return
        self._warned = True
        logger.warning(
            "sparsity: %.1f %% of the routed neurons are left out, where the target is %.1f %%: this text is unlike the one that the "
            "thresholds are from; moegraft calibrate --text FILE makes them from your own",
            100 * share,
            100 * self.routed_target,
        )


class SparseLayers:
    """All layers of one model that leave neurons out, by target (`context.sparse_layers`)."""

    def __init__(self) -> None:
        self._groups: dict[SparsityOptions, SparsityGroup] = {}

    def join(self, options: SparsityOptions, switch: DraftSwitch | None = None) -> LayerSparsity:
        """Return the state of one more layer; `switch` reports when it drafts."""
        group = self._groups.setdefault(options, SparsityGroup(options))
        layer = LayerSparsity(options, group, switch)
        group.layers.append(layer)
        return layer

    def statistics(self) -> list[Mapping[str, object]]:
        """Return what the layers of each target left out together."""
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
    """Return (2,): active neurons, and all, of several layers."""
    total = np.zeros(2, np.int64)
    for layer in layers:
        total += layer.counts
    return total


def achieved(counts: NDArray[np.int64]) -> float | None:
    """Return the share of neurons that were left out, given (active, all); None where none were counted."""
    active, neurons = counts.tolist()
    return 1 - active / neurons if neurons else None


@contextmanager
def whole(layers: Iterable[LayerSparsity]) -> Iterator[None]:
    """Within the context, no neuron is left out unless `threshold` is set again, and drift is not checked."""
    before = [(layer, layer.threshold, layer.routed_target, layer.counts.copy()) for layer in layers]
    for layer, *_ in before:
        layer.set_threshold(0.0, 0.0)
    try:
        yield
    finally:
        for layer, threshold, target, counts in before:
            layer.set_threshold(threshold, target, counts)
