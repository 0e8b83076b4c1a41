"""The memory, cores, GPUs and disks of this machine, read on each call and never at import."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import psutil
import torch

from moegraft.cpu_backend import ExpertFrames, ExpertsShape, GateSpec, PackedExperts, default_threads

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
# For the threads that launch the GPU's work, submit its transfers and call the host from captured steps. An estimate, not measured.
CORES_BESIDE_GPU = 2
PROBE_EXPERTS, PROBE_SIZES = 32, (2048, 768)  # Qwen3-30B-A3B's, 2.5 MiB each in int4


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """A snapshot of the resources that decide the placement of modules."""

    cores: int
    available_bytes: int  # free host memory, at most what a container's limit leaves
    gpus: tuple[Gpu, ...] = ()


def _cgroup_available_bytes() -> int | None:
    """Return what the memory limits of this process's control group, and of those around it, leave; None where there is no limit.

    Pages of files count as free: the system drops them first.
    """
    found = []
    for root, limit_name, use_name, prefix in (
        (CGROUPS, "memory.max", "memory.current", ""),
        (CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        own = root / _own_cgroup(version_1=bool(prefix))
        for folder in (own, *(parent for parent in own.parents if parent.is_relative_to(root))):
            try:
                limit, use = ((folder / name).read_text().strip() for name in (limit_name, use_name))
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                continue
            if limit.isdigit() and use.isdigit():
                files = sum(int(counts.get(f"{prefix}{name}_file", 0)) for name in ("inactive", "active"))
                found.append(max(0, int(limit) - max(0, int(use) - files)))
    return min(found, default=None)


def _own_cgroup(*, version_1: bool) -> str:
    """Return the path of this process's control group for memory, relative to the folder of all; empty where none is stated."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return ""
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if ("memory" in controllers.split(",")) if version_1 else not controllers:
            return path.strip("/")
    return ""


def probe_machine() -> Machine:
    """Return the machine as it is now."""
    limited = _cgroup_available_bytes()
    available = psutil.virtual_memory().available
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(torch.cuda.get_device_name(index), total, free))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(cores, available if limited is None else min(available, limited), tuple(gpus))


def threads_beside_gpu() -> int:
    """Return the default number of threads where a GPU computes as well; machines of fewer than eight cores leave it fewer of them."""
    cores = default_threads()
    return cores - min(CORES_BESIDE_GPU, cores // 4)


def version_of(package: str) -> str:
    """Return the version of an installed package; "none" without one, such as of moegraft itself run from its folder."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def cpu_info(name: str) -> str:
    """Return a field of the first core in `/proc/cpuinfo`, such as `model name` or `flags`; empty where there is none.

    psutil does not report these.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name), "")


def read_gbps(path: Path, readers: int, seconds: float) -> float:
    """Return the rate at which random experts arrive from a file of any content with so many threads that read, when nothing else runs."""
    shape = ExpertsShape(PROBE_EXPERTS, *PROBE_SIZES)
    layer_bytes = PROBE_EXPERTS * PackedExperts.expert_bytes_for(shape, "int4")
    frames, mapped = ExpertFrames(readers), np.memmap(path, np.uint8, "r")
    layers = len(mapped) // layer_bytes
    for begin in range(0, layers * layer_bytes, layer_bytes):
        frames.add(PackedExperts(shape, GateSpec(), "int4", np.asarray(mapped[begin : begin + layer_bytes])), str(path), begin)
    frames.open(frames.least_frames * frames.frame_bytes)
    nothing = np.empty(1, np.uint8)
    for number in range(min(frames.frames, layers * PROBE_EXPERTS)):  # the first use of memory takes longer
        frames.copy(*divmod(number, PROBE_EXPERTS), 0, nothing)

    def read(seed: int) -> None:
        places = random.Random(seed)
        while time.perf_counter() < end:
            frames.copy(places.randrange(layers), places.randrange(PROBE_EXPERTS), 0, nothing)

    before, began = frames.counts()["read_bytes"], time.perf_counter()
    end = began + seconds
    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(read, range(readers)))
    return (frames.counts()["read_bytes"] - before) / (time.perf_counter() - began) / 1e9
