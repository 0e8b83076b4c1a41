"""Drafts over experts in slots of a device: equal text, one transfer per verified expert, what is loaded while drafting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.families import build_model, case_of, prompt
from support.gpus import limit, placed
from transformers import PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.operators.draft import DraftSettings
from moegraft.operators.offload.engine import Engine
from moegraft.operators.offload.scheduler import DraftStep, LayerStep
from moegraft.operators.offload.transfers import Urgency

RULES = """
version: 1
rules:
- match: {{kind: experts}}
  replace: {{class: hybrid_experts, kwargs: {{weights: stored, gpu: "{gpu}", cache: {{slots: {slots}}}, {more}}}}}
- match: {{kind: model}}
  replace: {{class: speculative_draft, kwargs: {{schedule: fixed, {draft}}}}}
"""
FAMILIES = ["deepseek_v3", "qwen3_moe", "mixtral", "gpt_oss", "olmoe", "qwen3_next", "nemotron_h"]
DRAFT = "max_draft: 4, draft_top_k: 2"
STEPS = 24


@pytest.fixture
def load(tmp_path: Path, gpu: str) -> Any:
    def make(model_type: str = "qwen3_moe", draft: str = DRAFT, slots: int = 2, more: str = "schedule: on_demand") -> PreTrainedModel:
        rules = tmp_path / "rules.yaml"
        rules.write_text(RULES.format(gpu=gpu, draft=draft, slots=slots, more=more))
        return optimize_and_load(placed(build_model(case_of(model_type)), gpu), rules, progress=False, threads=1)

    return make


def engine_of(model: PreTrainedModel) -> Engine:
    (engine,) = model.moegraft.context.gpu_engines
    return engine


def greedy(model: PreTrainedModel, steps: int = STEPS) -> torch.Tensor:
    found = model.generate(prompt(12).to(model.device), do_sample=False, max_new_tokens=steps)
    assert isinstance(found, torch.Tensor)
    return found.cpu()


class Requests:
    """Record (step, urgencies of requested missing experts) for every call of a layer."""

    def __init__(self, engine: Engine) -> None:
        self.calls: list[tuple[LayerStep, list[tuple[int, Urgency]]]] = []
        run, request, demand = engine.run, engine.cache.queue.request, engine.cache.queue.demand
        asked: list[tuple[int, Urgency]] = []

        def watched_request(layer: int, expert: int, urgency: Urgency) -> Any:
            if not engine.cache.slots.is_resident(layer, expert):
                asked.append((expert, urgency))
            return request(layer, expert, urgency)

        def watched_demand(layer: int, experts: list[int]) -> Any:
            absent = [expert for expert in experts if not engine.cache.slots.is_resident(layer, expert)]
            found = demand(layer, experts)
            accepted = {transfer.expert for transfer in found}
            asked.extend((expert, Urgency.DEMAND) for expert in absent if expert in accepted)
            return found

        def watched_run(step: LayerStep, *given: Any) -> None:
            asked.clear()
            run(step, *given)
            self.calls.append((step, list(asked)))

        engine.run = watched_run  # type: ignore[method-assign]
        engine.cache.queue.request = watched_request  # type: ignore[method-assign]
        engine.cache.queue.demand = watched_demand  # type: ignore[method-assign]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_greedy_text_is_that_of_plain_decoding(model_type: str, load: Any, stock: Any) -> None:
    model = load(model_type)
    assert torch.equal(greedy(model), greedy(stock(model_type)))
    assert 0 < model.moegraft.model_operator.statistics()["rounds"] < STEPS - 1


def test_a_verification_transfers_each_expert_once(load: Any) -> None:
    model = load(more="schedule: on_demand, prefetch: {policy: none, promote: false}")
    engine = engine_of(model)
    seen = Requests(engine)
    greedy(model)
    demanded = [[expert for expert, urgency in asked if urgency is Urgency.DEMAND] for step, asked in seen.calls if len(step.chosen) > 1]
    assert any(len(experts) > 2 for experts in demanded), "more than there are slots"
    assert all(len(set(experts)) == len(experts) for experts in demanded)


def test_transfers_saved_by_joint_verification_are_counted(load: Any) -> None:
    model = load(more="schedule: on_demand")
    engine = engine_of(model)
    ahead, shared, counts = engine.verification_prefetcher, 0, engine.statistics
    chosen = np.array([[0, 1], [1, 2], [1, 0]])  # three tokens: expert 1 for all, 0 for two
    ahead.drafted(LayerStep.of(1, chosen[:1, :1]), DraftStep(chosen[:1], top_k=1))
    for expert, tokens in enumerate((2, 3, 1)):
        shared += 0 if engine.cache.slots.is_resident(1, expert) else tokens - 1
    ahead.verified(LayerStep.of(1, chosen))
    assert counts.shared_in_verification == shared
    ahead.verified(LayerStep.of(1, chosen))  # a prompt, without a draft
    assert counts.shared_in_verification == shared
    greedy(model)
    assert counts.shared_in_verification > shared
    assert engine.report()["loads shared by tokens verified together"] == counts.shared_in_verification


def test_experts_chosen_by_a_draft_are_resident_at_its_verification(load: Any) -> None:
    def demands(more: str = "") -> float:
        model = load(draft="max_draft: 4, draft_top_k: 1", slots=3, more=f"schedule: on_demand{more}")
        seen = Requests(engine_of(model))
        greedy(model)
        rounds = model.moegraft.model_operator.statistics()["rounds"]
        found = sum(u is Urgency.DEMAND for step, asked in seen.calls if step.draft is None and 1 < len(step.chosen) < 6 for _, u in asked)
        assert (engine_of(model).statistics.loaded_for_verification > 0) == (not more)
        return found / rounds

    assert demands() < demands(", prefetch: {policy: none, promote: false}")


def test_a_draft_of_any_expert_prefetches_the_next_layer_first(load: Any) -> None:
    model = load(draft="max_draft: 3, draft_top_k: 1", more="schedule: two_threshold")
    seen = Requests(engine_of(model))
    greedy(model)
    drafted = [(step, asked) for step, asked in seen.calls if step.draft is not None]
    soon = [expert for step, asked in drafted for expert, urgency in asked if urgency is Urgency.NEXT]
    later = [expert for step, asked in drafted for expert, urgency in asked if urgency is Urgency.DEEPER]
    assert soon and later
    for step, asked in drafted:
        likeliest = set(step.predictions[0].experts[step.predictions[0].ranks == 0].tolist()) if step.predictions else set()
        assert {expert for expert, urgency in asked if urgency is Urgency.NEXT} <= likeliest


def test_the_model_works_after_an_interrupted_draft(load: Any, stock: Any) -> None:
    model = load()
    expected, engine = greedy(stock()), engine_of(model)
    run, calls = engine.run, iter(range(10_000))

    def interrupted(step: LayerStep, *given: Any) -> None:
        if step.draft is not None and next(calls) == 7:
            raise KeyboardInterrupt
        run(step, *given)

    engine.run = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        greedy(model)
    assert model.moegraft.context.draft_switch.settings is None
    assert torch.equal(greedy(model), expected)


def test_all_experts_run_after_a_draft(load: Any, stock: Any, gpu: str) -> None:
    model = load()
    switch = model.moegraft.context.draft_switch
    with torch.no_grad(), switch.drafting(DraftSettings(1)):
        model(input_ids=prompt(5).to(model.device))
    with torch.no_grad():
        found, expected = model(input_ids=prompt(5).to(model.device)).logits, stock()(input_ids=prompt(5)).logits
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=limit(gpu))
