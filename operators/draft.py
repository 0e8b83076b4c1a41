"""Running a model with fewer experts a token for a while: what draws the draft and what computes experts agree on it here."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """How experts run while a draft is drawn.

    Attributes:
        top_k: experts a token; at least 1.
        renormalise: whether the weights that are kept are scaled to the sum of all.
        resident: whether only experts with a slot on a GPU may run, the likeliest of all that have one. An operator without such slots
            lets any expert run.
        chosen_only: of those, only the experts that the router chose for the token.
        verify_prefetch: whether an operator with such slots loads, while the draft is drawn, what its verification will need.
        sparsity: share of neurons to leave out, counted as the operator counts its own; None: what it always leaves out.
    """

    top_k: int
    renormalise: bool = False
    resident: bool = False
    chosen_only: bool = False
    verify_prefetch: bool = True
    sparsity: float | None = None


class DraftSwitch:
    """One a model, shared by its operators (`context.draft_switch`).

    An experts operator that can draft calls `join` when it is built and `narrow` in every forward pass. Turning a draft on or
    off is one assignment, so no interruption leaves some layers drafting and others not. Each thread has a setting of its own:
    a text that one thread drafts does not thin out the experts of another's.
    """

    def __init__(self) -> None:
        self._thread = threading.local()
        self._layers = 0
        self._resident_layers = 0
        self._sparse_layers = 0
        self._said = False

    def join(self, *, has_slots: bool = False, sparse: bool = False) -> None:
        """Counts one layer of experts that will follow this switch.

        Args:
            has_slots: its experts may be resident on a GPU.
            sparse: it can leave neurons out.
        """
        self._layers += 1
        self._resident_layers += has_slots
        self._sparse_layers += sparse

    @property
    def layers(self) -> int:
        """Layers of experts that follow this switch."""
        return self._layers

    @property
    def resident_layers(self) -> int:
        """Those of them whose experts may have a slot on a GPU."""
        return self._resident_layers

    @property
    def sparse_layers(self) -> int:
        """Those of them that can leave neurons out."""
        return self._sparse_layers

    def say_once(self, reason: str) -> None:
        """Logs why a layer cannot draft as it is asked to: of all layers and drafts the first."""
        if not self._said:
            self._said = True
            logger.warning("draft: %s", reason)

    @property
    def settings(self) -> DraftSettings | None:
        """None: no draft is being drawn and every chosen expert runs."""
        return getattr(self._thread, "settings", None)

    @contextmanager
    def drafting(self, settings: DraftSettings) -> Iterator[None]:
        """Experts follow `settings` while the body runs, whatever ends it."""
        before = self.settings
        try:
            self._thread.settings = settings
            yield
        finally:
            self._thread.settings = before

    def narrow(self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's routing, (T, K) and (T, K), as the draft has it; unchanged while none is drawn."""
        settings = self.settings
        if settings is None or settings.top_k >= top_k_index.shape[-1]:
            return top_k_index, top_k_weights
        return keep_largest(top_k_index, top_k_weights, settings)


def keep_largest(top_k_index: torch.Tensor, top_k_weights: torch.Tensor, settings: DraftSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """The `settings.top_k` experts of each token with the largest weights, wherever they stand: many routers do not sort.

    The others become padded slots: id -1, which no kernel reads, and weight 0.

    Args:
        top_k_index: (T, K) int64.
        top_k_weights: (T, K) floating point.
    """
    largest = top_k_weights.topk(settings.top_k, dim=-1).indices
    kept = torch.zeros_like(top_k_index, dtype=torch.bool).scatter_(-1, largest, True)
    weights = top_k_weights.where(kept, 0)
    if settings.renormalise:
        weights = weights * (top_k_weights.sum(-1, keepdim=True) / weights.sum(-1, keepdim=True))
    return top_k_index.where(kept, -1), weights
