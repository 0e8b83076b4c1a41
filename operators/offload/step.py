"""One call of one layer's experts, as the host plans it: the routing, what later layers are expected to choose, and who computes.

Shapes: T tokens, E experts, K experts per token, A active experts (those with at least one token).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.offload.devices.base import Neurons

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Experts that a later layer is expected to choose.

    Attributes:
        layer: the later layer.
        experts: (P,) distinct ids, ascending.
        loads: (P,) tokens of each.
        ranks: (P,) the best rank of each in a token's choice, 0 for the likeliest.
    """

    layer: int
    experts: Ids
    loads: NDArray[np.int32]
    ranks: NDArray[np.intp]

    @classmethod
    def of(cls, layer: int, chosen: Ids) -> Self:
        """Make a prediction of a choice (T, K), each token's likeliest expert first, -1 for padded slots."""
        experts, first, counts = np.unique(chosen.T, return_index=True, return_counts=True)  # rank by rank
        start = int(np.searchsorted(experts, 0))
        return cls(layer, experts[start:], counts[start:].astype(np.int32), first[start:] // len(chosen))


@dataclass(frozen=True, slots=True)
class DraftStep:
    """A call that belongs to a draft, which uses fewer experts than the router chose.

    Attributes:
        chosen: (T, K), everything that the router chose, -1 for padded slots: what the verification is expected to need.
        top_k: experts per token that the draft uses.
    """

    chosen: Ids
    top_k: int


@dataclass(frozen=True, slots=True)
class LayerStep:
    """One call of one layer's experts.

    Attributes:
        experts: (A,) distinct ids, ascending.
        loads: (A,) tokens of each.
        chosen: (T, K), -1 for padded slots.
        scores: (T, E) float32 of the router, where a cache learns from them.
        predictions: of later layers, the next one first.
        draft: given for calls of a draft.
        neurons: what a token needs of each expert; None: all of it.
        deferrable: (D,) ids of those experts that may be added to the next layer's, if the CPU computes them.
    """

    layer: int
    experts: Ids
    loads: NDArray[np.int32]
    chosen: Ids
    scores: NDArray[np.float32] | None = None
    predictions: Sequence[Prediction] = field(default=())
    draft: DraftStep | None = None
    neurons: Neurons | None = None
    deferrable: Ids = field(default_factory=lambda: np.zeros(0, np.int64))

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
        """Make the step of a layer's routing (T, K), -1 for padded slots."""
        experts, counts = np.unique(chosen, return_counts=True)
        start = int(np.searchsorted(experts, 0))
        return cls(layer, experts[start:], counts[start:].astype(np.int32), chosen, scores, predictions, draft, neurons)
