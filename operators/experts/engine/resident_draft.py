"""A draft by experts with a slot alone: the likeliest of all that are there, or what is there of a token's own.

Shapes: T tokens, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.operators.draft import DraftSettings
from moegraft.operators.experts.router_output import follows
from moegraft.operators.experts.routing import Router, Scoring

TRIED_TOKENS = 64  # of drafts; what a router goes by is settled then


class ResidentDraft:
    """Chooses the experts of one layer that draft.

    A token's own experts that are there come first, for they are the router's choice, groups and corrections included. Then come
    others that are there, as the router ranks experts: by its scores, or with a correction that it holds and that explains what it
    chose better. Weights are the family's scores, which is why they are compared with the weights the router gave: where these do
    not follow them (scales of single experts, sparse mixers), a token's own experts draft alone, and the reason is said.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._tokens = 0
        self._agreed: torch.Tensor | None = None  # by ranking, how many of the chosen experts it ranks first
        self._reason: str | None = None

    def narrow(
        self,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        scoring: Scoring | None,
        resident: NDArray[np.bool_],
        settings: DraftSettings,
        say_once: Callable[[str], None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's routing, (T, K) and (T, K), as the draft has it: `settings.top_k` experts of `resident` (E,), padded.

        Args:
            scoring: what the router said of all experts in this call, where that was seen.
            say_once: told why the token's own experts draft alone, where they must.
        """
        if settings.chosen_only:
            return keep_resident(top_k_index, top_k_weights, resident, settings)
        if scoring is None or scoring.scores.shape[0] != top_k_index.shape[0]:
            say_once(f"{self._router.path}: its router's scores of all experts were not seen; of resident experts only a token's own draft")
            return keep_resident(top_k_index, top_k_weights, resident, settings)
        if self._tokens < TRIED_TOKENS:
            self._try(top_k_index, top_k_weights, scoring)
        if self._reason is not None:
            say_once(f"{self._router.path}: {self._reason}; of resident experts only a token's own draft")
            return keep_resident(top_k_index, top_k_weights, resident, settings)
        assert self._agreed is not None, "tried on the first token"
        ranking = scoring.rankings[int(self._agreed.argmax())]
        return likeliest_resident(top_k_index, top_k_weights, scoring.scores, ranking, resident, settings)

    def _try(self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, scoring: Scoring) -> None:
        real = (top_k_index >= 0) & (top_k_index < self._router.num_experts)
        whole = real.all(-1)
        self._tokens += len(top_k_index)
        index, weights = top_k_index[whole], top_k_weights[whole]
        if self._reason is None and not follows(scoring.scores[whole], weights, index):
            self._reason = "its weights do not follow its router's scores, so that experts it did not choose have none"
        agreed = [_overlap(ranking[whole], index) for ranking in scoring.rankings]
        counts = torch.tensor(agreed)
        self._agreed = counts if self._agreed is None else self._agreed + counts


def _overlap(ranking: torch.Tensor, top_k_index: torch.Tensor) -> int:
    first = ranking.topk(top_k_index.shape[-1], dim=-1).indices
    return int((first[:, :, None] == top_k_index[:, None, :]).sum())


def likeliest_resident(
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    scores: torch.Tensor,
    ranking: torch.Tensor,
    resident: NDArray[np.bool_],
    settings: DraftSettings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` best resident experts of each token, (T, K) and (T, K) padded: its own by `scores` (T, E), then others by `ranking`.

    Their weights are to their scores as those of the token's own experts are. A token for which none is there gets padded slots alone:
    what is added to its experts (shared ones, the residual) must do.
    """
    num_experts, wide = scores.shape[-1], top_k_index.shape[-1]
    there = torch.from_numpy(resident).to(scores.device)
    chosen = (top_k_index >= 0) & (top_k_index < num_experts)
    padded = top_k_index.where(chosen, num_experts)
    own = torch.zeros(len(scores), num_experts + 1, dtype=torch.bool, device=scores.device).scatter_(-1, padded, True)[:, :-1]
    places = torch.where(own, num_experts + _places(scores), _places(ranking)).masked_fill(~there, -1)
    best = places.topk(min(settings.top_k, wide), dim=-1)
    kept = best.values >= 0
    given = top_k_weights.float().where(chosen, 0).sum(-1, keepdim=True)
    scale = given / scores.where(own, 0).sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    weights = _padded((scores.gather(-1, best.indices) * scale).where(kept, 0), wide, 0)
    if settings.renormalise:
        weights = _scaled_to(weights, given)
    return _padded(best.indices.where(kept, -1), wide, -1), weights.to(top_k_weights.dtype)


def _places(values: torch.Tensor) -> torch.Tensor:
    """(T, E): from 0 for a token's smallest to E - 1."""
    return values.argsort(-1).argsort(-1)


def _padded(values: torch.Tensor, width: int, padding: int) -> torch.Tensor:
    """(T, width)."""
    return torch.nn.functional.pad(values, (0, width - values.shape[-1]), value=padding)


def _scaled_to(weights: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Rows that sum to `total` (T, 1); rows of zeros stay."""
    found = weights.sum(-1, keepdim=True)
    return weights * (total / found.where(found > 0, 1))


def keep_resident(
    top_k_index: torch.Tensor, top_k_weights: torch.Tensor, resident: NDArray[np.bool_], settings: DraftSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """A draft's routing with what has no slot left out: the `top_k` largest of the resident experts of each token.

    A token with none left gets padded slots alone.
    """
    there = torch.from_numpy(np.append(resident, False)).to(top_k_index.device)
    places = top_k_index.where((top_k_index >= 0) & (top_k_index < len(resident)), len(resident))
    weights = top_k_weights.where(there[places], 0)
    largest = weights.topk(min(settings.top_k, weights.shape[-1]), dim=-1).indices
    kept = torch.zeros_like(top_k_index, dtype=torch.bool).scatter_(-1, largest, True) & there[places]
    weights = weights.where(kept, 0)
    if settings.renormalise:
        weights = _scaled_to(weights, top_k_weights.sum(-1, keepdim=True))
    return top_k_index.where(kept, -1), weights
