"""MIN (Belady 1966): the policy that knows the future, and so the hit rate that no other can pass."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.experts.cache.policies import Ids, Priority, Scores


class Optimal:
    """Keeps what is used soonest.

    With slots of one size this is exact, per layer and for slots that layers share, when every miss must enter the cache
    (`bypass=False`: the experts of a step stay until its end) and when a miss may stay outside. Played with prefetching it is only a
    good policy: what a prefetch brings in is not its choice.
    """

    def __init__(self, used: NDArray[np.bool_]) -> None:
        """
        Args:
            used: (S, L, E), the experts that each step uses; steps are played in order, and the layers of a step in order.
        """
        steps, layers, num_experts = used.shape
        self._layers = layers
        self._next = np.full((steps + 1, layers, num_experts), steps, dtype=np.int32)  # (S + 1, L, E): the first use at step s or later
        for step in range(steps - 1, -1, -1):
            self._next[step] = np.where(used[step], step, self._next[step + 1])
        self._step = np.zeros(layers, dtype=np.int64)

    def update(self, layer: int, scores: Scores, chosen: Ids) -> None:
        self._step[layer] += 1

    def priority(self, layer: int) -> Priority:
        """Minus the place of the next use in the order of all layers' steps."""
        assert self._step[layer] < len(self._next), "more steps were played than are known"
        following = self._next[self._step[layer], layer].astype(np.float64)
        rank: Priority = -(following * self._layers + layer)
        return rank
