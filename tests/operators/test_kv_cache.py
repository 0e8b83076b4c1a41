"""`quantized_kv_cache`: `generate` over transformers' quantised cache, by each backend that is installed, and what it rejects."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support import import_benchmark
from support.families import build_model, case_of, prompt
from support.rule_support import findings_of, write
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import QuantizedCache, QuantizedLayer

from moegraft.injection import optimize_and_load
from moegraft.injection.cli.chat.conversation import SavedChat, read_chat, write_chat
from moegraft.injection.cli.chat.prompt_cache import PromptCache, read_ahead
from moegraft.injection.demo import demo_path
from moegraft.injection.injected import new_cache
from moegraft.injection.meta_model import find_model
from moegraft.injection.planning import plan
from moegraft.injection.rules import RuleErrors, read_rules
from moegraft.injection.verify import verify
from moegraft.operators import kv_cache as kv_options
from moegraft.operators.cache_form import QuantisedForm, kv_cache
from moegraft.operators.decode.coded_cache import CodedCache
from moegraft.operators.decode.pages import PAGE_TOKENS, UnreadPagesError
from moegraft.operators.decode.states import TENSORS, has_states
from moegraft.operators.kv_cache import QuantizedKvCache
from moegraft.operators.registry import load_registry

cache_bytes = import_benchmark("kv_cache").cache_bytes
RULE = "- match: {{kind: model}}\n  replace: {{class: quantized_kv_cache, kwargs: {{{options}}}}}\n"
DRAFTS = "- match: {{kind: model}}\n  replace: {{class: speculative_draft, kwargs: {{schedule: fixed, {options}}}}}\n"
PROMPT, NEW = 150, 40
BACKENDS = [
    pytest.param("hqq", marks=pytest.mark.skipif(find_spec("hqq") is None, reason="hqq is not installed")),
    pytest.param("fp8", marks=pytest.mark.skipif(not hasattr(kv_options.cache_utils, "Fp8QuantizedLayer"), reason="no fp8 cache")),
]
BACKENDS.append(pytest.param("native"))
HQQ = BACKENDS[0].marks[0]
# Relative error of the logits after 150 tokens with random weights: about twice the measured errors.
TOLERANCE = {("hqq", 8): 0.006, ("hqq", 4): 0.08, ("hqq", 2): 0.4, ("fp8", 8): 0.08, ("native", 8): 0.006}


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., PreTrainedModel]:
    def load(model_type: str = "qwen3_moe", options: str = "", *, extends: str = "cpu-exact", more: str = "") -> PreTrainedModel:
        path = tmp_path / "rules.yaml"
        path.write_text(f"version: 1\nextends: {extends}\nrules:\n{RULE.format(options=options)}{more}")
        found: PreTrainedModel = optimize_and_load(stock(model_type), path, progress=False, threads=1)
        return found

    return load


def form_of(model: Any) -> QuantisedForm:
    (options,) = [swap.options for swap in model.moegraft.plan.swaps if swap.operator == QuantizedKvCache.name]
    form = QuantizedKvCache.traits(options).cache_form
    assert form is not None
    return form(model.config)


def stock(model_type: str = "qwen3_moe") -> PreTrainedModel:
    return build_model(case_of(model_type)).eval()


def answer(model: PreTrainedModel, **arguments: Any) -> Any:
    settings: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    return model.generate(arguments.pop("ids", prompt(PROMPT, batch=1, seed=3)), **{**settings, **arguments})


@torch.no_grad()
def followed(model: PreTrainedModel, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of the tokens after the prompt, which are fed one by one, so that all caches see the same tokens."""
    call: Any = model
    call(input_ids=ids[:, :PROMPT], past_key_values=cache)
    return torch.stack([call(input_ids=ids[:, at : at + 1], past_key_values=cache).logits[0, -1] for at in range(PROMPT, ids.shape[1])])


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_stay_close_and_the_cache_is_smaller(backend: str, load) -> None:  # type: ignore[no-untyped-def]
    ids = prompt(PROMPT + NEW, batch=1, seed=3)
    for bits in kv_options.STORAGES[backend].bits:  # type: ignore[index]
        model = load(options=f"backend: {backend}, bits: {bits}")
        plain, quantised = DynamicCache(config=model.config), new_cache(model)
        expected, found = followed(model, plain, ids), followed(model, quantised, ids)
        error = float((found - expected).norm() / expected.norm())
        assert 0 < error < TOLERANCE[backend, bits], f"{bits} bits: {error:.4f}"
        form = form_of(model)
        bytes_per_token = 4 * 2 * 2 * 16  # float32, keys and values, heads, width
        waiting = replace(form, residual=min(form.residual, NEW))  # what came after the prompt is not quantised yet
        counted, most = (each.layer_bytes(bytes_per_token, 4, PROMPT + NEW) * len(plain.layers) for each in (waiting, form))
        if backend == "native":  # in pages, some of which are empty
            assert counted <= cache_bytes(quantised) <= 1.5 * counted
        else:
            assert cache_bytes(quantised) == pytest.approx(counted, rel=0.01)
        assert counted <= most < cache_bytes(plain)


