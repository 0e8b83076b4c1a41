"""`cpu_attention` on latent caches: the stock module's results from the latents, as long as their projection is a plain linear layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import build_model, case_of, prompt
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from moegraft.injection import new_cache, optimize_and_load
from moegraft.operators.cpu_ops.attention import FEW_QUERIES, CpuAttention

EXPERTS = "- {match: {kind: experts}, replace: {class: hybrid_experts}}\n"
PROMPT = FEW_QUERIES + 3
# Those with an indexer show each query eight keys of their own.
FAMILIES = [
    "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note", "dots3_note_text", "glm4_moe_lite",
    "glm5_next", "glm_moe_dsa", "hy_v4", "kimi_linear", "mistral4", "mistral_large4",
]  # fmt: skip
ODD = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 13,
    "qk_nope_head_dim": 7,
    "v_head_dim": 5,
    "qk_rope_head_dim": 6,
}


def stock(model_type: str, **text: Any) -> PreTrainedModel:
    case = case_of(model_type)
    return build_model(dataclasses.replace(case, text={**case.text, **text})).eval()


def injected(model: PreTrainedModel, tmp_path: Path, more: str = "") -> PreTrainedModel:
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"version: 1\nrules:\n- {{match: {{kind: attention}}, replace: {{class: cpu_attention}}}}\n{more}")
    found: PreTrainedModel = optimize_and_load(model, rules, progress=False, threads=1)
    return found


@pytest.fixture
def absorbed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The queries of every call that is answered from latents."""
    calls: list[int] = []
    compute = CpuAttention.compute_latent

    def counting(self: CpuAttention, module: nn.Module, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(query.shape[2])
        return compute(self, module, query, *rest)

    monkeypatch.setattr(CpuAttention, "compute_latent", counting)
    return calls


def latent_layers(model: PreTrainedModel) -> int:
    return sum("latents absorbed" in operator.placement() for operator in model.moegraft.operators.values())


def generated(model: PreTrainedModel, **options: Any) -> torch.Tensor:
    ids = options.pop("ids", prompt(PROMPT, batch=1, seed=3))
    return model.generate(ids, do_sample=False, max_new_tokens=12, min_new_tokens=12, pad_token_id=0, **options)


def logits(model: PreTrainedModel, ids: torch.Tensor, *, first: int, crop: int = 0) -> torch.Tensor:
    """Of the tokens behind the `first`, at once, over a cache that held and dropped `crop` others."""
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(ids[:, :first], past_key_values=cache)
        if crop:
            model(ids[:, :crop], past_key_values=cache)
            cache.crop(-crop)
        found: torch.Tensor = model(ids[:, first:], past_key_values=cache).logits
    return found


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_generates_the_stock_text(model_type: str, tmp_path: Path, absorbed: list[int]) -> None:
    expected = generated(stock(model_type))
    model = injected(stock(model_type), tmp_path)
    absorbed.clear()
    assert torch.equal(generated(model), expected)
    assert latent_layers(model) > 0
    assert absorbed.count(1) == len(absorbed) > 0  # the prompt is expanded


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_padded_batch_generates_the_stock_text(cache: str, tmp_path: Path, absorbed: list[int]) -> None:
    ids = prompt(9, batch=3, seed=5)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :7] = 0
    options = {"attention_mask": mask, "cache_implementation": cache}
    expected = generated(stock("deepseek_v2"), ids=ids, **options)
    model = injected(stock("deepseek_v2"), tmp_path)
    absorbed.clear()
    assert torch.equal(generated(model, ids=ids, **options), expected)
    assert set(absorbed) == {1, 9}  # a prompt of few tokens is absorbed as well


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("queries", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("sizes", [{}, ODD], ids=["even", "odd"])
def test_logits_of_several_tokens_after_a_rollback(
    sizes: dict[str, Any], queries: int, batch: int, tmp_path: Path, absorbed: list[int]
) -> None:
    ids = prompt(PROMPT + queries, batch=batch, seed=queries)
    expected = logits(stock("deepseek_v3", **sizes), ids, first=PROMPT)
    model = injected(stock("deepseek_v3", **sizes), tmp_path)
    absorbed.clear()
    found = logits(model, ids, first=PROMPT, crop=4)
    assert absorbed == [4] * 3 + [queries] * 3
    assert error(found, expected) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_as_close_to_float32_as_the_stock_modules(dtype: torch.dtype, tmp_path: Path, absorbed: list[int]) -> None:
    ids = prompt(PROMPT + 2, batch=2, seed=1)
    model = stock("glm4_moe_lite").to(dtype)
    exact = logits(stock("glm4_moe_lite").to(dtype).float(), ids, first=PROMPT)
    rounded = error(logits(model, ids, first=PROMPT), exact)
    assert error(logits(injected(model, tmp_path), ids, first=PROMPT), exact) <= 1.5 * rounded
    assert absorbed.count(2) == 3


def test_a_changed_projection_counts_at_once(tmp_path: Path, absorbed: list[int]) -> None:
    ids, model, other = prompt(12, batch=1, seed=2), stock("deepseek_v3"), stock("deepseek_v3")
    ours = injected(model, tmp_path)
    for attention in (layer.self_attn for layer in (*ours.model.layers, *other.model.layers)):
        with torch.no_grad():
            attention.kv_b_proj.weight.mul_(0.5)
    assert error(logits(ours, ids, first=11), logits(other, ids, first=11)) <= 1e-5
    for attention in (layer.self_attn for layer in (*ours.model.layers, *other.model.layers)):
        attention.kv_b_proj.weight = nn.Parameter(attention.kv_b_proj.weight.flip(0), False)
    assert error(logits(ours, ids, first=11), logits(other, ids, first=11)) <= 1e-5
    assert len(absorbed) > 0


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def _doubled(attention: Any) -> None:
    layer = attention.kv_b_proj
    attention.kv_b_proj = Doubled(layer.in_features, layer.out_features, bias=False)
    attention.kv_b_proj.weight = layer.weight


def _hooked(attention: Any) -> None:
    attention.kv_b_proj.register_forward_hook(lambda module, args, output: 2 * output)


def _biased(attention: Any) -> None:
    attention.kv_b_proj.bias = nn.Parameter(torch.linspace(-1, 1, attention.kv_b_proj.out_features))


@pytest.mark.parametrize("change", [_doubled, _hooked, _biased])
def test_a_replaced_projection_is_left_to_the_module(change: Callable[[Any], None], tmp_path: Path, absorbed: list[int]) -> None:
    ids, model, other = prompt(12, batch=1, seed=2), stock("deepseek_v3"), stock("deepseek_v3")
    ours = injected(model, tmp_path)
    for layer in (*ours.model.layers, *other.model.layers):
        change(layer.self_attn)
    absorbed.clear()
    assert error(logits(ours, ids, first=11), logits(other, ids, first=11)) <= 1e-5
    assert not absorbed


def test_a_packed_projection_is_expanded_with_the_reason(tmp_path: Path, absorbed: list[int], caplog: pytest.LogCaptureFixture) -> None:
    packed = "- {match: {kind: linear, name: 'kv_b_proj$'}, replace: {class: quantized_linear, kwargs: {weights: bfloat16}}}\n"
    other = stock("deepseek_v3")
    for layer in other.model.layers:
        layer.self_attn.kv_b_proj.weight.data = layer.self_attn.kv_b_proj.weight.data.bfloat16().float()
    expected = generated(other)
    model = injected(stock("deepseek_v3"), tmp_path, packed)
    assert "expands its whole cache for every token: its kv_b_proj is a QuantizedLinear" in caplog.text
    assert any("latents expanded" in line for line in model.moegraft.placement())
    assert torch.equal(generated(model), expected)
    assert not absorbed


def test_an_expansion_of_its_own_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    expand = DeepseekV3Attention.expand_kv
    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", lambda self, latents, rotary: expand(self, 1.5 * latents, rotary))
    expected = generated(stock("deepseek_v3"))
    model = injected(stock("deepseek_v3"), tmp_path)
    assert "it computes something else from its latents than their projection by kv_b_proj" in caplog.text
    assert latent_layers(model) == 0
    assert torch.equal(generated(model), expected)


def test_a_module_that_computes_with_its_keys_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absorbed: list[int]) -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as family

    interface = family.ALL_ATTENTION_FUNCTIONS

    class Scaled:
        """An attention interface that scales the keys, as a family might."""

        def get_interface(self, name: str, default: Any) -> Any:
            function = interface.get_interface(name, default)
            return lambda module, query, key, value, *args, **kwargs: function(module, query, 0.5 * key, value, *args, **kwargs)

    ids = prompt(12, batch=1, seed=2)
    model = injected(stock("deepseek_v3"), tmp_path)
    absorbed.clear()
    monkeypatch.setattr(family, "ALL_ATTENTION_FUNCTIONS", Scaled())
    assert error(logits(model, ids, first=11), logits(stock("deepseek_v3"), ids, first=11)) <= 1e-5
    assert not absorbed


