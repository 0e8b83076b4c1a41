"""Records what a model routes: a trace of its routers' scores and choices, and of what could have been predicted a few layers before."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.experts.cache.trace import NO_EXPERT, Trace, TraceError, joined
from moegraft.operators.experts.routing import RoutedCall, selection_of, watch_routing

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
