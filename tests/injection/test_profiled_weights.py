"""Experts in two weight types by a recorded routing profile: meaning, bytes, cache, decode steps, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

pytest.importorskip("gguf", reason="writes GGUF files")

from moegraft.injection import optimize_and_load
from moegraft.injection.checkpoint.gguf.export import plan_export, read_types, write_export
from moegraft.injection.meta_model import build_meta_model
from moegraft.injection.model_source import find_model
from moegraft.injection.rules import RuleErrors, read_rules
from moegraft.injection.verify import verify
from moegraft.operators.block_encoding import ENCODED
from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.experts.profiled import WEIGHT_TYPES
from moegraft.operators.registry import load_registry
from moegraft.operators.routing_trace import Trace, record_trace
from moegraft.operators.weight_formats import FORMATS

EXPERTS, LAYERS = 5, 2
SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 96, "num_experts": EXPERTS, "num_experts_per_tok": 2}
IDS = torch.arange(3, 30)


def made(folder: Path, **changes: int) -> Path:
    torch.manual_seed(0)
    more = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101}
    config = Qwen3MoeConfig(**{**SIZES, **more, **changes}, norm_topk_prob=True, initializer_range=0.1, max_position_embeddings=128)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = made(tmp_path_factory.mktemp("profiled"))
    record_trace(AutoModelForCausalLM.from_pretrained(path), [IDS], "tiny").save(path / "routing.npz")
    return path


def rules(hot: str = "int8", cold: str = "iq4_nl", more: str = "", kwargs: str = "") -> str:
    weights = f"{{hot: {hot}, cold: {cold}, profile: routing.npz{more}}}"
    return f"rules:\n- match: {{kind: experts}}\n  replace: {{class: hybrid_experts, kwargs: {{weights: {weights}{kwargs}}}}}\n"


def load(folder: Path, text: str, **options: Any) -> PreTrainedModel:
    file = folder / "rules.yaml"
    file.write_text(text)
    return optimize_and_load(folder, file, progress=False, **({"dtype": "float32", "threads": 1} | options))


def experts(model: PreTrainedModel) -> list[HybridExperts]:
    return [module for module in model.modules() if isinstance(module, HybridExperts)]


def held(operator: HybridExperts) -> dict[int, tuple[str, Any, int]]:
    """Return the type, the packed set and the place in it of each expert."""
    sets = operator.on_cpu.packed
    assert operator.on_cpu.places is not None
    return {
        expert: (packed.weight_type, packed, int(row[expert + 1]))
        for packed, row in zip(sets, operator.on_cpu.places, strict=True)
        for expert in range(EXPERTS)
        if row[expert + 1] >= 0
    }


def dequantised(operator: HybridExperts, config: Any) -> Qwen3MoeExperts:
    """Return the stock module with the weights that the operator holds."""
    config._experts_implementation = "eager"
    module = Qwen3MoeExperts(config)
    with torch.no_grad():
        for expert, (_, packed, place) in held(operator).items():
            gate, up, down = (torch.from_numpy(packed.unpack(place, part)) for part in ("gate", "up", "down"))
            module.gate_up_proj[expert] = torch.cat([gate, up])
            module.down_proj[expert] = down
    return module


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS[None]).logits


def test_the_experts_that_a_text_chooses_most_are_hot(folder: Path) -> None:
    model = load(folder, rules(more=", share: 0.6"))
    loads = Trace.load(folder / "routing.npz").loads()
    for operator, tokens in zip(experts(model), loads, strict=True):
        hot = {expert for expert, (name, _, _) in held(operator).items() if name == "int8"}
        assert tokens[list(hot)].sum() >= 0.6 * tokens.sum() > tokens[list(hot)].sum() - min(tokens[list(hot)])
        assert min(tokens[list(hot)]) >= max(tokens[expert] for expert in range(EXPERTS) if expert not in hot)
        assert operator.weight_type == "int8/iq4_nl"
        assert "int8/iq4_nl on the CPU" in operator.placement() and f"{len(hot)} of {EXPERTS} experts hot" in operator.placement()


@pytest.mark.parametrize(
    ("hot", "cold", "intermediate", "limit"),
    [
        ("float32", "bfloat16", 96, 1e-6),  # nothing is rounded: sums in another order
        ("int8", "iq4_nl", 96, 2e-2),  # three blocks in a row; activations are rounded to 8 bits in groups of 32
        ("bfloat16", "int4", 40, 2e-2),  # rows that are no whole number of groups
        ("q6_k", "q2_k", 256, 2e-2),  # super-blocks, both encoded
        ("int8", "iq3_xxs", 256, 2e-2),  # points of a grid
    ],
)
def test_outputs_are_those_of_the_dequantised_weights(tmp_path: Path, hot: str, cold: str, intermediate: int, limit: float) -> None:
    path = made(tmp_path, moe_intermediate_size=intermediate, hidden_size=256 if intermediate == 256 else 64)
    record_trace(AutoModelForCausalLM.from_pretrained(path), [IDS], "tiny").save(path / "routing.npz")
    model = load(path, rules(hot, cold))
    operator = experts(model)[0]
    stock = dequantised(operator, model.config)

    def compare(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
        chosen = (index >= 0) & (index < EXPERTS)
        expected = stock(x, index.where(chosen, 0), weights.where(chosen, 0))
        assert float((operator(x, index, weights) - expected).norm()) <= limit * float(expected.norm())

    torch.manual_seed(1)
    hot_expert, cold_expert = (next(each for each, found in held(operator).items() if found[0] == name) for name in (hot, cold))
    with torch.no_grad():
        for tokens in (0, 1, 3, 40):  # 1 and 3 by tiles, 40 perhaps by a matrix kernel
            x, weights = torch.randn(tokens, operator.layout.hidden), torch.rand(tokens, 5)
            chosen = torch.rand(tokens, EXPERTS).argsort(dim=1)[:, :3]
            compare(x, chosen, weights[:, :3])
            compare(x, torch.cat([chosen, torch.full((tokens, 1), -1), torch.full((tokens, 1), EXPERTS)], dim=1), weights)
            for only in (hot_expert, cold_expert):  # one of the sets computes nothing
                compare(x, torch.full((tokens, 1), only), weights[:, :1])
        with pytest.raises(ValueError, match=r"ids from 0 to 17: expert ids are 0 to 4, and -1 or 5 for a padded slot"):
            operator(x[:1], torch.tensor([[0, 17]]), torch.ones(1, 2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replayed_decode_step_is_the_eager_one(folder: Path, dtype: str) -> None:
    eager, replayed = (load(folder, rules(kwargs=f", decode: {decode}"), dtype=dtype) for decode in ("eager", "auto"))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "output_scores": True, "return_dict_in_generate": True}
    expected, found = (model.generate(IDS[None], **options) for model in (eager, replayed))
    assert replayed.moegraft.context.decode_steps.replayed > 5
    assert torch.equal(expected.sequences, found.sequences)
    torch.testing.assert_close(torch.stack(expected.scores), torch.stack(found.scores), rtol=1e-4, atol=1e-5)


def test_a_plan_counts_the_bytes_that_are_held_and_verify_prices_it(folder: Path) -> None:
    model = load(folder, rules())
    for swap, operator in zip(model.moegraft.plan.swaps, experts(model), strict=True):
        assert swap.footprint.total_bytes == sum(packed.nbytes for packed in operator.on_cpu.packed)
        assert swap.weight_type == "int8/iq4_nl"
    assert "weights.hot=int8 weights.cold=iq4_nl" in model.moegraft.plan.describe()
    found = verify(model, find_model(folder), IDS)
    assert found.ok and all(layer.weight_type == "int8/iq4_nl" and layer.expected is not None for layer in found.layers)
    whole = [verify(load(folder, rules(name, name)), find_model(folder), IDS).layers[0].relative_error for name in ("int8", "iq4_nl")]
    assert whole[0] < found.layers[0].relative_error < whole[1]


def test_the_packed_cache_tells_profiles_apart(folder: Path, tmp_path: Path) -> None:
    more = f", cache_dir: {tmp_path}"
    first = logits(load(folder, rules(kwargs=more)))
    files = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.experts")}
    assert len(files) == 2 * LAYERS
    torch.testing.assert_close(logits(load(folder, rules(kwargs=more))), first, rtol=0, atol=0)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.experts")} == files
    other = load(folder, rules(more=", share: 0.9", kwargs=more))
    assert len(list(tmp_path.glob("*.experts"))) > len(files)
    torch.testing.assert_close(logits(other), logits(load(folder, rules(more=", share: 0.9"))), rtol=0, atol=0)


def test_blocks_of_a_file_are_kept_where_they_are_smaller(folder: Path, tmp_path: Path) -> None:
    meta = build_meta_model(folder, weights=True)
    assert meta.weights is not None
    file = tmp_path / "tiny.gguf"
    write_export(plan_export(meta.weights, meta.skeleton, read_types("Q5_0")), file, folder, "tiny", {}, lambda size: None)
    model = load(folder, rules("stored", "int4"), gguf=file)
    assert [operator.weight_type for operator in experts(model)] == ["q5_0/int4"] * LAYERS
    alike = load(folder, rules("int8", "stored"), gguf=file)
    assert [operator.weight_type for operator in experts(alike)] == ["q5_0"] * LAYERS  # int8 would hold the same values in more bytes


def test_every_type_is_one_that_weights_can_be_packed_to() -> None:
    names = {form.gguf: name for name, form in FORMATS.items()}
    assert set(get_args(WEIGHT_TYPES)) == {"stored", *(names[each] for each in ENCODED)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (rules(cold="iq1_m"), r"rules\.yaml:3:\d+: error: option 'weights\.cold' of hybrid_experts must be one of stored, .*iq1_s, not "),
        (rules(more=", share: 1"), "option 'weights' of hybrid_experts: share is a part of a layer's routed tokens, above 0 and below 1"),
        (rules(kwargs=", gpu: auto"), "weights of several types need gpu: none, as all slots"),
        (rules(kwargs=", sparsity: {target: 0.5, scope: routed}"), "weights of several types cannot be combined with sparsity"),
        (rules().replace("cold: iq4_nl, ", ""), r"option 'weights\.cold' of hybrid_experts is missing"),
        (rules(more=", shares: 0.5"), "unknown option 'shares' of option 'weights' of hybrid_experts; did you mean 'share'"),
    ],
)
def test_mistakes_have_a_place_and_a_reason(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    with pytest.raises(RuleErrors, match=message):
        read_rules(file, registry=load_registry())


def test_wrong_profiles_are_refused(folder: Path, tmp_path: Path) -> None:
    trace = (folder / "routing.npz").read_bytes()
    small, deep = made(tmp_path / "small", num_experts=4), made(tmp_path / "deep", num_hidden_layers=3)

    def refused(path: Path, content: bytes | None, message: str, text: str = rules()) -> None:
        profile = path / "routing.npz"
        profile.unlink(missing_ok=True)
        if content is not None:
            profile.write_bytes(content)
        with pytest.raises(RuleErrors, match=rf"rules\.yaml:3:\d+: error: rule .*{message}"):
            load(path, text)

    refused(small, trace, r"routing\.npz: model\.layers\.0\.mlp\.experts has 5 experts there and 4 in this model; record")
    refused(deep, trace, r"routing\.npz: it has no layer model\.layers\.2\.mlp\.experts; its layers are model\.layers\.0\.mlp\.experts, ")
    refused(deep, trace[:400], r"routing\.npz: not a routing trace")
    refused(deep, None, r"routing\.npz: No such file")
    refused(deep, trace, r"q3_k has blocks of 256 weights, of which rows of 64 are no whole number; use int4", rules(cold="q3_k"))
