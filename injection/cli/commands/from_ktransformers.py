"""`moegraft init --from-ktransformers`: a rule file of KTransformers, said again in ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer

from moegraft.injection.cli.commands.options import model_options
from moegraft.injection.cli.commands.output import Json, diagnostic_json, plural, write_json
from moegraft.injection.cli.exits import FINDINGS
from moegraft.injection.cli.terminal import Terminal
from moegraft.injection.rulefile import Diagnostic, RuleErrors, read_rules

if TYPE_CHECKING:
    from moegraft.injection.ktransformers.convert import Outcome, Paths
    from moegraft.injection.outline import Outline

STANDARD_OUTPUT = Path("-")


def from_ktransformers(source: Path, model: str | None, output: Path, terminal: Terminal, *, trust_remote_code: bool, json: bool) -> None:
    """Reads their file, writes ours where at least one rule could be mapped, and says what was left out.

    Raises:
        RuleErrors: their file cannot be read, or is none.
        CheckpointError, UnsupportedModelError: no such model, or none that can be built.
        typer.Exit: with 1, where nothing is written.
    """
    from moegraft.injection.cli.commands.planned import outlined
    from moegraft.injection.ktransformers.convert import Paths, convert
    from moegraft.injection.ktransformers.reading import read_their_rules
    from moegraft.injection.ktransformers.writing import diagnostics, written

    rules = read_their_rules(source)
    outline = outlined(model_options(model, trust_remote_code=trust_remote_code)) if model is not None else None
    outcomes = convert(rules, Paths.typical() if outline is None else _paths(outline))
    text = written(outcomes, source, f"{model} ({outline.model_class})" if outline is not None else None)
    said = diagnostics(outcomes)
    mapped = sum(outcome.operator not in (None, "default") for outcome in outcomes)
    wrong = _wrong(text, outline) if mapped else ()
    ok = mapped > 0 and not any(found.severity == "error" for found in wrong)
    if ok and output != STANDARD_OUTPUT:
        output.write_text(text, encoding="utf-8")
    if json:
        write_json(terminal, _as_json(outcomes, (*said, *wrong), ok, output, text))
    else:
        _write(outcomes, (*said, *wrong), ok, output, text, terminal)
    if not ok:
        raise typer.Exit(FINDINGS)


def _paths(outline: Outline) -> Paths:
    from moegraft.injection.ktransformers.convert import Paths
    from moegraft.operators.structure import kinds

    found = {path: kinds(path, module, outline.skeleton) for path, module in outline.skeleton.named_modules()}
    experts, linears = (tuple(path for path, of in found.items() if kind in of) for kind in ("experts", "linear"))
    return Paths(experts, linears)


def _wrong(text: str, outline: Outline | None) -> tuple[Diagnostic, ...]:
    """What `check` says of the file before it is written."""
    from moegraft.operators.registry import load_registry

    registry = load_registry()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rules.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            rules = read_rules(path, registry=registry)
            return outline.plan(rules, registry).notices if outline is not None else ()
        except RuleErrors as error:
            return error.diagnostics


def _write(outcomes: Sequence[Outcome], said: Sequence[Diagnostic], ok: bool, output: Path, text: str, terminal: Terminal) -> None:
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


def _as_json(outcomes: Sequence[Outcome], said: Sequence[Diagnostic], ok: bool, output: Path, text: str) -> Json:
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
