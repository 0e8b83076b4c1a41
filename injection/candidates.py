"""The rule files that `moegraft init` chooses from: the forecast of each for a model and a machine, the choice, and the file's text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moegraft.injection.estimate.forecast import Forecast, TargetMachine, forecast, tokens_text
from moegraft.injection.estimate.memory import Workload
from moegraft.injection.meta_model import MetaModel
from moegraft.injection.planning import plan
from moegraft.injection.rules import DEFAULT_RULES, RuleErrors, read_rules
from moegraft.injection.verify import BY_WEIGHTS
from moegraft.operators.atomic_file import user_cache
from moegraft.operators.cache_form import kv_cache
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.registry import OperatorRegistry

Goal = Literal["decode", "prefill", "quality"]
EXPERT_TYPES = ("stored", "int8", "int4")  # the most exact first
LINEAR_TYPES = (None, "int8")  # every token needs these few weights: int4 saves little and adds a large error
SAME = 1.03  # the precision of predictions: of two candidates within this ratio the more exact one is chosen


@dataclass(frozen=True, slots=True)
class Choice:
    """The options in which candidates differ.

    Attributes:
        experts, linears: weight types; `linears` is None if linear layers are not replaced.
        gpu: whether everything but the experts is on the GPU, with slots for as many experts as fit.
        in_files: whether experts stay in files, and host memory holds some of them.
    """

    experts: str
    linears: str | None
    gpu: bool
    in_files: bool = False

    @property
    def exactness(self) -> tuple[int, int]:
        """A sort key, the most exact first; experts count first, as they hold most of the weights."""
        return EXPERT_TYPES.index(self.experts), LINEAR_TYPES.index(self.linears)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One rule file with its forecast."""

    choice: Choice
    rules: str
    forecast: Forecast

    def speed(self, goal: Goal) -> float:
        """Return tokens per second for a goal; 0 without a prediction."""
        predicted = self.forecast.speed
        if predicted is None:
            return 0.0
        return (predicted.prefill_tokens_s if goal == "prefill" else predicted.decode_tokens_s) or 0.0


def candidates(
    meta_model: MetaModel, load: Workload, target: TargetMachine, registry: OperatorRegistry, *, in_files: bool = False
) -> list[Candidate]:
    """Return a candidate for each combination that the model supports, those with a GPU first, the most exact of each first.

    Args:
        in_files: of all, as in `Choice`.

    Raises:
        UnsupportedModelError: no operator can replace this model's experts.
    """
    # The linear layers that the shipped file `cpu` packs, by their names.
    shipped = read_rules(DEFAULT_RULES, registry=registry).rules
    pattern = next((rule.match.name for rule in shipped if rule.operator == "quantized_linear"), None)
    cache = kv_cache(meta_model.skeleton)
    choices = []
    for gpu in (True, False) if target.gpu is not None else (False,):
        # quantized_linear's `gpu: auto` is the first GPU: with several, the layers of the others would wait for it.
        packs = pattern is not None and not (gpu and target.gpu is not None and target.gpu.count > 1)
        linears = LINEAR_TYPES if packs else (None,)
        choices += [Choice(experts, linear, gpu, in_files) for experts in EXPERT_TYPES for linear in linears]
    written: list[Candidate] = []
    refused: RuleErrors | None = None
    for choice in choices:
        try:
            rules = read_rules("rules.yaml", registry=registry, text=_rules(choice, pattern, load))
            planned = plan(meta_model, rules, registry=registry)
        except RuleErrors as error:
            refused = error
            continue
        figures = forecast(meta_model, planned, load, target, registry, cache=cache)
        written.append(Candidate(choice, _rules(choice, pattern, load, figures), figures))
    if not written:
        assert refused is not None, "every candidate is planned or refused"
        raise UnsupportedModelError(f"no rules can be written for {meta_model.model_class}: {refused.diagnostics[0].message}")
    return written


def choose(written: Sequence[Candidate], goal: Goal) -> Candidate | None:
    """Return the fastest candidate that fits, and the most exact of several equally fast; for quality the most exact. None: none fits."""
    fitting = [candidate for candidate in written if candidate.forecast.fits]
    if not fitting:
        return None
    if goal == "quality":
        return min(fitting, key=lambda candidate: (candidate.choice.exactness, -candidate.speed("decode")))
    fastest = max(candidate.speed(goal) for candidate in fitting)
    near = [candidate for candidate in fitting if candidate.speed(goal) * SAME >= fastest]
    return min(near, key=lambda candidate: candidate.choice.exactness)


