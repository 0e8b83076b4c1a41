"""Drafts by the likeliest resident experts: the choice of a family's router if there were no other experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.families import build_model, case_of, prompt

from moegraft.operators.offload.gpu_layer import ResidentDraft, keep_resident, likeliest_resident
from moegraft.operators.routing import RoutedCall, Router, Scoring, routers_of, watch_routing

# Softmax, softmax of the chosen, sigmoid, corrections in the router and in the block, of scores and of logits, weights not normalised.
FAMILIES = (
    *("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "lfm2_moe", "afmoe"),
    *("ernie4_5_moe", "minimax_m2", "kolibri1", "hy_v3", "qwen2_moe", "dots1"),
)
CORRECTED = ("deepseek_v3", "glm4_moe", "lfm2_moe", "afmoe", "ernie4_5_moe", "minimax_m2", "hy_v3")

TOP_K = 2  # experts that draft
GROUPED = ("deepseek_v3",)  # groups are chosen first, of which no ranking of experts knows


@dataclass(frozen=True, slots=True)
class Seen:
    call: RoutedCall
    scoring: Scoring


@cache
def seen(model_type: str) -> list[Seen]:
    """Every call of a tiny model's experts with its router's output."""
    model = build_model(case_of(model_type))
    last: dict[int, Any] = {}
    for router in routers_of(model).values():
        router.module.register_forward_hook(lambda module, args, output: last.__setitem__(id(module), output))
    found: list[Seen] = []
    with torch.no_grad(), watch_routing(model, lambda call: found.append(Seen(call, call.router.scoring(last[id(call.router.module)])))):
        model(input_ids=prompt(12, batch=2))
    assert found, "no experts ran"
    return found


def drafted(one: Seen, resident: NDArray[np.bool_], top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return ResidentDraft(one.call.router).narrow(one.call.top_k_index, one.call.top_k_weights, one.scoring, resident, top_k, pytest.fail)


def by_expert(index: torch.Tensor, weights: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the weight of each expert, (T, E)."""
    places = index.where(index >= 0, num_experts)
    return torch.zeros(len(index), num_experts + 1).scatter_add_(-1, places, weights.float())[:, :-1]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_with_all_experts_resident_it_is_the_routers_choice(model_type: str) -> None:
    for one in seen(model_type):
        num_experts, top_k = one.call.router.num_experts, one.call.top_k_index.shape[-1]
        index, weights = drafted(one, np.ones(num_experts, bool), top_k)
        expected = by_expert(one.call.top_k_index, one.call.top_k_weights, num_experts)
        torch.testing.assert_close(by_expert(index, weights, num_experts), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_drafting_experts_are_resident_and_outrank_the_others(model_type: str) -> None:
    for one in seen(model_type):
        num_experts, top_k = one.call.router.num_experts, one.call.top_k_index.shape[-1]
        resident = np.arange(num_experts) % 2 == 0  # three of six
        index, weights = drafted(one, resident, top_k)
        assert bool(torch.from_numpy(np.append(resident, True))[index].all())
        assert bool(((index >= 0).sum(-1) == min(top_k, int(resident.sum()))).all())
        own, _ = keep_resident(one.call.top_k_index, one.call.top_k_weights, resident, top_k)
        for mine, few in zip(index.tolist(), own.tolist(), strict=True):
            assert set(few) - {-1} <= set(mine)
        whole = by_expert(one.call.top_k_index, one.call.top_k_weights, num_experts)
        found = by_expert(index, weights, num_experts)
        torch.testing.assert_close(
            found.where((whole > 0) & (found > 0), 0), whole.where((whole > 0) & (found > 0), 0), rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_softmax_is_over_resident_experts(model_type: str) -> None:
    """The choice, and the ratios of the weights, are those of a router without other experts."""
    one = seen(model_type)[0]
    num_experts, top_k = one.call.router.num_experts, one.call.top_k_index.shape[-1]
    resident = np.array([False, True, True, False, True, True])[:num_experts]
    index, weights = drafted(one, resident, top_k)
    logits = one.scoring.scores.log().masked_fill(~torch.from_numpy(resident), -torch.inf)
    best = logits.topk(top_k, dim=-1)
    expected = by_expert(best.indices, best.values.softmax(-1) * weights.float().sum(-1, keepdim=True), num_experts)
    torch.testing.assert_close(by_expert(index, weights, num_experts), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model_type", CORRECTED)
def test_a_routers_correction_is_recognised(model_type: str) -> None:
    calls = seen(model_type)
    plain = [_agreement(one, one.scoring.rankings[0]) for one in calls]
    best = [max(_agreement(one, ranking) for ranking in one.scoring.rankings) for one in calls]
    assert min(plain) < 1, "scores alone explain the choice: this shows nothing"
    assert best == [1.0] * len(calls) or (model_type in GROUPED and min(best) > min(plain))


def test_further_experts_follow_in_order_of_corrected_scores() -> None:
    scores = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04]])
    ranking = scores + torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])
    chosen, weights = torch.tensor([[4, 0]]), torch.tensor([[0.04, 0.5]])
    there = np.array([False, False, True, True, True])
    index, given = likeliest_resident(chosen, weights, scores, ranking, there, TOP_K)
    assert index.tolist() == [[4, 2]]
    torch.testing.assert_close(given, torch.tensor([[0.04, 0.1]]))
    assert torch.equal(likeliest_resident(chosen, 3 * weights, scores, ranking, there, TOP_K)[1], 3 * given)
    later = ranking + torch.tensor([0.0, 0.0, 0.0, 0.5, 0.0])
    assert likeliest_resident(chosen, weights, scores, later, there, TOP_K)[0].tolist() == [[4, 3]]


