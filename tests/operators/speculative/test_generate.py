"""`generate` of a drafting model takes its usual arguments and returns the usual results."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch
from support import combinations
from support.decoding import native_steps
from support.families import VOCAB_SIZE, prompt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
)
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

from moegraft.injection import new_cache
from moegraft.operators.decode.native.steps import NativePasses, NativePrograms
from moegraft.operators.schedule import DraftSchedule, Round

STEPS = 24
IDS = prompt(9)


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_next"])  # layers of attention; some of them, with recurrent states beside
def pair(drafting: Any, stock: Any, request: pytest.FixtureRequest) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A drafting model and its stock twin, which tests do not change."""
    return drafting(request.param, max_draft=4), stock(request.param)


def both(pair: tuple[PreTrainedModel, PreTrainedModel], ids: torch.Tensor = IDS, **arguments: Any) -> tuple[Any, Any]:
    given = {"max_new_tokens": STEPS, "do_sample": False} | arguments
    return pair[0].generate(ids, **given), pair[1].generate(ids, **given)


def plain_text(pair: tuple[PreTrainedModel, PreTrainedModel]) -> list[int]:
    return pair[1].generate(IDS, max_new_tokens=STEPS, do_sample=False)[0, IDS.shape[1] :].tolist()


def drafted_rounds(model: PreTrainedModel) -> int:
    return model.moegraft.model_operator.statistics()["rounds"]


def tokenizer() -> PreTrainedTokenizerFast:
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB_SIZE])}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_the_end_token_ends_the_text_at_any_position_of_a_draft(pair: Any) -> None:
    text, before = plain_text(pair), drafted_rounds(pair[0])
    for position, token in enumerate(text[:12]):
        found, expected = both(pair, eos_token_id=token, return_dict_in_generate=True)
        assert torch.equal(found.sequences, expected.sequences)
        assert found.past_key_values.get_seq_length() == found.sequences.shape[1] - 1, f"cache after an end at {position}"
    assert drafted_rounds(pair[0]) > before


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7])
def test_the_text_is_never_longer_than_max_new_tokens(pair: Any, steps: int) -> None:
    found, expected = both(pair, max_new_tokens=steps)
    assert torch.equal(found, expected)


def test_a_stop_string_across_two_rounds_ends_the_text(pair: Any) -> None:
    words, text = tokenizer(), plain_text(pair)
    for start in range(6):  # so that a round ends inside some of them
        stop = words.decode(text[start : start + 3])
        found, expected = both(pair, stop_strings=[stop], tokenizer=words)
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="tokenizer"):
        pair[0].generate(IDS, stop_strings=["x"], max_new_tokens=4)
    config = GenerationConfig(max_new_tokens=STEPS, do_sample=False, stop_strings=stop, pad_token_id=0)
    assert torch.equal(pair[0].generate(IDS, config, tokenizer=words), expected)


class Count(StoppingCriteria):
    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return torch.tensor([input_ids.shape[1] >= self.tokens])


def test_a_stopping_criterion_sees_every_token_once(pair: Any) -> None:
    criterion = Count(IDS.shape[1] + 11)
    found = pair[0].generate(IDS, max_new_tokens=STEPS, do_sample=False, stopping_criteria=[criterion])
    assert found.shape[1] == IDS.shape[1] + 11
    assert criterion.lengths == list(range(IDS.shape[1] + 1, IDS.shape[1] + 12))


class Collect(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_receives_the_prompt_and_then_single_tokens(pair: Any) -> None:
    found, expected = Collect(), Collect()
    both(pair)
    for model, streamer in zip(pair, (found, expected), strict=True):
        model.generate(IDS, max_new_tokens=STEPS, do_sample=False, streamer=streamer)
    assert found.pieces == expected.pieces
    assert found.ended


def test_returned_scores_and_logits_are_those_of_plain_decoding(pair: Any) -> None:
    found, expected = both(pair, return_dict_in_generate=True, output_scores=True, output_logits=True, repetition_penalty=1.3)
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.scores) == len(found.logits) == STEPS
    for name in ("scores", "logits"):
        for one, other in zip(found[name], expected[name], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.5},  # every processor after the first depends on the drafted tokens too
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 10, "eos_token_id": 7},
        {"bad_words_ids": [[5], [8, 9]]},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [int(ids[-1] * 7 + step) % VOCAB_SIZE for step in range(9)]},
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
    ],
    ids=lambda arguments: next(iter(arguments)) + str(arguments.get("cache_implementation", "")),
)
def test_arguments_have_the_effect_of_plain_decoding(pair: Any, arguments: dict[str, Any]) -> None:
    before = drafted_rounds(pair[0])
    found, expected = both(pair, **arguments)
    assert torch.equal(found, expected)
    assert drafted_rounds(pair[0]) > before


