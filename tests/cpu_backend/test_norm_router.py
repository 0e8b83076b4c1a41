"""Norms, and routers' logits and choices, against float64 on every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.kernel_cases import expected_choice

from moegraft.cpu_backend import NormSpec, RouterSpec, Runtime

ISAS = Runtime.available_isas()
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def normalised(runtime: Runtime, spec: NormSpec, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    out = torch.empty_like(x)
    runtime.norm(spec, x, weight, out)
    return out


@pytest.fixture(scope="module", params=ISAS)
def runtime(request: pytest.FixtureRequest) -> Runtime:
    return Runtime(threads=2, isa=request.param)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (2, 128), (5, 257), (1, 2048), (9, 1000), (300, 130)])
@pytest.mark.parametrize(("offset", "rounds_first", "weighted"), [(0.0, True, True), (1.0, False, True), (0.0, False, False)])
def test_norms_match_float64(
    runtime: Runtime, dtype: torch.dtype, rows: int, columns: int, offset: float, rounds_first: bool, weighted: bool
) -> None:
    generator = torch.Generator().manual_seed(rows * columns)
    x = (torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 2, rows)[:, None]).to(dtype)
    weight = torch.randn(columns, generator=generator).to(dtype) if weighted else None
    found = normalised(runtime, NormSpec(name_of(dtype), columns, 1e-5, offset, rounds_first), x, weight)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    if rounds_first:
        expected = expected.to(dtype).double()
    if weight is not None:
        expected = expected * (offset + weight.double())
    assert float((found.double() - expected).norm()) <= DTYPES[dtype] * float(expected.norm())
    torch.testing.assert_close(found.double(), expected, rtol=4 * DTYPES[dtype], atol=1e-6)


GATED = [
    ("silu", False, False),  # Qwen3-Next
    ("silu", True, False),  # Mamba-2
    ("sigmoid", False, True),  # Kimi-Linear
]


def gated_reference(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, function: str, group: int, first: bool) -> torch.Tensor:
    """Return the norm in the dtype of its operands, float64 for the test of float32."""
    acted = gate * gate.sigmoid() if function == "silu" else gate.sigmoid()
    rows = (x * acted if first else x).unflatten(-1, (-1, group))
    quotient = (rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2)
    return quotient * weight * (1 if first else acted)


@pytest.mark.parametrize(("function", "first", "wide"), GATED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "columns", "groups"),
    [
        (1, 128, 1),  # a head of Qwen3-Next
        (3, 1, 1),  # one column
        (2, 37, 1),  # a part of a block of 16
        (5, 300, 1),  # more than a strip, and a tail
        (300, 129, 1),  # on several threads
        (2, 6 * 41, 6),  # groups
        (1, 8192, 1),  # the largest group
        (0, 16, 1),
    ],
)
def test_gated_norms_match_float64(
    runtime: Runtime, tokens: int, columns: int, groups: int, dtype: torch.dtype, function: str, first: bool, wide: bool
) -> None:
    generator = torch.Generator().manual_seed(tokens + columns)
    x, gate = (3 * torch.randn(2, tokens, columns, generator=generator)).to(dtype)
    weight = torch.randn(columns, generator=generator).to(dtype)
    group = columns // groups if first else columns
    gating: dict[str, Any] = {"gate": function, "group": group, "gate_first": first, "wide": wide}
    out = torch.empty_like(x)
    runtime.norm(NormSpec(name_of(dtype), columns, 1e-5, rounds_first=True, **gating), x, weight, out, gate)
    expected = gated_reference(x.double(), weight.double(), gate.double(), function, group, first)
    tolerance = DTYPES[dtype] * (2 if columns > 2048 else 1)  # a sum in float32 of so many squares, one after the other
    assert float((out.double() - expected).norm()) <= tolerance * float(expected.norm())


def test_wrong_gates_of_norms_are_refused(runtime: Runtime) -> None:
    for options in ({"gate": "silu", "group": 3}, {"gate": "silu", "group": 4}, {"gate": "silu"}, {"gate": "swish", "group": 8}):
        with pytest.raises(ValueError, match=r"NormSpec: groups of|unknown activation"):
            NormSpec("float32", 8, 1e-5, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="groups of 8208 columns"):
        NormSpec("float32", 8208, 1e-5, gate="silu", group=8208)
    x, weight = torch.zeros(2, 8), torch.ones(8)
    plain, gated = NormSpec("float32", 8, 1e-5), NormSpec("float32", 8, 1e-5, gate="silu", group=8)
    for call in ((plain, x, weight, x, x), (gated, x, weight, x), (gated, x, None, x, x), (gated, x, weight, x, x[:1])):
        with pytest.raises(ValueError, match="gate"):
            runtime.norm(*call)


def test_a_norm_of_values_that_are_not_finite(runtime: Runtime) -> None:
    x = torch.ones(3, 40)
    x[0, 3], x[1, 39] = torch.nan, torch.inf
    found = normalised(runtime, NormSpec("float32", 40, 1e-6), x, None)
    assert torch.isnan(found[0]).all()
    assert torch.isnan(found[1, 39])
    assert torch.equal(found[1, :39], torch.zeros(39))
    torch.testing.assert_close(found[2], torch.ones(40))


def test_rows_do_not_depend_on_each_other(runtime: Runtime) -> None:
    """Nor do they depend on the number of threads: many rows are divided among threads, few are not."""
    x = torch.randn(700, 96)
    spec = NormSpec("float32", 96, 1e-6)
    assert torch.equal(normalised(runtime, spec, x, None)[3:4], normalised(runtime, spec, x[3:4].contiguous(), None))


def route(
    runtime: Runtime, spec: RouterSpec, x: torch.Tensor, weight: torch.Tensor, top_k: int, **types: torch.dtype
) -> list[torch.Tensor]:
    tokens, experts = x.shape[0], weight.shape[0]
    logits = torch.full((tokens, experts), torch.nan, dtype=types.get("logits", torch.float32))
    weights = torch.full((tokens, top_k), torch.nan, dtype=types.get("weights", torch.float32))
    index = torch.full((tokens, top_k), -7)
    runtime.route(spec, x, weight, logits, weights, index)
    return [logits, weights, index]


BIAS = np.linspace(-0.4, 0.4, 24, dtype=np.float32)
RULES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "normalised": {"normalise": True},
    "scaled": {"score": "sigmoid", "normalise": True, "scale": 2.5},
    "of the chosen": {"score": "chosen_softmax"},
    "biased": {"score": "sigmoid", "normalise": True, "choice_bias": BIAS},
    "groups": {"score": "sigmoid", "normalise": True, "choice_bias": BIAS, "groups": 6, "kept_groups": 3},
    "groups by their best": {"groups": 4, "kept_groups": 2, "group_score": "largest"},
    "groups of one": {"groups": 24, "kept_groups": 9},
    "biased logits": {"logit_bias": BIAS[::-1].copy()},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("tokens", [1, 5, 19])
@pytest.mark.parametrize("rule", RULES)
def test_routers_match_float64(runtime: Runtime, dtype: torch.dtype, tokens: int, rule: str) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 131, generator=generator).to(dtype)
    weight = (torch.randn(24, 131, generator=generator) / 4).to(dtype)
    spec = RouterSpec(131, 24, 5, element_type=name_of(dtype), logits_type="float32", weights_type="float32", **RULES[rule])
    logits, weights, index = route(runtime, spec, x, weight, 5)
    exact = x.double() @ weight.double().T
    if "logit_bias" in RULES[rule]:
        exact = exact + torch.from_numpy(RULES[rule]["logit_bias"]).double()
    torch.testing.assert_close(logits.double(), exact, rtol=1e-4, atol=1e-4)
    expected_index, expected_weights = expected_choice(logits.double(), 5, RULES[rule])
    assert torch.equal(index, expected_index)
    torch.testing.assert_close(weights.double(), expected_weights, rtol=1e-5, atol=1e-7)


def test_results_have_the_requested_types(runtime: Runtime) -> None:
    x, weight = torch.randn(2, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    kinds = {"element_type": "bfloat16", "logits_type": "bfloat16", "weights_type": "float16", "rounds_logits": True}
    logits, weights, index = route(runtime, RouterSpec(64, 8, 3, **kinds), x, weight, 3, logits=torch.bfloat16, weights=torch.float16)
    expected_index, expected = expected_choice(logits.double(), 3, {})
    assert torch.equal(weights.double(), expected.half().double())
    assert torch.equal(logits.float().gather(-1, index), logits.float().gather(-1, expected_index))


def test_ties_go_to_the_first_index_and_nan_is_the_largest(runtime: Runtime) -> None:
    weight = torch.zeros(6, 3)
    spec = RouterSpec(3, 6, 3, element_type="float32", logits_type="float32", weights_type="float32", score="sigmoid")
    assert route(runtime, spec, torch.ones(1, 3), weight, 3)[2].tolist() == [[0, 1, 2]]
    weight[4] = torch.nan
    assert route(runtime, spec, torch.ones(1, 3), weight, 3)[2].tolist() == [[4, 0, 1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 9}, "top_k is 9; it must be from 1 to 8"),
        ({"top_k": 0}, "top_k is 0"),
        ({"groups": 3}, "8 experts cannot be divided into 3 equal groups"),
        ({"groups": 4, "kept_groups": 5}, "kept_groups"),
        ({"groups": 4, "kept_groups": 1}, "fewer than top_k"),
        ({"score": "argmax"}, "unknown score 'argmax'; expected one of softmax, sigmoid, chosen_softmax"),
        ({"group_score": "mean"}, "unknown group_score 'mean'"),
        ({"element_type": "int8"}, "unknown element type 'int8'"),
        ({"choice_bias": np.zeros(7, np.float32)}, r"choice_bias: expected shape \(8,\), found \(7,\)"),
    ],
)
def test_wrong_router_specs_are_refused(change: dict[str, Any], message: str) -> None:
    types = {"element_type": "float32", "logits_type": "float32", "weights_type": "float32"}
    given = {"hidden": 4, "experts": 8, "top_k": 3, **types, **change}
    with pytest.raises(ValueError, match=message):
        RouterSpec(**given)


def test_wrong_norm_specs_are_refused() -> None:
    for given in (("float64", 4, 1e-6), ("float32", 0, 1e-6), ("float32", 4, -1.0), ("float32", 4, float("nan"))):
        with pytest.raises(ValueError, match=r"element type|cols|epsilon"):
            NormSpec(*given)


def test_unsuitable_tensors_are_refused(runtime: Runtime) -> None:
    norm = NormSpec("bfloat16", 4, 1e-6)
    x = torch.zeros(2, 4).bfloat16()
    for given, error, message in (
        ((x.float(), None, x), TypeError, "x: expected dtype bfloat16, found float32"),
        ((x, torch.zeros(3).bfloat16(), x), ValueError, r"weight: expected shape \(4,\), found \(3,\)"),
        ((x, torch.zeros(4), x), TypeError, "weight: expected dtype bfloat16, found float32"),
        ((x, None, x[:1]), ValueError, r"out: expected shape \(2, 4\), found \(1, 4\)"),
    ):
        with pytest.raises(error, match=message):
            runtime.norm(norm, *given)
    router = RouterSpec(4, 6, 2, element_type="float32", logits_type="float32", weights_type="float32")
    tensors = {"x": torch.zeros(3, 4), "weight": torch.zeros(6, 4), "logits": torch.zeros(3, 6), "weights": torch.zeros(3, 2)}
    runtime.route(router, **tensors, index=torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="index: expected dtype int64, found int32"):
        runtime.route(router, **tensors, index=torch.zeros(3, 2, dtype=torch.int32))
    for name, tensor in tensors.items():
        with pytest.raises(ValueError, match=f"{name}: expected shape"):
            runtime.route(router, **{**tensors, name: tensor[:, :-1].contiguous()}, index=torch.zeros(3, 2, dtype=torch.int64))


def test_a_router_rejects_unknown_and_missing_keywords() -> None:
    types = {"element_type": "float32", "logits_type": "float32", "weights_type": "float32"}
    with pytest.raises(TypeError, match="unknown keyword argument 'normalize'"):
        RouterSpec(4, 8, 2, **types, normalize=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing keyword argument 'logits_type'"):
        RouterSpec(4, 8, 2, element_type="float32", weights_type="float32")  # type: ignore[call-arg]
