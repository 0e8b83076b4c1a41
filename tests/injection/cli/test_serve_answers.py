"""What clients and agents ask of answers: several at once, scores of tokens, penalties, reasoning and calls of tools."""

from __future__ import annotations

import copy
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from support import combinations
from support.serving import (
    CALL,
    IN_JSON,
    IN_MARK,
    PATIENCE_S,
    SCHEMA,
    WEATHER,
    Server,
    ask,
    messages,
    one_by_one,
    openai,
    scripted,
    serving,
    until,
    with_tools,
)
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.serve.answer_form import AnswerGrammar, AnswerParser, Grammars, response_template
from moegraft.injection.cli.serve.answers import Choice
from moegraft.injection.cli.serve.job import Ask, Job, Piece, TokenScore
from moegraft.injection.cli.serve.openai import TokenizeBody
from moegraft.injection.cli.serve.service import Limits
from moegraft.injection.demo import demo_path

jsonschema = pytest.importorskip("jsonschema", reason="an extra for tests: pip install 'moegraft[test]'")


@pytest.fixture
def server(loaded: LoadedModel) -> Iterator[Server]:
    with serving(loaded) as running:
        yield running


@pytest.fixture(scope="module")
def bundled() -> Iterator[Server]:
    """The bundled model, whose chat template has none of the marks that the response template of its type looks for."""
    model = AutoModelForCausalLM.from_pretrained(demo_path()).eval()
    with serving(LoadedModel("bundled", model, AutoTokenizer.from_pretrained(demo_path()), lambda: [])) as running:
        yield running


def test_several_answers_are_those_of_their_seeds(server: Server) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "max_tokens": 8}
    together = ask(server, "hello", n=3, seed=5, **options)
    replies = [ask(server, "hello", seed=5 + index, **options) for index in range(3)]
    alone = [reply.choices[0].message.content for reply in replies]
    assert [choice.message.content for choice in together.choices] == alone and len(set(alone)) > 1
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert (together.usage.completion_tokens, together.usage.prompt_tokens) == (
        sum(reply.usage.completion_tokens for reply in replies),
        len("hello") + 3,
    )
    streamed = ["", "", ""]
    for chunk in ask(server, "hello", n=3, seed=5, stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == alone


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_the_models(server: Server, loaded: LoadedModel, stream: bool) -> None:
    reply = ask(server, "hello", logprobs=True, top_logprobs=3, temperature=0.5, seed=1, stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in reply]
        scores = [entry for choice in chunks if choice.logprobs for entry in choice.logprobs.content]
        text = "".join(choice.delta.content or "" for choice in chunks)
    else:
        scores, text = reply.choices[0].logprobs.content, reply.choices[0].message.content
    assert "".join(entry.token for entry in scores) == text
    prompt: Any = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)["input_ids"]
    answer = loaded.tokenizer(text)["input_ids"]
    with torch.inference_mode():
        expected = loaded.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    torch.testing.assert_close(torch.tensor([entry.logprob for entry in scores]), expected.gather(1, torch.tensor(answer)[:, None])[:, 0])
    torch.testing.assert_close(torch.tensor([[top.logprob for top in entry.top_logprobs] for entry in scores]), expected.topk(3).values)


def together(reply: Any, *, stream: bool) -> tuple[str, str, str]:
    """The content of an answer, the tokens with scores as one text, and their bytes as one."""
    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
    said = [choice.delta if stream else choice.message for choice in choices]
    scores = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    return (
        "".join(each.content or "" for each in said),
        "".join(entry.token for entry in scores),
        b"".join(map(bytes, (entry.bytes for entry in scores))).decode(),
    )


SCORED: dict[str, dict[str, Any]] = {
    "text": {"temperature": 0},
    "any characters": {"temperature": 2.0, "seed": 3, "max_tokens": 200},  # with characters of several tokens, and half ones
    "stop string": {"temperature": 0, "stop": "er"},  # within a token
    "JSON": {"temperature": 0, "response_format": {"type": "json_object"}},
}


@pytest.mark.parametrize(("stream", "kind"), combinations([False, True], list(SCORED)))
def test_tokens_with_scores_add_up_to_the_content(bundled: Server, kind: str, stream: bool) -> None:
    options = SCORED[kind]
    content, tokens, signs = together(ask(bundled, "Speak!", **{"max_tokens": 30, **options}, logprobs=True, stream=stream), stream=stream)
    assert content and tokens == signs == content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [None, "ou"])
