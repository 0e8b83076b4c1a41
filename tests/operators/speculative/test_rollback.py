"""A rewound cache equals that of a model that never saw the tokens, for every supported kind of layer; other kinds are rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from support import combinations
from support.families import build_config, build_model, case_of, model_class, prompt, served_cases
from transformers import DynamicCache, StaticCache

from moegraft.injection import optimize_and_load
from moegraft.operators.decode.rollback import CacheMark, longest_rewind, unsupported_cache_reason, unsupported_model_reason
from moegraft.operators.errors import RuleFileError

OLDEST = transformers.__version__.startswith("5.17")  # has other names for some kinds of layers
WINDOW = 16  # of the tiny models with sliding layers
CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=64),
}


REWINDS = [
    # tokens before, fed and kept of these
    (5, 4, 2),  # inside the window
    (5, 4, 0),
    (5, 4, 4),  # nothing to remove
    (13, 5, 1),  # feeding crosses the window, keeping does not
    (13, 5, 4),  # both do
    (15, 1, 0),  # the removed token fills the window
    (16, 3, 1),  # the window is exactly full
    (30, 6, 3),  # far beyond the window
    (30, 6, 0),
]


@pytest.mark.parametrize(("kind", "model_type", "rewind"), combinations(list(CACHES), ["qwen3_moe", "gpt_oss"], REWINDS), ids=str)
@torch.no_grad()
def test_a_rewound_cache_equals_one_that_was_never_fed(kind: str, model_type: str, rewind: tuple[int, int, int], stock: Any) -> None:
    """In full layers, and in sliding and full ones."""
    before, fed, kept = rewind
    model, ids, other = stock(model_type), prompt(60), prompt(60, seed=1)

    def feed(cache: Any, tokens: torch.Tensor) -> torch.Tensor:
        inputs = model.prepare_inputs_for_generation(tokens, past_key_values=cache, use_cache=True)
        return model(**inputs).logits

    found, expected = (CACHES[kind](model.config) for _ in range(2))
    for cache in (found, expected):
        feed(cache, ids[:, :before])
    mark = CacheMark(found)
    feed(found, other[:, :3])  # a draft, and back
    mark.rewind()
    feed(found, torch.cat([ids[:, before : before + kept], other[:, kept:fed]], -1))
    mark.rewind(keep=kept)
    for token in range(kept):
        feed(expected, ids[:, before + token : before + token + 1])
    assert int(found.get_seq_length()) == int(expected.get_seq_length()) == before + kept
    for token in range(before + kept, before + kept + 5):
        one = ids[:, token : token + 1]
        torch.testing.assert_close(feed(found, one), feed(expected, one), rtol=1e-4, atol=1e-4)


def test_windows_limit_the_longest_rewind(stock: Any) -> None:
    config = stock("gpt_oss").config
    assert longest_rewind(DynamicCache(config=config)) == WINDOW - 1
    assert longest_rewind(StaticCache(config=config, max_cache_len=64)) == WINDOW
    assert longest_rewind(DynamicCache()) is None


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("minimax", "MiniMaxForCausalLM makes a cache of its own"),
        ("glm5_next", f"layer 1 is of kind {'deepseek_sparse' if OLDEST else 'indexed'}_attention: it selects"),
        (
            "deepseek_v32",
            "sparse_attention: each selects other tokens to attend to"
            if OLDEST
            else "layers 0, 1, 2 are of kind indexed_attention: each selects",
        ),
        ("deepseek_v4", "compressed_sparse_attention"),
    ],
)
def test_models_that_cannot_be_rolled_back_are_reported_by_the_kind_of_layer(model_type: str, reason: str) -> None:
    case = next((case for case in served_cases() if case.model_type == model_type), None)
    if case is None:
        pytest.skip(f"this transformers has no {model_type}")
    with torch.device("meta"):
        model = model_class(case)(build_config(case))
    assert reason in (unsupported_model_reason(model) or "it can")


def test_models_are_refused_before_any_weight_is_read(tmp_path: Any) -> None:
    case = case_of("minimax")
    build_config(case).save_pretrained(tmp_path)
    with pytest.raises(RuleFileError, match="a cache of its own"):
        optimize_and_load(tmp_path, "speculative", dry_run=True)


def test_unknown_caches_are_decoded_without_drafts(drafting: Any, stock: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert "cannot be rolled back" in (unsupported_cache_reason(object()) or "")
    model = drafting("qwen3_moe")
    cache = DynamicCache(config=model.config, offloading=False)
    cache.offloading = True  # the flag of an offloaded cache; nothing is moved here
    assert "offloaded" in (unsupported_cache_reason(cache) or "")
    model.generate(prompt(5), max_new_tokens=4, do_sample=False, cache_implementation="offloaded" if torch.cuda.is_available() else None)


def test_a_draft_is_shorter_than_the_window(drafting: Any, stock: Any) -> None:
    """`max_draft` is 30, but only 14 tokens can be removed."""
    model = drafting("gpt_oss", draft_top_k=2, max_draft=30)
    found = model.generate(prompt(20), max_new_tokens=40, do_sample=False)
    assert torch.equal(found, stock("gpt_oss").generate(prompt(20), max_new_tokens=40, do_sample=False))
    assert len(model.moegraft.model_operator.statistics()["acceptance_by_position"]) == WINDOW - 2


@pytest.mark.parametrize("model_type", ["gpt_oss", "mixtral"])
def test_static_caches_with_windows_generate_stock_text(model_type: str, drafting: Any) -> None:
    """Compared with stock and the same cache; `build_model` builds equal models."""
    model = drafting(model_type, max_draft=4)
    stock = build_model(case_of(model_type))
    arguments = {"max_new_tokens": 40, "do_sample": False, "cache_implementation": "static"}
    assert torch.equal(model.generate(prompt(6), **arguments), stock.generate(prompt(6), **arguments))
    assert model.moegraft.model_operator.statistics()["rounds"] > 0
