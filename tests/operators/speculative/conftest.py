"""Fixtures that create tiny drafting models and their stock twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.families import FamilyCase, build_model, case_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path


def built(family: str | FamilyCase) -> PreTrainedModel:
    return build_model(case_of(family) if isinstance(family, str) else family)


RULES = """
version: 1
extends: cpu-exact
rules:
- match: {{kind: model}}
  replace: {{class: speculative_draft, kwargs: {{{options}}}}}
"""
DEMO = "demo"  # the bundled model, whose experts are trained
Make = Callable[..., PreTrainedModel]


@pytest.fixture(scope="session")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`drafting("qwen3_moe", draft_top_k=1, ...)`: that family's tiny model, or `DEMO`, with `speculative_draft` and a fixed schedule."""
    rules = tmp_path_factory.mktemp("speculative") / "rules.yaml"

    def make(model_type: str | FamilyCase = "qwen3_moe", dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
        options = {"schedule": "fixed", "max_draft": 4} | options
        rules.write_text(RULES.format(options=", ".join(f"{name}: {value}" for name, value in options.items())))
        source = demo_path() if model_type == DEMO else built(model_type).to(dtype)
        return optimize_and_load(source, rules, dtype=dtype if model_type == DEMO else None, progress=False)

    return make


@pytest.fixture(scope="session")
def stock() -> Make:
    """`stock("qwen3_moe")`: the same model without injection."""

    def make(model_type: str | FamilyCase = "qwen3_moe", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        if model_type == DEMO:
            return AutoModelForCausalLM.from_pretrained(demo_path(), dtype=dtype)
        return built(model_type).to(dtype)

    return make
