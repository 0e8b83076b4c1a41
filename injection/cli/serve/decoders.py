"""The two decoders of the server: one answer at a time through the model's `generate`, or several in one forward pass."""

from __future__ import annotations

import inspect
import logging
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from moegraft.injection.cli.chat.conversation import PromptCache
from moegraft.injection.cli.options import NEUTRAL
from moegraft.injection.cli.serve.batch import CacheMemory, PaddedTexts, PagedTexts, Text
from moegraft.injection.cli.serve.constraints import Constraint, GrammarError
from moegraft.injection.cli.serve.job import AnswerError, Ask, BadLogitsError, Job, TokenScore
from moegraft.injection.injected import captured_steps_of, injection_of
from moegraft.injection.prefill import APPENDABLE, read_ahead, why_not_appendable
from moegraft.operators.draft import BatchDrafts, DraftedRow


def usable(logits: torch.Tensor) -> torch.Tensor:
    """Return (...) bool, whether a token can be chosen from each row of `logits` (..., V): no NaN, no +inf, and not only -inf."""
    return logits.amax(-1).isfinite()  # a NaN is the largest of its row


def adjusted(logits: torch.Tensor, ask: Ask, token_ids: Sequence[int], constraint: Constraint | None = None) -> torch.Tensor:
    """Return `logits` (V,) with the penalties, biases and grammar of a request; `token_ids` are its prompt and the answer so far.

    Raises:
        AnswerError: the grammar has become too large.
    """
    if constraint is not None:
        try:
            logits = constraint.restrict(logits, token_ids[len(ask.token_ids) :])
        except GrammarError as error:
            raise AnswerError(str(error)) from error
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


class Draft:
    """The draft of one answer: tokens that the model may choose next. As a `Job`, it has all that the choice of a token needs.

    Its random numbers are those that the answer will use, so that the model chooses a draft token again where both distributions agree.

    Args:
        most: tokens that it may have.
    """

    def __init__(self, job: Job, most: int) -> None:
        self.most = most if job.constraint is None or job.constraint.drafts else 0
        self.ask = job.ask
        self.constraint = job.constraint
        self.token_ids = list(job.token_ids)
        self.random = random.Random()
        self.random.setstate(job.random.getstate())
        self.tokens: list[int] = []
        self.confidences: list[float] = []  # of the draft in its tokens
        self.ended = False

    @contextmanager
    def failing_alone(self) -> Iterator[None]:
        """End the draft if the block fails; the answer may not."""
        try:
            yield
        except Exception:  # noqa: BLE001 # the answer is chosen from other logits
            self.ended = True
            if self.constraint is not None:
                self.constraint.restart()


def choose(logits: torch.Tensor, jobs: Sequence[Job | Draft]) -> list[int]:
    """Return a token for each job from its row of `logits` (B, V) float32: the likeliest, or a random one by the options of its request.

    A token depends on the job's own logits, options and random numbers only: other jobs do not change an answer. A job whose logits cannot
    be adjusted, as by a grammar that has become too large, fails; its token has no meaning.
    """
    given = logits.unbind()
    changed = list(given)
    for row, job in enumerate(jobs):
        with job.failing_alone():
            changed[row] = adjusted(given[row], job.ask, job.token_ids, job.constraint)
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
    """Applies the penalties, biases and grammar of a request that `generate` does not have; if that fails, as `_Usable`.

    Args:
        drafting: whether the tokens after the answer are a draft's, which may not fail it.
    """

    def __init__(self, job: Job, drafting: Callable[[], bool]) -> None:
        self._job = job
        self._drafting = drafting
        self._ask = replace(job.ask, repetition_penalty=None)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(scores)
        with Draft(self._job, 0).failing_alone() if self._drafting() else self._job.failing_alone():
            rows = zip(scores, input_ids.tolist(), strict=True)
            found = torch.stack([adjusted(row, self._ask, ids, self._job.constraint) for row, ids in rows])
        return found


