"""`cpu_recurrent` in models: the logits and states of every family stay, and unsupported calls run in the stock module."""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import build_model, case_of, prompt, served_cases
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.operators.cpu_ops.recurrent import CpuRecurrent
from moegraft.operators.structure import is_recurrent, recurrent_functions

RULES = """
version: 1
rules:
- {match: {kind: experts}, replace: {class: hybrid_experts, kwargs: {weights: float32}}}
- {match: {kind: attention}, replace: {class: cpu_attention}, expect: any}
- {match: {kind: recurrent}, replace: {class: cpu_recurrent}}
"""
CONVOLUTIONS = {"inkling_text", "lfm2_moe"}  # alone, without a rule of a state
NAMES = {
    "bailing_hybrid", "glm5_next", "granitemoehybrid", "jamba", "kimi_linear", "lara_mini", "nemotron_h", "qwen3_5_moe", "qwen3_5_moe_text",
    "qwen3_next", "qwen4_exp", "qwen4_exp_text", *CONVOLUTIONS,
}  # fmt: skip
RECURRENT = sorted(NAMES & {case.model_type for case in served_cases()})  # older versions of transformers have fewer
PARTS = (0, 13, 14, 17, 40)  # a prompt, one token, a draft's verification, another prompt


def stock(model_type: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return build_model(case_of(model_type)).to(dtype).eval()


def injected(model: PreTrainedModel, tmp_path: Path) -> PreTrainedModel:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    found: PreTrainedModel = optimize_and_load(model, rules, progress=False, threads=1)
    return found


def layers_of(model: PreTrainedModel) -> list[tuple[nn.Module, CpuRecurrent]]:
    operators = model.moegraft.operators.items()
    return [(model.get_submodule(path), operator) for path, operator in operators if isinstance(operator, CpuRecurrent)]


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[dict[str, int]]:
    """Count the calls of each rule's kernel."""
    runtime: Any = layers_of(model)[0][1].runtime
    calls: dict[str, int] = {}
    compute = runtime.recurrent

    def call(name: str, *args: Any) -> None:
        calls[name] = calls.get(name, 0) + 1
        compute(name, *args)

    runtime.recurrent = call
    try:
        yield calls
    finally:
        del runtime.recurrent


def in_parts(model: PreTrainedModel, ids: torch.Tensor, parts: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits of a prompt that is fed in parts, and the states after it."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    with torch.no_grad():
        logits = [model(ids[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in itertools.pairwise(parts)]
    names = ("conv_states", "recurrent_states")
    states = [state for layer in cache.layers for name in names for state in getattr(layer, name, {}).values() if state is not None]
    return torch.cat(logits, 1), states


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert float((found - expected).double().norm()) <= tolerance * float(expected.double().norm())


def test_the_families_with_recurrent_layers_are_known() -> None:
    found = set()
    for case in served_cases():
        with torch.device("meta"):
            found |= {case.model_type for module in build_model(case).modules() if is_recurrent(module)}
    assert found == set(RECURRENT)


@pytest.mark.parametrize("model_type", RECURRENT)
def test_logits_and_states_of_every_family_stay(model_type: str, tmp_path: Path) -> None:
    model, ids = stock(model_type), prompt(40, batch=2, seed=3)
    # Jamba's own scan of several tokens begins without the cache's state.
    parts = PARTS if model_type != "jamba" else (0, 37, 38, 39, 40)
    expected, states = in_parts(model, ids, parts)
    ours = injected(model, tmp_path)
    in_parts(ours, ids[:, :8], (0, 8))  # the first pass over several tokens also tests whether layers go on from their states
    with counted(ours) as calls:
        found, own_states = in_parts(ours, ids, parts)
    assert_close(found, expected, 5e-6)
    for own, state in zip(own_states, states, strict=True):
        assert_close(own, state, 5e-6)
    layers = len(layers_of(ours))
    assert calls.pop("short_conv") == layers * (len(parts) - 1)
    assert sum(calls.values()) == (0 if model_type in CONVOLUTIONS else layers * (len(parts) - 1))


@pytest.mark.parametrize("model_type", RECURRENT)
def test_a_prompt_in_parts_is_one_pass(model_type: str, tmp_path: Path) -> None:
    model = injected(stock(model_type), tmp_path)
    ids = prompt(40, batch=1, seed=4)
    assert_close(in_parts(model, ids, PARTS)[0], in_parts(model, ids, (0, 40))[0], 5e-6)


@pytest.mark.parametrize("model_type", ["qwen3_next", "kimi_linear", "nemotron_h", "jamba", "lfm2_moe"])
def test_a_step_has_one_operation_for_each_rule(model_type: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
    ids, model = prompt(9, batch=1, seed=1), stock(model_type)
    expected = model.generate(ids, **options)
    ours = injected(model, tmp_path)
    assert torch.equal(ours.generate(ids, **options), expected)
    with ours.moegraft.timelines() as (timeline,):
        assert torch.equal(ours.generate(ids, **options), expected)
    steps = [span for span in timeline.spans if (span.lane, span.name) == ("step", "program")]
    kernels = [span.start_ms for span in timeline.spans if span.name == "recurrent"]
    rules = 1 if model_type in CONVOLUTIONS else 2
    assert len(steps) >= 9  # of 11: a program whose results are larger than the recorded one's is made again
    for step in steps:
        assert sum(step.start_ms <= start <= step.end_ms for start in kernels) == rules * len(layers_of(ours))


def test_kernels_are_within_their_step_where_the_thread_has_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is read for steps and for kernels; between two readings other threads may run."""
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    ids, ours = prompt(9, batch=1, seed=1), injected(stock("qwen3_next"), tmp_path)
    ours.generate(ids, **options)
    read = time.perf_counter_ns

    def late() -> int:
        time.sleep(2e-3)
        return read()

    with monkeypatch.context() as patch, ours.moegraft.timelines() as (timeline,):
        patch.setattr(time, "perf_counter_ns", late)
        ours.generate(ids, **options)
    steps = [span for span in timeline.spans if (span.lane, span.name) == ("step", "program")]
    kernels = [span.start_ms for span in timeline.spans if span.name == "recurrent"]
    assert len(steps) >= 4
    for step in steps:
        assert sum(step.start_ms <= start <= step.end_ms for start in kernels) == 2 * len(layers_of(ours))


def test_sixteen_bits_are_rounded_no_more_than_by_the_stock_model(tmp_path: Path) -> None:
    ids = prompt(40, batch=1, seed=3)
    exact = in_parts(stock("qwen3_next"), ids, PARTS)[0]
    model = stock("qwen3_next", torch.bfloat16)
    theirs = in_parts(model, ids, PARTS)[0]
    ours = in_parts(injected(model, tmp_path), ids, PARTS)[0]
    assert ours.dtype == theirs.dtype == torch.bfloat16
    errors = [float((logits.float() - exact).norm()) for logits in (ours, theirs)]
    assert errors[0] <= 1.3 * errors[1]


def _with_gradient(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    module, _ = layers_of(model)[0]
    x = torch.randn(1, 4, model.config.hidden_size, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None


def _compiled(model: PreTrainedModel) -> None:
    module, _ = layers_of(model)[0]
    with torch.no_grad():
        torch.compile(module, backend="eager", fullgraph=True)(torch.randn(1, 4, model.config.hidden_size))


def _in_float64(model: PreTrainedModel) -> None:
    module, _ = layers_of(model)[0]
    with torch.no_grad():
        module.double()(torch.randn(1, 4, model.config.hidden_size).double())


def _set_aside(model: PreTrainedModel) -> None:
    module, operator = layers_of(model)[0]
    with torch.no_grad(), operator.set_aside(module):
        module(torch.randn(1, 4, model.config.hidden_size))


@pytest.mark.parametrize("call", [_with_gradient, _compiled, _in_float64, _set_aside])
def test_unsupported_calls_run_in_the_module(call: Callable[[PreTrainedModel], None], tmp_path: Path) -> None:
    model = injected(stock("qwen3_next"), tmp_path)
    with counted(model) as calls:
        call(model)
    assert calls == {}


def test_another_rule_leaves_the_module_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stock("qwen3_next")
    module = next(module for module in model.modules() if is_recurrent(module))
    scope = inspect.unwrap(type(module).forward).__globals__  # a family's forward pass is decorated
    name = next(name for name, rule in recurrent_functions(type(module)).items() if rule == "delta_rule")
    own = scope[name]

    def other(query: Any, key: Any, value: Any, g: Any, beta: Any, **kwargs: Any) -> Any:
        out, state = own(query, key, value, g=g, beta=beta, **kwargs)
        return 2 * out, state

    monkeypatch.setitem(scope, name, other)
    ours = injected(model, tmp_path)
    assert "computes something else than the gated delta rule" in caplog.text
    assert all(operator.placement() == "recurrent: cpu_recurrent, left to PyTorch" for _, operator in layers_of(ours))


def test_copies_compute_like_the_model(tmp_path: Path) -> None:
    model = injected(stock("qwen3_next"), tmp_path)
    module, _ = layers_of(model)[0]
    x = torch.randn(1, 5, model.config.hidden_size)
    with torch.no_grad():
        expected = module(x)
        assert torch.equal(copy.copy(module)(x), expected)


def test_a_scan_goes_on_from_the_cache_of_its_own_thread(tmp_path: Path) -> None:
    """Jamba's scan is given no state: the operator finds that of the pass."""
    model = injected(stock("jamba"), tmp_path)
    prompts = [prompt(24, seed=seed) for seed in range(2)]
    expected = [in_parts(model, ids, (0, 8, 16, 24))[0] for ids in prompts]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            for _ in range(20):
                found = list(pool.map(lambda ids: in_parts(model, ids, (0, 8, 16, 24))[0], prompts))
                for one, other in zip(found, expected, strict=True):
                    assert_close(one, other, 1e-5)
    finally:
        sys.setswitchinterval(interval)