def test_without_resident_experts_shared_experts_draft_alone() -> None:
    scores = torch.tensor([[0.7, 0.3], [0.6, 0.4]])
    index, weights = likeliest_resident(torch.tensor([[0], [0]]), torch.tensor([[0.7], [0.6]]), scores, scores, np.zeros(2, bool), TOP_K)
    assert index.tolist() == [[-1], [-1]] and weights.tolist() == [[0.0], [0.0]]


def test_padded_slots_stay_padded() -> None:
    scores = torch.tensor([[0.6, 0.3, 0.1]])
    for padding in (-1, 3):
        index, weights = likeliest_resident(
            torch.tensor([[0, padding]]), torch.tensor([[0.6, 0.0]]), scores, scores, np.array([False, True, True]), TOP_K
        )
        assert index.tolist() == [[1, 2]]
        torch.testing.assert_close(weights, torch.tensor([[0.3, 0.1]]))


def test_only_chosen_experts_draft_if_weights_are_not_proportional_to_scores(caplog: pytest.LogCaptureFixture) -> None:
    one = seen("mixtral")[0]
    scale = torch.linspace(0.2, 2.0, one.call.router.num_experts)[one.call.top_k_index]  # Gemma 4 has one factor per expert
    resident = np.arange(one.call.router.num_experts) < 3
    said: list[str] = []
    found = ResidentDraft(one.call.router).narrow(
        one.call.top_k_index, one.call.top_k_weights * scale, one.scoring, resident, TOP_K, said.append
    )
    expected = keep_resident(one.call.top_k_index, one.call.top_k_weights * scale, resident, TOP_K)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert len(said) == 1 and "do not follow" in said[0] and one.call.router.path in said[0]


def test_only_chosen_experts_draft_without_a_routers_output() -> None:
    one = seen("mixtral")[0]
    resident, said = np.arange(one.call.router.num_experts) < 3, []
    found = ResidentDraft(one.call.router).narrow(one.call.top_k_index, one.call.top_k_weights, None, resident, TOP_K, said.append)
    assert torch.equal(found[0], keep_resident(one.call.top_k_index, one.call.top_k_weights, resident, TOP_K)[0])
    assert "not seen" in said[0]


def _agreement(one: Seen, ranking: torch.Tensor) -> float:
    first = ranking.topk(one.call.top_k_index.shape[-1], dim=-1).indices
    return float((first[:, :, None] == one.call.top_k_index[:, None, :]).any(-1).float().mean())


def test_routers_without_corrections_rank_by_their_scores() -> None:
    one = seen("mixtral")[0]
    assert isinstance(one.call.router, Router)
    assert len(one.scoring.rankings) == 1
    assert torch.equal(one.scoring.rankings[0].argmax(-1), one.scoring.scores.argmax(-1))
