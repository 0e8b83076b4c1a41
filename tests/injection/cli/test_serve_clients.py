"""Clients of a server that vanish at any moment, and those that do not speak HTTP as they should; the others are answered meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from urllib.error import HTTPError

import pytest
from support.serving import PATIENCE_S, Server, ask, messages, openai, serving, until

from moegraft.injection.cli.commands.serve import ServeOptions
from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.serve.app import make_app
from moegraft.injection.cli.serve.service import Limits, Service

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture
def server(loaded: LoadedModel) -> Iterator[Server]:
    """A token takes 5 ms, so that there is time to leave; four answers at a time."""
    hook = loaded.model.register_forward_pre_hook(lambda *args: time.sleep(0.005))
    with serving(loaded, Limits(max_batch=4, max_queue=64, prefill_chunk=16)) as found:
        yield found
    hook.remove()


def connect_address(server: Server) -> tuple[str, int]:
    host, port = server.address.removeprefix("http://").split(":")
    return host, int(port)


def connect(server: Server) -> socket.socket:
    return socket.create_connection(connect_address(server), timeout=PATIENCE_S)


def request(tokens: int, *, stream: bool) -> bytes:
    body = json.dumps({"messages": messages("hello there"), "max_tokens": tokens, "stream": stream}).encode()
    return f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body


def said(server: Server, *, stream: bool) -> str:
    """An answer through OpenAI's client."""
    reply = ask(server, "hello there", max_tokens=30, stream=stream)
    if stream:
        return "".join(chunk.choices[0].delta.content or "" for chunk in reply)
    return str(reply.choices[0].message.content)


def quiet(server: Server) -> bool:
    return server.service.engine.running == 0 and server.service.engine.waiting == 0


def test_32_clients_of_which_half_vanish(server: Server) -> None:
    """Those that stay get what each gets alone, and nothing is left behind."""
    alone = ask(server, "hello there", max_tokens=30).choices[0].message.content
    chance = random.Random(1)

    def vanish(number: int) -> None:
        with connect(server) as client:
            client.sendall(request(2000, stream=number % 2 == 0))
            time.sleep(chance.uniform(0, 0.3))

    with ThreadPoolExecutor(32) as pool:
        leaving = [pool.submit(vanish, number) for number in range(16)]
        staying = [pool.submit(said, server, stream=number % 2 == 0) for number in range(16)]
        assert [one.result() for one in staying] == [alone] * 16
        for one in leaving:
            one.result()
    until(lambda: quiet(server))
    endings = server.service.engine.endings
    assert endings["failed"] == 0 and 0 < endings["cancelled"] <= 16
    assert ask(server, "hello there", max_tokens=30).choices[0].message.content == alone


def test_a_stream_that_openais_client_closes_is_answered_no_further(server: Server) -> None:
    engine = server.service.engine
    hook = server.service.loaded.model.register_forward_pre_hook(lambda *args: time.sleep(0.005))  # or the answer ends first
    try:
        stream = ask(server, "hello there", max_tokens=2000, stream=True)
        assert [next(stream).choices[0].delta.content for _ in range(3)][-1]
        stream.close()
        until(lambda: quiet(server))
    finally:
        hook.remove()
    assert engine.endings["cancelled"] == 1 and engine.completion_tokens < 1000


def test_a_stream_that_never_starts_is_answered_no_further(loaded: LoadedModel) -> None:
    """The client leaves before the head of the answer is sent."""
    body = json.dumps({"messages": messages("hello there"), "max_tokens": 2000, "stream": True}).encode()
    hook = loaded.model.register_forward_pre_hook(lambda *args: time.sleep(0.005))
    service = Service(loaded, Limits())

    async def visit() -> None:
        sent, gone = False, asyncio.Event()

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await gone.wait()
                return {"type": "http.disconnect"}
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            gone.set()
            raise ConnectionResetError

        headers = [(b"host", b"x"), (b"content-type", b"application/json")]
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        with pytest.raises(ConnectionResetError):
            await make_app(service)({**scope, "query_string": b"", "http_version": "1.1"}, receive, send)  # type: ignore[arg-type]
        while not service.engine.endings["cancelled"] + service.engine.endings["length"]:
            await asyncio.sleep(0.01)

    try:
        asyncio.run(visit())
        assert service.engine.endings["cancelled"] == 1 and service.engine.completion_tokens < 1000
    finally:
        hook.remove()
        service.close()