def test_tokens_with_scores_are_those_of_the_content_alone(loaded: LoadedModel, stop: str | None, stream: bool) -> None:
    """Characters of several tokens are whole, and neither reasoning nor calls, nor the marks around them, are content."""
    with scripted(loaded, f"<think>\nRomé?</think>Já, ich <schau>.\n{CALL}so <und> ou 中") as server:
        reply = ask(server, "weather?", tools=[WEATHER], max_tokens=300, logprobs=True, top_logprobs=2, stop=stop, stream=stream)
        content, tokens, signs = together(reply, stream=stream)
    assert content == f"Já, ich <schau>.so <und> {'' if stop else 'ou 中'}"
    assert tokens == signs == content


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_pieces_that_come_together_keep_the_scores_of_their_tokens(kind: Literal["chat", "text"], size: int) -> None:
    """Also with a tokenizer that leaves out the space of a text's first word, which alternatives have."""
    words = {"<s>": 0, "▁the": 1, "▁king": 2, "s": 3, "▁men": 4}
    fast = Tokenizer(models.WordLevel(vocab=words, unk_token="<s>"))
    fast.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<s>")
    pieces: list[Piece] = []
    job = Job(Ask([4], 5, end_tokens=[0], logprobs=2), tokenizer, pieces.append)
    for token in (1, 2, 3, 4, 0):
        job.take(token, TokenScore(token, -1.0, ((token, -1.0), (2, -2.0))))
    job.report_end()
    choice = Choice(kind, 0, job, tokenizer, None, "")
    parts = [part for start in range(0, len(pieces), size) for part in choice.add(pieces[start : start + size])]
    whole = choice.whole()
    wanted = ["the", " king", "s", " men"]
    if kind == "text":
        assert whole["text"] == "the kings men"
        found = whole["logprobs"]
        assert found["tokens"] == wanted and found["text_offset"] == [0, 3, 8, 9]
        assert [*found["top_logprobs"][0]] == ["the", " king"]
        assert [text for part in parts if part["logprobs"] for text in part["logprobs"]["tokens"]] == wanted
    else:
        assert whole["message"]["content"] == "the kings men"
        assert [entry["token"] for entry in whole["logprobs"]["content"]] == wanted
        assert [entry["token"] for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]] == wanted


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("chunk", [512, 3])
def test_an_echoed_prompt_has_the_scores_of_its_tokens(loaded: LoadedModel, max_tokens: int, chunk: int) -> None:
    prompt = "the quick fox"
    with serving(loaded, Limits(prefill_chunk=chunk)) as server:
        options: dict[str, Any] = {"model": server.service.model_id, "prompt": prompt, "temperature": 0}
        for _ in range(2):  # the second may not use the first's cache
            reply = server.client().completions.create(**options, echo=True, logprobs=2, max_tokens=max_tokens)
        plain = server.client().completions.create(**options, max_tokens=5)
    choice = reply.choices[0]
    assert choice.text == prompt + plain.choices[0].text[:max_tokens]
    scores = choice.logprobs
    assert "".join(scores.tokens) == choice.text and scores.text_offset == list(range(len(choice.text)))
    ids = loaded.tokenizer(choice.text)["input_ids"]
    with torch.inference_mode():
        expected = loaded.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
    torch.testing.assert_close(torch.tensor(scores.token_logprobs[1:]), expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    assert all(
        max(top, key=top.get) == loaded.tokenizer.decode([best])
        for top, best in zip(scores.top_logprobs[1:], expected.argmax(-1), strict=True)
    )
    assert reply.usage.completion_tokens == max_tokens


def test_an_echoed_prompt_has_a_score_for_each_token_also_where_the_answer_ends_at_once(loaded: LoadedModel) -> None:
    """Clients that score a text ask for one token and take off the last score."""
    prompt, end = "the quick fox", loaded.tokenizer.eos_token_id
    with serving(loaded) as server:
        options: dict[str, Any] = {"model": server.service.model_id, "prompt": prompt, "logprobs": 1, "max_tokens": 1}
        [choice] = server.client().completions.create(**options, echo=True, logit_bias={str(end): 100}).choices
    assert choice.finish_reason == "stop" and choice.text == prompt
    count = len(loaded.tokenizer(prompt)["input_ids"])
    assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens) == count + 1 and choice.logprobs.tokens[-1] == ""


def test_a_token_is_among_the_likeliest_ones_of_its_place(loaded: LoadedModel) -> None:
    """As with OpenAI's completions: one more than asked for, where it is none of these."""
    with serving(loaded) as server:
        options: dict[str, Any] = {"model": server.service.model_id, "prompt": "the quick fox", "max_tokens": 0, "echo": True}
        for asked in (0, 1):
            scores = server.client().completions.create(**options, logprobs=asked).choices[0].logprobs
            assert len(scores.tokens) > 2
            for token, value, top in list(zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True))[1:]:
                assert top[token] == value and asked <= len(top) <= asked + 1


def test_of_tokens_with_one_text_the_likeliest_is_reported(stock: LoadedModel) -> None:
    """Tokens that are parts of characters have the same text in completions, which name the likeliest tokens by their texts."""
    letter, *parts = stock.tokenizer.convert_tokens_to_ids(["a", *stock.tokenizer.tokenize("é")])
    pieces: list[Piece] = []
    job = Job(Ask([letter], 1, logprobs=3), stock.tokenizer, pieces.append)
    job.take(letter, TokenScore(letter, -4.0, ((parts[0], -1.0), (parts[1], -2.0), (letter, -4.0))))
    job.report_end()
    choice = Choice("text", 0, job, stock.tokenizer, None, "")
    choice.add(pieces)
    assert choice.whole()["logprobs"]["top_logprobs"] == [{"\ufffd": -1.0, "a": -4.0}]


@pytest.mark.parametrize("way", ["together", "one by one"])
def test_penalties_and_biases_apply(loaded: LoadedModel, stock: LoadedModel, way: str) -> None:
    if way == "one by one":
        loaded = one_by_one(stock, no_repeat_ngram_size=100)
    [z] = loaded.tokenizer("z")["input_ids"]
    with serving(loaded) as server:
        assert (server.service.alone_because is None) == (way == "together")
        assert ask(server, "hello", logit_bias={str(z): 100}, max_tokens=4).choices[0].message.content == "zzzz"
        varied = ask(server, "hello", logit_bias={str(z): 40}, presence_penalty=2, frequency_penalty=2, max_tokens=60)
        assert "z" in varied.choices[0].message.content and varied.choices[0].message.content != "z" * 60
        plain, punished = (ask(server, "hello", max_tokens=60, extra_body=extra) for extra in ({}, {"repetition_penalty": 50.0}))
        texts = [reply.choices[0].message.content for reply in (plain, punished)]
        assert len(set(texts[1])) > len(set(texts[0]))


