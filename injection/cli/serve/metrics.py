"""The work of a model in counts, and the metrics of a server for Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from transformers import PreTrainedModel

from moegraft.injection.cli.serve.engine import Counts
from moegraft.injection.cli.serve.job import Job
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
        sparsity = module.statistics().get("sparsity")
        neurons, share = (sparsity.get("neurons"), sparsity.get("routed_sparsity")) if isinstance(sparsity, Mapping) else (None, None)
        if isinstance(neurons, int) and isinstance(share, float):
            counts["neurons"] += neurons
            counts["neurons_left_out"] += round(neurons * share)
    return counts


# The bounds of vLLM's histograms.
UP_TO_80_S = (0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
SHORT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, *UP_TO_80_S)
FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, *UP_TO_80_S, 160.0, 640.0, 2560.0)
WHOLE_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
BATCH = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one server: under vLLM's names where vLLM has them, else under `moegraft:`.

    The engine's thread reports starts, steps and ends of requests; what the engine and the operators count is read for each page.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._last_s: dict[Job, float] = {}  # when the latest token of each answer came

        def histogram(name: str, about: str, bounds: Sequence[float]) -> Histogram:
            metric = Histogram(name, about, ["model_name"], buckets=bounds, registry=self._registry)
            return metric.labels(service.model_id)

        self._queue_s = histogram("vllm:request_queue_time_seconds", "Time in the queue.", WHOLE_S)
        self._first_s = histogram("vllm:time_to_first_token_seconds", "Time to the first token, including the queue.", FIRST_S)
        self._between_s = histogram("vllm:inter_token_latency_seconds", "Time between tokens of an answer.", SHORT_S)
        self._token_s = histogram("vllm:request_time_per_output_token_seconds", "Mean time per token after an answer's first.", SHORT_S)
        self._whole_s = histogram("vllm:e2e_request_latency_seconds", "Time from the request to its end.", WHOLE_S)
        self._prompt = histogram("vllm:request_prompt_tokens", "Tokens of prompts.", TOKENS)
        self._generated = histogram("vllm:request_generation_tokens", "Tokens of answers.", TOKENS)
        self._batch = histogram("moegraft:batch_size", "Requests in one step.", BATCH)

    def started(self, job: Job) -> None:
        self._queue_s.observe(time.perf_counter() - job.asked_s)

    def stepped(self, jobs: Sequence[Job], before: Sequence[int]) -> None:
        """Count a step; `before` has the tokens of each answer before it."""
        self._batch.observe(len(jobs))
        now = time.perf_counter()
        for job, count in zip(jobs, before, strict=True):
            added = job.completion_tokens - count
            if not added:
                continue
            first_s = (job.first_token_ms or 0.0) / 1e3
            if not count:
                self._prompt.observe(len(job.ask.token_ids))
                self._first_s.observe(first_s)
                added -= 1
            for _ in range(added):  # a draft brings several at once
                self._between_s.observe((now - self._last_s.get(job, job.asked_s + first_s)) / added)
            self._last_s[job] = now

    def ended(self, job: Job) -> None:
        self._last_s.pop(job, None)
        self._whole_s.observe(time.perf_counter() - job.asked_s)
        self._generated.observe(job.completion_tokens)
        if rate := job.tokens_per_s:
            self._token_s.observe(1 / rate)

    def page(self) -> bytes:
        """Return the metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield what the engine and the operators count; prometheus_client calls it for each page."""
        service, engine = self._service, self._service.engine
        model = {"model_name": service.model_id}
        yield _gauge("vllm:num_requests_running", "Requests being answered.", [(model, engine.running)])
        yield _gauge("vllm:num_requests_waiting", "Requests in the queue.", [(model, engine.waiting)])
        yield _counter("vllm:prompt_tokens", "Tokens of prompts.", [(model, engine.prompt_tokens)])
        yield _counter("vllm:generation_tokens", "Generated tokens.", [(model, engine.completion_tokens)])
        yield _counter("vllm:prefix_cache_queries", "Tokens of prompts that were looked up in the caches.", [(model, engine.prompt_tokens)])
        yield _counter("vllm:prefix_cache_hits", "Tokens of prompts in the cache of an earlier request.", [(model, engine.cached_tokens)])
        ended = [({**model, "finished_reason": end}, engine.endings[end]) for end in ("stop", "length")]
        yield _counter("vllm:request_success", "Requests that were answered, by the reason why the answer ended.", ended)
        yield _counter("moegraft:requests", "Requests that ended, by reason.", [({"ending": end}, n) for end, n in engine.endings.items()])
        yield _counter("moegraft:requests_rejected", "Requests refused because the queue was full.", [({}, engine.rejected)])
        yield _gauge("moegraft:tokens_per_second", "Generated tokens per second.", [({}, engine.tokens_per_s)])
        memory = [({"what": name}, size) for name, size in asdict(engine.memory).items()]
        yield _gauge("moegraft:cache_bytes", "Bytes of keys and values, and of recurrent states.", memory)
        if (files := service.prefix_files) is not None:
            yield _gauge("moegraft:prefix_files_bytes", "Bytes of prefixes on disk.", [({}, files.size)])
            read = files.read_tokens
            yield _counter("moegraft:prefix_files_tokens", "Tokens of prompts whose keys and values were read from disk.", [({}, read)])
        yield _gauge("moegraft:placement", "What runs where.", [({"what": line}, 1) for line in service.placement])
        work = [({"what": name}, count) for name, count in engine.work.items()]
        yield _counter("moegraft:work", "Counts of experts, drafts and sparsity, for the whole model.", work)
        injection = injection_of(service.loaded.model)
        if injection is not None:
            yield from _operators(injection)


def _operators(injection: Injection) -> Iterator[Metric]:
    statistics: Any = injection.statistics()  # nested mappings without a common type
    modules = [
        ({"module": path, "name": name}, value) for path, values in statistics["modules"].items() for name, value in _numbers(values)
    ]
    yield _gauge("moegraft:operator", "The operators' own statistics.", modules)
    shares = [
        ({"target": str(layers["target"]), "scope": layers["scope"], "name": name}, value)
        for layers in statistics["sparsity"]
        for name, value in _numbers(layers)
        if name != "target"
    ]
    yield _gauge("moegraft:sparsity", "Share of neurons that the layers of each target leave out.", shares)
    steps = [({"name": name}, value) for name, value in _numbers(statistics["decode_steps"])]
    yield _gauge("moegraft:decode_steps", "Decode steps that were native programs or captured graphs, and their times.", steps)
    files = [({"name": name}, value) for name, value in _numbers(statistics["files"])]
    yield _gauge("moegraft:files", "Experts that stay in files, and those of them that memory holds.", files)
    devices = {(name, what): value for name, values in statistics["devices"].items() for what, value in _numbers(values)}
    devices |= {(name, what): value for name, counts in injection.device_counts() for what, value in _numbers(counts)}
    labelled = [({"device": name, "name": what}, value) for (name, what), value in devices.items()]
    yield _gauge("moegraft:device", "Statistics of each GPU that experts share.", labelled)


def _metric(kind: str, name: str, about: str, values: Sequence[tuple[Mapping[str, str], float]]) -> Metric:
    metric = Metric(name, about, kind)
    for labels, value in values:
        metric.add_sample(f"{name}_total" if kind == "counter" else name, dict(labels), value)
    return metric


_gauge, _counter = partial(_metric, "gauge"), partial(_metric, "counter")


def _numbers(value: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in nested mappings and sequences, with their dotted path."""
    if isinstance(value, bool | int | float):
        yield prefix, float(value)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _numbers(inner, f"{prefix}.{index}" if prefix else str(index))
