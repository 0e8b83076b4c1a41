"""The scheduler of the server: which requests start, which of them a forward pass computes, and which models allow that."""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from moegraft.injection.cli.images import ImageInputs
from moegraft.injection.cli.serve.job import Ask, Job, TokenScore
from moegraft.injection.cli.serve.open_pool import MOST_RAGGED
from moegraft.injection.cli.serve.pages import CacheMemory, RaggedPassError, SequencePool
from moegraft.injection.cli.serve.sampling import Draft, choose, extend, score, usable
from moegraft.injection.injected import injection_of
from moegraft.operators.base import CACHE
from moegraft.operators.decode.pages import PAGE_TOKENS, PagedSequence
from moegraft.operators.draft import BatchDrafts
from moegraft.operators.schedule import Round

logger = logging.getLogger(__name__)
# Options of a generation config that only `generate` applies, with the values that mean "off".
PROCESSED = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_p": 0.0, "typical_p": 1.0, "bad_words_ids": None}


def stores_codes(model: PreTrainedModel) -> bool:
    """Return whether the model's rules store keys and values as codes that attention reads in place, as pages of a server can."""
    injection = injection_of(model)
    form = None if injection is None else injection.plan.cache_form(model.config)
    return form is not None and form.in_place


def batching_obstacle(model: PreTrainedModel) -> str | None:
    """Return the reason why requests for this model cannot be decoded together; None if they can."""
    injection = injection_of(model)
    operator = None if injection is None else injection.model_operator
    for each in () if operator is None else operator.operators:
        in_pages = stores_codes(model) and each.traits(each.options).cache_form is not None
        if not in_pages and each.batch_drafts() is None:
            return f"{each.name} decodes one sequence at a time with these options"
    if not {"position_ids", "attention_mask", CACHE} <= inspect.signature(model.forward).parameters.keys():
        return "the model's forward pass has no arguments for positions and an attention mask"
    asked = [name for name, off in PROCESSED.items() if getattr(model.generation_config, name, None) not in (None, off)]
    return f"the model's generation config sets {', '.join(asked)}" if asked else None


SHORT_SHARE = 8  # a prompt of at most this part of a chunk is short
LONGEST_WAIT = 3  # times that a short prompt takes, for which another one waits for a chunk
MOST_RAGGED_KEYS = 1 << 16  # of a prompt's tokens together in a pass of decoding, where each reads those of the tokens before it by itself
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


