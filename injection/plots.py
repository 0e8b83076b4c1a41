"""Plots of a verification, of a calibration and of the costs of drafts, with matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moegraft.injection.rules.rule import layer_of
from moegraft.injection.verify import Verification
from moegraft.operators.activations import BINS, LOWEST, PER_OCTAVE, Calibration
from moegraft.operators.atomic_file import new_file
from moegraft.operators.errors import UnsupportedModelError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from moegraft.operators.decode.draft_costs import DraftCosts

PER_BAR = PER_OCTAVE // 8  # bins in one bar


def require_matplotlib(option: str) -> None:
    """Check that matplotlib is installed, before minutes of work.

    Args:
        option: the command-line option that needs it, for the message.

    Raises:
        UnsupportedModelError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedModelError(
            f"{option} needs matplotlib, which is not installed; install it with: pip install 'moegraft[bench]'"
        ) from error


def plot_errors(found: Verification, path: Path) -> None:
    """Write a PNG of the relative error by layer: one series for each operator and weight type, with its limit.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    series: dict[str, list[tuple[int, float]]] = {}
    for place, layer in enumerate(found.layers):
        number = layer_of(layer.module)
        name = f"{layer.operator}, {layer.weight_type or 'unknown weights'}"
        series.setdefault(name, []).append((place if number is None else number, layer.relative_error))
    limits = {f"{layer.operator}, {layer.weight_type}": layer.expected.limit for layer in found.layers if layer.expected}
    for name, points in series.items():
        (line,) = axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=name)
        if name in limits:
            axes.axhline(limits[name], color=line.get_color(), linestyle="--", linewidth=0.8, label=f"limit, {name}")
    axes.set(xlabel="layer", ylabel="relative error", yscale="log", title=f"injected against stock, {found.tokens} tokens")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    _save(figure, path)


def plot_activations(calibration: Calibration, path: Path) -> None:
    """Write a PNG of the first layer's activations.

    Left, the magnitudes of `act(gate)` below and above the hot quantile. Right, how often each neuron of the expert with the most tokens
    is active. Both are as in figure 3, c and d, of the published study, on a logarithmic axis.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    layer, found = next(iter(calibration.layers.items()))
    expert = int(found.routed.argmax())
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    magnitudes, neurons = figure.subplots(1, 2)
    bars = found.bins.reshape(BINS // PER_BAR, PER_BAR).sum(axis=1)
    edges = 2.0 ** (LOWEST + np.arange(len(bars) + 1) * PER_BAR / PER_OCTAVE)
    shown = np.flatnonzero(bars)
    kept = edges[:-1] >= found.quantile(found.hot)
    for part, colour, text in ((~kept, "tab:blue", f"lowest {100 * found.hot:g} %"), (kept, "tab:orange", "others")):
        magnitudes.bar(edges[:-1], np.where(part, bars, 0), width=np.diff(edges), align="edge", color=colour, label=text)
    magnitudes.set(xscale="log", yscale="log", xlim=(edges[shown[0]], edges[shown[-1] + 1]), xlabel="|act(gate)|", ylabel="activations")
    magnitudes.set_title(f"{layer}, {found.count:,} activations", fontsize="medium")
    magnitudes.legend(loc="upper left")
    counts = np.sort(found.active[expert].numpy())[::-1]
    neurons.bar(np.arange(len(counts)), counts, width=1.0, color="tab:orange")
    neurons.axhline(float(counts.mean()), color="black", linewidth=0.8, label=f"mean {counts.mean():.1f}")
    neurons.set(xlabel="neurons, the most active first", ylabel="tokens for which it is active")
    title = f"expert {expert}, {int(found.routed[expert]):,} tokens; {int((counts == 0).sum())} of {len(counts)} neurons never active"
    neurons.set_title(title, fontsize="medium")
    neurons.legend()
    _save(figure, path)


def plot_draft_costs(found: Sequence[DraftCosts], path: Path) -> None:
    """Write a PNG: left, the acceptance at break-even by the length of the draft; right, the gain of the best length by acceptance.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    needed, gain = figure.subplots(1, 2)
    shares = np.linspace(0, 1, 101)
    for costs in found:
        points = [(length, least) for length in range(1, len(costs.draft_ms) + 1) if (least := costs.needed(length)) is not None]
        (line,) = gain.plot(shares, [costs.best(float(share))[1] for share in shares], linewidth=1, label=costs.drafter)
        if points:
            needed.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, color=line.get_color(), label=costs.drafter)
    needed.set(xlabel="tokens drafted", ylabel="acceptance at break-even", ylim=(0, 1.02), title="above its line a draft pays")
    gain.set(xlabel="acceptance of a token after accepted ones", ylabel="speed over plain decoding", title="drafts of the best length")
    for axes in (needed, gain):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    with new_file(path) as file:
        figure.savefig(file, dpi=150, format="png")
