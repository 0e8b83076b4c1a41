"""The two decoders of the server: one request at a time through the model's `generate`, or several in one forward pass."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

from moegraft.injection.cli.chat.conversation import PromptCache
from moegraft.injection.cli.options import NEUTRAL
from moegraft.injection.cli.serve.batch import Batch, cut
from moegraft.injection.cli.serve.constraints import Constraint
from moegraft.injection.cli.serve.job import Ask, BadLogitsError, Job, TokenScore
from moegraft.injection.injected import captured_steps_of, injection_of
from moegraft.injection.prefill import read_ahead


def usable(logits: torch.Tensor) -> torch.Tensor:
    """Return (...) bool, whether a token can be chosen from each row of `logits` (..., V): no NaN, no +inf, and not only -inf."""
    return logits.amax(-1).isfinite()  # a NaN is the largest of its row


def adjusted(logits: torch.Tensor, ask: Ask, token_ids: Sequence[int], constraint: Constraint | None = None) -> torch.Tensor:
    """Return `logits` (V,) with the penalties, biases and grammar of a request; `token_ids` are its prompt and the answer so far."""
    if constraint is not None:
        logits = constraint.restrict(logits, token_ids[len(ask.token_ids) :])
    penalty = ask.repetition_penalty or 1.0
    answer = Counter(token_ids[len(ask.token_ids) :]) if ask.presence_penalty or ask.frequency_penalty else {}
    if penalty == 1.0 and not answer and not ask.logit_bias:
        return logits
    logits, device = logits.clone(), logits.device
    if penalty != 1.0:
        seen = torch.tensor(list(set(token_ids)), device=device)
        logits[seen] = torch.where(logits[seen] < 0, logits[seen] * penalty, logits[seen] / penalty)
    if answer:
        counts = torch.tensor(list(answer.values()), dtype=logits.dtype, device=device)
        logits[torch.tensor(list(answer), device=device)] -= ask.presence_penalty + ask.frequency_penalty * counts
    if ask.logit_bias:
        biases = torch.tensor(list(ask.logit_bias.values()), dtype=logits.dtype, device=device)
        logits[torch.tensor(list(ask.logit_bias), device=device)] += biases
    return logits


def choose(logits: torch.Tensor, jobs: Sequence[Job]) -> list[int]:
    """Return a token for each job from its row of `logits` (B, V) float32: the likeliest, or a random one by the options of its request.

    A token depends on the job's own logits, options and random numbers only: other jobs do not change an answer.
    """
    given = logits.unbind()
    changed = [adjusted(row, job.ask, job.token_ids, job.constraint) for row, job in zip(given, jobs, strict=True)]
    if any(row is not old for row, old in zip(changed, given, strict=True)):
        logits = torch.stack(changed)
    tokens: list[int] = logits.argmax(-1).tolist()
    alike: dict[tuple[int, bool], list[int]] = {}  # rows in which tokens are chosen in the same order
    for row, job in enumerate(jobs):
        if not job.ask.greedy:
            alike.setdefault((job.ask.top_k, job.ask.top_p < 1), []).append(row)
    for (top_k, nucleus), rows in alike.items():

        def column(values: Iterable[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.tensor(list(values), dtype=dtype, device=logits.device)[:, None]

        scores = logits if len(rows) == len(jobs) else logits[rows]
        scores = scores / column((jobs[row].ask.temperature for row in rows), torch.float32)
        index = None  # of the tokens from the likeliest to the unlikeliest
        if 0 < top_k < scores.shape[-1]:
            scores, index = scores.topk(top_k)
        elif nucleus:
            scores, index = scores.sort(descending=True, stable=True)
        probabilities = scores.softmax(-1, dtype=torch.float64)
        if nucleus:  # up to the first token with which the share is reached
            before = probabilities.cumsum(-1) - probabilities
            left_out = before >= column(jobs[row].ask.top_p for row in rows)
            left_out[:, 0] = False  # the likeliest token always stays
            probabilities = probabilities.masked_fill(left_out, 0)
        least = column(jobs[row].ask.min_p for row in rows) * probabilities.amax(-1, keepdim=True)
        cumulative = probabilities.masked_fill(probabilities < least, 0).cumsum(-1)
        total = cumulative[:, -1:].contiguous()
        drawn = column(jobs[row].random.random() for row in rows) * total
        # The first sum above the number; rounding must not pass the first that reaches the total, as later tokens have no probability.
        found = torch.minimum(torch.searchsorted(cumulative, drawn, right=True), torch.searchsorted(cumulative, total))
        chosen = found if index is None else index.gather(-1, found)
        for row, token in zip(rows, chosen[:, 0].tolist(), strict=True):
            tokens[row] = token
    return tokens


def score(logits: torch.Tensor, tokens: Sequence[int], alternatives: int) -> list[TokenScore]:
    """Return the scores of a token for each row of `logits` (N, V), with the likeliest `alternatives` tokens."""
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    own = logprobs.gather(-1, torch.tensor(list(tokens), device=logits.device)[:, None])[:, 0].tolist()
    best, index = (found.tolist() for found in logprobs.topk(min(alternatives, logits.shape[-1])))
    return [
        TokenScore(token, value, tuple(zip(ids, values, strict=True)))
        for token, value, ids, values in zip(tokens, own, index, best, strict=True)
    ]


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


class _Adjusted(LogitsProcessor):
    """Applies the penalties, biases and grammar of a request that `generate` does not have."""

    def __init__(self, job: Job) -> None:
        self._ask = replace(job.ask, repetition_penalty=None)
        self._constraint = job.constraint

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = zip(scores, input_ids.tolist(), strict=True)
        return torch.stack([adjusted(row, self._ask, ids, self._constraint) for row, ids in rows])


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
        if not job.ask.max_tokens:
            job.finish("length")
            self._job = None
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
                logits_processor=[_Usable(job), _Adjusted(job)],
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


def _scores_prompt(ask: Ask) -> bool:
    return ask.echo and ask.logprobs is not None


def _sampling(job: Job) -> dict[str, Any]:
    ask = job.ask
    own = {} if ask.repetition_penalty is None else {"repetition_penalty": ask.repetition_penalty}
    if ask.greedy:
        return {**NEUTRAL, **own, "do_sample": False}
    drawn = {"temperature": ask.temperature, "top_p": ask.top_p, "top_k": ask.top_k}
    return {"do_sample": True, **drawn, **own, **({"min_p": ask.min_p} if ask.min_p else {})}


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

    @property
    def jobs(self) -> list[Job]:
        return [*self._jobs, *([self._reading] if self._reading else [])]

    @property
    def has_room(self) -> bool:
        return self._reading is None and len(self._jobs) < self._most

    def admit(self, job: Job) -> None:
        """Start a request; `has_room` must be true."""
        assert self._reading is None, "one prompt is computed at a time"
        if _scores_prompt(job.ask):
            self._read, job.kept_tokens = None, 0  # every token's logits are needed
        else:
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
            good = usable(logits)
            logits = logits if good.all() else logits.where(good[:, None], 0.0)
            tokens = choose(logits, self._jobs)
            scores = [
                None if job.ask.logprobs is None else score(row, [token], job.ask.logprobs)[0]
                for job, row, token in zip(self._jobs, logits.split(1), tokens, strict=True)
            ]
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
                job.take(tokens[row], scores[row])
            if job.ending is not None:
                self._leave(row)

    def _leave(self, row: int) -> None:
        job = self._jobs.pop(row)
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
        scored = _scores_prompt(job.ask)
        extra = {"logits_to_keep": 1} if not scored and "logits_to_keep" in inspect.signature(self._model.forward).parameters else {}
        try:
            output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, **extra)
        except torch.OutOfMemoryError:
            self._kept.drop()
            raise
        logits = output.logits[:, -1].float()
        if scored:
            assert job.ask.logprobs is not None, "scores are asked for"
            following = job.token_ids[held + 1 : end + 1]
            job.prompt_scores += [] if held else [TokenScore(job.token_ids[0])]
            job.prompt_scores += score(output.logits[0, : len(following)], following, job.ask.logprobs)
        if end < len(job.token_ids):
            return
        if not job.ask.max_tokens:
            job.finish("length")
            return
        if not usable(logits).all():
            raise BadLogitsError
        token = choose(logits, [job])[0]
        if not job.take(token, None if job.ask.logprobs is None else score(logits, [token], job.ask.logprobs)[0]):
            self._batch.add(cache)
            self._jobs.append(job)
            self._reading = self._read = None