@pytest.mark.parametrize("way", ["together", "one by one"])
@pytest.mark.parametrize("several", [False, True])
def test_stop_strings_of_the_model_end_answers(stock: LoadedModel, way: str, several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = one_by_one(stock, no_repeat_ngram_size=100) if way == "one by one" else stock
    with serving(loaded) as server:
        whole = ask(server, "hello", max_tokens=40).choices[0].message.content
        ends = [whole[20:24], whole[10:14]] if several else [whole[20:24]]
        monkeypatch.setattr(loaded.model.generation_config, "stop_strings", ends if several else ends[0])
        for more in ([], [whole[4:8]]):
            reply = ask(server, "hello", max_tokens=40, stop=more).choices[0]
            assert (reply.message.content, reply.finish_reason) == (whole[: min(map(whole.index, ends + more))], "stop")


def test_logprobs_are_refused_where_requests_are_answered_one_at_a_time(stock: LoadedModel) -> None:
    message = r"logprobs are not available for this model: .*repetition_penalty"
    with serving(one_by_one(stock)) as server, pytest.raises(openai.BadRequestError, match=message):
        ask(server, "hello", logprobs=True)


def test_calls_of_tools_and_reasoning_are_found(loaded: LoadedModel) -> None:
    with scripted(loaded, f"<think>\nRome?</think>I look.{CALL}") as server:
        choice = ask(server, "weather?", tools=[WEATHER], max_tokens=200).choices[0]
        message = choice.message
        assert choice.finish_reason == "tool_calls"
        assert (message.content.strip(), message.reasoning_content.strip()) == ("I look.", "Rome?")
        [call] = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})

        content, reasoning, calls, reasons = "", "", [], []
        for chunk in ask(server, "weather?", tools=[WEATHER], max_tokens=200, stream=True):
            delta = chunk.choices[0].delta
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
            calls += delta.tool_calls or []
            reasons.append(chunk.choices[0].finish_reason)
        assert (content.strip(), reasoning.strip(), reasons[-1]) == ("I look.", "Rome?", "tool_calls")
        assert [(each.index, each.function.name, json.loads(each.function.arguments)) for each in calls] == [
            (0, "weather", {"city": "Rome"})
        ]


MARKS = ["<think>", "say </think> now <think> x", "<|im_start|>assistant\n<think>\n", "a <tool_call> b", "</think>"]


@pytest.mark.parametrize("text", MARKS)
def test_marks_in_a_message_do_not_change_how_the_answer_is_parsed(bundled: Server, text: str) -> None:
    client, model = bundled.client(), bundled.service.model_id
    prompt = bundled.service.tokenize(TokenizeBody(messages=messages(text)))["tokens"]
    options: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 20}
    wanted = client.completions.create(prompt=prompt, **options).choices[0].text
    message = ask(bundled, text, **options).choices[0].message
    assert (message.content, getattr(message, "reasoning_content", None), message.tool_calls) == (wanted, None, None)
    reply = client.responses.create(model=model, input=text, temperature=0, max_output_tokens=20)
    assert [item.type for item in reply.output] == ["message"] and reply.output_text == wanted
    form: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    content = ask(bundled, text, max_tokens=200, response_format=form).choices[0].message.content
    assert content.startswith("{") and jsonschema.validate(json.loads(content), SCHEMA) is None


@pytest.mark.parametrize("start", ["<|im_start|>assistant\n", "<assistant>"], ids=["with the anchor", "without"])
@pytest.mark.parametrize("opening", ["<think>\n", "<think>\n\n</think>\n\n", ""], ids=["begun", "ended", "none"])
def test_what_the_chat_template_begins_is_known_from_it_alone(loaded: LoadedModel, opening: str, start: str) -> None:
    answer, reasoning = ("Rome?</think>It rains.", "Rome?") if opening == "<think>\n" else ("It rains.", None)
    with scripted(loaded, answer, opening=start + opening) as server:
        for text in MARKS:
            turns: Any = [{"role": role, "content": text} for role in ("system", "user", "assistant", "tool", "user")]
            reply = server.client().chat.completions.create(model="scripted", messages=turns, max_tokens=100, stop="never")
            message = reply.choices[0].message
            assert (message.content, getattr(message, "reasoning_content", None)) == ("It rains.", reasoning)


def test_an_agent_goes_on_with_the_result_of_a_tool(loaded: LoadedModel) -> None:
    with scripted(loaded, "It rains.") as server:
        function = {"name": "weather", "arguments": '{"city": "Rome"}'}
        turns = [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "1", "content": "rain"},
        ]
        reply = server.client().chat.completions.create(model="scripted", messages=turns, tools=[WEATHER], max_tokens=50)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("It rains.", "stop")
        expected = "<system>weather<user>user:weather?<end><user>assistant:weather(Rome)<end><user>tool:rain<end><assistant>"
        assert reply.usage.prompt_tokens == len(loaded.tokenizer(expected)["input_ids"])


def test_what_a_template_cannot_take_is_refused(loaded: LoadedModel) -> None:
    with scripted(loaded, "It rains.") as server:
        calls = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": "[1]"}}]
        turns = [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "user", "content": "weather?"}]
        server.service.loaded.tokenizer.chat_template += "{{ messages[0].tool_calls[0].function.arguments | length + none }}"
        with pytest.raises(openai.BadRequestError, match="chat template refuses"):
            server.client().chat.completions.create(model="scripted", messages=turns, max_tokens=5)


