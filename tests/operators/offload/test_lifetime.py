"""Ctrl-C, forks, spawned processes, closing, and a million steps."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.gpus import ON_CUDA
from support.programs import Program
from support.transfer_harness import DEVICES, EMULATED, Harness, make_device, serve_in_a_process
from support.virtual_device import VirtualDevice

from moegraft.operators.experts.forecast import MachineProfile
from moegraft.operators.offload.queue import open_expert_cache
from moegraft.operators.offload.store import ExpertStore, even_plan
from moegraft.operators.offload.transfers import Urgency

SLOW = MachineProfile("slow link", 1, 1, 1, 1, link_gb_s=1e-6)  # 1 byte a millisecond: a chunk of 64 bytes takes 64 ms

INTERRUPTED = """
import sys, time
from support.transfer_harness import Harness, make_device
from moegraft.operators.experts.forecast import MachineProfile
from moegraft.operators.offload.transfers import Urgency
harness = Harness(make_device("threaded", MachineProfile("slow link", 1, 1, 1, 1, link_gb_s=1e-6)), (3, 3), expert_bytes=640)
for expert in range(5):
    harness.queue.request(0, expert, Urgency.NEXT)
demand = harness.queue.request(1, 0, Urgency.DEMAND)
print("waiting", flush=True)
try:
    demand.wait()
except KeyboardInterrupt:
    start = time.monotonic()
    harness.close()
    print(f"closed {time.monotonic() - start:.3f}", flush=True)
"""

TORN = """
import os, random, signal, threading, time
from contextlib import nullcontext
from support.transfer_harness import Harness, make_device
from moegraft.operators.interrupts import Uninterrupted
from moegraft.operators.offload.transfers import Urgency
harness = Harness(make_device("threaded", None), (1, 1), staging=1)
shielded = True

def layer(number):
    pin = harness.slots.pin(number % 2, [number % 5])
    if pin.slots[0] < 0:
        demand = harness.queue.request(number % 2, number % 5, Urgency.DEMAND)
        harness.compute.wait(demand.ready())
        harness.read(number % 2, number % 5, demand.slot)
        harness.queue.release(demand, harness.after())
    else:
        harness.read(number % 2, number % 5, pin.slots[0])
    harness.slots.release(pin, harness.after())

def interrupt():
    while True:
        handled.wait()  # a second one would be raised at once
        handled.clear()
        time.sleep(random.random() * 0.004)
        os.kill(os.getpid(), signal.SIGINT)

handled, interrupts, steps = threading.Event(), 0, 0
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=interrupt, daemon=True).start()
until = time.monotonic() + 2

def going():
    return time.monotonic() < until or interrupts < 6 or steps < 101  # longer on a loaded machine

while going():
    try:
        handled.set()  # here alone: a loaded machine may take long to start the thread
        while going():
            with Uninterrupted() if shielded else nullcontext():
                layer(steps)
            steps += 1
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        interrupts += 1
        with Uninterrupted():
            harness.settle()
            harness.check()
