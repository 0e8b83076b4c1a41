"""Prompts that are computed in chunks: equal to one pass, with passes no longer than a chunk, for all families that keep states."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.families import FamilyCase, build_model, cache_layers, prompt, served_cases, stateful_cases

from moegraft.injection import new_cache, optimize_and_load
from moegraft.injection.cli.chat.prompt_cache import LEAST_STATE_CHUNK, read_ahead, why_not_appendable

TOLERANCE = 1e-5  # relative, in float32


APPENDED = [
    case
    for case in stateful_cases()
    if case.model_type != "minimax" and not any(type(layer).__name__ == "DynamicIndexedLayer" for layer in cache_layers(case))
]


def loaded(case: FamilyCase) -> Any:
    return optimize_and_load(build_model(case), "cpu-exact", progress=False)


@torch.no_grad()
def last_logits(model: Any, cache: Any, ids: list[int]) -> torch.Tensor:
    """Return the logits of a prompt's last token, of which `cache` has the beginning."""
    rest = torch.tensor([ids[cache.get_seq_length() :]])
    logits: torch.Tensor = model(input_ids=rest, past_key_values=cache, use_cache=True).logits[0, -1]
    return logits


def test_most_families_with_states_are_computed_in_chunks() -> None:
    found = {case.model_type for case in APPENDED}
    assert found >= {"qwen3_next", "qwen3_5_moe_text", "jamba", "nemotron_h", "granitemoehybrid", "lfm2_moe", "inkling_text", "zaya"}


@pytest.mark.parametrize("case", APPENDED, ids=lambda case: case.model_type)
def test_chunks_of_any_size_equal_one_pass(case: FamilyCase, long: bool) -> None:
    model = loaded(case)
    assert why_not_appendable(model) is None
    sizes: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[1]))
    for length, chunks in ((67, (1, 3, 64)), (68, (1, 3, 64)), (129, (1, 3, 64))) if long else ((67, (3,)), (129, (1, 64))):
        ids = prompt(length)[0].tolist()
        whole = last_logits(model, new_cache(model), ids)
        for chunk in chunks:
            sizes.clear()
            found = last_logits(model, read_ahead(model, ids, None, chunk), ids)
            assert float((found - whole).norm() / whole.norm()) < TOLERANCE, (length, chunk)
            assert sum(sizes) == length
            assert min(sizes) > 1 and max(sizes) <= max(chunk, LEAST_STATE_CHUNK)
    hook.remove()


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("minimax", "MiniMaxForCausalLM makes a cache of its own in its first forward pass"),
        ("glm5_next", "layer 1 is of kind .*_attention"),
        ("deepseek_v32", "layers 0, 1, 2 are of kind .*sparse_attention|indexed_attention"),
    ],
)
def test_other_families_are_computed_at_once(model_type: str, reason: str) -> None:
    case = next((case for case in served_cases() if case.model_type == model_type), None)
    if case is None:
        pytest.skip(f"this transformers has no {model_type}")
    model = loaded(case)
    assert re.search(reason, why_not_appendable(model) or "it can")
    assert read_ahead(model, prompt(40)[0].tolist(), None, 16) is None


def test_states_need_the_modules_of_a_loaded_model() -> None:
    case = next(case for case in APPENDED if case.model_type == "qwen3_next")
    assert "moegraft has not loaded it" in (why_not_appendable(build_model(case)) or "")
