"""`/v1/messages` as Anthropic's client uses it: text, thinking, tools, streams, counts of tokens and refusals."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.serving import CALL, IN_JSON, PATIENCE_S, SCHEMA, WEATHER, Server, ask, scripted, serving, with_tools

from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.serve.service import Limits

pytest.importorskip("anthropic", reason="an extra for tests: pip install 'moegraft[test]'")

import anthropic
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

TOOL: Any = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}  # type: ignore[index]


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Server]:
    with serving(loaded) as found:
        yield found


def client(server: Server, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.address, api_key=key, max_retries=0, timeout=PATIENCE_S, http_client=server.http)


def turns(*texts: str) -> Any:
    return [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(texts)]


def send(server: Server, *texts: str, **options: Any) -> Any:
    """Ask for a message: greedy unless `extra_body` has a temperature."""
    extra = {"temperature": 0, **options.pop("extra_body", {})}
    given = {"model": server.service.model_id, "messages": turns(*texts), "max_tokens": 12, **options}
    return client(server).messages.create(**given, extra_body=extra)


def test_text_is_that_of_a_chat(server: Server) -> None:
    reply, chat = send(server, "hello"), ask(server, "hello")
    [block] = reply.content
    assert (block.type, block.text) == ("text", chat.choices[0].message.content)
    assert (reply.role, reply.model, reply.stop_reason, reply.stop_sequence) == ("assistant", chat.model, "max_tokens", None)
    used = reply.usage
    assert used.input_tokens + used.cache_read_input_tokens == chat.usage.prompt_tokens and used.output_tokens == 12
    Message.model_validate(reply.model_dump(), strict=True)


def test_a_stop_sequence_is_named(server: Server) -> None:
    text = send(server, "hello").content[0].text
    reply = send(server, "hello", stop_sequences=["never", text[4:6]])
    assert (reply.stop_reason, reply.stop_sequence, reply.content[0].text) == ("stop_sequence", text[4:6], text[: text.index(text[4:6])])


def test_the_system_prompt_is_the_first_message(server: Server) -> None:
    system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "be kind"}]
    chat: Any = [{"role": "system", "content": "be brief\nbe kind"}, *turns("hello")]
    expected = ask(server, messages=chat).choices[0].message.content
    for given in ("be brief\nbe kind", system):
        assert send(server, "hello", system=given).content[0].text == expected


@pytest.mark.parametrize("form", ["text", "blocks"])
def test_an_agents_changing_marker_leaves_the_prefix_in_the_cache(server: Server, form: str) -> None:
    """It is the first line of the system prompt, and another one in each request."""
    cached = []
    for number in range(2):
        marker, prompt = f"x-anthropic-billing-header: cc_version=2.1.42; cch={number}5a3f;", f"You are an agent ({form}). " * 20
        blocks = [{"type": "text", "text": marker}, {"type": "text", "text": prompt}]
        reply = send(server, "hello", system=f"{marker}\n{prompt}" if form == "text" else blocks)
        cached.append(reply.usage.cache_read_input_tokens)
        plain = client(server).messages.count_tokens(model=server.service.model_id, messages=turns("hello"), system=prompt)
        assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == plain.input_tokens
    assert cached[1] >= len(prompt)


def test_a_last_message_of_the_assistant_is_continued(server: Server) -> None:
    text = send(server, "hello", max_tokens=20).content[0].text
    assert send(server, "hello", text[:8], max_tokens=12).content[0].text == text[8:]


def test_thinking_and_calls_of_tools(loaded: LoadedModel) -> None:
    with scripted(loaded, f"<think>\nRome?</think>I look.{CALL}") as server:
        reply = send(server, "weather?", tools=[TOOL], max_tokens=200)
        thinking, text, call = reply.content
        assert (thinking.type, thinking.thinking.strip(), thinking.signature) == ("thinking", "Rome?", "")
        assert (text.type, text.text.strip()) == ("text", "I look.")
        assert (call.type, call.name, call.input, reply.stop_reason) == ("tool_use", "weather", {"city": "Rome"}, "tool_use")
        with client(server).messages.stream(model="scripted", messages=turns("weather?"), tools=[TOOL], max_tokens=200) as stream:
            events = list(stream)
            final = stream.get_final_message()
        streamed = [block.model_dump(exclude={"id", "parsed_output"}) for block in final.content]
        assert streamed == [block.model_dump(exclude={"id", "parsed_output"}) for block in reply.content]
        assert final.stop_reason == "tool_use" and final.usage.output_tokens == reply.usage.output_tokens
        starts = [event.index for event in events if event.type == "content_block_start"]
        assert starts == [event.index for event in events if event.type == "content_block_stop"] == [0, 1, 2]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    history: Any = [
        *turns("weather?"),
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]},
        {"role": "user", "content": [{"type": "text", "text": "well?"}, result]},
    ]
    with scripted(loaded, "It rains.") as server:
        last = send(server, messages=history, tools=[TOOL], max_tokens=50)
        assert last.content[0].text == "It rains." and last.stop_reason == "end_turn"
        # A result follows its call, whatever stands before it in the message.
        expected = "<system>weather<user>user:weather?<end><user>assistant:I look.weather(Rome)<end>"
        expected += "<user>tool:rain<end><user>user:well?<end><assistant>"
        assert last.usage.input_tokens + last.usage.cache_read_input_tokens == len(loaded.tokenizer(expected)["input_ids"])


@pytest.mark.parametrize("written", ['"Rome"', '"[1]"', "[1]", '{"city": "\\ud800"}'])
def test_arguments_that_are_no_object_are_one_argument(loaded: LoadedModel, written: str) -> None:
    """Anthropic's form has an object there, whatever the model writes."""
    with scripted(loaded, f'<tool_call>\n{{"name": "weather", "arguments": {written}}}\n</tool_call>') as server:
        reply = send(server, "weather?", tools=[TOOL], max_tokens=200)
        with client(server).messages.stream(model="scripted", messages=turns("weather?"), tools=[TOOL], max_tokens=200) as stream:
            final = stream.get_final_message()
        expected = {"arguments": written.strip('"')}
        assert reply.content[-1].input == final.content[-1].input == expected  # type: ignore[union-attr]


