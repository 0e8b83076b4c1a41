"""A picture of a layer's activations: how large they are, and how unevenly its neurons are used."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moegraft.operators.sparse.calibration import BINS, LOWEST, PER_OCTAVE, Calibration

PER_BAR = PER_OCTAVE // 8  # bins in one bar


def activation_report(calibration: Calibration, path: Path, *, layer: str | None = None, expert: int | None = None) -> None:
    """Writes a PNG: left, the magnitudes of `act(gate)` in a layer, those that the hot quantile leaves out and those it keeps; right, how
    often each neuron of one expert is kept.

    The two views of the published study (its figure 3, c and d), on a logarithmic axis.

    Args:
        layer: the path of an experts module; by default the first.
        expert: by default the one that most tokens went to.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    layer = layer or next(iter(calibration.layers))
    found = calibration.layers[layer]
    expert = int(found.routed.argmax()) if expert is None else expert
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    magnitudes, neurons = figure.subplots(1, 2)
    bars = found.bins.reshape(BINS // PER_BAR, PER_BAR).sum(axis=1)
    edges = 2.0 ** (LOWEST + np.arange(len(bars) + 1) * PER_BAR / PER_OCTAVE)
    shown = np.flatnonzero(bars)
    kept = edges[:-1] >= found.quantile(found.hot)
    for part, colour, text in ((~kept, "tab:blue", f"lowest {100 * found.hot:g} %"), (kept, "tab:orange", "the rest")):
        magnitudes.bar(edges[:-1], np.where(part, bars, 0), width=np.diff(edges), align="edge", color=colour, label=text)
    magnitudes.set(xscale="log", yscale="log", xlim=(edges[shown[0]], edges[shown[-1] + 1]), xlabel="|act(gate)|", ylabel="activations")
    magnitudes.set_title(f"{layer}, {found.count:,} activations", fontsize="medium")
    magnitudes.legend(loc="upper left")
    counts = np.sort(found.active[expert].numpy())[::-1]
    neurons.bar(np.arange(len(counts)), counts, width=1.0, color="tab:orange")
    neurons.axhline(float(counts.mean()), color="black", linewidth=0.8, label=f"mean {counts.mean():.1f}")
    neurons.set(xlabel="neurons, the most active first", ylabel="tokens that it is active for")
    title = f"expert {expert}, {int(found.routed[expert]):,} tokens; {int((counts == 0).sum())} of {len(counts)} neurons never active"
    neurons.set_title(title, fontsize="medium")
    neurons.legend()
    figure.savefig(path, dpi=150, format="png")
