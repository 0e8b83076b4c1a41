"""What names a layer's experts before its router does, on the bundled model; and the price of computing other experts than the router's.

Sources of predictions, each as `Trace.predicted` of the same tokens, so that a replay can prefetch by any of them:

- router: the routers of the next layers on the current router's input (HybriMoE, arXiv:2504.05897), which every trace has.
- residual: the same on that input plus the mean difference of the two layers' inputs in a calibration text (DALI, arXiv:2602.03495).
- fitted: instead of the routers, linear maps that least squares fit to their logits, on the same inputs. With `embedding`, such maps on the
  token's embedding name experts of the first layers, of which no earlier layer has inputs.
- before attention: such maps on the input of the layer's own attention (arXiv:2511.10676, which trains two linear functions with a loss of
  rankings instead; two trained layers named no more experts here). They leave the time of one layer's attention.

Two that gained nothing are only in this file's history: the next router on the stream after attention plus the chosen experts' mean outputs
(default vector, arXiv:2603.19289), and all routers on the MTP layer's state of the token (draft, MoE-SpAc, arXiv:2603.09983).

Shapes: T tokens, L layers, H hidden, E experts, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, product

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness.cache_replay import ReplayCache, ReplaySettings
from harness.routing import WINDOW
from moegraft.injection.demo import demo_path
from moegraft.operators.offload.cache import CacheOptions, make_policy
from moegraft.operators.routing_trace import DEPTHS, NO_EXPERT, Trace, record_trace

SOURCES = ("residual", "fitted", "fitted, embedding", "before attention")
RIDGE = 100.0  # maps that few tokens fit stay near the router's weights
KEPT = 2  # of a token's experts, those that cache-aware routing never replaces
States = dict[str, list[Tensor]]  # by layer, (T, H): the inputs of attention and of the router


@torch.no_grad()
def run(model: PreTrainedModel, ids: Tensor, executed: Callable[[int, States], Tensor] | None = None) -> tuple[States, float]:
    """Return the states of `ids` (T,), in windows, and the perplexity.

    Args:
        executed: (layer, states so far) -> logits (T, E) of the experts that the layer computes, with its router's weights.
    """
    states: States = {}
    found: list[States] = []

    def keep(name: str, value: Tensor) -> None:
        states.setdefault(name, []).append(value.reshape(-1, value.shape[-1]))

    def routed(layer: int, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
        keep("routed", args[0])
        return None if executed is None else choose(output[0], executed(layer, states), output[2].shape[-1])

    hooks = []
    for number, layer in enumerate(model.model.layers):
        hooks.append(layer.input_layernorm.register_forward_hook(lambda _m, _a, output: keep("before", output)))
        hooks.append(layer.mlp.gate.register_forward_hook(lambda _m, args, output, number=number: routed(number, args, output)))
    loss = 0.0
    try:
        for window in ids.split(WINDOW):
            states = {}
            loss += len(window) * float(model(window[None], labels=window[None], use_cache=False).loss)
            found.append(states)
    finally:
        for hook in hooks:
            hook.remove()
    joined = {name: [torch.cat(parts) for parts in zip(*(each[name] for each in found), strict=True)] for name in found[0]}
    return joined, math.exp(loss / len(ids))


def choose(logits: Tensor, preferred: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a router's output with the `top_k` experts of largest `preferred` (T, E), weighted by `logits`."""
    index = preferred.topk(top_k).indices
    return logits, logits.gather(-1, index).float().softmax(-1).to(logits.dtype), index


