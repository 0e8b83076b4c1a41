"""The models and systems that are compared on a GPU; each system is a rule file.

Experts of models with random weights are made in the packed form, so that a model of 30 billion parameters is ready in seconds.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path

import torch
from _random_model import RandomExperts, random_model
from transformers import AutoConfig, PreTrainedModel

from moegraft.cpu_backend import ExpertsShape, GateSpec
from moegraft.injection import graft, load, optimize_and_load, plan
from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.weights import WeightSource

VOCABULARY = 8192
# Of the models' own configs, every layer with experts.
SHAPES: dict[str, dict[str, object]] = {
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 0,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen2-57b-a14b": {
        "model_type": "qwen2_moe",
        "hidden_size": 3584,
        "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20480,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}
WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
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


def make_model(shape: str, layers: int, scale: int, device: str, *, experts: bool = False) -> PreTrainedModel:
    """Return a bfloat16 model with random weights; `scale` divides its widths, and `experts` gives it experts of its own."""
    sizes = dict(SHAPES[shape])
    model_type = str(sizes.pop("model_type"))
    sizes |= {name: int(str(sizes[name])) // scale for name in WIDTHS if name in sizes}
    config = AutoConfig.for_model(model_type, **sizes, num_hidden_layers=layers, vocab_size=VOCABULARY, dtype=torch.bfloat16)
    return random_model(config, device, experts=experts)


@lru_cache(maxsize=48)  # layers of the deepest model
def _layer(number: int, shape: ExpertsShape, gate: GateSpec, weights: str) -> RandomExperts:
    """The experts of a layer, which models that are measured one after another share."""
    return RandomExperts(shape, gate, weights)


def _take_random(operator: HybridExperts, layer: int, source: WeightSource, advance: Callable[[int], None]) -> None:
    operator.on_cpu.packed = _layer(layer, operator.layout.shape, operator.layout.gate, str(operator.options.weights))


@contextmanager
def system(name: str, shape: str, ratio: float, arguments: argparse.Namespace, more: str = "") -> Iterator[PreTrainedModel]:
    """Return a model of a shape, or of `arguments.checkpoint`, under one system; `stock` as it is, with bfloat16 experts on the device.

    Args:
        ratio: share of the experts that have a slot on the GPU.
        more: further rules.
    """
    on_cuda = arguments.gpu.startswith("cuda")
    device = arguments.gpu if on_cuda else "cpu"
    if name == "stock":
        yield make_model(shape, arguments.layers, arguments.scale, device, experts=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        path, options = Path(folder) / "rules.yaml", SYSTEMS[name].format(ratio=ratio)
        path.write_text(RULES.format(weights=arguments.weights, gpu=arguments.gpu, options=options, more=more))
        if arguments.checkpoint is not None:
            where = {"device_map": arguments.gpu} if on_cuda else {}
            model = optimize_and_load(arguments.checkpoint, path, progress=False, threads=arguments.threads, **where)
        else:
            empty = make_model(shape, arguments.layers, arguments.scale, device)
            grafted = graft(empty, plan(empty, path), threads=arguments.threads)
            experts = [operator for operator in grafted.injection.operators.values() if isinstance(operator, HybridExperts)]
            for layer, operator in enumerate(experts):
                operator.load = partial(_take_random, operator, layer)  # type: ignore[method-assign]
            model = load(grafted, progress=False)
    try:
        yield model
    finally:
        model.moegraft.context.close()
        del model
        gc.collect()
