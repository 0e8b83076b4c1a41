"""A routing trace: what every layer's router said for a run of tokens, kept as one .npz file.

Shapes: S tokens in the order they were decoded, L layers of routed experts, E experts, K experts a token, D depths of prediction.

Records what a model routes: a trace of its routers' scores and choices, and of what could have been predicted a few layers before.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moegraft.operators.errors import MoegraftError, UnsupportedModelError
from moegraft.operators.routing import RoutedCall, selection_of, watch_routing

FORMAT = 1
NO_EXPERT = -1
KINDS = {"scores": "f", "weights": "f", "chosen": "i", "predicted": "i", "starts": "b", "layers": "U", "source": "U", "format": "i"}


class TraceError(MoegraftError):
    """A trace is damaged, incomplete or contradicts itself; the message names the file or array and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded routing.

    Attributes:
        scores: (S, L, E) float32, the router's share for every expert.
        chosen: (S, L, K) int64, the experts that computed; -1 for a padded slot.
        weights: (S, L, K) float32, by which their outputs were summed.
        predicted: (D, S, L, K) int64; at [d, s, l] what the router of layer l would choose on the hidden states of layer l - 1 - d,
            likeliest first; -1 where there is no layer so early.
        starts: (S,) bool, whether a token is the first of its text.
        layers: paths of the L experts modules.
        source: what was run, for people.
    """

    scores: NDArray[np.float32]
    chosen: NDArray[np.int64]
    weights: NDArray[np.float32]
    predicted: NDArray[np.int64]
    starts: NDArray[np.bool_]
    layers: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        """
        Raises:
            TraceError: shapes disagree, an id is no expert's, an expert is chosen twice by a token, or a score is no number.
        """
        self._check_shapes()
        for name, ids in (("chosen", self.chosen), ("predicted", self.predicted)):
            if ids.size and (ids.min() < NO_EXPERT or ids.max() >= self.num_experts):
                raise TraceError(f"{name} has ids from {ids.min()} to {ids.max()}; there are {self.num_experts} experts")
            ordered = np.sort(ids, axis=-1)
            if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != NO_EXPERT)).any():
                raise TraceError(f"{name} has a token that takes one expert twice")
        for name, values in (("scores", self.scores), ("weights", self.weights)):
            if not np.isfinite(values).all():
                raise TraceError(f"{name} has values that are no numbers")

    def _check_shapes(self) -> None:
        if self.scores.ndim != 3 or 0 in self.scores.shape:
            raise TraceError(f"scores must be (tokens, layers, experts), none of them 0, not {self.scores.shape}")
        if self.chosen.ndim != 3 or self.chosen.shape[2] < 1:
            raise TraceError(f"chosen must be (tokens, layers, experts a token), not {self.chosen.shape}")
        tokens, layers, num_experts = self.scores.shape
        top_k = self.chosen.shape[2]
        if top_k > num_experts:
            raise TraceError(f"chosen has {top_k} experts a token; there are {num_experts}")
        expected = {"chosen": (tokens, layers, top_k), "weights": (tokens, layers, top_k), "starts": (tokens,)}
        for name, shape in expected.items():
            if getattr(self, name).shape != shape:
                raise TraceError(f"{name} is {getattr(self, name).shape} where scores {self.scores.shape} ask for {shape}")
        if self.predicted.ndim != 4 or self.predicted.shape[1:3] != (tokens, layers):
            raise TraceError(f"predicted is {self.predicted.shape} where scores {self.scores.shape} ask for (D, {tokens}, {layers}, K)")
        if len(self.layers) != layers:
            raise TraceError(f"layers has {len(self.layers)} names for {layers} layers")

    @property
    def num_tokens(self) -> int:
        return int(self.scores.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.scores.shape[1])

    @property
    def num_experts(self) -> int:
        return int(self.scores.shape[2])

    @property
    def top_k(self) -> int:
        return int(self.chosen.shape[2])

    @property
    def depths(self) -> int:
        """How many layers ahead predictions were made."""
        return int(self.predicted.shape[0])

    def used(self) -> NDArray[np.bool_]:
        """(S, L, E): which experts computed."""
        return _marked(self.chosen, self.num_experts)

    def loads(self) -> NDArray[np.int64]:
        """(L, E): tokens of each expert; a profile for the static policy."""
        return np.asarray(self.used().sum(axis=0), dtype=np.int64)

    def part(self, start: int, stop: int) -> Trace:
        """Tokens `start` to `stop`, as a trace."""
        at = slice(start, stop)
        kept = (self.scores[at], self.chosen[at], self.weights[at], self.predicted[:, at], self.starts[at])
        return Trace(*kept, self.layers, self.source)

    def recall(self, depth: int) -> float:
        """The share of experts that computed which were predicted `depth` layers before (1: the layer before), where one could be."""
        known = (self.predicted[depth - 1] != NO_EXPERT).any(axis=-1)
        used = self.used()[known]
        hits = used & _marked(self.predicted[depth - 1], self.num_experts)[known]
        return float(hits.sum() / max(used.sum(), 1))

    def reuse(self) -> float:
        """The share of a token's experts that computed for the token before as well; K / E where routing has no memory."""
        used = self.used()
        follows = ~self.starts[1:]
        again = used[1:][follows] & used[:-1][follows]
        return float(again.sum() / max(used[1:][follows].sum(), 1))

    def save(self, path: Path) -> None:
        """Writes the trace; scores and weights are rounded to 16 bits.

        Raises:
            OSError: the file cannot be written.
        """
        with path.open("wb") as file:  # given a name, numpy would add a suffix to it
            np.savez_compressed(
                file,
                format=np.int64(FORMAT),
                scores=self.scores.astype(np.float16),
                chosen=self.chosen.astype(np.int16),
                weights=self.weights.astype(np.float16),
                predicted=self.predicted.astype(np.int16),
                starts=self.starts,
                layers=np.array(self.layers),
                source=np.array(self.source),
            )

    @classmethod
    def load(cls, path: Path) -> Self:
        """
        Raises:
            OSError: there is no such file.
            TraceError: it is no trace, or a damaged one.
        """
        try:
            return cls(**_fields(_arrays(path)))
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from error


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise TraceError("not a routing trace: not a whole .npz file")
        try:
            with np.load(file, allow_pickle=False) as held:
                return {name: held[name] for name in held.files}
        except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise TraceError(f"not a routing trace: {error}") from error


