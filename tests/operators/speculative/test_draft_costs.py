"""The measured costs of drafts are those of the passes that are made, and break-even follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_layers
from support.mtp import write_checkpoint

from moegraft.injection import optimize_and_load
from moegraft.operators.decode.draft_costs import DraftCosts, measure_draft_costs
from moegraft.operators.draft import DraftSettings
from moegraft.operators.errors import UnsupportedModelError

RULES = """
version: 1
extends: cpu-exact
rules:
- match: {{kind: model}}
  replace: {{class: speculative_draft, kwargs: {{{options}}}}}
"""
TEXT = torch.randint(3, 60, (50,), generator=torch.Generator().manual_seed(1))  # shorter than what is measured


class FedTokens:
    """A clock that counts the tokens which the body is fed, each as a second."""

    def __init__(self, model: Any) -> None:
        self.seconds = 0.0
        model.get_decoder().layers[0].register_forward_pre_hook(self._count)

    def _count(self, module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        self.seconds += args[0].shape[1]

    def __call__(self) -> float:
        return self.seconds


def test_each_length_costs_the_tokens_that_it_feeds(drafting: Any) -> None:
    model = drafting("qwen3_moe", draft_top_k=1)
    model.moegraft.context.replay = None  # layer by layer, so that each pass is counted
    found = measure_draft_costs(model, model.moegraft.context, TEXT, longest=3, rounds=2, settings=DraftSettings(1), clock=FedTokens(model))
    fewer, ngram = found
    assert [costs.drafter for costs in found] == ["experts (1 per token)", "ngram"]
    assert fewer.plain_ms == ngram.plain_ms == 1e3
    assert fewer.verify_ms == ngram.verify_ms == [2e3, 3e3, 4e3]
    assert (fewer.draft_ms, ngram.draft_ms) == ([1e3, 2e3, 3e3], [0, 0, 0])
    assert fewer.needed(1) is None, "two tokens for three"
    without = measure_draft_costs(model, model.moegraft.context, TEXT, longest=1, rounds=1, settings=None)
    assert [costs.drafter for costs in without] == ["ngram"]


def test_programs_are_prepared_before_they_are_timed(drafting: Any) -> None:
    model = drafting("qwen3_moe", draft_top_k=1)
    context = model.moegraft.context
    measure_draft_costs(model, context, TEXT, longest=2, rounds=4, settings=DraftSettings(1))
    steps = model.moegraft.statistics()["decode_steps"]
    assert steps["replayed_steps"] > 2 * 4 * 3, "all lengths of both drafters are replayed"
    assert model.moegraft.model_operator.statistics()["rounds"] == 0, "the model's own statistics and schedule do not count them"


@pytest.mark.skipif(
    not hasattr(getattr(transformers.modeling_layers, "MtpModel", None), "forward_layer"), reason="MTP layers need a newer transformers"
)
def test_mtp_layers_are_measured_where_they_are_loaded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v3")
    (tmp_path / "rules.yaml").write_text(RULES.format(options="draft: mtp"))
    model = optimize_and_load(tmp_path, tmp_path / "rules.yaml", progress=False)
    model.moegraft.context.replay = None
    mtp, _ = measure_draft_costs(model, model.moegraft.context, TEXT, longest=2, rounds=2, clock=FedTokens(model))
    assert mtp.drafter == "mtp"
    assert (mtp.verify_ms, mtp.draft_ms) == ([2e3, 3e3], [0, 0]), "the body is not fed while MTP layers draft"


def test_without_a_cache_that_forgets_tokens_nothing_is_measured(drafting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = drafting("qwen3_moe", draft_top_k=1)
    monkeypatch.setattr("moegraft.operators.decode.drafts.unsupported_cache_reason", lambda cache: "this cache keeps every token")
    with pytest.raises(UnsupportedModelError, match="no drafts to measure: this cache keeps every token"):
        measure_draft_costs(model, model.moegraft.context, TEXT, longest=1, rounds=1)


def test_break_even_is_where_a_token_costs_as_much_as_a_plain_step() -> None:
    costs = DraftCosts("ngram", plain_ms=10.0, draft_ms=(0.0, 0.0), verify_ms=(15.0, 17.5))
    assert costs.needed(1) == pytest.approx(0.5, abs=1e-3)  # 1 + a = 1.5
    assert costs.needed(2) == pytest.approx(0.5, abs=1e-3)  # 1 + a + a^2 = 1.75
    assert costs.gain(2, 0.8) == pytest.approx((1 + 0.8 + 0.64) / 1.75)
    assert costs.best(0.8) == (2, costs.gain(2, 0.8))
    assert costs.best(0.3) == (0, 1.0), "plain decoding is faster"
    free = DraftCosts("ngram", plain_ms=10.0, draft_ms=(0.0,), verify_ms=(9.0,))
    assert free.needed(1) == pytest.approx(0, abs=1e-3)