harness.close()
print("interrupts", interrupts, "steps", steps, flush=True)
"""


@contextmanager
def started(code: str) -> Iterator[Program]:
    program = Program(["-c", code], os.environ)
    try:
        yield program
    finally:
        program.kill()


def test_ctrl_c_in_a_transfer_closes_within_a_second() -> None:
    import signal

    with started(INTERRUPTED) as process:
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=20)
    assert process.returncode == 0, error
    word, seconds = out.split()
    assert word == "closed"
    assert float(seconds) < 1.0


def test_ctrl_c_at_any_moment_leaves_a_consistent_table() -> None:
    with started(TORN) as process:
        out, error = process.communicate(timeout=30)
    assert process.returncode == 0, error
    _, interrupts, _, steps = out.split()
    assert int(interrupts) > 5
    assert int(steps) > 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("kind", DEVICES)
def test_a_forked_child_is_refused(kind: str) -> None:
    harness = Harness(make_device(kind), (3, 3))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            harness.queue.request(0, 1, Urgency.DEMAND)
        except RuntimeError as error:
            status = 0 if "cannot be used after a fork; start processes by spawn" in str(error) else 2
        finally:
            os._exit(status)
    _, wait_status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(wait_status) == 0
    demand = harness.queue.request(0, 1, Urgency.DEMAND)
    assert demand is not None
    demand.wait()
    harness.queue.release(demand, None)
    harness.settle()
    harness.check()
    harness.close()


@pytest.mark.parametrize("kinds", [EMULATED, pytest.param(["cuda"], marks=ON_CUDA)], ids=str)
def test_spawned_processes_have_devices_of_their_own(kinds: list[str]) -> None:
    """The emulated kinds share a process: its imports take seconds, and devices know nothing of each other."""
    harnesses = [Harness(make_device(kind), (3, 3)) for kind in kinds]
    process = multiprocessing.get_context("spawn").Process(target=serve_in_a_process, args=(kinds,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    for harness in harnesses:
        harness.close()


@pytest.mark.parametrize("kind", ["virtual", "threaded"])
def test_closing_takes_less_than_a_second(kind: str) -> None:
    """The chunk that was submitted ends, after 64 ms; the requests behind it are dropped."""
    harness = Harness(make_device(kind, SLOW), (5, 5))
    for layer in range(2):
        for expert in range(5):
            harness.queue.request(layer, expert, Urgency.NEXT)
    start_s, start_ms = time.monotonic(), harness.device.now_ms()
    harness.close()
    assert time.monotonic() - start_s < 1.0
    assert harness.device.now_ms() - start_ms < 500
    assert harness.queue.statistics.cancelled == 10


def test_a_hanging_device_is_reported_and_its_memory_left_alone() -> None:
    from moegraft.operators.offload.devices.base import DeviceTimeoutError

    hanging = MachineProfile("hanging link", 1, 1, 1, 1, link_gb_s=1e-9)  # 64 s a chunk
    harness = Harness(make_device("virtual", hanging), (3, 3))
    harness.queue.request(0, 1, Urgency.NEXT)
    with pytest.raises(DeviceTimeoutError, match="not done after 1000 ms"):
        harness.cache.close()
    assert harness.device.allocated_bytes > 0  # type: ignore[attr-defined]


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_stays_constant_over_many_steps(long: bool) -> None:
    """Decode steps: pins, demands, prefetches, cancellations, readers, evictions."""
    steps = 1_000_000 if long else 20_000
    layers, experts = 4, 16
    device = VirtualDevice(notify_ms=0.001)
    values = np.random.default_rng(0).random((layers, experts))
    store = ExpertStore.phantom(layers, experts, 1000)
    cache = open_expert_cache(device, store, even_plan(layers, 16, 3), lambda layer: values[layer])
    assert cache is not None
    slots, queue, compute = cache.slots, cache.queue, device.stream("compute")
    before: tuple[int, int] | None = None
    for step in range(steps):
        layer, chosen = step % layers, [(step * 7 + shift * 5) % experts for shift in range(2)]
        pin = slots.pin(layer, chosen)
        transfer = queue.request((layer + 1) % layers, (step * 11) % experts, Urgency.NEXT)
        if transfer is not None and step % 3 == 0:
            queue.cancel(transfer)
        if pin.slots[0] < 0:
            demand = queue.request(layer, chosen[0], Urgency.DEMAND)
            if demand is not None:
                compute.wait(demand.ready())
                queue.release(demand, compute.record())
        slots.release(pin, compute.record())
        queue.replan()
        device.advance(0.01)
        if step == steps // 10:
            gc.collect()
            before = len(gc.get_objects()), resident_bytes()
    gc.collect()
    assert before is not None
    assert len(gc.get_objects()) - before[0] < 500
    assert resident_bytes() - before[1] < 4 << 20
    assert queue.statistics.landed > steps // 4
    assert slots.evictions > steps // 4
    cache.close()
