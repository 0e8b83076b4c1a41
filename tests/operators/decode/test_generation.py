"""Calls of `generate` in the loop of moegraft's own, beside transformers' loop over the same injected model."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import combinations
from support.byte_tokenizer import byte_tokenizer
from support.decoding import layer_by_layer, native_steps, new_model, replayed, shared_model
from support.families import prompt
from support.family_rows import VOCAB_SIZE
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer, TextIteratorStreamer

from moegraft.injection import new_cache
from moegraft.operators.base import CACHE, with_cache_name
from moegraft.operators.decode.cache import cache_counts, cache_tensors
from moegraft.operators.decode.native.steps import MAX_CONTINUED

FAMILIES = (
    "qwen3_moe",
    "mixtral",  # every layer has a window of 16
    "llama4_text",  # chunks of attention, and rows of chosen experts
    "gpt_oss",  # alternating windows and full layers
    "deepseek_v3",  # latent attention
    "qwen3_next",  # recurrent layers
    "phimoe",  # prepares its inputs in a way of its own
)
TOKENS = 100  # more than one continuation
IDS = prompt(9)


Generate = Callable[..., Any]


def own(model: PreTrainedModel, ids: torch.Tensor | None = IDS, **arguments: Any) -> Any:
    """What the model's own `generate` returns."""
    return _called(model.generate, ids, arguments)  # type: ignore[arg-type]


def stock(model: PreTrainedModel, ids: torch.Tensor | None = IDS, **arguments: Any) -> Any:
    """What transformers' own loop returns."""
    return _called(functools.partial(GenerationMixin.generate, model), ids, arguments)  # type: ignore[arg-type]


def _called(generate: Generate, ids: torch.Tensor | None, arguments: dict[str, Any]) -> Any:
    torch.manual_seed(5)
    lengths = {} if {"max_length", "generation_config"} & arguments.keys() else {"max_new_tokens": TOKENS}
    return generate(**({} if ids is None else {"inputs": ids}), **{"do_sample": False, **lengths, **arguments})


def assert_equal_text(model: PreTrainedModel, ids: torch.Tensor | None = IDS, **arguments: Any) -> torch.Tensor:
    expected = stock(model, ids, **arguments)
    found = own(model, ids, **arguments)
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()
    result: torch.Tensor = found
    return result


SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 30}


@pytest.mark.parametrize(("sampled", "family"), combinations([False, True], FAMILIES))
def test_texts_of_every_family(sampled: bool, family: str) -> None:
    """Over several continuations; the buffers of the cache grow at 256 tokens and more, and windows of 16 fill."""
    model = shared_model(family)
    with native_steps() as steps:
        for ids in (prompt(12, seed=3), prompt(230, seed=4)):
            assert_equal_text(model, ids, **(SAMPLED if sampled else {}))
    assert sum(steps) == 0 if family == "phimoe" else sum(steps) > TOKENS


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen3_next"])
def test_a_text_across_a_growth_of_the_buffers(family: str) -> None:
    with native_steps() as steps:
        assert_equal_text(shared_model(family), max_new_tokens=600)
    assert sum(steps) > 4 * MAX_CONTINUED


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", pytest.param("qwen3_next", marks=pytest.mark.long)])
def test_rounded_models(family: str) -> None:
    """In bfloat16 the largest logits are often equal; the first of them is chosen."""
    model = new_model(family, "cpu", torch.bfloat16)
    stock(model, max_new_tokens=200)  # makes the programs
    ties = 0
    with native_steps() as steps:
        for arguments in ({}, SAMPLED):
            given = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 200, **arguments}
            found, expected = own(model, **given), stock(model, **given)
            assert found.sequences.tolist() == own(model, max_new_tokens=200, **arguments).tolist()
            assert found.sequences.tolist() == expected.sequences.tolist()
            logits = torch.cat(found.logits)
            assert torch.equal(logits, torch.cat(expected.logits))
            ties += int((logits.topk(2).values.diff() == 0).sum())
    assert sum(steps) > 400
    assert ties