@pytest.mark.parametrize("name", ["messages", "conversations", "chat_template", "tokenize"])
def test_what_a_template_is_given_anyway_is_no_variable(server: Server, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{name}: no variable that a request can set"):
        ask(server, "hello", extra_body={"chat_template_kwargs": {name: "x"}})


WROTE = '{"city": "Rome", "degrees": 7}'
LOOK_UP = copy.deepcopy(WEATHER)
LOOK_UP["function"] = {
    "name": "look_up",
    "parameters": {"type": "object", "properties": {"id": {"enum": [1, 22]}}, "required": ["id"], "additionalProperties": False},
}
SHORT = copy.deepcopy(WEATHER)
SHORT["function"]["parameters"] = {  # type: ignore[index]
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}},
    "required": ["city"],
    "additionalProperties": False,
}

XML = copy.deepcopy(IN_MARK)  # as Qwen3.5 writes calls
XML["fields"]["tool_calls"] |= {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
}
del XML["fields"]["tool_calls"]["close"]


@pytest.mark.parametrize("template", [IN_JSON, IN_MARK], ids=["names in JSON", "names in the mark"])
def test_a_call_is_forced(loaded: LoadedModel, template: dict[str, Any]) -> None:
    options: dict[str, Any] = {"tools": [LOOK_UP, SHORT], "max_tokens": 600, "temperature": 1.3, "parallel_tool_calls": False}
    with with_tools(loaded, template) as server:
        assert ask(server, "weather?", **options).choices[0].message.tool_calls is None, "of itself it calls nothing"
        for seed in range(4):
            choice = ask(server, "weather?", tool_choice="required", seed=seed, **options).choices[0]
            [call] = choice.message.tool_calls
            assert choice.finish_reason == "tool_calls" and not choice.message.content
            tool = {"look_up": LOOK_UP, "weather": SHORT}[call.function.name]
            jsonschema.validate(json.loads(call.function.arguments), tool["function"]["parameters"])  # type: ignore[index]
        for name in ("look_up", "weather"):
            named: Any = {"type": "function", "function": {"name": name}}
            [call] = ask(server, "weather?", tool_choice=named, **options).choices[0].message.tool_calls
            assert call.function.name == name
        [delta] = [
            call
            for chunk in ask(server, "weather?", tool_choice="required", stream=True, **options)
            for call in chunk.choices[0].delta.tool_calls or []
        ]
        assert delta.function.name in ("look_up", "weather") and json.loads(delta.function.arguments) is not None


@pytest.mark.parametrize("template", [IN_JSON, IN_MARK], ids=["names in JSON", "names in the mark"])
def test_references_in_a_forced_tool_are_to_its_own_schema(loaded: LoadedModel, template: dict[str, Any]) -> None:
    """As pydantic writes the parameters of a nested or recursive type."""
    inner = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"], "additionalProperties": False}
    recursive = {**inner, "properties": {"next": {"anyOf": [{"$ref": "#/$defs/End"}, {"$ref": "#"}]}}, "$defs": {"End": {"const": 1}}}
    tool = {"type": "function", "function": {"name": "walk", "parameters": recursive}}
    with with_tools(loaded, template) as server:
        for seed in range(3):
            reply = ask(server, "hello", tools=[tool], tool_choice="required", seed=seed, max_tokens=400, parallel_tool_calls=False)
            [call] = reply.choices[0].message.tool_calls
            jsonschema.validate(json.loads(call.function.arguments), recursive)


@pytest.mark.parametrize("template", [IN_JSON, IN_MARK], ids=["names in JSON", "names in the mark"])
@pytest.mark.parametrize("parameters", [{}, {"parameters": {}}, {"parameters": None}])
def test_a_forced_tool_without_parameters_has_no_arguments(loaded: LoadedModel, template: dict[str, Any], parameters: Any) -> None:
    """OpenAI defines it so; a weak model would write arguments until the answer's limit, and the call would be lost."""
    tool = {"type": "function", "function": {"name": "now", **parameters}}
    endless = {str(loaded.tokenizer("a")["input_ids"][0]): 100}
    with with_tools(loaded, template) as server:
        options: dict[str, Any] = {"max_tokens": 90, "parallel_tool_calls": False, "logit_bias": endless}
        [call] = ask(server, "hello", tools=[tool], tool_choice="required", **options).choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("now", {})


