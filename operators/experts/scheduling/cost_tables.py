"""What a warm-up measured, and how times between and beyond its measurements follow from it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

FORMAT_VERSION = 1
Rows = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class CostTables:
    """What a warm-up measured, for experts of one shape and weight type. An empty table says that there is no such device.

    Attributes:
        cpu_ms: (tokens, ms) of one expert on the CPU, the penalty of the first not included; tokens ascending.
        gpu_ms: (tokens, ms) of one resident expert on the GPU.
        transfer_ms: (bytes, ms) of one copy to the GPU.
        first_cpu_ms: what a layer's first expert on the CPU takes on top (HybriMoE, Figure 3e).
        cpu_floor_ms: reading one expert's weights at the memory's bandwidth. An expert measured over and over may come from
            the caches, faster than any expert of a real step.

    Raises:
        ValueError: tables that are not ascending, times that are negative or no numbers.
    """

    cpu_ms: Rows
    gpu_ms: Rows = ()
    transfer_ms: Rows = ()
    first_cpu_ms: float = 0.0
    cpu_floor_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in ("cpu_ms", "gpu_ms", "transfer_ms"):
            rows: Rows = getattr(self, name)
            if any(not (math.isfinite(ms) and ms >= 0) for _, ms in rows):
                raise ValueError(f"CostTables: {name} holds a time that is negative or not a number")
            if any(size < 1 for size, _ in rows) or any(a[0] >= b[0] for a, b in pairwise(rows)):
                raise ValueError(f"CostTables: {name} must ascend from 1, and has {[size for size, _ in rows]}")
        if not (0 <= self.first_cpu_ms < math.inf and 0 <= self.cpu_floor_ms < math.inf):
            raise ValueError("CostTables: first_cpu_ms and cpu_floor_ms must be finite and at least 0")

    def to_json(self) -> str:
        return json.dumps({"version": FORMAT_VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """
        Raises:
            ValueError: not what `to_json` wrote, or written by another version: measure again.
        """
        try:
            read = json.loads(text)
            if not isinstance(read, Mapping) or read.get("version") != FORMAT_VERSION:
                raise ValueError(f"no version {FORMAT_VERSION}")
            rows = {name: tuple((int(size), float(ms)) for size, ms in read[name]) for name in ("cpu_ms", "gpu_ms", "transfer_ms")}
            return cls(**rows, first_cpu_ms=float(read["first_cpu_ms"]), cpu_floor_ms=float(read["cpu_floor_ms"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"these are no cost tables ({error}); measure them again") from error


def fit_first_expert(counts: Sequence[int], times_ms: Sequence[float]) -> tuple[float, float]:
    """The penalty of the first expert, and what each takes, from the times of layers with 1, 2, ... equal experts: a line through them.

    Raises:
        ValueError: fewer than two different counts.
    """
    if len(set(counts)) < 2:
        raise ValueError("fit_first_expert: times of at least two different numbers of experts are needed")
    each_ms, first_ms = np.polyfit(counts, times_ms, 1)
    return max(0.0, float(first_ms)), max(0.0, float(each_ms))


def along(rows: Rows, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Times of `sizes`: straight between the rows, level before the first, and on along the last two beyond them.

    A single row is gone beyond in proportion. No rows, no device: infinite.
    """
    if not rows:
        return np.full(len(sizes), math.inf)
    known, times_ms = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    before, before_ms = (known[-2], times_ms[-2]) if len(rows) > 1 else (0.0, 0.0)
    slope = max(0.0, float((times_ms[-1] - before_ms) / (known[-1] - before)))
    ms: NDArray[np.float64] = np.interp(sizes, known, times_ms) + slope * np.maximum(0.0, sizes - known[-1])
    return ms
