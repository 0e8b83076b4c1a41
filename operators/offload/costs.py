"""What experts cost on this machine: measured at start-up, and kept true by what is measured afterwards.

What a warm-up measured, and how times between and beyond its measurements follow from it.

What this machine takes for an expert, by its tokens: measured once when the engine opens (HybriMoE, section IV-A).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.offload.devices.base import Device, Neurons, Waiter, Work
from moegraft.operators.offload.queue import Loading
from moegraft.operators.offload.transfers import Transfer, Urgency

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


FIRST = -1  # takes the place of a load bucket: the first-expert penalty
# One measurement counts at most as half or twice what was predicted: something else may have run.
LOWEST_ERROR, HIGHEST_ERROR = -0.5, 1.0
CostDevice = Literal["cpu", "gpu", "link"]


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

    device: CostDevice
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
        devices: tuple[tuple[CostDevice, _DeviceCosts], ...] = (("cpu", self._cpu), ("gpu", self._gpu))
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


def _report(device: CostDevice, loads: str, seen: _Seen, factor: float) -> CostReport:
    count = seen.observations
    return CostReport(device, loads, count, seen.predicted_ms / count, seen.measured_ms / count, seen.relative_error / count, factor)


LOADS = tuple(1 << power for power in range(10))  # a coarser grid bends the line from reading to arithmetic: plans lost 12% at p99
ROUNDS = 3
LONGEST_MS = 100.0  # a job that takes longer is the last of its kind: beyond, time grows with the tokens
COUNTS = (1, 2, 4)  # experts of a job: a line through its times tells an expert's own from what the first costs on top


class Jobs(Protocol):
    """The work that is measured, on tokens made up for it."""

    @property
    def neurons(self) -> Neurons | None:
        """What a token needs of each expert; None: all of it."""
        ...

    def on_cpu(self, experts: list[int], load: int) -> Callable[[], Waiter | None] | None:
        """A job for `Device.submit_cpu`: these experts of layer 0, `load` tokens each."""
        ...

    def on_gpu(self, slots: list[int], load: int) -> Callable[[], None] | None:
        """A launch over these slots."""
        ...


class _WarmUp:
    def __init__(self, device: Device, loading: Loading, jobs: Jobs) -> None:
        self._device = device
        self._loading = loading
        self._jobs = jobs
        self._expert_bytes = loading.queue.store.expert_bytes
        self._next_expert = 0

    def tables(self) -> CostTables:
        transfers, transfer_ms = self._fill()
        slots = [transfer.slot for transfer in transfers]
        cpu = _until_long(self._cpu_ms)
        gpu = _until_long(lambda load: (0.0, self._gpu_ms(slots, load))) if slots else []
        last = self._device.stream("compute").record()
        for transfer in transfers:
            self._loading.queue.release(transfer, last)
        return CostTables(
            cpu_ms=tuple((load, each_ms) for load, _, each_ms in cpu),
            gpu_ms=tuple((load, each_ms) for load, _, each_ms in gpu),
            # Through the origin: what is observed later are chunks of an expert.
            transfer_ms=((1, transfer_ms / self._expert_bytes), (self._expert_bytes, transfer_ms)) if transfers else (),
            first_cpu_ms=cpu[0][1],
        )

    def _fill(self) -> tuple[list[Transfer], float]:
        """Experts of layer 0 in slots, as many as there are, and what one took."""
        transfers: list[Transfer] = []
        times: list[float] = []
        for expert in range(min(COUNTS[-1], self._loading.slots.num_experts)):
            start_ms = self._device.now_ms()
            transfer = self._loading.queue.request(0, expert, Urgency.DEMAND)
            if transfer is None:
                break
            transfer.wait()
            times.append(self._device.now_ms() - start_ms)
            transfers.append(transfer)
        return transfers, min(times, default=0.0)

    def _cpu_ms(self, load: int) -> tuple[float, float]:
        """What a layer's first expert costs on top, and what each takes."""
        counts = sorted({min(count, self._loading.slots.num_experts) for count in COUNTS})
        times_ms = [statistics.median(self._cpu_job_ms(count, load) for _ in range(ROUNDS)) for count in counts]
        return fit_first_expert(counts, times_ms) if len(counts) > 1 else (0.0, times_ms[0])

    def _cpu_job_ms(self, count: int, load: int) -> float:
        num_experts = self._loading.slots.num_experts
        # Always others than the last time: weights that are still in the CPU's caches cost less than any of a real step.
        experts = sorted((self._next_expert + offset) % num_experts for offset in range(count))
        self._next_expert += count
        start_ms = self._device.now_ms()
        self._device.submit_cpu(self._jobs.on_cpu(experts, load), self._work(load, count)).wait()
        return self._device.now_ms() - start_ms

    def _work(self, load: int, count: int) -> Work:
        return Work("experts", (load,) * count, self._expert_bytes, neurons=self._jobs.neurons)

    def _gpu_ms(self, slots: list[int], load: int) -> float:
        """An expert's share of a launch over several."""
        compute = self._device.stream("compute")
        times = []
        for _ in range(ROUNDS):
            before = compute.record(timed=True)
            self._device.launch(compute, self._jobs.on_gpu(slots, load), self._work(load, len(slots)))
            after = compute.record(timed=True)
            after.wait()
            times.append(self._device.elapsed_ms(before, after))
        return statistics.median(times) / len(slots)


def _until_long(measure: Callable[[int], tuple[float, float]]) -> list[tuple[int, float, float]]:
    """Tokens, what the first expert costs on top, and what each takes, for growing numbers of tokens."""
    rows: list[tuple[int, float, float]] = []
    for load in LOADS:
        rows.append((load, *measure(load)))
        if rows[-1][2] * COUNTS[-1] > LONGEST_MS:
            break
    return rows


def warm_up(device: Device, loading: Loading, jobs: Jobs) -> CostTables:
    """Measures; slots are empty before, and hold some of layer 0's experts after."""
    return _WarmUp(device, loading, jobs).tables()