@HQQ
def test_generate_creates_a_quantised_cache_for_each_call(load, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    model, expected = load(options="bits: 8"), answer(stock())
    with caplog.at_level(logging.INFO, "moegraft"):
        first, second = answer(model), answer(model)
    assert isinstance(first.past_key_values, QuantizedCache) and first.past_key_values is not second.past_key_values
    assert torch.equal(first.sequences, second.sequences)
    agree = (first.sequences == expected.sequences)[0, PROMPT:].float().mean()
    assert agree > 0.9, agree
    assert model.moegraft.statistics()["modules"]["(the model)"] == {"quantised_caches": 2}
    assert "1 x key-value cache: quantized_kv_cache, 8 bits by hqq, groups of 16" in model.moegraft.placement()
    assert "not quantised" not in caplog.text


def test_generate_decodes_over_codes(load, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    model, expected = load(options="backend: native"), answer(stock())
    found, again = answer(model), answer(model)
    assert isinstance(found.past_key_values, CodedCache) and torch.equal(found.sequences, again.sequences)
    assert (found.sequences == expected.sequences)[0, PROMPT:].float().mean() > 0.9
    assert "1 x key-value cache: quantized_kv_cache, 8 bits by native, a scale for each token of a head" in model.moegraft.placement()
    batch = prompt(30, batch=3, seed=5)
    together, alone = (answer(model, ids=ids).sequences for ids in (batch, batch[1:2]))
    assert torch.equal(together[1:2], alone)
    mask = torch.ones_like(batch)
    mask[0, :5] = 0
    assert torch.equal(answer(model, ids=batch, attention_mask=mask).sequences, answer(stock(), ids=batch, attention_mask=mask).sequences)
    assert "a batch with padding has other positions" in caplog.text


class Observed(TorchDispatchMode):
    """While it is entered, steps run layer by layer."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_steps_over_codes_are_native_programs(model_type: str, batch: int, load) -> None:  # type: ignore[no-untyped-def]
    model, ids = load(model_type, "backend: native"), prompt(70, batch=batch, seed=3)
    with Observed():
        expected = answer(model, ids=ids, output_logits=True)
    assert model.moegraft.statistics()["decode_steps"]["replayed_steps"] == 0
    for _ in range(2):  # the second time with programs of the first
        found = answer(model, ids=ids, output_logits=True)  # 110 tokens: pages are added in between
        for row, wanted in zip(found.logits, expected.logits, strict=True):
            assert float((row - wanted).norm()) <= 1e-3 * float(wanted.norm())
    done = model.moegraft.statistics()["decode_steps"]
    assert done["replayed_steps"] > NEW and not done["reasons"]
    assert found.past_key_values.get_seq_length() == ids.shape[1] + NEW - 1


def test_programs_serve_caches_of_any_number_of_pages(load) -> None:  # type: ignore[no-untyped-def]
    """Also where each of the first steps, which are recorded, is over a cache with other pages than the last."""
    model = load(options="backend: native")
    for length in (40, 60, 100, 150, 210):
        answer(model, ids=prompt(length, batch=1, seed=3), max_new_tokens=2, min_new_tokens=2)
    ids = prompt(70, batch=1, seed=3)
    with Observed():
        expected = answer(model, ids=ids)
    replayed = model.moegraft.statistics()["decode_steps"]["replayed_steps"]
    assert torch.equal(answer(model, ids=ids).sequences, expected.sequences)
    done = model.moegraft.statistics()["decode_steps"]
    assert done["replayed_steps"] >= replayed + NEW - 5 and not done["reasons"]


def test_a_pass_over_other_sequences_than_the_cache_has_is_refused(load) -> None:  # type: ignore[no-untyped-def]
    model, ids = load(options="backend: native"), prompt(20, batch=3, seed=3)
    cache = new_cache(model)
    answer(model, ids=ids[:1])  # with programs for one sequence
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        with pytest.raises(ValueError, match="the cache holds 3 sequences, and the pass has 1"):
            model(input_ids=ids[:1, :1], past_key_values=cache)


def test_a_cache_of_codes_serves_after_an_interrupted_pass(load) -> None:  # type: ignore[no-untyped-def]
    model, ids = load(options="backend: native"), prompt(60, batch=1, seed=3)
    expected = answer(model, ids=ids)
    cache = new_cache(model)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        with (
            pytest.raises(KeyboardInterrupt),
            torch.nn.modules.module.register_module_forward_pre_hook(
                lambda module, args: interrupt() if module is model.model.layers[1] else None
            ),
        ):
            model(input_ids=torch.cat([ids, ids, ids], dim=1), past_key_values=cache)
        cache.crop(-cache.get_seq_length())
        model(input_ids=ids[:, :40], past_key_values=cache)  # of fewer pages than the first layer has
    assert torch.equal(answer(model, ids=ids, past_key_values=cache).sequences, expected.sequences)
    assert cache.moegraft.room <= 20


def test_a_cache_of_codes_serves_after_interrupted_growth(load, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    model, ids = load(options="backend: native"), prompt(300, batch=1, seed=3)
    expected, cache = answer(model, ids=ids), new_cache(model)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        model(input_ids=ids[:, :40], past_key_values=cache)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(torch, "arange", interrupt)  # where Python would handle the signal
        cache.moegraft.reserve(1000)
    assert torch.equal(answer(model, ids=ids, past_key_values=cache).sequences, expected.sequences)


def test_codes_serve_calls_that_remove_tokens(load, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    model = load(options="backend: native")
    found = answer(model, prompt_lookup_num_tokens=3)
    assert isinstance(found.past_key_values, CodedCache) and torch.equal(found.sequences, answer(model).sequences)
    assert not caplog.text


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "qwen3_next"])
def test_a_conversation_over_codes_goes_on_where_it_changed(model_type: str, load) -> None:  # type: ignore[no-untyped-def]
    model, ids = load(model_type, "backend: native"), prompt(300, batch=1, seed=3)
    shared = PromptCache(model)
    cache, _ = shared.take(ids[0].tolist())
    first = answer(model, ids=ids, past_key_values=shared.read_ahead(ids[0].tolist(), cache, 64))
    shared.keep(first.sequences[0].tolist(), first.past_key_values)
    changed = torch.cat([first.sequences[:, :310], prompt(20, batch=1, seed=5)], dim=1)
    cache, reused = shared.take(changed[0].tolist())
    assert isinstance(cache, CodedCache) and reused == (292 if model_type == "qwen3_next" else 310)  # states: from a checkpoint
    assert torch.equal(answer(model, ids=changed, past_key_values=cache).sequences, answer(model, ids=changed).sequences)


@pytest.mark.parametrize("backend", BACKENDS)
def test_verify_prices_the_cache(backend: str, tmp_path: Path) -> None:
    path, found = tmp_path / "rules.yaml", {}
    for options in (None, *(f"backend: {backend}, bits: {bits}" for bits in kv_options.STORAGES[backend].bits)):  # type: ignore[index]
        rules = "" if options is None else f"rules:\n{RULE.format(options=options)}"
        path.write_text(f"version: 1\nextends: cpu-exact\n{rules}")
        model = optimize_and_load(demo_path(), path, dtype=torch.float32, progress=False, threads=1)
        found[options] = verify(model, find_model(str(demo_path())), prompt(200, batch=1, seed=3)[0])
        assert found[options].ok
        if options is not None:
            assert "lossy: keys and values are read in" in model.moegraft.plan.notices[0].message
    exact, *losses = (each.logits.kl_nats for each in found.values())
    assert exact < 1e-6 and all(loss > 3 * exact for loss in losses)
    assert losses == sorted(losses, reverse=True)  # the fewer bits, the more


def test_verify_prices_all_that_decode_steps_lose(tmp_path: Path) -> None:
    path, kl = tmp_path / "rules.yaml", {}
    codes, drafts = (
        RULE.format(options="backend: native"),
        DRAFTS.format(options="draft: ngram, mode: adaptive, expert_budget: 4, max_draft: 1"),
    )
    for rules in (codes, drafts, codes + drafts):
        path.write_text(f"version: 1\nextends: cpu-exact\nrules:\n{rules}")
        model = optimize_and_load(demo_path(), path, dtype=torch.float32, progress=False, threads=1)
        found = verify(model, find_model(str(demo_path())), prompt(100, batch=1, seed=3)[0])
        kl[rules] = found.logits.kl_nats
    assert found.decode_loss is not None
    assert "read in 8 bits by native and at most 4 experts of a layer verify a draft" in found.decode_loss
    assert kl[codes + drafts] != kl[drafts] and kl[codes + drafts] > 3 * kl[codes]
    assert kl[codes + drafts] < 1.2 * kl[drafts], "the budget is that of a draft's passes, over two tokens"


def test_codes_can_be_cropped_and_copied(load) -> None:  # type: ignore[no-untyped-def]
    model, ids = load("gpt_oss", "backend: native"), prompt(60, batch=1, seed=3)
    cache = new_cache(model)
    with torch.inference_mode():
        model(input_ids=ids[:, :50], past_key_values=cache)
        other = copy.deepcopy(cache)
        wanted = model(input_ids=ids[:, 50:], past_key_values=cache).logits
        cache.crop(-10)
        assert cache.get_seq_length() == 50
        for each in (cache, other):
            assert torch.equal(model(input_ids=ids[:, 50:], past_key_values=each).logits, wanted)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"output_attentions": True, "return_dict_in_generate": True}, "the call asks for attention weights"),
        ({"pad_token_id": 7}, "a batch with padding has other positions"),  # `generate` makes a mask of these
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])}, "a batch with padding has other positions"),
        (None, "the model is in training mode"),
    ],
)
def test_calls_in_which_attention_reads_no_codes_have_the_plain_cache(arguments, reason, load, caplog) -> None:  # type: ignore[no-untyped-def]
    model, ids = load(options="backend: native"), torch.tensor([[7, 4, 5, 6, 3], [3, 4, 5, 6, 8]])
    if arguments is None:
        model.train()
    with caplog.at_level(logging.WARNING):
        model.generate(ids, max_new_tokens=3, do_sample=False, **(arguments or {}))
    assert any(f"the cache is not quantised: {reason}" in line for line in caplog.messages)
    assert model.moegraft.statistics()["modules"]["(the model)"]["quantised_caches"] == 0


def test_a_padding_token_that_ends_texts_is_no_padding(load) -> None:  # type: ignore[no-untyped-def]
    """`generate` makes no mask of it: it may be the end of an earlier answer."""
    model = load(options="backend: native")
    ids = torch.tensor([[3, 7, 5, 6, 8]])
    model.generation_config.eos_token_id = 7
    model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=7, eos_token_id=None)  # now it ends none
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 7, 9
    model.generate(ids, generation_config=GenerationConfig(max_new_tokens=3, do_sample=False))  # with the model's own tokens
    assert model.moegraft.statistics()["modules"]["(the model)"]["quantised_caches"] == 0
    model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=7, eos_token_id=[9, 7])
    assert model.moegraft.statistics()["modules"]["(the model)"]["quantised_caches"] == 1


def test_a_cache_of_codes_is_reset_and_keeps_its_sequences(load) -> None:  # type: ignore[no-untyped-def]
    model, ids = load(options="backend: native"), prompt(9, batch=3)
    cache = new_cache(model)
    with torch.no_grad():
        model(input_ids=ids[:1], past_key_values=cache)
        cache.reset()
        found = model(input_ids=ids, past_key_values=cache).logits
        expected = model(input_ids=ids, past_key_values=new_cache(model)).logits
    assert torch.equal(found, expected)
    for change in (lambda: cache.batch_repeat_interleave(2), lambda: cache.reorder_cache(torch.tensor([2, 1, 0]))):
        with pytest.raises(NotImplementedError, match="beam search needs another cache"):
            change()


def test_a_mask_that_pages_do_not_have_is_refused(load) -> None:  # type: ignore[no-untyped-def]
    model, ids = load("gpt_oss", "backend: native"), prompt(40, batch=2, seed=3)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with pytest.raises(UnreadPagesError, match="have no padding"):
        model(input_ids=ids, attention_mask=mask, past_key_values=new_cache(model))


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("- match: {kind: attention}\n  replace: {class: default}\n", "are read by cpu_attention alone; add a rule"),
        ("", "scales queries by the number of tokens"),
    ],
)
def test_codes_that_no_attention_reads_are_refused(rule: str, reason: str, load) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RuleErrors, match=reason):
        load("qwen3_moe" if rule else "llama4_text", "backend: native", more=rule)


@HQQ
def test_calls_that_cannot_use_a_quantised_cache_get_another_and_one_warning(load, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    model, expected = load(), answer(stock()).sequences
    calls: list[tuple[Callable[[], dict[str, Any]], str]] = [
        (lambda: {"past_key_values": DynamicCache(config=model.config)}, "a cache of its own (DynamicCache)"),
        (lambda: {"cache_implementation": "static", "disable_compile": True}, "sets cache_implementation to static"),
        (lambda: {"use_cache": False}, "sets use_cache to False"),
        (lambda: {"prompt_lookup_num_tokens": 2}, "cannot be removed from a quantised cache"),
    ]
    for arguments, reason in calls:
        caplog.clear()
        for _ in range(2):
            assert torch.equal(answer(model, **arguments()).sequences, expected)
        assert sum(reason in record.message for record in caplog.records) == 1
    caplog.clear()
    assert torch.equal(answer(model, num_beams=2).sequences, answer(stock(), num_beams=2).sequences)
    assert "beam search" in caplog.text


@HQQ
def test_conversations_and_long_prompts_reuse_a_quantised_cache(load) -> None:  # type: ignore[no-untyped-def]
    model = load(options="residual: 16")
    kept = PromptCache(model)
    ids = prompt(PROMPT, batch=1, seed=3)
    cache = read_ahead(model, ids[0].tolist(), None, 64)
    assert isinstance(cache, QuantizedCache) and cache.get_seq_length() == 128
    made = answer(model, ids=ids, past_key_values=cache)
    kept.keep(made.sequences[0].tolist(), made.past_key_values)
    longer = [*made.sequences[0].tolist(), 5, 6]
    cache, shared = kept.take(longer)
    assert cache is made.past_key_values and shared == PROMPT + NEW - 1
    again = answer(model, ids=torch.tensor([longer]), past_key_values=cache)
    assert again.past_key_values.get_seq_length() == len(longer) + NEW - 1
    kept.keep(again.sequences[0].tolist(), again.past_key_values)
    assert kept.take([*longer[:-1], 9, 9]) == (None, 0)  # it cannot be rewound


@HQQ
def test_a_saved_chat_contains_the_text_but_not_the_cache(load, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = load()
    made = answer(model)
    path = tmp_path / "chat.safetensors"
    write_chat(path, model, SavedChat([], made.sequences[0].tolist(), made.past_key_values))
    assert read_chat(path, model).cache is None


@HQQ
def test_cpu_attention_works_with_a_quantised_cache(load) -> None:  # type: ignore[no-untyped-def]
    model = load(extends="cpu", options="bits: 8")
    found = answer(model)
    assert isinstance(found.past_key_values, QuantizedCache)
    assert "cpu_attention" in str(model.moegraft.placement())


FULL = ("qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe", "granitemoe")
STATES = ("qwen3_next", "nemotron_h", "granitemoehybrid", "kimi_linear", "lfm2_moe", "jamba")  # some layers of full attention


@HQQ
@pytest.mark.parametrize("model_type", FULL)
def test_logits_of_families_with_full_attention_stay_close(model_type: str, load) -> None:  # type: ignore[no-untyped-def]
    model = load(model_type, "bits: 8, residual: 16")
    ids = prompt(PROMPT + NEW, batch=1, seed=3)
    expected, found = (followed(model, cache, ids) for cache in (DynamicCache(config=model.config), new_cache(model)))
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.02  # 0.011 for granitemoe
    assert isinstance(answer(model, ids=ids[:, :21]).past_key_values, QuantizedCache)


@HQQ
@pytest.mark.parametrize("model_type", STATES)
def test_states_stay_as_they_are_beside_quantised_keys_and_values(model_type: str, load) -> None:  # type: ignore[no-untyped-def]
    model, ids = load(model_type, "bits: 8, residual: 16"), prompt(PROMPT + NEW, batch=1, seed=3)
    quantised, exact = new_cache(model), DynamicCache(config=model.config)
    expected, found = followed(model, exact, ids), followed(model, quantised, ids)
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.02
    assert [type(mine) for mine in quantised.layers if has_states(mine)] == [type(each) for each in exact.layers if has_states(each)]
    assert len([layer for layer in quantised.layers if isinstance(layer, QuantizedLayer)]) == 1
    assert isinstance(answer(model, ids=ids[:, :21]).past_key_values, QuantizedCache)
    read = read_ahead(model, ids[0].tolist(), None, 64)
    assert isinstance(read, QuantizedCache) and read.get_seq_length() == 128
    states = [each for layer in exact.layers if has_states(layer) for name in TENSORS for each in vars(layer)[name].values()]
    form = form_of(model)
    counted = replace(kv_cache(stock(model_type).to("meta")), form=form)
    rows = form.cache_bytes([layer.bytes_per_token for layer in counted.layers], 4, 1000)
    assert counted.nbytes(1000) - rows == sum(each.nbytes for each in states if each is not None)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gpt_oss", "of kind sliding_attention"),
        ("inkling_text", "of kind hybrid, hybrid_sliding, and transformers quantises .* nothing beside it"),
        ("phimoe", "of kind DynamicSlidingWindowLayer"),
        ("minimax", "a cache of its own"),
    ],
)
def test_models_with_other_kinds_of_layers_are_refused(model_type: str, reason: str, load) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RuleErrors, match=rf"rules\.yaml:5:.*quantized_kv_cache cannot replace.*({reason})"):
        load(model_type, "backend: fp8")


def test_a_missing_package_is_named_with_its_installation(load, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(sys.modules, "hqq", None)
    with pytest.raises(RuleErrors, match=r"rules\.yaml:5:.*hqq is not installed; install it with pip install 'moegraft\[kv-cache\]'"):
        load(options="backend: hqq")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("bits: 3", "bits with 'backend: hqq' must be 2 or 4 or 8, not 3"),
        ("backend: fp8, bits: 4", "bits with 'backend: fp8' must be 8, not 4"),
        ("backend: fp8, residual: 5", "remove 'residual'"),
        ("backend: native, residual: 5", "remove 'residual'"),
        ("backend: native, bits: 4", "bits with 'backend: native' must be 8, not 4"),
        ("residual: 0", "residual must be 1 or more"),
    ],
)
def test_wrong_options_are_refused(options: str, reason: str, tmp_path: Path) -> None:
    registry, text = load_registry(), f"version: 1\nrules:\n{RULE.format(options=options)}"

    def planned() -> None:
        plan(stock(), read_rules(write(tmp_path, text), registry=registry), registry=registry, dtype=torch.float32)

    (finding,) = findings_of(planned)
    assert reason in finding.message


def test_a_model_has_the_first_operator_of_each_name(tmp_path: Path) -> None:
    registry, rule = load_registry(), "- {{id: {}, match: {{kind: model}}, replace: {{class: {}, kwargs: {{{}}}}}}}\n"
    first, again = (rule.format(name, "speculative_draft", f"draft: ngram, max_draft: {len(name)}") for name in ("first", "again"))
    codes, keep = (
        rule.format("codes", "quantized_kv_cache", "backend: native"),
        "- {id: keep, match: {kind: model}, replace: {class: default}}\n",
    )
    closing = codes.replace("native}}", "native}}, recursive: false")
    norms = "- {id: norms, match: {kind: norm}, replace: {class: cpu_norm}}\n"
    reads = "- {id: reads, match: {kind: attention}, replace: {class: cpu_attention}}\n"

    def planned(text: str) -> list[str]:
        rules = read_rules(write(tmp_path, f"version: 1\nrules:\n{reads}{text}"), registry=registry)
        swaps = plan(stock(), rules, registry=registry, dtype=torch.float32).swaps
        return [swap.rule.id for swap in swaps if swap.rule.id != "reads"]

    assert planned(first + codes) == ["first", "codes"]
    assert planned(codes + first + norms)[:3] == ["codes", "first", "norms"]
    assert planned(codes + keep) == ["codes"]
    for text, loser, owner in (
        (first + codes + again, "again", "first"),
        (codes + first + again, "again", "first"),
        (first + keep + codes, "codes", "keep"),
        (keep + codes, "codes", "keep"),
        (first + closing + norms, "norms", "codes"),
    ):
        lost = f"rule '{loser}' takes no module"
        (found,) = (each for each in findings_of(lambda text=text: planned(text)) if lost in each.message)  # type: ignore[misc]
        assert f"taken or closed by rule '{owner}'" in found.message
        assert loser == "norms" or "a model can have each operator once: keep one of the rules" in found.message


@pytest.mark.parametrize("backend", ["native", "fp8"])
def test_a_module_that_has_no_cache_is_the_only_error_of_its_rule(backend: str, tmp_path: Path) -> None:
    text = f"- {{match: {{name: 'model.layers.0.mlp$'}}, replace: {{class: quantized_kv_cache, kwargs: {{backend: {backend}}}}}}}\n"
    rules = write(tmp_path, f"version: 1\nrules:\n{text}")
    errors = [each for each in findings_of(lambda: plan(stock(), rules)) if each.severity == "error"]
    assert len(errors) == 1 and "quantized_kv_cache cannot replace model.layers.0.mlp" in errors[0].message
    rules = write(tmp_path, "version: 1\nrules:\n" + text.replace("name: 'model.layers.0.mlp$'", "kind: model"))
    errors = [each for each in findings_of(lambda: plan(nn.Sequential(nn.Linear(2, 2)), rules)) if each.severity == "error"]
    assert len(errors) == 1 and "quantized_kv_cache cannot replace the model" in errors[0].message


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("draft", ["draft_top_k: 1", "draft: ngram"])
def test_drafts_over_codes_change_no_text(draft: str, model_type: str, first: bool, tmp_path: Path) -> None:
    rules = [RULE.format(options="backend: native"), DRAFTS.format(options=draft)]
    models, ids = [], prompt(70, batch=1, seed=3)  # pages end within the text
    for number, chosen in enumerate((rules[:1], rules if first else rules[::-1])):
        path = tmp_path / f"{number}.yaml"
        path.write_text(f"version: 1\nextends: cpu-exact\nrules:\n{''.join(chosen)}")
        models.append(optimize_and_load(stock(model_type), path, progress=False, threads=1))
    plain, drafting = models
    expected = answer(plain, ids=ids)
    for arguments in ({}, {"past_key_values": new_cache(drafting)}, {}):  # the last time with programs of the first
        found = answer(drafting, ids=ids, **arguments)
        assert torch.equal(found.sequences, expected.sequences)
        assert isinstance(found.past_key_values, CodedCache)
        assert found.past_key_values.get_seq_length() == ids.shape[1] + NEW - 1
    figures = drafting.moegraft.model_operator.statistics()
    assert figures["quantised_caches"] == 3
    assert figures["rounds"] > 10 and figures["accepted_tokens"] < figures["drafted_tokens"], "drafts were removed from the cache"
    assert {"quantised_caches", "rounds"} <= drafting.moegraft.statistics()["modules"]["(the model)"].keys()
    assert any("quantized_kv_cache" in line and "draft: speculative_draft" in line for line in drafting.moegraft.placement())


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_drafts_need_a_cache_from_which_they_can_be_removed(backend: str, load) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RuleErrors, match=r"rejected drafts cannot be removed .* write 'backend: native'"):
        load(options=f"backend: {backend}", more=DRAFTS.format(options="draft: ngram"))


def test_codes_of_heads_of_several_widths_have_bytes(load) -> None:  # type: ignore[no-untyped-def]
    model = load("gemma4_text", "backend: native")
    cache = new_cache(model)
    with torch.no_grad():
        model(input_ids=prompt(PAGE_TOKENS, batch=1, seed=3), past_key_values=cache)
    widths = {layer.head_dim for layer in model.config.per_layer_config}
    assert len(widths) == 2 and form_of(model).group == min(widths)
    page = sum(layer.data[0].nbytes for layer in cache.coded.values())
    predicted = replace(kv_cache(stock("gemma4_text").to("meta")), form=form_of(model)).nbytes(PAGE_TOKENS)
    assert page <= predicted <= 1.3 * page  # a scale for each 8 values of the wide heads, which have one for 16


@HQQ
def test_captured_steps_are_not_used_and_the_reason_is_logged(load, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    experts = "- match: {kind: experts}\n  replace: {class: hybrid_experts, kwargs: {gpu: emulated, cache: {ratio: 0.5}, decode: graph}}\n"
    model = load(more=experts)
    with caplog.at_level(logging.INFO, "moegraft"):
        answer(model)
        answer(model)
    assert sum("layer by layer: the key-value cache is quantised" in record.message for record in caplog.records) == 1


@HQQ
def test_a_plan_includes_the_quantised_cache(load) -> None:  # type: ignore[no-untyped-def]
    model = load(options="bits: 4")
    plain = kv_cache(stock().to("meta"))
    form = form_of(model)
    assert (form.value_bits, form.group, form.residual) == (4, 16, 128)
    per_token = plain.layers[0].bytes_per_token
    small = per_token // 4 // 2 + per_token // 4 // 16 * 2 * 4
    layers = len(plain.layers)
    expected = (
        layers * (small * (10_000 - 128) + per_token * 128) + 2 * per_token * 10_000
    )  # one layer is restored, and concatenated with the new token
    quantised = type(plain)(plain.layers, True, 4, form)
    assert quantised.nbytes(10_000) == expected < plain.nbytes(10_000)
    assert quantised.nbytes(10_000, 3) == 3 * expected