def test_a_call_can_be_forced(loaded: LoadedModel) -> None:
    with with_tools(loaded, IN_JSON) as server:
        tool = {"name": "weather", "input_schema": SCHEMA}
        choices = [{"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}]
        for choice in choices:
            reply = send(server, "hello", tools=[tool], tool_choice=choice, max_tokens=300)
            assert reply.content[-1].type == "tool_use" and set(reply.content[-1].input) == {"city", "degrees"}
        with pytest.raises(anthropic.BadRequestError, match="there is no tool 'other'"):
            send(server, "hello", tools=[TOOL], tool_choice={"type": "tool", "name": "other"})
        assert send(server, "hello", tools=[TOOL], tool_choice={"type": "none"}).content[0].type == "text"


def test_an_answer_follows_a_schema(server: Server) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    reply = send(server, "hello", output_config=config, max_tokens=200)
    assert set(json.loads(reply.content[0].text)) == {"city", "degrees"}


@pytest.mark.parametrize(("thinking", "shown"), [("enabled", "on"), ("disabled", "off"), ("adaptive", "unset"), (None, "unset")])
def test_thinking_is_a_variable_of_the_template(loaded: LoadedModel, thinking: str | None, shown: str) -> None:
    tokenizer: Any = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = (
        "{{ 'unset' if enable_thinking is not defined else 'on' if enable_thinking and thinking else 'off' }}{{ reasoning_effort }}"
        + loaded.tokenizer.chat_template  # type: ignore[operator]
    )
    with serving(LoadedModel("thinking", loaded.model, tokenizer, lambda: [])) as server:
        kind: Any = {"type": thinking, "budget_tokens": 1024}
        reply = send(server, "hello", output_config={"effort": "low"}, **({} if thinking is None else {"thinking": kind}))
        assert reply.usage.input_tokens == len(shown) + len("low") + len("hello") + 3


def test_the_events_of_a_stream_are_those_of_the_types(server: Server) -> None:
    """In their order, each with its name, and strictly of the types of Anthropic's package."""
    body = {"model": server.service.model_id, "messages": turns("hello"), "max_tokens": 12, "temperature": 0, "stream": True}
    reply = server.http.post(f"{server.address}/v1/messages", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = []
    for text in reply.text.strip().split("\n\n"):
        name, data = text.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        TypeAdapter(RawMessageStreamEvent).validate_python(events[-1], strict=True)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"] and set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(event["delta"]["text"] for event in events[2:-3]) == send(server, "hello").content[0].text
    begun, ended = events[0]["message"]["usage"], events[-2]["usage"]
    assert begun["input_tokens"] == ended["input_tokens"] + ended["cache_read_input_tokens"] == len("hello") + 3


def test_an_answer_without_text_has_an_empty_block(loaded: LoadedModel) -> None:
    with scripted(loaded, "") as server:
        [block] = send(server, "hello").content
        assert (block.type, block.text) == ("text", "")


def test_tokens_are_counted(server: Server) -> None:
    model = server.service.model_id
    counted = client(server).messages.count_tokens(model=model, messages=turns("hello"), system="be brief")
    reply = send(server, "hello", system="be brief")
    assert counted.input_tokens == reply.usage.input_tokens + reply.usage.cache_read_input_tokens
    assert [found.id for found in client(server).models.list()] == [model]


IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "images: this model reads text, and no images"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}]}]},
            "images: this model reads text, and no images",
        ),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
            "messages: only text of the assistant can be continued",
        ),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type: Input should be 'custom'"),
        ({"mcp_servers": [{"type": "url", "name": "x", "url": "https://x"}]}, "mcp_servers: is not supported"),
        ({"max_token": 1}, "unknown parameter 'max_token'"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server: Server, options: dict[str, Any], message: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=message) as refused:
        send(server, "hello", extra_body=options)
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


def test_refusals_have_anthropics_form(loaded: LoadedModel) -> None:
    with serving(loaded, Limits(), key="secret") as server:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            send(server, "hello")
        body: Any = refused.value.body
        assert body["error"]["type"] == "authentication_error"
        with pytest.raises(anthropic.NotFoundError, match="unknown model"):
            client(server, "secret").messages.create(model="other", messages=turns("hello"), max_tokens=1)
        given = {"model": server.service.model_id, "messages": turns("hello"), "max_tokens": 3}
        assert client(server, "secret").messages.create(**given).content, "the key in Anthropic's header"
        by_bearer = anthropic.Anthropic(base_url=server.address, auth_token="secret", api_key=None, http_client=server.http)
        assert by_bearer.messages.create(**given).content


def test_a_failure_ends_the_stream_with_an_event(loaded: LoadedModel) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("inner secret")

    with serving(loaded) as server:
        hook = loaded.model.model.layers[1].register_forward_pre_hook(fail)
        try:
            with pytest.raises(anthropic.APIStatusError) as failed:
                list(send(server, "hello", stream=True))
            assert "secret" not in str(failed.value) and "api_error" in str(failed.value.body)
            with pytest.raises(anthropic.InternalServerError):
                send(server, "hello")
        finally:
            hook.remove()
