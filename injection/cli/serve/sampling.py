"""The choice of tokens by their logits and the options of each request, and the scores of tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from moegraft.injection.cli.serve.answer_form import Constraint, GrammarError
from moegraft.injection.cli.serve.job import AnswerError, Ask, BadLogitsError, Job, TokenScore
from moegraft.operators.decode.sampling import largest, likely

_GROUP = 64  # tokens


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
    if len(token_ids) - len(ask.token_ids) < ask.min_tokens:
        logits = logits.index_fill(0, torch.tensor(ask.end_tokens, dtype=torch.int64, device=logits.device), -torch.inf)
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
        self.job, self.ask = job, job.ask
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
    tokens: list[int] = (logits.numpy() if logits.is_cpu else logits).argmax(-1).tolist()  # NumPy's takes a tenth of the time
    alike: dict[tuple[int, bool], list[int]] = {}  # rows in which tokens are chosen in the same order
    for row, job in enumerate(jobs):
        if not job.ask.greedy:
            alike.setdefault((job.ask.top_k, job.ask.top_p < 1), []).append(row)
    for (top_k, nucleus), rows in alike.items():

        def column(values: Iterable[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.tensor(list(values), dtype=dtype, device=logits.device)[:, None]

        scores = logits if len(rows) == len(jobs) else logits[rows]
        index = None  # of the tokens from the likeliest to the unlikeliest
        if 0 < top_k < scores.shape[-1]:
            scores, index = _largest(scores, top_k)
        scores = (scores - scores.amax(-1, keepdim=True)).div_(column((jobs[row].ask.temperature for row in rows), torch.float32))
        shares = scores.exp()  # of the likeliest token's probability
        if nucleus:  # up to the first token with which the share is reached
            reached = column(jobs[row].ask.top_p for row in rows) * shares.sum(-1, keepdim=True, dtype=torch.float64)
            if index is None:
                scores, index = _likeliest(scores, [jobs[row].ask.top_p for row in rows])
                shares = scores.exp()
            left_out = shares.cumsum(-1, dtype=torch.float64) - shares >= reached
            left_out[:, 0] = False  # the likeliest token always stays
            shares = shares.masked_fill(left_out, 0)
        if any(jobs[row].ask.min_p for row in rows):
            shares = shares.masked_fill(shares < column(jobs[row].ask.min_p for row in rows), 0)
        places = _places(shares, column(jobs[row].random.random() for row in rows))
        chosen = places if index is None else index.gather(-1, places)
        for row, token in zip(rows, chosen[:, 0].tolist(), strict=True):
            tokens[row] = token
    return tokens


def _places(shares: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the place (R, 1) in each row of `shares` (R, N) where their sum exceeds the share (R, 1) of the total that a number is.

    Sums are those of groups of tokens, and then of the tokens of one group: those after each token of a large vocabulary are 1 MB a row.
    """
    left = -shares.shape[-1] % _GROUP
    padded = (functional.pad(shares, (0, left)) if left else shares).unflatten(-1, (-1, _GROUP))
    of_groups = padded.sum(-1, dtype=torch.float64)
    after = of_groups.cumsum(-1)
    drawn = numbers * after[:, -1:]
    group = _first_above(after, drawn)
    before = after.gather(-1, group) - of_groups.gather(-1, group)
    within = padded.gather(1, group[..., None].expand(-1, 1, _GROUP))[:, 0].cumsum(-1, dtype=torch.float64)
    return group * _GROUP + _first_above(within, drawn - before)


def _first_above(sums: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the place of the first of the rising sums (R, N) above a number (R, 1).

    Rounding must not pass the first sum that reaches the last, as later tokens have no probability.
    """
    last = sums[:, -1:].contiguous()
    return torch.minimum(torch.searchsorted(sums, numbers, right=True), torch.searchsorted(sums, last))


def _largest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest scores of each row of `scores` (R, V), from the largest on, and their tokens."""
    if not scores.is_cpu:
        return scores.topk(count)
    ordered, index = _in_order(scores, [largest(row, count) for row in scores.numpy()])
    return ordered[:, :count], index[:, :count]


def _likeliest(scores: torch.Tensor, top_p: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of each row of `scores` (R, V) from the largest on, and their tokens: on the CPU those that `top_p` may leave."""
    if not scores.is_cpu:
        return scores.sort(descending=True, stable=True)
    rows = zip(scores.softmax(-1).numpy(), top_p, strict=True)
    return _in_order(scores, [likely(probabilities, share) for probabilities, share in rows])


def _in_order(scores: torch.Tensor, tokens: Sequence[NDArray[np.int64]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of some tokens of each row of `scores` (R, V), from the largest on, and the tokens; shorter rows end with -inf."""
    ordered = [ids[(-row[ids]).argsort(kind="stable")] for row, ids in zip(scores.numpy(), tokens, strict=True)]
    index = pad_sequence([torch.from_numpy(ids) for ids in ordered], batch_first=True)
    ends = torch.tensor([[len(ids)] for ids in ordered])
    return scores.gather(-1, index).masked_fill(torch.arange(index.shape[1]) >= ends, -torch.inf), index


def score(logits: torch.Tensor, tokens: Sequence[int], alternatives: int) -> list[TokenScore]:
    """Return the scores of a token for each row of `logits` (N, V), with the likeliest `alternatives` tokens."""
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    of_tokens = logprobs.gather(-1, torch.tensor(list(tokens), device=logits.device)[:, None])[:, 0].tolist()
    best, index = (found.tolist() for found in logprobs.topk(min(alternatives, logits.shape[-1])))
    return [
        TokenScore(token, value, tuple(zip(ids, values, strict=True)))
        for token, value, ids, values in zip(tokens, of_tokens, index, best, strict=True)
    ]


def extend(jobs: Sequence[Job], logits: torch.Tensor) -> list[int]:
    """Choose the next token of each answer by its logits (B, V) float32, and add it; return the tokens. A job that cannot go on fails."""
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
