"""What the server and its operators did, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moegraft.injection.cli.serve.service import Service
from moegraft.injection.graft import Injection


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
        *_metric("placement", "gauge", "What runs where.", {f'what="{_escaped(line)}"': 1 for line in service.loaded.placement()}),
    ]
    injection = getattr(service.loaded.model, "moegraft", None)
    if isinstance(injection, Injection):
        found = {
            f'module="{_escaped(str(module))}",name="{_escaped(name)}"': value
            for module, statistics in _modules(injection).items()
            for name, value in _numbers(statistics)
        }
        lines += _metric("operator", "gauge", "The operators' own statistics.", found)
    return "\n".join(lines) + "\n"


def _modules(injection: Injection) -> Mapping[str, Any]:
    modules = injection.statistics()["modules"]
    assert isinstance(modules, Mapping), "statistics are by module"
    return modules


def _metric(name: str, kind: str, about: str, values: Mapping[str, float]) -> list[str]:
    name = f"moegraft_{name}"
    head = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    return [*head, *(f"{name}{{{labels}}} {value}" if labels else f"{name} {value}" for labels, value in values.items())]


def _numbers(found: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in nested mappings and sequences, by their dotted path."""
    if isinstance(found, bool | int | float):
        yield prefix, float(found)
    elif isinstance(found, Mapping):
        for name, inner in found.items():
            yield from _numbers(inner, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(found, list | tuple):
        for index, inner in enumerate(found):
            yield from _numbers(inner, f"{prefix}.{index}")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