class Scheduler:
    """Computes several requests in one forward pass, and at most one chunk of prompts between two passes of decoding.

    Short prompts, or what a prefix leaves of longer ones, are computed in a pass of decoding (Sarathi: Agrawal et al. 2023,
    arXiv:2308.16369), so that the weights are read once for both and no answer waits for a pass of theirs alone.

    A chunk is shared by prompts that are equally far from its end: alternately the shortest rest and the oldest prompt lead, and others
    join with as many tokens. So a short prompt waits for one chunk of a long one, and a long one for no more than every second step.

    A failure of one answer ends it alone; a failed forward pass ends the answers in it. The sequences of the others stay valid.

    With `drafts`, a step may draft several tokens of each answer and verify those of all in one pass. Each token is chosen from the
    full model's logits with the answer's next random number, as without drafts; a draft only decides for how many tokens these logits
    are known. So an answer does not depend on what was drafted, nor on when drafts pay. Where a pass can have any number of tokens of each
    sequence, drafts of different lengths are verified without padding, of which each token would need experts of its own.

    What a kernel gives one row depends, by rounding, on the number of rows: other products of matrices are fastest for more. If answers
    must not depend on that, each sequence has passes of its own, prompts have the same chunks whatever else is computed, and a request
    begins with whole chunks of earlier prompts only, as answers were computed in other passes than a prompt is.

    The beginning of a prompt up to its last image is a chunk of its own, of whatever length, as the model places all images at once.

    Args:
        most: requests at once.
        prefill_chunk: prompt tokens in one pass; 0: whole prompts.
        own_passes: whether each sequence has passes of its own, so that answers are exactly the same whatever other answers there are.
        shared_tokens: while a sequence has more, each has passes of its own; None: any number.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pool: SequencePool,
        *,
        most: int,
        prefill_chunk: int,
        drafts: BatchDrafts | None = None,
        own_passes: bool = False,
        shared_tokens: int | None = None,
    ) -> None:
        assert drafts is None or not own_passes, "when drafts pay is a matter of time"
        self._drafts = drafts
        self._padding = 0 if drafts is None else drafts.longest  # tokens after a sequence's own in the pass that verifies the longest draft
        self._pool = pool
        self._most = most
        self._own_passes = own_passes
        self._shared_tokens = shared_tokens
        self._chunk = ChunkSize(max(prefill_chunk, pool.least_part) if prefill_chunk else 0, fixed=own_passes)
        self._sequences: dict[Job, PagedSequence] = {}  # of all running requests
        self._decoding: list[Job] = []
        self._prefilling: list[Job] = []  # the oldest first
        self._oldest_leads = False
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}

    @property
    def jobs(self) -> list[Job]:
        return [*self._decoding, *self._prefilling]

    @property
    def memory(self) -> CacheMemory:
        return self._pool.memory

    @property
    def _multiple(self) -> int:
        """Of so many tokens are the parts of prompts between which recurrent states are saved."""
        return self._chunk.tokens if self._own_passes else PAGE_TOKENS

    @property
    def _separate(self) -> bool:
        """Whether each sequence has passes of its own now."""
        limit = math.inf if self._shared_tokens is None else self._shared_tokens
        return self._own_passes or any(len(job.token_ids) + self._padding >= limit for job in self.jobs)

    def needed_bytes(self, job: Job) -> int:
        return self._pool.needed_bytes(job.most_tokens + self._padding)

    def fits(self, job: Job) -> bool:
        return len(self._sequences) < self._most and self._pool.fits(job.most_tokens + self._padding)

    def admit(self, job: Job) -> None:
        """Start a request; `fits` must be true."""
        # For the scores of a prompt every token's logits are needed; the chunk that ends with an image is no whole one.
        none = _scores_prompt(job.ask) or (self._own_passes and job.ask.images is not None)
        multiple = 0 if none else self._chunk.tokens if self._own_passes else 1
        most = job.most_tokens + self._padding
        sequence = self._pool.begin(job.ask.token_ids, most, job.scope, multiple=multiple, images=job.ask.images)
        job.cached_tokens = sequence.tokens
        self._sequences[job] = sequence
        self._prefilling.append(job)

    def step(self) -> None:
        """Decode a token of each answer, with short prompts in the same pass, then compute a chunk of the other prompts."""
        for job in self.jobs:
            if job.cancelled:
                job.finish("cancelled")
                self._retire(job)
        if self._separate:
            for job in list(self._decoding):
                self._decode([job], alone=True)
        elif self._decoding and not self._decode(list(self._decoding), self._short_prompts()):
            self._decode(list(self._decoding))
        if self._prefilling:
            self._prefill()

    def forget(self) -> None:
        """Drop all requests and caches, after a failure that may have left caches incomplete."""
        for sequence in self._sequences.values():
            self._pool.end(sequence)
        self._sequences, self._decoding, self._prefilling = {}, [], []
        self._pool.drop_prefixes()

    def _retire(self, job: Job) -> None:
        """Remove a job that has ended, and keep its tokens as a prefix: after a failure only those that it began with, which are right."""
        if job in self._prefilling:
            self._prefilling.remove(job)
        elif job in self._decoding:  # the last takes its row, so that the recurrent states of no more than one sequence move
            self._decoding[self._decoding.index(job)] = self._decoding[-1]
            del self._decoding[-1]
        tokens = len(job.token_ids) if job.ending != "failed" else job.cached_tokens
        if self._own_passes:
            chunk = self._chunk.tokens if job.ask.images is None else 0
            tokens = min(tokens, len(job.ask.token_ids)) // chunk * chunk if chunk else 0
        self._pool.end(self._sequences.pop(job), job.cache_ids[:tokens], job.scope)

    def _decode(self, answers: Sequence[Job], prompts: Sequence[Job] = (), *, alone: bool = False) -> bool:
        """Compute the next tokens of some answers in one pass: one of each, as many of its draft as the model chooses, and whole prompts.

        Returns:
            Whether that was done; False where another pass can do it without the prompts, and nothing has changed.
        """
        jobs, count = [*answers, *prompts], len(answers)
        sequences = [self._sequences[job] for job in jobs]
        before = [job.completion_tokens for job in answers]
        rows: Sequence[int] = range(count)
        logits: torch.Tensor | None = None
        started_s = time.perf_counter()
        try:
            drafts = [] if alone else self._draft(answers, sequences[:count])
            drafted_s = time.perf_counter()
            tokens = [job.token_ids[sequence.tokens :] for job, sequence in zip(jobs, sequences, strict=True)]
            for ids, draft in zip(tokens, drafts, strict=False):
                ids += draft.tokens
            drafted = any(draft.tokens for draft in drafts)
            if drafted or prompts:
                logits, rows = self._pool.verify(sequences, tokens, [*map(len, tokens[:count]), *(1 for _ in prompts)])
                for job, sequence in zip(prompts, sequences[count:], strict=True):
                    self._pool.crop(sequence, len(job.token_ids))  # what padded a prompt beside drafts
            elif alone:
                logits = self._pool.forward(sequences, tokens)[:, -1]
            else:
                logits = self._pool.step(sequences, [ids[-1] for ids in tokens])
            computed_s = time.perf_counter()
            accepted = _accept(answers, drafts, logits, rows)
            if drafted:
                for job, sequence in zip(answers, sequences, strict=False):
                    self._pool.crop(sequence, len(job.token_ids) - 1)
        except torch.AcceleratorError:  # the device cannot be used after it
            raise
        except RaggedPassError:  # which of them has caused it is not known
            text = "serve: a pass of %d answers and %d prompts failed; passes have equally many tokens of each from now on"
            logger.warning(text, count, len(prompts), exc_info=True)
            return False
        except Exception as error:  # any error must leave other prompts and waiting requests running
            logger.exception("serve: a forward pass failed; the %d answers in it end", count)
            for job in answers:
                job.fail(error)
        else:
            if self._drafts is not None and not alone:
                confidences = [draft.confidences for draft in drafts] or [[]] * count
                done = [
                    Round(shares, min(places + 1, len(shares)) if job.ending is None else places, places, job.completion_tokens - old)
                    for job, shares, places, old in zip(answers, confidences, accepted, before, strict=True)
                ]
                took_ms = 1e3 * (drafted_s - started_s), 1e3 * (time.perf_counter() - drafted_s)
                try:
                    self._drafts.record(done, *took_ms, alone=not prompts)
                except Exception:  # statistics must not end answers
                    logger.exception("serve: a round of drafts cannot be recorded")
        if prompts and logits is not None:
            whole = any(len(ids) == len(job.ask.token_ids) - job.cached_tokens for job, ids in zip(prompts, tokens[count:], strict=True))
            self._chunk.took(computed_s - drafted_s, len(tokens[-1]), prompts=len(prompts), whole=whole)
            for job, ids, row in zip(prompts, tokens[count:], rows[count:], strict=True):
                with job.failing_alone():
                    self._go_on(job, logits[row : row + 1], len(ids))
        for job in jobs:
            if job.ending is not None:
                self._retire(job)
        return True

    def _short_prompts(self) -> list[Job]:
        """Return the prompts whose rests can be computed in a pass of decoding, the oldest first."""
        if not self._pool.ragged:
            return []
        left = min(MOST_RAGGED, self._chunk.tokens or MOST_RAGGED)
        found = []
        for job in self._prefilling:
            rest = len(job.token_ids) - self._sequences[job].tokens
            if rest <= left and rest * len(job.token_ids) <= MOST_RAGGED_KEYS and self._images(job) is None and not _scores_prompt(job.ask):
                found.append(job)
                left -= rest
        return found

    def _draft(self, jobs: Sequence[Job], sequences: Sequence[PagedSequence]) -> list[Draft]:
        """Return a draft for each answer, perhaps without tokens; none at all for a plain step."""
        most = self._pool.most_drafted
        if self._drafts is None or (most is not None and len(jobs) > most):
            return []
        rests = [job.ask.max_tokens - job.completion_tokens - 1 for job in jobs]  # before the last token, which is not drafted
        length = self._drafts.plan(len(jobs), max(rests))
        if not length:
            return []
        drafts = [Draft(job, min(length, rest)) for job, rest in zip(jobs, rests, strict=True)]
        going = [(draft, sequence) for draft, sequence in zip(drafts, sequences, strict=True) if draft.most]
        for draft, _ in going[:]:
            if (tokens := self._drafts.lookup(draft.job, draft.token_ids, draft.most)) is not None:
                draft.tokens, draft.confidences = tokens, [1.0] * len(tokens)
                going = []
        lengths = [sequence.tokens for sequence in sequences]
        self._pool.mark([sequence for _, sequence in going])
        with self._drafts.drafting():
            for _ in range(length if going else 0):
                logits = self._pool.draft([sequence for _, sequence in going], [draft.token_ids for draft, _ in going])
                tokens = choose(logits.where(usable(logits)[:, None], 0.0), [draft for draft, _ in going])
                shares = logits.softmax(-1).gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
                for (draft, _), token, share in zip(going, tokens, shares, strict=True):
                    if draft.ended or math.isnan(share):  # no token can be chosen; the answer's is chosen from other logits
                        draft.ended = True
                        continue
                    draft.tokens.append(token)
                    draft.token_ids.append(token)
                    draft.confidences.append(share)
                    full = len(draft.tokens) == draft.most
                    draft.ended = full or token in draft.ask.end_tokens or not self._drafts.continues(draft.confidences)
                going = [(draft, sequence) for draft, sequence in going if not draft.ended]
                if not going:
                    break
        for sequence, tokens_before in zip(sequences, lengths, strict=True):
            if sequence.tokens > tokens_before:
                self._pool.crop(sequence, tokens_before)
        return drafts

    def _prefill(self) -> None:
        """Compute a chunk of the prompts that share this step."""
        rest = {job: self._part(job) for job in self._prefilling}
        self._oldest_leads = len(self._prefilling) == 1 or not self._oldest_leads  # the next turn is that of a prompt which comes now
        leader = self._prefilling[0] if self._oldest_leads else min(self._prefilling, key=rest.__getitem__)
        chunk, least = self._chunk.tokens, self._pool.least_part
        whole = self._images(leader) is not None
        tokens = chunk if chunk and not whole and rest[leader] >= chunk + least else rest[leader]  # no part of fewer than `least` is left
        together = [leader]
        if not self._separate and not whole and not _scores_prompt(leader.ask):
            alone = {leader, *(job for job in self._prefilling if _scores_prompt(job.ask) or self._images(job) is not None)}
            others = [job for job in self._prefilling if job not in alone]
            others = [job for job in others if rest[job] == tokens or rest[job] >= tokens + least]
            together += sorted(others, key=rest.__getitem__)[: max(0, chunk // tokens - 1)]
        if len(together) > 1:
            try:
                self._prefill_chunk(together, tokens)
                return
            except torch.AcceleratorError:
                raise
            except Exception:  # which of the prompts has caused it is not known
                logger.warning("serve: a chunk of %d prompts failed; each is computed alone", len(together), exc_info=True)
        for job in together:
            with job.failing_alone():
                self._prefill_chunk([job], tokens)
            if job.ending == "failed" and job in self._sequences:
                self._retire(job)

    def _images(self, job: Job) -> ImageInputs | None:
        """Return the images of a prompt whose sequence has not got them."""
        images = job.ask.images
        return None if images is None or self._sequences[job].tokens >= images.end else images

    def _part(self, job: Job) -> int:
        """Return how many tokens of a prompt come before the next place at which it is divided."""
        sequence, images, tokens = self._sequences[job], self._images(job), len(job.token_ids)
        if images is None:
            return self._pool.until_checkpoint(sequence, tokens, self._multiple)
        return (images.end if images.end + self._pool.least_part <= tokens else tokens) - sequence.tokens

    def _prefill_chunk(self, jobs: Sequence[Job], tokens: int) -> None:
        sequences = [self._sequences[job] for job in jobs]
        chunks = [job.token_ids[sequence.tokens : sequence.tokens + tokens] for job, sequence in zip(jobs, sequences, strict=True)]
        whole = any(tokens == len(job.ask.token_ids) - job.cached_tokens for job in jobs)
        extra: dict[str, Any] = {} if _scores_prompt(jobs[0].ask) else self._last_only
        if (images := self._images(jobs[0])) is not None:
            begin = sequences[0].tokens
            logits = self._pool.forward(sequences, chunks, **extra | images.arguments(begin, begin + tokens))
            sequences[0].position_shift = images.position_shift
        else:
            began = time.perf_counter()
            logits = self._pool.forward(sequences, chunks, **extra)
            self._chunk.took(time.perf_counter() - began, tokens, prompts=len(jobs), whole=whole)
        for row, job in enumerate(jobs):
            with job.failing_alone():
                self._pool.checkpoint(self._sequences[job], len(job.token_ids), self._multiple)
                self._go_on(job, logits[row], tokens)
            if job.ending is not None:
                self._retire(job)

    def _go_on(self, job: Job, logits: torch.Tensor, tokens: int) -> None:
        """Take the logits (T, V) of a chunk, and start the answer if it was the last."""
        end = self._sequences[job].tokens
        if _scores_prompt(job.ask):
            assert job.ask.logprobs is not None, "scores are asked for"
            following = job.token_ids[end - tokens + 1 : end + 1]
            job.prompt_scores += [] if end > tokens else [TokenScore(job.token_ids[0])]
            job.prompt_scores += score(logits[: len(following)], following, job.ask.logprobs)
        if end < len(job.token_ids):
            return
        if not job.ask.max_tokens:
            job.finish("length")
            return
        extend([job], logits[-1:].float())
        if job.ending is None:
            self._prefilling.remove(job)
            self._decoding.append(job)


def _scores_prompt(ask: Ask) -> bool:
    return ask.echo and ask.logprobs is not None


def _accept(jobs: Sequence[Job], drafts: Sequence[Draft], logits: torch.Tensor, rows: Sequence[int]) -> list[int]:
    """Extend each answer by the model's choices for as long as these are its draft's tokens, and by one more.

    Args:
        logits: (N, V), those after an answer's own last token and then after its draft's in consecutive rows from its place in `rows` on.

    Returns:
        How many tokens of each draft were accepted.
    """
    accepted = [0] * len(jobs)
    going = list(range(len(jobs)))  # answers whose next logits follow their own tokens
    while going:
        now = logits if len(going) == len(logits) else logits[[rows[each] + accepted[each] for each in going]]
        tokens = extend([jobs[each] for each in going], now.float())
        going = [
            each
            for each, token in zip(going, tokens, strict=True)
            if jobs[each].ending is None and drafts and drafts[each].tokens[accepted[each] : accepted[each] + 1] == [token]
        ]
        for each in going:
            accepted[each] += 1
    return accepted
