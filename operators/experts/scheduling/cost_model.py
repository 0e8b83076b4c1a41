"""What experts cost on this machine: measured at start-up, and kept true by what is measured afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.experts.scheduling.cost_tables import CostTables, Rows, along

FIRST = -1  # takes the place of a load bucket: the first-expert penalty
# One measurement counts at most as half or twice what was predicted: something else may have run.
LOWEST_ERROR, HIGHEST_ERROR = -0.5, 1.0
Device = Literal["cpu", "gpu", "link"]


@dataclass(slots=True)
class _Seen:
    """Running sums of what was predicted and measured."""

    observations: int = 0
    predicted_ms: float = 0.0
    measured_ms: float = 0.0
    relative_error: float = 0.0

    def add(self, predicted_ms: float, measured_ms: float) -> None:
        self.observations += 1
        self.predicted_ms += predicted_ms
        self.measured_ms += measured_ms
        self.relative_error += abs(measured_ms - predicted_ms) / predicted_ms if predicted_ms else 0.0


@dataclass(frozen=True, slots=True)
class CostReport:
    """Predicted against measured, of the observations that one bucket of loads dominated: means of each.

    Attributes:
        loads: the tokens an expert had, such as "4-7"; "" for transfers.
        relative_error: mean of |measured - predicted| / predicted, each prediction as it stood before its measurement.
        factor: what the warm-up's times are multiplied by now.
    """

    device: Device
    loads: str
    observations: int
    predicted_ms: float
    measured_ms: float
    relative_error: float
    factor: float


class _DeviceCosts:
    """Times by load: the warm-up's, times a factor for each bucket of loads (1, 2-3, 4-7, ...) that follows what is measured."""

    def __init__(self, rows: Rows, floor_ms: float, first_ms: float) -> None:
        self._rows = rows
        self._floor_ms = floor_ms
        self._warm_ms = np.zeros(0)  # by load, as measured at start-up
        self._ms = np.zeros(0)  # by load, as predicted now
        self._warm_first_ms = first_ms
        self.factors: dict[int, float] = {}
        self.seen: dict[int, _Seen] = {}
        self._extend(1023)

    @property
    def first_ms(self) -> float:
        return self._warm_first_ms * self.factors.get(FIRST, 1.0)

    def ms(self, loads: NDArray[np.integer]) -> NDArray[np.float64]:
        try:
            times: NDArray[np.float64] = self._ms[loads]
        except IndexError:
            self._extend(int(loads.max()))
            times = self._ms[loads]
        return times

    def observe(self, loads: Sequence[int], measured_ms: float, weight: float) -> None:
        """Brings the prediction nearer by `weight` of its error, each factor moving by its share (normalised least mean squares)."""
        if max(loads) >= len(self._ms):
            self._extend(max(loads))
        parts: dict[int, float] = {FIRST: self.first_ms}
        for load in loads:
            bucket = load.bit_length() - 1
            parts[bucket] = parts.get(bucket, 0.0) + float(self._ms[load])
        predicted_ms = sum(parts.values())
        largest = max((bucket for bucket in parts if bucket != FIRST), key=parts.__getitem__)
        self.seen.setdefault(largest, _Seen()).add(predicted_ms, measured_ms)
        squares = sum(part * part for part in parts.values())
        if not 0.0 < squares < math.inf:
            return
        error_ms = min(max(measured_ms / predicted_ms - 1.0, LOWEST_ERROR), HIGHEST_ERROR) * predicted_ms
        for bucket, part_ms in parts.items():
            factor = self.factors[bucket] = self.factors.get(bucket, 1.0) * (1.0 + weight * error_ms * part_ms / squares)
            if bucket != FIRST:
                covered = slice(1 << bucket, 2 << bucket)
                self._ms[covered] = self._warm_ms[covered] * factor

    def _extend(self, most: int) -> None:
        size = 1 << most.bit_length()
        self._warm_ms = np.maximum(along(self._rows, np.arange(size, dtype=np.float64)), self._floor_ms)
        self._warm_ms[0] = 0.0
        self._ms = self._warm_ms.copy()
        for bucket, factor in self.factors.items():
            if bucket != FIRST:
                self._ms[1 << bucket : 2 << bucket] *= factor


