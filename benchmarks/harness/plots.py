"""Figures of results, drawn without a display."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

from harness import record

Row = TypeVar("Row", bound=Mapping[str, Any])
Key = TypeVar("Key", bound=Hashable)


def panels(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """Return a figure and its axes, (rows, columns); `size` is that of a panel in inches."""
    from matplotlib.figure import Figure  # a machine may measure without it

    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """Return the rows of each key, in their order."""
    found: dict[Key, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def curve(axes: Any, rows: Iterable[Mapping[str, object]], x: str, y: str, style: str = "-o", label: object = "", **more: object) -> Any:
    """Draw one column over another, and return the line."""
    points = [(float(str(row[x])), float(str(row[y]))) for row in rows]
    return axes.plot(*zip(*points, strict=True), style, label=label, **{"markersize": 3, "linewidth": 1, **more})[0] if points else None


def save(figure: Any, name: str, dpi: int = 90, kind: str = "png") -> None:
    """Write `results/NAME.png` or another kind of picture."""
    path = record.RESULTS / f"{name}.{kind}"
    figure.savefig(path, dpi=dpi, **({"pil_kwargs": {"optimize": True}} if kind == "png" else {}))
    print(path)
