"""The two decoders of the server: one request at a time through the model's `generate`, or several in one forward pass."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

from moegraft.injection.cli.chat.conversation import PromptCache
from moegraft.injection.cli.options import NEUTRAL
from moegraft.injection.cli.serve.batch import Batch, cut
from moegraft.injection.cli.serve.job import Ask, BadLogitsError, Job
from moegraft.injection.injected import captured_steps_of, injection_of
from moegraft.injection.prefill import read_ahead


def usable(logits: torch.Tensor) -> torch.Tensor:
    """Return (...) bool, whether a token can be chosen from each row of `logits` (..., V): no NaN, no +inf, and not only -inf."""
    return logits.amax(-1).isfinite()  # a NaN is the largest of its row


def choose(logits: torch.Tensor, ask: Ask, numbers: torch.Generator) -> int:
    """Return the token that `logits` (V,) float32 and the options of a request give: the likeliest, or a random one."""
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
    """Passes tokens to a job. A draft gives several at once, and a stop string may end the answer before the last of them."""

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
    """Fails the job if no token can be chosen, and returns zeros, with which `generate` ends and leaves a complete cache."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if bool(usable(scores).all()):
            return scores
        self._job.fail(BadLogitsError())
        return torch.zeros_like(scores)


class SequentialDecoder:
    """Answers one request at a time with the model's `generate`, which supports every operator, and keeps the last cache."""

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
        """Answer the request to its end."""
        job = self._job
        if job is None:
            return
        ids = job.ask.token_ids
        cache, job.kept_tokens = self._kept.take(ids)
        cache = read_ahead(self._model, ids, cache, self._chunk)
        steps = captured_steps_of(self._model)
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
        if job.ending == "failed":  # only the tokens before this request are certainly right in the cache
            cache, shared = self._kept.take(ids[: job.kept_tokens + 1])
            if shared == job.kept_tokens:
                self._kept.keep(ids, cache)
        self._job = None

    def forget(self) -> None:
        """Drop the request and the cache, after a failure that may have left the cache incomplete."""
        self._kept.drop()
        self._job = None


def _sampling(job: Job) -> dict[str, Any]:
    if job.ask.greedy:
        return {**NEUTRAL, "do_sample": False}
    return {"do_sample": True, "temperature": job.ask.temperature, "top_p": job.ask.top_p, "top_k": job.ask.top_k}


KEPT = 4  # conversations; each holds at most a context of keys and values


class KeptConversations:
    """A few caches; a request uses the one that shares most with its prompt."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._caches: list[PromptCache] = []  # the most recently used one last

    def take(self, token_ids: list[int]) -> tuple[DynamicCache | None, int]:
        """Return a cache with the beginning of `token_ids`, and how many of them it holds."""
        best = max(self._caches, key=lambda cache: cache.shared(token_ids), default=None)
        if best is None or 2 * best.shared(token_ids) < len(best.held[0]):
            return None, 0  # a short common beginning is not worth cropping another conversation
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
# Options of a generation config that only `generate` applies, with the values that mean "off".
PROCESSED = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_p": 0.0, "typical_p": 1.0, "bad_words_ids": None}


def batching_obstacle(model: PreTrainedModel) -> str | None:
    """Return the reason why requests for this model cannot be decoded together; None if they can."""
    injection = injection_of(model)
    if injection is not None and injection.model_operator is not None:
        return f"{injection.model_operator.name} decodes one sequence at a time"
    if not {"position_ids", "attention_mask", "past_key_values"} <= inspect.signature(model.forward).parameters.keys():
        return "the model's forward pass has no arguments for positions and an attention mask"
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    if getattr(model, "_is_stateful", False) or any(type(layer) is not DynamicLayer for layer in layers):
        return "not all of the model's layers are of full attention, and the caches of others cannot be joined at different lengths"
    asked = [name for name, off in PROCESSED.items() if getattr(model.generation_config, name, None) not in (None, off)]
    return f"the model's generation config sets {', '.join(asked)}" if asked else None


class BatchedDecoder:
    """Decodes several sequences in one forward pass, and computes at most one chunk of one prompt between two steps.

    A failure of one answer ends it alone; a failed forward pass ends the answers in it. The caches of the others stay valid.
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
        """Start a request; `has_room` must be true."""
        assert self._reading is None, "one prompt is computed at a time"
        self._read, job.kept_tokens = self._kept.take(job.ask.token_ids)
        self._reading = job

    def step(self) -> None:
        """Decode a token of each sequence, then compute a chunk of the prompt."""
        for row in reversed(range(len(self._jobs))):
            if self._jobs[row].cancelled:
                self._jobs[row].finish("cancelled")
                self._leave(row)
        if self._jobs:
            self._decode()
        if self._reading is not None:
            self._read_on(self._reading)

    def forget(self) -> None:
        """Drop all requests and caches, after a failure that may have left caches incomplete."""
        self._drop_texts()
        self._reading = self._read = None
        self._kept.drop()

    def _decode(self) -> None:
        try:
            logits = self._batch.step([job.token_ids[-1] for job in self._jobs])
            good = usable(logits).tolist()
            likeliest = logits.argmax(-1).tolist()  # for all greedy requests at once
        except torch.AcceleratorError:  # the device cannot be used after it
            raise
        except Exception as error:  # any error must leave other prompts and waiting requests running
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
            except RuntimeError:  # out of memory
                logger.exception("serve: the cache of an answer is not kept")
        self._batch.remove(row)

    def _keep(self, job: Job, cache: DynamicCache) -> None:
        """Keep the cache of an answer that ended; after a failure only the part from an earlier request, as later parts may be wrong."""
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
        numbers = torch.Generator(device=logits.device).manual_seed(job.seed)
        if not job.take(choose(logits, job.ask, numbers)):
            self._batch.add(cache)
            self._jobs.append(job)
            self._numbers.append(numbers)
            self._reading = self._read = None
