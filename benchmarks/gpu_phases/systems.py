"""The models and systems that are compared on a GPU, and their times; each system is a rule file over the same weights.

Experts of models with random weights are made in the packed form, so that a model of 30 billion parameters is ready in seconds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from harness.models import VOCABULARY, RandomExperts, random_model, rule_file
from harness.rounds import percentiles
from transformers import AutoConfig, PreTrainedModel, StoppingCriteria

from moegraft.cpu_backend import ExpertsShape, GateSpec
from moegraft.injection import graft, load, plan
from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.offload.engine import Engine
from moegraft.operators.timeline import Timeline
from moegraft.operators.weights import WeightSource

# Of the models' own configs, every layer with experts.
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {
        **{"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408},
        **{"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 0},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    },
    "mixtral-8x7b": {
        **{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8},
        **{"num_experts_per_tok": 2, "num_attention_heads": 32, "num_key_value_heads": 8},
    },
    "qwen3-30b-a3b": {
        **{"model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128},
        **{"num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    },
}
WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size")
NO_PREFETCH = "prefetch: {{policy: none, promote: false}}"
LRU, MRS = "cache: {{policy: lru, ratio: {ratio}}}", "cache: {{policy: mrs, ratio: {ratio}}}"
PLAIN = "cache: {{ratio: {ratio}}}"
# From `fixed`, KTransformers' map, to `greedy`, all of HybriMoE: the ablation of its Table III. A fixed map brings no experts, so that
# prefetching and the cache are tried on top of scheduling, not without it.
SYSTEMS = {
    "all_cpu": f"schedule: all_cpu, decode: eager, {PLAIN}",
    "fixed": f"schedule: fixed, decode: eager, {PLAIN}",
    "layer_map": f"schedule: layer_map, decode: eager, {PLAIN}",
    "on_demand": f"schedule: on_demand, decode: eager, {LRU}, prefetch: {{{{policy: next_layer}}}}",
    "scheduling": f"schedule: greedy, decode: eager, {LRU}, {NO_PREFETCH}",
    "scheduling+prefetch": f"schedule: greedy, decode: eager, {LRU}",
    "scheduling+cache": f"schedule: greedy, decode: eager, {MRS}, {NO_PREFETCH}",
    "greedy": f"schedule: greedy, decode: eager, {MRS}",
    "all": f"schedule: two_threshold, decode: eager, {PLAIN}",
    "fixed, captured": f"schedule: fixed, decode: graph, {PLAIN}",
    "all, captured": f"schedule: two_threshold, decode: graph, {PLAIN}",
}
RULES = """
version: 1
rules:
- match: {{kind: experts}}
  replace: {{class: hybrid_experts, kwargs: {{weights: {weights}, gpu: "{gpu}", {options}}}}}
{more}
"""
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Model:
    """A model of random weights; `scale` divides its widths. `gpu` is the device as rule files name it."""

    shape: str
    layers: int
    gpu: str
    weights: str = "int4"
    scale: int = 1

    @property
    def device(self) -> str:
        return self.gpu if self.gpu.startswith("cuda") else "cpu"

    @property
    def about(self) -> str:
        return f"{self.shape}, {self.layers} layers, 1/{self.scale} of the widths"

    def make(self, *, experts: bool = False) -> PreTrainedModel:
        """Return the bfloat16 model; `experts` gives it experts of its own."""
        sizes = dict(SHAPES[self.shape])
        sizes |= {name: sizes[name] // self.scale for name in WIDTHS if name in sizes}
        kind, common = sizes.pop("model_type"), {"num_hidden_layers": self.layers, "vocab_size": VOCABULARY, "dtype": torch.bfloat16}
        return random_model(AutoConfig.for_model(kind, **sizes, **common), self.device, experts=experts)


@lru_cache(maxsize=48)  # layers of the deepest model
def _layer(number: int, shape: ExpertsShape, gate: GateSpec, weights: str) -> RandomExperts:
    """The experts of a layer, which models that are measured one after another share."""
    return RandomExperts(shape, gate, weights)


def _take_random(operator: HybridExperts, layer: int, source: WeightSource, advance: Callable[[int], None]) -> None:
    operator.on_cpu.packed = _layer(layer, operator.layout.shape, operator.layout.gate, str(operator.options.weights))


@contextmanager
def system(name: str, model: Model, ratio: float, more: str = "") -> Iterator[PreTrainedModel]:
    """Return a model under one system; `stock` as it is, with bfloat16 experts on the device.

    Args:
        ratio: share of the experts that have a slot on the GPU.
        more: further rules.
    """
    if name == "stock":
        yield model.make(experts=True)
        return
    with rule_file(RULES.format(weights=model.weights, gpu=model.gpu, options=SYSTEMS[name].format(ratio=ratio), more=more)) as rules:
        empty, threads = model.make(), 0 if model.gpu.startswith("cuda") else 1  # 0: one for each core
        grafted = graft(empty, plan(empty, rules), threads=threads)
        experts = [operator for operator in grafted.injection.operators.values() if isinstance(operator, HybridExperts)]
        for layer, operator in enumerate(experts):
            operator.load = partial(_take_random, operator, layer)  # type: ignore[method-assign]
        loaded = load(grafted, progress=False)
    try:
        yield loaded
    finally:
        loaded.moegraft.close()
        del loaded
        gc.collect()


def engines_of(model: PreTrainedModel) -> list[Engine]:
    """None in a stock model."""
    return list(model.moegraft.context.gpu_engines) if hasattr(model, "moegraft") else []


class Stamps(StoppingCriteria):
    """A streamer that records the time of each token."""

    def __init__(self) -> None:
        self.at_s = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.at_s.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def token_ms(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, stamps: Stamps | None = None) -> list[float]:
    """Return the ms of each token; the first includes the prompt."""
    stamps = stamps or Stamps()
    settings = {"do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    model.generate(ids, attention_mask=torch.ones_like(ids), stopping_criteria=[stamps], **settings)
    return [1e3 * (after - before) for before, after in pairwise(stamps.at_s)]


def busy(model: PreTrainedModel, run: Callable[[], object]) -> dict[str, float]:
    """Return the share of the time that each device was busy, measured in a run of its own; captured steps report only the link."""
    engine = next(iter(engines_of(model)), None)
    if engine is None:
        return {}
    engine.timings.timeline = timeline = Timeline(engine.device.name)
    start_ms = engine.device.now_ms()
    run()
    engine.device.synchronize()
    engine.timings.collect()
    took_ms = engine.device.now_ms() - start_ms
    engine.timings.timeline = None
    return {f"{lane.lower()}_busy": round(timeline.busy_ms(lane) / took_ms, 3) if took_ms else 0.0 for lane in ("CPU", "GPU", "link")}


def measure(model: PreTrainedModel, tokens: int, new_tokens: int, rounds: int) -> list[Row]:
    """Return the times to the first token of a prompt of random tokens and, of more than one new token, between tokens."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(tokens)).to(model.device)
    token_ms(model, ids, new_tokens)  # warms up
    replayed = sum(engine.statistics.replayed for engine in engines_of(model))
    runs = [token_ms(model, ids, new_tokens) for _ in range(rounds)]
    replayed = sum(engine.statistics.replayed for engine in engines_of(model)) - replayed
    shares = {"prompt_tokens": tokens, **busy(model, partial(token_ms, model, ids, new_tokens))}
    rows: list[Row] = [{"phase": "first token", **shares, **percentiles([run[0] for run in runs], "ms", 3), "steps_replayed": 0}]
    if new_tokens > 1:
        each = percentiles([ms for run in runs for ms in run[1:]], "ms", 3)
        rows.append({"phase": "next token", **shares, **each, "steps_replayed": replayed})
    return rows


def compared_logits(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Return the relative error of logits, the share of tokens with the same best one, and the mean KL divergence in nats."""
    right, given = expected.log_softmax(-1), found.log_softmax(-1)
    return {
        "logits_error": round(float((found - expected).norm() / expected.norm()), 5),
        "same_top_1": round(float((found.argmax(-1) == expected.argmax(-1)).float().mean()), 4),
        "kl": round(float((right.exp() * (right - given)).sum(-1).mean()), 6),
    }