def _rules(choice: Choice, pattern: str | None, load: Workload, figures: Forecast | None = None) -> str:
    """Return the rules as text; with `figures`, `expect` and the number of slots are filled in."""
    counts: dict[str, int] = {}
    for swap in figures.plan.swaps if figures is not None else ():
        counts[swap.rule.id] = counts.get(swap.rule.id, 0) + 1
    lines = ["- id: experts", "  match: {kind: experts}", "  replace:", "    class: hybrid_experts"]
    weights = f"weights: {choice.experts}"
    types = " | ".join(EXPERT_TYPES)
    kept = [f"cache_dir: '{packed_folder()}'", "memory: auto"] if choice.in_files else []
    if choice.gpu:
        lines += [*_shared(weights, types, load, figures), *(f"      {each}" for each in kept)]
    else:
        lines.append(f"    kwargs: {{{', '.join([weights, *kept])}}}  # {types}")
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
            f"    kwargs: {{weights: {choice.linears}{gpu}}}  # without this rule linear layers stay as they are",
            *_expect(counts.get("linears")),
        ]
    device = "fused" if choice.gpu else "cpu"  # fused operators compute on both
    if figures is None or "attention" in counts:
        lines += ["- id: attention", "  match: {kind: attention}", f"  replace: {{class: {device}_attention}}"]
        lines += _expect(counts.get("attention")) or ["  expect: any"]
    for kind in ("norm", "router"):
        lines += [f"- id: {kind}s", f"  match: {{kind: {kind}}}", f"  replace: {{class: {device}_{kind}}}", "  expect: any"]
    if figures is None or "recurrent" in counts:
        lines += ["- id: recurrent", "  match: {kind: recurrent}", "  replace: {class: cpu_recurrent}", "  expect: any"]
    return "\n".join(lines) + "\n"


def packed_folder() -> Path:
    """Return where the experts of models that are larger than memory are kept, in the user's cache folder."""
    return user_cache("experts")


def _shared(weights: str, types: str, load: Workload, figures: Forecast | None) -> list[str]:
    """Return the options of experts in host memory and in slots, as in the shipped file `hybrid`."""
    gpu = figures.gpu if figures is not None else None
    slots = f"  # slots take the free GPU memory: about {gpu.experts_with_slot:,} of {gpu.experts:,} experts" if gpu is not None else ""
    return [
        "    kwargs:",
        f"      {weights}  # {types}",
        "      gpu: auto",
        f"      cache: {{policy: score_frequency, context: {load.context * load.batch}}}{slots}",
        "      schedule: two_threshold",
        "      prefetch: {policy: impact, lookahead: 3}",
    ]


def _expect(count: int | None) -> list[str]:
    return [f"  expect: {count}  # any other number is an error: the file is for this model"] if count else []


def file_text(chosen: Candidate, written: Sequence[Candidate], meta_model: MetaModel, about: Sequence[str], goal: Goal) -> str:
    """Return the text of the rule file; `about` are lines on the machine and the model for its comments."""
    comments = [*about, f"Goal: {goal}. All candidates; > marks the one in this file:", *_table(chosen, written), *_cost(chosen)]
    # A model's name may hold any character, and must not end the comment.
    head = [f"# {re.sub(r'[^ -~]', '?', line)}".rstrip() for line in comments]
    return "\n".join([*head, "version: 1", f"requires: {{model_type: {meta_model.model_type}}}", "rules:"]) + "\n" + chosen.rules


def _table(chosen: Candidate, written: Sequence[Candidate]) -> list[str]:
    lines = [f"  {'':4} {'experts':8} {'linear':8} {'memory':>12} {'of the GPU':>12}  {'decode':>14}  {'prompts':>14}"]
    for candidate in written:
        choice, gpu = candidate.choice, candidate.forecast.gpu
        memory, of_gpu = _gib(candidate.forecast.memory.needed), _gib(gpu.needed) if gpu is not None else "-"
        goals: tuple[Goal, ...] = ("decode", "prefill")
        speeds = [tokens_text(speed) if (speed := candidate.speed(goal)) else "unknown" for goal in goals]
        mark = ">" if candidate is chosen else " "
        where = "both" if choice.gpu else "CPU"
        fits = "" if candidate.forecast.fits else "  does not fit"
        if choice.in_files:
            fits += "  experts in files"
        columns = f"{where:4} {choice.experts:8} {choice.linears or '-':8} {memory:>12} {of_gpu:>12}  {speeds[0]:>14}  {speeds[1]:>14}"
        lines.append(f"{mark} {columns}{fits}")
    return lines


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"


def _cost(chosen: Candidate) -> list[str]:
    choice = chosen.choice
    lossy = [(name, weights) for name, weights in (("experts", choice.experts), ("linear layers", choice.linears)) if weights in BY_WEIGHTS]
    lines = [
        f"{weights} {name}: an error of about {100 * BY_WEIGHTS[weights].typical:.2g} % per layer" for name, weights in lossy if weights
    ]
    return [*lines, "To measure the effect on this model: moegraft verify --rules FILE"] if lines else ["Nothing is rounded."]
