"""Recurrent states that are kept and put back, and passes over several tokens that leave those after each of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import FamilyCase, build_model, prompt, stateful_cases
from transformers import DynamicCache

from moegraft.injection import optimize_and_load
from moegraft.operators.decode.cache import new_cache
from moegraft.operators.decode.rollback import CacheMark, unsupported_model_reason
from moegraft.operators.decode.states import TENSORS, SavedStates, drop_past

RECURRENT = [case for case in stateful_cases() if case.model_type != "minimax"]  # which makes a cache of its own


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


# Each row of what these kernels compute has the same bits in any number of rows.
BY_ROWS = """
version: 1
extends: cpu-exact
rules:
- {match: {kind: linear}, replace: {class: quantized_linear, kwargs: {weights: stored}}}
- {match: {kind: norm}, replace: {class: cpu_norm}, expect: any}
- {match: {kind: router}, replace: {class: cpu_router}, expect: any}
"""
WHOLE = ("granitemoehybrid", "nemotron_h", "zaya")  # models without operations of PyTorch whose rows depend on their number
# Such operations in front of the states: Jamba's norms of parts of a projection, and decays of fewer heads than a vector has lanes.
ROUNDED = ("jamba", "kimi_linear", "qwen3_5_moe_text", "qwen3_next")


def held(cache: Any) -> list[list[torch.Tensor]]:
    """Return copies of the tensors of each layer."""
    found = []
    for layer in cache.layers:
        states = [tensor for name in TENSORS for tensor in getattr(layer, name, {}).values()]
        rows = [getattr(layer, name, None) for name in ("keys", "values")]
        found.append([tensor.clone() for tensor in (*states, *rows) if tensor is not None])
    return found


@pytest.mark.parametrize("case", RECURRENT, ids=lambda case: case.model_type)
def test_a_pass_leaves_the_states_after_each_of_its_tokens(case: FamilyCase, tmp_path: Path, long: bool) -> None:
    """As speculation does it: drafts of one token, back, a pass over several, back to the states after some of them."""
    (tmp_path / "rules.yaml").write_text(BY_ROWS)
    model, ids = optimize_and_load(build_model(case), tmp_path / "rules.yaml", progress=False), prompt(15)
    if (reason := unsupported_model_reason(model)) is not None:
        pytest.skip(reason)
    begun = DynamicCache(config=model.config.get_text_config(decoder=True))  # not moegraft's own: no step is replayed
    fed(model, begun, ids[:, :10])
    plain = copy.deepcopy(begun)
    logits, after = [], [held(plain)]
    for token in range(10, 15):
        logits.append(fed(model, plain, ids[:, token : token + 1]))
        after.append(held(plain))
    for keep in range(6) if long else (0, 2, 5):
        cache = copy.deepcopy(begun)
        mark = CacheMark(cache, 5)
        fed(model, cache, ids[:, 3:4])
        fed(model, cache, ids[:, 4:5])
        mark.rewind()
        for mine, expected in zip(held(cache), after[0], strict=True):
            assert all(map(torch.equal, mine, expected))
        together = fed(model, cache, ids[:, 10:15])
        torch.testing.assert_close(together, torch.cat(logits), rtol=1e-4, atol=1e-5)
        mark.rewind(keep=keep)
        drop_past(cache)
        found = held(cache)
        for mine, expected in zip(found, after[keep], strict=True):
            for a, b in zip(mine, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        # Whatever other kernels do, the states of the first layer follow from the embeddings of the tokens.
        first = [(found[0][:2], after[keep][0][:2])] if case.model_type not in ROUNDED else []
        exact = first if case.model_type not in WHOLE else zip(found, after[keep], strict=True)
        assert all(all(map(torch.equal, mine, expected)) for mine, expected in exact), keep
        if case.model_type in WHOLE:
            assert torch.equal(together, torch.cat(logits))
        following = fed(model, cache, ids[:, 5:6]), fed(model, restarted(model, ids[:, : 10 + keep]), ids[:, 5:6])
        torch.testing.assert_close(*following, rtol=1e-3, atol=1e-3)


def restarted(model: Any, ids: torch.Tensor) -> Any:
    cache = new_cache(model)
    fed(model, cache, ids)
    return cache


RULES = "version: 1\nrules:\n- {match: {kind: experts}, replace: {class: hybrid_experts}}\n"


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "no kernels"])
def test_passes_are_computed_at_once(kernels: bool, tmp_path: Path) -> None:
    """Without kernels, those of which the cache keeps the states are not, and of these, only as many tokens as it has room for."""
    case = next(case for case in RECURRENT if case.model_type == "qwen3_next")
    (tmp_path / "rules.yaml").write_text(RULES)
    model = optimize_and_load(build_model(case), "cpu-exact" if kernels else tmp_path / "rules.yaml", progress=False)
    ids = prompt(20)
    cache, sizes = new_cache(model), list[int]()
    linear = model.model.layers[0].linear_attn.in_proj_qkvz
    fed(model, cache, ids[:, :10])
    hook = linear.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[1]))
    fed(model, cache, ids[:, 10:13])
    mark = CacheMark(cache, 3)
    fed(model, cache, ids[:, 13:16])
    mark.rewind()
    fed(model, cache, ids[:, 13:17])
    drop_past(cache)
    fed(model, cache, ids[:, 17:20])
    hook.remove()
    assert sizes == ([3, 3, 4, 3] if kernels else [3, 1, 1, 1, 4, 3])


def test_a_state_that_kernels_do_not_know_is_kept_token_by_token() -> None:
    case = next(case for case in RECURRENT if case.model_type == "qwen3_next")
    model, ids = optimize_and_load(build_model(case), "cpu-exact", progress=False), prompt(20)
    linear, sizes = model.model.layers[0].linear_attn, list[int]()
    linear.in_proj_qkvz.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[1]))
    caches = [new_cache(model), new_cache(model)]
    for cache in caches:
        fed(model, cache, ids[:, :10])
        states = cache.layers[0].recurrent_states
        states[0] = states[0].to(torch.float64)
    mark = CacheMark(caches[0], 4, singly=False)
    fed(model, caches[0], ids[:, 10:14])
    mark.rewind(keep=2)
    for token in (10, 11):
        fed(model, caches[1], ids[:, token : token + 1])
    assert sizes[-7:] == [4, 1, 1, 1, 1, 1, 1]  # the attempt changes nothing
    for mine, expected in zip(held(caches[0]), held(caches[1]), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
    drop_past(caches[0])
