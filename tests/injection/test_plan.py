"""Which modules rules take and what a plan says; and that planning changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from support.rule_support import REGISTRY, findings_of, plan_for, read, tiny_model, write
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from moegraft.injection.planning import Plan, plan
from moegraft.injection.rules import read_rules
from moegraft.operators.registry import load_registry

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101, "num_experts_per_tok": 2}
EXPERTS = "match: {kind: experts}, replace: {class: hybrid_experts}"


def on_meta(config: PreTrainedConfig) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def mixtral() -> nn.Module:
    return on_meta(MixtralConfig(num_hidden_layers=3, num_local_experts=4, intermediate_size=24, **SIZES))


def qwen3_moe() -> nn.Module:
    return on_meta(
        Qwen3MoeConfig(num_hidden_layers=5, num_experts=4, moe_intermediate_size=24, intermediate_size=48, mlp_only_layers=[0, 2], **SIZES)
    )


def deepseek_v3() -> nn.Module:
    sizes = SIZES | {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    return on_meta(
        DeepseekV3Config(
            num_hidden_layers=4,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=24,
            intermediate_size=48,
            first_k_dense_replace=1,
            **sizes,
        )
    )


# Packed rows come in blocks of 16, inputs in groups of 32 with a 16-bit scale: 34 bytes hold 32 int8 weights.
# From transformers 5.24 on, routers of this family stay in float32.
DEEPSEEK_REST, DEEPSEEK_TOTAL = ("31.6", "195.3") if Version(transformers.__version__) < Version("5.24") else ("33.2", "196.8")
GOLDEN = (
    (
        mixtral,
        "cpu",
        """
model.layers.{0-2}.self_attn                 attention (cpu.yaml:23)  cpu_attention                   0 B
model.layers.{0-2}.self_attn.q_proj          linears (cpu.yaml:15)    quantized_linear  weights=int8  12.8 KiB cpu
model.layers.{0-2}.self_attn.k_proj          linears (cpu.yaml:15)    quantized_linear  weights=int8  6.4 KiB cpu
model.layers.{0-2}.self_attn.v_proj          linears (cpu.yaml:15)    quantized_linear  weights=int8  6.4 KiB cpu
model.layers.{0-2}.self_attn.o_proj          linears (cpu.yaml:15)    quantized_linear  weights=int8  12.8 KiB cpu
model.layers.{0-2}.mlp.gate                  routers (cpu.yaml:32)    cpu_router                      0 B
model.layers.{0-2}.mlp.experts               experts (cpu.yaml:9)     hybrid_experts    weights=int8  76.5 KiB cpu
model.layers.{0-2}.input_layernorm           norms (cpu.yaml:28)      cpu_norm                        0 B
model.layers.{0-2}.post_attention_layernorm  norms (cpu.yaml:28)      cpu_norm                        0 B
model.norm                                   norms (cpu.yaml:28)      cpu_norm                        0 B
lm_head                                      linears (cpu.yaml:15)    quantized_linear  weights=int8  8.5 KiB cpu
replaced: 192.6 KiB become 123.2 KiB; not replaced: 15.1 KiB
total: 138.3 KiB cpu
""",
    ),
    (
        qwen3_moe,
        "cpu",
        """
