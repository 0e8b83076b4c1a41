"""Norms of rows against float64, and `fused_norm` in models: stock's logits where the kernel is used, and stock's modules elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch
from support.families import build_model, case_of, prompt
from support.kernel_cases import relative_error
from support.triton_cases import DEVICE, INTERPRETED, ROUNDED, launched, with_fused
from transformers import PreTrainedModel

from moegraft.operators.cpu_ops.norm import FusedNorm
from moegraft.operators.kernels import small as kernels
from moegraft.operators.kernels.small import MAX_COLUMNS, norm

injected = partial(with_fused, ("norm",))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [
    (1, 1, 2048),  # a token's hidden state
    (1, 32, 1, 128),  # its queries: several rows of a program
    (3, 5, 64),  # the last program has fewer rows
    (2, 33),  # columns that are no power of two
    (1, 1),
    (2, MAX_COLUMNS),
    (0, 64),
]


def case(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.logspace(-3, 1, max(1, shape[0])).view(-1, *[1] * (len(shape) - 1))[: shape[0]]
    return x.to(DEVICE, dtype), torch.randn(shape[-1], generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("rounds_first", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_form(shape: tuple[int, ...], dtype: torch.dtype, offset: float, rounds_first: bool) -> None:
    x, weight = case(*shape, dtype=dtype)
    found = norm(x, weight, 1e-5, offset, rounds_first)
    assert (found.shape, found.dtype, found.device) == (x.shape, dtype, x.device)
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * (offset + weight.double())
    assert relative_error(found.cpu(), expected.cpu()) <= ROUNDED[dtype]


# The interpreter truncates to bfloat16.
@pytest.mark.parametrize("dtype", DTYPES[1 : 2 if INTERPRETED else 3], ids=str)
@pytest.mark.parametrize("rounds_first", [True, False])
def test_it_rounds_where_pytorch_does(rounds_first: bool, dtype: torch.dtype) -> None:
    x, weight = case(40, 256, dtype=dtype)
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    expected = weight * y.to(dtype) if rounds_first else (y * weight.float()).to(dtype)
    found = norm(x, weight, 1e-6, 0.0, rounds_first)
    other = norm(x, weight, 1e-6, 0.0, not rounds_first)
    assert (found == expected).float().mean() > 0.995 > 0.95 > (other == expected).float().mean()  # sums in another order


def test_a_row_with_nan_leaves_others_as_they_are() -> None:
    x, weight = case(16, 128)  # of two programs
    expected = norm(x, weight, 1e-6, 0.0, True)
    x[3, 5] = float("nan")
    found = norm(x, weight, 1e-6, 0.0, True)
    assert found[3].isnan().all()
    others = [row for row in range(16) if row != 3]
    assert torch.equal(found[others], expected[others])


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(FusedNorm, "on_gpu", True)


@pytest.fixture
def launches() -> Iterator[list[torch.Size]]:
    """The shapes of the rows that the kernel is given."""
    with launched(kernels, "norm") as found:
        yield found


def stock(model_type: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model = build_model(case_of(model_type)).to(dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_()  # else an offset and a product with ones would be the same
    return model.to(DEVICE)


@pytest.mark.parametrize(
    ("model_type", "offset"),
    [
        ("qwen3_moe", 0.0),  # rounds before the product with the weight
        ("deepseek_v3", 0.0),
        ("gpt_oss", 0.0),  # rounds after it
        ("qwen3_next", 1.0),  # queries are a part of another tensor
    ],
)
def test_logits_stay(model_type: str, offset: float, tmp_path: Path, launches: list[torch.Size]) -> None:
    model, ids = stock(model_type), prompt(6, batch=1, seed=3).to(DEVICE)
    with torch.no_grad():
        expected = model(ids).logits
    ours = injected(model, tmp_path)
    forms = [each._form.keywords for each in ours.moegraft.operators.values() if hasattr(each, "_form")]
    assert forms and all(form["offset"] == offset for form in forms)
    launches.clear()
    with torch.no_grad():
        found = ours(ids).logits
    assert len(launches) == len(forms)
    assert float((found - expected).norm()) <= (2e-5 if INTERPRETED else 1e-4) * float(expected.norm())


@pytest.mark.parametrize(("model_type", "rounds_first"), [("qwen3_moe", True), ("gpt_oss", False)])
def test_rounding_is_recognised(model_type: str, rounds_first: bool, tmp_path: Path) -> None:
    model = stock(model_type, torch.float16)
    module: Any = model.model.norm
    x = torch.randn(40, module.weight.numel()).to(DEVICE, torch.float16)
    with torch.no_grad():
        expected = module(x)
        operator: Any = injected(model, tmp_path).moegraft.operators["model.norm"]
        found = module(x)
    assert operator._form.keywords["rounds_first"] is rounds_first
    assert float((found == expected).float().mean()) > 0.99


def test_gated_norms_are_left_alone(tmp_path: Path, launches: list[torch.Size]) -> None:
    model = injected(stock("qwen3_next"), tmp_path)
    path = next(path for path, module in model.named_modules() if type(module).__name__.endswith("RMSNormGated"))
    operator, module = model.moegraft.operators[path], model.get_submodule(path)
    launches.clear()
    with torch.no_grad():
        module(*torch.randn(2, 3, module.weight.numel(), device=DEVICE))
    assert not launches
    assert operator.placement() == "norm: fused_norm, left to PyTorch"


@pytest.mark.parametrize("call", ["gradients", "training", "another dtype", "set aside"])
def test_other_calls_run_in_the_module(call: str, tmp_path: Path, launches: list[torch.Size]) -> None:
    model = injected(stock("qwen3_moe"), tmp_path)
    module: Any = model.model.norm
    x = torch.randn(2, module.weight.numel(), device=DEVICE)
    launches.clear()
    if call == "gradients":
        module(x).sum().backward()
        assert module.weight.grad is not None
    with torch.no_grad():
        if call == "training":
            model.train()
            module(x)
        elif call == "another dtype":
            module(x.double())
        elif call == "set aside":
            with model.moegraft.operators["model.norm"].set_aside(module):
                module(x)
        assert not launches
        model.eval()
        module(x)
    assert len(launches) == 1


def test_a_kernel_that_does_not_compile_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without the C compiler that Triton needs."""

    def failing(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "norm", failing)
    model = injected(stock("qwen3_moe"), tmp_path)
    assert "norm: fused_norm, left to PyTorch" in "\n".join(model.moegraft.placement())
    with torch.no_grad():
        assert model(prompt(4, batch=1).to(DEVICE)).logits.isfinite().all()


