"""While a draft is drawn: loads what the draft needs next, then what its verification will need.

SS-MoE, section 3.3: a draft uses few experts and leaves the link idle. A verification routes every drafted token anew, but mostly to the
experts that the draft's own routers named for it, of which the draft ran only the first; those are loaded while later tokens are drafted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.experts.engine.step import DraftStep, LayerStep
from moegraft.operators.experts.transfer.queue import TransferQueue
from moegraft.operators.experts.transfer.slots import SlotTable
from moegraft.operators.experts.transfer.transfers import Urgency

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