model.layers.{0-4}.self_attn                 attention (cpu.yaml:23)  cpu_attention                   0 B
model.layers.{0-4}.self_attn.q_proj          linears (cpu.yaml:15)    quantized_linear  weights=int8  21.2 KiB cpu
model.layers.{0-4}.self_attn.k_proj          linears (cpu.yaml:15)    quantized_linear  weights=int8  10.6 KiB cpu
model.layers.{0-4}.self_attn.v_proj          linears (cpu.yaml:15)    quantized_linear  weights=int8  10.6 KiB cpu
model.layers.{0-4}.self_attn.o_proj          linears (cpu.yaml:15)    quantized_linear  weights=int8  21.2 KiB cpu
model.layers.{0-4}.self_attn.q_norm          norms (cpu.yaml:28)      cpu_norm                        0 B
model.layers.{0-4}.self_attn.k_norm          norms (cpu.yaml:28)      cpu_norm                        0 B
model.layers.{0,2}.mlp.gate_proj             linears (cpu.yaml:15)    quantized_linear  weights=int8  8.5 KiB cpu
model.layers.{0,2}.mlp.up_proj               linears (cpu.yaml:15)    quantized_linear  weights=int8  8.5 KiB cpu
model.layers.{0,2}.mlp.down_proj             linears (cpu.yaml:15)    quantized_linear  weights=int8  8.5 KiB cpu
model.layers.{0-4}.input_layernorm           norms (cpu.yaml:28)      cpu_norm                        0 B
model.layers.{0-4}.post_attention_layernorm  norms (cpu.yaml:28)      cpu_norm                        0 B
model.layers.{1,3-4}.mlp.experts             experts (cpu.yaml:9)     hybrid_experts    weights=int8  76.5 KiB cpu
model.layers.{1,3-4}.mlp.gate                routers (cpu.yaml:32)    cpu_router                      0 B
model.norm                                   norms (cpu.yaml:28)      cpu_norm                        0 B
lm_head                                      linears (cpu.yaml:15)    quantized_linear  weights=int8  8.5 KiB cpu
replaced: 276.6 KiB become 174.2 KiB; not replaced: 15.9 KiB
total: 190.1 KiB cpu
""",
    ),
    (
        deepseek_v3,
        "cpu",
        """