def test_without_triton_pytorch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("moegraft.operators.cpu_ops.in_place.interpreted", lambda: False)
    monkeypatch.setattr("moegraft.operators.cpu_ops.in_place.why_unavailable", lambda: "Triton is not installed")
    with caplog.at_level(logging.DEBUG, "moegraft"):
        model = injected(stock("qwen3_moe"), tmp_path)
    assert "norm: fused_norm, left to PyTorch" in "\n".join(model.moegraft.placement())
    assert "keeps its own norm: Triton is not installed" in caplog.text


@pytest.mark.skipif(INTERPRETED, reason="captured CUDA graphs need a GPU")
def test_a_captured_call_compiles_nothing(tmp_path: Path) -> None:
    """Whatever the number of rows: a kernel compiled while a graph is captured would end the capture."""
    model = injected(stock("qwen3_moe", torch.bfloat16), tmp_path)
    module: Any = model.model.norm
    assert model.moegraft.operators["model.norm"].placement() == "norm: fused_norm, cuda:0"
    for rows in (1, 3, 16):
        x = torch.randn(rows, module.weight.numel(), device=DEVICE).bfloat16()
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            with torch.cuda.graph(graph):
                found = module(x)
            x.mul_(-2)
            graph.replay()
            assert torch.equal(found, module(x))