def test_who_leaves_the_queue_makes_room_in_it(loaded: LoadedModel) -> None:
    hook = loaded.model.register_forward_pre_hook(lambda *args: time.sleep(0.01))
    try:
        with serving(loaded, Limits(max_batch=1, max_queue=1)) as server, connect(server) as first:
            first.sendall(request(1000, stream=True))
            until(lambda: server.service.engine.running == 1)
            with connect(server) as second:
                second.sendall(request(1000, stream=True))
                until(lambda: server.service.engine.waiting == 1)
                with pytest.raises(openai.RateLimitError) as refused:
                    ask(server, "hello")
                assert refused.value.response.headers["retry-after"] == "1" and refused.value.code == "queue_full"
                assert "1 requests are waiting, of at most 1" in str(refused.value) and "for keys and values are free" in str(refused.value)
            first.close()
            until(lambda: quiet(server))
            assert ask(server, "hello").choices[0].message.content
    finally:
        hook.remove()


@pytest.mark.parametrize(
    "sent",
    [
        b"",  # nothing at all
        b"POST /v1/chat",  # half a line
        HEAD.encode(),  # half a head
        HEAD.encode() + b'Content-Length: 1000\r\n\r\n{"messages"',  # half a body
        HEAD.encode() + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"mes',  # half a chunk
    ],
)
def test_who_vanishes_while_asking_leaves_nothing_behind(server: Server, sent: bytes) -> None:
    with connect(server) as client:
        client.sendall(sent)
    assert ask(server, "hello", max_tokens=2).choices[0].message.content
    assert quiet(server)


def closed(client: socket.socket) -> bool:
    """Whether the server has closed the connection."""
    try:
        return client.recv(1000) == b""
    except ConnectionResetError:
        return True


def test_idle_connections_make_room_for_those_that_ask(loaded: LoadedModel) -> None:
    """Four times as many as the server takes; a stream that runs meanwhile is whole, and a new client is answered."""
    hook = loaded.model.register_forward_pre_hook(lambda *args: time.sleep(0.005))
    try:
        with serving(loaded, most=16) as server, ExitStack() as clients, ThreadPoolExecutor(1) as pool:
            alone = said(server, stream=True)
            streaming = pool.submit(ask, server, "hello there", max_tokens=200)
            until(lambda: server.service.engine.running == 1)
            idle = [clients.enter_context(connect(server)) for _ in range(32)]
            for sent in (HEAD.encode(), HEAD.encode() + b'Content-Length: 1000\r\n\r\n{"messages"'):
                for _ in range(16):
                    half = clients.enter_context(connect(server))
                    half.sendall(sent)
                    idle.append(half)
            assert all(closed(client) for client in idle[:50]), "all but those that fit beside the stream and another"
            assert said(server, stream=True) == alone
            assert streaming.result().choices[0].message.content.startswith(alone)
    finally:
        hook.remove()


def test_if_all_connections_are_answered_another_is_refused(loaded: LoadedModel) -> None:
    hook = loaded.model.register_forward_pre_hook(lambda *args: time.sleep(0.005))
    try:
        with serving(loaded, Limits(max_batch=8), most=8) as server, ExitStack() as clients:
            for _ in range(7):
                client = clients.enter_context(connect(server))
                client.sendall(request(2000, stream=True))
            until(lambda: server.service.engine.running == 7)
            with pytest.raises(openai.InternalServerError) as refused:
                ask(server, "hello")
            assert refused.value.status_code == 503
            clients.close()
            until(lambda: quiet(server))
            assert ask(server, "hello").choices[0].message.content
    finally:
        hook.remove()


def test_a_client_that_waited_beside_a_burst_takes_the_place_of_one_that_is_idle(loaded: LoadedModel) -> None:
    hook = loaded.model.register_forward_pre_hook(lambda *args: time.sleep(0.005))
    try:
        with serving(loaded, Limits(max_batch=8), most=8) as server, ExitStack() as clients:
            for _ in range(7):
                client = clients.enter_context(connect(server))
                client.sendall(request(40, stream=True))
            until(lambda: server.service.engine.running == 7)
            waited = clients.enter_context(connect(server))
            until(lambda: len(server.connections) == 8)
            until(lambda: server.service.engine.endings["length"] == 7)
            waited.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert waited.recv(1000).startswith(b"HTTP/1.1 200")
    finally:
        hook.remove()


