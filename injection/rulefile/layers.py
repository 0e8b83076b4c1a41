"""Layer numbers: the ranges that rules write, and the runs that listings show."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_PART = re.compile(r"\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?")


@dataclass(frozen=True, slots=True)
class Layers:
    """Ranges of layer numbers, both ends included."""

    ranges: tuple[tuple[int, int], ...]

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and any(first <= layer <= last for first, last in self.ranges)

    def __str__(self) -> str:
        return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in self.ranges)


def parse_layers(text: str) -> Layers:
    """`"4-47"` or `"0,3,5-9"`.

    Raises:
        ValueError: the text has another form, or a range runs backwards.
    """
    ranges = []
    for part in text.split(","):
        found = _PART.fullmatch(part)
        if found is None:
            raise ValueError('write layer numbers and ranges, such as "4-47" or "0,3,5-9"')
        first = int(found[1])
        last = first if found[2] is None else int(found[2])
        if last < first:
            raise ValueError(f"range {first}-{last} runs backwards; write {last}-{first}")
        ranges.append((first, last))
    return Layers(tuple(ranges))


def layer_of(path: str) -> int | None:
    """The layer that a module path is in: its first numeric component."""
    return next((int(part) for part in path.split(".") if part.isdecimal()), None)


def runs(numbers: Iterable[int]) -> str:
    """Numbers as `0-3,7`."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return str(Layers(tuple(ranges)))


def grouped(paths: Iterable[str]) -> list[str]:
    """Module paths that differ in the layer alone as one: `model.layers.{0-47}.mlp.experts`."""
    groups: dict[tuple[str, str], list[int]] = {}
    for path in paths:
        parts = path.split(".")
        index = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if index is None:
            groups.setdefault((path, ""), [])
        else:
            groups.setdefault((".".join([*parts[:index], ""]), ".".join(["", *parts[index + 1 :]])), []).append(int(parts[index]))
    return [f"{head}{_braced(layers)}{tail}" for (head, tail), layers in groups.items()]


def _braced(layers: list[int]) -> str:
    if not layers:
        return ""
    return str(layers[0]) if len(layers) == 1 else f"{{{runs(layers)}}}"
