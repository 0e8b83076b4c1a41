"""The state of the machine and of the installation, read without changing anything."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement

from moegraft.operators.experts.self_test import InstructionSet, instruction_sets, kernel_isa, kernel_threads
from moegraft.operators.machine import Gpu, probe_machine

COMPILERS = ("c++", "g++", "clang++")
OPTIONAL = ("triton", "matplotlib", "fastapi")
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")
# What each instruction set of the kernel needs of the CPU, by the names of /proc/cpuinfo; richest last.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "avx512_vnni": ("avx512_vnni",),
    "avx512_bf16": ("avx512_bf16",),
}


@dataclass(frozen=True, slots=True)
class Package:
    """An installed or missing package; `wanted` is what moegraft asks for, empty where anything goes."""

    name: str
    version: str | None
    wanted: str
    ok: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the doctor looks at.

    Attributes:
        cpu_flags: those of CPU_FLAGS and of NEEDS that this CPU has; empty where they cannot be read.
        quota_cores: what a container's CPU quota allows, or None.
        memory_limit_bytes: a container's, or None.
        pinned_limit_bytes: how much memory a process may lock, or None for no limit.
        gpu_device: whether the system has an NVIDIA device, whether or not PyTorch can use it.
    """

    python: str
    platform: str
    packages: tuple[Package, ...]
    cuda: str | None
    compiler: str | None
    cpu: str
    cpu_flags: frozenset[str]
    instruction_sets: tuple[InstructionSet, ...]
    isa: str
    cores: int
    quota_cores: float | None
    kernel_threads: int
    torch_threads: int
    omp_num_threads: str | None
    numa_nodes: int
    total_bytes: int
    available_bytes: int
    memory_limit_bytes: int | None
    swap_bytes: int
    pinned_limit_bytes: int | None
    gpu_device: bool
    gpus: tuple[Gpu, ...]


def gather() -> Facts:
    """Looks at everything; runs the kernel's self-test, which takes well below a second."""
    machine = probe_machine()
    memory = _meminfo(_text("/proc/meminfo"))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    cpuinfo = _text("/proc/cpuinfo")
    return Facts(
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=platform.platform(terse=True),
        packages=tuple(_packages()),
        cuda=torch.version.cuda,
        compiler=_compiler(),
        cpu=_field(cpuinfo, "model name") or platform.processor() or "unknown",
        cpu_flags=frozenset(_field(cpuinfo, "flags").split()) & {*CPU_FLAGS, *(flag for flags in NEEDS.values() for flag in flags)},
        instruction_sets=tuple(instruction_sets()),
        isa=kernel_isa(),
        cores=machine.cores,
        quota_cores=_quota(_text("/sys/fs/cgroup/cpu.max")),
        kernel_threads=kernel_threads(),
        torch_threads=torch.get_num_threads(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        total_bytes=memory.get("MemTotal", 0),
        available_bytes=machine.available_bytes,
        memory_limit_bytes=_number(_text("/sys/fs/cgroup/memory.max")),
        swap_bytes=memory.get("SwapTotal", 0),
        pinned_limit_bytes=None if locked == resource.RLIM_INFINITY else locked,
        gpu_device=any(Path("/dev").glob("nvidia[0-9]*")),
        gpus=machine.gpus,
    )


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _field(text: str, name: str) -> str:
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.partition(":")[0].strip() == name), "")


def _meminfo(text: str) -> dict[str, int]:
    """Bytes by the name of each line."""
    rows = (line.split() for line in text.splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _quota(text: str) -> float | None:
    """Cores, from `quota period` as cgroup v2 writes it."""
    parts = text.split()
    return int(parts[0]) / int(parts[1]) if len(parts) == 2 and parts[0].isdigit() else None


def _compiler() -> str | None:
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        return None
    done = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    return next(iter(done.stdout.splitlines()), found)


def _packages() -> Iterable[Package]:
    for line in requires("moegraft") or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield package(requirement.name, str(requirement.specifier))
    for name in OPTIONAL:
        yield package(name, "", optional=True)


def package(name: str, wanted: str, *, optional: bool = False) -> Package:
    """The installed version beside the wanted one."""
    try:
        found = version(name)
    except PackageNotFoundError:
        return Package(name, None, wanted, optional)
    return Package(name, found, wanted, Requirement(f"{name}{wanted}").specifier.contains(found, prereleases=True))
