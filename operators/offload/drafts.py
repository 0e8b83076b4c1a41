"""Drafting with resident experts alone: which of them a token's draft uses, and with which weights.

Shapes: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.operators.routing import Router, Scoring, follows

OBSERVED_TOKENS = 64  # of drafts; by then it is settled what a router ranks experts by


class ResidentDraft:
    """Chooses the experts of one layer that draft.

    A token's own experts that are resident come first, for they are the router's choice, groups and corrections included. Then come
    other resident experts, as the router ranks experts: by its scores, or with a correction that it holds and that explains its choices
    better. Weights are the family's scores, which is why they are compared with the weights that the router gave: where these do not
    follow them (scales of single experts, sparse mixers), only a token's own experts draft, and the reason is logged.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._tokens = 0
        self._agreement: torch.Tensor | None = None  # by ranking, how many of the chosen experts it ranks first
        self._reason: str | None = None

    def narrow(
        self,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        scoring: Scoring | None,
        resident: NDArray[np.bool_],
        top_k: int,
        log_once: Callable[[str], None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a draft's routing, (T, K) and (T, K) padded: `top_k` experts of `resident` (E,).

        Args:
            scoring: the router's scores of all experts in this call, where they were seen.
            log_once: gets the reason where only a token's own experts draft.
        """
        reason = "its router's scores of all experts were not seen"
        if scoring is not None and scoring.scores.shape[0] == top_k_index.shape[0]:
            if self._tokens < OBSERVED_TOKENS:
                self._observe(top_k_index, top_k_weights, scoring)
            if self._reason is None:
                assert self._agreement is not None, "observed on the first token"
                ranking = scoring.rankings[int(self._agreement.argmax())]
                return likeliest_resident(top_k_index, top_k_weights, scoring.scores, ranking, resident, top_k)
            reason = self._reason
        log_once(f"{self._router.path}: {reason}; of resident experts only a token's own draft")
        return keep_resident(top_k_index, top_k_weights, resident, top_k)

    def _observe(self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, scoring: Scoring) -> None:
        unpadded = ((top_k_index >= 0) & (top_k_index < self._router.num_experts)).all(-1)
        self._tokens += len(top_k_index)
        index, weights = top_k_index[unpadded], top_k_weights[unpadded]
        if self._reason is None and not follows(scoring.scores[unpadded], weights, index):
            self._reason = "its weights do not follow its router's scores, so experts it did not choose have none"
        first = (ranking[unpadded].topk(index.shape[-1], dim=-1).indices for ranking in scoring.rankings)
        agreement = torch.tensor([int((each[:, :, None] == index[:, None, :]).sum()) for each in first])
        self._agreement = agreement if self._agreement is None else self._agreement + agreement


def likeliest_resident(
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    scores: torch.Tensor,
    ranking: torch.Tensor,
    resident: NDArray[np.bool_],
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `top_k` best resident experts of each token, (T, K) and (T, K) padded.

    A token's own experts come first, by `scores` (T, E), then others by `ranking` (T, E). The ratio of their weights to their scores is
    that of the token's own experts. A token without any gets padded slots alone: what is added to its experts (shared experts, the
    residual) must do.
    """
    num_experts, wide = scores.shape[-1], top_k_index.shape[-1]
    available = torch.from_numpy(resident).to(scores.device)
    chosen = (top_k_index >= 0) & (top_k_index < num_experts)
    padded = top_k_index.where(chosen, num_experts)
    own = torch.zeros(len(scores), num_experts + 1, dtype=torch.bool, device=scores.device).scatter_(-1, padded, True)[:, :-1]
    ranks = torch.where(own, num_experts + _ranks(scores), _ranks(ranking)).masked_fill(~available, -1)
    best = ranks.topk(min(top_k, wide), dim=-1)
    kept = best.values >= 0
    total = top_k_weights.float().where(chosen, 0).sum(-1, keepdim=True)
    scale = total / scores.where(own, 0).sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    weights = (scores.gather(-1, best.indices) * scale).where(kept, 0)
    padding = (0, wide - best.indices.shape[-1])
    index = torch.nn.functional.pad(best.indices.where(kept, -1), padding, value=-1)
    return index, torch.nn.functional.pad(weights, padding).to(top_k_weights.dtype)


def keep_resident(
    top_k_index: torch.Tensor, top_k_weights: torch.Tensor, resident: NDArray[np.bool_], top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a draft's routing without missing experts: the `top_k` largest of the resident experts of each token.

    A token with none left gets padded slots alone.
    """
    available = torch.from_numpy(np.append(resident, False)).to(top_k_index.device)
    ids = top_k_index.where((top_k_index >= 0) & (top_k_index < len(resident)), len(resident))
    weights = top_k_weights.where(available[ids], 0)
    largest = weights.topk(min(top_k, weights.shape[-1]), dim=-1).indices
    kept = torch.zeros_like(top_k_index, dtype=torch.bool).scatter_(-1, largest, True) & available[ids]
    return top_k_index.where(kept, -1), weights.where(kept, 0)


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """(T, E): from 0 for a token's smallest to E - 1."""
    return values.argsort(-1).argsort(-1)
