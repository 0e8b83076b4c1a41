"""Experts of one layer in two weight types: the options, and which experts are hot by a recorded routing profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from moegraft.operators.layout import ExpertsLayout
from moegraft.operators.routing_trace import Trace, TraceError
from moegraft.operators.weight_formats import FORMATS, GGUF_TYPES, PACKED_TYPES, fitting_type
from moegraft.operators.weights import WeightTypes

# What a matrix of floats can be packed to.
if TYPE_CHECKING:
    WEIGHT_TYPES = str
else:
    WEIGHT_TYPES = Literal[("stored", *PACKED_TYPES)]


def why_unfit(weight_type: str, columns: int) -> str | None:
    """Return why rows of `columns` weights cannot be packed to a type, or None where they can."""
    form = FORMATS.get(weight_type)
    if form is None or form.gguf is None or not form.stored or columns % form.block_weights == 0:
        return None
    fitting = GGUF_TYPES[fitting_type(form.gguf, columns)]
    instead = fitting.name if fitting.scaled else "int8"
    return f"{weight_type} has blocks of {form.block_weights} weights, of which rows of {columns} are no whole number; use {instead}"


@dataclass(frozen=True, slots=True)
class ProfiledWeights:
    """The types of experts by how often a text chose them.

    Attributes:
        hot: of the experts that are chosen most.
        cold: of all others.
        profile: a routing trace of this model, which `moegraft calibrate --routing FILE.npz` records.
        share: of a layer's routed tokens in the profile; hot are the fewest experts that have this share together.
    """

    hot: WEIGHT_TYPES
    cold: WEIGHT_TYPES
    profile: Path
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share is a part of a layer's routed tokens, above 0 and below 1, not {self.share:g}")

    def __str__(self) -> str:
        return str(WeightTypes.of(self.hot, self.cold))

    def why_unfit(self, layout: ExpertsLayout) -> str | None:
        """Return why a layer's matrices cannot have these types, or None where they can."""
        widths = layout.hidden, layout.intermediate
        reasons = (why_unfit(name, columns) for name in (self.hot, self.cold) for columns in widths)
        return next((reason for reason in reasons if reason is not None), None)

    def hot_experts(self, path: str, num_experts: int) -> tuple[int, ...]:
        """Return the hot experts of the layer at `path`, in ascending order.

        Raises:
            OSError: the profile cannot be read.
            TraceError: it is no routing trace, or not of this model.
        """
        about = self.profile.stat()
        tokens = _tokens_by_layer(self.profile, about.st_mtime_ns, about.st_size)
        if path not in tokens:
            more = f" and {len(tokens) - 3} more" if len(tokens) > 3 else ""
            raise TraceError(f"{self.profile}: it has no layer {path}; its layers are {', '.join(list(tokens)[:3])}{more}")
        of_experts = tokens[path]
        if len(of_experts) != num_experts:
            raise TraceError(
                f"{self.profile}: {path} has {len(of_experts)} experts there and {num_experts} in this model; "
                "record this model's routing with moegraft calibrate --routing FILE.npz"
            )
        order = np.argsort(-of_experts, kind="stable")
        before = np.cumsum(of_experts[order]) - of_experts[order]
        return tuple(sorted(order[before < self.share * of_experts.sum()].tolist()))


@lru_cache(maxsize=4)
def _tokens_by_layer(profile: Path, changed_ns: int, nbytes: int) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """Return how many tokens chose each expert, (E,) by layer; a plan asks for every layer of a large file."""
    trace = Trace.load(profile)
    return dict(zip(trace.layers, trace.loads(), strict=True))


@dataclass(frozen=True, slots=True)
class LayerWeights(ProfiledWeights):
    """The types of one layer's experts; `experts` are the hot ones."""

    experts: tuple[int, ...] = ()

    def split(self, held: Sequence[int]) -> dict[str, Sequence[int]]:
        """Return the experts by type, hot ones first; one type if there are no others."""
        if self.hot == self.cold:
            return {self.hot: held}
        hot = set(self.experts)
        found = {self.hot: [each for each in held if each in hot], self.cold: [each for each in held if each not in hot]}
        return {name: experts for name, experts in found.items() if experts}


def places_of(sets: Sequence[Sequence[int]], num_experts: int) -> torch.Tensor:
    """Return the place of each expert in each of `sets`, (sets, E + 2) int64: by id + 1, and -1 for padded slots and other experts."""
    places = torch.full((len(sets), num_experts + 2), -1)
    for row, experts in zip(places, sets, strict=True):
        row[torch.tensor(experts) + 1] = torch.arange(len(experts))
    return places
