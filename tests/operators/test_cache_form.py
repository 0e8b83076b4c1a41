"""The bytes of a model's cache, measured on meta, beside those of a real one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import FamilyCase, build_config, build_model, model_class, prompt, stateful_cases, tiny_model

from moegraft.operators.cache_form import kv_cache
from moegraft.operators.decode.cache import cache_tensors


@pytest.mark.parametrize("case", [case for case in stateful_cases() if case.generates], ids=lambda case: case.model_type)
def test_states_are_counted_once_and_keys_and_values_for_each_token(case: FamilyCase) -> None:
    with torch.device("meta"):
        sizes = kv_cache(model_class(case)(build_config(case)))
    assert sizes.exact
    model: Any = build_model(case)
    measured = []
    for tokens in (1, 2, 12):
        with torch.no_grad():
            cache = model(input_ids=prompt(tokens), use_cache=True).past_key_values
        measured.append(sum(tensor.nbytes for _, tensor in cache_tensors(cache)))
        if not any(layer.window for layer in sizes.layers):
            assert sizes.nbytes(tokens) == measured[-1]
    assert sum(layer.bytes_per_token for layer in sizes.layers) == measured[1] - measured[0]
    numbers = 8 * len(sizes.layers)  # a layer has the size of its window as a tensor
    assert 0 <= sizes.state_bytes - (measured[0] - measured[1] + measured[0]) <= numbers
    assert sizes.state_bytes > numbers


def test_values_of_a_loaded_model_stay_in_their_range() -> None:
    """Its routers choose experts, which may be those of a GPU or of a disk."""
    model: Any = tiny_model()
    model.model.embed_tokens.weight.data *= 1e10  # as after many layers without norms
    seen: list[torch.Tensor] = []
    model.model.layers[-1].mlp.gate.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    sizes = kv_cache(model)
    assert sizes.exact and len(sizes.layers) == 2
    assert len(seen) == 2 and all(float(each.abs().max()) < 100 for each in seen)
    assert kv_cache(model.to("meta")) == sizes
