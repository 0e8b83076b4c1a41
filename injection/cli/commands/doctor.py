"""`moegraft doctor`: show what this machine and this installation have, and the problems found in them, each with a fix."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from moegraft.injection.cli.options import PROGRAM, JsonOption, OptionsError, option
from moegraft.injection.cli.output import Json, Terminal, columns, open_terminal, user_errors, write_result
from moegraft.operators.errors import error_sentence, human_bytes

if TYPE_CHECKING:
    from moegraft.injection.estimate.measure import Measurements, Network
    from moegraft.operators.cpu import InstructionSet
    from moegraft.operators.machine import Gpu

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
    import psutil
    import torch

    from moegraft.operators.cpu import instruction_sets, kernel_in_use
    from moegraft.operators.machine import cpu_info, probe_machine

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
    from packaging.requirements import Requirement

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
    from packaging.specifiers import SpecifierSet

    try:
        installed = version(name)
    except PackageNotFoundError:
        return Package(name, None, wanted, optional)
    return Package(name, installed, wanted, SpecifierSet(wanted).contains(installed, prereleases=True))


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


@user_errors(PROGRAM)
def doctor(
    measure: Annotated[
        bool, option("--measure", None, "Measure memory, kernels and layers (about a minute) and save the rates for plan and init.")
    ] = False,
    disk: Annotated[Path | None, option("--disk", "FOLDER", "With --measure, the disk of this folder as well, by a file of 1 GiB.")] = None,
    autoload: Annotated[
        Literal["on", "off"] | None,
        option("--autoload", None, "Let programs that load a folder saved with rules do so without an import of moegraft, and exit."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show what this machine and installation have, test the kernel, and list the problems with their fixes.

    Started in several processes by torchrun, --measure measures the messages between them instead. With --autoload on, importing torch in
    this environment registers moegraft in transformers; TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps a program from it.

    Exit code 0: no errors; 1: errors; 2: the kernel cannot be used.
    """
    from moegraft.injection.cli.models import quiet_libraries
    from moegraft.injection.estimate import measure as store
    from moegraft.injection.parallel import process_count

    terminal = open_terminal()
    if autoload is not None:
        _switch_autoload(autoload == "on", terminal)
        return
    quiet_libraries()
    if disk is not None and not measure:
        raise OptionsError("--disk names what --measure measures as well; give both")
    if measure and process_count() > 1:
        _measure_network(terminal, as_json=json)
        return
    facts = gather()
    measured = measure_and_save(terminal, disk) if measure else store.load()
    problems = find_problems(facts)
    data = _as_json(facts, problems, measured)
    write_result(terminal, _lines(facts, problems, measured), data, as_json=json, ok=data["ok"])


def _switch_autoload(on: bool, terminal: Terminal) -> None:
    from moegraft.operators.autoload import MARKER, is_installed, switch

    if on and not is_installed():
        raise OptionsError("--autoload: torch finds no installed moegraft in this environment; install it with pip")
    try:
        switch(on=on)
    except OSError as error:
        raise OptionsError(f"--autoload: {error_sentence(error)}; run this as the owner of the environment") from error
    terminal.notice(f"importing torch {'registers' if on else 'does not register'} moegraft in transformers ({MARKER})")


def _measure_network(terminal: Terminal, *, as_json: bool) -> None:
    from moegraft.injection.estimate.measure import measure_network

    network = measure_network()
    if network is None:
        return
    rows = [("rank", "host", "us for a layer", "Gbit/s")]
    rows += [(str(rank), link.host, f"{link.layer_us:.0f}", f"{link.gbit:.1f}") for rank, link in enumerate(network.links, 1)]
    rows.append(("all", "", f"{network.all_us:.0f}", ""))
    write_result(terminal, columns(rows, right=(0, 2, 3)), asdict(network), as_json=as_json)
    _save(network, terminal, "plan --nodes assumes a network")


def measure_and_save(terminal: Terminal, disk: Path | None = None) -> Measurements:
    """Measure this machine's rates and save them; where they cannot be saved, a warning gives the reason.

    Args:
        disk: a folder on the disk to measure; by default the figures of an earlier one are kept.
    """
    from moegraft.injection.estimate import measure as store
    from moegraft.injection.estimate.measure import measure

    earlier = store.load()
    try:
        measured = measure(lambda text: terminal.notice(f"measuring: {text}"), disk)
    except OSError as error:
        raise OptionsError(f"--disk {disk}: {error.strerror or error}") from error
    if disk is None and earlier is not None:
        measured = replace(measured, disk=earlier.disk)
    _save(measured, terminal)
    if measured.busy:
        terminal.notice(
            f"other programs were running (load {measured.load:.1f} per core): measure again when they are done", style="yellow"
        )
    return measured


