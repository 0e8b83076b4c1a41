"""Verification of drafts with a limited number of experts per layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import build_model, case_of, greedy, prompt

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path
from moegraft.injection.meta_model import find_model
from moegraft.injection.planning import plan
from moegraft.injection.rules import RuleErrors
from moegraft.injection.verify import verify
from moegraft.operators.draft import keep_heaviest

BUDGET = {"mode": "adaptive", "max_draft": 4}


def reference(index: torch.Tensor, weights: torch.Tensor, budget: int) -> torch.Tensor:
    """Which choices (T, K) stay, one expert at a time."""
    mass: dict[int, float] = {}
    for expert, weight in zip(index.flatten().tolist(), weights.flatten().tolist(), strict=True):
        mass[expert] = mass.get(expert, 0.0) + weight
    heaviest = sorted(mass, key=lambda expert: (-mass[expert], expert))[:budget]
    return torch.isin(index, torch.tensor(heaviest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 4, 8), (5, 2, 6), (6, 8, 128), (9, 3, 4)])
def test_the_heaviest_experts_of_all_tokens_are_kept(tokens: int, top_k: int, experts: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.randn(tokens, experts, generator=generator)
    weights, index = (8 * scores.softmax(-1)).round().div(8).to(dtype).topk(top_k)  # with ties
    for budget in range(1, experts + 1):
        kept = reference(index, weights.float(), budget)
        found_index, found_weights = keep_heaviest(index, weights, budget)
        assert torch.equal(found_index, index.where(kept, -1)) and torch.equal(found_weights, weights.where(kept, 0))
        assert found_weights.dtype == dtype and len(set(found_index.flatten().tolist()) - {-1}) <= budget


def test_padded_slots_stay_padded() -> None:
    index, weights = torch.tensor([[3, -1], [5, 3]]), torch.tensor([[0.2, 0.0], [0.6, 0.3]])
    assert keep_heaviest(index, weights, 1)[0].tolist() == [[-1, -1], [5, -1]]
    assert keep_heaviest(index, weights, 2)[0].tolist() == [[3, -1], [5, 3]]
    assert keep_heaviest(index[:0], weights[:0], 1)[0].shape == (0, 2)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_pass_with_a_budget_is_the_stock_models_without_the_other_experts(model_type: str, drafting: Any, stock: Any) -> None:
    model, expected = drafting(model_type, expert_budget=3, **BUDGET), stock(model_type)

    def truncate(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        states, index, weights = args
        return states, index, weights * reference(index, weights.float(), 3)

    for name, module in expected.named_modules():
        if name.endswith("experts") and not name.endswith("shared_experts"):
            module.register_forward_pre_hook(truncate)
    ids, switch = prompt(6), model.moegraft.context.draft_switch
    with torch.no_grad(), switch.drafting(model.moegraft.model_operator.options.verification):
        found = model(ids).logits
    with torch.no_grad():
        torch.testing.assert_close(found, expected(ids).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(model(ids).logits, found, atol=1e-3)


@pytest.mark.parametrize("draft", ["experts", "ngram"])
def test_a_budget_of_all_experts_changes_no_text_and_a_small_one_does(draft: str, drafting: Any, stock: Any) -> None:
    expected, ids = greedy(stock("olmoe"), prompt(20)), prompt(20)
    all_experts = drafting("olmoe", draft=draft, expert_budget=64, **BUDGET)
    assert torch.equal(greedy(all_experts, ids), expected)
    few = drafting("olmoe", draft=draft, expert_budget=1, **BUDGET)
    assert not torch.equal(greedy(few, ids), expected)
    statistics = few.moegraft.statistics()
    assert statistics["decode_steps"]["replayed_steps"] > 0 and statistics["decode_steps"]["reasons"] == []


def test_verify_prices_it_and_plans_state_it(tmp_path: Path) -> None:
    path, found = tmp_path / "rules.yaml", []
    for budget in (2, 8, 16):
        path.write_text(
            "version: 1\nextends: cpu-exact\nrules:\n- match: {kind: model}\n  replace: {class: speculative_draft, "
            f"kwargs: {{mode: adaptive, max_draft: 4, expert_budget: {budget}}}}}\n"
        )
        model = optimize_and_load(demo_path(), path, dtype=torch.float32, progress=False, threads=1)
        found.append(verify(model, find_model(str(demo_path())), torch.arange(3, 67)))
        assert found[-1].ok and max(layer.relative_error for layer in found[-1].layers) < 1e-2, "layers are compared without a budget"
    assert found[0].decode_loss == "at most 2 experts of a layer verify a draft of 4 tokens"
    assert found[0].logits.kl_nats > found[1].logits.kl_nats > 1e-3 > found[2].logits.kl_nats
    (notice,) = plan(build_model(case_of("qwen3_moe")), path).notices
    assert "lossy: at most 16 experts of a layer verify a draft of 4 tokens; 'moegraft verify' measures" in notice.message


def test_it_needs_experts_that_can_run_fewer(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    options = "{draft: ngram, mode: adaptive, expert_budget: 4}"
    path.write_text(f"version: 1\nrules:\n- match: {{kind: model}}\n  replace: {{class: speculative_draft, kwargs: {options}}}\n")
    with pytest.raises(RuleErrors, match="expert_budget limits the experts that verify a draft"):
        optimize_and_load(build_model(case_of("qwen3_moe")), path, progress=False)
