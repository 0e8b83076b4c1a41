"""Drafts of a server's batch, of which tests change single methods."""

from __future__ import annotations

from moegraft.operators.draft import BatchDrafts


class ChangedDrafts(BatchDrafts):
    """The drafts of an operator; a test overrides what it changes."""

    def __init__(self, drafts: BatchDrafts) -> None:
        vars(self).update(vars(drafts))
