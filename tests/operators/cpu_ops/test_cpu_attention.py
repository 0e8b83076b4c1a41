"""`cpu_attention` in a model: the stock model's tokens with every cache, by the kernel where it is supported, otherwise by PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import build_model, case_of, prompt
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import output_capturing

from moegraft.injection import optimize_and_load
from moegraft.operators.cpu_ops.attention import IMPLEMENTATION, CpuAttention, ImplementationName
from moegraft.operators.linear import QuantizedLinear

ATTENTION = "- {match: {kind: attention}, replace: {class: cpu_attention}}\n"


def stock(model_type: str, shallow: bool = False) -> PreTrainedModel:
    """Return a model of three layers, or of the first of them: torch.compile traces each layer again."""
    case = case_of(model_type)
    if shallow:
        kinds = {"layer_types": case.text["layer_types"][:1]} if "layer_types" in case.text else {}
        case = replace(case, text={**case.text, "num_hidden_layers": 1, **kinds})
    return build_model(case).eval()


def injected(model: PreTrainedModel, tmp_path: Path, more: str = "") -> PreTrainedModel:
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"version: 1\nrules:\n{ATTENTION}{more}")
    found: PreTrainedModel = optimize_and_load(model, rules, progress=False, threads=1)
    return found


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Record the number of queries of every call that the kernel computes."""
    calls: list[int] = []
    compute = CpuAttention.compute

    def counting(self: CpuAttention, tensors: Any, *rest: Any, **named: Any) -> torch.Tensor:
        calls.append(tensors[0].shape[2])
        return compute(self, tensors, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(CpuAttention, "compute", counting)
        yield calls


def generated(model: PreTrainedModel, **options: Any) -> torch.Tensor:
    ids = options.pop("ids", prompt(9, batch=1, seed=3))
    return model.generate(ids, do_sample=False, max_new_tokens=20, min_new_tokens=20, pad_token_id=0, **options)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral", "gemma4_text"])
def test_the_kernel_computes_every_call_and_tokens_equal_stock(
    model_type: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generated(stock(model_type), cache_implementation=cache)
    model = injected(stock(model_type), tmp_path)
    layers = sum(isinstance(operator, CpuAttention) for operator in model.moegraft.operators.values())
    with counted(monkeypatch) as calls:
        assert torch.equal(generated(model, cache_implementation=cache), expected)
    assert layers > 0
    # The last layer computes the last token alone, but where Gemma shares keys, and of static caches that have no mask for a window.
    last = 9 if model_type == "gemma4_text" or (cache == "static" and model_type in ("qwen3_moe", "deepseek_v3")) else 1
    assert calls == [9] * (layers - 1) + [last] + [1] * layers * 19


def test_a_padded_batch_equals_stock(tmp_path: Path) -> None:
    ids = prompt(9, batch=3, seed=5)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :7] = 0
    expected = generated(stock("qwen3_moe"), ids=ids, attention_mask=mask)
    assert torch.equal(generated(injected(stock("qwen3_moe"), tmp_path), ids=ids, attention_mask=mask), expected)


def test_sliding_windows_and_steps_of_several_tokens_equal_stock(tmp_path: Path) -> None:
    model, ours = stock("gpt_oss"), injected(stock("gpt_oss"), tmp_path)
    ids = prompt(40, batch=1, seed=1)
    with torch.no_grad():
        expected = model(ids).logits
        start = ours(ids[:, :30], use_cache=True)
        rest = ours(ids[:, 30:], past_key_values=start.past_key_values)
    torch.testing.assert_close(torch.cat([start.logits, rest.logits], 1), expected, rtol=1e-4, atol=1e-4)


def test_rules_for_parts_of_an_attention_module_apply(tmp_path: Path) -> None:
    model = injected(stock("qwen3_moe"), tmp_path, "- {match: {kind: linear, name: 'q_proj$'}, replace: {class: quantized_linear}}\n")
    kinds = [type(operator) for operator in model.moegraft.operators.values()]
    assert kinds.count(CpuAttention) == kinds.count(QuantizedLinear) == model.config.num_hidden_layers
    assert isinstance(model.model.layers[0].self_attn.q_proj, QuantizedLinear)
    assert any("cpu_attention" in line for line in model.moegraft.placement())
    attention_bytes = {swap.footprint.total_bytes for swap in model.moegraft.plan.swaps if swap.in_place}
    assert attention_bytes == {0}


def _with_gradient(model: PreTrainedModel) -> None:
    model(prompt(9, batch=1)).logits.sum().backward()


def _with_weights(model: PreTrainedModel) -> None:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        assert model(prompt(9, batch=1), output_attentions=True).attentions[0].shape[-2:] == (9, 9)


@pytest.mark.parametrize("call", [_with_gradient, _with_weights])
def test_unsupported_calls_run_in_pytorch(call: Callable[[PreTrainedModel], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = injected(stock("qwen3_moe"), tmp_path)
    with counted(monkeypatch) as calls:
        call(model)
    assert not calls


@pytest.mark.parametrize("compiled", [False, True])
def test_attention_weights_of_an_encoder_that_passes_no_arguments_on(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aria's encoder of images does not inform its layers of `output_attentions`: stock layers always return their weights."""
    if compiled and not hasattr(output_capturing, "selected_hidden_states"):
        pytest.skip("transformers before 5.23 sets its collector outside the graphs of this encoder, which cannot read it")
    model = stock("aria")
    model.set_attn_implementation("eager")
    pixels = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    ours: Any = injected(stock("aria"), tmp_path)
    ours.set_attn_implementation("eager")
    tower = ours.model.vision_tower
    with torch.no_grad(), counted(monkeypatch) as calls:
        expected = model.model.vision_tower(pixels, output_attentions=True)
        call = torch.compile(tower, backend="aot_eager") if compiled else tower
        found = call(pixels, output_attentions=True)
        assert not calls
        plain = call(pixels)
    assert calls == [4] and plain.attentions is None
    assert len(found.attentions) == len(expected.attentions) == 1
    torch.testing.assert_close(found.attentions, expected.attentions)
    torch.testing.assert_close(plain.last_hidden_state, expected.last_hidden_state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_graph_of_torch_compile_calls_the_kernel(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(9, batch=1)
    with torch.no_grad():
        expected = stock(model_type, shallow=True)(ids, use_cache=False).logits
        model = injected(stock(model_type, shallow=True), tmp_path)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with counted(monkeypatch) as calls:
            found = compiled(ids, use_cache=False).logits
    assert calls == [9] * sum(isinstance(operator, CpuAttention) for operator in model.moegraft.operators.values())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_graph_with_gradients_uses_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = injected(stock("qwen3_moe", shallow=True), tmp_path)
    with counted(monkeypatch) as calls:
        torch.compile(model, backend="aot_eager")(prompt(9, batch=1), use_cache=False).logits.sum().backward()
    assert not calls
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


@pytest.mark.parametrize("model_type", ["qwen3_moe", "glm5_next"])  # the second makes its mask by the implementation's name
def test_an_implementation_that_is_set_later_is_used(model_type: str, tmp_path: Path) -> None:
    model = injected(stock(model_type), tmp_path)
    ids = prompt(9, batch=1)
    with torch.no_grad():
        first = model(ids).logits
        model.set_attn_implementation("eager")
        for weights in (False, True):  # by the kernel, and by PyTorch
            torch.testing.assert_close(model(ids, output_attentions=weights).logits, first, rtol=1e-4, atol=1e-4)
    assert model.config._attn_implementation == "eager"


def test_a_custom_attention_function_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as family

    eager = family.eager_attention_forward

    def capped(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any) -> Any:
        return eager(module, query, key, value, mask, scaling=scaling * 1.5, **kwargs)

    monkeypatch.setattr(family, "eager_attention_forward", capped)
    model = stock("qwen3_moe")
    model.set_attn_implementation("eager")
    expected = generated(model)
    ours = stock("qwen3_moe")
    ours.set_attn_implementation("eager")
    ours = injected(ours, tmp_path)
    assert "its function computes something else" in caplog.text
    with counted(monkeypatch) as calls:
        assert torch.equal(generated(ours), expected)
    assert not calls


def test_the_name_of_an_implementation_equals_the_replaced_one() -> None:
    name = ImplementationName(IMPLEMENTATION)
    name.config = PretrainedConfig(attn_implementation="sdpa")
    assert name in ("eager", "sdpa")
    assert name != "eager"
    assert {IMPLEMENTATION: 1}[name] == 1


def test_attention_on_a_gpu_is_left_to_pytorch_without_a_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rules for a GPU name the operator for whatever is left on the CPU; the meta device stands for the GPU."""
    model: Any = injected(stock("qwen3_moe"), tmp_path)
    layer = model.model.layers[0].self_attn.to("meta")
    rows = torch.empty(1, 3, model.config.hidden_size, device="meta")
    turns = torch.empty(1, 3, layer.head_dim, device="meta")
    with torch.no_grad(), caplog.at_level("INFO", "moegraft"):
        assert layer(rows, position_embeddings=(turns, turns), attention_mask=None)[0].is_meta
        assert not caplog.records
    assert model.moegraft.operators["model.layers.0.self_attn"].placement() == "attention: cpu_attention, left to PyTorch"
    with torch.enable_grad(), caplog.at_level("INFO", "moegraft"):
        rows, turns = torch.randn(rows.shape, requires_grad=True), torch.ones(turns.shape)
        model.model.layers[1].self_attn(rows, position_embeddings=(turns, turns), attention_mask=None)
    assert "cpu_attention: falling back to PyTorch: gradients" in caplog.text
