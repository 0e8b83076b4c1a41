"""What the server and its operators did, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from moegraft.injection.cli.serve.counts import BOUNDS_S, Times
from moegraft.injection.cli.serve.service import Service
from moegraft.injection.graft import Injection, injection_of


def metrics(service: Service) -> str:
    """Counters of this process, and every number in the operators' own statistics."""
    engine = service.engine
    lines = [
        *_metric("requests_total", "counter", "Requests that ended, by how.", {f'ending="{end}"': n for end, n in engine.endings.items()}),
        *_metric("requests_rejected_total", "counter", "Requests refused because the queue was full.", {"": engine.rejected}),
        *_metric("requests_waiting", "gauge", "Requests in the queue.", {"": engine.waiting}),
        *_metric("requests_running", "gauge", "Requests being answered.", {"": engine.running}),
        *_metric("prompt_tokens_total", "counter", "Tokens of prompts.", {"": engine.prompt_tokens}),
        *_metric("prompt_tokens_kept_total", "counter", "Of those, known from an earlier request.", {"": engine.kept_tokens}),
        *_metric("completion_tokens_total", "counter", "Tokens made.", {"": engine.completion_tokens}),
        *_metric("tokens_per_second", "gauge", "Tokens made a second, over the last ten.", {"": round(engine.tokens_per_s, 3)}),
        *_histogram("first_token_seconds", "From a request to its first token, the wait in the queue included.", engine.first_token_s),
        *_metric("placement", "gauge", "What runs where.", {_labels(what=line): 1 for line in service.placement}),
    ]
    work = {_labels(what=name): count for name, count in engine.work.items()}
    if work:
        lines += _metric("work_total", "counter", "What experts, drafts and sparsity did, model-wide.", work)
    injection = injection_of(service.loaded.model)
    if injection is not None:
        lines += _operators(injection)
    return "\n".join(lines) + "\n"


def _operators(injection: Injection) -> Iterator[str]:
    found: Any = injection.statistics()  # typed for people: nested mappings of anything
    modules = {_labels(module=path, name=name): value for path, said in found["modules"].items() for name, value in _numbers(said)}
    yield from _metric("operator", "gauge", "The operators' own statistics.", modules)
    shares = {
        _labels(target=str(said["target"]), scope=said["scope"], name=name): value
        for said in found["sparsity"]
        for name, value in _numbers(said)
        if name != "target"
    }
    if shares:
        yield from _metric("sparsity", "gauge", "What the layers of each target leave out together.", shares)
    devices = {_labels(device=name, name=what): value for name, said in found["devices"].items() for what, value in _numbers(said)}
    for device, counts in injection.device_counts():
        devices |= {_labels(device=device, name=what): value for what, value in _numbers(counts)}
    if devices:
        yield from _metric("device", "gauge", "What each GPU that experts share did.", devices)


def _metric(name: str, kind: str, about: str, values: Mapping[str, float]) -> list[str]:
    name = f"moegraft_{name}"
    head = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    return [*head, *(f"{name}{{{labels}}} {value}" if labels else f"{name} {value}" for labels, value in values.items())]


def _histogram(name: str, about: str, times: Times) -> list[str]:
    name = f"moegraft_{name}"
    below = list(accumulate(times.counts))
    buckets = [f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in zip((*BOUNDS_S, "+Inf"), below, strict=True)]
    return [f"# HELP {name} {about}", f"# TYPE {name} histogram", *buckets, f"{name}_sum {times.sum_s:.6f}", f"{name}_count {below[-1]}"]


def _numbers(found: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in nested mappings and sequences, by their dotted path."""
    if isinstance(found, bool | int | float):
        yield prefix, float(found)
    elif isinstance(found, Mapping):
        for name, inner in found.items():
            yield from _numbers(inner, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(found, list | tuple):
        for index, inner in enumerate(found):
            yield from _numbers(inner, f"{prefix}.{index}" if prefix else str(index))


def _labels(**labels: str) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
