"""Demands, prefetches, cancellations, pins and releases in many seeded random orders: no reader ever reads a stale or torn expert.

A world is a virtual clock, slots and a queue with experts whose bytes identify them. A round is a few random calls with jittered durations;
then everything lands and is checked.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.transfer_harness import DEVICES, LINK, WORK, Harness, advance, make_device
from support.virtual_device import Timed, VirtualDevice

from moegraft.operators.offload.devices.base import Device
from moegraft.operators.offload.transfers import Transfer, Urgency

ROUNDS, SPLIT = 100, 2
CALLS = 3  # a round


class World:
    """One sequence of rounds."""

    def __init__(self, seed: int, device: Device) -> None:
        self.random = random.Random(seed)
        capacity = self.random.choice([(0, 0), (1, 1), (0, 2), (2, 2), (3, 3), (1, 3)])
        self.harness = Harness(
            device, capacity, self.random.randint(1, 3), expert_bytes=192, admission=self.random.choice(["always", "bypass"])
        )
        self.harness.priorities = np.array([[self.random.random() for _ in range(5)] for _ in range(2)])
        self.requested: list[Transfer] = []
        self.waits = True  # before reading what was demanded

    def round(self) -> None:
        for _ in range(CALLS):
            call: Callable[[], object] = self.random.choices(
                [self.step, self.stream, self.prefetch, self.cancel, self.replan, self.keep, self.work], [5, 1, 6, 2, 1, 1, 2]
            )[0]
            call()
        self.requested.clear()
        self.harness.settle()
        self.harness.check()

    def step(self) -> None:
        """As an engine's layer: pin the residents, demand some of the rest, read all, release."""
        harness, draw = self.harness, self.random.random
        layer, chosen = self.random.randrange(2), self.random.sample(range(5), 3)
        pin = harness.slots.pin(layer, chosen)
        demands = []
        for expert, slot in zip(chosen, pin.slots, strict=True):
            if slot >= 0:
                harness.read(layer, expert, slot)
            elif draw() < 0.7:
                demand = harness.queue.request(layer, expert, Urgency.DEMAND)
                if demand is not None:
                    demands.append(demand)
        early = draw() < 0.5
        if early:
            harness.slots.release(pin, harness.after())
        for demand in demands:
            if self.waits:
                harness.compute.wait(demand.ready())
            harness.read(layer, demand.expert, demand.slot)
            harness.queue.release(demand, harness.after())
        if not early:
            harness.slots.release(pin, harness.after())

    def stream(self) -> None:
        """As in a prefill: more demands than slots, each read and released before the next request."""
        harness, layer = self.harness, self.random.randrange(2)
        for expert in self.random.sample(range(5), 3):
            demand = harness.queue.request(layer, expert, Urgency.DEMAND)
            assert demand is not None, "the slot of the one before is available"
            if self.waits:
                harness.compute.wait(demand.ready())
            harness.read(layer, expert, demand.slot)
            harness.queue.release(demand, harness.after())

    def prefetch(self) -> None:
        urgency = self.random.choice([Urgency.NEXT, Urgency.DEEPER, Urgency.PROMOTION])
        transfer = self.harness.queue.request(self.random.randrange(2), self.random.randrange(5), urgency)
        if transfer is not None:
            self.requested.append(transfer)

    def cancel(self) -> None:
        if self.requested:
            transfer = self.random.choice(self.requested)
            if not transfer.pins:
                self.harness.queue.cancel(transfer)

    def replan(self) -> None:
        self.harness.queue.replan(started=self.random.random() < 0.5)

    def keep(self) -> None:
        self.harness.slots.protect(self.random.randrange(2), self.random.sample(range(5), 2))

    def work(self) -> None:
        advance(self.harness.device, self.random.random() * 0.3)
        self.harness.device.launch(self.harness.compute, Timed(WORK))


def play(seed: int, rounds: int, *, waits: bool = True) -> int:
    """Return the number of reads that were checked."""
    world = World(seed, VirtualDevice(LINK, seed=seed, jitter=1.5, notify_ms=0.02))
    world.waits = waits
    for number in range(rounds):
        try:
            world.round()
        except AssertionError as error:
            raise AssertionError(f"world {seed}, round {number}: {error}") from error
    reads = world.harness.reads
    world.harness.close()
    return reads


@pytest.mark.parametrize("part", range(SPLIT))
def test_no_reader_reads_a_stale_or_torn_expert(part: int, long: bool) -> None:
    worlds = 10_000 if long else 200
    reads = sum(play(seed, ROUNDS) for seed in range(part, worlds, SPLIT))
    assert reads > worlds * ROUNDS / SPLIT, "these rounds read something"


def test_the_same_seed_gives_the_same_sequence() -> None:
    def trace(seed: int) -> list[tuple[str, float, float]]:
        world = World(seed, VirtualDevice(LINK, seed=seed, jitter=1.5, notify_ms=0.02))
        for _ in range(10):
            world.round()
        return world.harness.spans

    assert trace(3) == trace(3) != trace(4)


def test_readers_that_do_not_wait_are_found() -> None:
    with pytest.raises(AssertionError, match="bytes read"):
        for seed in range(100):
            play(seed, 20, waits=False)


REAL = [kind for kind in DEVICES if kind != "virtual"]


@pytest.mark.parametrize("kind", REAL)
@pytest.mark.parametrize("seed", range(4))
def test_on_real_threads(kind: str, seed: int) -> None:
    world = World(seed, make_device(kind))
    for _ in range(300):
        world.round()
    assert world.harness.reads > 100
    world.harness.close()


@pytest.mark.parametrize("kind", REAL)
def test_with_several_callers(kind: str) -> None:
    """One thread serves the layers; others request prefetches and cancel them."""
    worlds = [World(0, make_device(kind))]
    for seed in range(1, 4):
        world = copy.copy(worlds[0])
        world.random, world.requested = random.Random(seed), []
        worlds.append(world)

    def calls(world: World) -> None:
        first = world is worlds[0]
        for _ in range(1000):
            world.random.choice([world.step, world.stream] if first else [world.prefetch, world.prefetch, world.cancel, world.replan])()

    with ThreadPoolExecutor(len(worlds)) as pool:
        list(pool.map(calls, worlds))
    harness = worlds[0].harness
    harness.settle()
    harness.check()
    assert harness.reads > 1000
    harness.close()