def measure_disk_and_save(measured: Measurements, folder: Path, terminal: Terminal) -> Measurements:
    """Add the rates of a folder's disk to measurements and save them; where it cannot be measured, a warning gives the reason."""
    from moegraft.injection.estimate.measure import measure_disk

    terminal.notice(f"measuring: disk of {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        measured = replace(measured, disk=measure_disk(folder))
    except OSError as error:
        terminal.notice(f"the disk is not measured: {error_sentence(error)}", style="yellow")
        return measured
    _save(measured, terminal)
    return measured


def _save(figures: Measurements | Network, terminal: Terminal, otherwise: str = "the next command measures again") -> None:
    from moegraft.injection.estimate.measure import save

    try:
        terminal.notice(f"saved in {save(figures)}")
    except OSError as error:
        terminal.notice(f"not saved, so that {otherwise}: {error_sentence(error)}", style="yellow")


def _lines(facts: Facts, problems: list[Problem], measured: Measurements | None) -> list[str]:
    lines = columns(_rows(facts))
    if measured is not None:
        lines += ["", *_measured_lines(measured)]
    else:
        lines += ["", "speed: not measured with these versions; run: moegraft doctor --measure"]
    return [*lines, "", *(map(str, problems) if problems else ["no problems"])]


def _rows(facts: Facts) -> list[tuple[str, str]]:
    packages = [f"{package.name} {package.version}" for package in facts.packages if package.version]
    absent = [package.name for package in facts.packages if not package.version]
    return [
        ("Python", f"{facts.python}, {facts.platform}"),
        ("packages", ", ".join(packages) + (f"; not installed: {', '.join(absent)}" if absent else "")),
        ("CUDA", f"PyTorch is built for {facts.cuda}" if facts.cuda else "this PyTorch is a CPU build"),
        ("compiler", facts.compiler or "none"),
        ("CPU", f"{facts.cpu}; {', '.join(sorted(facts.cpu_flags)) or 'flags unknown'}"),
        ("kernel", _kernel_text(facts)),
        ("prompts", _prompts_text(facts)),
        ("cores", _cores_text(facts)),
        ("NUMA nodes", f"{facts.numa_nodes}{', over which weights are divided' if facts.divides_weights else ''}"),
        ("memory", _memory_text(facts)),
        (
            "GPUs",
            ", ".join(f"{gpu.name}, {human_bytes(gpu.free_bytes)} of {human_bytes(gpu.total_bytes)} free" for gpu in facts.gpus) or "none",
        ),
    ]


def _kernel_text(facts: Facts) -> str:
    states = []
    for isa in facts.instruction_sets:
        state = f"wrong in {', '.join(isa.wrong)}" if isa.wrong else "tested" if isa.usable else "not on this CPU"
        states.append(f"{isa.name} ({state}{', in use' if isa.name == facts.isa else ''})")
    return ", ".join(states)


def _prompts_text(facts: Facts) -> str:
    if not facts.matrix_tokens:
        return "vector tiles"
    served = ", ".join(f"{weight_type} from {tokens} tokens an expert" for weight_type, tokens in facts.matrix_tokens.items())
    return f"matrix kernel of {facts.isa}: {served}; otherwise vector tiles"


def _cores_text(facts: Facts) -> str:
    quota = f", {facts.quota_cores:g} by quota" if facts.quota_cores is not None else ""
    return f"{facts.cores} available{quota}; threads: {facts.kernel_threads} of the kernel, {facts.torch_threads} of PyTorch"


def _memory_text(facts: Facts) -> str:
    limit = f", limit {human_bytes(facts.memory_limit_bytes)}" if facts.memory_limit_bytes is not None else ""
    pinned = "no limit" if facts.pinned_limit_bytes is None else f"{facts.pinned_limit_bytes >> 20} MiB"
    swap = f", {human_bytes(facts.swap_bytes)} of swap" if facts.swap_bytes else ", no swap"
    return f"{human_bytes(facts.available_bytes)} of {human_bytes(facts.total_bytes)} free{limit}{swap}; lockable: {pinned}"


def _measured_lines(measured: Measurements) -> list[str]:
    rows = [("measured", "one token, GB/s", "many tokens, GFLOP/s"), ("plain memory", f"{measured.read_gbps:.1f}", "")]
    for kind, rates in (("experts", measured.experts), ("linear", measured.linear)):
        rows += [(f"{kind}, {name}", f"{rate.decode_gbps:.1f}", f"{rate.prefill_gflops:.0f}") for name, rate in rates.items()]
    if measured.attention_gflops is not None:
        rows.append(("attention in training", "", f"{measured.attention_gflops:.0f}"))
    gpu = [each.describe() for each in (measured.gpu, measured.disk) if each is not None]
    overhead = f"time of a decoder layer outside kernels: {1e3 * measured.layer_overhead_ms:.0f} us in Python"
    if measured.step_overhead_ms is not None:
        overhead += f", {1e3 * measured.step_overhead_ms:.0f} us in a decode step that is one native program"
    return [*columns(rows, right=(1, 2)), *gpu, overhead]


def _as_json(facts: Facts, problems: list[Problem], measured: Measurements | None) -> Json:
    return {
        "ok": not any(problem.severity == "error" for problem in problems),
        "facts": {**asdict(facts), "cpu_flags": sorted(facts.cpu_flags)},
        "problems": [asdict(problem) for problem in problems],
        "measured": asdict(measured) if measured else None,
    }
