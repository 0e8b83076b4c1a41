"""The rule file that comes of a KTransformers file: each of its rules named by line, with what became of it and why."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from moegraft.injection.ktransformers.convert import Outcome
from moegraft.injection.ktransformers.options import gpu_of
from moegraft.injection.rulefile.diagnostics import Diagnostic

WIDTH = 120
VARIABLES = {
    "weights": "int4   # of the routed experts: stored | bfloat16 | int8 | int4; with --gguf, stored keeps Q8_0 and Q4_0 as they are",
    "linear": "int8    # of the linear layers below: bfloat16 | float16 | int8 | int4, which is what KLinearMarlin has",
}


def written(outcomes: Sequence[Outcome], source: Path, model: str | None) -> str:
    """The file; `model` is what it was matched to, where it was."""
    mapped = sum(outcome.operator is not None for outcome in outcomes)
    doubtful = sum(outcome.doubtful for outcome in outcomes)
    head = [
        f"Written by 'moegraft init --from-ktransformers {source.name}' from {len(outcomes)} rules: {mapped} below, "
        f"{len(outcomes) - mapped} left out, of which {doubtful} could not be mapped. The line of each rule there is before it here.",
        f"Matched to {model}." if model else "Not matched to a model yet: moegraft check FILE --model M does that.",
        "Devices of what stays are for device_map= of optimize_and_load; with a GPU in a rule, the rest of the model goes there.",
    ]
    lines = [line for sentence in head for line in comment(sentence)]
    lines += ["version: 1", *_variables(outcomes), "rules:"]
    for outcome in outcomes:
        lines += [*_about(outcome, source), *outcome.lines]
    return "\n".join(lines) + "\n"


def comment(text: str) -> list[str]:
    """Comment lines; what a file of others held must not end its comment."""
    plain = re.sub(r"[^ -~]", "?", text)
    return [f"# {line}" for line in textwrap.wrap(plain, WIDTH, subsequent_indent="  ", break_long_words=True)]


def _about(outcome: Outcome, source: Path) -> Iterator[str]:
    rule = outcome.rule
    became = f"-> {outcome.operator}" if outcome.operator else "could not be mapped" if outcome.doubtful else "left out"
    yield from comment(f"{source.name}:{rule.position.line} {rule.operator_name or '(no class)'} {became}")
    for note in outcome.notes:
        yield from comment(f"  {note}")


def _variables(outcomes: Sequence[Outcome]) -> Iterator[str]:
    text = "\n".join(line for outcome in outcomes for line in outcome.lines)
    used = {name: value for name, value in VARIABLES.items() if f"${{{name}}}" in text}
    if "${gpu}" in text:
        gpu = gpu_of(outcome.rule for outcome in outcomes if outcome.operator == "hybrid_experts")
        used["gpu"] = f'"{gpu}"     # none | auto | cuda:0 | "cuda:0,cuda:1": beside the CPU; slots take the memory that the rest leaves'
    if used:
        yield "vars:"
        yield from (f"  {name}: {value}" for name, value in used.items())


def diagnostics(outcomes: Sequence[Outcome]) -> tuple[Diagnostic, ...]:
    """What was left out, at its place: a warning where it could not be mapped, a notice where that is as it should be."""
    found = []
    for outcome in outcomes:
        if outcome.operator is None:
            name = f"{outcome.rule.operator_name}: " if outcome.rule.operator_name else ""
            message = f"{name}left out: {'; '.join(outcome.notes)}"
            found.append(Diagnostic(outcome.rule.position, "warning" if outcome.doubtful else "notice", message))
    return tuple(found)
