"""The operators' forward pass on every form of input, and with autograd."""

import inspect
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moegraft.injection.checkpoint.sources import ModuleSource
from moegraft.operators.base import Operator
from moegraft.operators.context import InjectionContext
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.experts.hybrid import HybridExperts, HybridExpertsOptions
from moegraft.operators.linear import QuantizedLinear, QuantizedLinearOptions
from moegraft.operators.sparsity import SparsityOptions

EXPERTS, HIDDEN, TOKENS, TOP_K = 5, 64, 6, 2


def built(operator: type[Operator], module: nn.Module, options: object) -> Operator:
    context = InjectionContext(dtype=torch.float32, threads=1)
    made = operator.build(module, options, context)
    made.load(ModuleSource("experts", module), lambda size: None)
    return made


@pytest.fixture(scope="module")
def stock() -> Qwen3MoeExperts:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=40, num_experts=EXPERTS)
    config._experts_implementation = "eager"
    module = Qwen3MoeExperts(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module


@pytest.fixture(scope="module")
def experts(stock: Qwen3MoeExperts) -> Operator:
    return built(HybridExperts, stock, HybridExpertsOptions())


@pytest.fixture(scope="module")
def linear() -> Operator:
    torch.manual_seed(0)
    return built(QuantizedLinear, nn.Linear(HIDDEN, 48), QuantizedLinearOptions())


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden_states = torch.randn(TOKENS, HIDDEN, generator=generator)
    return hidden_states, torch.randint(EXPERTS, (TOKENS, TOP_K), generator=generator), torch.rand(TOKENS, TOP_K, generator=generator)


def test_any_form_of_the_inputs_gives_the_stock_output(stock: Qwen3MoeExperts, experts: Operator) -> None:
    hidden, index, weights = inputs()
    with torch.no_grad():
        expected = stock(hidden, index, weights)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(experts(hidden, index.int(), weights), expected, **close)
    torch.testing.assert_close(experts(hidden, index, weights.double()), expected, **close)
    torch.testing.assert_close(experts(hidden, index, weights.bfloat16()), expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(experts(hidden.double(), index, weights), expected.double(), **close)
    strided = torch.stack([hidden, hidden], dim=-1).flatten(1)[:, ::2]
    torch.testing.assert_close(experts(strided, index.T.contiguous().T, weights.T.contiguous().T), expected, **close)
    with torch.inference_mode():
        torch.testing.assert_close(experts(hidden, index, weights), expected, **close)


def test_two_methods_lie_between_a_call_and_the_kernel(stock: Qwen3MoeExperts) -> None:
    operator = built(HybridExperts, stock, HybridExpertsOptions())
    ours, seen = str(Path(inspect.getfile(Operator)).parent), []

    def kernel(*given: object) -> None:
        seen.extend(frame.name for frame in traceback.extract_stack() if frame.filename.startswith(ours))

    vars(operator.on_cpu.runtime)["forward"] = kernel  # type: ignore[union-attr]
    operator(*inputs())
    assert seen == ["forward", "forward"]


def test_no_tokens_and_no_choices(experts: Operator) -> None:
    hidden, index, weights = inputs()
    assert experts(hidden[:0], index[:0], weights[:0]).shape == (0, HIDDEN)
    assert torch.equal(experts(hidden, index[:, :0], weights[:, :0]), torch.zeros(TOKENS, HIDDEN))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda hidden, index, weights: (hidden.view(2, 3, HIDDEN), index, weights), "2 dimensions"),
        (lambda hidden, index, weights: (hidden[:, :32], index, weights), "64"),
        (lambda hidden, index, weights: (hidden, index[:3], weights), "top_k_index"),
        (lambda hidden, index, weights: (hidden, index + EXPERTS + 1, weights), "expert ids are 0 to 4"),
        (lambda hidden, index, weights: (hidden, index - 100, weights), "expert ids are 0 to 4"),
    ],
    ids=["three-dimensional", "narrow", "fewer rows", "beyond the experts", "negative"],
)
def test_wrong_inputs_are_named(experts: Operator, change: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        experts(*change(*inputs()))  # type: ignore[operator]


@pytest.mark.parametrize("wanting", [(0,), (2,), (0, 2)], ids=["hidden_states", "top_k_weights", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gradients_of_experts_are_those_of_the_stock_module(
    stock: Qwen3MoeExperts, experts: Operator, wanting: tuple[int, ...], dtype: torch.dtype
) -> None:
    found, expected = [], []
    for module, grads, kind in ((experts, found, dtype), (stock, expected, torch.float32)):
        hidden, index, weights = inputs()
        given = hidden.to(kind), index, weights.to(kind)
        for place in wanting:
            given[place].requires_grad_()
        out = module(*given)
        assert out.dtype == kind
        (out * torch.arange(HIDDEN).to(kind).sin()).sum().backward()
        grads += [given[place].grad for place in wanting]
        assert all(given[place].grad.dtype == kind for place in wanting)
        with torch.no_grad():
            assert not module(*given).requires_grad
    limit = 0.02 if dtype == torch.bfloat16 else 1e-5
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours.float() - theirs).norm()) <= limit * float(theirs.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_a_linear_is_that_of_its_weight(linear: Operator, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, HIDDEN).to(dtype).requires_grad_()
    linear(x).square().sum().backward()
    assert isinstance(linear, QuantizedLinear) and x.grad is not None and x.grad.dtype == dtype
    weight = torch.from_numpy(linear._packed[0].unpack())
    expected = 2 * linear(x).detach().float() @ weight
    assert float((x.grad.float() - expected).norm()) <= 0.01 * float(expected.norm())


def test_a_graph_traced_with_gradients_on_has_them(experts: Operator, linear: Operator) -> None:
    grads = []
    for call in (torch.compile(lambda *given: linear(experts(*given)), fullgraph=True, backend="aot_eager"), None):
        hidden, index, weights = inputs()
        hidden.requires_grad_()
        out = linear(experts(hidden, index, weights)) if call is None else call(hidden, index, weights)
        out.square().sum().backward()
        grads.append(hidden.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    "options",
    [HybridExpertsOptions(sparsity=SparsityOptions(0.5, "routed")), HybridExpertsOptions(gpu="auto")],
    ids=["sparsity", "gpu"],
)
def test_operators_without_a_backward_pass_refuse_it(stock: Qwen3MoeExperts, options: HybridExpertsOptions) -> None:
    """Training mode is refused by the model; a frozen one may still be differentiated."""
    operator = built(HybridExperts, stock, options)
    hidden, index, weights = inputs()
    hidden.requires_grad_()
    with pytest.raises(UnsupportedModelError, match=r"hybrid_experts has no backward pass: .* no gradients"):
        operator(hidden, index, weights).sum().backward()


def test_the_default_device_has_no_effect(experts: Operator, linear: Operator) -> None:
    hidden, index, weights = inputs()
    expected = linear(experts(hidden, index, weights))
    with torch.device("meta"):
        assert torch.equal(linear(experts(hidden, index, weights)), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_a_linear_takes_any_floating_dtype(linear: Operator, dtype: torch.dtype) -> None:
    x = torch.randn(3, HIDDEN)
    found = linear(x.to(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), linear(x), rtol=0.02, atol=0.02)