class Foresight:
    """The sources, calibrated on tokens (T,) of the model's training."""

    @torch.no_grad()
    def __init__(self, calibration: Tensor) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32).eval()
        self.layers = self.model.model.layers
        self.top_k = self.model.config.num_experts_per_tok
        states, _ = run(self.model, calibration)
        routed = states["routed"]
        self._means = [rows.mean(0) for rows in routed]
        self._maps = {}
        for number, layer in enumerate(self.layers):
            logits = F.linear(routed[number], layer.mlp.gate.weight)
            for depth, name in product(range(1, DEPTHS + 1), ("routed", "before")):
                at = number - depth + (name == "before")
                if at >= 0:
                    self._maps[name, at, number] = fitted(states[name][at], logits, layer.mlp.gate.weight)

    def logits(self, source: str, layer: int, depth: int, states: States) -> Tensor | None:
        """Return the logits (T, E) that a source has for a layer as many layers ahead; None where it has none."""
        gate, earlier = self.layers[layer].mlp.gate, layer - depth
        match source:
            case "fitted, embedding" if earlier < 0:
                weight, bias = self._maps["before", 0, layer]
                return F.linear(states["before"][0], weight, bias)
            case "before attention" if earlier >= -1:
                weight, bias = self._maps["before", earlier + 1, layer]
                return F.linear(states["before"][earlier + 1], weight, bias)
            case "fitted" | "fitted, embedding" if earlier >= 0:
                weight, bias = self._maps["routed", earlier, layer]
                return F.linear(states["routed"][earlier], weight, bias)
            case "router" if earlier >= 0:
                return F.linear(states["routed"][earlier], gate.weight)
            case "residual" if earlier >= 0:
                return F.linear(states["routed"][earlier] + self._means[layer] - self._means[earlier], gate.weight)
        return None

    @torch.no_grad()
    def traces(self, ids: Tensor, name: str) -> dict[str, Trace]:
        """Return the trace of tokens (T,) by source of its predictions; `perfect` knows the choices."""
        trace = record_trace(self.model, ids.split(WINDOW), name)
        states, _ = run(self.model, ids)
        found = {"router": trace.predicted}
        for source in SOURCES:
            found[source] = np.full_like(trace.predicted, NO_EXPERT)
            for depth, layer in np.ndindex(DEPTHS, trace.num_layers):
                if (logits := self.logits(source, layer, depth + 1, states)) is not None:
                    found[source][depth, :, layer] = logits.topk(self.top_k).indices
        found["perfect"] = np.broadcast_to(trace.chosen, trace.predicted.shape)
        arrays = trace.scores, trace.chosen, trace.weights
        return {source: Trace(*arrays, predicted, trace.starts, trace.layers, name) for source, predicted in found.items()}

    def executed(self, source: str, ids: Tensor) -> float:
        """Return the perplexity where layers after the first compute the experts that a source names one layer ahead (arXiv:2603.19289)."""

        def named(layer: int, states: States) -> Tensor:
            found = self.logits(source, layer, 1, states) if layer else None
            return F.linear(states["routed"][layer], self.layers[layer].mlp.gate.weight) if found is None else found

        return run(self.model, ids, named)[1]

    @torch.no_grad()
    def cache_aware(self, ids: Tensor, settings: Sequence[ReplaySettings], strength: float) -> tuple[list[ReplayCache], list[float]]:
        """Return the caches and perplexities of cache-aware routing (Cache-Prior, arXiv:2412.00099), decoded with one row per setting.

        Resident experts' logits are raised by `strength` times the running mean of the logits' range; a token's `KEPT` first experts stay.
        """
        layers, experts = len(self.layers), self.model.config.num_experts
        policies = [make_policy(CacheOptions(), list(map(str, range(layers))), experts, self.top_k) for _ in settings]
        caches = [ReplayCache(layers, experts, *pair) for pair in zip(policies, settings, strict=True)]
        ranges, steps = torch.zeros(len(caches), layers), [0] * layers
        predicted = np.full((len(caches), DEPTHS, 1, layers, self.top_k), NO_EXPERT)

        def routed(layer: int, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits = output[0]
            steps[layer] += 1
            ranges[:, layer] += logits.amax(-1) - logits.amin(-1)
            if not layer:
                predicted[:] = NO_EXPERT
            for cache, row in zip(caches, predicted, strict=True):
                cache.prefetch(layer, row, np.zeros((layers, experts), bool))
            resident = torch.from_numpy(np.stack([cache.resident[layer] for cache in caches]))
            raised = logits + strength * ranges[:, layer, None] / steps[layer] * resident
            result = choose(logits, raised.scatter(-1, output[2][:, :KEPT], torch.inf), self.top_k)
            for cache, policy, scores, chosen in zip(caches, policies, logits.softmax(-1).numpy(), result[2].numpy(), strict=True):
                used = np.isin(np.arange(experts), chosen)
                cache.access(layer, used)
                policy.update([layer], scores[None, None], chosen[None, None])
                cache.admit(layer, used)
            for depth, ahead in enumerate(range(layer + 1, min(layer + 1 + DEPTHS, layers))):
                predicted[:, depth, 0, ahead] = self.layers[ahead].mlp.gate.forward(args[0])[2]
            return result

        hooks = [
            layer.mlp.gate.register_forward_hook(lambda _m, args, output, number=number: routed(number, args, output))
            for number, layer in enumerate(self.layers)
        ]
        losses = torch.zeros(len(caches))
        try:
            for window in ids.split(WINDOW):
                past = None
                for token, following in pairwise(window):
                    output = self.model(token.expand(len(caches), 1), past_key_values=past, use_cache=True)
                    past = output.past_key_values
                    losses += F.cross_entropy(output.logits[:, -1], following.expand(len(caches)), reduction="none")
        finally:
            for hook in hooks:
                hook.remove()
        return caches, (losses / steps[0]).exp().tolist()


def fitted(inputs: Tensor, logits: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight (E, H) and bias (E,) of the linear map from `inputs` (T, H) nearest to `logits` (T, E), by ridge toward `weight`."""
    mean = inputs.mean(0)
    centred = (inputs - mean).double()
    rest = logits - F.linear(inputs, weight)
    products = centred.T @ centred + RIDGE * torch.eye(len(mean), dtype=torch.float64)
    moved = weight + torch.linalg.solve(products, centred.T @ (rest - rest.mean(0)).double()).T.float()
    return moved, logits.mean(0) - F.linear(mean, moved)
