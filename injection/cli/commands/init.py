"""`moegraft init`: a rule file for this machine and this model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moegraft.injection.cli.commands.doctor import measure_and_save
from moegraft.injection.cli.commands.from_ktransformers import from_ktransformers
from moegraft.injection.cli.commands.options import (
    BUNDLED,
    PROGRAM,
    GgufOption,
    GpuBandwidthOption,
    GpuMemoryOption,
    JsonOption,
    LinkBandwidthOption,
    ModelOption,
    StatedMachine,
    TrustOption,
    model_options,
    stated_machine,
)
from moegraft.injection.cli.commands.output import Json, write_json
from moegraft.injection.cli.commands.plan import as_json, gap_text
from moegraft.injection.cli.exits import FINDINGS, user_errors
from moegraft.injection.cli.option_groups import OptionsError
from moegraft.injection.cli.terminal import Terminal, open_terminal

if TYPE_CHECKING:
    from moegraft.injection.initial import Candidate
    from moegraft.injection.outline import Outline
    from moegraft.injection.predict.forecast import Machinery

Goal = Literal["decode", "prefill", "quality"]
STANDARD_OUTPUT = Path("-")
CONTEXT = 4096


@user_errors(PROGRAM, wrong_rules=FINDINGS)
def init(
    model: ModelOption = None,
    output: Annotated[
        Path, typer.Option("--output", "--out", "-o", metavar="FILE", help="The file to write; - is standard output.")
    ] = Path("rules.yaml"),
    from_ktransformers_file: Annotated[
        Path | None,
        typer.Option("--from-ktransformers", metavar="FILE", help="Say this file of KTransformers again; with --model, matched to it."),
    ] = None,
    goal: Annotated[
        Goal | None,
        typer.Option("--goal", help="Fast answers (decode, as without it), fast prompts, or the most exact that fits."),
    ] = None,
    ram: Annotated[str | None, typer.Option("--ram", metavar="SIZE", help="Host memory to plan for, as 64GiB; none: what is free.")] = None,
    gpu_memory: GpuMemoryOption = None,
    gpu_bandwidth: GpuBandwidthOption = None,
    link_bandwidth: LinkBandwidthOption = None,
    context: Annotated[
        int | None, typer.Option("--context", metavar="N", min=1, help=f"Tokens a sequence holds, prompt and answer; none: {CONTEXT}.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    gguf: GgufOption = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Write a rule file for this machine and this model: every combination of weight types is predicted and the best one taken.

    Measures this machine first where that has not been done (see doctor --measure). With a GPU, here or stated, all but the
    experts go there, and as many experts as there is room for. With --from-ktransformers nothing is predicted: that file's
    rules are said in ours, each with its line, and what is left out is listed. Exit code 0: it is written; 1: nothing fits, or
    no rule can be mapped; 2: a file or the model cannot be read, or the command is wrong.
    """
    stated = stated_machine(ram, gpu_memory, gpu_bandwidth, link_bandwidth)
    if output != STANDARD_OUTPUT and output.exists() and not force:
        raise OptionsError(f"{output} is there already; give --force to write over it, or --output FILE")
    terminal = open_terminal()
    if from_ktransformers_file is not None:
        of_prediction = {"goal": goal, "ram": ram, "gpu_memory": gpu_memory, "context": context, "gguf": gguf}
        _refuse_with_ktransformers({**of_prediction, "gpu_bandwidth": gpu_bandwidth, "link_bandwidth": link_bandwidth})
        from_ktransformers(from_ktransformers_file, model, output, terminal, trust_remote_code=trust_remote_code, json=json)
    else:
        wanted = Wanted(model, gguf, trust_remote_code, goal or "decode", context or CONTEXT, output)
        _predict_and_write(wanted, stated, terminal, json=json)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The file to write: for which model, to which end, where."""

    model: str | None
    gguf: str | None
    trust_remote_code: bool
    goal: Goal
    context: int
    output: Path

    @property
    def name(self) -> str:
        """The model as comments name it."""
        name = self.model or BUNDLED
        return name if self.gguf is None else f"{name} with the weights of {Path(self.gguf).name}"


def _predict_and_write(wanted: Wanted, stated: StatedMachine, terminal: Terminal, *, json: bool) -> None:
    from moegraft.injection.cli.commands.planned import machinery_of, outlined
    from moegraft.injection.initial import candidates, choose
    from moegraft.injection.initial_text import written
    from moegraft.injection.predict import store
    from moegraft.injection.predict.speed import Load
    from moegraft.operators.registry import load_registry

    machinery_of(None, stated)  # what is wrong with it shows before anything is measured, which takes a minute
    outline = outlined(model_options(wanted.model, gguf=wanted.gguf, trust_remote_code=wanted.trust_remote_code))
    machinery = machinery_of(store.load() or measure_and_save(terminal), stated)
    load = Load(wanted.context, 1, min(512, wanted.context))
    tried = candidates(outline, load, machinery, load_registry())
    chosen = choose(tried, wanted.goal)
    text = written(chosen, tried, outline, _about(wanted, outline, machinery), wanted.goal) if chosen else None
    if text is not None and wanted.output != STANDARD_OUTPUT:
        wanted.output.write_text(text, encoding="utf-8")
    if json:
        write_json(terminal, _as_json(chosen, tried, outline, wanted.output, text))
    elif chosen is not None and text is not None:
        _write(chosen, text, wanted.output, terminal)
    else:
        _refuse(tried, terminal)
    if chosen is None:
        raise typer.Exit(FINDINGS)


def _refuse_with_ktransformers(given: dict[str, object]) -> None:
    """
    Raises:
        OptionsError: an option that a file to say again leaves nothing to do for.
    """
    names = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
    if names:
        raise OptionsError(f"{', '.join(names)}: --from-ktransformers says a file again and predicts nothing; see moegraft plan for that")


def _about(wanted: Wanted, outline: Outline, machinery: Machinery) -> list[str]:
    from moegraft.operators.machine import probe_machine

    gpu = machinery.gpu
    lines = [
        f"Written by 'moegraft init' for {wanted.name} ({outline.model_class}), context {wanted.context:,} tokens,",
        f"on a machine with {probe_machine().cores} cores and {machinery.available_bytes / (1 << 30):.1f} GiB of memory to plan for",
    ]
    if gpu is None:
        return [*lines[:-1], f"{lines[-1]}, without a GPU."]
    each = f"{gpu.count} GPUs of {gpu.available_bytes / (1 << 30):.1f} GiB, each" if gpu.count > 1 else "a GPU of"
    size = "" if gpu.count > 1 else f" {gpu.available_bytes / (1 << 30):.1f} GiB,"
    return [*lines[:-1], f"{lines[-1]}, and {each}{size}", f"planned as {gpu.rates.describe()}."]


def _write(chosen: Candidate, text: str, output: Path, terminal: Terminal) -> None:
    from moegraft.injection.cli.commands.plan import speed_lines

    if output == STANDARD_OUTPUT:
        terminal.write(text)
        return
    choice, gpu = chosen.choice, chosen.forecast.gpu
    linears = f", linear layers as {choice.linears}" if choice.linears else ""
    needed = f"needs {chosen.forecast.memory.needed / (1 << 30):.2f} GiB"
    if gpu is not None:
        needed += (
            f" and {gpu.needed / (1 << 30):.2f} GiB of the GPU, where {gpu.experts_with_slot:,} of {gpu.experts:,} experts have a slot"
        )
    terminal.write(f"{output}: experts as {choice.experts}{linears}; {needed}\n")
    terminal.write("\n".join(speed_lines(chosen.forecast)) + "\n")
    terminal.notice(f"next: moegraft explain {output}, moegraft verify --rules {output}, local_chat --rules {output}")


def _refuse(tried: list[Candidate], terminal: Terminal) -> None:
    least = min(tried, key=lambda candidate: candidate.forecast.memory.needed).forecast
    terminal.write(f"nothing fits: for the smallest of {len(tried)}, {gap_text(least)}; ")
    terminal.write(f"what would fit: {'; '.join(least.would_fit)}\n")


def _as_json(chosen: Candidate | None, tried: list[Candidate], outline: Outline, output: Path, text: str | None) -> Json:
    return {
        "ok": chosen is not None,
        "output": str(output) if text is not None else None,
        "rules": text,
        "chosen": tried.index(chosen) if chosen is not None else None,
        "candidates": [
            {
                "experts": candidate.choice.experts,
                "linears": candidate.choice.linears,
                "gpu": candidate.choice.gpu,
                **as_json(candidate.forecast, outline),
            }
            for candidate in tried
        ],
    }
