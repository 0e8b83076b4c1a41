"""Answers requests one at a time through the model's own `generate`, which serves every model and every operator.

Answers several requests at once: one forward pass makes a token for each of them.

The next token of each of several answers, every one by its own request's rules and random numbers.

What the model knows of the conversations that were last served.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

from moegraft.injection.cli.chat.conversation import PromptCache
from moegraft.injection.cli.serve.batch import Batch, cut
from moegraft.injection.cli.serve.job import Ask, BadLogitsError, Job
from moegraft.injection.graft import decode_steps_of
from moegraft.injection.prefill import read_ahead


def generator(seed: int, device: torch.device) -> torch.Generator:
    made = torch.Generator(device=device)
    made.manual_seed(seed)
    return made


def usable(logits: torch.Tensor) -> torch.Tensor:
    """Whether a token can be chosen after each row of `logits` (..., V): (...) bool, false of NaN, +inf, or nothing but -inf."""
    return logits.amax(-1).isfinite()  # a NaN is the largest of its row


def choose(logits: torch.Tensor, ask: Ask, numbers: torch.Generator) -> int:
    """The token after `logits` (V,) float32: the likeliest, or one drawn as `ask` says."""
    if ask.greedy:
        return int(logits.argmax())
    scores = logits / ask.temperature
    if 0 < ask.top_k < scores.numel():
        scores = scores.masked_fill(scores < scores.topk(ask.top_k).values[-1], -torch.inf)
    if ask.top_p < 1:
        ordered, index = scores.sort(descending=True)
        probabilities = ordered.softmax(-1)
        left_out = probabilities.cumsum(-1) - probabilities >= ask.top_p
        left_out[0] = False  # the likeliest token always stays
        scores = scores.scatter(0, index[left_out], -torch.inf)
    return int(torch.multinomial(scores.softmax(-1), 1, generator=numbers))


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


class SequentialDecoder:
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


KEPT = 4  # conversations; each holds at most a context of keys and values


class KeptConversations:
    """A few caches, of which a request takes the one that shares most with its prompt."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._caches: list[PromptCache] = []  # the one used last at the end

    def take(self, token_ids: list[int]) -> tuple[DynamicCache | None, int]:
        """A cache that holds the beginning of `token_ids`, and how much of it."""
        best = max(self._caches, key=lambda cache: cache.shared(token_ids), default=None)
        if best is None or 2 * best.shared(token_ids) < len(best.held[0]):
            return None, 0  # a common greeting is no reason to cut another conversation short
        self._caches.remove(best)
        return best.take(token_ids)

    def keep(self, token_ids: list[int], cache: Any) -> None:
        kept = PromptCache()
        kept.keep(token_ids, cache)
        if kept.held[1] is not None and self._most:
            self._caches = [*self._caches, kept][-self._most :]

    def drop(self) -> None:
        self._caches.clear()


logger = logging.getLogger(__name__)
# What a model's own generation config may ask of every token, which only `generate` does.
PROCESSED = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_p": 0.0, "typical_p": 1.0, "bad_words_ids": None}


def batching_obstacle(model: PreTrainedModel) -> str | None:
    """Why requests for this model are answered one at a time, or None when they can be decoded together."""
    injection: Any = getattr(model, "moegraft", None)
    operator = getattr(injection, "model_operator", None)
    if operator is not None:
        return f"{operator.name} decodes one text at a time"
    if not {"position_ids", "attention_mask", "past_key_values"} <= inspect.signature(model.forward).parameters.keys():
        return "the model does not take positions and a mask"
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    if getattr(model, "_is_stateful", False) or any(type(layer) is not DynamicLayer for layer in layers):
        return "not all of the model's layers attend to everything, and caches of texts of different lengths cannot be joined"
    asked = [name for name, off in PROCESSED.items() if getattr(model.generation_config, name, None) not in (None, off)]
    return f"the model's generation config asks for {', '.join(asked)}" if asked else None


