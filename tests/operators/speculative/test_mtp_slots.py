"""`draft: mtp` over experts in slots of a device: what a verification needs is requested before it begins, and texts stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_layers
from support.families import greedy, prompt
from support.gpus import where
from support.mtp import write_checkpoint

from moegraft.injection import optimize_and_load
from moegraft.operators.offload.engine import Engine
from moegraft.operators.offload.scheduler import LayerStep, Prediction
from moegraft.operators.offload.transfers import Urgency

if not hasattr(getattr(transformers.modeling_layers, "MtpModel", None), "forward_layer"):
    pytest.skip("this transformers cannot compute MTP layers one by one", allow_module_level=True)

RULES = """
version: 1
rules:
- match: {{kind: experts}}
  replace: {{class: hybrid_experts, kwargs: {{weights: stored, gpu: "{gpu}", cache: {{slots: 2}}, prefetch: {{policy: {policy}}}}}}}
- match: {{kind: model}}
  replace: {{class: speculative_draft, kwargs: {{draft: mtp, schedule: fixed, max_draft: 3, confidence: 0}}}}
"""


@pytest.fixture
def load(tmp_path: Path, gpu: str) -> Any:
    def make(model_type: str, policy: str = "impact") -> Any:
        stock = write_checkpoint(tmp_path, model_type, **({"mlp_only_layers": []} if model_type.startswith("qwen3") else {}))
        rules = tmp_path / "rules.yaml"
        rules.write_text(RULES.format(gpu=gpu, policy=policy))
        return stock, optimize_and_load(tmp_path, rules, progress=False, threads=1, **where(gpu))

    return make


def watched(engine: Engine) -> list[tuple[Any, ...]]:
    """Record ("layer", layer, tokens) and ("request", layer, urgency), the latter of missing experts, in order."""
    events: list[tuple[Any, ...]] = []
    run, request = engine.run, engine.cache.queue.request

    def watched_run(step: LayerStep, *given: Any) -> None:
        events.append(("layer", step.layer, len(step.chosen)))
        run(step, *given)

    def watched_request(layer: int, expert: int, urgency: Urgency) -> Any:
        if not engine.cache.slots.is_resident(layer, expert):
            events.append(("request", layer, urgency))
        return request(layer, expert, urgency)

    engine.run = watched_run  # type: ignore[method-assign]
    engine.cache.queue.request = watched_request  # type: ignore[method-assign]
    return events


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_moe", "qwen3_next"])
def test_a_verification_finds_what_its_draft_had_loaded(model_type: str, load: Any) -> None:
    stock, model = load(model_type)
    (engine,) = model.moegraft.context.gpu_engines
    events = watched(engine)
    ids = prompt(12).to(model.device)
    assert torch.equal(greedy(model, ids).cpu(), greedy(stock, prompt(12)))
    assert model.moegraft.model_operator.statistics()["rounds"] > 0
    first, last = 0, engine.cache.slots.layers - 1
    rounds = [at for at, (what, layer, tokens) in enumerate(events) if what == "layer" and layer == first and 1 < tokens <= 4]
    ahead = 0
    for begin in rounds:
        drafted = max(at for at in range(begin) if events[at][:2] == ("layer", last))
        assert events[drafted][2] <= 4, "a step of the MTP layer, whose experts have slots of the same engine"
        asked = [layer for what, layer, urgency in events[drafted + 1 : begin] if what == "request" and urgency is Urgency.DEEPER]
        assert last not in asked, "the MTP layer computes no verification"
        ahead += len(asked)
    assert rounds and ahead > 0, "requested between the draft's last step and the verification's first layer"
    assert engine.report()["experts loaded ahead of verifications and used there"] == engine.statistics.loaded_for_verification > 0


def test_nothing_is_loaded_ahead_where_rules_switch_prefetching_off(load: Any) -> None:
    stock, model = load("deepseek_v3", policy="none")
    (engine,) = model.moegraft.context.gpu_engines
    events = watched(engine)
    assert torch.equal(greedy(model, prompt(12).to(model.device)).cpu(), greedy(stock, prompt(12)))
    assert not any(what == "request" and urgency is Urgency.DEEPER for what, _, urgency in events)
    assert engine.statistics.loaded_for_verification == 0


def test_what_a_draft_expects_is_requested_until_its_layer_is_computed(load: Any) -> None:
    _, model = load("deepseek_v3")
    (engine,) = model.moegraft.context.gpu_engines
    slots, queue, last = engine.cache.slots, engine.cache.queue, engine.cache.slots.layers - 1
    absent = next(expert for expert in range(slots.num_experts) if not slots.is_resident(last - 1, expert))
    predicted = torch.tensor([[absent]]).numpy()
    engine.expect_verification([Prediction.of(last - 1, predicted)])
    ahead = engine.verification_prefetcher
    assert slots.is_resident(last - 1, absent) or absent in queue.in_flight(last - 1) or (last - 1, absent) in ahead.missing()
    engine.prefetcher.look_ahead(LayerStep.of(last, predicted))  # the MTP layer's next step drops no request of the body
    while not slots.is_resident(last - 1, absent):
        engine.device.stream("copy").record().wait()
        engine.device.synchronize()
    ahead.verified(LayerStep.of(last - 1, predicted))
    assert engine.statistics.loaded_for_verification == 1 and not ahead.missing()
    ahead.verified(LayerStep.of(last - 1, predicted))
    assert engine.statistics.loaded_for_verification == 1, "counted once"
