"""The choice of experts against float64, and `fused_router` in models: stock's logits where it is used, and stock's modules elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch
from support.families import build_model, case_of, prompt
from support.kernel_cases import expected_choice
from support.triton_cases import DEVICE, INTERPRETED, launched, with_fused
from transformers import PreTrainedModel

from moegraft.operators.cpu_ops.router import FusedRouter
from moegraft.operators.kernels import small as kernels
from moegraft.operators.kernels.small import choose_experts

injected = partial(with_fused, ("router",))
CHOICES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "normalised": {"normalise": True},
    "scaled": {"score": "sigmoid", "normalise": True, "scale": 2.5},
    "sigmoid": {"score": "sigmoid"},
    "of the chosen": {"score": "chosen_softmax"},
    "biased": {"score": "sigmoid", "normalise": True, "choice_bias": True},
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [
        (1, 128, 8),  # Qwen3-30B-A3B
        (19, 24, 5),  # neither a power of two
        (50, 64, 1),  # several programs, the last of fewer tokens
        (2, 1500, 10),  # a token's scores in one program
        (3, 4, 4),  # all of them
        (2, 1, 1),
        (0, 8, 2),
    ],
)
def test_every_choice(tokens: int, experts: int, top_k: int, name: str) -> None:
    generator = torch.Generator().manual_seed(tokens)
    logits, options = torch.randn(tokens, experts, generator=generator), dict(CHOICES[name])
    if options.pop("choice_bias", False):
        options["choice_bias"] = np.linspace(-0.4, 0.4, experts, dtype=np.float32)
    expected_index, expected_weights = expected_choice(logits.double(), top_k, options)
    if "choice_bias" in options:
        options["choice_bias"] = torch.from_numpy(options["choice_bias"]).to(DEVICE)
    weights, index = choose_experts(logits.to(DEVICE), top_k, **options)
    assert torch.equal(index.cpu(), expected_index)
    torch.testing.assert_close(weights.cpu().double(), expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_types_of_logits_and_weights(dtype: torch.dtype) -> None:
    logits = (torch.arange(32.0).roll(5) / 4).to(dtype).repeat(3, 1).to(DEVICE)
    weights, index = choose_experts(logits, 3, weights_type=dtype)
    expected_index, expected = expected_choice(logits.double().cpu(), 3, {})
    assert (weights.dtype, index.dtype) == (dtype, torch.int64)
    assert torch.equal(index.cpu(), expected_index)
    torch.testing.assert_close(weights.cpu().double(), expected, rtol=1e-2, atol=0)


def test_ties_go_to_the_first_index_and_nan_is_the_largest() -> None:
    logits = torch.zeros(3, 6, device=DEVICE)
    logits[1, 4] = torch.nan
    logits[2] = torch.tensor([-0.5, -3.0, -torch.inf, -0.5, -2.0, -3.0])
    assert choose_experts(logits, 3, score="sigmoid")[1].tolist() == [[0, 1, 2], [4, 0, 1], [0, 3, 4]]
    everything = choose_experts(torch.full((1, 6), torch.nan, device=DEVICE), 6)[1]
    assert everything.tolist() == [[0, 1, 2, 3, 4, 5]]  # never an expert twice, or one that there is not


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(FusedRouter, "on_gpu", True)


@pytest.fixture
def launches() -> Iterator[list[torch.Size]]:
    """The shapes of the logits that the kernel is given."""
    with launched(kernels, "choose_experts") as found:
        yield found


def routers_of(model: PreTrainedModel) -> dict[str, Any]:
    return {path: operator for path, operator in model.moegraft.operators.items() if operator._stock_attributes}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model_type", "rule"),
    [
        ("qwen3_moe", {"score": "softmax", "normalise": False}),
        ("mixtral", {"score": "softmax", "normalise": True}),
        ("gpt_oss", {"score": "softmax", "normalise": True}),  # biased logits
        ("glm4_moe", {"score": "sigmoid", "normalise": True}),  # a bias of the choice, and one group
    ],
)
@pytest.mark.parametrize("tokens", [1, 12])
def test_logits_stay(model_type: str, rule: dict[str, Any], tokens: int, tmp_path: Path, launches: list[torch.Size]) -> None:
    model = build_model(case_of(model_type)).eval().to(DEVICE)
    ids = prompt(tokens, batch=1, seed=3).to(DEVICE)
    with torch.no_grad():
        expected = model(ids).logits
    ours = injected(model, tmp_path)
    operators = routers_of(ours)
    assert operators
    for operator in operators.values():
        assert {name: operator._form.rule[name] for name in rule} == rule
    launches.clear()
    with torch.no_grad():
        found = ours(ids).logits
    assert len(launches) == len(operators)
    assert float((found - expected).norm()) <= (2e-5 if INTERPRETED else 1e-4) * float(expected.norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "glm4_moe"])
def test_results_have_the_modules_types(model_type: str, dtype: torch.dtype, tmp_path: Path, launches: list[torch.Size]) -> None:
    model = injected(build_model(case_of(model_type)).to(dtype).eval().to(DEVICE), tmp_path)
    path, operator = next(iter(routers_of(model).items()))
    module: Any = model.get_submodule(path)
    x = torch.randn(3, module.weight.shape[1]).to(DEVICE, dtype)
    launches.clear()
    with torch.no_grad():
        found = module(x)
        assert len(launches) == 1
        with operator.set_aside(module):
            expected = module(x)
    assert len(launches) == 1
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    logits, weights, index = (found[position] for position in operator._form.order)
    assert torch.equal(logits, expected[operator._form.order[0]])  # the same product
    stock_weights, stock_index = (expected[position] for position in operator._form.order[1:])
    order, stock_order = index.argsort(-1), stock_index.argsort(-1)
    assert torch.equal(index.gather(-1, order), stock_index.gather(-1, stock_order))
    # The interpreter truncates to bfloat16.
    torch.testing.assert_close(weights.gather(-1, order), stock_weights.gather(-1, stock_order), rtol=1e-2, atol=1e-3)


def test_choices_of_groups_are_left_alone(tmp_path: Path, launches: list[torch.Size]) -> None:
    model = build_model(case_of("deepseek_v3")).eval().to(DEVICE)
    assert model.config.topk_group < model.config.n_group
    ours = injected(model, tmp_path)
    launches.clear()
    with torch.no_grad():
        ours(prompt(4, batch=1).to(DEVICE))
    assert not launches
    assert "router: fused_router, left to PyTorch" in "\n".join(ours.moegraft.placement())  # type: ignore[union-attr, operator]


@pytest.mark.skipif(INTERPRETED, reason="captured CUDA graphs need a GPU")
def test_a_captured_call_compiles_nothing(tmp_path: Path) -> None:
    """Whatever the number of tokens: a kernel compiled while a graph is captured would end the capture."""
    model = injected(build_model(case_of("qwen3_moe")).bfloat16().eval().to(DEVICE), tmp_path)
    path, operator = next(iter(routers_of(model).items()))
    module: Any = model.get_submodule(path)
    assert operator.placement() == "router: fused_router, cuda:0"
    for tokens in (1, 3, 16):
        x = torch.randn(tokens, module.weight.shape[1], device=DEVICE).bfloat16()
        torch.nn.functional.linear(x, module.weight)  # cuBLAS takes its memory before a capture
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            with torch.cuda.graph(graph):
                found = module(x)
            x.mul_(-2)
            graph.replay()
            for ours, theirs in zip(found, module(x), strict=True):
                assert torch.equal(ours, theirs)