def test_a_forced_call_may_follow_reasoning(loaded: LoadedModel) -> None:
    """Of its own, or begun by the prompt; JSON by a schema and a client's grammar follow reasoning, too."""
    text = f"<think>\nRome?</think>\n{CALL}"
    with scripted(loaded, text) as server:
        message = ask(server, "weather?", tools=[WEATHER], tool_choice="required", max_tokens=200).choices[0].message
        assert message.reasoning_content.strip() == "Rome?" and message.tool_calls[0].function.name == "weather"
    begun = "<|im_start|>assistant\n<think>\n"
    for answer, content, options in (
        (CALL, "", {"tools": [WEATHER], "tool_choice": "required"}),
        (WROTE, WROTE, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
        (WROTE, WROTE, {"response_format": {"type": "json_object"}}),
        ("yes", "yes", {"grammar": 'start: "yes" | "no"'}),
        ("no", "no", {"grammar": 'root ::= "yes" | "no"'}),  # GBNF
    ):
        for opening, thought in ((begun, "Rome? yes</think>\n\n"), ("<assistant>", "<think>Rome? yes</think>")):
            with scripted(loaded, f"{thought}{answer}", opening=opening) as server:
                reply = ask(server, "weather?", max_tokens=200, extra_body=options)
            message = reply.choices[0].message
            assert (message.reasoning_content.strip(), (message.content or "").strip()) == ("Rome? yes", content), options
            assert [call.function.name for call in message.tool_calls or []] == (["weather"] if "tools" in options else [])
            assert reply.usage.completion_tokens_details.reasoning_tokens == len(thought.strip())
    with scripted(loaded, f"Rome? yes</think>{WROTE}", opening=f"{begun}</think>") as server:  # the prompt has ended it
        message = ask(server, "weather?", max_tokens=200, extra_body={"grammar": 'start: "yes" | "no"'}).choices[0].message
        assert message.content in ("yes", "no") and not getattr(message, "reasoning_content", None)


TWICE: dict[str, tuple[dict[str, Any] | None, str, str]] = {
    "names in JSON": (None, "", f"{CALL}\n{CALL}"),
    "names in JSON after reasoning": (None, "<think>Rome?</think>", f"{CALL}\n{CALL}"),
    "names in the mark": (IN_MARK, "", '[call:weather]{"city": "Rome"}[/call]' * 2),
    "XML": (XML, "", "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>" * 2),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("names", TWICE)
def test_an_answer_of_a_form_may_be_calls(loaded: LoadedModel, names: str, stream: bool) -> None:
    """As agents with tools ask for that also want their last answer as JSON."""
    template, thought, call = TWICE[names]
    form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    with scripted(loaded, thought + call, then=thought + WROTE, template=template) as server:
        turns: list[dict[str, Any]] = [{"role": "user", "content": "weather?"}]
        for expected in (["weather"] * 2, []):
            reply = server.client().chat.completions.create(
                model="scripted", messages=turns, tools=[WEATHER], response_format=form, max_tokens=300, stream=stream
            )
            messages = [chunk.choices[0].delta for chunk in reply] if stream else [reply.choices[0].message]
            calls = [called for each in messages for called in each.tool_calls or []]
            assert [called.function.name for called in calls] == expected
            assert all(json.loads(called.function.arguments) == {"city": "Rome"} for called in calls)
            assert "".join(each.content or "" for each in messages) == ("" if expected else WROTE)
            given = [{"id": str(place), "type": "function", "function": called.function.model_dump()} for place, called in enumerate(calls)]
            turns += [{"role": "assistant", "content": None, "tool_calls": given}]
            turns += [{"role": "tool", "tool_call_id": each["id"], "content": "7"} for each in given]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "tokens", "share"),
    [
        ("<think>Rome?</think>It rains.", 200, len("<think>Rome?</think>")),
        ("<think>Rome?</think>It rains.", 9, 9),  # it ends in the reasoning
        ("<think>Rome?", 200, len("<think>Rome?") + 1),  # and with the token that ends an answer
        ("It rains.", 200, 0),
    ],
)
def test_tokens_of_reasoning_are_counted(loaded: LoadedModel, text: str, tokens: int, share: int, stream: bool) -> None:
    with scripted(loaded, text) as server:
        reply = ask(server, "weather?", max_tokens=tokens, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
        usage = list(reply)[-1].usage if stream else reply.usage
        assert usage.completion_tokens_details.reasoning_tokens == share
        assert usage.completion_tokens == min(tokens, len(text) + 1)


def test_a_call_that_cannot_be_forced_is_refused(loaded: LoadedModel) -> None:
    inline = copy.deepcopy(IN_MARK)
    inline["fields"]["tool_calls"] |= {"content": "xml-inline", "content_args": {"tag_pattern": "(?P<key>a)(?P<value>b)"}}  # type: ignore[index]
    with with_tools(loaded, inline) as server:
        for options, message in (
            ({"tool_choice": "required"}, "tool_choice: the model's response template does not define how a call is written"),
            ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice: there is no tool 'other'"),
            ({"tool_choice": "required", "tools": []}, "tool_choice: there are no tools"),
            ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "contradict"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                ask(server, "weather?", extra_body={"tools": [WEATHER], **options})


def test_forced_json_leaves_no_room_for_white_space(loaded: LoadedModel) -> None:
    """A model that would write nothing else gets at most one space behind a comma or a colon."""
    blanks = {str(token): 100 for token in loaded.tokenizer(" \n\t")["input_ids"]}
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "enums", "schema": schema}}
    with with_tools(loaded, IN_JSON) as server:
        content = ask(server, "hello", response_format=form, max_tokens=60, logit_bias=blanks).choices[0].message.content
        assert content == json.dumps(json.loads(content))
        reply = server.client().responses.create(
            model=server.service.model_id,
            input="hello",
            max_output_tokens=60,
            text={"format": {"type": "json_schema", "name": "enums", "schema": schema}},
            extra_body={"logit_bias": blanks},
        )
        assert reply.output_text == content
        anything = ask(server, "hello", response_format={"type": "json_object"}, max_tokens=60, logit_bias=blanks)
        assert re.match(r'\{(}|" )', anything.choices[0].message.content), "only in a text are there spaces"
        endless = {str(loaded.tokenizer("a")["input_ids"][0]): 100}
        long = ask(server, "hello", response_format={"type": "json_object"}, max_tokens=200, logit_bias=endless).choices[0].message.content
        assert re.match(r'\{"a{128}":', long), "a key has an end"
        forced = ask(server, "hello", tools=[LOOK_UP], tool_choice="required", max_tokens=90, logit_bias=blanks, parallel_tool_calls=False)
        [call] = forced.choices[0].message.tool_calls
        longest = f'<tool_call>\n{{"name": "look_up", "arguments": {call.function.arguments}}}\n</tool_call>'
        assert forced.usage.completion_tokens <= len(longest) + 1


