"""On the bundled model, which is trained, most drafts of few experts and of its MTP layer are accepted, and the text does not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import import_benchmark
from support.mtp import proposals
from transformers import AutoModelForCausalLM, PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path

PROMPT = torch.tensor([[0, 48, 721, 47, 565, 32, 205, 47, 590]])  # JULIET: I would
STEPS = 48
with_mtp = pytest.mark.skipif(
    not hasattr(getattr(transformers.modeling_layers, "MtpModel", None), "forward_layer"),
    reason="this transformers cannot compute MTP layers one by one",
)


def demo(folder: Path, dtype: str = "float32", **options: Any) -> PreTrainedModel:
    rules = folder / "rules.yaml"
    kwargs = ", ".join(f"{name}: {value}" for name, value in ({"schedule": "fixed", "max_draft": 4} | options).items())
    rules.write_text(
        f"version: 1\nextends: cpu-exact\nrules:\n- match: {{kind: model}}\n  replace: {{class: speculative_draft, kwargs: {{{kwargs}}}}}\n"
    )
    return optimize_and_load(demo_path(), rules, dtype=dtype, progress=False)


def write(model: PreTrainedModel, **arguments: Any) -> torch.Tensor:
    found = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **{"max_new_tokens": STEPS, "do_sample": False} | arguments)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return optimize_and_load(demo_path(), "cpu-exact", dtype="float32", progress=False)


@pytest.mark.parametrize(
    "options",
    [
        {"draft_top_k": 1},
        {"draft_top_k": 3, "max_draft": 7},
        {"draft": "ngram"},
        {"schedule": "marginal", "draft_top_k": 2},
        pytest.param({"draft": "mtp"}, marks=with_mtp),
        pytest.param({"draft": "mtp", "schedule": "marginal"}, marks=with_mtp),
    ],
    ids=str,
)
def test_drafts_do_not_change_the_trained_models_text(options: dict[str, Any], plain: PreTrainedModel, tmp_path: Path) -> None:
    model = demo(tmp_path, **options)
    assert torch.equal(write(model), write(plain))
    assert torch.equal(write(model, repetition_penalty=1.3), write(plain, repetition_penalty=1.3))


def test_drafts_of_more_experts_are_accepted_more_often(tmp_path: Path) -> None:
    shares = []
    for top_k in (1, 2, 3, 4):
        model = demo(tmp_path, draft_top_k=top_k)
        for seed in range(2):
            torch.manual_seed(seed)
            write(model, do_sample=True)
        shares.append(model.moegraft.model_operator.statistics()["tokens_per_round"])
    assert shares[0] > 1.5, "one expert of four drafts hardly anything that stands"
    assert shares[0] < shares[2] <= shares[3], f"tokens a round by experts that draft: {shares}"


def test_the_adaptive_mode_accepts_more_tokens(plain: PreTrainedModel, tmp_path: Path) -> None:
    lossless, adaptive = demo(tmp_path), demo(tmp_path, mode="adaptive", tolerance=0.8, confidence=0.05)
    for model in (lossless, adaptive):
        write(model, repetition_penalty=1.3)  # without it the text repeats itself, and nearly all drafts are accepted anyway
    found, before = (model.moegraft.model_operator.statistics() for model in (adaptive, lossless))
    assert found["tokens_per_round"] > before["tokens_per_round"]
    assert 0.5 < found["agreement"] < 1


@with_mtp
@torch.no_grad()
def test_the_mtp_layer_drafts_as_it_was_trained_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are those of the pass over whole windows that training makes, for states that were fed back too."""
    recipe, drafted = import_benchmark("train_demo"), proposals(monkeypatch)
    model = demo(tmp_path, draft="mtp", max_draft=3)
    ids = write(model)
    body = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32)
    layer = recipe.read_mtp(body, demo_path())
    whole = {length: tokens for length, tokens in drafted.items() if len(tokens) == 3}
    assert len(whole) > 5
    for length, tokens in whole.items():
        text = torch.cat([ids[:, :length], torch.tensor([tokens])], dim=1)
        depths = recipe.drafted_logits(layer, body, text, recipe.body_states(body, text), 3)
        assert tokens == [int(logits[0, length - 2 + depth].argmax()) for depth, logits in enumerate(depths)]
    assert model.moegraft.model_operator.statistics()["acceptance_by_position"][0] > 0.5
