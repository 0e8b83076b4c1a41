"""`moegraft explain`: which rule takes which module, and what that costs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moegraft.injection.cli.exits import FINDINGS, user_errors
from moegraft.injection.cli.options import (
    PROGRAM,
    GgufOption,
    JsonOption,
    ModelOption,
    RulesArgument,
    TrustOption,
    VarOption,
    model_options,
)
from moegraft.injection.cli.output import Json, Terminal, columns, diagnostic_json, open_terminal, plural, write_json

if TYPE_CHECKING:
    from moegraft.injection.checks import Trial
    from moegraft.injection.explanation import Explanation
    from moegraft.injection.meta_model import MetaModel
    from moegraft.injection.plan import Swap
    from moegraft.injection.rules import Rule

_LAYER = re.compile(r"\.[0-9]+\.")
HEADER = ("modules", "rule", "from", "operator", "options", "bytes")


@user_errors(PROGRAM, wrong_rules=FINDINGS)
def explain(
    rules: RulesArgument = None,
    model: ModelOption = None,
    module: Annotated[
        str | None, typer.Option("--module", metavar="PATH", help="Only this module: which rules were tried on it, and why they lost.")
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="A line for each module instead of one for a run of layers.")] = False,
    var: VarOption = None,
    gguf: GgufOption = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Show which rule takes which module of a model, with which operator, options and bytes; no weight is read.

    Exit code 0: the rules fit the model; 1: they do not; 2: a file or the model cannot be read, or the command is wrong.
    """
    from moegraft.injection.cli.loading import model_and_rules
    from moegraft.injection.explanation import explain as explain_rules

    terminal = open_terminal()
    open_meta_model = model_and_rules(model_options(model, rules, var, gguf=gguf, trust_remote_code=trust_remote_code))
    found = explain_rules(open_meta_model.meta_model, open_meta_model.rules, open_meta_model.registry)
    tried = found.trials(module) if module is not None else None
    if json:
        write_json(terminal, _as_json(found, open_meta_model.meta_model, tried))
    elif tried is not None and module is not None:
        _write_trials(module, tried, found, terminal)
    else:
        _write_table(found, open_meta_model.meta_model, each, terminal)
    if found.plan is None:
        raise typer.Exit(FINDINGS)


def _write_table(found: Explanation, open_meta_model: MetaModel, each: bool, terminal: Terminal) -> None:
    from moegraft.injection.plan import bytes_text, human_bytes

    if found.plan is not None:
        rows = [*_swap_rows(found.plan.swaps, each), *_left_rows(found)]
        rows.append(("everything else", "-", "-", "(stock)", "", f"{human_bytes(found.plan.rest_bytes)} cpu"))
        terminal.write("\n".join(columns([HEADER, *rows])) + "\n")
        swaps = plural(len(found.plan.swaps), "module")
        terminal.write(f"{open_meta_model.model_class}: {swaps} replaced; in all {bytes_text(found.plan.bytes_by_device)}\n")
    for finding in found.findings:
        terminal.write(f"{finding}\n")
    if open_meta_model.unloadable is not None:
        terminal.notice(f"notice: {open_meta_model.unloadable}")


def _swap_rows(swaps: Sequence[Swap], each: bool) -> Iterable[tuple[str, ...]]:
    from moegraft.injection.plan import bytes_text, given_options, total_bytes
    from moegraft.injection.rules.rule import grouped

    groups: dict[tuple[str, int], list[Swap]] = {}
    for swap in swaps:
        form = swap.module if each else _LAYER.sub(".{}.", swap.module, count=1)
        groups.setdefault((form, id(swap.rule)), []).append(swap)
    for group in groups.values():
        rule = group[0].rule
        paths = " ".join(grouped(swap.module or "(the model)" for swap in group))
        options = " ".join(given_options(rule.kwargs, group[0].options))
        held = bytes_text(total_bytes(swap.footprint.by_device for swap in group))
        yield paths, rule.id, _line(rule), group[0].operator, options, held


def _left_rows(found: Explanation) -> Iterable[tuple[str, ...]]:
    from moegraft.injection.rules.rule import grouped

    for index, paths in found.left_alone.items():
        rule = found.rules.rules[index]
        yield " ".join(grouped(path or "(the model)" for path in paths)), rule.id, _line(rule), "default", "", "(stays)"


def _line(rule: Rule) -> str:
    return f"{Path(rule.position.file).name}:{rule.position.line}"


def _write_trials(module: str, tried: Sequence[Trial], found: Explanation, terminal: Terminal) -> None:
    from moegraft.injection.plan import bytes_text

    kinds = ", ".join(sorted(found.modules.kinds(module)))
    shown = module or "(the model)"
    terminal.write(f"{shown}: {type(found.modules[module]).__name__}{f', of kind {kinds}' if kinds else ''}\n")
    rows = [(trial.outcome, f"{_line(trial.rule)}:", f"rule '{trial.rule.id}':", trial.reason) for trial in tried]
    terminal.write("\n".join(f"  {line}" for line in columns(rows)) + "\n")
    swap = next((swap for swap in found.plan.swaps if swap.module == module), None) if found.plan else None
    if swap is not None:
        options = ", ".join(f"{name}={value}" for name, value in asdict(swap.options).items())  # type: ignore[call-overload]
        terminal.write(f"  replaced by {swap.operator} ({options}): {bytes_text(swap.footprint.by_device)}\n")
    elif not any(trial.outcome == "won" for trial in tried):
        around = [swap for swap in (found.plan.swaps if found.plan else ()) if not swap.in_place and module.startswith(f"{swap.module}.")]
        gone = f"it goes with {around[0].module}, which rule '{around[0].rule.id}' replaces" if around else "it stays as it is"
        terminal.write(f"  no rule takes it: {gone}\n")
    for finding in found.findings:
        terminal.write(f"{finding}\n")


def _as_json(found: Explanation, open_meta_model: MetaModel, tried: Sequence[Trial] | None) -> Json:
    plan = found.plan
    return {
        "ok": plan is not None,
        "model_class": open_meta_model.model_class,
        "files": found.rules.files,
        "modules": [_swap_json(swap) for swap in plan.swaps] if plan else [],
        "left_alone": [{"module": path, **_rule_json(found.rules.rules[i])} for i, paths in found.left_alone.items() for path in paths],
        "rest_bytes": plan.rest_bytes if plan else None,
        "replaced_bytes": plan.replaced_bytes if plan else None,
        "bytes_by_device": plan.bytes_by_device if plan else None,
        "unloadable": open_meta_model.unloadable,
        "diagnostics": [diagnostic_json(finding) for finding in found.findings],
        "trials": None
        if tried is None
        else [{**_rule_json(trial.rule), "outcome": trial.outcome, "reason": trial.reason} for trial in tried],
    }


def _rule_json(rule: Rule) -> Json:
    return {"rule": rule.id, "file": rule.position.file, "line": rule.position.line}


def _swap_json(swap: Swap) -> Json:
    options = asdict(swap.options)  # type: ignore[call-overload]
    given = {"module": swap.module, **_rule_json(swap.rule), "operator": swap.operator, "options": options}
    return {**given, "bytes_by_device": dict(swap.footprint.by_device)}
