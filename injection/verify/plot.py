"""A picture of the error of every layer."""

from __future__ import annotations

from pathlib import Path

from moegraft.injection.rulefile.layers import layer_of
from moegraft.injection.verify.run import Verification
from moegraft.operators.errors import UnsupportedModelError

MISSING = "%s draws with matplotlib, which is not installed; install it with: pip install 'moegraft[bench]'"


def require_matplotlib(option: str) -> None:
    """
    Args:
        option: what would draw, for the message.

    Raises:
        UnsupportedModelError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedModelError(MISSING % option) from error


def plot(found: Verification, path: Path) -> None:
    """Writes a PNG: relative error by layer, one series an operator and weight type, with the limit of each.

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
    figure.savefig(path, dpi=150, format="png")
