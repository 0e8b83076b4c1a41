"""Drafts of `speculative_draft` for a server's batches: a schedule for each size of batch, as the costs of drafts grow with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from moegraft.operators.base import BatchDrafts, DraftedRow
from moegraft.operators.draft import DraftSwitch
from moegraft.operators.speculative.decoding import continuation
from moegraft.operators.speculative.options import SpeculativeOptions
from moegraft.operators.speculative.schedule import DraftSchedule, Round, Statistics


class ScheduledBatchDrafts(BatchDrafts):
    """Drafts by the options of `speculative_draft`. Batches of up to 1, 2, 4, 8, ... texts have a schedule each.

    A schedule compares the time of a round with that of a plain step of the same batch, by the mean of tokens that its texts gained. Where
    drafts do not pay at a size, it switches them off at that size alone.
    """

    def __init__(
        self, options: SpeculativeOptions, switch: DraftSwitch, statistics: Statistics, new_schedule: Callable[[], DraftSchedule]
    ) -> None:
        self._options = options
        self._switch = switch
        self._statistics = statistics
        self._new_schedule = new_schedule
        self._schedules: dict[int, DraftSchedule] = {}
        self._rounds = 0

    @property
    def longest(self) -> int:
        return self._options.max_draft

    def plan(self, texts: int, limit: int) -> int:
        return self._schedule(texts).plan(max(limit, 0))

    def lookup(self, token_ids: Sequence[int], length: int) -> list[int] | None:
        if self._options.draft != "ngram":
            return None
        return continuation(torch.tensor(token_ids), self._options.ngram, length)

    def drafting(self) -> AbstractContextManager[None]:
        return self._switch.drafting(self._options.settings)

    def continues(self, confidences: Sequence[float]) -> bool:
        return confidences[-1] >= self._options.confidence and self._current.continues(confidences)

    def record(self, rows: Sequence[DraftedRow], draft_ms: float, verify_ms: float) -> None:
        rounds = [Round(row.confidences, row.compared, row.accepted, row.generated, draft_ms, verify_ms) for row in rows]
        for each in rounds:
            self._statistics.add(replace(each, draft_ms=draft_ms / len(rows), verify_ms=verify_ms / len(rows)))
        # The pass was as long as the longest draft, of which the schedule learns one, alternately.
        longest = max(len(each.confidences) for each in rounds)
        examples = [each for each in rounds if len(each.confidences) == longest]
        self._rounds += 1
        mean = sum(each.generated for each in rounds) / len(rounds)
        self._schedule(len(rows)).record(replace(examples[self._rounds % len(examples)], generated=mean))

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
