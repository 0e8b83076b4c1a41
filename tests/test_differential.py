"""Generated configurations of many families: every operator in every weight type, beside the stock model in float64 with the same weights.

    pytest tests/test_differential.py               # some dozen configurations
    pytest --long -n 2 tests/test_differential.py   # 2,000 configurations

A configuration has odd and tiny sizes, one expert or more, a top-k of up to all of them, groups, shared experts and biases, as its number
determines; so do the weight types. The stock model computes with the weights as the operators hold them, so that what differs is the
arithmetic. Modules are compared on equal inputs, and models of 16-bit weights or wider also by the logits of prompts and steps.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.families import build_config, build_model, case_of, prompt
from support.family_rows import FamilyCase
from torch import nn
from transformers import PreTrainedModel

from moegraft.cpu_backend import PackedExperts, PackedLinear
from moegraft.injection import new_cache, optimize_and_load
from moegraft.operators.errors import MoegraftError
from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.layout import read_layout, why_unsupported
from moegraft.operators.linear import QuantizedLinear

FAMILIES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe"),
    *("glm4_moe_lite", "granitemoe", "granitemoeshared", "ernie4_5_moe", "minimax_m2", "phimoe", "jamba", "lfm2_moe", "hunyuan_v1_moe"),
    *("dots1", "nemotron_h", "cohere2_moe", "afmoe", "flex_olmo", "zaya", "gemma4_text"),
)
SHORT, LONG, CHUNK = 8, 2000, 50
EXACT = ("float32", "float16", "bfloat16")
# Relative errors of a module (Frobenius norm) beside the same weights in float64. With int8 and int4 weights activations have 8 bits.
MODULE_TOLERANCE = {"float32": 1e-5, "float16": 1e-5, "bfloat16": 1e-5, "int8": 6e-2, "int4": 6e-2}
LOGITS_TOLERANCE = 1e-4  # or 20 times the error of the stock model in float32, if that is more
UNSTABLE = 1e-3  # an error of the stock model in float32 that shows that it chose other experts than in float64
STEPS = 7  # two are recorded, two verified, and the rest replayed
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
WIDTHS = ("moe_intermediate_size", "intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")
SWITCHES = ("norm_topk_prob", "attention_bias", "mlp_bias", "use_bias", "tie_word_embeddings", "moe_bias", "add_bias_linear")


def drawn(case: FamilyCase, chance: random.Random) -> FamilyCase:
    """Return a case of the same family with other sizes; not every family accepts all of them."""
    default = build_config(case).get_text_config()
    fields = {field.name for field in dataclasses.fields(default)}
    experts = chance.choice((1, 2, 3, 4, 5, 7, 8, 9, 16, 17))
    top_k = chance.choice((1, 2, experts, chance.randint(1, experts)))
    groups = chance.choice([number for number in range(1, experts + 1) if experts % number == 0])
    own: dict[str, Any] = {
        **dict.fromkeys(EXPERTS, experts),
        **dict.fromkeys(TOP_K, min(top_k, experts)),
        **dict.fromkeys(SHARED, chance.randint(0, 2) or 1),
        **{name: chance.choice((1, 2, 3, 5, 8, 13, 16, 24, 31, 32, 33, 40, 63, 64, 65, 96, 129)) for name in WIDTHS},
        **{name: chance.random() < 0.5 for name in SWITCHES},
        "hidden_size": chance.choice((8, 16, 24, 32, 40, 56, 64, 72, 96, 136, *((33, 47, 65, 100) if "head_dim" in fields else ()))),
        "n_group": groups,
        "topk_group": chance.randint(1, groups),
        "routed_scaling_factor": chance.choice((1.0, 0.3, 2.5)),
        "hidden_act": chance.choice(("silu", "silu", "gelu", "gelu_pytorch_tanh", "relu")),
        "scoring_func": chance.choice(("softmax", "sigmoid")),
    }
    if "n_group" in fields and own["topk_group"] * (experts // groups) < own["num_experts_per_tok"]:
        own["topk_group"] = groups
    kept = {name: value for name, value in own.items() if name in fields and chance.random() < 0.8}
    for names in (EXPERTS + TOP_K + ("n_group", "topk_group"),):  # these depend on each other
        kept.update({name: own[name] for name in names if name in fields})
    for name in case.text.keys() & {*TOP_K, "n_group", "topk_group", "moe_intermediate_size"}:
        if not isinstance(case.text[name], int) or case.model_type == "zaya":
            kept.pop(name, None)
    return dataclasses.replace(case, text={**case.text, **kept})


@dataclass(frozen=True, slots=True)
class Types:
    """The weight types of experts and linear layers; None leaves linear layers alone."""

    experts: str
    linear: str | None

    @property
    def exact(self) -> bool:
        return {self.experts, self.linear or "float32"} <= set(EXACT)


def rules_for(types: Types, sparse: bool, chance: random.Random) -> str:
    options = [f"weights: {types.experts}"]
    if sparse:
        options.append("sparsity: {target: 0, scope: routed}")  # another layout, which leaves nothing out here
    elif chance.random() < 0.2:
        ratio, schedule = chance.choice((0.0, 0.3, 1.0)), chance.choice(("two_threshold", "greedy", "on_demand", "fixed"))
        options.append(f"gpu: emulated, cache: {{ratio: {ratio}}}, schedule: {schedule}")
    lines = [f"- {{match: {{kind: experts}}, replace: {{class: hybrid_experts, kwargs: {{{', '.join(options)}}}}}}}"]
    if types.linear is not None:
        name = r"(\.([qkvo]|qkv|q_[ab]|kv_a|gate|up|down)_proj(_with_mqa)?|lm_head)$"
        lines.append(
            f"- {{match: {{kind: linear, name: '{name}'}}, replace: {{class: quantized_linear, kwargs: {{weights: {types.linear}}}}}}}"
        )
    for kind in ("attention", "norm", "router"):
        if chance.random() < 0.6:
            lines.append(f"- {{match: {{kind: {kind}}}, replace: {{class: cpu_{kind}}}, expect: any}}")
    return "version: 1\nrules:\n" + "\n".join(lines) + "\n"


def as_array(tensor: torch.Tensor) -> Any:
    return np.ascontiguousarray(tensor.detach().float().numpy())


@torch.no_grad()
def round_weights(model: PreTrainedModel, types: Types, sparse: bool, linears: set[str]) -> None:
    """Give the model the weights as the operators will hold them."""
    for path, module in model.named_modules():
        if why_unsupported(module) is None:
            layout = read_layout(module)
            packed = PackedExperts(layout.shape, layout.gate, types.experts, sparse=sparse)
            for part in layout.parts():
                if part.endswith("_bias"):
                    continue
                for expert, values in enumerate(module.get_parameter(layout.parameter(part))):
                    piece = layout.cut(part, values)
                    packed.pack(expert, part, as_array(piece))
                    piece.copy_(torch.from_numpy(packed.unpack(expert, part)))
        elif path in linears and types.linear is not None:
            assert isinstance(module, nn.Linear)
            matrix = PackedLinear(module.out_features, module.in_features, types.linear)
            matrix.pack(as_array(module.weight))
            module.weight.copy_(torch.from_numpy(matrix.unpack()))


@dataclass(frozen=True, slots=True)
class Call:
    arguments: tuple[Any, ...]
    output: torch.Tensor


@contextmanager
def recorded(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Call]]:
    """Keep the last call of each module."""
    calls: dict[str, Call] = {}

    def keep(path: str) -> Callable[..., None]:
        return lambda _module, arguments, output: calls.update({path: Call(arguments, output)})

    handles = [module.register_forward_hook(keep(path)) for path, module in modules.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def doubled(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@torch.no_grad()
def steps(model: PreTrainedModel, ids: torch.Tensor, length: int) -> torch.Tensor:
    """Return the logits of all tokens, those after `length` computed one at a time."""
    cache = new_cache(model)
    found = [model(input_ids=ids[:, :length], past_key_values=cache, use_cache=True).logits]
    for at in range(length, ids.shape[1]):
        found.append(model(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True).logits)
    return torch.cat(found, 1)


def stock_of(number: int, chance: random.Random) -> tuple[FamilyCase, PreTrainedModel, torch.Tensor]:
    """Return a case that the stock model accepts, with its model and ids that the model computes."""
    base = case_of(FAMILIES[number % len(FAMILIES)])
    for _ in range(20):
        case = drawn(base, chance)
        ids = prompt(chance.choice((1, 2, 5, 9)) + STEPS, batch=chance.choice((1, 1, 2, 3)), seed=number)
        try:
            model = build_model(case, seed=number)
            model.set_experts_implementation("eager")  # the other ones need aligned rows
            with torch.no_grad():
                logits = model(input_ids=ids).logits
        except Exception:  # noqa: BLE001 # whatever transformers raises for sizes that do not fit each other
            continue
        if logits.isfinite().all():
            return case, model, ids
    raise AssertionError(f"{base.model_type}: no drawn configuration can be computed")


@torch.no_grad()
def difference(number: int, folder: Path) -> str | None:
    """Return how the injected model of a configuration differs from the stock one; None if it does not."""
    chance = random.Random(number)
    case, stock, ids = stock_of(number, chance)
    types = Types(chance.choice((*EXACT, "int8", "int4")), chance.choice((None, None, "float16", "bfloat16", "int8", "int4")))
    rules = folder / "rules.yaml"
    sparse = chance.random() < 0.2
    rules.write_text(rules_for(types, sparse, chance))
    label = f"configuration {number}: {case.model_type} {dict(case.text)}\n{rules.read_text()}"
    try:
        planned = optimize_and_load(stock, rules, dry_run=True)
    except MoegraftError as error:
        return None if "gate function" in str(error) or "matches no module" in str(error) else f"{label}{error}"
    linears = {swap.module for swap in planned.swaps if swap.operator == "quantized_linear"}
    round_weights(stock, types, sparse, linears)
    length = ids.shape[1] - STEPS
    exact = copy.deepcopy(stock).double()
    ways: dict[str, Callable[[PreTrainedModel], torch.Tensor]] = {
        "logits": lambda model: model(input_ids=ids).logits,
        "logits of steps": lambda model: steps(model, ids, length),
    }
    in_float32 = {name: way(stock) for name, way in ways.items()} if types.exact else {}
    injected: PreTrainedModel = optimize_and_load(stock, rules, progress=False, threads=chance.choice((1, 2)))
    operators = {path: module for path, module in injected.named_modules() if isinstance(module, HybridExperts | QuantizedLinear)}
    with recorded(operators) as calls:
        logits = injected(input_ids=ids).logits
    if not logits.isfinite().all():
        return f"{label}logits that are not finite"
    for kind, weight_type in ((HybridExperts, types.experts), (QuantizedLinear, types.linear)):
        pairs = [
            (call.output.double(), exact.get_submodule(path)(*map(doubled, call.arguments)))
            for path, call in calls.items()
            if isinstance(operators[path], kind)
        ]
        if pairs:
            found, expected = (torch.cat([each.flatten() for each in side]) for side in zip(*pairs, strict=True))
            off = relative_error(found, expected)
            if not off <= MODULE_TOLERANCE[weight_type or ""]:
                return f"{label}{kind.__name__} of {weight_type}: off by {off:.1e}"
    if not types.exact:
        return None
    for name, way in ways.items():
        reference = way(exact).double()
        usual = relative_error(in_float32[name], reference)
        off = relative_error(way(injected), reference)
        if usual <= UNSTABLE and not off <= max(LOGITS_TOLERANCE, 20 * usual):
            return f"{label}{name} off by {off:.1e}, and stock in float32 by {usual:.1e}"
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first" in metafunc.fixturenames:
        count = LONG if metafunc.config.getoption("--long") else SHORT
        metafunc.parametrize(("first", "count"), [(first, min(CHUNK, count - first)) for first in range(0, count, CHUNK)])


def test_generated_configurations_equal_stock_in_float64(first: int, count: int, tmp_path: Path) -> None:
    findings = [found for number in range(first, first + count) if (found := difference(number, tmp_path)) is not None]
    assert not findings, "\n\n".join(findings)
