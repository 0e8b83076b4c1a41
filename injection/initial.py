"""A rule file for one model on one machine: every sensible one is predicted, and the best for a goal is written out.

The rule file that was chosen, with its reasons in comments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from moegraft.injection.estimate.forecast import Forecast, TargetMachine, forecast
from moegraft.injection.estimate.memory import kv_cache
from moegraft.injection.estimate.planned import Workload
from moegraft.injection.estimate.speed import tokens_text
from moegraft.injection.meta_model import MetaModel
from moegraft.injection.rules import RuleErrors, read_rules
from moegraft.injection.verify import BY_WEIGHTS
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.registry import OperatorRegistry

Goal = Literal["decode", "prefill", "quality"]
EXPERT_TYPES = ("stored", "int8", "int4")  # from the most exact on
LINEAR_TYPES = (None, "int8")  # the few weights that every token passes: int4 saves little there and costs much
SAME = 1.03  # predictions are no better than that: of two as fast as each other the more exact one is taken
GENERIC = "cpu"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a rule file is made of.

    Attributes:
        linears: None where linear layers stay as they are.
        gpu: whether the GPU has all but the experts, and slots for as many of these as it has room for.
    """

    experts: str
    linears: str | None
    gpu: bool

    @property
    def exactness(self) -> tuple[int, int]:
        """Less is more exact; experts hold most of the weights."""
        return EXPERT_TYPES.index(self.experts), LINEAR_TYPES.index(self.linears)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One rule file with its figures."""

    choice: Choice
    rules: str
    forecast: Forecast

    def speed(self, goal: Goal) -> float:
        """Tokens a second for the goal; 0 where it is not predicted."""
        predicted = self.forecast.speed
        if predicted is None:
            return 0.0
        return (predicted.prefill_tokens_s if goal == "prefill" else predicted.decode_tokens_s) or 0.0


def candidates(meta_model: MetaModel, load: Workload, machinery: TargetMachine, registry: OperatorRegistry) -> list[Candidate]:
    """Every combination that this model can have on this machine, those with a GPU first, each from the most exact on.

    Raises:
        UnsupportedModelError: no operator can take this model's experts; the reason is in the message.
    """
    pattern, cache = _linear_pattern(registry), kv_cache(meta_model.skeleton)
    found: list[Candidate] = []
    refused: RuleErrors | None = None
    with TemporaryDirectory() as folder:
        for choice in _choices(machinery, packs_linears=pattern is not None):
            path = Path(folder) / "rules.yaml"
            path.write_text(_rules(choice, pattern, load), encoding="utf-8")
            try:
                plan = meta_model.plan(read_rules(path, registry=registry), registry)
            except RuleErrors as error:
                refused = error
                continue
            figures = forecast(meta_model, plan, load, machinery, registry, cache=cache)
            found.append(Candidate(choice, _rules(choice, pattern, load, figures), figures))
    if not found:
        assert refused is not None, "every candidate was planned or refused"
        raise UnsupportedModelError(f"no rules can be written for {meta_model.model_class}: {refused.diagnostics[0].message}")
    return found


def _choices(machinery: TargetMachine, *, packs_linears: bool) -> Iterator[Choice]:
    for gpu in (True, False) if machinery.gpu is not None else (False,):
        # Of several GPUs quantized_linear's auto is the first, and the layers of the others would wait for it.
        linears = LINEAR_TYPES if packs_linears and not (gpu and machinery.gpu is not None and machinery.gpu.count > 1) else (None,)
        for experts in EXPERT_TYPES:
            yield from (Choice(experts, linear, gpu) for linear in linears)


def choose(found: Sequence[Candidate], goal: Goal) -> Candidate | None:
    """The best that fits: the fastest, and of those as fast the most exact; for quality the most exact. None where none fits."""
    fitting = [candidate for candidate in found if candidate.forecast.fits]
    if not fitting:
        return None
    if goal == "quality":
        return min(fitting, key=lambda candidate: (candidate.choice.exactness, -candidate.speed("decode")))
    fastest = max(candidate.speed(goal) for candidate in fitting)
    near = [candidate for candidate in fitting if candidate.speed(goal) * SAME >= fastest]
    return min(near, key=lambda candidate: candidate.choice.exactness)


def _linear_pattern(registry: OperatorRegistry) -> str | None:
    """Which linear layers are worth packing, as the shipped generic file has it; None where it packs none."""
    rules = read_rules(GENERIC, registry=registry).rules
    return next((rule.match.name for rule in rules if rule.operator == "quantized_linear"), None)


def _rules(choice: Choice, pattern: str | None, load: Workload, figures: Forecast | None = None) -> str:
    """The rules as text, with `expect` and the number of slots once the plan is known."""
    counts: dict[str, int] = {}
    for swap in figures.plan.swaps if figures is not None else ():
        counts[swap.rule.id] = counts.get(swap.rule.id, 0) + 1
    lines = ["- id: experts", "  match: {kind: experts}", "  replace:", "    class: hybrid_experts"]
    weights = f"weights: {choice.experts}"
    types = " | ".join(EXPERT_TYPES)
    lines += _shared(weights, types, load, figures) if choice.gpu else [f"    kwargs: {{{weights}}}  # {types}"]
    lines += _expect(counts.get("experts"))
    if choice.linears is not None and pattern is not None:
        quoted = pattern.replace("'", "''")
        gpu = ", gpu: auto" if choice.gpu else ""
        lines += [
            "- id: linears",
            "  match:",
            "    kind: linear",
            f"    name: '{quoted}'",
            "  replace:",
            "    class: quantized_linear",
            f"    kwargs: {{weights: {choice.linears}{gpu}}}  # without this rule they stay as they are",
            *_expect(counts.get("linears")),
        ]
    if figures is None or "attention" in counts:
        where = "  # where it is on the CPU" if choice.gpu else ""
        lines += ["- id: attention", f"  match: {{kind: attention}}{where}", "  replace: {class: cpu_attention}"]
        lines += _expect(counts.get("attention")) or ["  expect: any"]
    for kind in ("norm", "router"):
        lines += [f"- id: {kind}s", f"  match: {{kind: {kind}}}", f"  replace: {{class: cpu_{kind}}}", "  expect: any"]
    return "\n".join(lines) + "\n"


def _shared(weights: str, types: str, load: Workload, figures: Forecast | None) -> list[str]:
    """Experts in host memory and in slots, as the shipped file 'hybrid' has them."""
    gpu = figures.gpu if figures is not None else None
    slots = f"  # slots take what is left: about {gpu.experts_with_slot:,} of {gpu.experts:,} experts" if gpu is not None else ""
    return [
        "    kwargs:",
        f"      {weights}  # {types}",
        "      gpu: auto",
        f"      cache: {{policy: score_frequency, context: {load.context * load.batch}}}{slots}",
        "      schedule: two_threshold",
        "      prefetch: {policy: impact, lookahead: 3}",
    ]


def _expect(count: int | None) -> list[str]:
    return [f"  expect: {count}  # another number is an error: the file is for this model"] if count else []


def written(chosen: Candidate, found: Sequence[Candidate], meta_model: MetaModel, about: Sequence[str], goal: Goal) -> str:
    """The file; `about` are lines on the machine and the model."""
    comments = [*about, f"Goal: {goal}. All that were tried, the one below marked with >:", *_table(chosen, found), *_cost(chosen)]
    # A model's name may hold anything, and a comment must stay one.
    head = [f"# {re.sub(r'[^ -~]', '?', line)}".rstrip() for line in comments]
    return "\n".join([*head, "version: 1", f"requires: {{model_type: {meta_model.model_type}}}", "rules:"]) + "\n" + chosen.rules


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
