"""The facts of `moegraft doctor` on a machine and an installation, and the problems found in them, each with a fix."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

import psutil
import torch
from packaging.requirements import Requirement

from moegraft.operators.cpu import InstructionSet, instruction_sets, kernel_in_use
from moegraft.operators.errors import human_bytes
from moegraft.operators.machine import Gpu, cpu_info, probe_machine

COMPILERS = ("c++", "g++", "clang++")
OPTIONAL = ("triton", "fastapi")
# What each instruction set of the kernel needs of the CPU beside those before it, by the names of /proc/cpuinfo.
X86_NEEDS: Mapping[str, tuple[str, ...]] = {
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "avx512_vnni": ("avx512_vnni",),
    "avx512_bf16": ("avx512_bf16",),
    "amx": ("amx_tile", "amx_int8", "amx_bf16"),
}
ARM64_NEEDS: Mapping[str, tuple[str, ...]] = {
    "neon": ("asimd",),
    "neon_dotprod": ("asimddp",),
    "neon_i8mm": ("i8mm",),
    "neon_bf16": ("bf16",),
}
CPU_FLAGS = frozenset(flag for needs in (X86_NEEDS, ARM64_NEEDS) for flags in needs.values() for flag in flags)
LITTLE_MEMORY_BYTES = 2 << 30  # transformers and PyTorch alone take half a gigabyte
TESTED_GPU = "H100"  # part of its name; the only one that has run the GPU tests
Severity = Literal["error", "warning", "notice"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "notice")


@dataclass(frozen=True, slots=True)
class Package:
    """An installed or missing package; `wanted` is the version range that moegraft requires, empty for any version."""

    name: str
    version: str | None
    wanted: str
    ok: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """The state of the machine and of the installation.

    Attributes:
        cpu_flags: those of CPU_FLAGS that this CPU has; empty if they cannot be read.
        isa: the instruction set in use.
        matrix_tokens: the tokens of an expert from which on the matrix kernel computes, by weight type; others use vector tiles alone.
        default_isa: the instruction set that is used unless MOEGRAFT_ISA forces another.
        forced_isa: the value of MOEGRAFT_ISA; None if it is not set.
        quota_cores: the cores that a container's CPU quota allows; None without a quota.
        kernel_nodes: the memory nodes over which the kernel shares out its threads, or the groups of cores of MOEGRAFT_NODES.
        forced_nodes: the value of MOEGRAFT_NODES; None if it is not set.
        memory_limit_bytes: a container's limit; None without a limit.
        pinned_limit_bytes: the memory that a process may lock; None without a limit.
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
    matrix_tokens: Mapping[str, int]
    default_isa: str
    forced_isa: str | None
    cores: int
    quota_cores: float | None
    kernel_threads: int
    torch_threads: int
    omp_num_threads: str | None
    numa_nodes: int
    kernel_nodes: int
    forced_nodes: str | None
    total_bytes: int
    available_bytes: int
    memory_limit_bytes: int | None
    swap_bytes: int
    pinned_limit_bytes: int | None
    gpu_device: bool
    gpus: tuple[Gpu, ...]

    @property
    def divides_weights(self) -> bool:
        return self.kernel_nodes > 1 and not self.forced_nodes


