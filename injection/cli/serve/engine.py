"""The thread that owns the model: it answers the requests of a bounded queue, several at once where the model supports it.

What it and the operators count are the metrics of the server for Prometheus, and the work of the model for an answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from transformers import PreTrainedModel

from moegraft.injection.cli.images import MOST_PREPARED_BYTES
from moegraft.injection.cli.serve.job import AnswerError, Ending, Job
from moegraft.injection.cli.serve.pages import CacheMemory
from moegraft.injection.cli.serve.protocol import RequestError
from moegraft.injection.injected import Injection, injection_of
from moegraft.operators.errors import human_bytes

if TYPE_CHECKING:
    from moegraft.injection.cli.serve.service import Service

logger = logging.getLogger(__name__)
WINDOW_S = 10.0  # of which tokens/s are the mean
Counts = Mapping[str, int]  # of the model's work, by name; counts only grow


def difference(after: Counts, before: Counts) -> dict[str, int]:
    """Return the counts that grew, with their growth."""
    return {name: added for name, count in after.items() if (added := count - before.get(name, 0)) > 0}


class Decoder(Protocol):
    """Answers admitted jobs, one step at a time. A failure of one job ends that job, without an exception."""

    @property
    def jobs(self) -> list[Job]: ...
    @property
    def memory(self) -> CacheMemory: ...
    def needed_bytes(self, job: Job) -> int:
        """Return the bytes of keys and values that a job may need until its end."""
        ...

    def fits(self, job: Job) -> bool:
        """Whether a job can start now."""
        ...

    def admit(self, job: Job) -> None:
        """Start a job; after an exception the job is not in `jobs`."""
        ...

    def step(self) -> None: ...
    def forget(self) -> None: ...


class Engine:
    """The queue of requests and the thread that answers them, from the constructor to `close`. `submit` may be called from any thread.

    Clients take turns; the requests of one start in the order in which they came, each as soon as its prompt and its longest answer fit
    into memory. None overtakes the next in turn, so that a long request waits for no longer than the running answers take.

    Requests that run at one time have one adapter. Where the next in turn has another one, it waits until all of them have ended; those
    that wait for its adapter then start with it, before others in turn, and none of its adapter comes after them before the others' turn.

    A request that fails ends alone; if a forward pass fails, all requests in it end. The engine continues after both. If its thread has to
    end, all running and waiting requests fail, and later ones are refused.

    Args:
        max_queue: requests that may wait.
        max_client: requests of one client that may wait.
        counts: returns the model's work so far; called between steps.
        metrics: observes starts, steps and ends of requests.
        use_adapter: lets an adapter compute, or none; called while no request runs. None where there are no adapters.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_queue: int,
        max_client: int | None = None,
        counts: Callable[[], Counts],
        metrics: Metrics,
        use_adapter: Callable[[str | None], None] | None = None,
    ) -> None:
        self._decoder = decoder
        self._max_queue = max_queue
        self._max_client = max_queue if max_client is None else max_client
        self._counts = counts
        self._metrics = metrics
        self._use_adapter = use_adapter
        self._before: dict[Job, Counts] = {}  # the model's work when each job started
        self._queues: OrderedDict[str, deque[Job]] = OrderedDict()  # by client, none empty; the next in turn first
        self._wake = threading.Condition()
        self._closing = False
        self._draining = False
        self.endings: dict[Ending, int] = {"stop": 0, "length": 0, "cancelled": 0, "failed": 0}
        self.rejected = self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.work: Counts = {}  # the model's work when a job last started or ended
        self._recent: deque[tuple[float, int]] = deque()  # (when, tokens) of each step in the window
        self._thread = threading.Thread(target=self._run, name="moegraft-serve", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return sum(map(len, list(self._queues.values())))  # one copy, as other threads ask

    @property
    def memory(self) -> CacheMemory:
        """The bytes of keys and values; numbers of one moment between steps."""
        return self._decoder.memory

    @property
    def running(self) -> int:
        return len(self._decoder.jobs)

    @property
    def alive(self) -> bool:
        """Whether the engine accepts requests."""
        return self._thread.is_alive() and not self._closing and not self._draining

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all requests together, over the last seconds."""
        now = time.perf_counter()
        with self._wake:
            recent = [(when, tokens) for when, tokens in self._recent if now - when <= WINDOW_S]
        if not recent:
            return 0.0
        return sum(tokens for _, tokens in recent) / max(now - recent[0][0], 1.0)

    def require_room(self) -> None:
        """
        Raises:
            RequestError: no request can wait; this one is counted as refused.
        """
        memory = self.memory
        with self._wake:
            self._drop_cancelled()
            waiting = self.waiting
            if waiting >= self._max_queue:
                raise self._queue_full(
                    f"{waiting} requests are waiting, of at most {self._max_queue}, and {human_bytes(memory.free)} of "
                    f"{human_bytes(memory.limit)} for keys and values are free"
                )

    def submit(self, jobs: Sequence[Job], param: str | None = None) -> None:
        """Add the answers to one request to the queue: all of them, or none.

        Args:
            param: the parameter that has the prompt, for clients whose prompt is too long.

        Raises:
            RequestError: the queue has not that much room, there is not enough for the images, a job's prompt and answer never fit, or the
                engine has ended or will.
        """
        memory = self.memory
        needed = max(map(self._decoder.needed_bytes, jobs))
        limit, free = human_bytes(memory.limit), human_bytes(memory.free)
        numbers = f"{human_bytes(needed)} of keys and values; the limit is {limit}, of which {free} are free"
        with self._wake:
            self._drop_cancelled()
            if not self.alive:
                raise RequestError(503, "the server is shutting down, or has to be restarted")
            if needed > memory.limit:
                self.rejected += 1
                need = f"the prompt and the answer's maximum of {jobs[0].most_tokens} tokens need {numbers}"
                known = "this exceeds the available context size"  # llama.cpp's words, which clients know
                raise RequestError(400, f"{need}; {known}", code="context_length_exceeded", param=param)
            client = jobs[0].client
            waiting, of_client = self.waiting, len(self._queues.get(client, ()))
            if waiting and waiting + len(jobs) > self._max_queue:
                raise self._queue_full(f"{waiting} requests are waiting, of at most {self._max_queue}; this one needs {numbers}")
            if of_client and of_client + len(jobs) > self._max_client:
                raise self._queue_full(
                    f"{of_client} requests of this client are waiting, of at most {self._max_client} for each; this one needs {numbers}"
                )
            others = {job.ask.images for job in [*self._all_waiting(), *self._decoder.jobs]} - {None}
            if others and jobs[0].ask.images is not None:
                prepared = sum(images.nbytes for images in others | {jobs[0].ask.images} if images is not None)
                if prepared > MOST_PREPARED_BYTES:
                    raise self._queue_full(
                        f"with the images of other requests, this one's take {human_bytes(prepared)}, of at most "
                        f"{human_bytes(MOST_PREPARED_BYTES)}"
                    )
            self._queues.setdefault(client, deque()).extend(jobs)
            self._wake.notify()

    def _queue_full(self, message: str) -> RequestError:
        """Count a request as refused, and return its refusal."""
        self.rejected += 1
        return RequestError(429, f"{message}; try again in a moment", code="queue_full")

    def drain(self, grace_s: float) -> None:
        """Accept no more requests, and end answers that still run or wait after `grace_s` seconds; returns at once."""
        self._draining = True
        ending = threading.Timer(grace_s, self._cancel_all)
        ending.daemon = True
        ending.start()

    def _cancel_all(self) -> None:
        with self._wake:
            for job in [*self._all_waiting(), *self._decoder.jobs]:
                job.cancel()
            self._drop_cancelled()

    def _all_waiting(self) -> Iterator[Job]:
        for queue in self._queues.values():
            yield from queue

    def close(self) -> None:
        """Cancel every request, and end the thread."""
        with self._wake:
            self._closing = True
            for job in [*self._all_waiting(), *self._decoder.jobs]:
                job.cancel()
            self._wake.notify()
        self._thread.join(timeout=60)

    def _run(self) -> None:
        error: AnswerError | None = None
        try:
            while self._admit():
                self._step()
        except BaseException:  # no caller could report it to the waiting clients
            logger.critical("serve: the thread that owns the model has failed; restart the server", exc_info=True)
            error = AnswerError("the model cannot be used any more; restart the server")
        with self._wake:
            self._closing = True  # no job is added after this
            jobs = list(dict.fromkeys([*self._before, *self._decoder.jobs, *self._all_waiting()]))
            self._queues.clear()
        for job in jobs:
            if error is not None:
                job.fail(error)
            job.finish("cancelled")
            self._settle(job)

    def _step(self) -> None:
        jobs = self._decoder.jobs
        self._begin(jobs)
        before = [job.completion_tokens for job in jobs]
        try:
            with torch.inference_mode():
                self._decoder.step()
        except torch.AcceleratorError:  # the device cannot be used after it
            raise
        except Exception as error:  # any error must leave the other requests running
            logger.exception("serve: a step failed; its requests end and the server continues")
            for job in jobs:
                job.fail(error)
            self._decoder.forget()
        self._account(jobs, before)

    def _settle(self, job: Job) -> None:
        """Count an answer that ended, and report it to its listener."""
        assert job.ending is not None, "the answer has ended"
        self.endings[job.ending] += 1
        self._before.pop(job, None)
        self._metrics.ended(job)
        job.report_end()

    def _begin(self, jobs: list[Job]) -> None:
        """Record the model's work before new jobs, and which jobs run together."""
        new = [job for job in jobs if job not in self._before]
        if new:
            self._before |= dict.fromkeys(new, self._counts_now())
            for job in new:
                self._metrics.started(job)
        for job in jobs:
            job.together = job.together or len(jobs) > 1

    def _counts_now(self) -> Counts:
        try:
            self.work = self._counts()
        except Exception:  # statistics must not end answers
            logger.exception("serve: the model's work cannot be counted")
        return self.work

    def _admit(self) -> bool:
        """Wait for requests, and start those that there is room for; return False when closing."""
        with self._wake:
            while not self._closing and not self._queues and not self._decoder.jobs:
                self._wake.wait()
            self._drop_cancelled()
            begins = not self._decoder.jobs  # a batch, in which requests of its adapter come before others in turn
            while (job := self._next(begins)) is not None and self._decoder.fits(job):
                # In the queue until it is admitted, so that it ends with the queue if the thread fails.
                with job.failing_alone():
                    if self._use_adapter is not None and not self._decoder.jobs:
                        self._use_adapter(job.adapter)
                    self._decoder.admit(job)
                self._leave_queue(job)
                if job.client in self._queues:
                    self._queues.move_to_end(job.client)
                if job.ending is not None:
                    self._settle(job)
            return not self._closing

    def _next(self, begins: bool) -> Job | None:
        """Return the waiting request that starts next if it fits, None where it waits for those of another adapter.

        Args:
            begins: whether the running requests, if any, have been started just now.
        """
        heads = [queue[0] for queue in self._queues.values()]
        running = self._decoder.jobs
        if not heads or not running or heads[0].adapter == running[0].adapter:
            return next(iter(heads), None)
        same = (job for queue in self._queues.values() for job in queue if job.adapter == running[0].adapter)
        return next(same, None) if begins else None

    def _drop_cancelled(self) -> None:
        """Remove waiting requests whose clients have left."""
        for job in [job for job in self._all_waiting() if job.cancelled]:
            self._leave_queue(job)
            job.finish("cancelled")
            self._settle(job)

    def _leave_queue(self, job: Job) -> None:
        self._queues[job.client].remove(job)
        if not self._queues[job.client]:
            del self._queues[job.client]

    def _account(self, jobs: list[Job], before: list[int]) -> None:
        now = time.perf_counter()
        made = sum(job.completion_tokens - count for job, count in zip(jobs, before, strict=True))
        with self._wake:
            self.completion_tokens += made
            self._recent.append((now, made))
            while now - self._recent[0][0] > WINDOW_S:
                self._recent.popleft()
        for job, count in zip(jobs, before, strict=True):
            if count == 0 and job.completion_tokens:
                self.prompt_tokens += len(job.ask.token_ids)
                self.cached_tokens += job.cached_tokens
        self._metrics.stepped(jobs, before)
        ended = [job for job in jobs if job.ending is not None]
        after = self._counts_now() if ended else self.work
        for job in ended:
            job.work = difference(after, self._before[job])
            self._settle(job)


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