class SequentialDecoder:
    """Answers with the model's `generate`, which supports every operator, one answer at a time, and keeps the last cache.

    Long prompts are read in chunks if the model's cache allows it: one chunk in each step, and prompts take turns, so that a short
    one is answered while a long one is read. An answer that has begun is computed to its end.

    Args:
        memory_limit: bytes of keys and values.
        token_bytes: of one token's.
        kept_bytes: for the last cache; a longer one is not kept.
    """

    def __init__(
        self, model: PreTrainedModel, *, pad_token: int, prefill_chunk: int, token_bytes: int, memory_limit: int, kept_bytes: int
    ) -> None:
        self._model: Any = model  # torch types every attribute of a module as a tensor
        self._pad_token = pad_token
        self._chunk = prefill_chunk if why_not_appendable(model) is None else 0
        self._kept = PromptCache()
        self._kept_scope = ""
        self._token_bytes = token_bytes
        self._limit = memory_limit
        self._most_kept = kept_bytes
        self._reading: deque[_Reading] = deque()  # the next one first

    @property
    def jobs(self) -> list[Job]:
        return [reading.job for reading in list(self._reading)]  # one copy, as other threads ask

    @property
    def memory(self) -> CacheMemory:
        kept = self._token_bytes * len(self._kept.held[0])
        held = sum(reading.held() for reading in list(self._reading))
        return CacheMemory(self._limit, self._promised(), self._token_bytes * held + kept, kept)

    def _promised(self) -> int:
        return sum(map(self.needed_bytes, self.jobs))

    def needed_bytes(self, job: Job) -> int:
        return self._token_bytes * job.most_tokens

    def fits(self, job: Job) -> bool:
        """Whether a job may start: the first, or one whose prompt can be read between the chunks of others."""
        chunked = self._chunk > 0 and len(self._reading) < READ_TOGETHER
        return not self._reading or (chunked and self._promised() + self.needed_bytes(job) <= self._limit)

    def admit(self, job: Job) -> None:
        if job.scope != self._kept_scope:
            self._kept.drop()
        cache, job.kept_tokens = self._kept.take(job.ask.token_ids)
        self._reading.append(_Reading(job, cache))

    def step(self) -> None:
        """Read a chunk of the next prompt; answer the request to its end if no more than a chunk is left."""
        for reading in [reading for reading in self._reading if reading.job.cancelled]:
            reading.job.finish("cancelled")
            self._reading.remove(reading)
        if not self._reading:
            return
        reading = self._reading[0]
        job, ids = reading.job, reading.job.ask.token_ids
        if not job.ask.max_tokens:
            job.finish("length")
            self._reading.popleft()
        elif self._chunk and len(ids) - reading.held() > self._chunk:
            end = reading.held() + self._chunk
            reading.cache = read_ahead(self._model, ids[: end + 1], reading.cache, self._chunk)
            self._reading.rotate(-1)
        else:
            self._answer(reading)
            self._reading.popleft()

    def _drafting(self) -> bool:
        injection = injection_of(self._model)
        return injection is not None and injection.drafting

    def _answer(self, reading: _Reading) -> None:
        job, cache, ids = reading.job, reading.cache, reading.job.ask.token_ids
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
                logits_processor=[_Usable(job), _Adjusted(job, self._drafting)],
                max_new_tokens=job.ask.max_tokens,
                max_length=None,
                num_beams=1,
                pad_token_id=self._pad_token,
                return_dict_in_generate=True,
                **_sampling(job),
            )
        known = made.past_key_values
        self._kept.keep(made.sequences[0].tolist(), known if steps is None else steps.grown_cache(self._model, known))
        self._kept_scope = job.scope
        job.finish("cancelled" if job.cancelled else "stop")
        if job.ending == "failed":  # only the tokens before this request are certainly right in the cache
            cache, shared = self._kept.take(ids[: job.kept_tokens + 1])
            if shared == job.kept_tokens:
                self._kept.keep(ids, cache)
        if not self._most_kept or self._token_bytes * len(self._kept.held[0]) > self._most_kept:
            self._kept.drop()

    def forget(self) -> None:
        """Drop the requests and caches, after a failure that may have left a cache incomplete."""
        self._kept.drop()
        self._reading.clear()


READ_TOGETHER = 8  # prompts that take turns


@dataclass(eq=False, slots=True)
class _Reading:
    """A prompt and its cache."""

    job: Job
    cache: DynamicCache | None

    def held(self) -> int:
        return self.cache.get_seq_length() if self.cache is not None else 0


def _scores_prompt(ask: Ask) -> bool:
    return ask.echo and ask.logprobs is not None


def _sampling(job: Job) -> dict[str, Any]:
    ask = job.ask
    own = {} if ask.repetition_penalty is None else {"repetition_penalty": ask.repetition_penalty}
    if ask.greedy:
        return {**NEUTRAL, **own, "do_sample": False}
    drawn = {"temperature": ask.temperature, "top_p": ask.top_p, "top_k": ask.top_k}
    return {"do_sample": True, **drawn, **own, **({"min_p": ask.min_p} if ask.min_p else {})}


