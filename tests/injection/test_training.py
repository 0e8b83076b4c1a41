"""Training beside packed weights: gradients and losses are the stock model's, and what has no backward pass is refused when it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import build_model, case_of
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path
from moegraft.operators.errors import UnsupportedModelError

FAMILIES = [
    "qwen3_moe",
    "gpt_oss",  # clamped and biased gates
    "deepseek_v3",  # latent attention, a router with groups
    "qwen3_next",  # recurrent layers
]
WORDS = 60  # of the vocabulary that prompts have, fewer than any of these models knows


def ids(seed: int = 0, batch: int = 2, length: int = 24, most: int = WORDS) -> torch.Tensor:
    return torch.randint(3, most, (batch, length), generator=torch.Generator().manual_seed(seed))


def step(model: PreTrainedModel, given: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss, and the gradients of all parameters."""
    model.train()
    model.zero_grad()
    loss = model(input_ids=given, labels=given, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def cosine(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the cosine of the gradients of all parameters that both models have."""
    assert found and found.keys() <= expected.keys()
    pair = (torch.cat([grads[name].double().flatten() for name in found]) for grads in (found, expected))
    return float(torch.nn.functional.cosine_similarity(*pair, 0))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_gradients_are_those_of_the_stock_model(model_type: str, tmp_path: Path) -> None:
    stock = build_model(case_of(model_type))
    stock.save_pretrained(tmp_path)
    expected_loss, expected = step(stock, ids())
    loss, found = step(optimize_and_load(tmp_path, "cpu-exact", progress=False), ids())
    left_out = expected.keys() - found.keys()
    assert left_out and all(".experts." in name for name in left_out)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    assert cosine(found, expected) > 0.99999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_beside_int8_are_near_the_stock_models(dtype: torch.dtype) -> None:
    given = ids(length=64, most=500)
    _, expected = step(AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32), given)
    _, found = step(optimize_and_load(demo_path(), "train", dtype=dtype, progress=False), given)
    assert len(found) > 20
    assert cosine(found, expected) > (0.999 if dtype == torch.float32 else 0.998)


@pytest.mark.parametrize("rules", ["train", "cpu-exact"])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_of_activations_changes_nothing(rules: str, use_reentrant: bool) -> None:
    """The first pass of a reentrant checkpoint has no gradients, and the second one has."""
    model = optimize_and_load(demo_path(), rules, progress=False)
    model.enable_input_require_grads()
    loss, expected = step(model, ids(most=500))
    expected = {name: grad.clone() for name, grad in expected.items()}
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    again, found = step(model, ids(most=500))
    assert torch.equal(loss, again)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_evaluation_uses_the_kernels_again() -> None:
    model, given = optimize_and_load(demo_path(), "train", progress=False), ids(most=500)
    with torch.no_grad():
        expected = model(given).logits
        model.train()
        trained = model(given).logits
        assert torch.equal(model.eval()(given).logits, expected)
    assert not torch.equal(trained, expected)  # PyTorch's attention and norms sum in another order
    torch.testing.assert_close(trained, expected, rtol=0.1, atol=0.5)


REFUSED = {
    "sparsity": ("kwargs: {weights: int8, sparsity: {target: 0.5, scope: routed}}", "remove it"),
    "gpu": ("kwargs: {weights: int8, gpu: auto}", "set gpu: none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_backward_pass_is_refused_at_the_start(name: str, tmp_path: Path) -> None:
    kwargs, advice = REFUSED[name]
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"version: 1\nrules:\n- match: {{kind: experts}}\n  replace: {{class: hybrid_experts, {kwargs}}}\n")
    model = optimize_and_load(demo_path(), rules, progress=False)
    with pytest.raises(UnsupportedModelError, match=rf"cannot be trained: model\.layers\.0\.mlp\.experts: .*no gradients; {advice}"):
        model.train()
    assert not any(module.training for module in model.modules())
    assert model.eval() is model


def rows() -> list[dict[str, Any]]:
    """Return a batch of four texts, several times."""
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in ids(batch=4, length=32, most=500)] * 6


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, learning_rate=1e-3, **options)


def test_the_trainer_accumulates_gradients(tmp_path: Path) -> None:
    """transformers' Trainer on the layers that stay; adapters are tested where PEFT is."""
    losses = []
    for batch, steps in ((4, 1), (2, 2)):
        model = optimize_and_load(demo_path(), "train", dtype=torch.float32, progress=False)
        options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps, "max_steps": 3}
        trainer = Trainer(model, arguments(tmp_path, **options), train_dataset=rows())
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 3 and losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)  # int8 kernels round by the number of tokens
