"""A device with slots and a queue, and experts whose bytes identify them, so that a reader can check its input."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moegraft.operators.experts.forecast import MachineProfile
from moegraft.operators.offload.devices.base import Device, Event
from moegraft.operators.offload.devices.cuda import CudaDevice
from moegraft.operators.offload.queue import open_expert_cache
from moegraft.operators.offload.slots import Admission, SlotState
from moegraft.operators.offload.store import ExpertStore, SlotPlan
from moegraft.operators.offload.transfers import Urgency
from support.faulty_device import FaultyDevice
from support.gpus import ON_CUDA
from support.threaded_device import ThreadedDevice
from support.virtual_device import HostBuffer, Timed, VirtualDevice, Work

EMULATED = ["virtual", "threaded"]
DEVICES = [*EMULATED, pytest.param("cuda", marks=ON_CUDA)]
LINK = MachineProfile("slow link", 1, 1, 1, 1, link_gb_s=0.001)  # 1 byte per microsecond
WORK = Work(cost_ms=0.1)
PAGE = 4096


def make_device(kind: str, profile: MachineProfile | None = LINK, **options: Any) -> Device:
    if kind == "cuda":
        assert not options, "faults and budgets are for emulated devices"
        device = CudaDevice()
        device.notify_ms = 0.0  # tests count the chunks ahead of need
        return device
    return FaultyDevice(profile, **options) if kind == "virtual" else ThreadedDevice(profile, **options)


def advance(device: Device, ms: float) -> None:
    """Let the host be busy for this time, on devices with a virtual clock."""
    if isinstance(device, VirtualDevice):
        device.advance(ms)


def sentinel(layer: int, expert: int, experts: int) -> int:
    return layer * experts + expert + 1


def sentinel_store(layers: int, experts: int, expert_bytes: int) -> ExpertStore:
    assert layers * experts < 256, "a byte identifies an expert"
    buffers = []
    for layer in range(layers):
        memory = np.empty(experts * expert_bytes + 2 * PAGE, np.uint8)
        start = -memory.ctypes.data % PAGE  # CUDA page-locks whole pages, and no page twice
        buffers.append(memory[start : start + experts * expert_bytes])
        buffers[-1][:] = np.repeat(np.arange(experts) + sentinel(layer, 0, experts), expert_bytes)
    return ExpertStore(list(buffers), experts, expert_bytes)


class Harness:
    """A device with slots, a queue, and readers on its compute stream that check their input.

    Experts have 4 chunks by default, and the priority of an expert is its number until `priorities` is changed.
    """

    def __init__(
        self,
        device: Device,
        capacity: tuple[int, ...],
        staging: int = 2,
        *,
        layers: int = 2,
        experts: int = 5,
        expert_bytes: int = 256,
        chunk_bytes: int = 64,
        admission: Admission = "always",
    ) -> None:
        self.device = device
        self.experts = experts
        self.expert_bytes = expert_bytes
        self.priorities: NDArray[np.float64] = np.tile(np.arange(experts, dtype=np.float64), (layers, 1))
        self.spans: list[tuple[str, float, float]] = []
        self.measured: list[tuple[int, float]] = []
        cache = open_expert_cache(
            device,
            sentinel_store(layers, experts, expert_bytes),
            SlotPlan(capacity, staging),
            lambda layer: self.priorities[layer],
            admission,
            chunk_bytes=chunk_bytes,
            on_span=lambda track, name, start_ms, end_ms: self.spans.append((name, start_ms, end_ms)),
            on_transfer=lambda nbytes, ms: self.measured.append((nbytes, ms)),
        )
        assert cache is not None, "an emulated device has room"
        self.cache = cache
        self.slots, self.queue, self.arena = cache.slots, cache.queue, cache.arena
        self.compute = device.stream("compute")
        self.reads = 0
        self.wrong: list[tuple[int, int, int, bytes]] = []
        self._wrong_on_device: Any = None
        self._expected = [bytes([value]) * expert_bytes for value in range(layers * experts + 1)]

    def read(self, layer: int, expert: int, slot: int) -> None:
        """Launch a reader on the compute stream."""
        start, stop = slot * self.expert_bytes, (slot + 1) * self.expert_bytes
        value = sentinel(layer, expert, self.experts)

        def check() -> None:
            self.reads += 1
            found = self.arena.array[start:stop].tobytes()
            if found != self._expected[value]:
                self.wrong.append((layer, expert, slot, found))

        def check_on_device() -> None:
            self.reads += 1
            wrong = (self.arena.tensor[start:stop] != value).sum()
            self._wrong_on_device = wrong if self._wrong_on_device is None else self._wrong_on_device + wrong

        self.device.launch(self.compute, Timed(WORK, check if isinstance(self.arena, HostBuffer) else check_on_device))

    @contextmanager
    def link_held(self) -> Iterator[None]:
        """Hold the link, so that transfers submitted in the body start after it, on any device."""
        gate, opened = self.device.stream("gate"), threading.Event()
        if isinstance(self.device, ThreadedDevice):
            self.device.launch(gate, Timed(WORK, lambda: bool(opened.wait(20)) and None))
        elif isinstance(self.device, VirtualDevice):
            self.device.launch(gate, Timed(Work(cost_ms=1.0)))
        else:
            import torch

            self.device.launch(gate, lambda: torch.cuda._sleep(200_000_000))  # 0.1 s and more
        self.device.stream("copy").wait(gate.record())
        yield
        opened.set()

    def after(self) -> Event:
        return self.compute.record()

    def settle(self) -> None:
        """Wait until nothing is in flight; prefetches that have not started are dropped."""
        self.queue.replan()
        self.settle_all()

    def settle_all(self) -> None:
        """Wait until nothing is in flight or pending."""
        until_s = time.monotonic() + 20
        while True:
            self.device.synchronize()
            if self.queue.idle:
                return
            assert time.monotonic() < until_s, "the queue does not become idle"

    def bytes_in(self, slot: int) -> bytes:
        data = self.arena.array if isinstance(self.arena, HostBuffer) else self.arena.tensor.cpu().numpy()
        return data[slot * self.expert_bytes : (slot + 1) * self.expert_bytes].tobytes()

    def check(self) -> None:
        """After `settle`: every reader read the expert it expected, and the table matches the slots' bytes."""
        assert not self.wrong, f"layer, expert, slot, bytes read: {self.wrong[:3]}"
        assert self._wrong_on_device is None or int(self._wrong_on_device) == 0
        slots = self.slots
        assert not any(slots._pins), "all pins were released"
        ready = {}
        for layer in range(slots.layers):
            row = slots.slot_of(layer)
            assert sorted(slots.residents(layer)) == np.flatnonzero(row >= 0).tolist()
            for expert in slots.residents(layer):
                slot = int(row[expert])
                assert slot not in ready and slots.state(slot) is SlotState.READY
                assert self.bytes_in(slot) == self._expected[sentinel(layer, expert, self.experts)], (layer, expert, slot)
                ready[slot] = (layer, expert)
        counts = [len(slots.residents(layer)) for layer in range(slots.layers)]
        excess = sum(max(0, count - limit) for count, limit in zip(counts, slots.plan.capacity, strict=True))  # READY and available at once
        assert len(ready) + slots.available - excess == slots.plan.slots, "every slot is READY or available"

    def close(self) -> None:
        self.cache.close()
        self.device.close()


def chunk_order(spans: list[tuple[str, float, float]]) -> list[tuple[int, int]]:
    """Return the layer and expert of each chunk in order of arrival."""
    return [(int(name.split()[1]), int(name.split()[3])) for name, _, _ in spans]


def serve_in_a_process(kinds: Sequence[str]) -> None:
    """Run one transfer on a device of each kind in a spawned process, which the devices belong to."""
    for kind in kinds:
        harness = Harness(make_device(kind), (3, 3))
        demand = harness.queue.request(1, 2, Urgency.DEMAND)
        assert demand is not None, kind
        harness.compute.wait(demand.ready())
        harness.read(1, 2, demand.slot)
        harness.queue.release(demand, harness.after())
        harness.settle()
        harness.check()
        harness.close()
