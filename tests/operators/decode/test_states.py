"""Recurrent states that are kept and put back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.families import FamilyCase, build_config, build_model, prompt, served_cases
from transformers import DynamicCache

from moegraft.operators.decode.cache import new_cache
from moegraft.operators.decode.states import TENSORS, SavedStates, has_states


def _keeps_states(case: FamilyCase) -> bool:
    if case.model_type == "minimax":  # makes a cache of its own, which is not one of ours
        return False
    try:
        cache = DynamicCache(config=build_config(case).get_text_config(decoder=True))
    except (AttributeError, ValueError):
        return False
    return any(has_states(layer) for layer in cache.layers)


RECURRENT = [case for case in served_cases() if _keeps_states(case)]


def fed(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits (T, V) of tokens (1, T) that follow those of a cache."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0]
    return logits


def test_the_families_with_states_are_those_of_which_transformers_says_so() -> None:
    found = {case.model_type for case in RECURRENT}
    assert found >= {"qwen3_next", "qwen3_5_moe_text", "jamba", "nemotron_h", "granitemoehybrid", "kimi_linear", "lfm2_moe"}


@pytest.mark.parametrize("case", RECURRENT, ids=lambda case: case.model_type)
@pytest.mark.parametrize("new", [False, True], ids=["in place", "into a copy"])
def test_a_restored_cache_goes_on_as_before(case: FamilyCase, new: bool) -> None:
    model, ids = build_model(case), prompt(15)
    cache = new_cache(model)
    fed(model, cache, ids[:, :9])
    at_nine, saved = copy.deepcopy(cache), SavedStates(cache)
    first = torch.cat([fed(model, cache, ids[:, n : n + 1]) for n in range(9, 12)])
    if new:
        for layer in at_nine.layers:
            for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
                states.update(dict.fromkeys(states))
        cache = at_nine
    else:
        for layer, before in zip(cache.layers, at_nine.layers, strict=True):
            states = {name: vars(layer).get(name) for name in TENSORS}
            vars(layer).update({**vars(before), **{name: value for name, value in states.items() if value is not None}})
    saved.restore(cache)
    assert torch.equal(torch.cat([fed(model, cache, ids[:, n : n + 1]) for n in range(9, 12)]), first)
    assert saved.nbytes > 0
