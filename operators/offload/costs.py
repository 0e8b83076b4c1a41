"""What experts cost on this machine, by their tokens: measured by a warm-up when the engine opens, and updated by every measurement.

HybriMoE, section IV-A.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.offload.devices.base import Device, DeviceError, Graph
from moegraft.operators.offload.executors import CallExecutor
from moegraft.operators.offload.queue import ExpertCache
from moegraft.operators.offload.transfers import Transfer, Urgency

Rows = tuple[tuple[int, float], ...]
WEIGHT = 0.1  # of the error of a prediction, by which factors move
FIRST = -1  # takes the place of a load bucket: the first-expert penalty
# One measurement counts at most as half or twice what was predicted: something else may have run.
MIN_ERROR, MAX_ERROR = -0.5, 1.0
# What is learnt stays within these multiples of what the warm-up measured. Prompts and steps of one token pull a time and the penalty of
# the first expert in opposite directions where the host delays them: an H100's penalty became 10 ms, and its experts took no time.
MIN_FACTOR, MAX_FACTOR = 0.25, 4.0


@dataclass(frozen=True, slots=True)
class CostTables:
    """What a warm-up measured, for experts of one shape and weight type. An empty table means that there is no such device.

    Attributes:
        cpu_ms: (tokens, ms) of one expert on the CPU, without the penalty of the first; tokens ascending.
        gpu_ms: (tokens, ms) of one resident expert on the GPU.
        transfer_ms: (bytes, ms) of one copy to the GPU.
        first_cpu_ms: the additional cost of a layer's first expert on the CPU (HybriMoE, Figure 3e).
        first_gpu_ms: of a launch on the GPU, whatever the number of its experts: the host's time for it, or the device's if longer.

    Raises:
        ValueError: tables that do not ascend; times that are negative or not numbers.
    """

    cpu_ms: Rows
    gpu_ms: Rows = ()
    transfer_ms: Rows = ()
    first_cpu_ms: float = 0.0
    first_gpu_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in ("cpu_ms", "gpu_ms", "transfer_ms"):
            rows: Rows = getattr(self, name)
            if any(not (math.isfinite(ms) and ms >= 0) for _, ms in rows):
                raise ValueError(f"CostTables: {name} holds a time that is negative or not a number")
            if any(size < 1 for size, _ in rows) or any(a[0] >= b[0] for a, b in pairwise(rows)):
                raise ValueError(f"CostTables: {name} must ascend from 1, and has {[size for size, _ in rows]}")
        for name in ("first_cpu_ms", "first_gpu_ms"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"CostTables: {name} must be finite and at least 0")


class CostModel:
    """Times of experts on both devices and of transfers, for one shape and weight type. `loads` are tokens, (A,) integers.

    Starts from the warm-up's tables: straight lines between measured loads and beyond. Then every observation moves the factors on
    them by `WEIGHT` of its error. CPU and GPU may be observed by one thread and transfers by another.
    """

    def __init__(self, tables: CostTables) -> None:
        self._tables = tables
        self._cpu = _DeviceCosts(tables.cpu_ms, tables.first_cpu_ms)
        self._gpu = _DeviceCosts(tables.gpu_ms, tables.first_gpu_ms)
        self._warm_transfer_ms: dict[int, float] = {}  # by bytes: experts and their chunks have few sizes
        self._link_factor = 1.0

    @property
    def first_cpu_ms(self) -> float:
        return self._cpu.first_ms

    @property
    def first_gpu_ms(self) -> float:
        return self._gpu.first_ms

    def cpu_ms(self, loads: NDArray[np.integer]) -> NDArray[np.float64]:
        """Return the time of each expert on the CPU, (A,); 0 without tokens, infinite where there is no table."""
        return self._cpu.ms(loads)

    def gpu_ms(self, loads: NDArray[np.integer]) -> NDArray[np.float64]:
        """Return the time of each resident expert on the GPU, (A,)."""
        return self._gpu.ms(loads)

    def transfer_ms(self, nbytes: int) -> float:
        """Return the time of a copy over a free link."""
        warm_ms = self._warm_transfer_ms.get(nbytes)
        if warm_ms is None:
            warm_ms = float(_interpolate(self._tables.transfer_ms, np.array([nbytes], np.float64))[0])
            self._warm_transfer_ms[nbytes] = warm_ms
        return warm_ms * self._link_factor

    def observe_cpu(self, loads: NDArray[np.integer], measured_ms: float) -> None:
        """Learn that the CPU computed experts with these loads, all of one layer, in `measured_ms`."""
        self._cpu.observe(loads, measured_ms)

    def observe_gpu(self, loads: NDArray[np.integer], measured_ms: float) -> None:
        """Learn that one launch of the GPU over resident experts with these loads, which waited for no transfer, took `measured_ms`."""
        self._gpu.observe(loads, measured_ms)

    def observe_transfer(self, nbytes: int, measured_ms: float) -> None:
        """Learn that the link, busy with nothing else, moved `nbytes` in `measured_ms`."""
        _check_time(measured_ms)
        predicted_ms = self.transfer_ms(nbytes)
        if 0.0 < predicted_ms < math.inf:
            self._link_factor *= 1.0 + WEIGHT * min(max(measured_ms / predicted_ms - 1.0, MIN_ERROR), MAX_ERROR)


class _DeviceCosts:
    """Times by load: the warm-up's, times a factor for each bucket of loads (1, 2-3, 4-7, ...) that follows what is measured."""

    def __init__(self, rows: Rows, first_ms: float) -> None:
        self._rows = rows
        self._warm_ms = np.zeros(0)  # by load, as measured at start-up
        self._ms = np.zeros(0)  # by load, as predicted now
        self._warm_first_ms = first_ms
        self._factors: dict[int, float] = {}
        self._extend(1023)

    @property
    def first_ms(self) -> float:
        return self._warm_first_ms * self._factors.get(FIRST, 1.0)

    def ms(self, loads: NDArray[np.integer]) -> NDArray[np.float64]:
        try:
            times: NDArray[np.float64] = self._ms[loads]
        except IndexError:
            self._extend(int(loads.max()))
            times = self._ms[loads]
        return times

    def observe(self, loads: NDArray[np.integer], measured_ms: float) -> None:
        """Reduce the error by `WEIGHT` of it, each factor moving by its share (normalised least mean squares)."""
        _check_time(measured_ms)
        computed = [load for load in loads.tolist() if load > 0]
        if not computed:
            return
        if max(computed) >= len(self._ms):
            self._extend(max(computed))
        parts: dict[int, float] = {FIRST: self.first_ms}
        for load in computed:
            bucket = load.bit_length() - 1
            parts[bucket] = parts.get(bucket, 0.0) + float(self._ms[load])
        predicted_ms = sum(parts.values())
        squares = sum(part * part for part in parts.values())
        if not 0.0 < squares < math.inf:
            return
        error_ms = min(max(measured_ms / predicted_ms - 1.0, MIN_ERROR), MAX_ERROR) * predicted_ms
        for bucket, part_ms in parts.items():
            learnt = self._factors.get(bucket, 1.0) * (1.0 + WEIGHT * error_ms * part_ms / squares)
            factor = self._factors[bucket] = min(max(learnt, MIN_FACTOR), MAX_FACTOR)
            if bucket != FIRST:
                covered = slice(1 << bucket, 2 << bucket)
                self._ms[covered] = self._warm_ms[covered] * factor

    def _extend(self, load: int) -> None:
        size = 1 << load.bit_length()
        self._warm_ms = _interpolate(self._rows, np.arange(size, dtype=np.float64))
        self._warm_ms[0] = 0.0
        self._ms = self._warm_ms.copy()
        for bucket, factor in self._factors.items():
            if bucket != FIRST:
                self._ms[1 << bucket : 2 << bucket] *= factor


