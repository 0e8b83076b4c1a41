"""What is wrong, from the facts alone, each with its mend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moegraft.injection.doctor.facts import NEEDS, Facts

Severity = Literal["error", "warning", "notice"]
GIB = 1 << 30
LITTLE_MEMORY_BYTES = 2 * GIB  # transformers and PyTorch alone take half a gigabyte


@dataclass(frozen=True, slots=True)
class Problem:
    """An error gives wrong results or none, a warning slow ones; a notice only says what is not there."""

    severity: Severity
    what: str
    mend: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.what}; {self.mend}"


def find_problems(facts: Facts) -> list[Problem]:
    """Errors first, then warnings, then notices."""
    found = [*_packages(facts), *_kernel(facts), *_cpu(facts), *_memory(facts), *_gpu(facts)]
    order = ("error", "warning", "notice")
    return sorted(found, key=lambda problem: order.index(problem.severity))


def _packages(facts: Facts) -> Iterator[Problem]:
    for package in facts.packages:
        if not package.ok:
            state = f"{package.name} {package.version} is installed" if package.version else f"{package.name} is not installed"
            wanted = f"{package.name}{package.wanted}"
            yield Problem("error", f"{state} and moegraft needs {wanted}", f"pip install '{wanted}'")
    if facts.compiler is None:
        yield Problem("notice", "there is no C++ compiler", "needed only to build moegraft from source: apt install g++")


def _kernel(facts: Facts) -> Iterator[Problem]:
    for isa in facts.instruction_sets:
        if isa.wrong:
            yield Problem(
                "error",
                f"the kernel's {isa.name} version computes wrong results here in {', '.join(isa.wrong)}",
                "set MOEGRAFT_ISA=scalar and report this with the output of moegraft doctor --json",
            )
    compiled = {isa.name for isa in facts.instruction_sets}
    has: set[str] = set()
    for name, flags in NEEDS.items():
        has |= set(flags)
        if has <= facts.cpu_flags and name not in compiled:
            yield Problem(
                "warning",
                f"this CPU has {name} and the kernel was built without it",
                "build it again with g++ 12 or newer: pip install --force-reinstall --no-deps --no-binary moegraft moegraft",
            )
    usable = [isa.name for isa in facts.instruction_sets if isa.usable]
    if usable and facts.isa != usable[-1]:
        yield Problem("warning", f"the kernel runs as {facts.isa} although {usable[-1]} is there", "unset MOEGRAFT_ISA")


def _cpu(facts: Facts) -> Iterator[Problem]:
    if facts.torch_threads < facts.kernel_threads:
        why = f"OMP_NUM_THREADS is {facts.omp_num_threads}" if facts.omp_num_threads else "PyTorch chose so"
        yield Problem(
            "warning",
            f"PyTorch uses {facts.torch_threads} of {facts.kernel_threads} cores for what is not replaced ({why})",
            f"set OMP_NUM_THREADS={facts.kernel_threads}",
        )
    if facts.quota_cores is not None and facts.quota_cores < facts.cores:
        yield Problem(
            "notice",
            f"the container may use {facts.quota_cores:g} of the {facts.cores} cores it sees",
            f"the kernel takes {facts.kernel_threads} threads by itself; give the container more CPUs for more speed",
        )
    if facts.numa_nodes > 1:
        yield Problem(
            "warning",
            f"there are {facts.numa_nodes} NUMA nodes and weights are placed where they are first touched",
            "start programs with: numactl --interleave=all",
        )


def _memory(facts: Facts) -> Iterator[Problem]:
    if facts.available_bytes < LITTLE_MEMORY_BYTES:
        yield Problem("warning", f"{facts.available_bytes / GIB:.1f} GiB of memory are free", "end other programs before loading a model")


def _gpu(facts: Facts) -> Iterator[Problem]:
    if facts.gpu_device and not facts.gpus:
        built = f"is built for CUDA {facts.cuda}" if facts.cuda else "is a CPU build"
        yield Problem(
            "warning",
            f"there is an NVIDIA GPU and PyTorch cannot use it (this PyTorch {built})",
            "install the CUDA build (https://pytorch.org/get-started) and check the driver with nvidia-smi",
        )
    if facts.gpus:
        yield Problem(
            "notice",
            "experts on a GPU are new: no GPU has run them yet",
            "the shipped file 'hybrid' does; moegraft verify --rules hybrid checks it here",
        )
        if facts.pinned_limit_bytes is not None and facts.pinned_limit_bytes < GIB:
            yield Problem(
                "warning",
                f"a process may lock {facts.pinned_limit_bytes >> 20} MiB of memory, too little for fast transfers to the GPU",
                "raise it with 'ulimit -l unlimited', or --ulimit memlock=-1 for a container",
            )
    else:
        yield Problem("notice", "there is no GPU that PyTorch can use", "everything runs on the CPU")