logger = logging.getLogger(__name__)
# Options of a generation config that only `generate` applies, with the values that mean "off".
PROCESSED = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_p": 0.0, "typical_p": 1.0, "bad_words_ids": None}


def batching_obstacle(model: PreTrainedModel) -> str | None:
    """Return the reason why requests for this model cannot be decoded together; None if they can."""
    injection = injection_of(model)
    operator = None if injection is None else injection.model_operator
    if operator is not None and operator.batch_drafts() is None:
        return f"{operator.name} decodes one sequence at a time with these options"
    if not {"position_ids", "attention_mask", "past_key_values"} <= inspect.signature(model.forward).parameters.keys():
        return "the model's forward pass has no arguments for positions and an attention mask"
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    if getattr(model, "_is_stateful", False) or any(type(layer) not in APPENDABLE for layer in layers):
        return "not all of the model's layers are of attention, and the caches of others cannot be joined at different lengths"
    asked = [name for name, off in PROCESSED.items() if getattr(model.generation_config, name, None) not in (None, off)]
    return f"the model's generation config sets {', '.join(asked)}" if asked else None


def rotary_limit(model: PreTrainedModel) -> int | None:
    """Return the most tokens of a text which leaves the rotary embeddings of others in its pass as they are; None: any number.

    Embeddings of the kind `longrope` are others for all positions once one is beyond the limit; `dynamic` ones depend on the longest text.
    """
    config = model.config.get_text_config(decoder=True)
    given = getattr(config, "rope_parameters", None) or {}
    limits = []
    for each in (given, *given.values()):
        kind = each.get("rope_type") if isinstance(each, Mapping) else None
        if kind in ("longrope", "dynamic"):
            limits.append(int(each.get("original_max_position_embeddings") or 0) if kind == "longrope" else 0)
    return min(limits, default=None)


SHORT_SHARE = 8  # a prompt of at most this part of a chunk is short
LONGEST_WAIT = 3  # times that a short prompt takes, for which another one waits for a chunk
LEAST_CHUNK = 32  # tokens, below which a chunk would read the weights for too few
REMEMBERED = 32  # chunks for which short prompts are expected after the last one


class ChunkSize:
    """The tokens of prompts in one forward pass: at most `most`, and fewer while short prompts come between those of long ones.

    A short prompt waits for the chunk that is computed when it comes. Where a pass takes as long as its tokens, a chunk of 512 takes many
    times as long as the short prompt itself; where it takes as long as the weights, as when they are transferred to a GPU, chunks of any
    size take the same time, and a small one gains nothing. So chunks have the size that takes `LONGEST_WAIT` times as long as the last
    short prompt did.

    Args:
        most: 0: whole prompts.
        fixed: whether all chunks have this size.
    """

    def __init__(self, most: int, *, fixed: bool = False) -> None:
        self._most = most
        self._fixed = fixed
        self._short_s = self._token_s = 0.0
        self._left = 0  # chunks before short prompts are forgotten

    @property
    def tokens(self) -> int:
        if self._fixed or not self._left:
            return self._most
        fitting = int(LONGEST_WAIT * self._short_s / self._token_s) // LEAST_CHUNK * LEAST_CHUNK
        return min(self._most, max(LEAST_CHUNK, fitting))

    def took(self, seconds: float, tokens: int, *, prompts: int, whole: bool) -> None:
        """Note the time of a pass over so many tokens of each of `prompts` prompts; `whole`: one of them began and ended in it."""
        if whole and tokens * SHORT_SHARE <= self._most:
            self._left = REMEMBERED
            if prompts == 1 or not self._short_s:
                self._short_s = seconds / prompts
            # Before the first chunk, the short prompt's own rate: too slow, as it reads the weights for few tokens, but no long wait.
            self._token_s = self._token_s or seconds / (prompts * tokens)
        elif 2 * prompts * tokens > self.tokens > 0:  # not what is left of a prompt
            self._token_s = seconds / (prompts * tokens)
            self._left = max(0, self._left - 1)


