"""The work of a model in counts, and the metrics of a server in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from moegraft.injection.cli.serve.engine import BOUNDS_S, Counts, Histogram
from moegraft.injection.injected import Injection, injection_of

if TYPE_CHECKING:
    from moegraft.injection.cli.serve.service import Service

ENGINE = {
    "experts_used": "used",
    "experts_found_on_gpu": "found",
    "experts_computed_on_cpu": "on_cpu",
    "experts_brought_on_demand": "transferred",
}
DRAFTS = {"draft_rounds": "rounds", "tokens_drafted": "drafted_tokens", "tokens_accepted": "accepted_tokens"}


def work_counts(model: PreTrainedModel) -> Counts:
    """Return the counts of a model's work since it was loaded. Experts are counted only if they share a GPU.

    `experts_used` are active experts, layer by layer; those found had a slot on the GPU when their layer started.
    """
    injection = injection_of(model)
    if injection is None:
        return {}
    counts: Counter[str] = Counter()
    for _, device_counts in injection.device_counts():
        for name, key in ENGINE.items():
            value = device_counts[key]
            counts[name] += value if isinstance(value, int) else 0
    if injection.model_operator is not None:
        drafts = injection.model_operator.statistics()
        for name, key in DRAFTS.items():
            value = drafts.get(key)
            counts[name] += value if isinstance(value, int) else 0
    for module in injection.operators.values():
        found = module.statistics().get("sparsity")
        neurons, share = (found.get("neurons"), found.get("routed_sparsity")) if isinstance(found, Mapping) else (None, None)
        if isinstance(neurons, int) and isinstance(share, float):
            counts["neurons"] += neurons
            counts["neurons_left_out"] += round(neurons * share)
    return counts


def metrics(service: Service) -> str:
    """Return the server's counters and every number of the operators' statistics."""
    engine = service.engine
    lines = [
        *_metric(
            "requests_total", "counter", "Requests that ended, by reason.", {f'ending="{end}"': n for end, n in engine.endings.items()}
        ),
        *_metric("requests_rejected_total", "counter", "Requests refused because the queue was full.", {"": engine.rejected}),
        *_metric("requests_waiting", "gauge", "Requests in the queue.", {"": engine.waiting}),
        *_metric("requests_running", "gauge", "Requests being answered.", {"": engine.running}),
        *_metric("prompt_tokens_total", "counter", "Tokens of prompts.", {"": engine.prompt_tokens}),
        *_metric("prompt_tokens_kept_total", "counter", "Tokens of prompts in the cache of an earlier request.", {"": engine.kept_tokens}),
        *_metric("completion_tokens_total", "counter", "Generated tokens.", {"": engine.completion_tokens}),
        *_metric("tokens_per_second", "gauge", "Generated tokens per second.", {"": round(engine.tokens_per_s, 3)}),
        *_histogram("first_token_seconds", "Time to the first token, including the wait in the queue.", engine.first_token_s),
        *_metric("placement", "gauge", "What runs where.", {_labels(what=line): 1 for line in service.placement}),
    ]
    work = {_labels(what=name): count for name, count in engine.work.items()}
    if work:
        lines += _metric("work_total", "counter", "Counts of experts, drafts and sparsity, for the whole model.", work)
    injection = injection_of(service.loaded.model)
    if injection is not None:
        lines += _operators(injection)
    return "\n".join(lines) + "\n"


def _operators(injection: Injection) -> Iterator[str]:
    found: Any = injection.statistics()  # nested mappings without a common type
    modules = {_labels(module=path, name=name): value for path, values in found["modules"].items() for name, value in _numbers(values)}
    yield from _metric("operator", "gauge", "The operators' own statistics.", modules)
    shares = {
        _labels(target=str(layers["target"]), scope=layers["scope"], name=name): value
        for layers in found["sparsity"]
        for name, value in _numbers(layers)
        if name != "target"
    }
    if shares:
        yield from _metric("sparsity", "gauge", "Share of neurons that the layers of each target leave out.", shares)
    steps = {_labels(name=name): value for name, value in _numbers(found["decode_steps"])}
    if steps:
        yield from _metric("decode_steps", "gauge", "Decode steps on the CPU that were native programs, and their times.", steps)
    devices = {_labels(device=name, name=what): value for name, values in found["devices"].items() for what, value in _numbers(values)}
    for device, counts in injection.device_counts():
        devices |= {_labels(device=device, name=what): value for what, value in _numbers(counts)}
    if devices:
        yield from _metric("device", "gauge", "Statistics of each GPU that experts share.", devices)


def _metric(name: str, kind: str, about: str, values: Mapping[str, float]) -> list[str]:
    name = f"moegraft_{name}"
    head = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    return [*head, *(f"{name}{{{labels}}} {value}" if labels else f"{name} {value}" for labels, value in values.items())]


def _histogram(name: str, about: str, times: Histogram) -> list[str]:
    name = f"moegraft_{name}"
    below = list(accumulate(times.counts))
    buckets = [f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in zip((*BOUNDS_S, "+Inf"), below, strict=True)]
    return [f"# HELP {name} {about}", f"# TYPE {name} histogram", *buckets, f"{name}_sum {times.sum_s:.6f}", f"{name}_count {below[-1]}"]


def _numbers(found: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in nested mappings and sequences, with their dotted path."""
    if isinstance(found, bool | int | float):
        yield prefix, float(found)
    elif isinstance(found, Mapping):
        for name, inner in found.items():
            yield from _numbers(inner, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(found, list | tuple):
        for index, inner in enumerate(found):
            yield from _numbers(inner, f"{prefix}.{index}" if prefix else str(index))


def _labels(**labels: str) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return ",".join(f'{name}="{value.translate(escapes)}"' for name, value in labels.items())
