"""Shared cases of the schedule tests: random problems, and a slow definition of every schedule in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, permutations, product

import numpy as np

from moegraft.operators.offload.scheduler import LayerProblem
from support.model_shapes import MODELS
from support.virtual_device import PROFILES

Split = tuple[bool, ...]  # whether each expert is on the CPU
INF = math.inf


def make_problem(
    loads: list[int], cpu: list[float], gpu: list[float], arrival: list[float], transfer: float, **rest: float
) -> LayerProblem:
    times = (np.array(values, np.float64) for values in (cpu, gpu, arrival))
    return LayerProblem(np.array(loads, np.int32), *times, transfer, **rest)  # type: ignore[arg-type]


def modelled_problem(random: np.random.Generator, experts: int, in_flight: int = 0) -> LayerProblem:
    """Return a problem of a modelled machine and model, whose costs grow with the load."""
    machine, model = random.choice(list(PROFILES.values())), random.choice(list(MODELS.values()))  # type: ignore[arg-type]
    nbytes = model.expert_bytes()
    loads = np.maximum(1, random.exponential(random.choice([0.5, 5, 50, 500]), experts)).astype(np.int32)
    transfer_ms = machine.transfer_ms(nbytes)
    arrival_ms = np.where(random.random(experts) < random.choice([0.0, 0.25, 0.5, 0.75, 1.0]), 0.0, INF)
    missing = random.permutation(np.flatnonzero(np.isinf(arrival_ms)))[:in_flight]
    arrival_ms[missing] = (random.random() + np.arange(len(missing))) * transfer_ms
    return LayerProblem(
        loads,
        machine.cpu_ms(loads, nbytes),
        machine.gpu_ms(loads, nbytes),
        arrival_ms,
        transfer_ms,
        machine.first_cpu_ms(nbytes),
        link_free_ms=float(arrival_ms[missing].max(initial=0.0)),
    )


def wild_problem(random: np.random.Generator, experts: int) -> LayerProblem:
    """Return a problem of random small integers, with many ties, some infinite costs, busy devices and few slots."""

    def times(low: int, high: int, infinite: float = 0.0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.where(random.random(experts) < infinite, INF, random.integers(low, high, experts).astype(np.float64))

    arrival_ms = random.choice([0.0, 1.0, 2.5, 7.0, INF, INF, INF], experts)
    free = dict(zip(("cpu_free_ms", "gpu_free_ms", "link_free_ms"), random.integers(0, 4, 3).astype(float).tolist(), strict=True))
    return LayerProblem(
        random.integers(1, 5, experts).astype(np.int32),
        times(0, 9, random.choice([0.0, 0.1])),
        times(0, 5, random.choice([0.0, 0.1])),
        arrival_ms,
        random.choice([0.0, 1.0, 3.0, INF], p=[0.1, 0.4, 0.4, 0.1]),
        float(random.integers(0, 3)),
        max_transfers=int(random.integers(0, experts + 2)),
        **free,
    )


def loose_problem(random: np.random.Generator, experts: int) -> LayerProblem:
    """Return a problem of random distinct costs, for which schedules are optimal only by chance."""
    arrival_ms = np.where(random.random(experts) < 0.4, 0.0, INF)
    in_flight = random.random(experts) < random.choice([0.0, 0.3])
    return LayerProblem(
        random.integers(1, 100, experts).astype(np.int32),
        random.uniform(0.5, 3, experts),
        random.uniform(0.1, 2, experts),
        np.where(in_flight, random.uniform(0.1, 5, experts), arrival_ms),
        random.uniform(0.1, 3),
        random.uniform(0, 1),
        *random.uniform(0, 2, 2).tolist(),
        link_free_ms=random.choice([0.0, 1.0, 8.0]),
        max_transfers=int(random.integers(0, experts + 2)),
    )


def splits(problem: LayerProblem) -> Iterator[Split]:
    """Return every split that transfers no more experts than there are slots."""
    for split in product((False, True), repeat=len(problem.loads)):
        if sum(not cpu and math.isinf(arrival) for cpu, arrival in zip(split, problem.arrival_ms, strict=True)) <= problem.max_transfers:
            yield split


def makespan_by_definition(problem: LayerProblem, split: Split) -> float:
    """Return the least makespan over all orders of the transfers and of the GPU's work."""
    on_cpu = [i for i, cpu in enumerate(split) if cpu]
    on_gpu = [i for i, cpu in enumerate(split) if not cpu]
    cpu_end = problem.cpu_free_ms + problem.first_cpu_ms + sum(problem.cpu_ms[i] for i in on_cpu) if on_cpu else 0.0
    brought = [i for i in on_gpu if math.isinf(problem.arrival_ms[i])]
    gpu_end = INF if on_gpu else 0.0
    for transfers in permutations(brought) if on_gpu else ():
        arrival = {i: float(problem.arrival_ms[i]) for i in on_gpu}
        link = problem.link_free_ms
        for i in transfers:
            link += problem.transfer_ms
            arrival[i] = link
        for order in permutations(on_gpu):
            clock = problem.gpu_free_ms
            for i in order:
                clock = max(clock, arrival[i]) + problem.gpu_ms[i]
            gpu_end = min(gpu_end, clock)
    return max(cpu_end, gpu_end)