def _fields(arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    missing = sorted(set(KINDS) - set(arrays))
    if missing:
        raise TraceError(f"no array named {', '.join(missing)}; benchmarks/traces.py records traces")
    for name, kind in KINDS.items():
        if arrays[name].dtype.kind != kind:
            raise TraceError(f"{name} is of type {arrays[name].dtype}")
    if int(arrays["format"]) != FORMAT:
        raise TraceError(f"written in format {int(arrays['format'])}; this version reads format {FORMAT}: record it again")
    return {
        "scores": arrays["scores"].astype(np.float32),
        "chosen": arrays["chosen"].astype(np.int64),
        "weights": arrays["weights"].astype(np.float32),
        "predicted": arrays["predicted"].astype(np.int64),
        "starts": arrays["starts"],
        "layers": tuple(str(name) for name in np.atleast_1d(arrays["layers"])),
        "source": str(arrays["source"]),
    }


def _marked(ids: NDArray[np.int64], num_experts: int) -> NDArray[np.bool_]:
    """(..., K) ids as (..., E) marks; padded slots mark nothing."""
    marks = np.zeros((*ids.shape[:-1], num_experts + 1), dtype=np.bool_)
    np.put_along_axis(marks, ids, True, axis=-1)  # -1 marks the column that is cut off
    return np.asarray(marks[..., :num_experts])


def joined(traces: Sequence[Trace]) -> Trace:
    """One trace after another.

    Raises:
        ValueError: there is none.
        TraceError: they are not of one model.
    """
    if not traces:
        raise ValueError("no traces to join")
    first = traces[0]
    for other in traces[1:]:
        if (other.layers, other.num_experts, other.top_k) != (first.layers, first.num_experts, first.top_k):
            raise TraceError(f"traces of two models cannot be joined: {first.source} and {other.source}")
    arrays = [np.concatenate([getattr(trace, name) for trace in traces]) for name in ("scores", "chosen", "weights")]
    predicted = np.concatenate([trace.predicted for trace in traces], axis=1)
    starts = np.concatenate([trace.starts for trace in traces])
    return Trace(arrays[0], arrays[1], arrays[2], predicted, starts, first.layers, first.source)


DEPTHS = 3


@torch.no_grad()
def record_trace(model: nn.Module, texts: Iterable[torch.Tensor], source: str, depths: int = DEPTHS) -> Trace:
    """Runs `model` over `texts`, each (tokens,) int64 ids in one forward pass, and records every layer that routes.

    Attention is causal, so a token is routed as if it had been decoded after those before it. Layers are numbered as they ran.

    Args:
        depths: how many layers ahead to predict.

    Raises:
        ValueError: there is no text.
        UnsupportedModelError: no layer routed.
        TraceError: layers differ in experts or in experts a token.
    """
    traces = []
    for ids in texts:
        calls: list[RoutedCall] = []
        with watch_routing(model, calls.append):
            model(input_ids=ids[None].to(next(model.parameters()).device), use_cache=False)
        if not calls:
            raise UnsupportedModelError(f"{type(model).__name__} ran no experts beside a router: there is no routing to record")
        traces.append(_trace(calls, source, depths))
    return joined(traces)


def _trace(calls: list[RoutedCall], source: str, depths: int) -> Trace:
    shapes = {(call.router.num_experts, call.top_k_index.shape[1]) for call in calls}
    if len(shapes) > 1:
        raise TraceError(f"layers differ in (experts, experts a token): {sorted(shapes)}; a trace has one of each")
    tokens = len(calls[0].scores)
    predicted = np.full((depths, tokens, len(calls), calls[0].top_k_index.shape[1]), NO_EXPERT, dtype=np.int64)
    for depth in range(depths):
        for layer in range(depth + 1, len(calls)):
            predicted[depth, :, layer] = selection_of(calls[layer].router, calls[layer - 1 - depth].router_input).cpu().numpy()
    starts = np.zeros(tokens, dtype=np.bool_)
    starts[0] = True
    return Trace(
        scores=_stacked([call.scores for call in calls]).astype(np.float32),
        chosen=_stacked([_padded(call) for call in calls]).astype(np.int64),
        weights=_stacked([call.top_k_weights.float() for call in calls]).astype(np.float32),
        predicted=predicted,
        starts=starts,
        layers=tuple(call.router.path for call in calls),
        source=source,
    )


def _padded(call: RoutedCall) -> torch.Tensor:
    """Ids (T, K) with every padded slot, -1 or one past the last expert, as -1."""
    return call.top_k_index.where(call.top_k_index < call.router.num_experts, NO_EXPERT)


def _stacked(layers: list[torch.Tensor]) -> NDArray[np.generic]:
    return np.stack([layer.cpu().numpy() for layer in layers], axis=1)
