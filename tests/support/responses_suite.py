"""Answers of /v1/responses and their events against the types of the Open Responses specification; run by `tests/server_suites.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import openresponses_types as types  # type: ignore[import-not-found]
import pytest

from support.serving import scripted
from support.tiny_server import tiny_model

TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ASKED: dict[str, dict[str, Any]] = {
    "text": {},
    "settings": {"instructions": "be brief", "temperature": 0.5, "top_p": 0.9, "metadata": {"a": "b"}, "user": "me", "store": False},
    "tool": {"tools": [TOOL]},
    "required": {"tools": [TOOL], "tool_choice": "required"},
    "named": {"tools": [TOOL], "tool_choice": {"type": "function", "name": "get_weather"}},
    "object": {"text": {"format": {"type": "json_object"}}},
    "schema": {
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
    },
    "incomplete": {"max_output_tokens": 3},
    "history": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        ],
        "tools": [TOOL],
    },
}
EVENTS = [kind for name, kind in vars(types).items() if name.endswith("StreamingEvent")]


# OpenAI's names of events, which its clients know, and those of the specification.
RENAMED = {f"response.reasoning_text.{end}": f"response.reasoning.{end}" for end in ("delta", "done")}
MODEL = tiny_model()


@pytest.fixture
def asked(request: pytest.FixtureRequest) -> Iterator[Callable[..., str]]:
    """Send a request of ASKED to a server whose model writes its reasoning, a text and a call, or a JSON object."""
    name = request.node.callspec.params["name"]
    written = '{"a": 3}' if name in ("object", "schema") else f"<think>\nRome?</think>I look.{CALL}"
    if name == "schema":
        pytest.skip("openresponses-types 2.4.0 has null as the type of a schema")
    with scripted(MODEL, written, then="well", mark="tool:") as server:

        def ask(**options: Any) -> str:
            body = {"input": "weather?", **ASKED[name], **options}
            reply = server.http.post(f"{server.address}/v1/responses", json=body)
            assert reply.status_code == 200, reply.text
            return str(reply.text)

        yield ask


def event_type(kind: Any) -> str:
    """The `type` of an event, which its description has in words."""
    [found] = re.findall(r"`([a-z_.]+)`", kind.model_fields["type"].description)
    return str(found)


@pytest.mark.parametrize("name", ASKED)
def test_answers(asked: Callable[..., str], name: str) -> None:
    found = types.ResponseResource.model_validate_json(asked(), strict=True)
    assert found.status == ("incomplete" if name == "incomplete" else "completed") and found.output


@pytest.mark.parametrize("name", ASKED)
def test_events(asked: Callable[..., str], name: str) -> None:
    kinds = {event_type(kind): kind for kind in EVENTS}
    events = [json.loads(line.removeprefix("data: ")) for line in asked(stream=True).splitlines() if line.startswith("data: {")]
    for event in events:
        event["type"] = RENAMED.get(event["type"], event["type"])
        kinds[event["type"]].model_validate_json(json.dumps(event), strict=True)
    assert events[-1]["type"] == ("response.incomplete" if name == "incomplete" else "response.completed") and len(events) > 3