def optimum_over_integers(problem: LayerProblem) -> float:
    """Return the optimum by dynamic programming over the CPU's time, which must be whole ms, without experts in flight."""
    most = int(problem.cpu_ms.sum())
    start = problem.cpu_free_ms + problem.first_cpu_ms
    resident = [i for i, arrival in enumerate(problem.arrival_ms) if arrival == 0]
    missing = sorted((i for i, arrival in enumerate(problem.arrival_ms) if arrival != 0), key=lambda i: -problem.gpu_ms[i])
    clocks = [np.full(most + 1, INF)]  # by the number of transfers: the GPU's earliest end for each CPU time
    clocks[0][0] = problem.gpu_free_ms

    def later(clock: np.ndarray[tuple[int], np.dtype[np.float64]], cpu_ms: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        shift = int(cpu_ms)
        return np.concatenate([np.full(shift, INF), clock[: most + 1 - shift]])

    for i in resident:
        clocks[0] = np.minimum(clocks[0] + problem.gpu_ms[i], later(clocks[0], problem.cpu_ms[i]))
    for i in missing:
        clocks.append(np.full(most + 1, INF))
        for m in range(len(clocks) - 1, -1, -1):
            brought = np.maximum(clocks[m - 1], problem.link_free_ms + m * problem.transfer_ms) + problem.gpu_ms[i] if m else INF
            clocks[m] = np.minimum(later(clocks[m], problem.cpu_ms[i]), brought)
    cpu_end = np.where(np.arange(most + 1) > 0, start + np.arange(most + 1), 0.0)
    found = [float(np.maximum(cpu_end, clock).min()) for clock in clocks[: problem.max_transfers + 1]]
    return min(start + most, *found)  # with all experts on the CPU, a busy GPU has no effect


def fixed_by_definition(problem: LayerProblem) -> Split:
    return tuple(bool(arrival != 0) for arrival in problem.arrival_ms)


def on_demand_by_definition(problem: LayerProblem) -> Split:
    missing = sorted((i for i, arrival in enumerate(problem.arrival_ms) if math.isinf(arrival)), key=lambda i: (-problem.loads[i], i))
    left_out = set(missing[problem.max_transfers :])
    return tuple(i in left_out for i in range(len(problem.loads)))


def greedy_by_definition(problem: LayerProblem) -> Split:
    """Return HybriMoE's schedule by a simulation that searches its queues for every operation."""
    experts = range(len(problem.loads))
    size = {i: (problem.loads[i], -i) for i in experts}  # of equal loads the first position counts as the largest
    gpu_queue = {i: float(problem.arrival_ms[i]) for i in experts if not math.isinf(problem.arrival_ms[i])}
    cpu_queue = {i for i in experts if i not in gpu_queue}
    in_flight = {i for i, arrival in gpu_queue.items() if arrival > 0}
    cpu, gpu, link = problem.cpu_free_ms + problem.first_cpu_ms, problem.gpu_free_ms, problem.link_free_ms
    slots = problem.max_transfers
    on_cpu = set()
    while gpu_queue or cpu_queue:
        finish: dict[str, tuple[float, int]] = {}
        if gpu_queue:
            arrived = [i for i, arrival in gpu_queue.items() if arrival <= gpu]
            # Of two simultaneous arrivals, the expert that was in flight at the start comes first.
            taken = max(arrived, key=size.get) if arrived else min(gpu_queue, key=lambda i: (gpu_queue[i], i not in in_flight, i))  # type: ignore[arg-type]
            finish["gpu"] = max(gpu, gpu_queue[taken]) + problem.gpu_ms[taken], taken
        taken = min(cpu_queue or gpu_queue, key=size.get)  # type: ignore[arg-type]
        finish["cpu"] = cpu + problem.cpu_ms[taken], taken
        if cpu_queue and slots > 0:
            finish["link"] = link + problem.transfer_ms, max(cpu_queue, key=size.get)  # type: ignore[arg-type]
        operation = min(finish, key=lambda name: finish[name][0])  # ties in the order GPU, CPU, link
        end, taken = finish[operation]
        if operation == "link":
            link, slots = end, slots - 1
            cpu_queue.remove(taken)
            gpu_queue[taken] = end
            continue
        gpu_queue.pop(taken, None)
        cpu_queue.discard(taken)
        if operation == "gpu":
            gpu = end
        else:
            cpu = end
            on_cpu.add(taken)
    return tuple(i in on_cpu for i in experts)


def threshold_splits(problem: LayerProblem) -> Iterator[Split]:
    """Return the splits with the b cheapest resident, a cheapest missing and f cheapest or latest in-flight experts on the CPU."""

    def cheapest(experts: list[int]) -> list[int]:
        return sorted(experts, key=lambda i: (problem.cpu_ms[i], -problem.gpu_ms[i], -problem.arrival_ms[i], -i))

    experts = range(len(problem.loads))
    resident = cheapest([i for i in experts if problem.arrival_ms[i] == 0])
    missing = cheapest([i for i in experts if math.isinf(problem.arrival_ms[i])])
    in_flight = [i for i in experts if 0 < problem.arrival_ms[i] < INF]
    orders = (cheapest(in_flight), sorted(in_flight, key=lambda i: (-problem.arrival_ms[i], -i)))
    for b, a, f, order in product(range(len(resident) + 1), range(len(missing) + 1), range(len(in_flight) + 1), orders):
        if len(missing) - a <= problem.max_transfers:
            on_cpu = {*resident[:b], *missing[:a], *order[:f]}
            yield tuple(i in on_cpu for i in experts)


def gains_by_definition(problem: LayerProblem, makespan: Callable[[LayerProblem], float]) -> list[float]:
    gains = [0.0] * len(problem.loads)
    order = sorted((i for i, arrival in enumerate(problem.arrival_ms) if math.isinf(arrival)), key=lambda i: (-problem.loads[i], i))
    makespans = [makespan(problem)]
    arrival_ms = problem.arrival_ms.copy()
    for i in order:
        arrival_ms[i] = 0.0
        makespans.append(makespan(replace(problem, arrival_ms=arrival_ms.copy())))
    steps = [0.0 if before == after else before - after for before, after in pairwise(makespans)]
    # Pool adjacent violators: rising neighbours share their sum.
    pools: list[list[float]] = []
    for step in steps:
        pools.append([step])
        while len(pools) > 1 and np.mean(pools[-1]) >= np.mean(pools[-2]):
            last = pools.pop()
            pools[-1] += last
    shared = [max(0.0, float(np.mean(pool))) for pool in pools for _ in pool]
    for i, gain in zip(order, shared, strict=True):
        gains[i] = gain
    return gains
