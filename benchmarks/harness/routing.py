"""Routing that is drawn, for models that are too large to run here.

Logits of each layer are the sum of a fixed popularity of its experts, a topic that changes at random, a part that changes slowly from token
to token (AR(1)) and noise. The weights of the parts are tuned so that an LRU cache of a quarter of the experts has the hit rate that
HybriMoE reports (Figure 9: Mixtral 30.2, DeepSeek-V2-Lite 47.7, Qwen2-57B 45.0 %). Predictions from an earlier layer's hidden states are
the logits with more noise: recall of about 0.70, 0.58 and 0.51 at depths 1 to 3, as in a small trained model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.experts.forecast import INT4_BITS
from moegraft.operators.routing_trace import Trace

SPREAD = 1.2  # standard deviation of the logits
TOPIC_CHANGE = 0.015  # probability per token that the topic changes
PREDICTION_NOISE = (0.45, 0.70, 0.90)  # in units of the logits' spread, by depth
# Of predictions by an MTP layer's states: on the bundled model they are right less often than those at depth 2, and more often than at 3.
MTP_NOISE = 0.78


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The routed experts of a model, and the time of the rest of a layer.

    Attributes:
        rest_ms: time of one layer's attention, router and shared experts on the GPU for one decoded token; assumed equal on all modelled
            machines.
        shared_share: the shared experts' share of `rest_ms`, by the weights that are read according to the models' configs.
        vocabulary: rows of the head.
    """

    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    layers: int
    rest_ms: float
    shared_share: float = 0.0
    vocabulary: int = 0

    def expert_bytes(self, bits_per_weight: float = INT4_BITS) -> int:
        """Return the bytes of gate, up and down of one expert."""
        return round(3 * self.hidden * self.intermediate * bits_per_weight / 8)

    def with_layers(self, more: int) -> ModelShape:
        """Return the shape with as many more layers."""
        return replace(self, layers=self.layers + more)


# The times are assumptions, not measurements.
MODELS = {
    shape.name: shape
    for shape in (
        # shared_share: 3 x 2048 x 2816 of 31 million weights per layer
        ModelShape("deepseek-v2-lite", 64, 6, 2048, 1408, layers=26, rest_ms=0.150, shared_share=0.55, vocabulary=102400),
        # The same experts, another router.
        ModelShape("moonlight-16b-a3b", 64, 6, 2048, 1408, layers=26, rest_ms=0.150, shared_share=0.55, vocabulary=163840),
        # From the model's own config: HybriMoE's Table I prints the intermediate size of its dense layers, 18944.
        # shared_share: 3 x 3584 x 20480 of 250 million.
        ModelShape("qwen2-57b-a14b", 64, 8, 3584, 2560, layers=28, rest_ms=0.220, shared_share=0.88, vocabulary=151936),
        ModelShape("mixtral-8x7b", 8, 2, 4096, 14336, layers=32, rest_ms=0.260, vocabulary=32000),
    )
}


@dataclass(frozen=True, slots=True)
class Mixture:
    """Weights of the parts; `memory` is the share of the slow part that a token keeps."""

    popularity: float
    topic: float
    slow: float
    memory: float


MIXTURES = {
    "deepseek-v2-lite": Mixture(0.34, 0.34, 0.50, 0.80),
    "moonlight-16b-a3b": Mixture(0.28, 0.34, 0.50, 0.80),  # its router is balanced without a loss, so popularity is assumed to be more even
    "qwen2-57b-a14b": Mixture(0.34, 0.34, 0.50, 0.80),
    "mixtral-8x7b": Mixture(0.16, 0.18, 0.40, 0.60),
}


def synthetic_trace(name: str, tokens: int, seed: int = 0, *, other_tokens: int | None = None, more_layers: int = 0) -> Trace:
    """Return `tokens` tokens of routing for a model of `MODELS`.

    Args:
        more_layers: layers after those of the model, such as those for multi-token prediction.
        other_tokens: a seed of the noise alone, for other tokens at the same positions of a text, such as rejected tokens of a draft.
    """
    shape, mixture = MODELS[name].with_layers(more_layers), MIXTURES[name]
    rng = np.random.default_rng(seed)
    logits = _logits(shape, mixture, tokens, rng, None if other_tokens is None else np.random.default_rng(other_tokens))
    scores = _softmax(logits)
    chosen = _largest(logits, shape.top_k)
    weights = np.take_along_axis(scores, chosen, -1)
    predicted = np.stack([_predicted(logits, shape, depth, rng) for depth in range(1, len(PREDICTION_NOISE) + 1)])
    starts = np.zeros(tokens, bool)
    starts[0] = True
    layers = tuple(f"layers.{layer}.experts" for layer in range(shape.layers))
    return Trace(scores, chosen, weights / weights.sum(-1, keepdims=True), predicted, starts, layers, f"synthetic {name}, seed {seed}")


def _logits(
    shape: ModelShape, mixture: Mixture, tokens: int, rng: np.random.Generator, other: np.random.Generator | None
) -> NDArray[np.float32]:
    size = (shape.layers, shape.num_experts)
    popularity, topic, slow = rng.normal(size=size), rng.normal(size=size), rng.normal(size=size)
    noise = np.sqrt(1 - mixture.slow**2)
    logits = np.empty((tokens, *size), np.float32)
    for token in range(tokens):
        if rng.random() < TOPIC_CHANGE:
            topic = rng.normal(size=size)
        slow = mixture.memory * slow + np.sqrt(1 - mixture.memory**2) * rng.normal(size=size)
        own = rng.normal(size=size)
        if other is not None:
            own = other.normal(size=size)
        parts = mixture.popularity * popularity + mixture.topic * topic + mixture.slow * slow + noise * own
        logits[token] = SPREAD * parts
    return logits


def _predicted(logits: NDArray[np.float32], shape: ModelShape, depth: int, rng: np.random.Generator) -> NDArray[np.int64]:
    noisy = logits + SPREAD * PREDICTION_NOISE[depth - 1] * rng.normal(size=logits.shape).astype(np.float32)
    found = _largest(noisy, shape.top_k)
    found[:, :depth] = -1  # no layer is that early
    return found


def _largest(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    return np.argsort(-logits, axis=-1, kind="stable")[..., :count].astype(np.int64)


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    shares: NDArray[np.float32] = exponentials / exponentials.sum(-1, keepdims=True)
    return shares