def test_gradients_and_attention_weights_are_pytorchs(tmp_path: Path, absorbed: list[int]) -> None:
    model = injected(stock("deepseek_v3"), tmp_path)
    absorbed.clear()
    model(prompt(9, batch=1), use_cache=False).logits.sum().backward()
    assert model.model.layers[0].self_attn.kv_b_proj.weight.grad is not None
    model.set_attn_implementation("eager")
    with torch.no_grad():
        assert model(prompt(9, batch=1), output_attentions=True).attentions[0].shape[-2:] == (9, 9)
    assert not absorbed


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1", "mistral4"])
def test_steps_are_programs_that_read_the_latents(model_type: str, tmp_path: Path, absorbed: list[int]) -> None:
    expected = generated(stock(model_type))
    model = injected(stock(model_type), tmp_path, EXPERTS)
    assert torch.equal(generated(model), expected)
    absorbed.clear()
    assert torch.equal(generated(model), expected)
    assert absorbed == [1]  # the last layer for the prompt's last token; the attention of all steps is in programs
    assert model.moegraft.context.replay.statistics()["replayed_steps"] >= 11


@pytest.mark.parametrize(("batch", "tokens"), [(1, 2), (3, 1), (2, 3)])
def test_programs_follow_a_rollback(batch: int, tokens: int, tmp_path: Path) -> None:
    ids = prompt(90, batch=batch, seed=4)
    model, other = injected(stock("deepseek_v3", **ODD), tmp_path, EXPERTS), stock("deepseek_v3", **ODD)
    caches = new_cache(model), DynamicCache(config=other.config)
    with torch.no_grad():
        for ours, cache in zip((model, other), caches, strict=True):
            ours(ids[:, :PROMPT], past_key_values=cache)
        for step in range(12):
            if step == 7:
                for cache in caches:
                    cache.crop(-5)
            first = caches[0].get_seq_length()
            new = ids[:, first : first + tokens]
            found, expected = (
                ours(input_ids=new, past_key_values=cache).logits for ours, cache in zip((model, other), caches, strict=True)
            )
            assert error(found, expected) <= 1e-5, step
    assert model.moegraft.context.replay.statistics()["replayed_steps"] >= 6
