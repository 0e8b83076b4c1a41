"""A draft by experts with a slot alone: the likeliest of all that are there, or what is there of a token's own.

Shapes: T tokens, E experts, K experts a token.

While a draft is drawn: loads what the draft needs next, then what its verification will need.

SS-MoE, section 3.3: a draft uses few experts and leaves the link idle. A verification routes every drafted token anew, but mostly to the
experts that the draft's own routers named for it, of which the draft ran only the first; those are loaded while later tokens are drafted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.operators.draft import DraftSettings
from moegraft.operators.offload.queue import TransferQueue
from moegraft.operators.offload.slots import SlotTable
from moegraft.operators.offload.step import DraftStep, LayerStep
from moegraft.operators.offload.transfers import Urgency
from moegraft.operators.routing import Router, Scoring, follows

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


MOST_WANTED = 6  # the list is made anew one layer later


class VerifyAhead:
    """What the verification of the draft under way will need.

    Attributes:
        served: experts that a verification found in slots and that were loaded for it.
        shared: tokens of verifications whose expert had no slot, but was brought or computed for another of them as well.
    """

    def __init__(self, slots: SlotTable, queue: TransferQueue) -> None:
        self.served = 0
        self.shared = 0
        self._slots = slots
        self._queue = queue
        self._tokens: NDArray[np.int64] = np.zeros((slots.layers, slots.num_experts), np.int64)  # drafted, that will want each expert
        self._asked: NDArray[np.bool_] = np.zeros((slots.layers, slots.num_experts), np.bool_)

    def drafted(self, step: LayerStep, draft: DraftStep) -> None:
        """Takes in a layer of a draft, and asks for what is worth loading now."""
        whole = draft.chosen[draft.chosen >= 0]
        self._tokens[step.layer] += np.bincount(whole, minlength=self._slots.num_experts)
        soon = self._for_draft(step, draft)
        wanted = [*soon, *(each for each in self._for_verification() if each not in soon)][:MOST_WANTED]
        self._queue.replan(set(wanted), started=True)
        for layer, expert in wanted:
            self._asked[layer, expert] = True
            self._queue.request(layer, expert, Urgency.NEXT if (layer, expert) in soon else Urgency.DEEPER)

    def verified(self, step: LayerStep) -> None:
        """A layer computes with all its experts: what was expected of it is settled."""
        asked = self._asked[step.layer]
        if asked.any():
            there = self._slots.slot_of(step.layer)[step.experts] >= 0
            self.served += int((asked[step.experts] & there).sum())
            asked[:] = False
        if self._tokens[step.layer].any():
            absent = self._slots.slot_of(step.layer)[step.experts] < 0
            self.shared += int((step.loads[absent] - 1).sum())
        self._tokens[step.layer] = 0

    def _for_draft(self, step: LayerStep, draft: DraftStep) -> list[tuple[int, int]]:
        """What the next layer will draft with; nothing where a draft takes what is there."""
        if draft.resident or not step.predictions:
            return []
        after = step.predictions[0]
        missing = (after.ranks < draft.top_k) & (self._slots.slot_of(after.layer)[after.experts] < 0)
        return [(after.layer, expert) for expert in after.experts[missing].tolist()]

    def _for_verification(self) -> list[tuple[int, int]]:
        """What is missing, by how many drafted tokens want it; of each layer no more than it can hold beside what is wanted and there."""
        there = self._slots.table >= 0
        found: list[tuple[int, int, int]] = []
        for layer in np.flatnonzero((self._tokens > 0).any(axis=1)).tolist():
            tokens = self._tokens[layer]
            # Of equals those that are there, which cost nothing.
            order = np.lexsort((~there[layer], -tokens))[: self._slots.capacity_of(layer)]
            best = order[tokens[order] > 0]
            self._slots.set_keep(layer, best.tolist())
            found += [(-int(tokens[expert]), layer, expert) for expert in best[~there[layer][best]].tolist()]
        return [(layer, expert) for _, layer, expert in sorted(found)]
