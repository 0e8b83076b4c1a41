"""Models whose threads are in groups as of a machine with two sockets: logits and texts are to the bit those of one group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.families import build_model, case_of, prompt
from transformers import PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path
from moegraft.operators.errors import MoegraftError

TOKENS = torch.arange(2, 40)[None]


def load(folder: str | Path, nodes: int, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    monkeypatch.setenv("MOEGRAFT_NODES", str(nodes))
    model: PreTrainedModel = optimize_and_load(folder, "cpu", progress=False, threads=2)
    return model


def test_recorded_steps_and_prompts_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (load(demo_path(), nodes, monkeypatch) for nodes in (1, 2))
    assert "on 2 memory nodes" in "\n".join(operator.placement() for operator in two.moegraft.operators.values())
    assert torch.equal(one(TOKENS).logits, two(TOKENS).logits)
    texts = [model.generate(TOKENS, do_sample=False, min_new_tokens=60, max_new_tokens=60) for model in (one, two)]
    assert torch.equal(*texts)


@pytest.mark.parametrize("model_type", ["gpt_oss", "deepseek_v3", "qwen3_next"])  # biases, latent attention, states
@torch.no_grad()
def test_families_agree(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_model(case_of(model_type)).save_pretrained(tmp_path)
    one, two = (load(tmp_path, nodes, monkeypatch) for nodes in (1, 2))
    for tokens in (prompt(9, batch=2), prompt(70)):
        assert torch.equal(one(tokens).logits, two(tokens).logits)
    texts = [model.generate(prompt(5), do_sample=False, min_new_tokens=24, max_new_tokens=24) for model in (one, two)]
    assert torch.equal(*texts)


def test_a_wrong_variable_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGRAFT_NODES", "both")
    with pytest.raises(MoegraftError, match=r"MOEGRAFT_NODES is 'both'; it must be a number .*; 1 does not divide"):
        optimize_and_load(demo_path(), "cpu", progress=False)