def test_heads_that_do_not_arrive_and_answers_that_are_not_read_end_their_connection(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moegraft.injection.cli.serve.app.HEAD_S", 0.2)
    monkeypatch.setattr("moegraft.injection.cli.serve.app.READ_S", 0.2)
    with serving(loaded, Limits(max_tokens=4000)) as server:
        with connect(server) as silent, connect(server) as slow:
            slow.sendall(b"GET / HT")
            assert closed(silent) and closed(slow)
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            deaf.connect(connect_address(server))
            deaf.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 300)  # pages that nobody reads
            until(lambda: len(server.connections) == 1)
            until(lambda: not server.connections)
        assert ask(server, "hello").choices[0].message.content


def test_who_closes_one_half_leaves_nothing_behind(server: Server) -> None:
    with connect(server) as client:
        client.sendall(request(2000, stream=True))
        until(lambda: server.service.engine.running == 1)
        client.shutdown(socket.SHUT_WR)
        until(lambda: quiet(server))
    with connect(server) as client:
        client.sendall(request(2000, stream=True))
        client.shutdown(socket.SHUT_RD)
        until(lambda: server.service.engine.running == 1)
    until(lambda: quiet(server))


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # a client that speaks TLS
        b"GET\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
        HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_not_http_is_refused(server: Server, sent: bytes) -> None:
    with connect(server) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        reply = b""
        while piece := client.recv(4096):
            reply += piece
    assert reply == b"" or reply.startswith(b"HTTP/1.1 4"), reply
    assert b"Traceback" not in reply
    assert ask(server, "hello", max_tokens=2).choices[0].message.content


def test_a_body_without_an_announced_length_has_the_same_limit(server: Server) -> None:
    piece = b"x" * (1 << 16)
    with connect(server) as client:
        client.sendall(HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(32):
                client.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        except OSError:  # the server has hung up, as it may
            pass
        assert client.recv(100).startswith(b"HTTP/1.1 413")
    assert ask(server, "hello", max_tokens=2).choices[0].message.content


def test_a_model_is_found_by_its_id(server: Server) -> None:
    client = server.client()
    assert client.models.retrieve(server.service.model_id).id == server.service.model_id
    with pytest.raises(openai.NotFoundError, match="unknown model 'gpt-5'"):
        client.models.retrieve("gpt-5")


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/v1/status", "/v1/models/tiny", "/nothing"])
def test_everything_but_the_page_and_health_wants_the_key(loaded: LoadedModel, path: str) -> None:
    with serving(loaded, key="secret") as server:
        with pytest.raises(HTTPError) as refused:
            server.get(path)
        assert refused.value.code == 401
        for open_path in ("/", "/health", "/favicon.ico"):
            server.get(open_path)


def test_a_request_that_cannot_be_begun_fails_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = server.service.engine._decoder
    with monkeypatch.context() as patched:

        def fail(job: object) -> None:
            raise RuntimeError("inner secret")

        patched.setattr(decoder, "admit", fail)
        with pytest.raises(openai.InternalServerError) as error:
            ask(server, "hello")
        assert "secret" not in str(error.value)
    assert ask(server, "hello").choices[0].message.content
    assert server.service.engine.endings["failed"] == 1


def test_a_server_that_shuts_down_refuses_requests(loaded: LoadedModel) -> None:
    with serving(loaded) as server:
        server.service.engine.close()
        with pytest.raises(openai.InternalServerError) as refused:
            ask(server, "hello")
        assert refused.value.status_code == 503
        with pytest.raises(HTTPError) as health:
            server.get("/health")
        assert health.value.code == 503 and json.loads(health.value.read()) == {"status": "stopped"}


def test_no_thread_is_left_when_a_server_ends(loaded: LoadedModel) -> None:
    with serving(loaded) as server:
        ask(server, "hello", max_tokens=2)
    assert not any(thread.name == "moegraft-serve" for thread in threading.enumerate())


@pytest.mark.parametrize("key", ["", " ", "sécret", "two\nlines", "with space"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="--api-key"):
        ServeOptions(api_key=key)


@pytest.mark.parametrize("names", [[""], ["first", " "]])
def test_a_model_without_a_name_is_refused(names: list[str]) -> None:
    """As of a variable of a shell that is not set."""
    with pytest.raises(ValueError, match="--served-model-name is empty"):
        ServeOptions(served_model_name=names)
