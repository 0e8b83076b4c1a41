"""A server in this process, OpenAI's client for it, and a model that answers what a test gives."""

from __future__ import annotations

import copy
import json
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.request import urlopen

import pytest

pytest.importorskip("openai", reason="an extra for tests: pip install 'moegraft[test]'")
pytest.importorskip("uvicorn", reason="an extra for tests: pip install 'moegraft[test]'")
pytest.importorskip("fastapi", reason="an extra for tests: pip install 'moegraft[test]'")
pytest.importorskip("prometheus_client", reason="an extra for tests: pip install 'moegraft[test]'")

import openai
import uvicorn

from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.serve.app import make_app, server_config
from moegraft.injection.cli.serve.service import Limits, Service
from moegraft.operators.base import CACHE

PATIENCE_S = 60  # long enough for a busy machine, but ends a hang


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "degrees": {"type": "integer", "minimum": -9, "maximum": 9}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Server:
    service: Service
    address: str
    http: openai.DefaultHttpxClient
    connections: Collection[object] = ()

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S, http_client=self.http)

    def get(self, path: str) -> str:
        with urlopen(self.address + path, timeout=PATIENCE_S) as reply:
            return str(reply.read().decode())


@contextmanager
def serving(
    loaded: LoadedModel,
    limits: Limits | None = None,
    key: str | None = None,
    hosts: Collection[str] | None = None,
    most: int = 200,
    names: Sequence[str] = (),
    origins: Sequence[str] = (),
) -> Iterator[Server]:
    """`most` connections at a time."""
    service = Service(loaded, limits or Limits(), names)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(server_config(make_app(service, key, hosts, origins), most, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        # One for all clients: each would read the certificates of all authorities, of which plain HTTP needs none. No connection is kept,
        # since tests count those that are open.
        with openai.DefaultHttpxClient(verify=False, timeout=PATIENCE_S, headers={"Connection": "close"}) as http:
            yield Server(service, f"http://127.0.0.1:{listening.getsockname()[1]}", http, server.server_state.connections)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        service.close()


def one_by_one(stock: LoadedModel, **settings: Any) -> LoadedModel:
    """The model with settings that only `generate` applies: by default a penalty that changes no answer."""
    model = copy.deepcopy(stock.model)
    for name, value in (settings or {"repetition_penalty": 1.0001}).items():
        setattr(model.generation_config, name, value)
    return LoadedModel("alone", model, stock.tokenizer, lambda: [])


def until(so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not so():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def messages(*said: str) -> Any:
    return [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(said)]


def ask(server: Server, *said: str, **options: Any) -> Any:
    """Ask for a chat's next message: greedy unless `options` say otherwise, so that a test has the same answer in each run."""
    given = {"model": server.service.model_id, "messages": messages(*said), "max_tokens": 12, "temperature": 0, **options}
    return server.client().chat.completions.create(**given)


@contextmanager
def scripted(
    loaded: LoadedModel,
    text: str,
    opening: str = "<assistant>",
    then: str | None = None,
    template: dict[str, Any] | None = None,
    mark: str = "tool:",
    limits: Limits | None = None,
) -> Iterator[Server]:
    """Serve a model whose chat template has tools, and which always answers `text`.

    Where the new part of its prompt has `mark`, by default that of the result of a tool, it answers `then`.
    """
    tokenizer: Any = copy.deepcopy(loaded.tokenizer)
    if template is not None:
        tokenizer.response_template = template
    tokenizer.chat_template = (
        "{# <think> #}{% for t in tools or [] %}<system>{{ t.function.name }}{% endfor %}"
        "{% for m in messages %}<user>{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}<end>{% endfor %}" + opening
    )
    first, second = ([*tokenizer(said)["input_ids"], tokenizer.eos_token_id] for said in (text, then or text))
    answer: list[int] = []
    began: list[int] = []
    last = [-1]

    def script(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        positions = kwargs.get("position_ids")
        position = kwargs[CACHE].get_seq_length() - 1 if positions is None else int(positions[0, -1])
        if kwargs["input_ids"].shape[1] > 1 or position != last[0] + 1:
            began[:] = [position]
            answer[:] = second if mark in tokenizer.decode(kwargs["input_ids"][0]) else first
        last[:] = [position]
        output.logits[:] = 0
        output.logits[..., answer[position - began[0]]] = 100

    hook = loaded.model.register_forward_hook(script, with_kwargs=True)
    try:
        with serving(LoadedModel("scripted", loaded.model, tokenizer, lambda: []), limits) as server:
            yield server
    finally:
        hook.remove()


def call(server: Server, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], Any]:
    """The status, headers and JSON of an answer."""
    connection = HTTPConnection(server.address.removeprefix("http://"), timeout=PATIENCE_S)
    given = {} if body is None else {"Content-Type": "application/json"}
    connection.request(method, path, None if body is None else json.dumps(body), given | headers)
    reply = connection.getresponse()
    text = reply.read()
    connection.close()
    is_json = reply.headers.get("content-type", "").startswith("application/json")
    return reply.status, {name.lower(): value for name, value in reply.headers.items()}, json.loads(text) if is_json else text


def calls_as(opening: dict[str, str], close: str, function: Any) -> dict[str, Any]:
    """A response template without reasoning, whose calls have JSON."""
    call = {**opening, "close": close, "repeats": True, "content": "json", "transform": {"type": "function", "function": function}}
    return {"start_anchor": "<assistant>", "fields": {"content": {"content": "text"}, "tool_calls": call}}


IN_JSON = calls_as({"open_pattern": r"\s*<tool_call>"}, "</tool_call>", "{content}")
IN_MARK = calls_as({"open_pattern": r"\s*\[call:(?P<name>[^\]]+)\]"}, "[/call]", {"name": "{name}", "arguments": "{content}"})


@contextmanager
def with_tools(loaded: LoadedModel, template: dict[str, Any], limits: Limits | None = None) -> Iterator[Server]:
    """Serve the random model, which writes letters, with a chat template for tools and a response template of its own."""
    tokenizer: Any = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = "{% for t in tools or [] %}<system>{{ t.function.name }}{% endfor %}" + tokenizer.chat_template
    tokenizer.response_template = template
    with serving(LoadedModel("tools", loaded.model, tokenizer, lambda: []), limits) as server:
        yield server
