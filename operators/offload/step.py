"""What one layer is asked to compute, as the host sees it.

Shapes: T tokens, E experts, K experts a token, A experts that have a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.offload.devices.base import CpuTicket, Event, Neurons, Waiter

Ids = NDArray[np.int64]
Loads = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Experts that a later layer is expected to choose.

    Attributes:
        layer: the later one.
        experts: (P,) distinct ids, ascending.
        loads: (P,) tokens of each.
        ranks: (P,) the best place that each has in a token's choice, 0 for the likeliest.
    """

    layer: int
    experts: Ids
    loads: Loads
    ranks: NDArray[np.intp]

    @classmethod
    def of(cls, layer: int, chosen: Ids) -> Self:
        """From a predicted choice (T, K), each token's likeliest expert first."""
        experts, first, counts = np.unique(chosen.T, return_index=True, return_counts=True)  # of rank 0 come first
        start = int(np.searchsorted(experts, 0))
        return cls(layer, experts[start:], counts[start:].astype(np.int32), first[start:] // len(chosen))


@dataclass(frozen=True, slots=True)
class DraftStep:
    """That a call is of a draft, whose experts are fewer than the router chose.

    Attributes:
        chosen: (T, K), all that the router chose, -1 for padded slots: what a verification is expected to need.
        top_k: experts that the draft takes of each token.
        resident: the draft must bring none.
        ahead: whether to load ahead what its verification will need.
    """

    chosen: Ids
    top_k: int
    resident: bool = False
    ahead: bool = True


@dataclass(frozen=True, slots=True)
class LayerStep:
    """One call of one layer's experts.

    Attributes:
        experts: (A,) distinct ids, ascending.
        loads: (A,) tokens of each.
        chosen: (T, K), -1 for padded slots.
        scores: (T, E) float32 of the router, where a cache learns from them.
        predictions: of later layers, the next one first.
        draft: where the call is of a draft.
        neurons: what a token needs of each expert; None: all of it.
    """

    layer: int
    experts: Ids
    loads: Loads
    chosen: Ids
    scores: NDArray[np.float32] | None = None
    predictions: Sequence[Prediction] = field(default=())
    draft: DraftStep | None = None
    neurons: Neurons | None = None

    @classmethod
    def of(
        cls,
        layer: int,
        chosen: Ids,
        scores: NDArray[np.float32] | None = None,
        predictions: Sequence[Prediction] = (),
        draft: DraftStep | None = None,
        neurons: Neurons | None = None,
    ) -> Self:
        """From a layer's routing (T, K)."""
        return cls(layer, *loads_of(chosen), chosen, scores, predictions, draft, neurons)


def loads_of(chosen: Ids) -> tuple[Ids, Loads]:
    """The distinct experts of a choice (T, K) without its padded slots, ascending, and how many tokens each has."""
    ids, counts = np.unique(chosen, return_counts=True)
    first = int(np.searchsorted(ids, 0))
    return ids[first:], counts[first:].astype(np.int32)


class LayerExecutor(Protocol):
    """Does the arithmetic of one call; the engine says which experts where, and when."""

    def on_cpu(self, experts: Ids) -> Callable[[], Waiter | None] | None:
        """A job for `Device.submit_cpu`: these experts from host memory. None where nothing is computed (simulations)."""
        ...

    def on_gpu(self, experts: Ids, slots: NDArray[np.int32]) -> Callable[[], None] | None:
        """A launch for `Device.launch`: these experts from their slots, added to what was launched before."""
        ...

    def join(self, cpu: CpuTicket | None, gpu: Sequence[Event]) -> None:
        """Sums what both have computed: no ticket, no event where one had nothing to do. Raises what went wrong there."""
        ...

    def restart(self) -> None:
        """Forgets what was computed: all experts come again, from the CPU."""
        ...
