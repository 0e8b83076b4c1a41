"""What this machine takes for an expert, by its tokens: measured once when the engine opens (HybriMoE, section IV-A)."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Protocol

from moegraft.operators.experts.devices.interface import Device, Neurons, Waiter, Work
from moegraft.operators.experts.scheduling.cost_tables import CostTables, fit_first_expert
from moegraft.operators.experts.transfer.assembly import Loading
from moegraft.operators.experts.transfer.transfers import Transfer, Urgency

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
