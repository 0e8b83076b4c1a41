"""The thread that owns the model: takes requests from a bounded queue and answers them, several at once where that works."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from moegraft.injection.cli.serve.counts import Counts, Times, difference
from moegraft.injection.cli.serve.job import AnswerError, Ending, Job

logger = logging.getLogger(__name__)
WINDOW_S = 10.0  # over which tokens/s are taken


class QueueFullError(Exception):
    """As many requests wait as may."""


class StoppedError(Exception):
    """The server is going down, or the thread that owns the model has ended."""


class Decoder(Protocol):
    """Answers the jobs it admitted, a step at a time. A job whose own work fails ends alone, without an exception."""

    @property
    def jobs(self) -> list[Job]: ...
    @property
    def has_room(self) -> bool: ...
    def admit(self, job: Job) -> None:
        """Begin with a job; where that raises, the job is not among `jobs`."""
        ...

    def step(self) -> None: ...
    def forget(self) -> None: ...


class Engine:
    """Starts its thread when made; `close` ends it. `submit` may be called from any thread.

    A request that fails ends alone, or with those in the same forward pass where that fails; the engine goes on. Where it cannot, the
    requests that run or wait fail and later ones are refused. Requests are taken in the order they came.

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
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._closing

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
            if not self.alive:
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
            for job in [*self._waiting, *self._decoder.jobs]:
                job.cancel()
            self._wake.notify()
        self._thread.join(timeout=60)

    def _run(self) -> None:
        error: AnswerError | None = None
        try:
            while self._admit():
                self._step()
        except BaseException:  # nothing is above this frame that could tell those who wait
            logger.critical("serve: the thread that owns the model ends; the server has to be started again", exc_info=True)
            error = AnswerError("the model cannot be used any more; the server has to be started again")
        with self._wake:
            self._closing = True  # from here on no job is added
            jobs = list(dict.fromkeys([*self._before, *self._decoder.jobs, *self._waiting]))
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
        except torch.AcceleratorError:  # the device computes nothing after it
            raise
        except Exception as error:  # whatever it was, the other requests are to be served
            logger.exception("serve: a step failed; its requests are ended and the server goes on")
            for job in jobs:
                job.fail(error)
            self._decoder.forget()
        self._account(jobs, before)

    def _settle(self, job: Job) -> None:
        """Count an answer that ended and tell its listener."""
        assert job.ending is not None, "the answer has ended"
        self.endings[job.ending] += 1
        self._before.pop(job, None)
        job.tell_end()

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
                job = self._waiting[0]  # among those that wait until it is admitted, so that it ends with them if the thread does
                with job.failing_alone():
                    self._decoder.admit(job)
                self._waiting.popleft()
                if job.ending is not None:
                    self._settle(job)
            return not self._closing

    def _drop_cancelled(self) -> None:
        """Makes room where clients left while they waited."""
        for job in [job for job in self._waiting if job.cancelled]:
            self._waiting.remove(job)
            job.finish("cancelled")
            self._settle(job)

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
            job.work = difference(after, self._before[job])
            self._settle(job)
