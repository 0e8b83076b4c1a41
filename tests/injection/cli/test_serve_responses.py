"""`/v1/responses` as OpenAI's client uses it: text, tools, forms and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.serving import CALL, SCHEMA, WEATHER, Server, ask, call, openai, scripted, serving

from moegraft.injection.cli.models import LoadedModel

FLAT: Any = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Server]:
    with serving(loaded) as found:
        yield found


def respond(server: Server, given: Any, **options: Any) -> Any:
    return server.client().responses.create(**{"model": server.service.model_id, "input": given, "max_output_tokens": 12, **options})


def test_text_is_that_of_a_chat(server: Server) -> None:
    chat = ask(server, "hello")
    reply = respond(server, "hello")
    assert reply.output_text == chat.choices[0].message.content
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in reply.output] == ["incomplete"]
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    assert reply.usage.input_tokens_details.cached_tokens >= 0 and reply.store is False
    stop = chat.choices[0].message.content[4:6]
    ended = respond(server, "hello", extra_body={"stop": stop})
    assert ended.status == "completed" and stop not in ended.output_text
    assert [item.status for item in ended.output] == ["completed"]


def test_a_conversation_may_come_as_items(server: Server) -> None:
    first = respond(server, "hello")
    items = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}, *(item.model_dump() for item in first.output)]
    second = respond(server, [*items, {"role": "user", "content": "more"}], instructions="be brief")
    turns: Any = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "more"},
    ]
    chat = server.client().chat.completions.create(model=server.service.model_id, messages=turns, max_tokens=12)
    assert second.output_text == chat.choices[0].message.content and second.usage.input_tokens == chat.usage.prompt_tokens


def test_a_stream_adds_up_to_the_answer(server: Server) -> None:
    whole = respond(server, "hello")
    events = list(respond(server, "hello", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-2].item.status == "incomplete"
    stop = {"stop": whole.output_text[6:8]}
    with server.client().responses.stream(model=server.service.model_id, input="hello", extra_body=stop) as stream:
        assert stream.get_final_response().output_text == respond(server, "hello", extra_body=stop).output_text, "as OpenAI adds it up"


def test_tools_and_reasoning(loaded: LoadedModel) -> None:
    with scripted(loaded, f"<think>\nRome?</think>I look.{CALL}") as server:
        reply = respond(server, "weather?", tools=[FLAT], max_output_tokens=200)
        assert [item.type for item in reply.output] == ["reasoning", "message", "function_call"] and reply.status == "completed"
        assert reply.output[0].content[0].text.strip() == "Rome?" and reply.output_text.strip() == "I look."
        assert reply.usage.output_tokens_details.reasoning_tokens == len("<think>\nRome?</think>")
        call = reply.output[2]
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
        with server.client().responses.stream(model="scripted", input="weather?", tools=[FLAT], max_output_tokens=200) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        assert json.loads("".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")) == {"city": "Rome"}
        assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta").strip() == "Rome?"
        indices = [event.output_index for event in events if event.type == "response.output_item.done"]
        assert indices == [0, 1, 2]
    items = [{"role": "user", "content": "weather?"}, *(item.model_dump() for item in reply.output)]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    with scripted(loaded, "It rains.") as server:
        last = respond(server, [*items, result], tools=[FLAT], max_output_tokens=50)
        assert last.output_text == "It rains."
        expected = "<system>weather<user>user:weather?<end><user>assistant:I look.weather(Rome)<end><user>tool:rain<end><assistant>"
        assert last.usage.input_tokens == len(loaded.tokenizer(expected)["input_ids"])
    with scripted(loaded, CALL) as server:
        forced = respond(server, "weather?", tools=[FLAT], tool_choice={"type": "function", "name": "weather"}, max_output_tokens=200)
        assert [item.type for item in forced.output] == ["function_call"] and forced.tool_choice == "required"


def test_text_follows_a_schema(server: Server) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}}
    found = json.loads(respond(server, "hello", text=form, max_output_tokens=200, temperature=1.2).output_text)
    assert set(found) == {"city", "degrees"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: is not supported: nothing is stored; send the whole conversation"),
        ({"background": True}, "background: is not supported"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input.*item_reference"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "call_id: Field required"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "shell"}]}, "tools.0: Input tag 'shell' found"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice: there are no tools"),
        ({"input": [{"type": "reasoning", "content": [{"text": "x"}]}]}, "input: there is nothing to answer"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server: Server, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        respond(server, "hello", extra_body=options)


def test_tools_that_openai_runs_are_left_out_and_reported(server: Server) -> None:
    """As the coding agent Codex sends them beside its own, unasked."""
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "agents", "tools": []}]
    asked = {"input": "hello", "max_output_tokens": 2, "tools": tools, "client_metadata": {"turn": "1"}}
    status, headers, _ = call(server, "POST", "/v1/responses", asked)
    assert (status, headers["x-moegraft-ignored"]) == (200, "tools.web_search, tools.namespace")


def test_nothing_is_stored(server: Server) -> None:
    reply = respond(server, "hello", store=True)
    assert reply.store is False
    with pytest.raises(openai.NotFoundError):
        server.client().responses.retrieve(reply.id)


def test_a_failure_ends_the_stream_with_an_event(loaded: LoadedModel) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("inner secret")

    with serving(loaded) as server:
        hook = loaded.model.model.layers[1].register_forward_pre_hook(fail)
        try:
            events = list(respond(server, "hello", stream=True))
        finally:
            hook.remove()
    assert events[-1].type == "response.failed" and "secret" not in events[-1].response.error.message
