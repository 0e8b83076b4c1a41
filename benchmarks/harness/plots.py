"""Figures of results, drawn without a display."""

from __future__ import annotations

from typing import Any

from harness import record


def panels(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """Return a figure and its axes, (rows, columns); `size` is that of a panel in inches."""
    from matplotlib.figure import Figure  # a machine may measure without it

    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def save(figure: Any, name: str, dpi: int = 90) -> None:
    """Write `results/NAME.png`."""
    path = record.RESULTS / f"{name}.png"
    figure.savefig(path, dpi=dpi, pil_kwargs={"optimize": True})
    print(path)
