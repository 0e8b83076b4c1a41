"""A rule file for one model on one machine: every sensible one is predicted, and the best for a goal is written out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from moegraft.injection.outline import Outline
from moegraft.injection.predict.forecast import Forecast, forecast
from moegraft.injection.predict.measure import Measurements
from moegraft.injection.predict.speed import Load
from moegraft.injection.rulefile import RuleErrors, read_rules
from moegraft.injection.verify.tolerances import BY_WEIGHTS
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.registry import OperatorRegistry

Goal = Literal["decode", "prefill", "quality"]
EXPERT_TYPES = ("stored", "int8", "int4")  # from the most exact on
LINEAR_TYPES = (None, "int8")  # the few weights that every token passes: int4 saves little there and costs much
SAME = 1.03  # predictions are no better than that: of two as fast as each other the more exact one is taken
GENERIC = "cpu"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One rule file with its figures; `linears` is None where linear layers stay as they are."""

    experts: str
    linears: str | None
    rules: str
    forecast: Forecast

    @property
    def exactness(self) -> tuple[int, int]:
        """Less is more exact; experts hold most of the weights."""
        return EXPERT_TYPES.index(self.experts), LINEAR_TYPES.index(self.linears)

    def speed(self, goal: Goal) -> float:
        """Tokens a second for the goal; 0 where it is not predicted."""
        predicted = self.forecast.speed
        if predicted is None:
            return 0.0
        return (predicted.prefill_tokens_s if goal == "prefill" else predicted.decode_tokens_s) or 0.0


def candidates(
    outline: Outline, load: Load, *, available_bytes: int, measured: Measurements | None, registry: OperatorRegistry
) -> list[Candidate]:
    """Every combination of weight types that this model can have, from the most exact on.

    Raises:
        UnsupportedModelError: no operator can take this model's experts; the reason is in the message.
    """
    pattern = _linear_pattern(registry)
    found: list[Candidate] = []
    refused: RuleErrors | None = None
    with TemporaryDirectory() as folder:
        for experts in EXPERT_TYPES:
            for linears in LINEAR_TYPES if pattern is not None else (None,):
                path = Path(folder) / "rules.yaml"
                path.write_text(_rules(experts, linears, pattern), encoding="utf-8")
                try:
                    plan = outline.plan(read_rules(path, registry=registry), registry)
                except RuleErrors as error:
                    refused = error
                    continue
                figures = forecast(outline, plan, load, available_bytes=available_bytes, measured=measured, registry=registry)
                found.append(Candidate(experts, linears, _rules(experts, linears, pattern, figures), figures))
    if not found:
        assert refused is not None, "every candidate was planned or refused"
        raise UnsupportedModelError(f"no rules can be written for {outline.model_class}: {refused.diagnostics[0].message}")
    return found


def choose(found: Sequence[Candidate], goal: Goal) -> Candidate | None:
    """The best that fits: the fastest, and of those as fast the most exact; for quality the most exact. None where none fits."""
    fitting = [candidate for candidate in found if candidate.forecast.fits]
    if not fitting:
        return None
    if goal == "quality":
        return min(fitting, key=lambda candidate: candidate.exactness)
    fastest = max(candidate.speed(goal) for candidate in fitting)
    return min((c for c in fitting if c.speed(goal) * SAME >= fastest), key=lambda candidate: candidate.exactness)


def _linear_pattern(registry: OperatorRegistry) -> str | None:
    """Which linear layers are worth packing, as the shipped generic file has it; None where it packs none."""
    rules = read_rules(GENERIC, registry=registry).rules
    return next((rule.match.name for rule in rules if rule.operator == "quantized_linear"), None)


def _rules(experts: str, linears: str | None, pattern: str | None, figures: Forecast | None = None) -> str:
    """The rules as text, with `expect` once the plan is known."""
    counts: dict[str, int] = {}
    for swap in figures.plan.swaps if figures is not None else ():
        counts[swap.rule.id] = counts.get(swap.rule.id, 0) + 1
    lines = [
        "- id: experts",
        "  match: {kind: experts}",
        "  replace:",
        "    class: hybrid_experts",
        f"    kwargs: {{weights: {experts}}}  # {' | '.join(EXPERT_TYPES)}",
        *_expect(counts.get("experts")),
    ]
    if linears is not None and pattern is not None:
        quoted = pattern.replace("'", "''")
        lines += [
            "- id: linears",
            "  match:",
            "    kind: linear",
            f"    name: '{quoted}'",
            "  replace:",
            "    class: quantized_linear",
            f"    kwargs: {{weights: {linears}}}  # without this rule they stay as they are",
            *_expect(counts.get("linears")),
        ]
    return "\n".join(lines) + "\n"


def _expect(count: int | None) -> list[str]:
    return [f"  expect: {count}  # another number is an error: the file is for this model"] if count else []


def written(chosen: Candidate, found: Sequence[Candidate], outline: Outline, about: Sequence[str], goal: Goal) -> str:
    """The file with its reasons; `about` are lines on the machine and the model."""
    comments = [*about, f"Goal: {goal}. All that were tried, the one below marked with >:", *_table(chosen, found), *_cost(chosen)]
    # A model's name may hold anything, and a comment must stay one.
    head = [f"# {re.sub(r'[^ -~]', '?', line)}".rstrip() for line in comments]
    return "\n".join([*head, "version: 1", f"requires: {{model_type: {outline.model_type}}}", "rules:"]) + "\n" + chosen.rules


def _table(chosen: Candidate, found: Sequence[Candidate]) -> list[str]:
    lines = [f"  {'experts':8} {'linear':8} {'memory':>12}  {'decode':>14}  {'prompts':>14}"]
    for candidate in found:
        memory = f"{candidate.forecast.memory.needed / (1 << 30):.2f} GiB"
        speeds = [f"{speed:.3g} tokens/s" if (speed := candidate.speed(goal)) else "unknown" for goal in ("decode", "prefill")]
        mark = ">" if candidate is chosen else " "
        fits = "" if candidate.forecast.fits else "  does not fit"
        lines.append(f"{mark} {candidate.experts:8} {candidate.linears or '-':8} {memory:>12}  {speeds[0]:>14}  {speeds[1]:>14}{fits}")
    return lines


def _cost(chosen: Candidate) -> list[str]:
    lossy = [(name, weights) for name, weights in (("experts", chosen.experts), ("linear layers", chosen.linears)) if weights in BY_WEIGHTS]
    lines = [f"{weights} {name}: an error of about {100 * BY_WEIGHTS[weights].typical:.2g} % a layer" for name, weights in lossy if weights]
    return [*lines, "What that does to this model: moegraft verify --rules FILE"] if lines else ["Nothing is rounded."]