class CostModel:
    """Times of experts on both devices and of transfers, for one shape and weight type. `loads` are tokens, (A,) integers.

    Starts from the warm-up's tables: straight lines between measured loads and beyond, never below the memory-bandwidth floor.
    Then every observation moves the factors on them by `weight` of its error. CPU and GPU may be observed by one thread and
    transfers by another.
    """

    def __init__(self, tables: CostTables, weight: float = 0.1) -> None:
        if not 0.0 <= weight <= 1.0:
            raise ValueError(f"CostModel: weight is {weight}; it must be between 0 (keeps the warm-up) and 1 (believes only the last)")
        self.tables = tables
        self._weight = weight
        self._cpu = _DeviceCosts(tables.cpu_ms, tables.cpu_floor_ms, tables.first_cpu_ms)
        self._gpu = _DeviceCosts(tables.gpu_ms, 0.0, 0.0)
        self._warm_transfer_ms: dict[int, float] = {}  # by bytes: experts and their chunks have few sizes
        self._link_factor = 1.0
        self._link_seen = _Seen()

    @property
    def first_cpu_ms(self) -> float:
        return self._cpu.first_ms

    def cpu_ms(self, loads: NDArray[np.integer]) -> NDArray[np.float64]:
        """What each expert takes on the CPU, (A,); no token, no time. Infinite where there is no table."""
        return self._cpu.ms(loads)

    def gpu_ms(self, loads: NDArray[np.integer]) -> NDArray[np.float64]:
        """What each resident expert takes on the GPU, (A,)."""
        return self._gpu.ms(loads)

    def transfer_ms(self, nbytes: int) -> float:
        """What copying takes once the link is free."""
        warm_ms = self._warm_transfer_ms.get(nbytes)
        if warm_ms is None:
            warm_ms = float(along(self.tables.transfer_ms, np.array([nbytes], np.float64))[0])
            self._warm_transfer_ms[nbytes] = warm_ms
        return warm_ms * self._link_factor

    def observe_cpu(self, loads: NDArray[np.integer], measured_ms: float) -> None:
        """The CPU computed experts with these loads, all of one layer, in `measured_ms`."""
        self._observe(self._cpu, loads, measured_ms)

    def observe_gpu(self, loads: NDArray[np.integer], measured_ms: float) -> None:
        """The GPU computed resident experts with these loads, without waiting for a transfer, in `measured_ms`."""
        self._observe(self._gpu, loads, measured_ms)

    def observe_transfer(self, nbytes: int, measured_ms: float) -> None:
        """The link, doing nothing else, moved `nbytes` in `measured_ms`."""
        _require_time(measured_ms)
        predicted_ms = self.transfer_ms(nbytes)
        self._link_seen.add(predicted_ms, measured_ms)
        if 0.0 < predicted_ms < math.inf:
            error = min(max(measured_ms / predicted_ms - 1.0, LOWEST_ERROR), HIGHEST_ERROR)
            self._link_factor *= 1.0 + self._weight * error

    def report(self) -> tuple[CostReport, ...]:
        """Predicted against measured, by device and bucket of loads, as far as there were observations."""
        rows = []
        devices: tuple[tuple[Device, _DeviceCosts], ...] = (("cpu", self._cpu), ("gpu", self._gpu))
        for device, costs in devices:
            for bucket, seen in sorted(costs.seen.items()):
                loads = "1" if bucket == 0 else f"{1 << bucket}-{(2 << bucket) - 1}"
                rows.append(_report(device, loads, seen, costs.factors.get(bucket, 1.0)))
        if self._link_seen.observations:
            rows.append(_report("link", "", self._link_seen, self._link_factor))
        return tuple(rows)

    def _observe(self, costs: _DeviceCosts, loads: NDArray[np.integer], measured_ms: float) -> None:
        _require_time(measured_ms)
        computed = [load for load in loads.tolist() if load > 0]
        if computed:
            costs.observe(computed, measured_ms, self._weight)


def _require_time(measured_ms: float) -> None:
    if not (math.isfinite(measured_ms) and measured_ms >= 0):
        raise ValueError(f"CostModel: a measured time of {measured_ms} ms")


def _report(device: Device, loads: str, seen: _Seen, factor: float) -> CostReport:
    count = seen.observations
    return CostReport(device, loads, count, seen.predicted_ms / count, seen.measured_ms / count, seen.relative_error / count, factor)
