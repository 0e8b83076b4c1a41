"""Drafts: the switch that drafters set and layers of experts read, and what a server asks for to draft for a batch."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch


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


@dataclass(frozen=True, slots=True)
class DraftedRow:
    """What one text of a batch gained in a round.

    Attributes:
        confidences: the draft's probability of each draft token.
        compared: draft tokens that were compared with the full model's choice: all up to the first rejected one.
        accepted: of these.
        generated: tokens by which the text grew.
    """

    confidences: Sequence[float]
    compared: int
    accepted: int
    generated: int


class BatchDrafts(ABC):
    """Drafts for texts that are decoded together, each of which accepts as many tokens as it agrees with. One thread uses it.

    The caller drafts for each text, feeds the drafts of all texts to the full model in one pass, and keeps of each text what the full
    model would have generated, so that the text is the same with any drafts.
    """

    @property
    @abstractmethod
    def longest(self) -> int:
        """The most tokens of a draft."""

    @property
    def by_mtp_layers(self) -> bool:
        """Whether the model drafts by its MTP layers, else with its own."""
        return False

    @abstractmethod
    def plan(self, texts: int, limit: int) -> int:
        """Return the largest number of tokens to draft now for each of `texts` texts, up to `limit`; 0 for a plain step."""

    @abstractmethod
    def lookup(self, text: object, token_ids: Sequence[int], length: int) -> list[int] | None:
        """Return at most `length` tokens that may follow a text; None where the model drafts, inside of `drafting`.

        Args:
            text: an object that stands for it while it grows, and can be referred to weakly.
            token_ids: all of its tokens so far.
        """

    @abstractmethod
    def drafting(self) -> AbstractContextManager[None]:
        """Let the calling thread's forward passes draft."""

    @abstractmethod
    def continues(self, confidences: Sequence[float]) -> bool:
        """Return whether to draft one more token of a text after those with these probabilities."""

    @abstractmethod
    def record(self, rows: Sequence[DraftedRow], draft_ms: float, verify_ms: float, *, alone: bool = True) -> None:
        """Learn from a round of all texts; one without drafts is a plain step. `alone`: nothing else was computed in its pass."""


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
