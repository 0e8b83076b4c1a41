"""The option `sparsity` of operators that can leave neurons out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Counts = Literal["routed", "total"]
Mode = Literal["layer", "global"]


@dataclass(frozen=True, slots=True)
class SparsityOptions:
    """Which neurons of an expert are left out: those whose `|act(gate)|` is below a threshold. It changes what the model says.

    Attributes:
        target: share of neurons to leave out, from 0 (none, in the layout that can) to below 1.
        counts: what the share is of: `routed`, the neurons of a token's routed experts; or `total`, of these and of the shared experts,
            which stay whole, so that the routed ones must be sparser.
        thresholds: a file that `moegraft calibrate` wrote. By default that of the model's own folder, `moegraft_thresholds.json`; where
            there is none, a short calibration runs when the model is loaded.
        mode: `layer` gives every layer the target; `global` takes one threshold for all layers, which have the target together.
    """

    target: float
    counts: Counts
    thresholds: Path | None = None
    mode: Mode = "layer"

    def __post_init__(self) -> None:
        if not 0 <= self.target < 1:
            hint = f"; write {self.target / 100:g}" if 1 < self.target < 100 else ""
            raise ValueError(f"target is a share from 0 to below 1, not {self.target:g}{hint}")


def routed_target(options: SparsityOptions, *, top_k: int, intermediate: int, shared_intermediate: int) -> float:
    """The share of routed neurons that has to be left out.

    A token passes `top_k * intermediate` routed neurons and `shared_intermediate` shared ones, so `total = routed * K I / (K I + I_shared)`
    (the accounting that the published table of Qwen3.5-35B-A3B fits).

    Raises:
        ValueError: the target counts shared neurons that stay, and cannot be reached.
    """
    if options.counts == "routed" or not shared_intermediate:
        return options.target
    routed = top_k * intermediate
    most = routed / (routed + shared_intermediate)
    if options.target >= most:
        raise ValueError(
            f"target {options.target:g} of all neurons cannot be reached: the shared expert stays whole, so that {most:.3f} would leave no "
            "routed neuron; lower it, or count 'routed' neurons"
        )
    return options.target / most


def total_share(routed: float, *, top_k: int, intermediate: int, shared_intermediate: int) -> float:
    """The share of all neurons a token passes, shared ones included, when a share `routed` of the routed ones is left out."""
    return routed * top_k * intermediate / (top_k * intermediate + shared_intermediate)