def gather() -> Facts:
    """Collect all facts and run the kernel's self-test, which takes well below a second.

    Raises:
        MoegraftError: MOEGRAFT_ISA names an instruction set that this CPU or build does not have, or MOEGRAFT_NODES is no number.
    """
    machine, kernel = probe_machine(), kernel_in_use()
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memory_limit = _text("/sys/fs/cgroup/memory.max").strip()
    return Facts(
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=platform.platform(terse=True),
        packages=tuple(_packages()),
        cuda=torch.version.cuda,
        compiler=_compiler(),
        cpu=cpu_info("model name") or platform.processor() or "unknown",
        cpu_flags=frozenset((cpu_info("flags") or cpu_info("Features")).split()) & CPU_FLAGS,
        instruction_sets=tuple(instruction_sets()),
        isa=kernel.isa,
        matrix_tokens=kernel.matrix_tokens,
        default_isa=kernel.default_isa,
        forced_isa=os.environ.get("MOEGRAFT_ISA"),
        cores=machine.cores,
        quota_cores=_quota(_text("/sys/fs/cgroup/cpu.max")),
        kernel_threads=kernel.threads,
        torch_threads=torch.get_num_threads(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        kernel_nodes=kernel.memory_nodes,
        forced_nodes=os.environ.get("MOEGRAFT_NODES"),
        total_bytes=psutil.virtual_memory().total,
        available_bytes=machine.available_bytes,
        memory_limit_bytes=int(memory_limit) if memory_limit.isdigit() else None,
        swap_bytes=psutil.swap_memory().total,
        pinned_limit_bytes=None if locked == resource.RLIM_INFINITY else locked,
        gpu_device=any(Path("/dev").glob("nvidia[0-9]*")),
        gpus=machine.gpus,
    )


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _quota(text: str) -> float | None:
    """Return the cores of the text `QUOTA PERIOD` of cgroup v2; None for no quota."""
    parts = text.split()
    return int(parts[0]) / int(parts[1]) if len(parts) == 2 and parts[0].isdigit() else None


def _compiler() -> str | None:
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        return None
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return next(iter(done.stdout.splitlines()), compiler)


def _packages() -> Iterator[Package]:
    try:
        required = requires("moegraft") or ()
    except PackageNotFoundError:  # it is run from its folder
        required = ()
    for line in required:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield package(requirement.name, str(requirement.specifier))
    for name in OPTIONAL:
        yield package(name, "", optional=True)


def package(name: str, wanted: str, *, optional: bool = False) -> Package:
    """Compare the installed version with the wanted one."""
    try:
        installed = version(name)
    except PackageNotFoundError:
        return Package(name, None, wanted, optional)
    return Package(name, installed, wanted, Requirement(f"{name}{wanted}").specifier.contains(installed, prereleases=True))


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem and its fix. Errors mean wrong results or none, warnings slow ones; a notice has no such effect."""

    severity: Severity
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.what}; {self.fix}"


def find_problems(facts: Facts) -> list[Problem]:
    """Return errors first, then warnings, then notices."""
    problems = [*_installation(facts), *_kernel(facts), *_cpu_and_memory(facts), *_gpu(facts)]
    return sorted(problems, key=lambda problem: SEVERITIES.index(problem.severity))


def _installation(facts: Facts) -> Iterator[Problem]:
    for package in facts.packages:
        if not package.ok:
            state = f"{package.name} {package.version} is installed" if package.version else f"{package.name} is not installed"
            wanted = f"{package.name}{package.wanted}"
            yield Problem("error", f"{state} and moegraft needs {wanted}", f"pip install '{wanted}'")
    if not any(package.wanted for package in facts.packages):
        yield Problem("notice", "moegraft is run from its folder: the packages that it needs are not compared", "pip install -e .")
    if facts.compiler is None:
        yield Problem("notice", "no C++ compiler was found", "needed only to build moegraft from source: apt install g++")


def _kernel(facts: Facts) -> Iterator[Problem]:
    for isa in facts.instruction_sets:
        if isa.wrong:
            yield Problem(
                "error",
                f"the kernel's {isa.name} version computes wrong results with {', '.join(isa.wrong)} weights",
                "set MOEGRAFT_ISA=scalar and report this with the output of moegraft doctor --json",
            )
    compiled = {isa.name for isa in facts.instruction_sets}
    for needs in (X86_NEEDS, ARM64_NEEDS):
        has: set[str] = set()
        for name, flags in needs.items():
            has |= set(flags)
            if has <= facts.cpu_flags and name not in compiled:
                yield Problem(
                    "warning",
                    f"this CPU has {name} and the kernel was built without it",
                    "build it again with g++ 12 or newer: pip install --force-reinstall --no-deps --no-binary moegraft moegraft",
                )
    amx = next((isa for isa in facts.instruction_sets if isa.name == "amx"), None)
    if amx is not None and not amx.usable and set(X86_NEEDS["amx"]) <= facts.cpu_flags:
        yield Problem(
            "warning",
            "this CPU has AMX, and the system does not allow this process to use it: prompts are slower with bfloat16 weights",
            "use Linux 5.16 or newer, and in a container a seccomp profile that allows arch_prctl",
        )
    if facts.forced_isa and facts.isa != facts.default_isa:
        yield Problem(
            "warning", f"MOEGRAFT_ISA forces the kernel to run as {facts.isa} instead of {facts.default_isa}", "unset MOEGRAFT_ISA"
        )


def _cpu_and_memory(facts: Facts) -> Iterator[Problem]:
    if facts.torch_threads < facts.kernel_threads:
        why = f"OMP_NUM_THREADS is {facts.omp_num_threads}" if facts.omp_num_threads else "PyTorch's default"
        yield Problem(
            "warning",
            f"PyTorch uses {facts.torch_threads} of {facts.kernel_threads} cores for what is not replaced ({why})",
            f"set OMP_NUM_THREADS={facts.kernel_threads}",
        )
    if facts.quota_cores is not None and facts.quota_cores < facts.cores:
        yield Problem(
            "notice",
            f"the container's quota is {facts.quota_cores:g} of {facts.cores} cores",
            f"the kernel uses {facts.kernel_threads} threads by default; give the container more CPUs for more speed",
        )
    if facts.divides_weights:
        yield Problem(
            "notice",
            f"weights are divided over {facts.kernel_nodes} NUMA nodes, which has been tested on machines with one alone",
            "compare the speed with MOEGRAFT_NODES=1 and numactl --interleave=all, and report it",
        )
    elif facts.numa_nodes > 1:
        yield Problem(
            "warning",
            f"there are {facts.numa_nodes} NUMA nodes, and all weights are placed on the node that writes them first",
            "start programs with: numactl --interleave=all",
        )
    if facts.available_bytes < LITTLE_MEMORY_BYTES:
        yield Problem("warning", f"{human_bytes(facts.available_bytes)} of memory are free", "end other programs before loading a model")


def _gpu(facts: Facts) -> Iterator[Problem]:
    if facts.gpu_device and not facts.gpus:
        built = f"is built for CUDA {facts.cuda}" if facts.cuda else "is a CPU build"
        yield Problem(
            "warning",
            f"there is an NVIDIA GPU, and PyTorch cannot use it (this PyTorch {built})",
            "install the CUDA build (https://pytorch.org/get-started) and check the driver with nvidia-smi",
        )
    untested = [gpu.name for gpu in facts.gpus if TESTED_GPU not in gpu.name]
    if untested:
        yield Problem(
            "notice",
            f"the GPU kernels have been run on an NVIDIA {TESTED_GPU} alone, and not yet on {untested[0]}",
            "check the shipped file 'hybrid' on this GPU with: moegraft verify --rules hybrid",
        )
    if facts.gpus:
        if facts.pinned_limit_bytes is not None and facts.pinned_limit_bytes < 1 << 30:
            yield Problem(
                "warning",
                f"a process may lock {facts.pinned_limit_bytes >> 20} MiB of memory, too little for fast transfers to the GPU",
                "raise the limit with 'ulimit -l unlimited', or --ulimit memlock=-1 for a container",
            )
    else:
        yield Problem("notice", "no GPU is visible to PyTorch", "everything runs on the CPU")
