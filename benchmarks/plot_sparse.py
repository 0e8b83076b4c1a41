"""Plots of the times of sparse experts on a GPU, after the published study's Figures 6 and 7 and Table 2.

From `results/sparse_layer.csv` and `results/sparse_layer_kernels.csv`, which `sparse_layer.py` writes on a machine with a GPU.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
DENSE = ("dense", "grouped_mm", "vllm")
SMALL, LARGE = 64, 512  # tokens of the bars by sparsity
Row = Mapping[str, Any]


def best(rows: Sequence[Row], shape: str, *, sparse: bool) -> dict[tuple[float, int], Row]:
    """Return the fastest path by total sparsity and tokens, among dense paths those that compute every neuron."""
    found: dict[tuple[float, int], Row] = {}
    for row in rows:
        place = (float(row["total_sparsity"]), int(row["tokens"]))
        if row["shape"] != shape or (row["path"] in DENSE) == sparse or bool(place[0]) != sparse:
            continue
        if place not in found or float(row["p50_ms"]) < float(found[place]["p50_ms"]):
            found[place] = row
    return found


def shapes_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(row["shape"]) for row in rows))


def speedup_by_batch(rows: Sequence[Row], target: Path) -> None:
    """Plot the speed-up of the fastest sparse path over the fastest dense one by batch (Figure 6), with a panel per shape."""
    shapes = shapes_of(rows)
    figure, panels = plt.subplots(1, len(shapes), figsize=(6 * len(shapes), 4), squeeze=False)
    for panel, shape in zip(panels[0], shapes, strict=True):
        sparse, dense = best(rows, shape, sparse=True), best(rows, shape, sparse=False)
        for total in sorted({place[0] for place in sparse}):
            tokens = sorted(count for share, count in sparse if share == total and (0.0, count) in dense)
            gains = [float(dense[0.0, count]["p50_ms"]) / float(sparse[total, count]["p50_ms"]) for count in tokens]
            panel.plot(tokens, gains, marker="o", label=f"{total:.0%}")
        panel.axhline(1.0, color="grey", linewidth=0.8)
        panel.set(xscale="log", xlabel="tokens", ylabel="speed-up over the fastest dense path", title=shape)
        panel.legend(title="total sparsity")
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    plt.close(figure)


def time_by_sparsity(rows: Sequence[Row], target: Path) -> None:
    """Plot a layer's time by total sparsity beside its lower bound (the speeds of Table 2), with a panel per shape and batch."""
    panels_of = [(shape, tokens) for shape in shapes_of(rows) for tokens in (SMALL, LARGE)]
    figure, panels = plt.subplots(1, len(panels_of), figsize=(4 * len(panels_of), 4), squeeze=False)
    for panel, (shape, tokens) in zip(panels[0], panels_of, strict=True):
        found = {**best(rows, shape, sparse=False), **best(rows, shape, sparse=True)}
        bars = {share: row for (share, count), row in sorted(found.items()) if count == tokens}
        names = [f"{share:.0%}\n{row['path']}" for share, row in bars.items()]
        panel.bar(names, [float(row["p50_ms"]) for row in bars.values()], color="tab:blue", label="measured")
        panel.bar(names, [float(row["floor_ms"]) for row in bars.values()], color="tab:orange", width=0.4, label="floor")
        panel.set(xlabel="total sparsity, fastest path", ylabel="ms a layer", title=f"{shape}, {tokens} tokens")
        panel.legend()
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    plt.close(figure)


def time_by_kernel(rows: Sequence[Row], target: Path) -> None:
    """Plot the time of each path's kernels by total sparsity (Figure 7), with a panel per shape and path."""
    panels_of = list(dict.fromkeys((str(row["shape"]), str(row["path"])) for row in rows))
    figure, panels = plt.subplots(1, len(panels_of), figsize=(4 * len(panels_of), 4), squeeze=False)
    for panel, (shape, path) in zip(panels[0], panels_of, strict=True):
        mine = [row for row in rows if (row["shape"], row["path"]) == (shape, path)]
        totals = sorted({float(row["total_sparsity"]) for row in mine})
        below = [0.0] * len(totals)
        for kernel in dict.fromkeys(str(row["kernel"]) for row in mine):
            taken = {float(row["total_sparsity"]): float(row["us"]) for row in mine if row["kernel"] == kernel}
            heights = [taken.get(total, 0.0) for total in totals]
            panel.bar([f"{total:.0%}" for total in totals], heights, bottom=below, label=kernel.strip("_").removesuffix("_kernel")[:24])
            below = [low + height for low, height in zip(below, heights, strict=True)]
        panel.set(xlabel="total sparsity", ylabel="µs a layer", title=f"{shape}, {path}")
        panel.legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    plt.close(figure)


def main() -> None:
    for name, plots in (
        ("sparse_layer", {"sparse_layer": speedup_by_batch, "sparse_layer_times": time_by_sparsity}),
        ("sparse_layer_kernels", {"sparse_layer_kernels": time_by_kernel}),
    ):
        path = RESULTS / f"{name}.csv"
        if not path.is_file():
            print(f"{path.name} does not exist: run sparse_layer.py on a machine with a CUDA GPU")
            continue
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        for plot, draw in plots.items():
            draw(rows, RESULTS / f"{plot}.png")
            print(RESULTS / f"{plot}.png")


if __name__ == "__main__":
    main()
