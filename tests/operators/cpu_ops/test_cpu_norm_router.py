"""`cpu_norm` and `cpu_router` in models: the logits of every family stay, and unsupported calls run in the stock module."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import build_model, case_of, prompt, served_cases
from transformers import PreTrainedModel

from moegraft.cpu_backend import Runtime
from moegraft.injection import optimize_and_load
from moegraft.operators.cpu_ops.in_place import CpuForwardOperator, NotRecognisedError
from moegraft.operators.cpu_ops.norm import CpuNorm, FusedNorm
from moegraft.operators.cpu_ops.router import MAX_TOKENS, CpuRouter, FusedRouter, recognise

RULES = """
version: 1
rules:
- {match: {kind: norm}, replace: {class: cpu_norm}, expect: any}
- {match: {kind: router}, replace: {class: cpu_router}, expect: any}
"""
# Families whose modules are not replaced: another form of norm, or a rule of choice that the kernel does not support.
OWN_ROUTERS = {
    "afmoe", "deepseek_v4", "ernie4_5_moe", "ernie4_5_vl_moe", "gemma4", "gemma4_text", "hunyuan_v1_moe", "hy_v3", "inkling_text",
    "kolibri1", "lfm2_moe", "llama4", "llama4_text", "minimax_m2", "phimoe", "zaya",
}  # fmt: skip
OWN_NORMS = {"cohere2_moe", "phimoe"}


def stock(model_type: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return build_model(case_of(model_type)).to(dtype).eval()


def injected(model: PreTrainedModel, tmp_path: Path) -> PreTrainedModel:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    found: PreTrainedModel = optimize_and_load(model, rules, progress=False, threads=1)
    return found


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Count the calls that the kernel computes."""
    calls = {"norm": 0, "router": 0}

    def counting(operator: type[CpuForwardOperator], compute: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            answer = compute(*args)
            calls[operator.kind] += answer is not None
            return answer

        return call

    with monkeypatch.context() as patch:
        for operator in (CpuNorm, CpuRouter):
            patch.setattr(operator, "compute", counting(operator, operator.compute))
        yield calls


@contextmanager
def stock_computation(model: PreTrainedModel, module: Any) -> Iterator[None]:
    """Let `module` of an injected model compute like the stock model's in the body."""
    path = next(path for path, other in model.named_modules() if other is module)
    with model.moegraft.operators[path].set_aside(module):
        yield


@pytest.mark.parametrize("model_type", sorted({case.model_type for case in served_cases()}))
def test_logits_of_every_family_stay(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(6, batch=1, seed=3)
    model = stock(model_type)
    with torch.no_grad():
        expected = model(ids).logits
    ours = injected(model, tmp_path)
    with torch.no_grad(), counted(monkeypatch) as calls:
        found = ours(ids).logits
    assert float((found - expected).norm()) <= 2e-5 * float(expected.norm())
    assert (calls["router"] > 0) == (model_type not in OWN_ROUTERS)
    assert (calls["norm"] > 0) == (model_type not in OWN_NORMS)


def gated_norm(model: PreTrainedModel) -> Any:
    return next(module for module in model.modules() if type(module).__name__.endswith("RMSNormGated"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_next",  # the gate after the norm
        "qwen3_5_moe_text",
        "kimi_linear",  # a sigmoid, and weights in float32
        "granitemoehybrid",  # the gate before the norm
        "nemotron_h",  # of groups
    ],
)
def test_gated_norms_equal_stock(model_type: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = gated_norm(injected(stock(model_type, dtype), tmp_path))
    with torch.no_grad():
        norm.weight.normal_()
        for lead in ((1, 1), (2, 3), (0, 4), (5,)):  # the gate is a part of another tensor
            x = torch.randn(*lead, norm.weight.numel()).to(dtype)
            gate = torch.randn(*lead, 2 * norm.weight.numel()).to(dtype)[..., : norm.weight.numel()]
            with counted(monkeypatch) as calls:
                found = norm(x, gate)
            assert calls["norm"] == 1
            expected = type(norm).__mro__[1].forward(norm, x, gate)
            tolerance = 1e-6 if dtype == torch.float32 else 0.02  # a last bit of 16, where sums in another order are rounded
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_are_a_part_of_another_tensor(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-Next's queries have their gates beside them."""
    norm: Any = next(module for path, module in injected(stock("qwen3_next", dtype), tmp_path).named_modules() if path.endswith("q_norm"))
    with torch.no_grad():
        norm.weight.normal_()
        x = torch.randn(2, 3, 5, 2 * norm.weight.numel()).to(dtype)[..., : norm.weight.numel()]
        with counted(monkeypatch) as calls:
            found = norm(x)
        assert calls["norm"] == 1
        assert not x.is_contiguous() and found.is_contiguous()
        tolerance = 1e-6 if dtype == torch.float32 else 0.01
        torch.testing.assert_close(found, type(norm).__mro__[1].forward(norm, x), rtol=tolerance, atol=tolerance * 1e-2)


def test_a_gated_norm_of_another_form_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stock("qwen3_next")
    for module in model.modules():
        if module.__class__.__name__.endswith("RMSNormGated"):
            module.activation = "gelu"
    norm = gated_norm(injected(model, tmp_path))
    x, gate = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    with torch.no_grad(), counted(monkeypatch) as calls:
        expected = torch.nn.functional.gelu(gate) * torch.nn.functional.rms_norm(x, (16,), norm.weight, norm.variance_epsilon)
        torch.testing.assert_close(norm(x, gate), expected)
    assert calls["norm"] == 0


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral", "olmoe"])
def test_greedy_tokens_are_stock(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "min_new_tokens": 24, "pad_token_id": 0}
    ids = prompt(20, batch=1, seed=1)
    model = stock(model_type)
    expected = model.generate(ids, **options)
    ours = injected(model, tmp_path)
    with counted(monkeypatch) as calls:
        assert torch.equal(ours.generate(ids, **options), expected)
    steps, layers = 23, sum(isinstance(operator, CpuRouter) for operator in ours.moegraft.operators.values())
    assert calls["router"] == steps * layers  # PyTorch computes the prompt's


def test_bfloat16_rounds_where_the_module_does(tmp_path: Path) -> None:
    model = stock("qwen3_moe", torch.bfloat16)
    module = model.model.norm
    x = torch.randn(40, module.weight.numel()).bfloat16()
    with torch.no_grad():
        expected = module(x)
        injected(model, tmp_path)
        found = module(x)
    assert float((found == expected).float().mean()) > 0.99  # a sum in another order may round a last bit the other way
    gate = next(m for name, m in model.named_modules() if name.endswith("mlp.gate"))
    states = torch.randn(4, gate.weight.shape[1]).bfloat16()
    with torch.no_grad():
        ours = gate(states)
        with stock_computation(model, gate):
            theirs = gate(states)
    assert [part.dtype for part in ours] == [part.dtype for part in theirs]
    torch.testing.assert_close(ours[0], theirs[0], rtol=2e-2, atol=1e-2)


def _with_gradient(model: PreTrainedModel) -> None:
    model(prompt(4, batch=1)).logits.sum().backward()
    assert model.model.norm.weight.grad is not None


def _compiled(model: PreTrainedModel) -> None:
    with torch.no_grad():
        torch.compile(model, backend="aot_eager", fullgraph=True)(prompt(4, batch=1), use_cache=False)


def _in_another_dtype(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.norm(torch.randn(2, model.model.norm.weight.numel()).double())


@pytest.mark.parametrize("call", [_with_gradient, _compiled, _in_another_dtype])
def test_unsupported_calls_run_in_the_module(
    call: Callable[[PreTrainedModel], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = injected(stock("qwen3_moe"), tmp_path)
    with counted(monkeypatch) as calls:
        call(model)
    assert calls == {"norm": 0, "router": 0}


def test_more_tokens_than_the_limit_run_in_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = injected(stock("qwen3_moe"), tmp_path)
    with counted(monkeypatch) as calls, torch.no_grad():
        model(prompt(MAX_TOKENS + 1, batch=1))
    assert calls["router"] == 0
    assert calls["norm"] > 0


def test_requested_router_logits_are_returned(tmp_path: Path) -> None:
    model = stock("qwen3_moe")
    ids = prompt(5, batch=1)
    with torch.no_grad():
        expected = model(ids, output_router_logits=True).router_logits
        found = injected(model, tmp_path)(ids, output_router_logits=True).router_logits
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_custom_norm_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

    plain = Qwen3MoeRMSNorm.forward
    monkeypatch.setattr(Qwen3MoeRMSNorm, "forward", lambda self, x: plain(self, x) + 0.5)  # rsqrt is still in the class's source
    model = stock("qwen3_moe")
    with caplog.at_level("INFO"), counted(monkeypatch) as calls, torch.no_grad():
        injected(model, tmp_path)(prompt(4, batch=1))
    assert calls["norm"] == 0
    assert "Qwen3MoeRMSNorm) keeps its own norm: it is no root-mean-square norm of a form" in caplog.text


@pytest.mark.parametrize(
    ("operator", "path"),
    [(CpuNorm, "model.norm"), (FusedNorm, "model.norm"), (CpuRouter, "model.layers.1.mlp.gate"), (FusedRouter, "model.layers.1.mlp.gate")],
)
def test_a_module_on_a_gpu_keeps_its_own_without_a_notice(
    operator: type[CpuForwardOperator], path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Rules for a GPU name these operators for whatever is left on the CPU; the meta device stands for the GPU."""
    model = stock("qwen3_moe")
    model.get_submodule(path).to("meta")
    left = operator(Runtime(threads=1))
    with caplog.at_level("DEBUG", "moegraft"):
        left.on_model_loaded(model, path)
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert left.placement() == f"{operator.kind}: {operator.name}, left to PyTorch"


def test_a_changed_weight_is_used(tmp_path: Path) -> None:
    model = injected(stock("qwen3_moe"), tmp_path)
    module, x = model.model.norm, torch.randn(3, model.model.norm.weight.numel())
    with torch.no_grad():
        before = module(x)
        module.weight.mul_(2)
        torch.testing.assert_close(module(x), 2 * before)


def router_of(model: PreTrainedModel) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("mlp.gate"))


@pytest.mark.parametrize("method", ["group_limited_greedy", "greedy"])
@pytest.mark.parametrize(
    ("experts", "groups", "kept", "top_k"), [(160, 8, 3, 6), (16, 4, 3, 3), (8, 2, 1, 2), (20, 8, 3, 6), (16, 8, 1, 4)]
)
def test_rules_of_groups_are_distinguished(method: str, experts: int, groups: int, kept: int, top_k: int) -> None:
    """On a few tokens, ranking groups by their best expert and by their best two often chooses the same."""
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    if method != "greedy" and (experts % groups or top_k > experts // groups * kept):
        return
    router = CpuRouter(Runtime(threads=1))
    config = stock("deepseek_v2").config
    config.n_routed_experts, config.n_group, config.topk_group = experts, groups, kept
    config.num_experts_per_tok, config.topk_method = top_k, method
    for seed in range(12):
        module = DeepseekV2TopkRouter(config)
        module.weight.data = torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(seed)) / 10
        try:
            rule = recognise(module, router.route_by, top_k).rule
        except NotRecognisedError:
            assert method != "greedy"
            continue
        same = method == "greedy" or kept >= top_k  # the best experts are then in the best groups
        found = tuple(rule.get(name) for name in ("groups", "kept_groups", "group_score"))
        assert found == ((None, None, None) if same else (groups, kept, "largest"))


def test_a_module_that_changed_after_loading_runs_itself(tmp_path: Path) -> None:
    def agree(module: Any, x: torch.Tensor) -> None:
        with torch.no_grad():
            ours = module(x)
            with stock_computation(model, module):
                theirs = module(x)
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one.sort(-1).values, other.sort(-1).values, rtol=1e-4, atol=1e-5)

    model = injected(stock("deepseek_v3"), tmp_path)
    gate = router_of(model)
    x = torch.randn(3, gate.weight.shape[1])
    agree(gate, x)
    with torch.no_grad():
        gate.e_score_correction_bias += torch.linspace(-3, 3, len(gate.e_score_correction_bias))
    agree(gate, x)
    gate.top_k = 1
    agree(gate, x)
    for dtype in (torch.bfloat16, torch.float16):
        gate.to(dtype)
        agree(gate, x.to(dtype))
    norm_module = model.model.norm
    columns = norm_module.weight.numel()
    rows = torch.randn(3, columns)
    norm_module.variance_epsilon = 0.5
    agree(norm_module, rows)
    norm_module.weight = torch.nn.Parameter(torch.randn(columns, 2)[:, 1])
    agree(norm_module, rows)


def test_outputs_have_the_modules_shapes(tmp_path: Path) -> None:
    for model_type in ("qwen3_moe", "gpt_oss"):
        model = stock(model_type)
        gate = next(m for name, m in model.named_modules() if name.endswith(("mlp.gate", "mlp.router")))
        x = torch.randn(1, 3, gate.weight.shape[1])
        with torch.no_grad():
            expected = [part.shape for part in gate(x)]
            injected(model, tmp_path)
            assert [part.shape for part in gate(x)] == expected


def test_recognising_a_module_calls_no_hook(tmp_path: Path) -> None:
    model = stock("qwen3_moe")
    calls: list[object] = []
    for module in (router_of(model), model.model.norm):
        module.register_forward_hook(lambda *call: calls.append(call))
    injected(model, tmp_path)
    assert not calls


def test_the_model_is_freed_when_nothing_refers_to_it(tmp_path: Path) -> None:
    model = injected(stock("qwen3_moe"), tmp_path)
    gate = weakref.ref(router_of(model))
    last = weakref.ref(model.model.norm)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gate() is None
        assert last() is None
    finally:
        gc.enable()


def test_class_and_signature_stay(tmp_path: Path) -> None:
    model = stock("lfm2_moe")
    kinds = [(type(m).__name__, inspect.signature(m.forward)) for m in model.modules()]
    plain = type(model.model.layers[0].operator_norm)
    injected(model, tmp_path)
    assert [(type(m).__name__, inspect.signature(m.forward)) for m in model.modules()][1:] == kinds[1:]
    assert isinstance(model.model.layers[0].operator_norm, plain)


def test_placement_names_the_device(tmp_path: Path) -> None:
    lines = "\n".join(injected(stock("phimoe"), tmp_path).moegraft.placement())
    assert "router: cpu_router, left to PyTorch" in lines
    assert "norm: cpu_norm, the CPU" in "\n".join(injected(stock("qwen3_moe"), tmp_path).moegraft.placement())
