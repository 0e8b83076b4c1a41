"""Routing traces: the router scores and choices of every layer for a run of tokens, recorded from a model and stored as one .npz file.

Shapes: S tokens in decoding order, L layers of routed experts, E experts, K experts per token, D prediction depths.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moegraft.operators.atomic_file import new_file
from moegraft.operators.errors import MoegraftError, UnsupportedModelError
from moegraft.operators.routing import Router, RouterOutput, routers_of

FORMAT = 1
NO_EXPERT = -1
DEPTHS = 3  # number of layers ahead that a recording predicts
KINDS = {"scores": "f", "weights": "f", "chosen": "i", "predicted": "i", "starts": "b", "layers": "U", "source": "U", "format": "i"}


class TraceError(MoegraftError):
    """A trace is damaged, incomplete or contradicts itself; the message names the file or array and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded routing.

    Attributes:
        scores: (S, L, E) float32, the router's share for every expert.
        chosen: (S, L, K) int64, the experts that were computed; -1 for a padded slot.
        weights: (S, L, K) float32, the weights of the chosen experts.
        predicted: (D, S, L, K) int64; [d, s, l] is the choice of the router of layer l on the hidden states of layer l - 1 - d,
            likeliest first; -1 where layer l - 1 - d does not exist.
        starts: (S,) bool, whether a token is the first of its text.
        layers: paths of the L experts modules.
        source: a description of the recording for people.

    Raises:
        TraceError: shapes disagree, an id is out of range, a token chooses an expert twice, or a score is not finite.
    """

    scores: NDArray[np.float32]
    chosen: NDArray[np.int64]
    weights: NDArray[np.float32]
    predicted: NDArray[np.int64]
    starts: NDArray[np.bool_]
    layers: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        self._check_shapes()
        for name, ids in (("chosen", self.chosen), ("predicted", self.predicted)):
            if ids.size and (ids.min() < NO_EXPERT or ids.max() >= self.num_experts):
                raise TraceError(f"{name} has ids from {ids.min()} to {ids.max()}; there are {self.num_experts} experts")
            ordered = np.sort(ids, axis=-1)
            if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != NO_EXPERT)).any():
                raise TraceError(f"{name} has a token that chooses one expert twice")
        for name, values in (("scores", self.scores), ("weights", self.weights)):
            if not np.isfinite(values).all():
                raise TraceError(f"{name} has values that are not finite")

    def _check_shapes(self) -> None:
        if self.scores.ndim != 3 or 0 in self.scores.shape:
            raise TraceError(f"scores must be (tokens, layers, experts), none of them 0, not {self.scores.shape}")
        if self.chosen.ndim != 3 or self.chosen.shape[2] < 1:
            raise TraceError(f"chosen must be (tokens, layers, experts per token), not {self.chosen.shape}")
        tokens, layers, num_experts = self.scores.shape
        top_k = self.chosen.shape[2]
        if top_k > num_experts:
            raise TraceError(f"chosen has {top_k} experts per token; there are {num_experts}")
        expected = {"chosen": (tokens, layers, top_k), "weights": (tokens, layers, top_k), "starts": (tokens,)}
        for name, shape in expected.items():
            if getattr(self, name).shape != shape:
                raise TraceError(f"{name} is {getattr(self, name).shape}; scores of shape {self.scores.shape} need {shape}")
        if self.predicted.ndim != 4 or self.predicted.shape[1:3] != (tokens, layers):
            raise TraceError(f"predicted is {self.predicted.shape}; scores of shape {self.scores.shape} need (D, {tokens}, {layers}, K)")
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
        """The number of layers ahead that the trace predicts."""
        return int(self.predicted.shape[0])

    def used(self) -> NDArray[np.bool_]:
        """Return which experts were computed, (S, L, E) bool."""
        return mark_experts(self.chosen, self.num_experts)

    def loads(self) -> NDArray[np.int64]:
        """Return the tokens of each expert, (L, E) int64, a profile for the static cache policy."""
        return np.asarray(self.used().sum(axis=0), dtype=np.int64)

    def part(self, start: int, stop: int) -> Trace:
        """Return the trace of tokens `start` to `stop`."""
        at = slice(start, stop)
        arrays = (self.scores[at], self.chosen[at], self.weights[at], self.predicted[:, at], self.starts[at])
        return Trace(*arrays, self.layers, self.source)

    def save(self, path: Path) -> None:
        """Write the trace; scores and weights are rounded to 16 bits.

        Raises:
            OSError: the file cannot be written.
        """
        with new_file(path) as file:
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
        """Read a trace that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            TraceError: the file is not a trace, or is damaged.
        """
        try:
            arrays = _read_arrays(path)
            return cls(
                scores=arrays["scores"].astype(np.float32),
                chosen=arrays["chosen"].astype(np.int64),
                weights=arrays["weights"].astype(np.float32),
                predicted=arrays["predicted"].astype(np.int64),
                starts=arrays["starts"],
                layers=tuple(str(name) for name in np.atleast_1d(arrays["layers"])),
                source=str(arrays["source"]),
            )
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from error


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise TraceError("not a routing trace: not a complete .npz file")
        try:
            with np.load(file, allow_pickle=False) as content:
                arrays = {name: content[name] for name in content.files}
        except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise TraceError(f"not a routing trace: {error}") from error
    missing = sorted(set(KINDS) - set(arrays))
    if missing:
        raise TraceError(f"no array named {', '.join(missing)}; moegraft calibrate --routing FILE records traces")
    for name, kind in KINDS.items():
        if arrays[name].dtype.kind != kind:
            raise TraceError(f"{name} is of type {arrays[name].dtype}")
    if int(arrays["format"]) != FORMAT:
        raise TraceError(f"written in format {int(arrays['format'])}; this version reads format {FORMAT}: record it again")
    return arrays


def mark_experts(ids: NDArray[np.int64], num_experts: int) -> NDArray[np.bool_]:
    """Return ids (..., K) as marks (..., E) bool, without padded slots."""
    marks = np.zeros((*ids.shape[:-1], num_experts + 1), dtype=np.bool_)
    np.put_along_axis(marks, ids, True, axis=-1)  # -1 marks the column that is cut off
    return np.asarray(marks[..., :num_experts])


def joined(traces: Sequence[Trace]) -> Trace:
    """Concatenate traces of one model.

    Raises:
        ValueError: `traces` is empty.
        TraceError: the traces are of different models.
    """
    if not traces:
        raise ValueError("no traces to join")
    first = traces[0]
    for other in traces[1:]:
        if (other.layers, other.num_experts, other.top_k) != (first.layers, first.num_experts, first.top_k):
            raise TraceError(f"traces of two models cannot be joined: {first.source} and {other.source}")
    scores, chosen, weights, starts = (
        np.concatenate([getattr(trace, name) for trace in traces]) for name in ("scores", "chosen", "weights", "starts")
    )
    predicted = np.concatenate([trace.predicted for trace in traces], axis=1)
    return Trace(scores, chosen, weights, predicted, starts, first.layers, first.source)


@dataclass(frozen=True, slots=True)
class RoutedCall:
    """One call of one layer's experts.

    Attributes:
        router: the layer's router.
        router_input: (T, H), the router's input; predictions for later layers start from it.
        scores: (T, E) float32.
        top_k_index, top_k_weights: (T, K), the arguments of the experts.
    """

    router: Router
    router_input: torch.Tensor
    scores: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor


@contextmanager
def watch_routing(model: nn.Module, on_call: Callable[[RoutedCall], None]) -> Iterator[dict[str, Router]]:
    """Call `on_call` after every router and before its experts while the body runs; yield the routers by path."""
    routers = routers_of(model)
    hooks = []
    for path, router in routers.items():
        watch = _Watch(router, on_call)
        hooks.append(router.module.register_forward_hook(watch.routed, with_kwargs=True))
        hooks.append(model.get_submodule(path).register_forward_pre_hook(watch.called, with_kwargs=True))
    try:
        yield routers
    finally:
        for hook in hooks:
            hook.remove()


class _Watch:
    """The hooks of one layer, which join a router's call with the following call of its experts."""

    def __init__(self, router: Router, on_call: Callable[[RoutedCall], None]) -> None:
        self._router = router
        self._on_call = on_call
        self._pending: tuple[torch.Tensor, torch.Tensor, RouterOutput] | None = None

    def routed(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        hidden_states: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        tokens = hidden_states.detach().reshape(-1, hidden_states.shape[-1])
        self._pending = tokens, self._router.scores(output), self._router.read(output)

    def called(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._pending is None:  # the experts were called without their router
            return
        (router_input, scores, read), self._pending = self._pending, None
        given = [*args[1:], *(kwargs[name] for name in ("top_k_index", "top_k_weights") if name in kwargs)]
        # Stock experts that are called with all rows are not given the choice; in their place, an operator is, with a row for each.
        index, weights = given[:2] if given else (read.top_k_index, read.top_k_weights)
        assert index is not None and weights is not None, "the router or the block chooses"
        if len(index) != len(router_input):
            index, weights = (part.reshape(-1, len(router_input)).T for part in (index, weights))
        index, weights = index.detach(), weights.detach()
        self._on_call(RoutedCall(self._router, router_input, scores, index.long(), weights))


def routed_calls(model: nn.Module, texts: Iterable[torch.Tensor]) -> Iterator[Sequence[RoutedCall]]:
    """Run `model` over texts; yield the calls of all layers for each."""
    for ids in texts:
        calls: list[RoutedCall] = []
        with watch_routing(model, calls.append):
            model(input_ids=ids[None].to(next(model.parameters()).device), use_cache=False)
        yield calls


@torch.no_grad()
def record_trace(model: nn.Module, texts: Iterable[torch.Tensor], source: str, depths: int = DEPTHS) -> Trace:
    """Run `model` over `texts`, each (tokens,) int64 ids in one forward pass, and record every layer with a router.

    Attention is causal, so tokens are routed as in decoding. Layers are numbered in the order in which they ran.

    Args:
        depths: how many layers ahead to predict.

    Raises:
        ValueError: `texts` is empty.
        UnsupportedModelError: no layer has a router.
        TraceError: layers differ in experts or in experts per token.
    """
    traces = []
    for calls in routed_calls(model, texts):
        if not calls:
            raise UnsupportedModelError(f"{type(model).__name__} ran no experts module that has a router: there is no routing to record")
        traces.append(_trace_of_calls(calls, source, depths))
    return joined(traces)


def _trace_of_calls(calls: Sequence[RoutedCall], source: str, depths: int) -> Trace:
    shapes = {(call.router.num_experts, call.top_k_index.shape[1]) for call in calls}
    if len(shapes) > 1:
        raise TraceError(f"layers differ in (experts, experts per token): {sorted(shapes)}; a trace has one of each")
    ((num_experts, top_k),) = shapes
    tokens = len(calls[0].scores)
    predicted = np.full((depths, tokens, len(calls), top_k), NO_EXPERT, dtype=np.int64)
    for depth in range(depths):
        for layer in range(depth + 1, len(calls)):
            predicted[depth, :, layer] = calls[layer].router.route(calls[layer - 1 - depth].router_input).cpu().numpy()

    def stack(layers: Iterable[torch.Tensor]) -> NDArray[np.generic]:
        return np.stack([layer.cpu().numpy() for layer in layers], axis=1)

    return Trace(
        scores=stack(call.scores for call in calls).astype(np.float32),
        # A padded slot is -1, or one past the last expert.
        chosen=stack(call.top_k_index.where(call.top_k_index < num_experts, NO_EXPERT) for call in calls).astype(np.int64),
        weights=stack(call.top_k_weights.float() for call in calls).astype(np.float32),
        predicted=predicted,
        starts=np.arange(tokens) == 0,
        layers=tuple(call.router.path for call in calls),
        source=source,
    )
