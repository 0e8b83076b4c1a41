"""The client of the load benchmark counts what arrives, and a round counts what arrives in its time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support import import_benchmark

pytest.importorskip("gguf", reason="the benchmark writes models for llama.cpp by the package gguf")

benchmark = import_benchmark("serve")
Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def event(text: str) -> bytes:
    data = b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send an answer of three tokens, of which two arrive together."""
    head = await reader.readuntil(b"\r\n\r\n")
    size = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
    asked = json.loads(await reader.readexactly(size))
    assert len(asked["prompt"]) == 5
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + event("abcd"))
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.write(event("abcdefgh") + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 429 Too Many Requests\r\n\r\nthe queue is full")
    writer.close()


def asked(how: Answering, tokens: int) -> Any:
    async def run() -> Any:
        server = await asyncio.start_server(how, "127.0.0.1", 0)
        async with server:
            return await benchmark.ask(server.sockets[0].getsockname()[1], 5, tokens, seed=1)

    return asyncio.run(run())


def test_tokens_and_the_times_between_them() -> None:
    reply = asked(answer, 3)
    assert [tokens for _, tokens in reply.arrived] == [1, 2] and reply.tokens == 3
    first, second = reply.gaps_s()
    assert first > 0.01 and second == 0.0, "tokens that arrive together have no time between them"
    assert reply.first_s > 0


@pytest.mark.parametrize(("how", "tokens", "message"), [(answer, 4, "expected 4 tokens.* had 3"), (refuse, 3, "429.*queue is full")])
def test_an_answer_that_is_refused_or_short_is_an_error(how: Answering, tokens: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=rf"(?s){message}"):
        asked(how, tokens)


def test_a_round_counts_what_arrives_in_its_time() -> None:
    replies = [
        benchmark.Reply(10, 0.0, [(1.0, 1), (2.0, 1), (3.0, 2)]),  # begins before the time that counts
        benchmark.Reply(20, 1.0, [(3.0, 1), (9.0, 1)]),  # is cut off
        benchmark.Reply(30, 2.0),  # has got nothing
    ]
    one = benchmark.Round(replies, 1.5, 5.5, cpu_s=3.0)
    assert one.rates() == (4 / 4, (4 + 20) / 4)
    assert one.firsts_s() == [2.0]
    assert one.gaps_s() == [1.0, 1.0, 0.0]
    assert one.tokens_per_cpu_s() == (10 + 4 + 20 + 2) / 3.0
    row = benchmark.figures([one, one])
    assert (row["answer_tokens_s"], row["tokens_s"], row["p50_first_ms"], row["p99_between_ms"]) == (1.0, 6.0, 2000.0, 1000.0)


def test_every_token_has_a_text_of_one_length() -> None:
    texts = {benchmark.token_text(token) for token in range(benchmark.VOCABULARY)}
    assert len(texts) == benchmark.VOCABULARY and {len(text) for text in texts} == {benchmark.TOKEN_TEXT}
