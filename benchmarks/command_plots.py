"""How do the errors of layers and the costs of drafts look? Draws what `moegraft verify --json` or `moegraft drafts --json` printed.

moegraft drafts --rules speculative --json > drafts.json && python benchmarks/command_plots.py drafts.json drafts.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.plots import grouped, panels

Found = Mapping[str, Any]  # as the command prints it


def draw_errors(found: Found) -> Any:
    """Return the relative error by layer: one series for each operator and weight type, with its limit."""
    figure, ((axes,),) = panels(1, 1, (9, 4.5))
    for (operator, weights), layers in grouped(found["layers"], lambda layer: (layer["operator"], layer["weight_type"])).items():
        places = [number_of(layer["module"], place) for place, layer in enumerate(layers)]
        (line,) = axes.plot(
            places, [layer["relative_error"] for layer in layers], "-o", label=f"{operator}, {weights or 'unknown weights'}"
        )
        if layers[0]["expected"] is not None:
            axes.axhline(layers[0]["expected"]["limit"], color=line.get_color(), linestyle="--", linewidth=0.8)
    axes.set(
        xlabel="layer", ylabel="relative error", yscale="log", title=f"injected against stock, {found['tokens']} tokens; dashed: limits"
    )
    return figure


def number_of(module: str, place: int) -> int:
    return next((int(part) for part in module.split(".") if part.isdecimal()), place)


def draw_costs(drafters: Sequence[Found]) -> Any:
    """Return, by the length of the draft, the acceptance at break-even, and by acceptance the speed of the best length over plain steps."""
    figure, ((needed, gain),) = panels(1, 2, (5.5, 4.2))
    for costs in drafters:
        points = [(length, least) for length, least in enumerate(costs["needed"], 1) if least is not None]
        best = [(float(share), max(1.0, *gains)) for share, gains in costs["gain"].items()]
        (line,) = gain.plot(*zip(*best, strict=True), "-o", label=costs["drafter"])
        needed.plot(*(zip(*points, strict=True) if points else ([], [])), "-o", color=line.get_color(), label=costs["drafter"])
    needed.set(xlabel="tokens drafted", ylabel="acceptance at break-even", ylim=(0, 1.02), title="above its line a draft pays")
    gain.set(xlabel="acceptance of a token after accepted ones", ylabel="speed over plain decoding", title="drafts of the best length")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("printed", type=Path, help="the command's JSON")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    given = parser.parse_args()
    found = json.loads(given.printed.read_text())
    figure = draw_costs(found["drafters"]) if "drafters" in found else draw_errors(found)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(given.picture, dpi=150)


if __name__ == "__main__":
    main()
