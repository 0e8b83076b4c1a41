"""The rule file that was chosen, with its reasons in comments."""

from __future__ import annotations

import re
from collections.abc import Sequence

from moegraft.injection.initial import Candidate, Goal
from moegraft.injection.outline import Outline
from moegraft.injection.predict.speed import tokens_text
from moegraft.injection.verify.tolerances import BY_WEIGHTS


def written(chosen: Candidate, found: Sequence[Candidate], outline: Outline, about: Sequence[str], goal: Goal) -> str:
    """The file; `about` are lines on the machine and the model."""
    comments = [*about, f"Goal: {goal}. All that were tried, the one below marked with >:", *_table(chosen, found), *_cost(chosen)]
    # A model's name may hold anything, and a comment must stay one.
    head = [f"# {re.sub(r'[^ -~]', '?', line)}".rstrip() for line in comments]
    return "\n".join([*head, "version: 1", f"requires: {{model_type: {outline.model_type}}}", "rules:"]) + "\n" + chosen.rules


def _table(chosen: Candidate, found: Sequence[Candidate]) -> list[str]:
    lines = [f"  {'':4} {'experts':8} {'linear':8} {'memory':>12} {'of the GPU':>12}  {'decode':>14}  {'prompts':>14}"]
    for candidate in found:
        choice, gpu = candidate.choice, candidate.forecast.gpu
        memory, of_gpu = _gib(candidate.forecast.memory.needed), _gib(gpu.needed) if gpu is not None else "-"
        goals: tuple[Goal, ...] = ("decode", "prefill")
        speeds = [tokens_text(speed) if (speed := candidate.speed(goal)) else "unknown" for goal in goals]
        mark = ">" if candidate is chosen else " "
        where = "both" if choice.gpu else "CPU"
        fits = "" if candidate.forecast.fits else "  does not fit"
        columns = f"{where:4} {choice.experts:8} {choice.linears or '-':8} {memory:>12} {of_gpu:>12}  {speeds[0]:>14}  {speeds[1]:>14}"
        lines.append(f"{mark} {columns}{fits}")
    return lines


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"


def _cost(chosen: Candidate) -> list[str]:
    choice = chosen.choice
    lossy = [(name, weights) for name, weights in (("experts", choice.experts), ("linear layers", choice.linears)) if weights in BY_WEIGHTS]
    lines = [f"{weights} {name}: an error of about {100 * BY_WEIGHTS[weights].typical:.2g} % a layer" for name, weights in lossy if weights]
    return [*lines, "What that does to this model: moegraft verify --rules FILE"] if lines else ["Nothing is rounded."]
