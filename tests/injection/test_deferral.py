"""`defer`: experts that are added one layer later, beside the stock model in float64 whose experts do the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.emulated import HostSlotLayers
from support.families import build_model, prompt, served_cases
from transformers import DynamicCache, PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path
from moegraft.injection.meta_model import find_model
from moegraft.injection.planning import plan
from moegraft.injection.verify import verify
from moegraft.operators.draft import DraftSettings
from moegraft.operators.errors import RuleFileError
from moegraft.operators.experts.hybrid import HybridExperts, HybridExpertsOptions
from moegraft.operators.offload.deferral import LayerDeferral, connect
from moegraft.operators.offload.devices.base import DeviceError
from moegraft.operators.offload.executors import CallExecutor

RULES = """
version: 1
rules:
- match: {{kind: experts}}
  replace: {{class: hybrid_experts, kwargs: {{gpu: {gpu}, {more}}}}}
"""
ALL_CPU = "schedule: all_cpu, cache: {ratio: 0.5}"
LIMIT = 1e-4  # of the logits, relative to the largest: float32 beside float64
DECODE = 8  # rows of a call that may be a decode step
Deferred = Callable[[int, torch.Tensor, torch.Tensor], set[int]]

# A layer's routing, sizes or place in the model differ.
FAMILIES = {
    "qwen3_moe": 1,  # 2 of 6 experts
    "deepseek_v3": 1,  # dense layers first, shared experts, scaled sigmoids
    "glm4_moe": 1,
    "olmoe": 2,
    "granitemoe": 3,  # more than a token has: one is never deferred
}


def stock_of(model_type: str) -> PreTrainedModel:
    return build_model(next(case for case in served_cases() if case.model_type == model_type))


def exact(model_type: str) -> PreTrainedModel:
    model = stock_of(model_type).double()
    model.set_experts_implementation("eager")  # the other ways to compute them have no float64
    return model


@pytest.fixture
def load(tmp_path: Path):  # type: ignore[no-untyped-def]
    def injected(model_type: str, more: str, gpu: str = "emulated") -> PreTrainedModel:
        path = tmp_path / "rules.yaml"
        path.write_text(RULES.format(more=more, gpu=gpu))
        model: PreTrainedModel = optimize_and_load(stock_of(model_type), path, progress=False, threads=1)
        return model

    return injected


def by_rank(count: int) -> Deferred:
    """Experts that no token has among the largest of its weights."""

    def deferred(layer: int, index: torch.Tensor, weights: torch.Tensor) -> set[int]:
        kept: set[int] = set()
        for ids, values in zip(index.tolist(), weights.tolist(), strict=True):
            best = sorted(range(len(ids)), key=lambda place: -values[place])
            kept |= {ids[place] for place in best[: max(1, len(ids) - count)]}
        return set(index.flatten().tolist()) - kept if len(index) <= DECODE else set()

    return deferred


def layers_of(model: PreTrainedModel) -> list[Any]:
    return [module for path, module in model.named_modules() if path.endswith(".experts") and hasattr(module, "gate_up_proj")]


def reference(model_type: str, deferred: Deferred) -> PreTrainedModel:
    """The stock model in float64, each layer of which adds what the layer before has deferred; the last one defers nothing."""
    model = exact(model_type)
    layers = layers_of(model)
    assert len(layers) > 1
    pending: list[torch.Tensor] = []

    def deferring(number: int, experts: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
            arrived = [pending.pop() for _ in pending[:]]
            later = deferred(number, top_k_index, top_k_weights) if number < len(layers) - 1 else set()
            mask = torch.tensor([[expert in later for expert in row] for row in top_k_index.tolist()])
            out = experts(hidden_states, top_k_index, top_k_weights * ~mask)
            if later:
                pending.append(experts(hidden_states, top_k_index, top_k_weights * mask))
            return out + sum(arrived)

        return forward

    for number, module in enumerate(layers):
        module.forward = deferring(number, module.forward)  # type: ignore[method-assign]
    return model


@torch.no_grad()
def texts(model: PreTrainedModel) -> torch.Tensor:
    """Logits of a prompt, decode steps, drafts that are verified and rejected, a reused prefix, another text and a batch."""
    found = []

    def call(ids: torch.Tensor, cache: DynamicCache) -> None:
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        found.append(logits.double().flatten(0, 1))

    ids, cache = prompt(40), DynamicCache(config=model.config)
    call(ids[:, :11], cache)
    for position in range(11, 15):
        call(ids[:, position : position + 1], cache)
    call(ids[:, 15:19], cache)  # drafts
    cache.crop(17 - 19)
    call(ids[:, 20:21], cache)
    cache.crop(6 - 18)  # a prefix, with a rest that is too long for a decode step, then one that is not
    call(ids[:, 20:30], cache)
    call(ids[:, 30:38], cache)
    other = DynamicCache(config=model.config)
    call(ids[:, 3:4], other)  # a text of one token
    batch, rows = DynamicCache(config=model.config), prompt(14, batch=3)
    call(rows[:, :10], batch)
    for position in range(10, 14):
        call(rows[:, position : position + 1], batch)
    return torch.cat(found)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_cpu_defers_what_no_token_ranks_high(model_type: str, load) -> None:  # type: ignore[no-untyped-def]
    count = FAMILIES[model_type]
    expected = texts(reference(model_type, by_rank(count)))
    plain = texts(exact(model_type))
    assert difference(plain, expected) > 10 * LIMIT, "deferral changes something"
    model = load(model_type, f"{ALL_CPU}, defer: {count}")
    assert difference(texts(model), expected) < LIMIT
    ((_, counts),) = model.moegraft.device_counts()
    assert 0 < counts["deferred"] <= counts["on_cpu"]


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[set[int]]]:
    """Record the experts that each call of a layer defers."""
    calls: list[set[int]] = []
    take, defer = LayerDeferral.take, CallExecutor.defer

    def called(self: LayerDeferral, tokens: int) -> Any:
        calls.append(set())
        return take(self, tokens)

    def deferring(self: CallExecutor, experts: Any, submit: Any) -> None:
        calls[-1] |= set(experts.tolist())
        defer(self, experts, submit)

    with monkeypatch.context() as patch:
        patch.setattr(LayerDeferral, "take", called)
        patch.setattr(CallExecutor, "defer", deferring)
        yield calls


@pytest.mark.parametrize(
    ("gpu", "more"),
    [
        ("emulated", "schedule: fixed, cache: {ratio: 0.5}"),  # those with a slot are not deferred
        ("emulated", "cache: {ratio: 0.5}"),
        ("emulated", "cache: {slots: 1}, schedule: greedy"),
        ("'emulated:0,emulated:1'", ALL_CPU),  # from one device to the next
    ],
)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "granitemoe"])
def test_devices_defer_what_the_cpu_computes(  # type: ignore[no-untyped-def]
    model_type: str, gpu: str, more: str, load, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = FAMILIES[model_type]
    with recorded(monkeypatch) as calls:
        found = texts(load(model_type, f"{more}, defer: {count}", gpu))
    rule, each = by_rank(count), iter(calls)

    def deferred(layer: int, index: torch.Tensor, weights: torch.Tensor) -> set[int]:
        actual = next(each)
        assert actual <= rule(layer, index, weights)
        return actual

    stock = reference(model_type, deferred)
    layers_of(stock)[-1].register_forward_hook(lambda *_: None if not next(each) else pytest.fail("the last layer defers nothing"))
    expected = texts(stock)
    assert any(calls) and next(each, None) is None, "every call was found in the reference"
    assert difference(found, expected) < LIMIT


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_captured_steps_defer_as_others_do(model_type: str, load) -> None:  # type: ignore[no-untyped-def]
    """With a schedule by residency, which is that of captured steps, and slots that stay as they are."""
    found = []
    for decode in ("eager", "graph"):
        model = load(model_type, f"schedule: fixed, cache: {{ratio: 0.5}}, decode: {decode}, defer: 1")
        made = model.generate(prompt(9), max_new_tokens=24, do_sample=False, output_logits=True, return_dict_in_generate=True)
        ((_, counts),) = model.moegraft.device_counts()
        found.append((torch.stack(made.logits).double(), made.sequences, counts))
    (eager, ids, counted), (graph, captured_ids, replayed) = found
    assert replayed["replayed"] > 10
    assert torch.equal(ids, captured_ids) and difference(graph, eager) < LIMIT
    assert counted["deferred"] > 0 and replayed["deferred"] > 0
    plain = load(model_type, "schedule: fixed, cache: {ratio: 0.5}, decode: graph")
    made = plain.generate(prompt(9), max_new_tokens=24, do_sample=False, output_logits=True, return_dict_in_generate=True)
    assert difference(torch.stack(made.logits).double(), eager) > 10 * LIMIT


def test_an_interrupted_step_leaves_nothing_behind(load) -> None:  # type: ignore[no-untyped-def]
    model = load("olmoe", f"{ALL_CPU}, defer: 1")
    expected = texts(model)
    for stop in range(1, 3):
        layer = [module for module in model.modules() if isinstance(module, HybridExperts)][stop]

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        for text in (prompt(1), prompt(12)):
            hook = layer.register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt), torch.no_grad():
                model(input_ids=text)
            hook.remove()
            with torch.no_grad():
                model(input_ids=prompt(12, batch=2))  # what comes next begins with a prompt, or with one token
            with pytest.raises(KeyboardInterrupt), torch.no_grad():
                hook = layer.register_forward_pre_hook(interrupt)
                model(input_ids=text)
            hook.remove()
            assert torch.equal(texts(model), expected)


def test_threads_do_not_take_each_others_experts(load) -> None:  # type: ignore[no-untyped-def]
    model = load("qwen3_moe", f"{ALL_CPU}, defer: 1")
    expected = texts(model)
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(texts(model))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for each in found:
        assert torch.equal(each, expected)


def test_a_layer_that_is_computed_again_defers_nothing(load, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    model = load("qwen3_moe", f"{ALL_CPU}, defer: 1")

    def failing(self: HostSlotLayers, launches: Sequence[Any]) -> None:
        if isinstance(launches, list):  # not those of a layer that is computed again
            raise DeviceError("no device")

    monkeypatch.setattr(HostSlotLayers, "wait_for", failing)
    assert difference(texts(model), texts(exact("qwen3_moe"))) < LIMIT


def test_drafts_defer_nothing(load) -> None:  # type: ignore[no-untyped-def]
    model = load("qwen3_moe", f"{ALL_CPU}, defer: 1")
    with model.moegraft.context.draft_switch.drafting(DraftSettings(top_k=2)):
        assert difference(texts(model), texts(exact("qwen3_moe"))) < LIMIT


def test_drafted_text_is_that_of_its_verifications(load) -> None:  # type: ignore[no-untyped-def]
    """Rejected drafts leave nothing: what follows is computed from the cache alone."""
    model = load("qwen3_moe", f"{ALL_CPU}, defer: 1")
    ids, cache, plain = prompt(20), DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        for tried in (cache, plain):
            model(input_ids=ids[:, :12], past_key_values=tried)
        model(input_ids=ids[:, 14:18].flip(1), past_key_values=cache)  # all rejected
        cache.crop(-4)
        found = [model(input_ids=ids[:, 12:13], past_key_values=tried).logits for tried in (cache, plain)]
    assert torch.equal(*found)


def test_sparse_experts_are_deferred(load) -> None:  # type: ignore[no-untyped-def]
    """With a threshold of 0 no neuron is left out, by the sparse kernels."""
    expected = texts(reference("qwen3_moe", by_rank(1)))
    assert difference(texts(load("qwen3_moe", f"{ALL_CPU}, defer: 1, sparsity: {{target: 0, scope: routed}}")), expected) < LIMIT


def test_layers_of_other_rules_receive_and_defer_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    rule = "- match: {{kind: experts, layers: '{layers}'}}\n  replace: {{class: hybrid_experts, kwargs: {{{more}}}}}\n"
    path.write_text(
        "version: 1\nrules:\n"
        + rule.format(layers="0", more=f"gpu: emulated, {ALL_CPU}, defer: 1")
        + rule.format(layers="1-2", more=f"gpu: emulated, {ALL_CPU}")
    )
    model = optimize_and_load(stock_of("olmoe"), path, progress=False, threads=1)
    rank = by_rank(1)
    expected = texts(reference("olmoe", lambda layer, *routing: rank(layer, *routing) if layer == 0 else set()))
    assert difference(texts(model), expected) < LIMIT
    first, second, third = (operator.placement() for operator in model.moegraft.operators.values())
    assert first.endswith("all_cpu, up to 1 of a token added to the next layer")
    assert "next layer" not in second + third


@pytest.mark.parametrize(
    ("path", "following", "connected"),
    [
        ("model.layers.3.mlp.experts", "model.layers.4.mlp.experts", True),
        ("model.layers.3.mlp.experts", "mtp.layers.0.mlp.experts", False),
        ("mtp.layers.0.mlp.experts", "mtp.layers.1.mlp.experts", False),  # each drafts a token of its own
        ("thinker.layers.3.mlp.experts", "talker.layers.0.mlp.experts", False),
    ],
)
def test_a_stack_of_layers_ends_with_its_last(path: str, following: str, connected: bool) -> None:
    layers: Any = [SimpleNamespace(path=each, layers=SimpleNamespace(num_experts=4), deferral=None) for each in (path, following)]
    connect([(layer, 1) for layer in layers])
    assert layers[0].deferral.defers(1) == connected
    assert not layers[1].deferral.defers(1)


def test_what_it_cannot_be_combined_with(load) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RuleFileError, match="while a GPU computes the next layer: it needs gpu, such as gpu: auto"):
        load("qwen3_moe", "defer: 1", "none")
    with pytest.raises(RuleFileError, match="defer is a number of experts per token, 0 or more, not -1"):
        load("qwen3_moe", "defer: -1")
    deferring = HybridExpertsOptions(gpu="auto", defer=2)
    assert HybridExperts.traits(deferring).undivided is not None, "several processes keep experts on the CPU"
    assert HybridExperts.traits(deferring).identity != HybridExperts.traits(HybridExpertsOptions(gpu="auto")).identity


def test_a_plan_states_that_it_is_lossy(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(RULES.format(gpu="emulated", more="defer: 2"))
    (notice,) = plan(stock_of("qwen3_moe"), path).notices
    assert notice.severity == "notice"
    assert "lossy: decode steps add up to 2 experts of a token to the next layer; 'moegraft verify' measures" in notice.message
    path.write_text(RULES.format(gpu="emulated", more="defer: 0"))
    assert not plan(stock_of("qwen3_moe"), path).notices


def test_verify_prices_it(tmp_path: Path) -> None:
    """Layers are compared without deferral, also those of a short text; the logits are of decode steps."""
    path = tmp_path / "rules.yaml"
    found = []
    for defer in range(3):
        path.write_text(RULES.format(gpu="emulated", more=f"{ALL_CPU}, defer: {defer}"))
        model = optimize_and_load(demo_path(), path, dtype=torch.float32, progress=False, threads=1)
        source = find_model(str(demo_path()))
        found.append(verify(model, source, torch.arange(3, 35)))
        short = verify(model, source, torch.arange(3, 8))
        assert found[-1].ok and short.ok and max(layer.relative_error for layer in short.layers) < 1e-2
    assert found[0].decode_loss is None and found[0].logits.kl_nats < 1e-3
    assert found[2].decode_loss == "decode steps add up to 2 experts of a token to the next layer"
    assert 1e-3 < found[1].logits.kl_nats < found[2].logits.kl_nats
