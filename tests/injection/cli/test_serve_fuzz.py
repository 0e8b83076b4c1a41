"""Requests made from the server's own OpenAPI document, and spoiled ones, beside clients whose answers must not change.

    pytest --long tests/injection/cli/test_serve_fuzz.py

The long form sends 20,000 requests, kills and restarts a server under load, and opens 1,000 connections to one with 256 descriptors.
"""

from __future__ import annotations

import copy
import http.client
import json
import random
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="an extra for tests: pip install 'moegraft[test]'")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.serving import IN_JSON, PATIENCE_S, Server, messages, openai, until, with_tools

from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.serve.service import Limits

Schema = Mapping[str, Any]
QUESTION = "hello there"
JUNK: list[Any] = [None, True, -1, 0, 1e308, float("nan"), 1 << 70, "", "\ud800", "\0", "x" * 2000, [], {}, [[]], {"": {}}, {"\udfff": 1}]


def instances(schema: Schema, schemas: Mapping[str, Schema]) -> st.SearchStrategy[Any]:
    """Values that a JSON Schema of the document takes."""
    if "$ref" in schema:
        return st.deferred(lambda: instances(schemas[schema["$ref"].rpartition("/")[2]], schemas))
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return st.one_of([instances(option, schemas) for option in schema[several]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    low, high = schema.get("minimum"), schema.get("maximum")
    match schema.get("type"):
        case "string":
            if "pattern" in schema:
                return st.integers(0, 300).map(str)
            return st.text(min_size=schema.get("minLength", 0), max_size=12)
        case "integer":
            high = schema["exclusiveMaximum"] - 1 if "exclusiveMaximum" in schema else high
            return st.integers(low, high) if low is None or low < 0 else st.integers(low, min(high or low + 300, low + 300))
        case "number":
            return st.floats(low, high)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return st.lists(instances(schema["items"], schemas), min_size=schema.get("minItems", 0), max_size=3)
        case "object" if "properties" in schema:
            return _objects(schema, schemas)
        case "object":
            inner = schema.get("additionalProperties")
            return st.dictionaries(
                st.integers(0, 300).map(str) if "propertyNames" in schema or "patternProperties" in schema else st.text(max_size=5),
                instances(inner, schemas) if isinstance(inner, Mapping) else st.text(max_size=5),
                max_size=3,
            )
    return st.sampled_from(JUNK)


@st.composite
def _objects(draw: st.DrawFn, schema: Schema, schemas: Mapping[str, Schema]) -> dict[str, Any]:
    """Required fields and a few others: with all at once, some would always be refused first."""
    properties, required = schema["properties"], schema.get("required", [])
    others = [name for name in properties if name not in required and name != "model"]
    chosen = draw(st.lists(st.sampled_from(others), max_size=5, unique=True)) if others else []
    return {name: draw(instances(properties[name], schemas)) for name in (*required, *chosen)}


@st.composite
def spoiled(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> Any:
    """A value of which a random part is junk."""
    whole = {"": copy.deepcopy(draw(values))}
    place: Any = whole
    key: Any = ""
    while isinstance(place[key], dict | list) and place[key] and draw(st.integers(0, 3)):
        place = place[key]
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    if isinstance(place[key], dict) and draw(st.booleans()):
        place[key][draw(st.sampled_from(["extra", "\ud800", ""]))] = draw(st.sampled_from(JUNK))
    else:
        place[key] = draw(st.sampled_from(JUNK))
    return whole[""]


def bodies(schema: Schema, schemas: Mapping[str, Schema]) -> st.SearchStrategy[bytes]:
    valid = instances(schema, schemas)
    raw = [b"", b"{", b"null", b"[" * 5000, b'{"a":' * 2000, b"\xff", b'{"seed": ' + b"9" * 5000 + b"}"]
    made = st.one_of(valid, valid, spoiled(valid)).map(lambda value: json.dumps(value).encode())
    return st.one_of(made, made, made, st.sampled_from(raw))


@contextmanager
def bystanders(server: Server, count: int) -> Iterator[None]:
    """Clients who stream one answer again and again during the body, which must always be the same."""
    done = threading.Event()

    def stream() -> str:
        asked = {"messages": messages(QUESTION), "stream": True, "max_tokens": 20}
        connection = http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=PATIENCE_S)
        connection.request("POST", "/v1/chat/completions", json.dumps(asked), {"Content-Type": "application/json"})
        events = [line[6:] for line in connection.getresponse().read().decode().split("\n") if line.startswith("data: ")]
        connection.close()
        assert events[-1] == "[DONE]"
        return "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1])

    alone = stream()
    assert len(alone) == 20

    def repeat() -> int:
        times = 0
        while not done.is_set() or times < 2:
            assert stream() == alone
            times += 1
        return times

    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(repeat) for _ in range(count)]
        try:
            yield
        finally:
            done.set()
        assert all(one.result() for one in running)


def test_requests_made_from_the_document_leave_the_server_whole(loaded: LoadedModel, long: bool) -> None:
    seen: dict[int, int] = {}
    with with_tools(loaded, IN_JSON, Limits(max_tokens=20)) as server:
        document = json.loads(server.get("/openapi.json"))
        schemas = document["components"]["schemas"]
        routes = {
            path: bodies(methods["post"]["requestBody"]["content"]["application/json"]["schema"], schemas)
            for path, methods in document["paths"].items()
            if "post" in methods
        }
        requests = st.sampled_from(sorted(routes)).flatmap(lambda path: st.tuples(st.just(path), routes[path]))
        connection = http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=PATIENCE_S)

        @settings(
            max_examples=20_000 if long else 150,
            deadline=None,
            database=None,
            derandomize=not long,
            suppress_health_check=list(HealthCheck),
        )
        @given(requests)
        def send(request: tuple[str, bytes]) -> None:
            path, body = request
            try:
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                reply = connection.getresponse()
            except ConnectionError:  # the server closes a connection after seconds without a request; a new one must be answered
                connection.close()
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                reply = connection.getresponse()
            said = reply.read().decode()
            seen[reply.status] = seen.get(reply.status, 0) + 1
            if long and not sum(seen.values()) % 1000:
                print(dict(sorted(seen.items())), flush=True)
            assert str(reply.status) in {"200", *document["paths"][path]["post"]["responses"]} - {"500", "503"}, (path, body, said)
            if reply.status != 200:
                assert json.loads(said)["error"]["message"] and "Traceback" not in said
            elif reply.headers["content-type"].startswith("text/event-stream"):
                events = re.findall("^data: (.*)$", said, re.MULTILINE)
                assert all(json.loads(event) for event in events if event != "[DONE]") and "server_error" not in said, (path, body, said)
            else:
                assert json.loads(said)

        with bystanders(server, 2):
            send()
        until(lambda: server.service.engine.running == 0)
        assert server.service.engine.endings["failed"] == 0
    assert seen[200] > sum(seen.values()) / 20 and seen[400]