class BatchedDecoder:
    """Decodes several texts in one forward pass, and computes at most one chunk of prompts between two such passes.

    A chunk is shared by prompts that are equally far from its end: alternately the shortest rest and the oldest prompt lead, and others
    join with as many tokens where the model's cache allows it. So a short prompt waits for one chunk of a long one, and a long one for no
    more than every second step.

    A failure of one answer ends it alone; a failed forward pass ends the answers in it. The caches of the others stay valid.

    With `drafts`, a step may draft several tokens of each text and verify those of all texts in one pass. Each token is chosen from the
    full model's logits with the answer's next random number, as without drafts; a draft only decides for how many tokens these logits
    are known. So an answer does not depend on what was drafted, nor on when drafts pay.

    What a kernel gives one row depends, by rounding, on the number of rows: other products of matrices are fastest for more. If answers
    must not depend on that, each text has passes of its own, prompts have the same chunks whatever else is read, and a conversation goes on
    from whole chunks of earlier prompts only, as its answer was computed in other passes than a prompt is.

    Args:
        drafts: over texts in pages, from which tokens can be removed.
        own_passes: whether each text has passes of its own, so that answers are exactly the same whatever other answers there are.
        shared_tokens: while a text has more, each has passes of its own; None: any number.
        ends: tokens that end an answer, and a draft.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        texts: PagedTexts | PaddedTexts,
        *,
        most: int,
        prefill_chunk: int,
        drafts: BatchDrafts | None = None,
        ends: Sequence[int] = (),
        own_passes: bool = False,
        shared_tokens: int | None = None,
    ) -> None:
        assert drafts is None or isinstance(texts, PagedTexts), "tokens can be removed from pages only"
        assert drafts is None or not own_passes, "when drafts pay is a matter of time"
        self._drafts = drafts
        self._padding = 0 if drafts is None else drafts.longest  # tokens after a text's own in the pass that verifies the longest draft
        self._texts = texts
        self._most = most
        self._own_passes = own_passes
        self._shared_tokens = shared_tokens
        self._chunk = ChunkSize(prefill_chunk, fixed=own_passes)
        self._decoding: list[tuple[Job, Text]] = []
        self._reading: list[tuple[Job, Text]] = []  # the oldest first
        self._oldest_leads = False
        self._ends = frozenset(ends)
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}

    @property
    def jobs(self) -> list[Job]:
        return [job for job, _ in (*self._decoding, *self._reading)]

    @property
    def memory(self) -> CacheMemory:
        return self._texts.memory

    @property
    def _parted(self) -> bool:
        """Whether each text has a pass of its own now."""
        limit = math.inf if self._shared_tokens is None else self._shared_tokens
        return self._own_passes or any(len(job.token_ids) + self._padding >= limit for job in self.jobs)

    def needed_bytes(self, job: Job) -> int:
        return self._texts.needed_bytes(job.most_tokens + self._padding)

    def fits(self, job: Job) -> bool:
        return len(self._decoding) + len(self._reading) < self._most and self._texts.fits(job.most_tokens + self._padding)

    def admit(self, job: Job) -> None:
        """Start a request; `fits` must be true."""
        # For the scores of a prompt every token's logits are needed.
        multiple = 0 if _scores_prompt(job.ask) else self._chunk.tokens if self._own_passes else 1
        text = self._texts.begin(job.ask.token_ids, job.most_tokens + self._padding, job.scope, multiple=multiple)
        job.kept_tokens = text.tokens
        self._reading.append((job, text))

    def step(self) -> None:
        """Decode a token of each text, then compute a chunk of prompts."""
        for job, text in [*self._decoding, *self._reading]:
            if job.cancelled:
                job.finish("cancelled")
                self._end(job, text)
        if self._decoding and self._parted:
            for job, text in list(self._decoding):
                self._decode_alone(job, text)
        elif self._decoding:
            self._decode()
        if self._reading:
            self._read()

    def forget(self) -> None:
        """Drop all requests and caches, after a failure that may have left caches incomplete."""
        for _, text in [*self._decoding, *self._reading]:
            self._texts.end(text)
        self._decoding, self._reading = [], []
        self._texts.drop_kept()

    def _decode_alone(self, job: Job, text: Text) -> None:
        with job.failing_alone():
            try:
                logits = self._texts.read([text], [job.token_ids[-1:]])
            except torch.OutOfMemoryError:
                self._texts.drop_kept()
                raise
            self._take([job], logits[:, -1].float())
        if job.ending is not None:
            self._end(job, text)

    def _decode(self) -> None:
        jobs, texts = [job for job, _ in self._decoding], [text for _, text in self._decoding]
        before = [job.completion_tokens for job in jobs]
        started_s = time.perf_counter()
        try:
            drafts = self._draft(jobs, texts)
            drafted_s = time.perf_counter()
            longest = max(len(draft.tokens) for draft in drafts) if drafts else 0
            if longest:
                # A shorter draft is followed by any token, which is dropped with the rejected ones.
                rows = [[job.token_ids[-1], *draft.tokens] for job, draft in zip(jobs, drafts, strict=True)]
                logits = self._texts.read(texts, [row + row[-1:] * (longest + 1 - len(row)) for row in rows])
            else:
                logits = self._texts.step(texts, [job.token_ids[-1] for job in jobs])[:, None]
            going = list(range(len(jobs)))  # rows whose next logits follow their own tokens
            accepted = [0] * len(jobs)
            for place in range(longest + 1):
                now = logits[:, place] if len(going) == len(jobs) else logits[going, place]
                tokens = self._take([jobs[row] for row in going], now.float())
                same = [
                    row
                    for row, token in zip(going, tokens, strict=True)
                    if jobs[row].ending is None and drafts and drafts[row].tokens[place : place + 1] == [token]
                ]
                for row in same:
                    accepted[row] += 1
                going = same
                if not going:
                    break
        except torch.AcceleratorError:  # the device cannot be used after it
            raise
        except Exception as error:  # any error must leave other prompts and waiting requests running
            logger.exception("serve: a forward pass failed; the %d answers in it end", len(jobs))
            for job, text in self._decoding:
                job.fail(error)
                self._texts.end(text)
            self._decoding = []
            if isinstance(error, torch.OutOfMemoryError):
                self._texts.drop_kept()
            return
        if longest:
            assert isinstance(self._texts, PagedTexts), "drafts are over pages"
            for job, text in self._decoding:
                self._texts.crop(text, len(job.token_ids) - 1)
        if self._drafts is not None:
            ended_s = time.perf_counter()
            gained = [job.completion_tokens - count for job, count in zip(jobs, before, strict=True)]
            drafted = [draft.confidences for draft in drafts] or [[]] * len(jobs)
            done = [
                DraftedRow(shares, min(count + 1, len(shares)) if job.ending is None else count, count, grown)
                for job, shares, count, grown in zip(jobs, drafted, accepted, gained, strict=True)
            ]
            try:
                self._drafts.record(done, 1e3 * (drafted_s - started_s), 1e3 * (ended_s - drafted_s))
            except Exception:  # statistics must not end answers
                logger.exception("serve: a round of drafts cannot be recorded")
        for job, text in list(self._decoding):
            if job.ending is not None:
                self._end(job, text)

    def _take(self, jobs: Sequence[Job], logits: torch.Tensor) -> list[int]:
        """Choose the next token of each answer by its logits (B, V) float32, and add it; return the tokens."""
        good = usable(logits)
        logits = logits if good.all() else logits.where(good[:, None], 0.0)
        tokens = choose(logits, jobs)
        for row, job in enumerate(jobs):
            with job.failing_alone():
                if not good[row]:
                    raise BadLogitsError
                if job.ending is None:
                    wanted = job.ask.logprobs
                    job.take(tokens[row], None if wanted is None else score(logits[row : row + 1], [tokens[row]], wanted)[0])
        return tokens

    def _draft(self, jobs: Sequence[Job], texts: Sequence[Text]) -> list[Draft]:
        """Return a draft for each answer, perhaps without tokens; none at all for a plain step."""
        length = 0
        rests = [job.ask.max_tokens - job.completion_tokens - 1 for job in jobs]  # before the last token, which is not drafted
        if self._drafts is not None:
            length = self._drafts.plan(len(jobs), max(rests))
        if self._drafts is None or not length:
            return []
        drafts = [Draft(job, min(length, rest)) for job, rest in zip(jobs, rests, strict=True)]
        going = [(draft, text) for draft, text in zip(drafts, texts, strict=True) if draft.most]
        for draft, _ in going[:]:
            if (found := self._drafts.lookup(draft.token_ids, draft.most)) is not None:
                draft.tokens, draft.confidences = found, [1.0] * len(found)
                going = []
        held = [text.tokens for text in texts]
        with self._drafts.drafting():
            for _ in range(length if going else 0):
                logits = self._texts.step([text for _, text in going], [draft.token_ids[-1] for draft, _ in going])
                tokens = choose(logits.where(usable(logits)[:, None], 0.0), [draft for draft, _ in going])
                shares = logits.softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
                for (draft, _), token, share in zip(going, tokens, shares, strict=True):
                    if draft.ended or math.isnan(share):  # no token can be chosen; the answer's is chosen from other logits
                        draft.ended = True
                        continue
                    draft.tokens.append(token)
                    draft.token_ids.append(token)
                    draft.confidences.append(share)
                    full = len(draft.tokens) == draft.most
                    draft.ended = full or token in self._ends or not self._drafts.continues(draft.confidences)
                going = [(draft, text) for draft, text in going if not draft.ended]
                if not going:
                    break
        for text, tokens_held in zip(texts, held, strict=True):
            if text.tokens > tokens_held:
                assert isinstance(self._texts, PagedTexts), "drafts are over pages"
                self._texts.crop(text, tokens_held)
        return drafts

    def _end(self, job: Job, text: Text) -> None:
        """Remove a job that has ended, and keep its cache: after a failure only the part of an earlier request, which is right."""
        self._decoding = [each for each in self._decoding if each[0] is not job]
        self._reading = [each for each in self._reading if each[0] is not job]
        kept = len(job.token_ids) if job.ending != "failed" else job.kept_tokens
        if self._own_passes:
            kept = min(kept, len(job.ask.token_ids)) // chunk * chunk if (chunk := self._chunk.tokens) else 0
        self._texts.end(text, job.token_ids[:kept])

    def _read(self) -> None:
        """Compute a chunk of the prompts that share this step."""
        rest = {job: len(job.token_ids) - text.tokens for job, text in self._reading}
        self._oldest_leads = len(self._reading) == 1 or not self._oldest_leads  # the next turn is that of a prompt which comes now
        leader = self._reading[0] if self._oldest_leads else min(self._reading, key=lambda each: rest[each[0]])
        chunk = self._chunk.tokens
        tokens = min(rest[leader[0]], chunk or rest[leader[0]])
        together = [leader]
        if self._texts.shares_passes and not self._parted and not _scores_prompt(leader[0].ask):
            others = [each for each in self._reading if each is not leader and rest[each[0]] >= tokens and not _scores_prompt(each[0].ask)]
            together += sorted(others, key=lambda each: rest[each[0]])[: chunk // tokens - 1 if chunk else 0]
        if len(together) > 1:
            try:
                self._read_chunk(together, tokens)
                return
            except torch.AcceleratorError:
                raise
            except Exception:  # which of the prompts has caused it is not known
                logger.warning("serve: a chunk of %d prompts failed; each is computed alone", len(together), exc_info=True)
        for job, text in together:
            with job.failing_alone():
                self._read_chunk([(job, text)], tokens)
            if job.ending == "failed" and (job, text) in self._reading:
                self._end(job, text)

    def _read_chunk(self, together: list[tuple[Job, Text]], tokens: int) -> None:
        chunks = [job.token_ids[text.tokens : text.tokens + tokens] for job, text in together]
        scored = _scores_prompt(together[0][0].ask)
        whole = any(tokens == len(job.ask.token_ids) - job.kept_tokens for job, _ in together)
        began = time.perf_counter()
        try:
            logits = self._texts.read([text for _, text in together], chunks, **({} if scored else self._last_only))
        except torch.OutOfMemoryError:
            self._texts.drop_kept()
            raise
        self._chunk.took(time.perf_counter() - began, tokens, prompts=len(together), whole=whole)
        for row, (job, text) in enumerate(together):
            with job.failing_alone():
                self._go_on(job, text, logits[row], tokens)
            if job.ending is not None:
                self._end(job, text)

    def _go_on(self, job: Job, text: Text, logits: torch.Tensor, tokens: int) -> None:
        """Take the logits (T, V) of a chunk, and start the answer if it was the last."""
        held = text.tokens
        if _scores_prompt(job.ask):
            assert job.ask.logprobs is not None, "scores are asked for"
            following = job.token_ids[held - tokens + 1 : held + 1]
            job.prompt_scores += [] if held > tokens else [TokenScore(job.token_ids[0])]
            job.prompt_scores += score(logits[: len(following)], following, job.ask.logprobs)
        if held < len(job.token_ids):
            return
        if not job.ask.max_tokens:
            job.finish("length")
            return
        last = logits[-1:].float()
        self._take([job], last)
        if job.ending is None:
            if not self._own_passes:
                self._texts.join(text)
            self._reading.remove((job, text))
            self._decoding.append((job, text))
