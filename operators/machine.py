"""What this machine has: memory, cores and GPUs, read when asked and never at import."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
CGROUP_USES = (Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """A snapshot of what placement decisions need to know."""

    cores: int
    available_bytes: int  # host memory that can still be taken, a container's limit included
    gpus: tuple[Gpu, ...] = ()


def _meminfo_available_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_available_bytes() -> int | None:
    for limit_file, use_file in zip(CGROUP_LIMITS, CGROUP_USES, strict=True):
        try:
            limit, use = limit_file.read_text().strip(), use_file.read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and use.isdigit():
            return max(0, int(limit) - int(use))
    return None


def probe_machine() -> Machine:
    """The machine as it is now; a host whose free memory cannot be read counts half of its physical memory."""
    bounds = [size for size in (_meminfo_available_bytes(), _cgroup_available_bytes()) if size is not None]
    available = min(bounds) if bounds else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(torch.cuda.get_device_name(index), total, free))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(cores, available, tuple(gpus))
