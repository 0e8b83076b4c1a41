"""The bytes of a model's cache, measured on meta, beside those of a real one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import FamilyCase, build_config, build_model, model_class, prompt, served_cases
from transformers import DynamicCache

from moegraft.operators.cache_form import kv_cache
from moegraft.operators.decode.cache import cache_tensors
from moegraft.operators.decode.states import has_states


def _keeps_states(case: FamilyCase) -> bool:
    try:
        cache = DynamicCache(config=build_config(case).get_text_config(decoder=True))
    except (AttributeError, ValueError):
        return False
    return case.generates and any(map(has_states, cache.layers))


@pytest.mark.parametrize("case", list(filter(_keeps_states, served_cases())), ids=lambda case: case.model_type)
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
