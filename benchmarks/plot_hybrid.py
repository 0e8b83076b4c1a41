"""Plots of `results/hybrid_modelled.csv`: decode and prefill by system, and the ablation of HybriMoE's Table III."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
SHOWN = ("all_cpu", "layer_map", "fixed", "on_demand+next_layer", "greedy", "all", "bound")
ABLATION = ("fixed", "+scheduling", "+prefetch", "+cache", "all")
Row = dict[str, str]


def _rows(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _pick(rows: Sequence[Row], **where: str) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


def _bars(axes: plt.Axes, rows: Sequence[Row], systems: Sequence[str], column: str) -> None:
    """Draw a group per cache ratio with a bar per system."""
    ratios = sorted({row["cache_ratio"] for row in rows}, key=float)
    width = 0.8 / len(systems)
    for place, system in enumerate(systems):
        values = [float(found[0][column]) if (found := _pick(rows, system=system, cache_ratio=ratio)) else 0.0 for ratio in ratios]
        axes.bar([index + place * width for index in range(len(ratios))], values, width, label=system)
    axes.set_xticks([index + 0.4 - width / 2 for index in range(len(ratios))], [f"{float(ratio):.0%}" for ratio in ratios])
    axes.set_xlabel("experts with a slot")


def _by_prompt(axes: plt.Axes, rows: Sequence[Row], systems: Sequence[str]) -> None:
    for system in systems:
        found = sorted(_pick(rows, system=system), key=lambda row: int(row["tokens"]))
        axes.plot([int(row["tokens"]) for row in found], [float(row["mean_ms"]) / 1e3 for row in found], marker="o", label=system)
    axes.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="s to the first token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS / "hybrid_modelled.csv")
    path: Path = parser.parse_args().results
    rows = _rows(path)
    models = sorted({row["model"] for row in rows})
    figure, grid = plt.subplots(3, len(models), figsize=(5 * len(models), 11), squeeze=False)
    for column, model in enumerate(models):
        own = _pick(rows, model=model)
        _bars(grid[0][column], _pick(own, phase="decode"), SHOWN, "tokens_s")
        grid[0][column].set(title=f"{model}: decode", ylabel="tokens/s")
        _by_prompt(grid[1][column], _pick(own, phase="prefill", cache_ratio="0.25"), SHOWN)
        grid[1][column].set_title("prefill, 25% of the experts")
        _bars(grid[2][column], _pick(own, phase="decode"), ABLATION, "over_fixed")
        grid[2][column].set(title="ablation, decode", ylabel="times the fixed map")
    for axes in [*grid[0], *grid[2]]:
        axes.set_ylim(top=1.45 * axes.get_ylim()[1])  # room for the legend
    for axes in grid.flat:
        axes.legend(fontsize=7, loc="upper left", ncols=2)
    figure.suptitle(f"{rows[0]['device']}: the engine on a virtual clock, made-up routing")
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=90)
    print(path.with_suffix(".png"))


if __name__ == "__main__":
    main()
