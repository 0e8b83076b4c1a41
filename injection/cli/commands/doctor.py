"""`moegraft doctor`: show what this machine and this installation have, and how to fix what is wrong."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from moegraft.injection.cli.options import PROGRAM, JsonOption, OptionsError, option
from moegraft.injection.cli.output import Json, Terminal, columns, open_terminal, user_errors, write_result
from moegraft.operators.errors import error_sentence, human_bytes

if TYPE_CHECKING:
    from moegraft.injection.doctor import Facts, Problem
    from moegraft.injection.estimate.measure import Measurements, Network


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
    from moegraft.injection.doctor import find_problems, gather
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
