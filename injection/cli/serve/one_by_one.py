"""Answers requests one at a time through the model's own `generate`, which serves every model and every operator."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from moegraft.injection.cli.chat.prompt_cache import PromptCache
from moegraft.injection.cli.serve.choice import usable
from moegraft.injection.cli.serve.job import BadLogitsError, Job
from moegraft.injection.graft import decode_steps_of
from moegraft.injection.prefill import read_ahead


class _Tokens(BaseStreamer):
    """Hands tokens to a job as they come; a draft brings several, of which a stop string may leave the last unused."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if not self._saw_prompt:
            self._saw_prompt = True
            return
        for token in value.reshape(-1).tolist():
            if self._job.ending is None:
                self._job.take(token)

    def end(self) -> None:
        pass


class _Ended(StoppingCriteria):
    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        stop = self._job.ending is not None or self._job.cancelled
        return torch.full((input_ids.shape[0],), stop, dtype=torch.bool, device=input_ids.device)


class _Usable(LogitsProcessor):
    """Fails the job where no token can be chosen. The zeros it returns then let `generate` come to its end with a cache that is whole."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if bool(usable(scores).all()):
            return scores
        self._job.fail(BadLogitsError())
        return torch.zeros_like(scores)


class OneByOne:
    """The one request being answered, and what is known of the conversation before it."""

    def __init__(self, model: PreTrainedModel, *, pad_token: int, prefill_chunk: int) -> None:
        self._model: Any = model  # torch types every attribute of a module as a tensor
        self._pad_token = pad_token
        self._chunk = prefill_chunk
        self._kept = PromptCache()
        self._job: Job | None = None

    @property
    def jobs(self) -> list[Job]:
        return [self._job] if self._job else []

    @property
    def has_room(self) -> bool:
        return self._job is None

    def admit(self, job: Job) -> None:
        self._job = job

    def step(self) -> None:
        """Answers the request, to its end."""
        job = self._job
        if job is None:
            return
        ids = job.ask.token_ids
        cache, job.kept_tokens = self._kept.take(ids)
        cache = read_ahead(self._model, ids, cache, self._chunk)
        steps = decode_steps_of(self._model)
        given = cache if steps is None else steps.fixed_cache(self._model, cache, len(ids) + job.ask.max_tokens)
        prompt = torch.tensor([ids], device=self._model.device)
        with torch.random.fork_rng():
            torch.manual_seed(job.seed % (1 << 63))
            made = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                past_key_values=given,
                streamer=_Tokens(job),
                stopping_criteria=[_Ended(job)],
                logits_processor=[_Usable(job)],
                max_new_tokens=job.ask.max_tokens,
                max_length=None,
                num_beams=1,
                pad_token_id=self._pad_token,
                return_dict_in_generate=True,
                **_sampling(job),
            )
        known = made.past_key_values
        self._kept.keep(made.sequences[0].tolist(), known if steps is None else steps.grown_cache(self._model, known))
        job.finish("cancelled" if job.cancelled else "stop")
        if job.ending == "failed":  # what it added may be bad, what it had taken over is not
            cache, shared = self._kept.take(ids[: job.kept_tokens + 1])
            if shared == job.kept_tokens:
                self._kept.keep(ids, cache)
        self._job = None

    def forget(self) -> None:
        """Gives up everything, after a failure that may have left the cache half-written."""
        self._kept.drop()
        self._job = None


def _sampling(job: Job) -> dict[str, Any]:
    if job.ask.greedy:
        return {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50}  # neutral, over the model's own
    return {"do_sample": True, "temperature": job.ask.temperature, "top_p": job.ask.top_p, "top_k": job.ask.top_k}
