"""A plan as a table for people: one line for each run of layers that one rule treats alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moegraft.injection.rulefile.layers import grouped
from moegraft.injection.rulefile.nodes import MappingNode

if TYPE_CHECKING:
    from moegraft.injection.plan import Swap


def swap_lines(swaps: Sequence[Swap]) -> list[str]:
    """`model.layers.{0-47}.mlp.experts  experts (cpu.yaml:4)  hybrid_experts  weights=int8  17.3 GiB cpu`, in columns."""
    groups: list[list[Swap]] = []
    for swap in swaps:
        group = next((group for group in groups if _alike(group[0], swap)), None)
        if group is None:
            groups.append([swap])
        else:
            group.append(swap)
    rows = [row for group in groups for row in _rows(group)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _alike(first: Swap, second: Swap) -> bool:
    """Of one rule and of one path but for the layer."""
    return first.rule is second.rule and len(grouped([first.module, second.module])) == 1


def _rows(group: Sequence[Swap]) -> list[tuple[str, ...]]:
    rule = group[0].rule
    where = f"{rule.id} ({Path(rule.position.file).name}:{rule.position.line})"
    options = " ".join(given_options(rule.kwargs, group[0].options))
    paths = " ".join(grouped(swap.module or "(the model)" for swap in group))
    return [(paths, where, group[0].operator, options, bytes_text(total_bytes(swap.footprint.by_device for swap in group)))]


def given_options(kwargs: MappingNode | None, options: object, path: str = "") -> list[str]:
    """The options that a rule gives, as `name=value` with the value they resolved to."""
    found = []
    for entry in kwargs or ():
        value: Any = getattr(options, entry.key)
        if isinstance(entry.value, MappingNode) and is_dataclass(value):
            found += given_options(entry.value, value, f"{path}{entry.key}.")
        else:
            found.append(f"{path}{entry.key}={value}")
    return found


def total_bytes(devices: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum for each device."""
    total: dict[str, int] = {}
    for by_device in devices:
        for device, size in by_device.items():
            total[device] = total.get(device, 0) + size
    return total


def bytes_text(by_device: Mapping[str, int]) -> str:
    return ", ".join(f"{human_bytes(size)} {device}" for device, size in sorted(by_device.items())) or "0 B"


def human_bytes(size: int) -> str:
    """`17.3 GiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
