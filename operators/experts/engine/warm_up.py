"""What this machine takes for an expert, by its tokens: measured once when the engine opens (HybriMoE, section IV-A)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moegraft.operators.experts.devices.interface import Device, Waiter, Work
from moegraft.operators.experts.transfer.assembly import Loading
from moegraft.operators.experts.transfer.transfers import Transfer, Urgency

LOADS = (1, 4, 16, 64, 256)
ROUNDS = 3  # the fastest counts: what disturbs a measurement only adds
MANY = 4  # experts of one job: two sizes of job tell an expert's own time from what a job costs once


class Jobs(Protocol):
    """The work that is measured, on tokens made up for it: `count` experts, those from 0 on, of `load` tokens each."""

    def on_cpu(self, count: int, load: int) -> Callable[[], Waiter | None] | None: ...
    def on_gpu(self, slots: list[int], load: int) -> Callable[[], None] | None: ...


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Measured costs in ms.

    Attributes:
        cpu_ms, gpu_ms: by tokens, of an expert beside others; of one already on the GPU.
        first_cpu_ms: what the CPU's first expert of a layer costs on top.
        transfer_ms: of one expert over a free link.
    """

    cpu_ms: Mapping[int, float]
    gpu_ms: Mapping[int, float]
    first_cpu_ms: float
    transfer_ms: float


def warm_up(device: Device, loading: Loading, jobs: Jobs) -> WarmUp:
    """Measures; the slots are empty before, and hold layer 0's first experts after."""
    expert_bytes = loading.queue.store.expert_bytes
    many = min(MANY, loading.slots.num_experts)
    cpu_ms: dict[int, float] = {}
    gpu_ms: dict[int, float] = {}
    first_ms: list[float] = []
    transfers, transfer_ms = _fill(device, loading, many)
    slots = [transfer.slot for transfer in transfers]
    for load in LOADS:
        one, all_ms = (_cpu(device, jobs, count, load, expert_bytes) for count in (1, many))
        cpu_ms[load] = (all_ms - one) / (many - 1) if many > 1 else one
        first_ms.append(one - cpu_ms[load])
        gpu_ms[load] = _gpu(device, jobs, slots, load, expert_bytes) / len(slots) if slots else float("inf")
    last = device.stream("compute").record()
    for transfer in transfers:
        loading.queue.release(transfer, last)
    return WarmUp(cpu_ms, gpu_ms, max(0.0, first_ms[0]), transfer_ms)


def _fill(device: Device, loading: Loading, count: int) -> tuple[list[Transfer], float]:
    """Experts of layer 0 in slots, as many as there are, and what one took."""
    transfers: list[Transfer] = []
    times: list[float] = []
    for expert in range(count):
        start_ms = device.now_ms()
        transfer = loading.queue.request(0, expert, Urgency.DEMAND)
        if transfer is None:
            break
        transfer.wait()
        times.append(device.now_ms() - start_ms)
        transfers.append(transfer)
    return transfers, min(times, default=float("inf"))


def _cpu(device: Device, jobs: Jobs, count: int, load: int, expert_bytes: int) -> float:
    times = []
    for _ in range(ROUNDS):
        start_ms = device.now_ms()
        ticket = device.submit_cpu(jobs.on_cpu(count, load), Work("experts", (load,) * count, expert_bytes))
        ticket.wait()
        times.append(device.now_ms() - start_ms)
    return min(times)


def _gpu(device: Device, jobs: Jobs, slots: list[int], load: int, expert_bytes: int) -> float:
    compute = device.stream("compute")
    times = []
    for _ in range(ROUNDS):
        before = compute.record(timed=True)
        device.launch(compute, jobs.on_gpu(slots, load), Work("experts", (load,) * len(slots), expert_bytes))
        after = compute.record(timed=True)
        after.wait()
        times.append(device.elapsed_ms(before, after))
    return statistics.median(times)