model.layers.{0-3}.self_attn                     attention (cpu.yaml:23)  cpu_attention                   0 B
model.layers.{0-3}.self_attn.q_a_proj            linears (cpu.yaml:15)    quantized_linear  weights=int8  8.5 KiB cpu
model.layers.{0-3}.self_attn.q_a_layernorm       norms (cpu.yaml:28)      cpu_norm                        0 B
model.layers.{0-3}.self_attn.q_b_proj            linears (cpu.yaml:15)    quantized_linear  weights=int8  12.8 KiB cpu
model.layers.{0-3}.self_attn.kv_a_proj_with_mqa  linears (cpu.yaml:15)    quantized_linear  weights=int8  8.5 KiB cpu
model.layers.{0-3}.self_attn.kv_a_layernorm      norms (cpu.yaml:28)      cpu_norm                        0 B
model.layers.{0-3}.self_attn.o_proj              linears (cpu.yaml:15)    quantized_linear  weights=int8  17.0 KiB cpu
model.layers.0.mlp.gate_proj                     linears (cpu.yaml:15)    quantized_linear  weights=int8  4.2 KiB cpu
model.layers.0.mlp.up_proj                       linears (cpu.yaml:15)    quantized_linear  weights=int8  4.2 KiB cpu
model.layers.0.mlp.down_proj                     linears (cpu.yaml:15)    quantized_linear  weights=int8  4.2 KiB cpu
model.layers.{0-3}.input_layernorm               norms (cpu.yaml:28)      cpu_norm                        0 B
model.layers.{0-3}.post_attention_layernorm      norms (cpu.yaml:28)      cpu_norm                        0 B
model.layers.{1-3}.mlp.experts                   experts (cpu.yaml:9)     hybrid_experts    weights=int8  76.5 KiB cpu
model.layers.{1-3}.mlp.gate                      routers (cpu.yaml:32)    cpu_router                      0 B
model.layers.{1-3}.mlp.shared_experts.gate_proj  linears (cpu.yaml:15)    quantized_linear  weights=int8  6.4 KiB cpu
model.layers.{1-3}.mlp.shared_experts.up_proj    linears (cpu.yaml:15)    quantized_linear  weights=int8  6.4 KiB cpu
model.layers.{1-3}.mlp.shared_experts.down_proj  linears (cpu.yaml:15)    quantized_linear  weights=int8  6.4 KiB cpu
model.norm                                       norms (cpu.yaml:28)      cpu_norm                        0 B
lm_head                                          linears (cpu.yaml:15)    quantized_linear  weights=int8  8.5 KiB cpu
replaced: 239.6 KiB become 163.6 KiB; not replaced: """
        f"{DEEPSEEK_REST} KiB\ntotal: {DEEPSEEK_TOTAL} KiB cpu",
    ),
)


@pytest.mark.parametrize(
    ("build", "rules", "table"), GOLDEN, ids=lambda value: value if isinstance(value, str) and "\n" not in value else ""
)
def test_golden_plans(build: Callable[[], nn.Module], rules: str, table: str) -> None:
    registry = load_registry()
    found = plan(build(), read_rules(rules, registry=registry), registry=registry, dtype=torch.bfloat16)
    assert found.describe() == table.strip()


def test_planning_changes_nothing_and_repeats_itself() -> None:
    model = qwen3_moe()
    before = [(path, id(module), sorted(vars(module))) for path, module in model.named_modules()]
    parameters = [(name, id(parameter), parameter.device.type) for name, parameter in model.named_parameters()]
    registry = load_registry()
    rules = read_rules("cpu", registry=registry)
    first, second = (plan(model, rules, registry=registry, dtype=torch.bfloat16) for _ in range(2))
    assert first == second
    assert before == [(path, id(module), sorted(vars(module))) for path, module in model.named_modules()]
    assert parameters == [(name, id(parameter), parameter.device.type) for name, parameter in model.named_parameters()]


def taken(found: Plan) -> dict[str, str]:
    return {swap.module: swap.rule.id for swap in found.swaps}


MATCHES = (
    # a match on the tiny model, whose layer 0 is dense, and the layers whose experts it takes
    ("{kind: experts}", [1, 2, 3]),
    ("{name: experts}", [1, 2, 3]),  # also the activation inside, which goes with them
    (r"{name: '^model\.layers\.\d+\.mlp\.experts$'}", [1, 2, 3]),
    ("{class: TinyExperts}", [1, 2, 3]),
    ("{class: support.rule_support.TinyExperts}", [1, 2, 3]),
    ("{name: experts$, class: torch.nn.Module}", [1, 2, 3]),
    ("{kind: experts, layers: 2}", [2]),
    ('{kind: experts, layers: "1,3"}', [1, 3]),
    (r"{name: 'layers\.[13]\.', kind: experts}", [1, 3]),
)


@pytest.mark.parametrize(("match", "layers"), MATCHES, ids=lambda value: value if isinstance(value, str) else "")
def test_what_a_match_takes(match: str, layers: list[int], tmp_path: Path) -> None:
    found = plan_for(write(tmp_path, f"- {{match: {match}, replace: {{class: hybrid_experts}}}}\n"))
    assert list(taken(found)) == [f"model.layers.{layer}.mlp.experts" for layer in layers]
    assert found.notices == ()


def test_the_first_rule_that_matches_wins(tmp_path: Path) -> None:
    text = (
        "- {id: keep, match: {kind: experts, layers: 2}, replace: {class: default}}\n"
        "- {id: last, match: {kind: experts, layers: 3}, replace: {class: hybrid_experts, kwargs: {weights: int4}}}\n"
        f"- {{id: rest, {EXPERTS}}}\n"
    )
    found = plan_for(write(tmp_path, text))
    assert taken(found) == {"model.layers.1.mlp.experts": "rest", "model.layers.3.mlp.experts": "last"}
    assert found.describe().splitlines()[:2] == [
        "model.layers.1.mlp.experts  rest (rules.yaml:3)  hybrid_experts                384 B cpu",
        "model.layers.3.mlp.experts  last (rules.yaml:2)  hybrid_experts  weights=int4  384 B cpu",
    ]


def test_not_recursive_keeps_what_is_inside_out_of_reach(tmp_path: Path) -> None:
    keep = r"{id: keep, match: {name: 'layers\.2$'}, replace: {class: default}, recursive: %s}"
    for recursive, layers in (("false", [1, 3]), ("true", [1, 2, 3])):
        found = plan_for(write(tmp_path, f"- {keep % recursive}\n- {{{EXPERTS}}}\n"))
        assert list(taken(found)) == [f"model.layers.{layer}.mlp.experts" for layer in layers]


def test_a_model_operator_goes_with_operators_inside(tmp_path: Path) -> None:
    draft = "match: {kind: model}, replace: {class: speculative_draft, kwargs: {max_draft: 4}}"
    found = plan_for(write(tmp_path, f"- {{{draft}}}\n- {{{EXPERTS}}}\n"))
    assert next(iter(taken(found))) == ""
    assert len(found.swaps) == 4
    assert found.describe().startswith("(the model) ")
    assert found.replaced_bytes == 3 * 4 * 48 * 4


def test_a_name_never_takes_the_model_itself(tmp_path: Path) -> None:
    text = "- {match: {name: '.*', class: TinyModel}, replace: {class: default}}\n"
    (found,) = findings_of(lambda: plan_for(write(tmp_path, text)))
    assert "no module meets all conditions at once" in found.message
    assert plan_for(write(tmp_path, text.replace("name: '.*', ", ""))).swaps == ()


def test_bytes(tmp_path: Path) -> None:
    model = tiny_model()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight[:, :], requires_grad=False)
    model.tied = nn.Linear(8, 5, bias=False)
    model.tied.weight = model.lm_head.weight  # counts once
    model.register_buffer("positions", torch.zeros(10, device="meta"))
    found = plan_for(write(tmp_path, f"- {{{EXPERTS}}}\n"), model)
    assert found.replaced_bytes == 3 * 4 * (4 * 8 + 8 * 2) * 4  # layers, experts, weights of one, bytes of float32
    everything = sum(parameter.nbytes for parameter in model.parameters()) + 40
    assert found.rest_bytes == everything - found.replaced_bytes
    assert [dict(swap.footprint.by_device) for swap in found.swaps] == [{"cpu": 4 * 48 * 2}] * 3  # bfloat16, as stored
    assert found.bytes_by_device == {"cpu": found.rest_bytes + 3 * 4 * 48 * 2}


def test_a_plan_without_swaps_is_reported(tmp_path: Path) -> None:
    found = plan_for(write(tmp_path, "- {match: {kind: experts}, replace: {class: default}}\n"))
    assert found.describe().startswith("nothing is replaced\nreplaced: 0 B become 0 B")


def test_requires_takes_the_type_from_the_config(tmp_path: Path) -> None:
    registry = load_registry()
    rules = read_rules(write(tmp_path, "extends: cpu\nrequires: {model_type: mixtral}\n"), registry=registry)
    assert plan(mixtral(), rules, registry=registry, dtype=torch.bfloat16).swaps
    (found,) = findings_of(lambda: plan(qwen3_moe(), rules, registry=registry, dtype=torch.bfloat16))
    assert found.message == "this rule file is for models of type 'mixtral', and this model is of type 'qwen3_moe'"


def test_a_model_of_tens_of_thousands_of_modules_is_planned_soon(tmp_path: Path) -> None:
    model = tiny_model(layers=60)
    for layer in model.model["layers"]:
        layer.extra = nn.ModuleList(nn.Identity() for _ in range(300))
    rules = "".join(f"- {{match: {{name: '^no.such.{index}', kind: experts}}, replace: {{class: default}}}}\n" for index in range(30))
    path = write(tmp_path, f"{rules}- {{{EXPERTS}}}\n")
    parsed = read(path)
    begin = time.process_time()
    found = findings_of(lambda: plan(model, parsed, registry=REGISTRY, dtype=torch.bfloat16))
    assert time.process_time() - begin < 10  # seconds of the CPU, for 18 000 modules, 31 rules and 30 near misses sought
    assert len(found) == 30
    good = read(write(tmp_path, f"- {{{EXPERTS}}}\n"))
    begin = time.process_time()
    assert len(plan(model, good, registry=REGISTRY, dtype=torch.bfloat16).swaps) == 59
    assert time.process_time() - begin < 2
