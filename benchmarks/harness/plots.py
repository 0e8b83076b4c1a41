"""Figures of results, drawn without a display."""

from __future__ import annotations

from typing import Any

from harness import record


def panels(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """Return a figure and its axes, (rows, columns); `size` is that of a panel in inches."""
    from matplotlib.figure import Figure  # a machine may measure without it

    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def save(figure: Any, name: str, dpi: int = 90, kind: str = "png") -> None:
    """Write `results/NAME.png` or another kind of picture."""
    path = record.RESULTS / f"{name}.{kind}"
    figure.savefig(path, dpi=dpi, **({"pil_kwargs": {"optimize": True}} if kind == "png" else {}))
    print(path)
