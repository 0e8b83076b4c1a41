"""Routers of every family have one interface, and choose without their model what they choose in it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from support.families import build_config, build_model, case_of, model_class, prompt, served_cases
from support.family_rows import FamilyCase
from torch import nn
from transformers import PreTrainedModel

from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.routing import RouterOutput, experts_paths, router_of, routers_of, score_function, scores_of
from moegraft.operators.routing_trace import RoutedCall, watch_routing

# Routers that read more than hidden states, so that their choice is not known from hidden states alone.
READS_TOKEN_IDS = {"deepseek_v4": ("model.layers.0.mlp.experts",)}
READS_THE_LAST_LAYER = {"zaya": tuple(f"model.layers.{layer}.mlp.experts" for layer in range(3))}
INEXACT = READS_TOKEN_IDS | READS_THE_LAST_LAYER
# Families that do not choose the largest scores: they add a correction, or choose groups first.
CORRECTED = ("deepseek_v3", "ernie4_5_moe", "glm4_moe", "minimax_m2", "lfm2_moe", "afmoe", "hy_v3", "deepseek_v4")
FUNCTIONS = {
    "mixtral": "softmax",
    "qwen3_moe": "softmax",
    "gpt_oss": "softmax",
    "granitemoe": "softmax",
    "ernie4_5_moe": "softmax",
    "deepseek_v2": "softmax",
    "deepseek_v3": "sigmoid",
    "glm4_moe": "sigmoid",
    "inkling_text": "sigmoid",
    "deepseek_v4": "sqrtsoftplus",
    "gemma4_text": "probabilities",
}


def ids_of(case: FamilyCase) -> str:
    return case.model_type


@torch.no_grad()
def watched(model: PreTrainedModel) -> list[RoutedCall]:
    """Return every call of experts on 18 tokens."""
    calls: list[RoutedCall] = []
    with watch_routing(model, calls.append):
        model(input_ids=prompt(9, batch=2))
    return calls


@cache
def calls_of(model_type: str) -> list[RoutedCall]:
    return watched(build_model(case_of(model_type)))


def sets(index: torch.Tensor) -> list[list[int]]:
    return index.sort(-1).values.tolist()


@pytest.mark.parametrize("case", served_cases(), ids=ids_of)
def test_a_router_chooses_what_its_model_chooses(case: FamilyCase) -> None:
    calls = calls_of(case.model_type)
    assert calls, "no experts ran"
    for call in calls:
        found = call.router.route(call.router_input)
        assert found.shape == call.top_k_index.shape
        if call.router.path not in INEXACT.get(case.model_type, ()):
            assert sets(found) == sets(call.top_k_index)


@pytest.mark.parametrize("case", served_cases(), ids=ids_of)
def test_scores_are_shares_of_one(case: FamilyCase) -> None:
    for call in calls_of(case.model_type):
        assert call.scores.shape == (18, call.router.num_experts)
        assert call.scores.dtype == torch.float32
        assert bool((call.scores >= 0).all())
        total = call.scores.sum(-1)
        if case.model_type == "zaya":  # may choose no expert
            assert bool((total < 1).all())
        else:
            torch.testing.assert_close(total, torch.ones(18))


@pytest.mark.parametrize("model_type", CORRECTED)
def test_corrections_and_groups_change_the_choice(model_type: str) -> None:
    """Otherwise the first test would pass with a plain top-k."""
    calls = [call for call in calls_of(model_type) if call.router.path not in INEXACT.get(model_type, ())]
    plain = [call.scores.topk(call.top_k_index.shape[-1], dim=-1).indices for call in calls]
    assert any(sets(index) != sets(call.top_k_index) for index, call in zip(plain, calls, strict=True))


def test_the_first_layer_of_a_router_with_a_state_needs_none() -> None:
    call = calls_of("zaya")[0]
    assert sets(call.router.route(call.router_input)) == sets(call.top_k_index)


@pytest.mark.parametrize("model_type", FUNCTIONS)
def test_weights_are_proportional_to_the_scores(model_type: str) -> None:
    """Weights of the chosen experts are their scores, up to one factor per token."""
    call = calls_of(model_type)[-1]
    output = RouterOutput.read(call.router.module(call.router_input), call.router.num_experts)
    assert score_function(output) == FUNCTIONS[model_type]
    if model_type == "gemma4_text":
        return  # scales each expert's weight after choosing
    ratio = call.scores.gather(-1, call.top_k_index) / call.top_k_weights
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-4, atol=0)


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "gpt_oss", "gemma4_text", "granitemoe"])
def test_the_score_function_is_recognised_in_bfloat16(model_type: str) -> None:
    call = watched(build_model(case_of(model_type)).to(torch.bfloat16))[0]  # the first: inputs differ by rounding alone
    assert sets(call.router.route(call.router_input)) == sets(call.top_k_index)
    torch.testing.assert_close(call.scores, calls_of(model_type)[0].scores, rtol=0, atol=0.1)


def test_predictions_are_sorted_by_likelihood() -> None:
    calls = calls_of("deepseek_v3")  # its router does not sort
    for call in calls:
        order = call.top_k_weights.argsort(dim=-1, descending=True, stable=True)
        assert torch.equal(call.router.route(call.router_input), call.top_k_index.gather(-1, order))


def test_a_prediction_is_a_later_router_applied_to_the_same_hidden_states() -> None:
    first, second = calls_of("mixtral")[:2]
    assert isinstance(second.router.module.weight, nn.Parameter)
    expected = F.linear(first.router_input, second.router.module.weight).topk(2, dim=-1).indices
    assert sets(second.router.route(first.router_input)) == sets(expected)


def test_predictions_run_no_hook() -> None:
    model = build_model(case_of("qwen3_moe"))
    router = routers_of(model)["model.layers.1.mlp.experts"]
    calls: list[object] = []
    router.module.register_forward_hook(lambda *call: calls.append(call))
    router.route(torch.randn(3, 64))
    assert not calls


def test_hooks_are_removed_after_a_failure() -> None:
    model = build_model(case_of("mixtral"))

    def fail(call: RoutedCall) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), watch_routing(model, fail):
        model(input_ids=prompt(3))
    model(input_ids=prompt(3))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("case", served_cases(), ids=ids_of)
def test_routers_are_found_before_weights_are_loaded(case: FamilyCase) -> None:
    with torch.device("meta"):
        model = model_class(case)(build_config(case))
    assert {call.router.path for call in calls_of(case.model_type)} <= set(experts_paths(model))
    assert set(routers_of(model)) == set(experts_paths(model))


def test_experts_without_a_router_are_refused() -> None:
    model = build_model(case_of("mixtral"))
    del model.model.layers[1].mlp.gate
    assert experts_paths(model) == ("model.layers.0.mlp.experts", "model.layers.2.mlp.experts")
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.mlp\.experts: its block has no module 'gate' or 'router'"):
        router_of(model, "model.layers.1.mlp.experts")


class Linear(nn.Module):
    """A block like Jamba's in transformers 5.17: the router returns logits, and the block chooses."""

    def __init__(self, chooses: bool) -> None:
        super().__init__()
        self.router = nn.Linear(8, 6, bias=False)
        self.experts = nn.Module()
        self.experts.num_experts = 6  # type: ignore[assignment]
        self.top_k = 2
        if chooses:
            self.route_tokens_to_experts = self.least

    def least(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the least likely experts, unlike a plain top-k."""
        weights, index = router_logits.softmax(-1).topk(self.top_k, dim=-1, largest=False)
        return index, weights.to(hidden_states.dtype)


@pytest.mark.parametrize("chooses", [True, False])
def test_a_router_that_returns_logits_alone_is_completed_by_its_block(chooses: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": Linear(chooses)})
    tokens = torch.randn(5, 8)
    router = router_of(model, "mlp.experts")
    expected = router.module(tokens).topk(2, dim=-1, largest=not chooses).indices
    assert sets(router.route(tokens)) == sets(expected)


def test_scores_are_found_in_any_order_of_outputs() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, -1.0, 0.5]])
    index, weights = torch.tensor([[2], [0]]), torch.ones(2, 1)
    expected = logits.softmax(-1)
    for output in (logits, (logits, weights, index), (index, weights, logits), (logits[None], weights, index), [weights, logits]):
        torch.testing.assert_close(scores_of(output, 3), expected)
    torch.testing.assert_close(scores_of(expected, 3), expected)  # already probabilities
    torch.testing.assert_close(scores_of((logits.bfloat16(),), 3), expected)  # these logits are exact in bfloat16
    torch.testing.assert_close(scores_of(logits, 2), expected[:, :2])  # a last column for no expert
    torch.testing.assert_close(scores_of(logits, 3, "sigmoid").sum(-1), torch.ones(2))


def test_logits_are_found_where_a_layer_chooses_all_experts() -> None:
    """In such a layer, weights are as wide as logits."""
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    weights, index = logits.softmax(-1).topk(3, dim=-1)
    for output in ((logits, weights, index), (index, weights, logits)):
        torch.testing.assert_close(scores_of(output, 3), logits.softmax(-1))


def test_an_output_without_scores_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a router of 6 experts returned \(2, 3\), without scores"):
        scores_of(torch.zeros(2, 3), 6)
    with pytest.raises(ValueError, match="returned no tensor"):
        scores_of(None, 6)