class BatchedDecoder:
    """Texts under way and the prompt being read. Between two steps of the texts at most a chunk of a prompt is read.

    An answer that fails ends alone; a forward pass that fails ends the answers that it computes. The caches of all others stay.
    """

    def __init__(self, model: PreTrainedModel, *, most: int, prefill_chunk: int) -> None:
        self._model: Any = model  # torch types every attribute of a module as a tensor
        self._most = most
        self._chunk = prefill_chunk
        self._kept = KeptConversations()
        self._reading: Job | None = None
        self._read: DynamicCache | None = None
        self._drop_texts()

    def _drop_texts(self) -> None:
        self._batch = Batch(self._model)
        self._jobs: list[Job] = []
        self._numbers: list[torch.Generator] = []

    @property
    def jobs(self) -> list[Job]:
        return [*self._jobs, *([self._reading] if self._reading else [])]

    @property
    def has_room(self) -> bool:
        return self._reading is None and len(self._jobs) < self._most

    def admit(self, job: Job) -> None:
        """Begins with a request; only where there is room."""
        assert self._reading is None, "one prompt is read at a time"
        self._read, job.kept_tokens = self._kept.take(job.ask.token_ids)
        self._reading = job

    def step(self) -> None:
        """Reads a chunk of a prompt, and makes a token for each text."""
        for row in reversed(range(len(self._jobs))):
            if self._jobs[row].cancelled:
                self._jobs[row].finish("cancelled")
                self._leave(row)
        if self._jobs:
            self._decode()
        if self._reading is not None:
            self._read_on(self._reading)

    def forget(self) -> None:
        """Gives up everything, after a failure that may have left caches half-written."""
        self._drop_texts()
        self._reading = self._read = None
        self._kept.drop()

    def _decode(self) -> None:
        try:
            logits = self._batch.step([job.token_ids[-1] for job in self._jobs])
            good = usable(logits).tolist()
            likeliest = logits.argmax(-1).tolist()  # for all greedy texts at once
        except torch.AcceleratorError:  # the device computes nothing after it
            raise
        except Exception as error:  # whatever it is, other prompts and the requests that wait are to be served
            logger.exception("serve: a forward pass failed; the %d answers in it end", len(self._jobs))
            for job in self._jobs:
                job.fail(error)
            self._drop_texts()
            if isinstance(error, torch.OutOfMemoryError):
                self._kept.drop()
            return
        for row in reversed(range(len(self._jobs))):
            job = self._jobs[row]
            with job.failing_alone():
                if not good[row]:
                    raise BadLogitsError
                job.take(likeliest[row] if job.ask.greedy else choose(logits[row], job.ask, self._numbers[row]))
            if job.ending is not None:
                self._leave(row)

    def _leave(self, row: int) -> None:
        job = self._jobs.pop(row)
        self._numbers.pop(row)
        if job.ending != "failed" or job.kept_tokens:
            try:
                self._keep(job, self._batch.copy(row))
            except RuntimeError:  # for lack of memory
                logger.exception("serve: the keys and values of an answer are not kept")
        self._batch.remove(row)

    def _keep(self, job: Job, cache: DynamicCache) -> None:
        """Keeps what the model knows of an answer that ended; of one that failed what it had taken over, as the rest may be bad."""
        if job.ending != "failed":
            self._kept.keep(job.token_ids, cache)
        elif job.kept_tokens:
            self._kept.keep(job.token_ids, cut(cache, job.kept_tokens))

    def _read_on(self, job: Job) -> None:
        with job.failing_alone():
            if job.cancelled:
                job.finish("cancelled")
                self._read = None
            else:
                self._read_chunk(job)
        if job.ending is not None:
            if self._read is not None:
                self._keep(job, self._read)
            self._reading = self._read = None

    def _read_chunk(self, job: Job) -> None:
        cache = self._read if self._read is not None else DynamicCache(config=self._model.config.get_text_config(decoder=True))
        self._read, held = cache, cache.get_seq_length()
        end = min(len(job.token_ids), held + self._chunk) if self._chunk else len(job.token_ids)
        ids = torch.tensor([job.token_ids[held:end]], device=self._model.device)
        extra = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self._model.forward).parameters else {}
        try:
            output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, **extra)
        except torch.OutOfMemoryError:
            self._kept.drop()
            raise
        if end < len(job.token_ids):
            return
        logits = output.logits[0, -1].float()
        if not usable(logits):
            raise BadLogitsError
        numbers = generator(job.seed, logits.device)
        if not job.take(choose(logits, job.ask, numbers)):
            self._batch.add(cache)
            self._jobs.append(job)
            self._numbers.append(numbers)
            self._reading = self._read = None
