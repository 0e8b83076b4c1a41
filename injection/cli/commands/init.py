"""`moegraft init`: a rule file for this machine and this model, or one converted from KTransformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moegraft.injection.cli.commands.doctor import measure_and_save
from moegraft.injection.cli.commands.plan import as_json, gap_text
from moegraft.injection.cli.options import (
    BUNDLED,
    PROGRAM,
    GgufOption,
    GpuBandwidthOption,
    GpuMemoryOption,
    JsonOption,
    LinkBandwidthOption,
    ModelOption,
    OptionsError,
    StatedMachine,
    TrustOption,
    model_options,
    stated_machine,
)
from moegraft.injection.cli.output import FINDINGS, Json, Terminal, diagnostic_json, open_terminal, plural, user_errors, write_json
from moegraft.injection.rules import Diagnostic, RuleErrors, read_rules

if TYPE_CHECKING:
    from moegraft.injection.estimate.forecast import TargetMachine
    from moegraft.injection.initial import Candidate
    from moegraft.injection.ktransformers import Outcome, Paths
    from moegraft.injection.meta_model import MetaModel


STANDARD_OUTPUT = Path("-")


def from_ktransformers(source: Path, model: str | None, output: Path, terminal: Terminal, *, trust_remote_code: bool, json: bool) -> None:
    """Reads their file, writes ours where at least one rule could be mapped, and says what was left out.

    Raises:
        RuleErrors: their file cannot be read, or is none.
        CheckpointError, UnsupportedModelError: no such model, or none that can be built.
        typer.Exit: with 1, where nothing is written.
    """
    from moegraft.injection.cli.loading import open_meta_model
    from moegraft.injection.ktransformers import Paths, convert, diagnostics, read_their_rules, written

    rules = read_their_rules(source)
    meta_model = open_meta_model(model_options(model, trust_remote_code=trust_remote_code)) if model is not None else None
    outcomes = convert(rules, Paths.typical() if meta_model is None else _paths(meta_model))
    text = written(outcomes, source, f"{model} ({meta_model.model_class})" if meta_model is not None else None)
    said = diagnostics(outcomes)
    mapped = sum(outcome.operator not in (None, "default") for outcome in outcomes)
    wrong = _wrong(text, meta_model) if mapped else ()
    ok = mapped > 0 and not any(found.severity == "error" for found in wrong)
    if ok and output != STANDARD_OUTPUT:
        output.write_text(text, encoding="utf-8")
    if json:
        write_json(terminal, _converted_as_json(outcomes, (*said, *wrong), ok, output, text))
    else:
        _write_converted(outcomes, (*said, *wrong), ok, output, text, terminal)
    if not ok:
        raise typer.Exit(FINDINGS)


def _paths(meta_model: MetaModel) -> Paths:
    from moegraft.injection.ktransformers import Paths
    from moegraft.operators.structure import kinds

    found = {path: kinds(path, module, meta_model.skeleton) for path, module in meta_model.skeleton.named_modules()}
    experts, linears = (tuple(path for path, of in found.items() if kind in of) for kind in ("experts", "linear"))
    return Paths(experts, linears)


def _wrong(text: str, meta_model: MetaModel | None) -> tuple[Diagnostic, ...]:
    """What `check` says of the file before it is written."""
    from moegraft.operators.registry import load_registry

    registry = load_registry()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rules.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            rules = read_rules(path, registry=registry)
            return meta_model.plan(rules, registry).notices if meta_model is not None else rules.notices
        except RuleErrors as error:
            return error.diagnostics


def _write_converted(
    outcomes: Sequence[Outcome], said: Sequence[Diagnostic], ok: bool, output: Path, text: str, terminal: Terminal
) -> None:
    for found in said:
        terminal.notice(str(found))
    if not ok:
        terminal.write("nothing is written: no rule could be mapped\n" if not any(o.operator for o in outcomes) else "nothing is written\n")
        return
    if output == STANDARD_OUTPUT:
        terminal.write(text)
        return
    mapped = [outcome for outcome in outcomes if outcome.operator is not None]
    doubtful = sum(outcome.doubtful for outcome in outcomes)
    terminal.write(
        f"{output}: {plural(len(mapped), 'rule')} of {len(outcomes)}; {len(outcomes) - len(mapped)} left out, "
        f"{doubtful} of them because nothing here is known to stand for them\n"
    )
    terminal.notice(f"next: moegraft check {output} --model M, moegraft explain {output} --model M")


def _converted_as_json(outcomes: Sequence[Outcome], said: Sequence[Diagnostic], ok: bool, output: Path, text: str) -> Json:
    return {
        "ok": ok,
        "output": str(output) if ok else None,
        "rules": text if ok else None,
        "source": [
            {
                "line": outcome.rule.position.line,
                "class": outcome.rule.operator,
                "operator": outcome.operator,
                "mapped": outcome.operator is not None,
                "doubtful": outcome.doubtful,
                "notes": outcome.notes,
            }
            for outcome in outcomes
        ],
        "diagnostics": [diagnostic_json(found) for found in said],
    }


Goal = Literal["decode", "prefill", "quality"]
CONTEXT = 4096


@user_errors(PROGRAM, wrong_rules=FINDINGS)
def init(
    model: ModelOption = None,
    output: Annotated[
        Path, typer.Option("--output", "--out", "-o", metavar="FILE", help="The file to write; - is standard output.")
    ] = Path("rules.yaml"),
    from_ktransformers_file: Annotated[
        Path | None,
        typer.Option("--from-ktransformers", metavar="FILE", help="Convert this KTransformers rule file; with --model, for that model."),
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
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
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
        raise OptionsError(f"{output} exists; give --force to overwrite it, or --output FILE")
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
    from moegraft.injection.cli.loading import machinery_of, open_meta_model
    from moegraft.injection.estimate import measure as store
    from moegraft.injection.estimate.planned import Workload
    from moegraft.injection.initial import candidates, choose, written
    from moegraft.operators.registry import load_registry

    machinery_of(None, stated)  # what is wrong with it shows before anything is measured, which takes a minute
    meta_model = open_meta_model(model_options(wanted.model, gguf=wanted.gguf, trust_remote_code=wanted.trust_remote_code))
    machinery = machinery_of(store.load() or measure_and_save(terminal), stated)
    load = Workload(wanted.context, 1, min(512, wanted.context))
    tried = candidates(meta_model, load, machinery, load_registry())
    chosen = choose(tried, wanted.goal)
    text = written(chosen, tried, meta_model, _about(wanted, meta_model, machinery), wanted.goal) if chosen else None
    if text is not None and wanted.output != STANDARD_OUTPUT:
        wanted.output.write_text(text, encoding="utf-8")
    if json:
        write_json(terminal, _as_json(chosen, tried, meta_model, wanted.output, text))
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
        raise OptionsError(f"{', '.join(names)}: --from-ktransformers converts a file and predicts nothing; see moegraft plan for that")


def _about(wanted: Wanted, meta_model: MetaModel, machinery: TargetMachine) -> list[str]:
    from moegraft.operators.machine import probe_machine

    gpu = machinery.gpu
    lines = [
        f"Written by 'moegraft init' for {wanted.name} ({meta_model.model_class}), context {wanted.context:,} tokens,",
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


def _as_json(chosen: Candidate | None, tried: list[Candidate], meta_model: MetaModel, output: Path, text: str | None) -> Json:
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
                **as_json(candidate.forecast, meta_model),
            }
            for candidate in tried
        ],
    }
