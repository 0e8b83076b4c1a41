"""Synthetic routing traces."""

from __future__ import annotations

import numpy as np

from moegraft.operators.routing_trace import NO_EXPERT, Trace, mark_experts


def random_trace(
    tokens: int, layers: int = 2, num_experts: int = 6, top_k: int = 2, depths: int = 3, seed: int = 0, *, padded: float = 0.0
) -> Trace:
    """Return a trace whose scores drift, so that routing has a memory; half of the predictions are correct.

    `padded` is the share of choices that are replaced by padded slots.
    """
    generator = np.random.default_rng(seed)
    drift = np.cumsum(generator.normal(size=(tokens, layers, num_experts)), axis=0) * 0.5
    logits = drift + generator.normal(size=drift.shape)
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    chosen = np.argsort(-scores, axis=-1, kind="stable")[..., :top_k].astype(np.int64)
    guesses = np.argsort(-scores - generator.random((depths, *scores.shape)), axis=-1)[..., :top_k].astype(np.int64)
    for depth in range(depths):
        guesses[depth, :, : depth + 1] = -1
    weights = np.take_along_axis(scores, chosen, axis=-1)
    chosen[generator.random(chosen.shape) < padded] = -1
    starts = np.zeros(tokens, dtype=np.bool_)
    starts[:1] = True
    names = tuple(f"model.layers.{layer}.mlp.experts" for layer in range(layers))
    return Trace(scores.astype(np.float32), chosen, weights.astype(np.float32), guesses, starts, names, f"random {seed}")


def recall_share(trace: Trace, depth: int) -> float:
    """Return the share of the used experts that were predicted `depth` layers before (1: the layer before), where one could be."""
    predicted = trace.predicted[depth - 1]
    known = (predicted != NO_EXPERT).any(axis=-1)
    used = trace.used()[known]
    hits = used & mark_experts(predicted, trace.num_experts)[known]
    return float(hits.sum() / max(used.sum(), 1))
