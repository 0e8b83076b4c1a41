"""Drafts: the switch that drafters set and layers of experts read, and what a server asks for to draft for a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch

from moegraft.operators.schedule import DraftSchedule, Round, Statistics


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """How experts run while a draft is computed, or verified.

    Attributes:
        top_k: experts per token; at least 1.
        sparsity: share of neurons to leave out, in the scope of the operator's own target; None for the operator's own target.
        budget: experts of a layer that all tokens of a pass have together; None for all that they choose.
    """

    top_k: int = 2**31
    sparsity: float | None = None
    budget: int | None = None


class DraftSwitch:
    """The draft settings of one model, shared by its operators (`context.draft_switch`).

    An experts operator that can draft calls `join` when it is built and `narrow` in every forward pass. Drafting starts and ends by one
    assignment, so an interruption cannot leave only some layers drafting. Each thread has its own settings: a thread that drafts does not
    change the experts of another thread's text.

    Attributes:
        layers: how many layers of experts follow this switch.
        preparations: how many steps of the model were recorded, or computed twice to verify a recording. Later ones take less time.
    """

    def __init__(self) -> None:
        self._thread = threading.local()
        self.layers = 0
        self.preparations = 0

    def join(self) -> None:
        """Count one layer of experts that follows this switch; its operator's `Traits.narrows` is true."""
        self.layers += 1

    @property
    def settings(self) -> DraftSettings | None:
        """The settings of the calling thread; None where it is not drafting and every chosen expert runs."""
        return getattr(self._thread, "settings", None)

    @contextmanager
    def drafting(self, settings: DraftSettings) -> Iterator[None]:
        """Apply `settings` to the calling thread while the body runs."""
        before = self.settings
        try:
            self._thread.settings = settings
            yield
        finally:
            self._thread.settings = before

    def narrow(self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's routing, ids and weights (T, K), reduced to the draft's experts; unchanged while the thread is not drafting."""
        settings = self.settings
        if settings is None:
            return top_k_index, top_k_weights
        if settings.top_k < top_k_index.shape[-1]:
            top_k_index, top_k_weights = keep_largest(top_k_index, top_k_weights, settings.top_k)
        if settings.budget is not None and settings.budget < top_k_index.numel():
            top_k_index, top_k_weights = keep_heaviest(top_k_index, top_k_weights, settings.budget)
        return top_k_index, top_k_weights


NGRAM = 3  # tokens at the end of a sequence that are looked up in it, at most


class NgramIndex:
    """The tokens of a text that grows, with the latest place of each n-gram of at most `NGRAM` tokens: a lookup takes as long in any text.

    Attributes:
        tokens: all so far.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._follows: dict[tuple[int, ...], int] = {}  # where the token after an n-gram is; the last ones of the text have none

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            end = len(self.tokens)
            latest = tuple(self.tokens[-NGRAM:])
            for start in range(len(latest)):
                self._follows[latest[start:]] = end
            self.tokens.append(token)

    def continuation(self, length: int) -> list[int]:
        """Return at most `length` tokens that followed where the latest tokens, `NGRAM` of them or fewer, last occurred."""
        latest = tuple(self.tokens[-NGRAM:])
        for start in range(len(latest)):
            if (place := self._follows.get(latest[start:])) is not None:
                return self.tokens[place : place + length]
        return []


class BatchDrafts:
    """Drafts for texts that are decoded together, each of which accepts as many tokens as it agrees with. One thread uses it.

    The caller drafts for each text, feeds the drafts of all texts to the full model in one pass, and keeps of each text what the full
    model would have generated, so that the text is the same with any drafts.

    Batches of up to 1, 2, 4, 8, ... texts have a schedule each, as the costs of drafts grow with them. It compares the time of a round
    with that of a plain step of the same batch, by the mean of tokens that its texts gained. Where drafts do not pay at a size, it
    switches them off at that size alone.

    Attributes:
        longest: the most tokens of a draft.
        by_mtp_layers: whether the model drafts by its MTP layers or a head, else with its own layers.

    Args:
        statistics: get every round.
        by_ngrams: whether drafts are what followed a text's latest tokens before.
        settings: how experts run where the model drafts with its own layers.
        confidence: a draft ends after a token of lower probability.
    """

    def __init__(
        self,
        switch: DraftSwitch,
        statistics: Statistics,
        new_schedule: Callable[[], DraftSchedule],
        *,
        longest: int,
        by_ngrams: bool,
        by_mtp_layers: bool,
        settings: DraftSettings,
        confidence: float,
    ) -> None:
        self.longest = longest
        self.by_mtp_layers = by_mtp_layers
        self._switch = switch
        self._statistics = statistics
        self._new_schedule = new_schedule
        self._settings = settings
        self._confidence = confidence
        self._schedules: dict[int, DraftSchedule] = {}
        self._indexes: WeakKeyDictionary[object, NgramIndex] | None = WeakKeyDictionary() if by_ngrams else None  # of the texts
        self._rounds = 0
        self._preparations = 0  # of the switch, at the end of the last round

    def plan(self, texts: int, limit: int) -> int:
        """Return the largest number of tokens to draft now for each of `texts` texts, up to `limit`; 0 for a plain step."""
        return self._schedule(texts).plan(max(limit, 0))

    def lookup(self, text: object, token_ids: Sequence[int], length: int) -> list[int] | None:
        """Return at most `length` tokens that may follow a text; None where the model drafts, inside of `drafting`.

        Args:
            text: an object that stands for it while it grows, and can be referred to weakly.
            token_ids: all of its tokens so far.
        """
        if self._indexes is None:
            return None
        index = self._indexes.setdefault(text, NgramIndex())
        index.append(token_ids[len(index.tokens) :])
        return index.continuation(length)

    def drafting(self) -> AbstractContextManager[None]:
        """Let the calling thread's forward passes draft."""
        return nullcontext() if self.by_mtp_layers else self._switch.drafting(self._settings)

    def continues(self, confidences: Sequence[float]) -> bool:
        """Return whether to draft one more token of a text after those with these probabilities."""
        return confidences[-1] >= self._confidence and self._current.continues(confidences)

    def record(self, rows: Sequence[Round], draft_ms: float, verify_ms: float, *, alone: bool = True) -> None:
        """Learn from a round of all texts, of which each has a row without times; one without drafts is a plain step.

        Args:
            alone: whether nothing else was computed in its pass.
        """
        prepared, self._preparations = not alone or self._preparations != self._switch.preparations, self._switch.preparations
        generated = sum(row.generated for row in rows)
        # The schedule learns of one of the longest drafts, alternately.
        longest = max(len(row.confidences) for row in rows)
        examples = [row for row in rows if len(row.confidences) == longest]
        self._rounds += 1
        row = examples[self._rounds % len(examples)]
        done = replace(row, generated=generated / len(rows), draft_ms=draft_ms, verify_ms=verify_ms, prepared=prepared)
        self._schedule(len(rows)).record(done)
        if not longest:
            self._statistics.add(replace(done, generated=generated))
            return
        for row in rows:
            self._statistics.add(replace(row, draft_ms=draft_ms / len(rows), verify_ms=verify_ms / len(rows), prepared=prepared))

    def state(self) -> str | None:
        """Describe the schedules in a few words for users; None before any was used."""
        found = [f"batches of up to {texts}: {schedule.state()}" for texts, schedule in sorted(self._schedules.items())]
        return "; ".join(found) or None

    def _schedule(self, texts: int) -> DraftSchedule:
        size = 1 << (texts - 1).bit_length()
        if size not in self._schedules:
            self._schedules[size] = self._new_schedule()
        self._current = self._schedules[size]
        return self._current


def keep_largest(top_k_index: torch.Tensor, top_k_weights: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the `top_k` experts of each token with the largest weights, in any order: many routers do not sort.

    The other experts become padded slots: id -1, which no kernel reads, and weight 0.

    Args:
        top_k_index: (T, K) int64.
        top_k_weights: (T, K) floating point.
    """
    largest = top_k_weights.topk(top_k, dim=-1).indices
    kept = torch.zeros_like(top_k_index, dtype=torch.bool).scatter_(-1, largest, True)
    return top_k_index.where(kept, -1), top_k_weights.where(kept, 0)


def keep_heaviest(top_k_index: torch.Tensor, top_k_weights: torch.Tensor, budget: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the `budget` experts of a pass whose weights, summed over all tokens, are largest (MoE-Spec, arXiv:2602.16052, truncation).

    The arguments and the other experts are as in `keep_largest`. Of equally heavy experts, the first ones are kept.
    """
    ids, weights = top_k_index.flatten(), top_k_weights.flatten().float()
    same = ids[:, None] == ids  # (TK, TK): tokens are few, and how many experts there are need not be known
    mass = torch.where(same, weights, 0.0).sum(-1)
    ahead = (mass > mass[:, None]) | ((mass == mass[:, None]) & (ids < ids[:, None]))
    # An expert that n tokens have chosen counts n times, so 1 / n each.
    rank = torch.where(ahead, 1 / same.float().sum(-1), 0.0).sum(-1)
    kept = (rank < budget - 0.5).view_as(top_k_index)
    return top_k_index.where(kept, -1), top_k_weights.where(kept, 0)
