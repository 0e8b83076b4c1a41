"""Who enters a full cache: every expert that computed, or only one that ranks above what it would replace."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


def retained(priority: NDArray[np.float64], resident: Mask, active: Mask, capacity: int, *, bypass: bool) -> Mask:
    """The experts in the cache after a step, all arrays (E,), or those of every layer one after another where they share slots.

    Without `bypass` the active experts are in, and the others leave by their priority; of more active experts than slots the best
    ones stay. With it all compete alike. Of equals the later id stays.

    Args:
        priority: larger: keep.
        resident: in the cache before the step; `capacity` at most.
        active: computed in the step.
    """
    candidates = np.flatnonzero(resident | active)
    kept = np.zeros_like(resident)
    if len(candidates) > capacity:
        keys = (priority[candidates],) if bypass else (priority[candidates], active[candidates])
        candidates = candidates[np.lexsort(keys)[len(candidates) - capacity :]]
    kept[candidates] = True
    return kept


def with_prefetched(priority: NDArray[np.float64], resident: Mask, wanted: NDArray[np.int64], capacity: int, budget: int) -> Mask:
    """The cache after prefetching, in order, the first `budget` of the `wanted` experts that are not in it.

    They take free slots, then those of the lowest-ranked experts that are not wanted themselves.

    Args:
        wanted: ids, the likeliest first.
    """
    missing = wanted[~resident[wanted]][:budget]
    held = resident.copy()
    free = capacity - int(held.sum())
    if len(missing) > free:
        victims = held.copy()
        victims[wanted] = False
        leaving = np.flatnonzero(victims)
        leaving = leaving[np.argsort(priority[leaving], kind="stable")][: len(missing) - free]
        held[leaving] = False
        missing = missing[: free + len(leaving)]
    held[missing] = True
    return held
