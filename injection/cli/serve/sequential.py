"""Requests for a model whose sequences cannot be computed together: one answer at a time through the model's `generate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from moegraft.injection.cli.chat.prompt_cache import PromptCache, chunk_size, read_ahead, tokens_in
from moegraft.injection.cli.options import NEUTRAL
from moegraft.injection.cli.serve.job import BadLogitsError, Job
from moegraft.injection.cli.serve.pages import CacheMemory
from moegraft.injection.cli.serve.sampling import Draft, adjusted, score, usable
from moegraft.injection.injected import injection_of
from moegraft.operators.cache_form import KvCache

MOST_PROMPTS = 8  # that are computed alternately


class SequentialDecoder:
    """Answers with the model's `generate`, which supports every operator, one answer at a time, and keeps the last cache.

    Long prompts are computed in chunks if the model's cache allows it: one chunk in each step, of one prompt after the other, so that a
    short one is answered while a long one is computed. An answer that has begun is computed to its end. A prompt with images
    is not divided.

    Args:
        cache: the bytes of a sequence.
        memory_limit: bytes of keys, values and states.
        prefix_bytes: for the last cache and its checkpoints; a larger one is not kept.
        captured: whether decode steps are captured for a GPU. Nothing is drafted then, and requests may ask for the scores of tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pad_token: int,
        prefill_chunk: int,
        cache: KvCache,
        memory_limit: int,
        prefix_bytes: int,
        captured: bool = False,
    ) -> None:
        self._model: Any = model  # torch types every attribute of a module as a tensor
        self._pad_token = pad_token
        self._chunk = chunk_size(model, prefill_chunk)
        self._prefix_bytes = prefix_bytes
        self._prefix = PromptCache(model, checkpoint_bytes=prefix_bytes // 2)
        self._prefix_scope = ""
        self._sizes = cache
        self._captured = captured
        self._limit = memory_limit
        self._caches: dict[Job, DynamicCache | None] = {}  # of prompts; the next one first

    @property
    def jobs(self) -> list[Job]:
        return list(self._caches)

    @property
    def memory(self) -> CacheMemory:
        prefix = self._bytes(self._prefix.contents[1])
        return CacheMemory(self._limit, self._promised(), sum(map(self._bytes, list(self._caches.values()))) + prefix, prefix)

    def _bytes(self, cache: DynamicCache | None) -> int:
        return self._sizes.nbytes(tokens_in(cache)) + self._prefix.checkpoint_bytes(cache) if cache is not None else 0

    def _promised(self) -> int:
        return sum(map(self.needed_bytes, self.jobs))

    def needed_bytes(self, job: Job) -> int:
        copies = 2 if self._captured else 1  # the steps' own cache has a fixed size, and is copied to one that grows
        return copies * self._sizes.nbytes(job.most_tokens)

    def fits(self, job: Job) -> bool:
        """Whether a job may start: the first, or one whose prompt can be computed between the chunks of others."""
        chunked = self._chunk > 0 and len(self._caches) < MOST_PROMPTS
        return not self._caches or (chunked and self._promised() + self.needed_bytes(job) <= self._limit)

    def admit(self, job: Job) -> None:
        if job.scope != self._prefix_scope:
            self._prefix.drop()
        cache, job.cached_tokens = self._prefix.take(job.cache_ids, job.ask.images)
        self._caches[job] = cache

    def step(self) -> None:
        """Compute a chunk of the next prompt; answer the request to its end if no more than a chunk is left."""
        for job in self.jobs:
            if job.cancelled:
                job.finish("cancelled")
        self._caches = {job: cache for job, cache in self._caches.items() if job.ending is None}
        if not self._caches:
            return
        job, cache = next(iter(self._caches.items()))
        ids, rest = job.ask.token_ids, dict(list(self._caches.items())[1:])
        with job.failing_alone():
            if not job.ask.max_tokens:
                job.finish("length")
            elif self._chunk and job.ask.images is None and len(ids) - tokens_in(cache) > self._chunk:
                cache = read_ahead(self._model, ids[: tokens_in(cache) + self._chunk + 1], cache, self._chunk)
                self._prefix.checkpoint(cache)
                rest[job] = cache
            else:
                self._answer(job, cache)
        self._caches = rest

    def _answer(self, job: Job, cache: DynamicCache | None) -> None:
        injection = injection_of(self._model)
        answer = _Answer(job, lambda: injection is not None and injection.drafting, scores=self._captured)
        with torch.random.fork_rng():
            torch.manual_seed(job.seed % (1 << 63))
            self._prefix.generate(
                job.ask.token_ids,
                cache,
                job.ask.images,
                self._chunk,
                streamer=answer,
                stopping_criteria=[answer.ended],
                logits_processor=[answer.adjusted],
                max_new_tokens=job.ask.max_tokens,
                pad_token_id=self._pad_token,
                stop_strings=None,  # the job's filter has the model's
                **_sampling(job, answer.penalty),
            )
        self._prefix_scope = job.scope
        job.finish("cancelled" if job.cancelled else "stop")
        if job.ending == "failed":  # only the tokens before this request are certainly right in the cache
            before = job.cache_ids[: job.cached_tokens + 1]
            cache, shared = self._prefix.take(before)
            if shared == job.cached_tokens:
                self._prefix.keep(before, cache)
        if self._bytes(self._prefix.contents[1]) > self._prefix_bytes:
            self._prefix.drop()

    def forget(self) -> None:
        """Drop the requests and caches, after a failure that may have left a cache incomplete."""
        self._prefix.drop()
        self._caches = {}


class _Answer(BaseStreamer):
    """The part of `generate` that one job has: it takes the tokens, adjusts the scores, and ends.

    Args:
        drafting: whether the tokens after the answer are now a draft's, which may not fail it.
        scores: whether the logits are to be as the model gives them, without what `generate` applies.

    Attributes:
        penalty: for repetitions, which `generate` applies.
    """

    def __init__(self, job: Job, drafting: Callable[[], bool], *, scores: bool = False) -> None:
        self._job = job
        self._drafting = drafting
        self.penalty = None if scores else job.ask.repetition_penalty
        self._ask = job.ask if scores else replace(job.ask, repetition_penalty=None)
        self._saw_prompt = False
        self._logits: torch.Tensor | None = None  # (1, V) of the next token, where its scores are asked for

    def put(self, value: torch.Tensor) -> None:
        """Take tokens. A draft gives several at once, and a stop string may end the answer before the last of them."""
        for token in value.reshape(-1).tolist() if self._saw_prompt else ():
            if self._job.ending is None:
                wanted = self._job.ask.logprobs
                self._job.take(token, None if self._logits is None or wanted is None else score(self._logits, [token], wanted)[0])
        self._saw_prompt = True

    def end(self) -> None:
        pass

    def ended(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        stop = self._job.ending is not None or self._job.cancelled
        return torch.full((input_ids.shape[0],), stop, dtype=torch.bool, device=input_ids.device)

    def adjusted(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Apply what `generate` does not have; where that fails, return zeros, with which it ends and leaves a complete cache."""
        result = torch.zeros_like(scores)
        self._logits = None if self._job.ask.logprobs is None else scores.clone()
        with Draft(self._job, 0).failing_alone() if self._drafting() else self._job.failing_alone():
            if not usable(scores).all():
                raise BadLogitsError
            rows = zip(scores, input_ids.tolist(), strict=True)
            result = torch.stack([adjusted(row, self._ask, ids, self._job.constraint) for row, ids in rows])
        return result


def _sampling(job: Job, repetition_penalty: float | None) -> dict[str, Any]:
    ask = job.ask
    penalty = {} if repetition_penalty is None else {"repetition_penalty": repetition_penalty}
    if ask.greedy:
        return {**NEUTRAL, **penalty, "do_sample": False}
    drawn = {"temperature": ask.temperature, "top_p": ask.top_p, "top_k": ask.top_k}
    return {"do_sample": True, **drawn, **penalty, **({"min_p": ask.min_p} if ask.min_p else {})}
