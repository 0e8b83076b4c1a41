"""`moegraft diff`: what changes between two rule files."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from moegraft.injection.cli.exits import FINDINGS, user_errors
from moegraft.injection.cli.options import PROGRAM, GgufOption, JsonOption, ModelOption, TrustOption, model_options
from moegraft.injection.cli.output import Json, Terminal, columns, open_terminal, plural, write_json

if TYPE_CHECKING:
    from moegraft.injection.differences import Difference
    from moegraft.injection.plan import Plan, Swap

_LAYER = re.compile(r"\.[0-9]+\.")
STOCK = "(stock)"


@user_errors(PROGRAM, wrong_rules=FINDINGS)
def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="Rule file, or the name of a shipped one.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    model: ModelOption = None,
    gguf: GgufOption = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Show what changes for a model from rule file A to rule file B, module by module; no weight is read.

    Exit code 0: nothing does; 1: something does, or the rules are wrong; 2: a file or the model cannot be read.
    """
    from moegraft.injection.cli.loading import open_meta_model
    from moegraft.injection.differences import differences
    from moegraft.injection.rules import read_rules
    from moegraft.operators.registry import load_registry

    registry = load_registry()
    rules = [read_rules(file, registry=registry) for file in (before, after)]
    meta_model = open_meta_model(model_options(model, gguf=gguf, trust_remote_code=trust_remote_code))
    first, second = (meta_model.plan(one, registry) for one in rules)
    found = differences(first, second)
    terminal = open_terminal()
    if json:
        write_json(terminal, _as_json(found, first, second))
    else:
        _write(found, before, after, first, second, terminal)
    if found:
        raise typer.Exit(FINDINGS)


def _write(found: list[Difference], before: str, after: str, first: Plan, second: Plan, terminal: Terminal) -> None:
    from moegraft.injection.plan import bytes_text
    from moegraft.injection.rules.rule import grouped

    if not found:
        terminal.write("the two come to the same\n")
        return
    groups: dict[tuple[str, str, str], list[str]] = {}
    for one in found:
        key = (_LAYER.sub(".{}.", one.module, count=1), _text(one.before), _text(one.after))
        groups.setdefault(key, []).append(one.module or "(the model)")
    rows = [("modules", before, after)]
    rows += [(" ".join(grouped(modules)), old, new) for (_, old, new), modules in groups.items()]
    rows.append(("in all", bytes_text(first.bytes_by_device), bytes_text(second.bytes_by_device)))
    terminal.write("\n".join(columns(rows)) + f"\n{plural(len(found), 'module')} differ\n")


def _text(swap: Swap | None) -> str:
    from moegraft.injection.plan import bytes_text, given_options

    if swap is None:
        return STOCK
    options = " ".join(given_options(swap.rule.kwargs, swap.options))
    return " ".join(part for part in (swap.operator, options, f"({bytes_text(swap.footprint.by_device)})") if part)


def _as_json(found: list[Difference], first: Plan, second: Plan) -> Json:
    return {
        "same": not found,
        "modules": [{"module": one.module, "before": _swap_json(one.before), "after": _swap_json(one.after)} for one in found],
        "bytes_before": first.bytes_by_device,
        "bytes_after": second.bytes_by_device,
    }


def _swap_json(swap: Swap | None) -> Json | None:
    if swap is None:
        return None
    held = dict(swap.footprint.by_device)
    return {"operator": swap.operator, "options": asdict(swap.options), "bytes_by_device": held}  # type: ignore[call-overload]
