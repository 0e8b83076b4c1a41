"""`moegraft init`: write a rule file for a machine and a model, or convert one of KTransformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moegraft.injection.cli.commands.doctor import measure_and_save, measure_disk_and_save
from moegraft.injection.cli.commands.plan import as_json, gap_text
from moegraft.injection.cli.options import (
    BUNDLED,
    PROGRAM,
    JsonOption,
    MetaModelOptions,
    ModelOptions,
    OptionsError,
    TargetOptions,
    option,
    takes_options,
)
from moegraft.injection.cli.output import FINDINGS, Json, Terminal, diagnostic_json, open_terminal, plural, user_errors, write_json
from moegraft.injection.rules import Diagnostic, RuleErrors, read_rules
from moegraft.operators.atomic_file import write_file
from moegraft.operators.errors import human_bytes

if TYPE_CHECKING:
    from moegraft.injection.candidates import Candidate
    from moegraft.injection.estimate.forecast import TargetMachine
    from moegraft.injection.meta_model import MetaModel
    from moegraft.injection.rules.ktransformers import Outcome


STANDARD_OUTPUT = Path("-")


def from_ktransformers(source: Path, options: ModelOptions, output: Path, terminal: Terminal, *, json: bool) -> None:
    """Convert a KTransformers rule file, write the result if at least one rule is converted, and report the rules that are left out.

    Raises:
        RuleErrors: `source` cannot be read, or is no rule file of KTransformers.
        CheckpointError, UnsupportedModelError: there is no such model, or it cannot be built.
        typer.Exit: with 1, if nothing is written.
    """
    from moegraft.injection.cli.models import open_meta_model
    from moegraft.injection.rules.ktransformers import Paths, convert, diagnostics, file_text, read_their_rules
    from moegraft.operators.structure import kinds

    rules = read_their_rules(source)
    meta_model = open_meta_model(options) if options.model is not None else None
    paths = Paths.typical()
    if meta_model is not None:
        by_path = {path: kinds(path, module, meta_model.skeleton) for path, module in meta_model.skeleton.named_modules()}
        experts, linears = (tuple(path for path, of in by_path.items() if kind in of) for kind in ("experts", "linear"))
        paths = Paths(experts, linears)
    outcomes = convert(rules, paths)
    text = file_text(outcomes, source, f"{options.model} ({meta_model.model_class})" if meta_model is not None else None)
    mapped = sum(outcome.operator not in (None, "default") for outcome in outcomes)
    checked = _check(text, meta_model) if mapped else ()
    findings = (*diagnostics(outcomes), *checked)
    ok = mapped > 0 and not any(finding.severity == "error" for finding in checked)
    if ok and output != STANDARD_OUTPUT:
        write_file(output, text)
    if json:
        write_json(terminal, _converted_as_json(outcomes, findings, ok, output, text))
    else:
        _write_converted(outcomes, findings, ok, output, text, terminal)
    if not ok:
        raise typer.Exit(FINDINGS)


def _check(text: str, meta_model: MetaModel | None) -> tuple[Diagnostic, ...]:
    """Return what `moegraft check` would report on the file."""
    from moegraft.injection.planning import plan
    from moegraft.operators.registry import load_registry

    registry = load_registry()
    try:
        rules = read_rules("rules.yaml", registry=registry, text=text)
        return plan(meta_model, rules, registry=registry).notices if meta_model is not None else rules.notices
    except RuleErrors as error:
        return error.diagnostics


def _write_converted(
    outcomes: Sequence[Outcome], findings: Sequence[Diagnostic], ok: bool, output: Path, text: str, terminal: Terminal
) -> None:
    for finding in findings:
        terminal.notice(str(finding))
    if not ok:
        reason = "" if any(outcome.operator for outcome in outcomes) else ": no rule could be converted"
        terminal.write(f"nothing is written{reason}\n")
        return
    if output == STANDARD_OUTPUT:
        terminal.write(text)
        return
    mapped = [outcome for outcome in outcomes if outcome.operator is not None]
    doubtful = sum(outcome.doubtful for outcome in outcomes)
    terminal.write(
        f"{output}: {plural(len(mapped), 'rule')} of {len(outcomes)}; {len(outcomes) - len(mapped)} left out, "
        f"{doubtful} of them because no equivalent is known\n"
    )
    terminal.notice(f"next: moegraft check {output} --model M, moegraft explain {output} --model M")


def _converted_as_json(outcomes: Sequence[Outcome], findings: Sequence[Diagnostic], ok: bool, output: Path, text: str) -> Json:
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
        "diagnostics": [diagnostic_json(finding) for finding in findings],
    }


Goal = Literal["decode", "prefill", "quality"]
CONTEXT = 4096


@user_errors(PROGRAM, wrong_rules=FINDINGS)
@takes_options
def init(
    options: MetaModelOptions,
    stated: TargetOptions,
    output: Annotated[Path, option("--output --out -o", "FILE", "The file to write; - is standard output.")] = Path("rules.yaml"),
    from_ktransformers_file: Annotated[
        Path | None, option("--from-ktransformers", "FILE", "Convert this KTransformers rule file; with --model, for that model.")
    ] = None,
    goal: Annotated[
        Goal | None,
        option("--goal", None, "Fast answers (decode, the default), fast prompts (prefill), or the most exact that fits (quality)."),
    ] = None,
    context: Annotated[int | None, option("--context", "N", f"Tokens of a sequence, prompt and answer; default: {CONTEXT}.", min=1)] = None,
    force: Annotated[bool, option("--force", None, "Overwrite an existing file.")] = False,
    json: JsonOption = False,
) -> None:
    """Write a rule file for this machine and this model: the best of all combinations of weight types, by prediction.

    Measures this machine first if it has not been measured (see doctor --measure). With a GPU, of this machine or stated,
    everything but the experts is placed there, and as many experts as fit. With --from-ktransformers nothing is predicted: the
    rules of that file are converted one by one, and those left out are listed. Exit code 0: the file is written; 1: nothing fits,
    or no rule can be converted; 2: a file or the model cannot be read, or the command is wrong.
    """
    if output != STANDARD_OUTPUT and output.exists() and not force:
        raise OptionsError(f"{output} exists; give --force to overwrite it, or --out with another FILE")
    terminal = open_terminal()
    if from_ktransformers_file is not None:
        given = {"goal": goal, **asdict(stated), "context": context, "gguf": options.gguf}
        names = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
        if names:
            raise OptionsError(f"{', '.join(names)}: --from-ktransformers converts a file and predicts nothing; use moegraft plan for that")
        from_ktransformers(from_ktransformers_file, options, output, terminal, json=json)
    else:
        _predict_and_write(options, goal or "decode", context or CONTEXT, stated, output, terminal, json=json)


def _predict_and_write(
    options: ModelOptions, goal: Goal, context: int, stated: TargetOptions, output: Path, terminal: Terminal, *, json: bool
) -> None:
    from moegraft.injection.candidates import candidates, choose, file_text, packed_folder
    from moegraft.injection.cli.models import open_meta_model, target_machine
    from moegraft.injection.estimate import measure as store
    from moegraft.injection.estimate.memory import Workload
    from moegraft.operators.registry import load_registry

    target_machine(None, stated)  # reports errors of the options before a measurement, which takes a minute
    meta_model = open_meta_model(options)
    target = target_machine(store.load() or measure_and_save(terminal), stated)
    load = Workload(context, 1, min(512, context))
    tried = candidates(meta_model, load, target, load_registry())
    chosen = choose(tried, goal)
    if chosen is None:  # host memory does not suffice: experts may stay in files
        if target.measured is not None and target.measured.disk is None:
            target = replace(target, measured=measure_disk_and_save(target.measured, packed_folder(), terminal))
        tried += candidates(meta_model, load, target, load_registry(), in_files=True)
        chosen = choose(tried, goal)
    text = file_text(chosen, tried, meta_model, _about(options, context, meta_model, target), goal) if chosen else None
    if text is not None and output != STANDARD_OUTPUT:
        write_file(output, text)
    if json:
        write_json(terminal, _as_json(chosen, tried, meta_model, output, text))
    elif chosen is not None and text is not None:
        _write(chosen, text, output, options.naming, terminal)
    else:
        _refuse(tried, terminal)
    if chosen is None:
        raise typer.Exit(FINDINGS)


def _about(options: ModelOptions, context: int, meta_model: MetaModel, target: TargetMachine) -> list[str]:
    from moegraft.operators.machine import probe_machine

    gpu = target.gpu
    name = f"{options.model or BUNDLED}{f' with the weights of {Path(options.gguf).name}' if options.gguf else ''}"
    lines = [
        f"Written by 'moegraft init' for {name} ({meta_model.model_class}), context {context:,} tokens,",
        f"on a machine with {probe_machine().cores} cores and {human_bytes(target.available_bytes)} of memory to plan for",
    ]
    if gpu is None:
        return [*lines[:-1], f"{lines[-1]}, without a GPU."]
    each = f"{gpu.count} GPUs of {human_bytes(gpu.available_bytes)}, each" if gpu.count > 1 else "a GPU of"
    size = "" if gpu.count > 1 else f" {human_bytes(gpu.available_bytes)},"
    return [*lines[:-1], f"{lines[-1]}, and {each}{size}", f"planned as {gpu.rates.describe()}."]


def _write(chosen: Candidate, text: str, output: Path, naming: str, terminal: Terminal) -> None:
    from moegraft.injection.candidates import packed_folder
    from moegraft.injection.cli.commands.plan import speed_lines

    if output == STANDARD_OUTPUT:
        terminal.write(text)
        return
    choice, gpu = chosen.choice, chosen.forecast.gpu
    linears = f", linear layers as {choice.linears}" if choice.linears else ""
    memory = chosen.forecast.memory
    needed = f"needs {memory.needed / (1 << 30):.2f} GiB"
    if choice.in_files:
        needed += f", {memory.frames / (1 << 30):.2f} of them for experts, which stay in files in {packed_folder()}"
    if gpu is not None:
        needed += (
            f" and {gpu.needed / (1 << 30):.2f} GiB of the GPU, where {gpu.experts_with_slot:,} of {gpu.experts:,} experts have a slot"
        )
    terminal.write(f"{output}: experts as {choice.experts}{linears}; {needed}\n")
    terminal.write("\n".join(speed_lines(chosen.forecast)) + "\n")
    commands = ("moegraft explain", "moegraft verify --rules", "local_chat --rules")
    terminal.notice(f"next: {', '.join(f'{command} {quote(str(output))}{naming}' for command in commands)}")


def _refuse(tried: list[Candidate], terminal: Terminal) -> None:
    least = min(tried, key=lambda candidate: candidate.forecast.memory.needed).forecast
    terminal.write(f"nothing fits: for the smallest of {len(tried)} candidates, {gap_text(least)}; ")
    terminal.write(f"changes that would make it fit: {'; '.join(least.would_fit)}\n")


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
                "in_files": candidate.choice.in_files,
                **as_json(candidate.forecast, meta_model),
            }
            for candidate in tried
        ],
    }
