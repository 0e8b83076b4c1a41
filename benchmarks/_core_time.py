"""Who used the machine's cores while something was measured: the benchmark's own processes, or others."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import psutil


class CoreTime:
    """Counts from when it is made.

    Args:
        pids: the benchmark's processes, with all their threads.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._began_s, self._all_s, self._own_s = time.perf_counter(), _machine_s(), sum(map(_process_s, pids))

    def others_share(self) -> float:
        """The share of all cores' time that other processes took, from 0 to 1."""
        others_s = _machine_s() - self._all_s - (sum(map(_process_s, self._pids)) - self._own_s)
        cores_s = (time.perf_counter() - self._began_s) * (os.cpu_count() or 1)
        return max(0.0, others_s / cores_s)


def _machine_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def _process_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system