CALLS: dict[str, dict[str, Any]] = {
    "no processor": {},
    "temperature": {"temperature": 0.7, "top_p": 0.9},
    "repetition penalty": {"repetition_penalty": 1.3},
    "no repeated n-gram": {"no_repeat_ngram_size": 2},
    "minimum of new tokens": {"min_new_tokens": 40, "eos_token_id": list(range(0, VOCAB_SIZE, 3))},
    "bad words": {"bad_words_ids": [[5], [8, 9]]},
    "suppressed tokens": {"suppress_tokens": list(range(50)), "begin_suppress_tokens": [60]},
    "allowed tokens": {"prefix_allowed_tokens_fn": lambda batch, ids: [int(ids[-1] * 7 + step) % VOCAB_SIZE for step in range(9)]},
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
    "maximum length": {"max_length": 50},
    "time limit": {"max_time": 1000.0},
    "tokenizer without stop strings": {"tokenizer": object()},
    "attention mask": {"attention_mask": torch.ones_like(IDS)},
    "configuration": {"generation_config": GenerationConfig(max_new_tokens=70, repetition_penalty=1.1, pad_token_id=0)},
    "beginning": {"begin_suppress_tokens": [60], "renormalize_logits": True},
}


@pytest.mark.parametrize(("sampled", "call"), combinations([True, False], list(CALLS)))
def test_arguments(qwen: PreTrainedModel, sampled: bool, call: str) -> None:
    assert_equal_text(qwen, **{**(SAMPLED if sampled else {}), **CALLS[call]})