def test_left_padding_of_one_sequence_is_supported(pair: Any) -> None:
    ids = torch.cat([torch.zeros(1, 4, dtype=torch.int64), IDS], -1)
    mask = torch.cat([torch.zeros(1, 4, dtype=torch.int64), torch.ones_like(IDS)], -1)
    found, expected = both(pair, ids, attention_mask=mask)
    assert torch.equal(found, expected)
    assert torch.equal(found[:, 4:], both(pair)[0])


@pytest.mark.parametrize("samples", [False, True], ids=["greedy", "sampled"])
def test_the_returned_cache_serves_the_next_call(pair: Any, samples: bool) -> None:
    torch.manual_seed(3)
    first = pair[0].generate(IDS, max_new_tokens=9, do_sample=samples, return_dict_in_generate=True, temperature=2.0 if samples else None)
    assert first.past_key_values.get_seq_length() == first.sequences.shape[1] - 1
    longer = torch.cat([first.sequences, prompt(4, seed=5)], -1)
    found = pair[0].generate(longer, past_key_values=first.past_key_values, max_new_tokens=12, do_sample=False)
    assert torch.equal(found, pair[1].generate(longer, max_new_tokens=12, do_sample=False))


def test_sampling_repeats_with_its_seed_and_its_logits_are_the_full_models(pair: Any) -> None:
    texts = []
    for _ in range(2):
        torch.manual_seed(1)
        made = pair[0].generate(
            IDS, max_new_tokens=STEPS, do_sample=True, temperature=2.0, top_k=20, return_dict_in_generate=True, output_logits=True
        )
        texts.append(made.sequences)
    assert torch.equal(*texts)
    with torch.no_grad():
        logits = pair[1](made.sequences).logits[0, IDS.shape[1] - 1 : -1]
    torch.testing.assert_close(torch.cat(made.logits), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"inputs": prompt(6, batch=2)}, "a batch of 2 sequences"),
        ({"num_return_sequences": 2, "do_sample": True, "top_k": 1}, "num_return_sequences=2"),
        ({"use_cache": False}, "use_cache=False"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
        ({"guidance_scale": 1.5, "negative_prompt_ids": prompt(4)}, "classifier-free guidance"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden states"),
        ({"compile_config": CompileConfig()}, "torch.compile"),
        ({"custom_generate": lambda model, input_ids, **rest: input_ids}, "custom_generate"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_calls_are_decoded_without_drafts_and_logged_once(
    arguments: dict[str, Any], reason: str, drafting: Any, stock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = drafting("qwen3_moe")
    given = {"inputs": IDS, "max_new_tokens": 6, "do_sample": False} | arguments
    with caplog.at_level(logging.WARNING):
        found = [model.generate(**given) for _ in range(2)][-1]
    expected = stock("qwen3_moe").generate(**given)
    assert torch.equal(getattr(found, "sequences", found), getattr(expected, "sequences", expected))
    messages = [record.message for record in caplog.records if "decoding without drafts" in record.message]
    assert len(messages) == 1 and reason in messages[0]
    assert drafted_rounds(model) == 0


def test_an_assistant_model_works_as_in_stock(drafting: Any, stock: Any) -> None:
    model, plain = drafting("qwen3_moe"), stock("qwen3_moe")
    found = model.generate(IDS, max_new_tokens=6, do_sample=False, assistant_model=plain)
    assert torch.equal(found, plain.generate(IDS, max_new_tokens=6, do_sample=False))
    assert drafted_rounds(model) == 0


class Broken(Exception):
    """The exception that a test raises."""


class BreaksAt:
    """A logits processor that raises at its `call`-th call; processors run in drafts and in verifications."""

    def __init__(self, call: int, error: type[BaseException]) -> None:
        self.left = call
        self.error = error

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return scores


@pytest.mark.parametrize(("error", "call"), combinations([Broken, KeyboardInterrupt], [2, 4, 6, 7, 9]))
def test_an_interrupted_round_restores_cache_and_experts(pair: Any, error: type[BaseException], call: int) -> None:
    """The first call is the prompt's; then drafts, then verification."""
    model, stock = pair
    cache = DynamicCache(config=model.config)
    with pytest.raises(error):
        model.generate(IDS, max_new_tokens=STEPS, do_sample=False, past_key_values=cache, logits_processor=[BreaksAt(call, error)])
    assert model.moegraft.context.draft_switch.settings is None
    held = cache.get_seq_length()
    text = stock.generate(IDS, max_new_tokens=STEPS, do_sample=False)
    found = model.generate(text[:, : held + 1], past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(found, text[:, : held + 6])


def test_all_layers_have_one_length_after_an_interrupted_forward_pass(pair: Any) -> None:
    model, _ = pair
    cache = DynamicCache(config=model.config)
    calls = 0

    def break_fourth(module: Any, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(break_fourth)
    with pytest.raises(KeyboardInterrupt):
        model.generate(IDS, max_new_tokens=STEPS, do_sample=False, past_key_values=cache)
    hook.remove()
    assert {layer.get_seq_length() for layer in cache.layers if isinstance(layer, DynamicLayer)} == {IDS.shape[1]}
    text = pair[1].generate(IDS, max_new_tokens=6, do_sample=False)
    found = model.generate(text[:, : IDS.shape[1] + 1], past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(found, text)


def test_two_models_generate_alternately(drafting: Any, stock: Any) -> None:
    models = [drafting("qwen3_moe", draft_top_k=1), drafting("gpt_oss", draft_top_k=1, max_draft=2)]
    twins = [stock("qwen3_moe"), stock("gpt_oss")]
    for seed in range(3):
        for model, twin in zip(models, twins, strict=True):
            ids = prompt(7, seed=seed)
            assert torch.equal(
                model.generate(ids, max_new_tokens=10, do_sample=False), twin.generate(ids, max_new_tokens=10, do_sample=False)
            )
    assert models[0].moegraft.context.draft_switch is not models[1].moegraft.context.draft_switch


class Sometimes(DraftSchedule):
    """Drafts once in every nine steps."""

    def __init__(self) -> None:
        self.plain = 8
        self.rounds: list[Round] = []

    def plan(self, limit: int) -> int:
        return 0 if self.plain else min(limit, 3)

    def plain_steps(self) -> int:
        return max(self.plain, 1)

    def record(self, done: Round) -> None:
        self.rounds.append(done)
        self.plain = 8 if done.confidences else max(self.plain - 1, 0)

    def state(self) -> str:
        return "sometimes"


@pytest.mark.parametrize("draft", ["experts", "ngram"])
@pytest.mark.parametrize("end", [None, "token", "criterion", "streamer"])
def test_steps_that_stay_plain_follow_each_other_in_one_call(
    end: str | None, draft: str, drafting: Any, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin, ids = drafting("mixtral", draft=draft), stock("mixtral"), prompt(9)
    greedy, calls = NativePasses.greedy, []

    def noted(self: NativePasses, *arguments: Any, **kwargs: Any) -> list[int]:
        tokens = greedy(self, *arguments, **kwargs)
        calls.append(len(tokens))
        return tokens

    monkeypatch.setattr(NativePasses, "greedy", noted)
    arguments: dict[str, Any] = {"max_new_tokens": 90, "do_sample": False}
    whole = model.generate(ids, **arguments)  # makes the programs
    if end == "token":
        new = whole[0, ids.shape[1] :].tolist()
        arguments["eos_token_id"] = max(set(new), key=new.index)  # the one that is generated last
    elif end == "criterion":
        arguments["stopping_criteria"] = [Count(ids.shape[1] + 60)]
    calls.clear()
    schedule = model.moegraft.model_operator._schedule = Sometimes()
    found, expected = (each.generate(ids, streamer=Collect() if end == "streamer" else None, **arguments) for each in (model, twin))
    assert torch.equal(found, expected)
    assert sum(done.generated for done in schedule.rounds) == found.shape[1] - ids.shape[1] - 1
    assert all(done.generated == 1 and done.verify_ms > 0 for done in schedule.rounds if not done.confidences)
    assert max(calls) == (
        1 if end in ("criterion", "streamer") else 7
    )  # a window is full: after a draft, a pass of the model begins the calls


def test_steps_of_one_token_have_one_program_with_past_states_and_without(drafting: Any) -> None:
    """The first draft lets the cache keep past states, which no step of one token writes."""
    model = drafting("qwen3_next", draft="ngram")
    schedule = model.moegraft.model_operator._schedule = Sometimes()
    model.generate(prompt(1).tile(1, 60), max_new_tokens=40, do_sample=False)
    first = next(place for place, done in enumerate(schedule.rounds) if done.confidences)
    assert [done.prepared for done in schedule.rounds[:first]] == [True] * 4 + [False] * (first - 4), "recorded and compared, twice each"
    assert not any(done.prepared for done in schedule.rounds[first:] if not done.confidences)


def test_rounds_without_drafts_go_on_in_a_program(drafting: Any, stock: Any) -> None:
    """Nothing is drafted under a processor with state; the steps follow each other as those of plain decoding do."""
    pair = drafting("mixtral"), stock("mixtral")
    marks = SynthIDTextWatermarkingConfig(ngram_len=5, keys=[654, 400, 836])
    with native_steps() as steps:
        for arguments in ({"do_sample": False}, {"do_sample": True, "temperature": 1.5}):
            for seed in range(3):
                texts = []
                for model in pair:
                    torch.manual_seed(seed)
                    texts.append(model.generate(prompt(9, seed=seed), max_new_tokens=60, watermarking_config=marks, **arguments))
                assert torch.equal(*texts)
    assert sum(steps) > 100


@pytest.mark.parametrize("arguments", [{"do_sample": False}, {"do_sample": True, "top_k": 1}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", ["experts", "ngram", "mtp"])
def test_rounds_follow_each_other_without_a_pass_of_the_model(
    draft: str, arguments: dict[str, Any], drafting: Any, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts and their verification, after the first ones of each length; the cache is that of plain decoding at the end."""
    model, twin, ids = drafting("demo", draft=draft), stock("demo"), prompt(24)
    arguments |= {"max_new_tokens": 150, "eos_token_id": VOCAB_SIZE - 1}  # which hardly comes
    describe, passes = NativePrograms.describe, 0

    def noted(self: NativePrograms, *arguments: Any) -> Any:
        nonlocal passes
        passes += 1
        return describe(self, *arguments)

    monkeypatch.setattr(NativePrograms, "describe", noted)
    caches = [DynamicCache(config=twin.config), new_cache(model)]
    expected = twin.generate(ids, past_key_values=caches[0], **arguments)
    model.generate(ids, **arguments)  # makes the programs
    before, passes = model.moegraft.model_operator.statistics()["rounds"], 0
    assert torch.equal(model.generate(ids, past_key_values=caches[1], **arguments), expected)
    rounds = model.moegraft.model_operator.statistics()["rounds"] - before
    assert rounds > 30
    assert passes < rounds, "a few in 64 tokens, instead of one for each drafted token and verification"
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        assert other.get_seq_length() == one.get_seq_length() == expected.shape[1] - 1
        torch.testing.assert_close(other.keys, one.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(other.values, one.values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("draft", ["experts", "mtp"])
def test_an_interrupted_round_is_taken_back_from_native_passes(draft: str, drafting: Any, stock: Any) -> None:
    """After each native pass of some rounds: the caller's cache has the tokens before the round, and the text goes on from there."""
    model, twin, ids = drafting("demo", draft=draft), stock("demo"), prompt(24)
    arguments: dict[str, Any] = {"do_sample": False, "eos_token_id": VOCAB_SIZE - 1}  # which hardly comes
    whole = twin.generate(ids, max_new_tokens=60, **arguments)
    model.generate(ids, max_new_tokens=150, **arguments)  # makes the programs
    left, lengths = 0, list[int]()

    def interrupt(frame: Any, event: str, called: Any) -> None:
        nonlocal left
        if event == "c_return" and getattr(called, "__name__", "") == "follow":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    for passes in (1, 2, *range(18, 25)):
        cache, left = new_cache(model), passes
        sys.setprofile(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                model.generate(ids, max_new_tokens=60, past_key_values=cache, **arguments)
        finally:
            sys.setprofile(None)
        lengths.append(cache.get_seq_length())
        text, rest = whole[:, : lengths[-1] + 1], whole.shape[1] - lengths[-1] - 1
        assert torch.equal(model.generate(text, max_new_tokens=rest, past_key_values=cache, **arguments), whole)
    assert ids.shape[1] == lengths[0] < lengths[-1] < whole.shape[1]
    assert len(set(lengths)) < len(lengths), "interrupts in the same round"