def _interpolate(rows: Rows, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return times of `sizes`: linear between the rows, level before the first, and beyond them along the last two.

    A single row is extended in proportion. Without rows there is no device: infinite.
    """
    if not rows:
        return np.full(len(sizes), math.inf)
    known, times_ms = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    before, before_ms = (known[-2], times_ms[-2]) if len(rows) > 1 else (0.0, 0.0)
    slope = max(0.0, float((times_ms[-1] - before_ms) / (known[-1] - before)))
    ms: NDArray[np.float64] = np.interp(sizes, known, times_ms) + slope * np.maximum(0.0, sizes - known[-1])
    return ms


def _check_time(measured_ms: float) -> None:
    if not (math.isfinite(measured_ms) and measured_ms >= 0):
        raise ValueError(f"CostModel: a measured time of {measured_ms} ms")


LOADS = tuple(1 << power for power in range(10))  # a coarser grid bends the line from reading to arithmetic: plans lost 12% at p99
ROUNDS = 3
MAX_MS = 25.0  # an expert that takes longer is the last one: beyond, time grows with the tokens
# Experts of a job: a line through its times separates an expert's own time from the additional cost of the first. With 1, 2 and 4 the line
# followed the noise of an H100's host: its experts took 9, 45, 70, 0 and 605 us with 1, 2, 8, 32 and 128 tokens.
COUNTS = (1, 4, 16)


def warm_up(device: Device, cache: ExpertCache, executor_of: Callable[[Sequence[int], int], CallExecutor]) -> CostTables:
    """Measure what experts cost.

    Slots are empty before, and hold some of layer 0's experts afterwards.

    Args:
        executor_of: makes the executor of a call of layer 0 in which each of the given experts has so many synthetic tokens.
    """
    queue, num_experts = cache.queue, cache.slots.num_experts
    expert_bytes = queue.store.expert_bytes
    compute = device.stream("compute")
    next_expert = 0

    def cpu_job_ms(count: int, load: int) -> float:
        nonlocal next_expert
        # Always other experts than last time: weights that are still in the CPU's caches cost less than those of a real step.
        experts = sorted((next_expert + offset) % num_experts for offset in range(count))
        next_expert += count
        job = executor_of(experts, load).on_cpu(np.asarray(experts))
        start_ms = device.now_ms()
        device.submit_cpu(job).wait()
        return device.now_ms() - start_ms

    def cpu_ms(load: int) -> tuple[float, float]:
        """The penalty of the first expert, and what each takes."""
        counts = sorted({min(count, num_experts) for count in COUNTS})
        times_ms = [statistics.median(cpu_job_ms(count, load) for _ in range(ROUNDS)) for count in counts]
        return fit_first_expert(counts, times_ms)

    def gpu_ms(load: int) -> tuple[float, float]:
        """What a launch takes besides its experts, and what each takes."""
        counts = sorted({min(count, len(transfers)) for count in COUNTS})
        found = [launch_ms(count, load) for count in counts]
        device_ms, host_ms = ([statistics.median(times) for times in kind] for kind in zip(*found, strict=True))
        first_ms, each_ms = fit_first_expert(counts, device_ms)
        return max(first_ms, min(host_ms)), each_ms

    def launch_ms(count: int, load: int) -> tuple[list[float], list[float]]:
        """The device's times and the host's of launches over so many experts.

        Kernels are shorter than the host takes to launch them, so between two events on an idle device lies the host's time. The device's
        is measured by replaying a captured launch.
        """
        slots = np.array([transfer.slot for transfer in transfers[:count]], np.int32)
        experts = np.arange(count)
        device_ms, host_ms = [], []
        graph: Graph | None = None
        launch = executor_of(experts.tolist(), load).on_gpu(experts, slots)
        try:
            for number in range(ROUNDS + 1):
                start_ms = device.now_ms()
                device.launch(compute, launch)
                if number > 0:  # the first one compiles
                    host_ms.append(device.now_ms() - start_ms)
                compute.record().wait()
            with suppress(DeviceError):
                graph = device.capture(partial(device.launch, compute, launch))
            for _ in range(ROUNDS):
                before = compute.record(timed=True)
                if graph is None:  # its time is too long by the host's then
                    device.launch(compute, launch)
                else:
                    graph.replay()
                after = compute.record(timed=True)
                after.wait()
                device_ms.append(device.elapsed_ms(before, after))
        finally:
            if graph is not None:
                graph.release()
        return device_ms, host_ms

    def rows(measure: Callable[[int], tuple[float, float]]) -> list[tuple[int, float, float]]:
        found: list[tuple[int, float, float]] = []
        for load in LOADS:
            found.append((load, *measure(load)))
            if found[-1][2] > MAX_MS:
                break
        return found

    transfers: list[Transfer] = []
    transfers_ms: list[float] = []
    for expert in range(min(COUNTS[-1], num_experts)):
        start_ms = device.now_ms()
        transfer = queue.request(0, expert, Urgency.DEMAND)
        if transfer is None:
            break
        transfer.wait()
        transfers_ms.append(device.now_ms() - start_ms)
        transfers.append(transfer)
    cpu, gpu = rows(cpu_ms), rows(gpu_ms) if transfers else []
    last = compute.record()
    for transfer in transfers:
        queue.release(transfer, last)
    return CostTables(
        cpu_ms=tuple((load, ms) for load, _, ms in cpu),
        gpu_ms=tuple((load, ms) for load, _, ms in gpu),
        # Through the origin: what is observed later are chunks of an expert.
        transfer_ms=((1, min(transfers_ms) / expert_bytes), (expert_bytes, min(transfers_ms))) if transfers else (),
        first_cpu_ms=cpu[0][1],
        first_gpu_ms=gpu[0][1] if gpu else 0.0,
    )


def fit_first_expert(counts: Sequence[int], times_ms: Sequence[float]) -> tuple[float, float]:
    """Return the penalty of the first expert, and what each takes: a line through the times of layers with 1, 2, ... equal experts.

    A single time has no penalty.
    """
    if len(counts) == 1:
        return 0.0, times_ms[0]
    each_ms, first_ms = np.polyfit(counts, times_ms, 1)
    return max(0.0, float(first_ms)), max(0.0, float(each_ms))