@pytest.mark.parametrize("sampled", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_end_tokens(qwen: PreTrainedModel, sampled: dict[str, Any]) -> None:
    """As the first token, in the middle, at the borders of a continuation, and several."""
    text = stock(qwen, **sampled)[0, IDS.shape[1] :].tolist()
    for place in (0, 1, 5, 40, MAX_CONTINUED, MAX_CONTINUED + 6, TOKENS - 1):
        found = assert_equal_text(qwen, eos_token_id=text[place], **sampled)
        assert found.shape[1] == IDS.shape[1] + text.index(text[place]) + 1
    missing = next(token for token in range(VOCAB_SIZE) if token not in text)
    assert_equal_text(qwen, eos_token_id=[missing, text[30], text[20]], **sampled)
    assert_equal_text(qwen, eos_token_id=missing, **sampled)


def test_the_configuration_of_the_model(qwen: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values hold where a call gives none; a call without any ends at 20 tokens."""
    for config in (
        GenerationConfig(pad_token_id=0),
        GenerationConfig(pad_token_id=0, do_sample=True, temperature=1.3, top_k=9, repetition_penalty=1.2, max_new_tokens=70),
        GenerationConfig(pad_token_id=0, eos_token_id=[60, 49], max_length=90),
        GenerationConfig(pad_token_id=0, num_beams=2, max_length=20),
    ):
        monkeypatch.setattr(qwen, "generation_config", config)
        texts = []
        for generate in (qwen.generate, functools.partial(GenerationMixin.generate, qwen)):
            torch.manual_seed(2)
            texts.append(generate(IDS).tolist())  # type: ignore[operator, arg-type]
        assert texts[0] == texts[1]
        assert_equal_text(qwen, max_new_tokens=30)


def test_stop_strings(qwen: PreTrainedModel) -> None:
    words = byte_tokenizer()
    text = stock(qwen)[0, IDS.shape[1] :].tolist()
    ended = 0
    for place in (0, 20, 70):
        stop = words.decode(text[place : place + 3])
        found = assert_equal_text(qwen, stop_strings=[stop], tokenizer=words)
        ended += found.shape[1] < IDS.shape[1] + TOKENS
    assert ended
    for generate in (own, stock):
        with pytest.raises(ValueError, match="tokenizer"):
            generate(qwen, stop_strings=["x"])


def assert_text_layer_by_layer(model: PreTrainedModel, ids: torch.Tensor = IDS, **arguments: Any) -> None:
    """As `assert_equal_text`, beside transformers' loop without programs."""
    with layer_by_layer():
        expected = stock(model, ids, **arguments)
    for generate in (own, stock):
        assert torch.equal(generate(model, ids, **arguments), expected)


KINDS = [
    {"inputs": prompt(7, batch=2)},
    {"num_beams": 3},
    {"num_beams": 2, "num_return_sequences": 2},
    {"num_return_sequences": 2, **SAMPLED},
    {"prompt_lookup_num_tokens": 3},
    {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    {"use_cache": False},
    {"cache_implementation": "static"},
]


@pytest.mark.parametrize(("family", "arguments"), combinations(["qwen3_moe", "mixtral"], KINDS), ids=str)
def test_calls_of_other_kinds(family: str, arguments: dict[str, Any]) -> None:
    """Through the window of 16."""
    given = dict(arguments)
    assert_text_layer_by_layer(shared_model(family), given.pop("inputs", IDS), max_new_tokens=24, **given)


def test_an_assistant(qwen: PreTrainedModel) -> None:
    assert_text_layer_by_layer(qwen, assistant_model=new_model("qwen3_moe"), max_new_tokens=40)


@pytest.mark.parametrize("limit", [5, 10, 40, 75, 200])
def test_a_length_criterion_of_the_caller(qwen: PreTrainedModel, limit: int) -> None:
    """It replaces the one of the maximum length, which may be longer; the first limit is shorter than the prompt."""
    for sampled in ({}, SAMPLED):
        found = assert_equal_text(qwen, stopping_criteria=[MaxLengthCriteria(limit)], **sampled)
        assert found.shape == (1, max(limit, IDS.shape[1] + 1))


def test_positional_arguments(qwen: PreTrainedModel) -> None:
    expected = stock(qwen, max_new_tokens=20)
    assert torch.equal(qwen.generate(IDS, *[None] * 10, max_new_tokens=20, do_sample=False), expected)  # type: ignore[operator]


def test_prompts_given_as_embeddings(qwen: PreTrainedModel) -> None:
    embedded = qwen.get_input_embeddings()(IDS).detach()
    assert_equal_text(qwen, None, inputs_embeds=embedded, max_new_tokens=20)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", *(pytest.param(name, marks=pytest.mark.long) for name in FAMILIES[2:])])
@pytest.mark.parametrize("padded", [pytest.param(1, marks=pytest.mark.long), 4])
def test_a_prompt_behind_padding(family: str, padded: int) -> None:
    ids = torch.cat([torch.zeros(1, padded, dtype=torch.int64), IDS], -1)
    mask = torch.cat([torch.zeros(1, padded, dtype=torch.int64), torch.ones_like(IDS)], -1)
    for sampled in ({}, SAMPLED):
        assert_equal_text(shared_model(family), ids, attention_mask=mask, **sampled)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_prompt_stays_as_it_was(qwen: PreTrainedModel, dtype: torch.dtype) -> None:
    ids = torch.cat([IDS, IDS], -1).to(dtype)[:, : IDS.shape[1]]  # with room behind it
    kept = ids.clone()
    found = assert_equal_text(qwen, ids)
    assert torch.equal(ids, kept)
    found.zero_()
    assert torch.equal(ids, kept)


def test_modes_of_pytorch(qwen: PreTrainedModel) -> None:
    expected = stock(qwen).tolist()
    with torch.inference_mode():
        assert own(qwen, IDS.clone()).tolist() == expected
    with torch.enable_grad():
        assert own(qwen).tolist() == expected
    assert own(qwen).tolist() == expected


class Collect(BaseStreamer):
    """Calls as lists; `put` may do something at a token."""

    def __init__(self, at: int = -1, change: Callable[[], object] = lambda: None) -> None:
        self.pieces: list[Any] = []
        self._at, self._change = at, change

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append((value.tolist(), value.dtype))
        if len(self.pieces) == self._at + 1:
            self._change()

    def end(self) -> None:
        self.pieces.append("end")


@pytest.mark.parametrize("arguments", [{}, SAMPLED, {"eos_token_id": 7, "repetition_penalty": 1.2}, {"max_new_tokens": 1}], ids=str)
def test_a_streamer_receives_the_prompt_single_tokens_and_the_end(qwen: PreTrainedModel, arguments: dict[str, Any]) -> None:
    found, expected = Collect(), Collect()
    stock(qwen, streamer=expected, **arguments)
    with native_steps() as steps:
        own(qwen, streamer=found, **arguments)
    assert found.pieces == expected.pieces
    assert sum(steps) or len(found.pieces) < 10


def test_a_cache_is_complete_when_its_stream_ends(qwen: PreTrainedModel) -> None:
    """Another thread may then read from the streamer, and go on with the cache."""
    own(qwen)
    cache, found = new_cache(qwen), []
    streamer = TextIteratorStreamer(SimpleNamespace(decode=lambda tokens: " ".join(map(str, tokens))))  # type: ignore[arg-type]
    end = streamer.end
    streamer.end = lambda: (found.append(cache.get_seq_length()), end())[1]  # type: ignore[method-assign, func-returns-value]
    own(qwen, prompt(7), max_new_tokens=20, past_key_values=cache, streamer=streamer)
    assert found == [7 + 20 - 1]


def test_a_model_that_replaces_its_cache() -> None:
    """Phi-MoE computes its text once again, with another cache, at the length where its rotary embedding changes."""
    model = new_model("phimoe")
    model.config.original_max_position_embeddings = 16
    fed_tokens: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: fed_tokens.append(given[0].shape[1]))
    for generate in (stock, own):
        made = generate(model, prompt(7), max_new_tokens=20, return_dict_in_generate=True)
        assert made.past_key_values.get_seq_length() == 7 + 20 - 1
    assert fed_tokens[20:] == fed_tokens[:20]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen3_next"])
@pytest.mark.parametrize("arguments", [{}, SAMPLED, {"repetition_penalty": 1.3}], ids=["greedy", "sampled", "penalty"])
def test_returned_scores_logits_and_cache(family: str, arguments: dict[str, Any]) -> None:
    model = shared_model(family)
    given = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **arguments}
    expected = stock(model, **given)
    with native_steps() as steps:
        found = own(model, **given)
    assert sum(steps) > TOKENS // 2
    assert type(found) is type(expected) and found.keys() == expected.keys()
    assert found.sequences.tolist() == expected.sequences.tolist()
    for name in ("scores", "logits"):
        assert len(found[name]) == len(expected[name]) == TOKENS
        torch.testing.assert_close(torch.cat(found[name]), torch.cat(expected[name]), rtol=1e-4, atol=1e-5)
        assert all(tensor.shape == (1, VOCAB_SIZE) and tensor.dtype == torch.float32 for tensor in found[name])
    tensors = [*found.scores, *found.logits]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    kept = [tensor.clone() for tensor in tensors]
    assert_equal_caches(found.past_key_values, expected.past_key_values)
    own(model)  # which writes to the memory of programs
    assert all(torch.equal(one, other) for one, other in zip(tensors, kept, strict=True))


def assert_equal_caches(found: DynamicCache, expected: DynamicCache) -> None:
    assert found.get_seq_length() == expected.get_seq_length()
    assert cache_counts(found) == cache_counts(expected)
    tensors = dict(cache_tensors(found)), dict(cache_tensors(expected))
    assert tensors[1]
    torch.testing.assert_close(*tensors, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("tokens", "family"), combinations([90, 1, 2, 8], FAMILIES))
def test_a_cache_of_the_caller(tokens: int, family: str) -> None:
    """Its contents after a call, and texts that go on with it: one call after the other, greedy and sampled."""
    model = shared_model(family)
    own(model)
    caches = [new_cache(model), new_cache(model)]
    texts = [IDS, IDS]
    with native_steps() as steps:
        for arguments in ({}, SAMPLED, {"repetition_penalty": 1.2}):
            for index, generate in enumerate((own, stock)):
                texts[index] = generate(model, texts[index], past_key_values=caches[index], max_new_tokens=tokens, **arguments)
            assert texts[0].tolist() == texts[1].tolist()
            assert caches[0].get_seq_length() == texts[0].shape[1] - 1
            assert_equal_caches(*caches)
            texts = [torch.cat([text, prompt(3, seed=1)], -1) for text in texts]
    assert sum(steps) > 0 or tokens < 90 or family == "phimoe"


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_cache_that_is_cropped_between_calls(family: str) -> None:
    model = shared_model(family)
    results = []
    for generate in (own, stock):
        cache = new_cache(model)
        text = generate(model, past_key_values=cache)
        cache.crop(60 - cache.get_seq_length())
        other = torch.cat([text[:, :58], prompt(5, seed=8)], -1)
        cache.crop(-3)
        mask = torch.ones_like(other)
        results.append(generate(model, other, past_key_values=cache, attention_mask=mask, max_new_tokens=60).tolist())
    assert results[0] == results[1]


def test_a_returned_cache_serves_steps_of_the_caller() -> None:
    for family in ("mixtral", "qwen3_next"):
        model = shared_model(family)
        results = [generate(model, return_dict_in_generate=True) for generate in (own, stock)]
        ids = prompt(20, seed=9)
        with torch.no_grad():
            for token in range(20):
                one, other = (model(input_ids=ids[:, token : token + 1], past_key_values=each.past_key_values).logits for each in results)
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


class Changes(StoppingCriteria):
    """Never ends a text; does something at its call `at`."""

    def __init__(self, at: int, change: Callable[[], object]) -> None:
        self._left, self._change = at, change

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            self._change()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class ChangesScores(LogitsProcessor):
    def __init__(self, at: int, change: Callable[[], object]) -> None:
        self._left, self._change = at, change

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            self._change()
        return scores


def a_criterion(at: int, change: Callable[[], object]) -> dict[str, Any]:
    return {"stopping_criteria": [Changes(at, change)]}


def a_streamer(at: int, change: Callable[[], object]) -> dict[str, Any]:
    return {"streamer": Collect(at, change)}


def a_processor(at: int, change: Callable[[], object]) -> dict[str, Any]:
    return {"logits_processor": [ChangesScores(at, change)]}


BETWEEN = [a_criterion, a_streamer, a_processor]
Between = Callable[[int, Callable[[], object]], dict[str, Any]]


def assert_goes_on(model: PreTrainedModel, text: torch.Tensor, cache: DynamicCache) -> None:
    """A call with the cache of an interrupted one continues its text."""
    held = cache.get_seq_length()
    ids = text[:, : held + 1]
    mask = torch.ones_like(ids)  # which transformers would infer from tokens that are the padding's, such as 0
    found = own(model, ids, past_key_values=cache, max_new_tokens=20, attention_mask=mask)
    assert found.tolist() == text[:, : held + 21].tolist()


class Broken(Exception):
    """The exception that a test raises."""


@pytest.mark.parametrize(
    ("family", "between", "error"),
    [
        pytest.param(
            family,
            between,
            error,
            id=f"{family}-{between.__name__}-{error.__name__}",
            marks=() if between is a_criterion or (family, error) == ("qwen3_next", Broken) else pytest.mark.long,
        )
        for family in ("qwen3_moe", "mixtral", "qwen3_next")
        for between in BETWEEN
        for error in (Broken, KeyboardInterrupt)
    ],
)
def test_an_error_between_two_tokens(family: str, between: Between, error: type[BaseException]) -> None:
    """The caller's cache is that of transformers' loop, and the text goes on."""
    model = shared_model(family)
    text = stock(model)
    own(model)

    def fail() -> None:
        raise error

    for at in (1, 2, 30):
        caches = [new_cache(model), new_cache(model)]
        for cache, generate in zip(caches, (own, stock), strict=True):
            with pytest.raises(error):
                generate(model, past_key_values=cache, **between(at, fail))
        assert_equal_caches(*caches)
        assert_goes_on(model, text, caches[0])


@pytest.mark.parametrize("method", ["greedy", "follow"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_an_interrupt_after_native_steps(family: str, method: str) -> None:
    """Python raises it when the call returns, which is where nearly every Ctrl-C arrives; the cache has the tokens that were fed."""
    model = shared_model(family)
    sampled = {"do_sample": True, "top_k": 1} if method == "follow" else {}
    text = stock(model, max_new_tokens=2 * TOKENS)
    own(model, **sampled)
    left = 2

    def interrupt(frame: Any, event: str, called: Any) -> None:
        nonlocal left
        if event == "c_return" and getattr(called, "__name__", "") == method:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    cache = new_cache(model)
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            own(model, past_key_values=cache, **sampled)
    finally:
        sys.setprofile(None)
    assert cache.get_seq_length() >= IDS.shape[1] + 3
    assert_goes_on(model, text, cache)
    assert own(model, max_new_tokens=2 * TOKENS).tolist() == text.tolist()


class Looks(StoppingCriteria):
    """Notes the caller's cache at each token."""

    def __init__(self, cache: DynamicCache) -> None:
        self.cache = cache
        self.seen: list[tuple[int, float]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        keys = self.cache.layers[0].keys
        self.seen.append((self.cache.get_seq_length(), round(float(keys[..., -1, :].sum()), 2)))
        return torch.zeros(1, dtype=torch.bool)


def test_a_cache_of_transformers_that_is_looked_at_between_two_tokens(qwen: PreTrainedModel) -> None:
    """It has all tokens at each time: no step is replayed over it."""
    seen = []
    own(qwen)
    for generate in (own, stock):
        looks = Looks(DynamicCache(config=qwen.config))
        generate(qwen, past_key_values=looks.cache, max_new_tokens=30, stopping_criteria=[looks])
        seen.append(looks.seen)
    assert seen[0] == seen[1]


def test_a_cache_that_is_changed_between_two_tokens(qwen: PreTrainedModel) -> None:
    texts = []
    for generate in (own, stock):
        cache = DynamicCache(config=qwen.config)

        def change(cache: DynamicCache = cache) -> None:
            for layer in cache.layers:
                layer.values = -layer.values

        texts.append(generate(qwen, past_key_values=cache, max_new_tokens=50, **a_criterion(20, change)).tolist())
    assert texts[0] == texts[1]
    assert texts[0] != stock(qwen, max_new_tokens=50).tolist()


class Replaces(StoppingCriteria):
    """Replaces the latest token in place."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] % 5 == 0:
            input_ids[0, -1] = 4
        return torch.zeros(1, dtype=torch.bool)


def test_tokens_that_a_criterion_replaces(qwen: PreTrainedModel) -> None:
    for sampled in ({}, SAMPLED, {"repetition_penalty": 1.3}):
        assert_equal_text(qwen, stopping_criteria=[Replaces()], **sampled)


class InPlace(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, ::3] = -torch.inf
        return scores


class Rounded(LogitsProcessor):
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.to(self._dtype)


class Nothing(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, torch.nan if input_ids.shape[1] % 2 else -torch.inf)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scores_of_other_types(qwen: PreTrainedModel, dtype: torch.dtype) -> None:
    for sampled in ({}, SAMPLED):
        assert_equal_text(qwen, logits_processor=[Rounded(dtype)], max_new_tokens=20, **sampled)


def test_processors_of_the_caller(qwen: PreTrainedModel) -> None:
    for sampled in ({}, SAMPLED):
        assert_equal_text(qwen, logits_processor=[InPlace()], **sampled)
    assert_equal_text(qwen, logits_processor=[Nothing()], max_new_tokens=20)


def test_criteria_receive_scores_and_tokens(qwen: PreTrainedModel) -> None:
    class Notes(StoppingCriteria):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            self.seen.append((input_ids, None if scores is None else len(scores)))
            return torch.tensor([input_ids.shape[1] >= 60])

    for given in ({}, {"output_scores": True, "return_dict_in_generate": True}, SAMPLED):
        found, expected = Notes(), Notes()
        own(qwen, stopping_criteria=[found], **given)
        stock(qwen, stopping_criteria=[expected], **given)
        assert [(ids.tolist(), scores) for ids, scores in found.seen] == [(ids.tolist(), scores) for ids, scores in expected.seen]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen3_next"])
def test_texts_within_a_text(family: str) -> None:
    """A criterion generates with the same model, so that its programs serve another cache."""
    model = shared_model(family)
    inner = stock(model, prompt(6, seed=2), max_new_tokens=40).tolist()
    outer = stock(model)
    own(model)
    found = []

    class Nested(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            if input_ids.shape[1] in (30, 31, 60):
                found.append(own(model, prompt(6, seed=2), max_new_tokens=40).tolist())
            return torch.zeros(1, dtype=torch.bool)

    assert own(model, stopping_criteria=[Nested()]).tolist() == outer.tolist()
    assert found == [inner] * 3


def test_few_calls_lie_between_generate_and_the_native_program(qwen: PreTrainedModel) -> None:
    own(qwen)
    frames: list[list[str]] = []

    def note(frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__name__", "") == "greedy":
            ours = []
            while frame is not None:
                if frame.f_globals.get("__name__", "").startswith("moegraft."):
                    ours.append(frame.f_code.co_name)
                frame = frame.f_back
            frames.append(ours)

    sys.setprofile(note)
    try:
        own(qwen)
    finally:
        sys.setprofile(None)
    assert frames
    assert all(len(ours) <= 5 for ours in frames), frames[0]


def test_replayed_steps_are_counted(qwen: PreTrainedModel) -> None:
    own(qwen, max_new_tokens=200)
    before = replayed(qwen)
    with native_steps() as steps:
        own(qwen, max_new_tokens=200)
    assert 180 < replayed(qwen) - before <= 199
    assert sum(steps) > 170
    for arguments in (SAMPLED, {"repetition_penalty": 1.2}, {"streamer": Collect()}, a_criterion(0, lambda: None)):
        with native_steps() as steps:
            own(qwen, max_new_tokens=200, **arguments)
        assert sum(steps) > 170


def test_timelines_have_every_step(qwen: PreTrainedModel) -> None:
    expected = stock(qwen).tolist()
    own(qwen)
    before = replayed(qwen)
    with qwen.moegraft.timelines() as (timeline,):
        assert own(qwen).tolist() == expected
    positions = [span.details["position"] for span in timeline.spans if (span.lane, span.name) == ("step", "program")]
    assert len(positions) == replayed(qwen) - before > TOKENS // 2
    assert positions == sorted(set(positions))


def test_two_models_in_turn_and_in_threads() -> None:
    pair = [new_model("qwen3_next", threads=2), new_model("mixtral", threads=2)]
    ids = [prompt(7, seed=seed) for seed in range(4)]
    with layer_by_layer():
        expected = [stock(pair[index % 2], ids[index]).tolist() for index in range(4)]
    for index in (0, 1, 2, 3, 1, 0):
        assert own(pair[index % 2], ids[index]).tolist() == expected[index]
    found: dict[int, Any] = {}

    def work(index: int) -> None:
        found[index] = [pair[index % 2].generate(ids[index], max_new_tokens=TOKENS, do_sample=False).tolist() for _ in range(3)]  # type: ignore[operator]

    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]  # two with each model
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for index in range(4):
        assert found[index] == [expected[index]] * 3


def test_a_cache_of_a_model_in_another_dtype_is_refused_as_by_transformers(qwen: PreTrainedModel) -> None:
    """Few new tokens, which no prompt's pass stands before: both models have programs for their steps."""
    other = new_model("qwen3_moe", "cpu", torch.bfloat16)
    for model in (qwen, other):
        own(model)
    cache = new_cache(qwen)
    text = own(qwen, past_key_values=cache, max_new_tokens=30)
    assert replayed(qwen)
    with pytest.raises(RuntimeError, match="dtype"):
        own(other, text, past_key_values=cache, max_new_tokens=30)


def test_caches_are_freed(qwen: PreTrainedModel) -> None:
    for arguments in ({}, SAMPLED):
        result = own(qwen, return_dict_in_generate=True, **arguments)
        gone = [weakref.ref(result.past_key_values), *(weakref.ref(layer.keys) for layer in result.past_key_values.layers)]
        del result
        gc.collect()
        assert not any(reference() is not None for reference in gone)


@pytest.mark.parametrize("older", ["past_key_values", "cache_params"])
def test_a_cache_may_have_its_older_names(older: str) -> None:
    """As transformers' own models take them; before 5.24 the arguments stay as they are."""
    cache = object()
    assert with_cache_name({"input_ids": 1, older: cache}) == {"input_ids": 1, "cache" if CACHE == "cache" else older: cache}
    assert with_cache_name({CACHE: cache}) == {CACHE: cache}
