"""What clients of vLLM ask for, load generators among them: lengths of answers, their forms, and the usage in each chunk."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.serving import IN_JSON, SCHEMA, Server, ask, call, messages, one_by_one, openai, scripted, serving, with_tools

from moegraft.injection.cli.models import LoadedModel

jsonschema = pytest.importorskip("jsonschema", reason="an extra for tests: pip install 'moegraft[test]'")
ENDS = {"0": 100}  # a bias by which the model ends its answer wherever it may


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Server]:
    with serving(loaded) as found:
        yield found


@pytest.mark.parametrize("way", ["batched", "one by one"])
def test_answers_are_as_long_as_a_load_generator_asks(loaded: LoadedModel, stock: LoadedModel, way: str) -> None:
    with serving(loaded if way == "batched" else one_by_one(stock)) as server:
        for options in ({"temperature": 0}, {"temperature": 1.5, "seed": 1}):
            asked = {**options, "max_tokens": 9, "logit_bias": ENDS}
            assert ask(server, "hello", **asked).usage.completion_tokens == 1
            [choice] = (reply := ask(server, "hello", **asked, extra_body={"ignore_eos": True})).choices
            assert (reply.usage.completion_tokens, choice.finish_reason) == (9, "length")
            [choice] = (reply := ask(server, "hello", **asked, extra_body={"min_tokens": 5})).choices
            assert (reply.usage.completion_tokens, choice.finish_reason) == (6, "stop")


def test_stop_strings_count_from_the_least_length_on(server: Server) -> None:
    whole = ask(server, "hello", max_tokens=20).choices[0].message.content
    stop = whole[2]
    at = whole.find(stop, 6)
    [choice] = ask(server, "hello", max_tokens=20, stop=stop, extra_body={"min_tokens": 6}).choices
    assert choice.message.content == (whole if at < 0 else whole[:at])
    [choice] = ask(server, "hello", max_tokens=20, stop=stop, extra_body={"ignore_eos": True}).choices
    assert choice.message.content == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_tokens": 13}, "min_tokens: 13 are more than max_tokens"),
        ({"min_tokens": 2, "guided_choice": ["a"]}, "min_tokens: the form"),
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos: the form"),
        ({"guided_choice": ["a"], "guided_regex": "b"}, "contradict"),
        ({"structured_outputs": {"json_object": True, "regex": "b"}}, "contradict"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "unknown parameter 'structured_outputs.structural_tag'"),
        ({"guided_choice": []}, "guided_choice: List should have at least 1 item"),
        ({"guided_json": "["}, "guided_json: Input should be a string with JSON"),
        ({"guided_json": "[]"}, "guided_json: Input should be a JSON Schema"),
        ({"guided_regex": "(a"}, "unclosed group"),
    ],
)
def test_what_contradicts_itself_is_refused(server: Server, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(server, "hello", extra_body=options)


# The text of each is one whole match; a `::=` within it is no rule of GBNF.
FORMS: dict[str, tuple[Any, str]] = {
    "regex": (r"[0-9]{2}/[A-Z] ::= \/\.\n" "\n\\\n", r"[0-9]{2}/[A-Z] ::= /\.\n\n\n"),
    "choice": (['yes "1"', "no ::= é\n\x7f"], 'yes "1"|no ::= é\n\x7f'),
    "grammar": ('root ::= "A" [0-9] "B"', "A[0-9]B"),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("nested", [True, False], ids=["structured_outputs", "guided"])
def test_answers_follow_the_forms_of_vllm(server: Server, name: str, nested: bool) -> None:
    given, pattern = FORMS[name]
    options = {"structured_outputs": {name: given}} if nested else {f"guided_{name}": given}
    for seed in range(3):
        text = ask(server, "hello", max_tokens=60, temperature=1.5, seed=seed, extra_body=options).choices[0].message.content
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["object", "string"])
def test_json_schemas_of_vllm_are_followed(server: Server, schema: Any) -> None:
    for options in ({"guided_json": schema}, {"structured_outputs": {"json": schema}}):
        jsonschema.validate(json.loads(ask(server, "hello", max_tokens=80, extra_body=options).choices[0].message.content), SCHEMA)
    text = ask(server, "hello", max_tokens=400, extra_body={"structured_outputs": {"json_object": True}}).choices[0].message.content
    assert text.startswith("{")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_chunks_have_the_usage_so_far(server: Server, path: str) -> None:
    prompt: Any = {"prompt": "hello"} if path == "/v1/completions" else {"messages": messages("hello")}
    body = {**prompt, "n": 2, "max_tokens": 6, "ignore_eos": True, "stream": True}
    shown = {"include_usage": True, "continuous_usage_stats": True}
    _, _, text = call(server, "POST", path, {**body, "stream_options": shown})
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.decode().splitlines() if line.startswith("data: {")]
    *parts, last = chunks
    for index in (0, 1):
        counts = [part["usage"]["completion_tokens"] for part in parts if part["choices"][0]["index"] == index]
        assert counts == sorted(counts) and counts[-1] == 6
    usage = parts[0]["usage"]
    assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    _, _, text = call(server, "POST", path, {**body, "stream_options": {"include_usage": True}})
    assert text.count(b'"usage"') == 1


TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("first", "second", "third")]


def allowed(mode: str, *names: str, flat: bool = False) -> dict[str, Any]:
    tools = [{"type": "function", **({"name": name} if flat else {"function": {"name": name}})} for name in names]
    inner = {"mode": mode, "tools": tools}
    return {"type": "allowed_tools", **(inner if flat else {"allowed_tools": inner})}


def test_only_allowed_tools_are_called(loaded: LoadedModel) -> None:
    with with_tools(loaded, IN_JSON) as server:
        given: dict[str, Any] = {"tools": TOOLS, "max_tokens": 300, "parallel_tool_calls": False, "temperature": 1.3}
        called = set()
        for seed in range(6):
            choice: Any = allowed("required", "first", "third")
            [found] = ask(server, "hello", **given, seed=seed, tool_choice=choice).choices[0].message.tool_calls
            called.add(found.function.name)
        assert called == {"first", "third"}
        flat = {"input": "hello", "tools": [{"type": "function", **tool["function"]} for tool in TOOLS], "max_output_tokens": 300}
        _, _, reply = call(server, "POST", "/v1/responses", {**flat, "tool_choice": allowed("required", "second", flat=True)})
        assert {item["name"] for item in reply["output"]} == {"second"}
        with pytest.raises(openai.BadRequestError, match="tool_choice: there is no tool 'fourth'"):
            ask(server, "hello", **given, tool_choice=allowed("auto", "first", "fourth"))  # type: ignore[arg-type]


def test_the_model_sees_allowed_tools_alone(loaded: LoadedModel) -> None:
    with scripted(loaded, "yes") as server:
        lengths = [
            ask(server, "hello", tools=tools, tool_choice=choice).usage.prompt_tokens
            for tools, choice in ((TOOLS, allowed("auto", "second")), (TOOLS[1:2], "auto"), (TOOLS, "auto"))
        ]
        assert lengths[0] == lengths[1] < lengths[2]


def test_a_refusal_is_text_of_the_assistant(server: Server) -> None:
    """As a client sends back what a server of OpenAI's has answered."""
    lengths = []
    for fields in (
        {"content": "I cannot."},
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"content": None, "refusal": "I cannot."},
    ):
        chat: Any = [*messages("hello"), {"role": "assistant", **fields}, *messages("why?")]
        lengths.append(ask(server, messages=chat).usage.prompt_tokens)
    assert len(set(lengths)) == 1