def test_marks_that_are_tokens_are_found_in_the_grammar(loaded: LoadedModel) -> None:
    tokenizer: Any = copy.deepcopy(loaded.tokenizer)
    marks = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in marks])
    template = response_template(loaded.model, tokenizer)
    assert template is not None
    grammar = AnswerGrammar(template, {mark: tokenizer.convert_tokens_to_ids(mark) for mark in marks})
    forms = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    words = 'start: word\nword: "yes" | "no"\n%ignore " "'  # with a rule's name that calls have too
    cases: list[tuple[str, Any, str]] = [
        (grammar.calls([WEATHER], single=False, reasoning=reasoning), None, text)
        for reasoning, text in (
            ("possible", f"<think>hm</think>\n{CALL}"),
            ("possible", CALL),
            ("begun", f"hm</think>{CALL}"),
            ("none", f"{CALL}\n{CALL}"),
        )
    ]
    for reasoning in ("begun", "possible"):
        before = f"{'' if reasoning == 'begun' else '<think>'}no! {{</think>\n\n"
        cases += [(grammar.form(form, reasoning=reasoning), form, before + text) for form, text in ((words, "yes"), (SCHEMA, WROTE))]
    cases += [
        (grammar.form(form, reasoning=reasoning), form, text)
        for form, text in ((words, "no"), (SCHEMA, WROTE))
        for reasoning in ("none", "possible")
    ]
    cases += [(grammar.form(SCHEMA, reasoning="none", calls=True), SCHEMA, text) for text in (WROTE, CALL, f"{CALL}\n{CALL}")]
    cases += [(grammar.form(SCHEMA, reasoning="possible", calls=True), SCHEMA, f"<think>hm</think>\n{CALL}")]
    for given, form, text in cases:
        ids = tokenizer(text)["input_ids"]
        assert form is not None or tokenizer.convert_tokens_to_ids("<tool_call>") in ids
        constraint = forms.constraint(given)
        for end in range(len(ids)):
            allowed = constraint.restrict(torch.zeros(len(tokenizer)), ids[:end])
            assert allowed[ids[end]] == 0, f"{text[:end]!r} can go on"
        assert constraint.restrict(torch.zeros(len(tokenizer)), ids)[tokenizer.eos_token_id] == 0, "and end"


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("single", [False, True])
def test_a_parser_finds_the_same_in_any_pieces(loaded: LoadedModel, size: int, single: bool) -> None:
    template = response_template(loaded.model, loaded.tokenizer)
    assert template is not None
    text = f"<think>\nhm</think>t < < <first{CALL}{CALL}"
    parser = AnswerParser(template, "", [WEATHER], single_tool_call=single)
    found: dict[str, str] = {"content": "", "reasoning": "", "tool_call": ""}
    for start in range(0, len(text), size):
        for delta in parser.feed(text[start : start + size], last=start + size >= len(text)):
            found[delta.kind] += delta.name + delta.text
            assert delta.kind != "content" or text.startswith(delta.text, delta.start)
    assert (found["content"].strip(), found["reasoning"].strip()) == ("t < < <first", "hm")
    assert found["tool_call"] == 'weather{"city": "Rome"}' * (1 if single else 2)


INLINE = copy.deepcopy(IN_MARK)
INLINE["fields"]["tool_calls"] |= {  # calls of which half would be one as well
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>[^<]*)</\w+>"},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thought", ["<think>hm</think>", "hm</think>"], ids=["the model reasons", "the prompt begins it"])
def test_white_space_behind_reasoning_is_no_content(loaded: LoadedModel, thought: str, stream: bool) -> None:
    opening = "<assistant>" if thought.startswith("<") else "<|im_start|>assistant\n<think>\n"
    with scripted(loaded, f"{thought}\n\n It rains.\n\nIt pours. ", opening=opening) as server:
        reply = ask(server, "weather?", max_tokens=100, logprobs=True, stream=stream)
        assert together(reply, stream=stream) == ("It rains.\n\nIt pours. ",) * 3


CUT: dict[str, tuple[dict[str, Any] | None, str]] = {
    "names in JSON": (None, CALL),
    "names in the mark": (IN_MARK, '[call:weather]{"city": "Rome"}[/call]'),
    "XML": (INLINE, "[call:weather]<city>Rome</city><days>3</days>[/call]"),
}


@pytest.mark.parametrize(("stream", "cut", "names"), combinations([False, True], ["length", "stop"], list(CUT)))
def test_a_call_that_is_cut_off_is_left_out(loaded: LoadedModel, names: str, cut: str, stream: bool, long: bool) -> None:
    """Wherever it is cut; what came before it, complete calls included, is reported."""
    template, call = CUT[names]
    text = f"I look.{call}\n{call}"
    whole = {"city": "Rome", "days": "3"} if template is INLINE else {"city": "Rome"}
    with scripted(loaded, text, template=template) as server:
        for size in range(len("I look.") - 1, len(text), 8 if long else 20):
            # a stop string that ends the answer at the same place
            options = {"max_tokens": size} if cut == "length" else {"max_tokens": 300, "stop": text[size : size + 40]}
            reply = ask(server, "weather?", tools=[WEATHER], stream=stream, **options)
            choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
            said = [choice.delta if stream else choice.message for choice in choices]
            assert "".join(each.content or "" for each in said).strip() == "I look."[:size], text[:size]
            calls = [found for each in said for found in each.tool_calls or []]
            assert all(found.function.name == "weather" and json.loads(found.function.arguments) == whole for found in calls)
            if cut == "length":
                assert choices[-1].finish_reason == "length"
                assert text[:size].count(call) <= len(calls) <= text[:size].count(call[: call.rfind("}") + 1 or None])
                flat: Any = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
                create = server.client().responses.create
                given: Any = create(model="scripted", input="weather?", tools=[flat], max_output_tokens=size, stream=stream)
                events = list(given) if stream else []
                response = events[-1].response if stream else given
                assert response.output_text.strip() == "I look."[:size] and response.status == "incomplete"
                assert [item.type for item in response.output] == ["message", *["function_call"] * len(calls)]
                shown = "".join(event.delta for event in events if event.type == "response.output_text.delta")
                assert shown == (response.output_text if stream else "")