class Program:
    """`moegraft serve` in a process of its own, which can be killed and started again."""

    def __init__(self, folder: Path, files: int | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        code = "from moegraft.injection.cli.moegraft import main; main()"
        serve = f"serve --model {folder} --rules cpu-exact --threads 1 --port {self.port}"
        limit = f"ulimit -n {files}; " if files else ""
        self._command = f"{limit}exec {shlex.quote(sys.executable)} -c {shlex.quote(code)} {serve}"
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(["bash", "-c", self._command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert self._process.stderr is not None
        assert any(b" at http://" in line for line in self._process.stderr), "the server starts"
        threading.Thread(target=self._process.stderr.read, daemon=True).start()

    def kill(self, how: signal.Signals = signal.SIGKILL) -> int:
        self._process.send_signal(how)
        return self._process.wait(PATIENCE_S)

    def ask(self) -> str:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        with client:
            model = client.models.list().data[0].id
            chunks = client.chat.completions.create(model=model, messages=messages(QUESTION), max_tokens=40, stream=True)
            reply = list(chunks)
        assert reply[-1].choices[0].finish_reason == "length", "the answer is whole"
        return "".join(chunk.choices[0].delta.content or "" for chunk in reply)


def test_kills_under_load_cost_only_the_answers_that_were_coming(chat_folder: Path, long: bool) -> None:
    if not long:
        pytest.skip("starts a server five times: pytest --long")
    chance, stopped = random.Random(1), threading.Event()
    program = Program(chat_folder)
    try:
        alone = program.ask()
        answered = lost = 0

        def load() -> tuple[int, int]:
            good = bad = 0
            while not stopped.is_set():
                try:
                    assert program.ask() == alone
                    good += 1
                except (openai.APIError, IndexError, OSError, AssertionError) as error:
                    assert not isinstance(error, AssertionError) or "whole" in str(error), "an answer that ends is right"
                    bad += 1
                    time.sleep(0.05)
            return good, bad

        with ThreadPoolExecutor(6) as pool:
            running = [pool.submit(load) for _ in range(6)]
            try:
                for how in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
                    time.sleep(chance.uniform(1, 3))
                    program.kill(how)
                    program.start()
            finally:
                time.sleep(2)
                stopped.set()
            for one in running:
                good, bad = one.result()
                answered, lost = answered + good, lost + bad
        assert program.ask() == alone
        print(f"{answered} answered, {lost} lost")
        assert answered > 10 and lost > 0
    finally:
        program.kill()


def test_1000_idle_connections_and_256_descriptors(chat_folder: Path, long: bool) -> None:
    if not long:
        pytest.skip("starts a server with few descriptors: pytest --long")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    program = Program(chat_folder, files=256)
    idle: list[socket.socket] = []
    try:
        alone = program.ask()
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(lambda: [program.ask() for _ in range(20)])
            for _ in range(1000):
                with suppress(OSError):
                    idle.append(socket.create_connection(("127.0.0.1", program.port), timeout=PATIENCE_S))
            assert len(idle) > 900
            assert program.ask() == alone
            assert asking.result() == [alone] * 20
    finally:
        for client in idle:
            client.close()
        program.kill()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
