"""`moegraft diff`: what changes between two rule files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from moegraft.injection.cli.commands.explain import swap_json
from moegraft.injection.cli.options import PROGRAM, GgufOption, JsonOption, ModelOption, ModelOptions, TrustOption
from moegraft.injection.cli.output import FINDINGS, Terminal, columns, open_terminal, plural, user_errors, write_json

if TYPE_CHECKING:
    from moegraft.injection.planning import Plan, Swap


@user_errors(PROGRAM, wrong_rules=FINDINGS)
def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A rule file, or the name of a shipped one.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The file to compare it with.")],
    model: ModelOption = None,
    gguf: GgufOption = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Show what changes for a model from rule file A to rule file B, module by module. No weights are read.

    Exit code 0: nothing changes; 1: something changes, or the rules are wrong; 2: a file or the model cannot be read.
    """
    from moegraft.injection.cli.models import open_meta_model
    from moegraft.injection.planning import plan
    from moegraft.injection.rules import read_rules
    from moegraft.operators.registry import load_registry

    registry = load_registry()
    rules = [read_rules(file, registry=registry) for file in (before, after)]
    meta_model = open_meta_model(ModelOptions(model, gguf=gguf, trust_remote_code=trust_remote_code))
    first, second = (plan(meta_model, rule_file, registry=registry) for rule_file in rules)
    found = differences(first, second)
    terminal = open_terminal()
    if json:
        modules = [
            {"module": pair.module, "before": pair.before and swap_json(pair.before), "after": pair.after and swap_json(pair.after)}
            for pair in found
        ]
        sums = {"bytes_before": first.bytes_by_device, "bytes_after": second.bytes_by_device}
        write_json(terminal, {"same": not found, "modules": modules, **sums})
    else:
        _write(found, (before, first), (after, second), terminal)
    if found:
        raise typer.Exit(FINDINGS)


@dataclass(frozen=True, slots=True)
class Difference:
    """A module that differs between two plans; a swap is None where the plan does not replace it."""

    module: str
    before: Swap | None
    after: Swap | None


def differences(before: Plan, after: Plan) -> list[Difference]:
    """Return every module whose operator, options or bytes differ."""
    first, second = ({swap.module: swap for swap in plan.swaps} for plan in (before, after))
    pairs = [Difference(module, first.get(module), second.get(module)) for module in dict.fromkeys([*first, *second])]
    return [pair for pair in pairs if _effect(pair.before) != _effect(pair.after)]


def _effect(swap: Swap | None) -> object:
    return None if swap is None else (swap.operator, swap.options, swap.footprint.by_device)


def _write(found: list[Difference], before: tuple[str, Plan], after: tuple[str, Plan], terminal: Terminal) -> None:
    from moegraft.injection.planning import LAYER, bytes_text
    from moegraft.injection.rules.rule import grouped

    if not found:
        terminal.write("no module differs\n")
        return
    groups: dict[tuple[str, str, str], list[str]] = {}
    for pair in found:
        key = (LAYER.sub(".{}.", pair.module, count=1), _text(pair.before), _text(pair.after))
        groups.setdefault(key, []).append(pair.module or "(the model)")
    rows = [("modules", before[0], after[0])]
    rows += [(" ".join(grouped(modules)), old, new) for (_, old, new), modules in groups.items()]
    rows.append(("total", bytes_text(before[1].bytes_by_device), bytes_text(after[1].bytes_by_device)))
    terminal.write("\n".join(columns(rows)) + f"\n{plural(len(found), 'module')} differ\n")


def _text(swap: Swap | None) -> str:
    from moegraft.injection.planning import bytes_text, given_options

    if swap is None:
        return "(stock)"
    options = " ".join(given_options(swap.rule.kwargs, swap.options))
    return " ".join(part for part in (swap.operator, options, f"({bytes_text(swap.footprint.by_device)})") if part)