def test_a_call_that_is_no_json_is_passed_on_as_text(loaded: LoadedModel) -> None:
    with scripted(loaded, "so: <tool_call>{broken</tool_call>") as server:
        choice = ask(server, "weather?", tools=[WEATHER], max_tokens=200).choices[0]
    assert choice.message.tool_calls is None and "{broken" in choice.message.content


def test_tokens_of_text_and_chats(server: Server, loaded: LoadedModel) -> None:
    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = Request(server.address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=PATIENCE_S) as reply:
            found: dict[str, Any] = json.loads(reply.read())
        return found

    wanted = list(loaded.tokenizer("hello")["input_ids"])
    assert post("/tokenize", {"prompt": "hello"}) == {"tokens": wanted, "count": 5, "max_model_len": loaded.context_tokens}
    assert post("/tokenize", {"content": "hello"})["tokens"] == wanted
    assert post("/tokenize", {"messages": [{"role": "user", "content": "hello"}]})["count"] == len("hello") + 3
    assert post("/detokenize", {"tokens": wanted})["prompt"] == "hello"
    for path, body in (("/tokenize", {"prompt": 1}), ("/detokenize", {"tokens": [10**9]}), ("/detokenize", {"tokens": ["a"]})):
        with pytest.raises(HTTPError, match="400"):
            post(path, body)


