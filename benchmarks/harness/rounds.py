"""Times of providers that alternate within each round, so that changes of a shared machine affect all alike."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Name = TypeVar("Name", bound=Hashable)
Figure = TypeVar("Figure")


def clock() -> float:
    """Return the time in seconds; CPU time if there is one thread, which other processes hardly affect."""
    import torch  # benchmarks of starts import this module

    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def machine_s() -> float:
    """Return the time that all cores have worked, in seconds."""
    import psutil

    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def seconds(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of one call."""
    start = clock()
    run()
    return clock() - start


def alternate(calls: Mapping[Name, Callable[[], Figure]], rounds: int) -> dict[Name, list[Figure]]:
    """Call every provider once a round, and return what the calls return, by provider; the first of `rounds + 1` rounds warms up."""
    taken: dict[Name, list[Figure]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            figure = call()
            if number:
                taken[name].append(figure)
    return taken


def percentiles(samples: Sequence[float] | NDArray[np.float64], unit: str, digits: int) -> dict[str, float]:
    """Return the columns `p20_UNIT`, `p50_UNIT` and `p80_UNIT`, linearly interpolated; there must be a sample."""
    return {f"p{share}_{unit}": round(float(np.percentile(samples, share)), digits) for share in (20, 50, 80)}


def median_ratio(figures: Iterable[float], others: Iterable[float]) -> float:
    """Return the median over rounds of one provider's figure over another's."""
    return statistics.median(one / other for one, other in zip(figures, others, strict=True))


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep as many cores busy while the body runs."""
    context = multiprocessing.get_context("spawn")
    running = [context.Process(target=_spin, daemon=True) for _ in range(processes)]
    for process in running:
        process.start()
    try:
        yield
    finally:
        for process in running:
            process.kill()


def _spin() -> None:
    while True:
        pass
