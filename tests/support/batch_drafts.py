"""Drafts of a server's batch, of which tests change single methods."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from moegraft.operators.draft import BatchDrafts, DraftedRow


class ChangedDrafts(BatchDrafts):
    """The drafts of an operator; a test overrides what it changes."""

    def __init__(self, drafts: BatchDrafts) -> None:
        self._drafts = drafts

    @property
    def longest(self) -> int:
        return self._drafts.longest

    @property
    def by_mtp_layers(self) -> bool:
        return self._drafts.by_mtp_layers

    def plan(self, texts: int, limit: int) -> int:
        return self._drafts.plan(texts, limit)

    def lookup(self, text: object, token_ids: Sequence[int], length: int) -> list[int] | None:
        return self._drafts.lookup(text, token_ids, length)

    def drafting(self) -> AbstractContextManager[None]:
        return self._drafts.drafting()

    def continues(self, confidences: Sequence[float]) -> bool:
        return self._drafts.continues(confidences)

    def record(self, rows: Sequence[DraftedRow], draft_ms: float, verify_ms: float, *, alone: bool = True) -> None:
        self._drafts.record(rows, draft_ms, verify_ms, alone=alone)