@pytest.mark.parametrize(
    ("host", "status"), [("localhost", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example:8000", 403), ("evil.localhost", 403)]
)
def test_names_of_other_sites_are_refused(loaded: LoadedModel, host: str, status: int) -> None:
    """A page of another site, whose name resolves to this address, sends its own name."""
    with serving(loaded, hosts=("localhost", "127.0.0.1", "[::1]")) as server:
        request = Request(f"{server.address}/v1/models", headers={"Host": host})
        if status == 200:
            with urlopen(request, timeout=PATIENCE_S) as reply:
                assert reply.status == 200
        else:
            with pytest.raises(HTTPError, match="403"):
                urlopen(request, timeout=PATIENCE_S)


def test_a_body_that_does_not_arrive_is_refused(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraft.injection.cli.serve.app.BODY_S", 0.2)
    with serving(loaded) as server:
        host, port = server.address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
            client.sendall(head.encode())
            assert b" 408 " in client.recv(1000)
        assert ask(server, "hello").choices[0].message.content


def test_a_full_queue_refuses_before_it_reads_the_body(loaded: LoadedModel) -> None:
    hook = loaded.model.register_forward_pre_hook(lambda *args: time.sleep(0.01))
    try:
        with serving(loaded, Limits(max_batch=1, max_queue=1)) as server, ThreadPoolExecutor(2) as pool:
            first = pool.submit(ask, server, "hello", max_tokens=100)
            until(lambda: server.service.engine.running == 1)
            second = pool.submit(ask, server, "hello", max_tokens=1)
            until(lambda: server.service.engine.waiting == 1)
            host, port = server.address.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
                head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n"
                client.sendall(head.encode())  # the body never comes
                assert b" 429 " in client.recv(1000)
            assert first.result() and second.result()
            assert server.service.engine.rejected == 1
    finally:
        hook.remove()


@pytest.mark.parametrize("way", ["together", "one by one"])
def test_answers_follow_schemas_and_grammars(loaded: LoadedModel, stock: LoadedModel, way: str) -> None:
    """The model is random and writes lowercase letters, so that any JSON comes from the constraint alone."""
    if way == "one by one":
        loaded = one_by_one(stock, no_repeat_ngram_size=1000)
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    with serving(loaded) as server, ThreadPoolExecutor(4) as pool:
        alone_text = ask(server, "hello", max_tokens=30).choices[0].message.content
        free = pool.submit(ask, server, "hello", max_tokens=30)
        asked = [pool.submit(ask, server, "hello", max_tokens=80, temperature=1.2, seed=s, response_format=form) for s in range(3)]
        for reply in asked:
            choice = reply.result().choices[0]
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
            assert choice.finish_reason == "stop"
        assert free.result().choices[0].message.content == alone_text, "others are not restricted"
        several = ask(server, "hello", n=2, max_tokens=80, response_format=form)
        assert all(json.loads(choice.message.content) for choice in several.choices)
        text = ask(server, "hello", max_tokens=80, extra_body={"grammar": 'start: "yes " /[0-9]{3}/ | "no"'}).choices[0].message.content
        assert re.fullmatch("yes [0-9]{3}|no", text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grammar": "start: other"}, "unknown name"),
        ({"grammar": 'root ::= "a'}, "GBNF cannot be read: Unexpected end"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strnig"}}}}, "strnig"),
        ({"response_format": {"type": "xml"}}, "response_format: .*'xml'"),
        ({"response_format": {"type": "json_object"}, "grammar": "start: /a/"}, "contradict"),
    ],
)
def test_what_no_answer_can_follow_is_refused(server: Server, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(server, "hello", extra_body=options)


def test_variables_of_the_chat_template_are_given_to_it(loaded: LoadedModel) -> None:
    """As clients of models that reason send them; none may replace the template, nor what it is called with."""
    begun = "<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
    with scripted(loaded, "Rome?</think>It rains.", opening=begun) as server:
        message = ask(server, "weather?", max_tokens=100).choices[0].message
        assert (message.reasoning_content, message.content) == ("Rome?", "It rains.")
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        message = ask(server, "weather?", max_tokens=100, extra_body=off).choices[0].message
        assert message.content == "Rome?</think>It rains." and not getattr(message, "reasoning_content", None)
        for name in ("chat_template", "tokenize", "messages"):
            with pytest.raises(openai.BadRequestError, match=name):
                ask(server, "weather?", extra_body={"chat_template_kwargs": {name: "x"}})


def test_the_effort_of_reasoning_is_given_to_the_chat_template(loaded: LoadedModel) -> None:
    opening = "{% if enable_thinking | default(true) %}<{{ reasoning_effort | default('usual') }}>{% endif %}"
    with scripted(loaded, "It rains.", opening=opening) as server:
        client, model = server.client(), server.service.model_id

        def added(effort: Any, **others: Any) -> tuple[int, int]:
            """How many tokens an effort adds to the prompt, in chats and in Responses."""
            chat = ask(server, "hi", **({} if effort is None else {"reasoning_effort": effort}), **others).usage.prompt_tokens
            options: Any = {} if effort is None else {"reasoning": {"effort": effort}}
            usage = client.responses.create(model=model, input="hi", max_output_tokens=4, **options).usage
            assert usage is not None
            return chat - alone, usage.input_tokens - alone

        alone = ask(server, "hi", reasoning_effort="none").usage.prompt_tokens
        assert added(None) == (len("<usual>"),) * 2
        assert added("low") == (len("<low>"),) * 2
        assert added("none") == (0, 0)
        given = {"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "own"}}
        assert added("none", extra_body=given)[0] == len("<own>"), "what the client gives to the template comes first"


def test_variables_are_refused_without_a_chat_template(loaded: LoadedModel) -> None:
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = None
    options: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    with (
        serving(LoadedModel("plain", loaded.model, tokenizer, lambda: [])) as server,
        pytest.raises(openai.BadRequestError, match="chat_template_kwargs: this model has no chat template"),
    ):
        ask(server, "weather?", extra_body=options)
    with serving(LoadedModel("plain", loaded.model, tokenizer, lambda: [])) as server:
        assert ask(server, "weather?", reasoning_effort="low").usage.completion_tokens, "clients send it to any model"
    with scripted(loaded, "It rains.", opening="{% if enable_thinking %}<think>{% endif %}") as server:
        counts = [
            server.service.tokenize(TokenizeBody(messages=[{"role": "user", "content": "hi"}], chat_template_kwargs=given))["count"]
            for given in (None, {"enable_thinking": True})
        ]
        assert counts[1] == counts[0] + len("<think>")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("opening", ["<assistant>", "<|im_start|>assistant\n<think>\n"], ids=["the model reasons", "the prompt begins it"])
@pytest.mark.parametrize(("stop", "content"), [("rain", "It "), (["k", "pour"], "It rains. It "), ("?</", "It rains. It pours.")])
def test_stop_strings_end_the_answer_and_not_its_reasoning(
    loaded: LoadedModel, opening: str, stop: Any, content: str, stream: bool
) -> None:
    """Nor do the marks around it: they are no part of the answer."""
    mark = "<think>" if opening == "<assistant>" else ""
    with scripted(loaded, f"{mark}rain or pour? I think?</think>It rains. It pours.", opening=opening) as server:
        reply = ask(server, "weather?", max_tokens=100, stop=stop, stream=stream)
        if stream:
            deltas = [chunk.choices[0].delta for chunk in reply]
            reasoning = "".join(getattr(each, "reasoning_content", None) or "" for each in deltas)
            found = reasoning, "".join(each.content or "" for each in deltas)
        else:
            found = reply.choices[0].message.reasoning_content, reply.choices[0].message.content
        assert found == ("rain or pour? I think?", content)
        text = server.client().completions.create(model="scripted", prompt="weather?", max_tokens=100, stop="?</").choices[0].text
        assert text == f"{mark}rain or pour? I think", "in a text completion nothing is marked"


def test_the_last_message_may_be_the_systems(server: Server) -> None:
    """As coding agents send it, for a reminder."""
    turns: Any = [{"role": "user", "content": "hello"}, {"role": "system", "content": "be brief"}]
    reply = server.client().chat.completions.create(model=server.service.model_id, messages=turns, max_tokens=3, extra_body={"top_k": -1})
    assert reply.usage.completion_tokens == 3


@pytest.mark.parametrize("name", ["5", '"\\ud800"', "null"])
def test_a_call_of_no_possible_name_is_text(loaded: LoadedModel, name: str) -> None:
    text = f'<tool_call>{{"name": {name}, "arguments": {{}}}}</tool_call>'
    with scripted(loaded, text) as server:
        message = ask(server, "weather?", tools=[WEATHER], max_tokens=100).choices[0].message
        assert message.tool_calls is None and message.content == text
