"""`moegraft check`: report the mistakes of rule files, by themselves and for a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moegraft.injection.cli.options import PROGRAM, GgufOption, JsonOption, ModelOptions, OptionsError, TrustOption, VarOption, option
from moegraft.injection.cli.output import (
    FINDINGS,
    USER_ERROR,
    Json,
    Terminal,
    diagnostic_json,
    open_terminal,
    plural,
    user_errors,
    write_json,
)
from moegraft.injection.rules import Diagnostic, RuleErrors, read_rules

if TYPE_CHECKING:
    from moegraft.injection.meta_model import MetaModel
    from moegraft.operators.registry import OperatorRegistry


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome for one file; `modules` and `bytes_by_device` are None without a model, and after an error."""

    rules: str
    findings: tuple[Diagnostic, ...]
    readable: bool = True
    modules: int | None = None
    bytes_by_device: Mapping[str, int] | None = field(default=None)

    def severities(self) -> set[str]:
        return {finding.severity for finding in self.findings}


@user_errors(PROGRAM)
def check(
    rules: Annotated[list[str], typer.Argument(metavar="RULES", help="Rule files, or names of shipped ones.")],
    model: Annotated[
        str | None, option("--model", "NAME", "Check the rules for this model as well: hub id or folder; config.json is enough.")
    ] = None,
    var: VarOption = None,
    gguf: GgufOption = None,
    strict: Annotated[bool, option("--strict", None, "Warnings count as errors.")] = False,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Check rule files, by themselves and with --model for that model. No weights are read.

    Exit code 0: no errors; 1: errors; 2: a file or the model cannot be read, or the command is wrong.
    """
    if gguf is not None and model is None:
        raise OptionsError(f"--gguf {gguf}: give --model, the folder or hub id that has the config of this file")
    options = ModelOptions(model, var=var or [], gguf=gguf, trust_remote_code=trust_remote_code)
    from moegraft.injection.cli.models import open_meta_model
    from moegraft.operators.registry import load_registry

    registry = load_registry()
    meta_model = open_meta_model(options) if model is not None else None
    checked = [_checked(file, options.vars(), meta_model, registry) for file in rules]
    terminal = open_terminal()
    if json:
        write_json(terminal, _as_json(checked, meta_model))
    else:
        _write(checked, meta_model, terminal)
    code = max(_exit_code(outcome, strict=strict) for outcome in checked)
    if code:
        raise typer.Exit(code)


def _checked(file: str, variables: Mapping[str, object], meta_model: MetaModel | None, registry: OperatorRegistry) -> Checked:
    from moegraft.injection.planning import plan

    try:
        rule_file = read_rules(file, vars=variables, registry=registry)
        if meta_model is None:
            return Checked(file, rule_file.notices)
        planned = plan(meta_model, rule_file, registry=registry)
    except RuleErrors as error:
        return Checked(file, error.diagnostics, readable=Path(error.diagnostics[0].position.file).is_file())
    return Checked(file, planned.notices, True, len(planned.swaps), planned.bytes_by_device)


def _exit_code(checked: Checked, *, strict: bool) -> int:
    if not checked.readable:
        return USER_ERROR
    severities = checked.severities()
    return FINDINGS if "error" in severities or (strict and "warning" in severities) else 0


def _write(checked: list[Checked], meta_model: MetaModel | None, terminal: Terminal) -> None:
    from moegraft.injection.planning import bytes_text

    for outcome in checked:
        for finding in outcome.findings:
            terminal.write(f"{finding}\n")
        if "error" in outcome.severities():
            continue
        taken = ""
        if outcome.modules is not None and meta_model is not None:
            sizes = bytes_text(outcome.bytes_by_device or {})
            taken = f"; it replaces {plural(outcome.modules, 'module')} of {meta_model.model_class}, which then holds {sizes}"
        terminal.write(f"{outcome.rules}: no errors{taken}\n")
    if meta_model is not None and meta_model.unloadable is not None:
        terminal.notice(f"notice: {meta_model.unloadable}")


def _as_json(checked: list[Checked], meta_model: MetaModel | None) -> Json:
    files: list[dict[str, Any]] = []
    for outcome in checked:
        files.append(
            {
                "rules": outcome.rules,
                "ok": "error" not in outcome.severities(),
                "diagnostics": [diagnostic_json(finding) for finding in outcome.findings],
                "modules": outcome.modules,
                "bytes_by_device": outcome.bytes_by_device,
            }
        )
    return {
        "ok": all(file["ok"] for file in files),
        "files": files,
        "model_class": meta_model.model_class if meta_model else None,
        "unloadable": meta_model.unloadable if meta_model else None,
    }
