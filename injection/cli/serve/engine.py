"""The thread that owns the model: takes requests from a bounded queue and answers them, several at once where that works."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from moegraft.injection.cli.serve.job import Ending, Job
from moegraft.injection.cli.serve.times import Times
from moegraft.injection.cli.serve.work import Counts, difference

logger = logging.getLogger(__name__)
WINDOW_S = 10.0  # over which tokens/s are taken


class QueueFullError(Exception):
    """As many requests wait as may."""


class StoppedError(Exception):
    """The server is going down, or the thread that owns the model has ended."""


class Decoder(Protocol):
    """Answers the jobs it admitted, a step at a time."""

    @property
    def jobs(self) -> list[Job]: ...
    @property
    def has_room(self) -> bool: ...
    def admit(self, job: Job) -> None: ...
    def step(self) -> None: ...
    def forget(self) -> None: ...


class Engine:
    """Starts its thread when made; `close` ends it. `submit` may be called from any thread.

    A request that fails ends alone or with those decoded beside it; the engine goes on. Requests are taken in the order they came.

    Args:
        counts: what the model did so far; asked between steps.
    """

    def __init__(self, decoder: Decoder, *, max_queue: int, counts: Callable[[], Counts] = dict) -> None:
        self._decoder = decoder
        self._max_queue = max_queue
        self._counts = counts
        self._before: dict[Job, Counts] = {}  # what the model had done when each job began
        self._waiting: deque[Job] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self.endings: dict[Ending, int] = {"stop": 0, "length": 0, "cancelled": 0, "failed": 0}
        self.rejected = self.prompt_tokens = self.kept_tokens = self.completion_tokens = 0
        self.first_token_s = Times()
        self.work: Counts = {}  # what the model had done when an answer last began or ended
        self._recent: deque[tuple[float, int]] = deque()  # (when, tokens) of each step in the window
        self._thread = threading.Thread(target=self._run, name="moegraft-serve", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._decoder.jobs)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def tokens_per_s(self) -> float:
        """Tokens made in the last seconds, of all requests together."""
        now = time.perf_counter()
        with self._wake:
            recent = [(when, tokens) for when, tokens in self._recent if now - when <= WINDOW_S]
        if not recent:
            return 0.0
        return sum(tokens for _, tokens in recent) / max(now - recent[0][0], 1.0)

    def submit(self, job: Job) -> None:
        """
        Raises:
            QueueFullError: too many wait already.
            StoppedError: nobody would answer it.
        """
        with self._wake:
            self._drop_cancelled()
            if self._closing or not self.alive:
                raise StoppedError
            if len(self._waiting) >= self._max_queue:
                self.rejected += 1
                raise QueueFullError
            self._waiting.append(job)
            self._wake.notify()

    def close(self) -> None:
        """Ends every request and the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        for job in [*self._waiting, *self._decoder.jobs]:
            job.cancel()
        self._thread.join(timeout=60)

    def _run(self) -> None:
        while self._admit():
            jobs = self._decoder.jobs
            self._begin(jobs)
            before = [job.completion_tokens for job in jobs]
            try:
                with torch.inference_mode():
                    self._decoder.step()
            except Exception:  # whatever it was, the other requests are to be served
                logger.exception("serve: a step failed; its requests are ended and the server goes on")
                self._fail(jobs)
            self._account(jobs, before)
        for job in [*self._waiting, *self._decoder.jobs]:
            job.finish("cancelled")
            job.tell_end()

    def _fail(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.finish("failed")
        self._decoder.forget()

    def _begin(self, jobs: list[Job]) -> None:
        """Notes what the model had done before the jobs that are new, and which jobs are not alone."""
        new = [job for job in jobs if job not in self._before]
        if new:
            self._before |= dict.fromkeys(new, self._counts_now())
        for job in jobs:
            job.together = job.together or len(jobs) > 1

    def _counts_now(self) -> Counts:
        try:
            self.work = self._counts()
        except Exception:  # a figure for people is no reason to end answers
            logger.exception("serve: what the model did cannot be counted")
        return self.work

    def _admit(self) -> bool:
        """Waits for work and takes what there is room for; False when closing."""
        with self._wake:
            while not self._closing and not self._waiting and not self._decoder.jobs:
                self._wake.wait()
            self._drop_cancelled()
            while self._waiting and self._decoder.has_room:
                self._take(self._waiting.popleft())
            return not self._closing

    def _take(self, job: Job) -> None:
        """Admits a job; where that fails, caches may be half-cut, and it ends with those under way."""
        running = self._decoder.jobs
        try:
            self._decoder.admit(job)
        except Exception:  # as for a step
            logger.exception("serve: a request could not be begun; the server goes on")
            ended = list(dict.fromkeys([*running, job]))
            self._fail(ended)
            for one in ended:
                self.endings["failed"] += 1
                self._before.pop(one, None)
                one.tell_end()

    def _drop_cancelled(self) -> None:
        """Makes room where clients left while they waited."""
        for job in [job for job in self._waiting if job.cancelled]:
            self._waiting.remove(job)
            job.finish("cancelled")
            self.endings["cancelled"] += 1
            job.tell_end()

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
                self.kept_tokens += job.kept_tokens
                self.first_token_s.add((job.first_token_ms or 0.0) / 1e3)
        ended = [job for job in jobs if job.ending is not None]
        after = self._counts_now() if ended else self.work
        for job in ended:
            assert job.ending is not None, "just looked at"
            self.endings[job.ending] += 1
            job.work = difference(after, self._before.pop(job))
            job.tell_end()
