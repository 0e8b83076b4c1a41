"""`moegraft plan`: does it fit this machine, and how fast will it be?"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from moegraft.injection.cli.commands.options import (
    PROGRAM,
    GgufOption,
    JsonOption,
    ModelOption,
    RulesArgument,
    TrustOption,
    VarOption,
    model_options,
)
from moegraft.injection.cli.commands.output import Json, columns, write_json
from moegraft.injection.cli.exits import FINDINGS, user_errors
from moegraft.injection.cli.option_groups import OptionsError
from moegraft.injection.cli.terminal import Terminal, open_terminal

if TYPE_CHECKING:
    from moegraft.injection.outline import Outline
    from moegraft.injection.predict.forecast import Forecast

_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[KMGT]?)(?:i?B)?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@user_errors(PROGRAM, wrong_rules=FINDINGS)
def plan(
    rules: RulesArgument = None,
    model: ModelOption = None,
    context: Annotated[int, typer.Option("--context", metavar="N", min=1, help="Tokens a sequence holds, prompt and answer.")] = 4096,
    prompt: Annotated[int, typer.Option("--prompt", metavar="N", min=1, help="Tokens of a prompt, computed at once.")] = 512,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Sequences at once.")] = 1,
    ram: Annotated[str | None, typer.Option("--ram", metavar="SIZE", help="Host memory to plan for, as 64GiB; none: what is free.")] = None,
    var: VarOption = None,
    gguf: GgufOption = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Show the memory a model takes by these rules, at rest, while loading and running, and its predicted speed; no weight is read.

    Speed is predicted from what `moegraft doctor --measure` measured. Exit code 0: it fits; 1: it does not, or the rules are
    wrong; 2: a file or the model cannot be read, or the command is wrong.
    """
    options, memory = model_options(model, rules, var, gguf=gguf, trust_remote_code=trust_remote_code), parse_size(ram, "--ram")
    from moegraft.injection.cli.commands.planned import outlined_rules
    from moegraft.injection.predict import store
    from moegraft.injection.predict.forecast import forecast
    from moegraft.injection.predict.speed import Load
    from moegraft.operators.machine import probe_machine

    found = outlined_rules(options)
    planned = found.outline.plan(found.rules, found.registry)
    figures = forecast(
        found.outline,
        planned,
        Load(context, batch, min(prompt, context)),
        available_bytes=probe_machine().available_bytes if memory is None else memory,
        measured=store.load(),
        registry=found.registry,
    )
    terminal = open_terminal()
    if json:
        write_json(terminal, as_json(figures, found.outline))
    else:
        _write(figures, found.outline, terminal)
    if not figures.fits:
        raise typer.Exit(FINDINGS)


def parse_size(text: str | None, option: str) -> int | None:
    """Bytes of `64GiB`, `64G` or `64GB`, all of which mean 64 * 1024**3 as memory is sold; None of None.

    Raises:
        OptionsError: the text is no size.
    """
    if text is None:
        return None
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise OptionsError(f"{option} {text}: give a size such as 24GiB")
    return int(float(found["number"]) * 1024 ** _POWERS[found["unit"].upper()])


def _write(figures: Forecast, outlined: Outline, terminal: Terminal) -> None:
    from moegraft.injection.planning.table import human_bytes

    memory, load = figures.memory, figures.load
    exact = "" if figures.cache.exact else ", from the config's numbers of heads"
    rows = [
        ("weights", human_bytes(memory.weights), ""),
        ("at rest", human_bytes(memory.at_rest), f"with {human_bytes(memory.program)} of Python and its libraries"),
        ("peak of loading", human_bytes(memory.peak_loading), ""),
        ("KV cache", human_bytes(memory.kv_cache), f"{load.batch} x {load.context:,} tokens{exact}"),
        ("running", human_bytes(memory.running), f"with about {human_bytes(memory.activations)} for a prompt of {load.prompt:,} tokens"),
        ("free", human_bytes(figures.available_bytes), ""),
    ]
    lines = [f"{outlined.model_class} by {figures.plan.files[0]}", *columns(rows, right=(1,)), *speed_lines(figures)]
    lines += [str(notice) for notice in figures.plan.notices]
    if outlined.unloadable is not None:
        lines.append(f"notice: {outlined.unloadable}")
    if not figures.fits:
        needed, free = human_bytes(memory.needed), human_bytes(figures.available_bytes)
        lines += [f"it does not fit: {needed} are needed and {free} are free; what would fit:"]
        lines += [f"  - {sentence}" for sentence in figures.would_fit]
    terminal.write("\n".join(lines) + "\n")


def speed_lines(figures: Forecast) -> list[str]:
    """The prediction in words."""
    speed = figures.speed
    if speed is None or speed.decode_tokens_s is None or speed.prefill_tokens_s is None:
        return [f"speed: {figures.no_speed}"]
    each = f" in all {figures.load.batch} sequences" if figures.load.batch > 1 else ""
    rough = "; rough: other programs ran while the rates were measured" if figures.rough else ""
    return [f"predicted: decode {speed.decode_tokens_s:.3g} tokens/s{each}, prefill {speed.prefill_tokens_s:.3g} tokens/s{rough}"]


def as_json(figures: Forecast, outlined: Outline) -> Json:
    """All figures, in bytes and tokens a second."""
    memory = figures.memory
    sums = {"at_rest": memory.at_rest, "peak_loading": memory.peak_loading, "running": memory.running, "needed": memory.needed}
    return {
        "ok": figures.fits,
        "model_class": outlined.model_class,
        "load": asdict(figures.load),
        "memory_bytes": {**asdict(memory), **sums, "available": figures.available_bytes},
        "bytes_by_device": figures.plan.bytes_by_device,
        "speed": asdict(figures.speed) if figures.speed else None,
        "no_speed": figures.no_speed,
        "rough": figures.rough,
        "would_fit": figures.would_fit,
        "unloadable": outlined.unloadable,
    }
