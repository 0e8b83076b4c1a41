"""`moegraft serve` as its clients see it: OpenAI's own, many at once, those that leave, and those that send nonsense."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

import pytest
import torch
from rich.console import Console
from support import ROOT
from support.emulated import device_kind
from support.families import build_model, served_cases
from support.gpus import placed
from support.programs import Program
from support.serving import PATIENCE_S, SCHEMA, Server, ask, messages, openai, serving, until
from support.virtual_device import VirtualDevice
from transformers import MixtralConfig, MixtralForCausalLM
from typer.testing import CliRunner

from moegraft.injection import optimize_and_load
from moegraft.injection.cli.chat.answer import Answerer
from moegraft.injection.cli.chat.conversation import Conversation
from moegraft.injection.cli.models import LoadedModel, load_model
from moegraft.injection.cli.moegraft import app
from moegraft.injection.cli.options import ModelOptions, OptionsError, SamplingOptions
from moegraft.injection.cli.output import Terminal
from moegraft.injection.cli.serve import sequential
from moegraft.injection.cli.serve.answer_form import Constraint, Grammars, grammars
from moegraft.injection.cli.serve.job import Ask, Job, StopFilter
from moegraft.injection.cli.serve.open_pool import open_pool
from moegraft.injection.cli.serve.scheduler import Scheduler, batching_obstacle
from moegraft.injection.cli.serve.service import Limits, Service
from moegraft.injection.demo import demo_path
from moegraft.injection.injected import injection_of
from moegraft.operators.base import ModelOperator
from moegraft.operators.offload.devices.base import DeviceError
from moegraft.operators.registry import load_registry
from moegraft.operators.schedule import Round

QUIET = Terminal(io.StringIO(), Console(file=io.StringIO()), quiet=True)


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Server]:
    with serving(loaded, Limits(prefill_chunk=20)) as found:
        yield found


@pytest.fixture
def slowly(loaded: LoadedModel) -> Iterator[None]:
    """A token takes 20 ms, so that there is time to leave."""
    hook = loaded.model.register_forward_pre_hook(lambda *args: time.sleep(0.02))
    yield
    hook.remove()


def wanted(loaded: LoadedModel, *said: str, tokens: int = 12) -> str:
    """The answer of a chat at the terminal to what is said, user and assistant in turn."""
    conversation = Conversation(loaded.tokenizer, loaded.context_tokens)
    for index, text in enumerate(said):
        (conversation.answered if index % 2 else conversation.ask)(text)
    answerer = Answerer(loaded, SamplingOptions(do_sample=False, max_new_tokens=tokens))
    return answerer.answer(conversation.prompt(tokens).token_ids, lambda text: None).text


def test_an_answer_is_that_of_the_chat(server: Server, loaded: LoadedModel) -> None:
    reply = ask(server, "hello there, how are you")
    assert reply.choices[0].message.content == wanted(loaded, "hello there, how are you")
    assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("length", 12)
    assert reply.usage.prompt_tokens == len("hello there, how are you") + 3
    assert [model.id for model in server.client().models.list()] == [server.service.model_id]
    assert json.loads(server.get("/health")) == {"status": "ok"}
    with urlopen(HttpRequest(f"{server.address}/health", method="HEAD"), timeout=PATIENCE_S) as reply:
        assert (reply.status, reply.read()) == (200, b"")


def test_a_stream_has_the_same_text(server: Server, loaded: LoadedModel) -> None:
    hook = loaded.model.register_forward_pre_hook(lambda *args: time.sleep(0.01))  # slower than the stream
    chunks = list(ask(server, "hello", stream=True, stream_options={"include_usage": True}))
    hook.remove()
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == wanted(loaded, "hello")
    assert 6 < sum(bool(text) for text in texts) <= 12, "a chunk a token, where the stream is as fast as the model"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in list(ask(server, "hello", stream=True)))


def test_a_conversation_is_not_read_again(server: Server, loaded: LoadedModel) -> None:
    said = ["a question with some length"]
    for question in ["and then?", "a last one"]:
        reply = ask(server, *said)
        said += [reply.choices[0].message.content, question]
    reply = ask(server, *said)
    assert reply.choices[0].message.content == wanted(loaded, *said)
    assert reply.usage.prompt_tokens - reply.usage.prompt_tokens_details.cached_tokens == 1 + 2 + len("a last one") + 2


def test_text_is_continued(server: Server, loaded: LoadedModel) -> None:
    client, model = server.client(), server.service.model_id
    text = client.completions.create(model=model, prompt="once upon", max_tokens=8)
    tokens = client.completions.create(model=model, prompt=loaded.tokenizer("once upon")["input_ids"], max_tokens=8)
    chunks = list(client.completions.create(model=model, prompt="once upon", max_tokens=8, stream=True))
    assert len(text.choices[0].text) == 8
    assert text.choices[0].text == tokens.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_an_answer_and_is_not_shown(server: Server, loaded: LoadedModel, stream: bool) -> None:
    whole = wanted(loaded, "hello")
    stop = whole[5:8]
    expected = whole[: whole.index(stop)]
    reply = ask(server, "hello", stop=["never", stop], stream=stream)
    if stream:
        chunks = list(reply)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (expected, "stop")


def test_stop_strings_that_begin_and_do_not_end_are_shown() -> None:
    held = StopFilter(["abcd", "bx"])
    assert [held.feed(piece) for piece in ("a", "b", "c", "e", "ab")] == ["", "", "", "abce", ""]
    assert held.rest() == "ab"
    again = StopFilter(["abcd", "bx"])
    assert (again.feed("za"), again.feed("bx rest"), again.stopped, again.rest()) == ("z", "a", True, "")


def test_draws_follow_their_seed(server: Server) -> None:
    def draw(seed: int | None, **options: Any) -> str:
        return str(ask(server, "hello", temperature=1.5, seed=seed, max_tokens=30, **options).choices[0].message.content)

    assert draw(1) == draw(1) != draw(2)
    assert draw(None) != draw(None)
    likeliest = ask(server, "hello", temperature=0, max_tokens=30).choices[0].message.content
    assert draw(1, top_p=0.0001) == likeliest == draw(2, extra_body={"top_k": 1})


def test_32_clients_at_once_get_what_each_gets_alone() -> None:
    loaded = load_model(ModelOptions(rules="cpu-exact", dtype="float32", threads=1), QUIET)
    questions = [f"{'Speak, ' * (number % 5)}what of the king's {number} men?" for number in range(32)]
    with serving(loaded, Limits(max_batch=16, max_queue=64, prefill_chunk=16)) as server:
        alone = [ask(server, question, temperature=0, max_tokens=16).choices[0].message.content for question in questions[:6]]
        most = 0

        def watch() -> None:
            nonlocal most
            while server.service.engine.endings["length"] + server.service.engine.endings["stop"] < 38:
                most = max(most, server.service.engine.running)
                time.sleep(0.001)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        with ThreadPoolExecutor(32) as pool:
            replies = list(pool.map(lambda question: ask(server, question, temperature=0, max_tokens=16), questions))
        watcher.join(PATIENCE_S)
        texts = [reply.choices[0].message.content for reply in replies]
        assert texts[:6] == alone
        assert texts[6:] == [ask(server, question, temperature=0, max_tokens=16).choices[0].message.content for question in questions[6:]]
        assert all(reply.usage.completion_tokens <= 16 and reply.choices[0].finish_reason in ("length", "stop") for reply in replies)
        assert most > 4, "they were answered together"
        figures = server.get("/metrics")
        assert 'moegraft:placement{what="5 x experts: hybrid_experts' in figures
        assert int(re.findall(r"^vllm:generation_tokens_total\S* (\d+)", figures, re.MULTILINE)[0]) > 500


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_not_answered_on(server: Server, stream: bool) -> None:
    engine = server.service.engine
    before = engine.endings["cancelled"]
    body = json.dumps({"messages": messages("hello"), "max_tokens": 2000, "stream": stream}).encode()
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        until(lambda: engine.running == 1)
        if stream:
            assert client.recv(100)
    until(lambda: engine.endings["cancelled"] == before + 1)
    assert engine.running == 0
    assert ask(server, "hello").choices[0].message.content


def post(server: Server, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, dict[str, Any]]:
    request = HttpRequest(server.address + path, body, {"Content-Type": "application/json"} | headers)
    try:
        with urlopen(request, timeout=PATIENCE_S) as reply:
            return reply.status, json.loads(reply.read())
    except OSError as error:
        text = error.read().decode()  # type: ignore[attr-defined]
        assert "Traceback" not in text and ".py" not in text
        return error.code, json.loads(text)["error"]  # type: ignore[attr-defined]


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 400, "not a JSON object"),
        (b"{", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b"[]", 400, "not a JSON object"),
        ({}, 400, "messages: Field required"),
        ({"messages": []}, 400, "messages"),
        ({"messages": ["hi"]}, 400, "messages"),
        ({"messages": [{"content": "hi"}]}, 400, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, 400, "messages.0: a message has no text"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, 400, "messages.0.role: Input should be 'system'"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, 400, "messages.0.tool_calls.0"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            400,
            "messages.0.tool_calls.0.function.arguments",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, 400, "input_audio"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages.0.content: Input has lone surrogates"),
        ({**CHAT, "temperature": "hot"}, 400, "temperature"),
        ({**CHAT, "temperature": 3}, 400, "temperature: Input should be less than or equal to 2"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}', 400, "temperature: Input should be a finite number"),
        ({**CHAT, "max_tokens": 0}, 400, "max_tokens"),
        ({**CHAT, "max_tokens": True}, 400, "max_tokens"),
        ({**CHAT, "stop": [1]}, 400, "stop"),
        ({**CHAT, "best_of": 2}, 400, "best_of: is not supported"),
        ({**CHAT, "best_of": True}, 400, "best_of: is not supported"),
        ({**CHAT, "n": 0}, 400, "n: Input should be greater than or equal to 1"),
        ({**CHAT, "tools": [{}]}, 400, "tools.0.function: Field required"),
        ({**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "no place for tools"),
        ({**CHAT, "tool_choice": "required"}, 400, "tool_choice: there are no tools"),
        ({**CHAT, "top_logprobs": 2, "logprobs": False}, 400, "top_logprobs contradicts logprobs"),
        ({**CHAT, "logit_bias": {"a": 1}}, 400, "logit_bias"),
        ({**CHAT, "logit_bias": {"5000": 1}}, 400, "logit_bias has tokens outside"),
        ({**CHAT, "presence_penalty": 3}, 400, "presence_penalty: Input should be less"),
        ({**CHAT, "temprature": 1}, 400, "'temprature'"),
        (b'{"\\ud800": 1}', 400, "unknown parameter"),
        ({**CHAT, "model": "gpt-5"}, 404, "unknown model 'gpt-5'"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "4096"),
    ],
)
def test_what_cannot_be_served_is_refused(server: Server, body: Any, status: int, says: str) -> None:
    """With the status of OpenAI's servers, which is 400 for all that a request asks in vain."""
    found, error = post(server, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert (found, says in error["message"]) == (status, True), error


def test_a_request_for_tokens_without_a_text_names_what_is_missing(server: Server) -> None:
    status, error = post(server, b"{}", "/tokenize")
    assert (status, error["message"]) == (400, "one of prompt, content and messages is needed")
    assert post(server, b"[]", "/tokenize")[1]["message"] == "the body is not a JSON object"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": messages("x" * 5000)}, "messages"),
        ("completions", {"prompt": "x" * 5000}, "prompt"),
        ("responses", {"input": "x" * 5000}, "input"),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_as_openai_does(server: Server, path: str, body: Any, param: str) -> None:
    for stream in (False, True):
        status, error = post(server, json.dumps({**body, "stream": stream}).encode(), f"/v1/{path}")
        found = {name: error[name] for name in ("type", "param", "code")}
        assert (status, found) == (400, {"type": "invalid_request_error", "param": param, "code": "context_length_exceeded"})
        assert error["message"].startswith("This model's maximum context length is 4096 tokens")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"temprature": 1}, "unknown_parameter", "temprature"),
        ({"functions": [{}]}, "unsupported_parameter", "functions"),
    ],
)
def test_refusals_have_the_codes_of_openai(server: Server, body: Any, code: str, param: str) -> None:
    status, error = post(server, json.dumps({**CHAT, **body}).encode())
    assert (status, error["code"], error["param"]) == (400, code, param)


@pytest.mark.parametrize("prompt", [[], [-1], [10**9], ["a", ""], ["a", 1], "", None, [True]])
def test_prompts_that_are_none_are_refused(server: Server, prompt: Any) -> None:
    status, _ = post(server, json.dumps({"prompt": prompt}).encode(), "/v1/completions")
    assert status == 400


def test_bodies_and_paths_have_limits(server: Server) -> None:
    assert post(server, b'"' + b"x" * (1 << 20) + b'"')[0] == 413
    assert post(server, json.dumps(CHAT).encode(), **{"Content-Type": "text/plain"})[0] == 415
    assert post(server, b"{}", "/v1/nothing")[0] == 404
    assert post(server, b"{}", "/health")[0] == 405


def test_a_key_is_required(loaded: LoadedModel) -> None:
    with serving(loaded, key="secret") as server:
        assert post(server, json.dumps(CHAT).encode())[0] == 401
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()
        assert len(list(server.client("secret").models.list())) == 1
        assert json.loads(server.get("/health")) == {"status": "ok"}


def test_a_failure_ends_its_request_alone(server: Server, loaded: LoadedModel) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("inner secret")

    hook = loaded.model.model.layers[1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(openai.InternalServerError) as error:
            ask(server, "hello")
    finally:
        hook.remove()
    assert "secret" not in str(error.value)
    assert ask(server, "hello").choices[0].message.content == wanted(loaded, "hello")


DRAFTING = """
version: 1
extends: cpu-exact
rules:
- match: {{kind: model}}
  replace: {{class: speculative_draft, kwargs: {{{}}}}}
"""


def with_drafts(folder: Path, options: str, extra: str = "", model: str | None = None) -> LoadedModel:
    rules = folder / "rules.yaml"
    rules.write_text(DRAFTING.format(options) + extra)
    return load_model(ModelOptions(model=model, rules=str(rules), dtype="float32", threads=1), QUIET)


NO_ATTENTION = "- {id: attention, match: {kind: attention, name: nothing}, replace: {class: cpu_attention}, expect: any}"


@pytest.mark.parametrize(
    ("draft", "rules"), [("draft: ngram", ""), ("draft_top_k: 1, confidence: 0.3", ""), ("draft_top_k: 1, confidence: 0.3", NO_ATTENTION)]
)
def test_drafts_change_no_answer_of_a_batch(draft: str, rules: str, tmp_path: Path) -> None:
    """Greedy and sampled, with penalties, scores and forms, of several lengths; nor in the next turn, which begins with a prefix."""
    found, work = scripted_answers(with_drafts(tmp_path, f"{draft}, max_draft: 4, schedule: fixed", rules))
    assert found == plain_answers()
    assert work["tokens_accepted"] > 20, "drafts were of use"


CODES = "- {id: codes, match: {kind: model}, replace: {class: quantized_kv_cache, kwargs: {backend: native}}}\n"


@pytest.mark.long
def test_drafts_over_codes_change_no_answer_of_a_batch(tmp_path: Path) -> None:
    rules = tmp_path / "codes.yaml"
    rules.write_text(f"version: 1\nextends: cpu-exact\nrules:\n{CODES}")
    plain = scripted_answers(load_model(ModelOptions(rules=str(rules), dtype="float32", threads=1), QUIET))[0]
    assert plain != plain_answers(), "codes are not exact"
    for draft in ("draft: mtp", "draft_top_k: 1"):
        found, work = scripted_answers(with_drafts(tmp_path, f"{draft}, max_draft: 4, schedule: fixed", CODES))
        assert found == plain
        assert work["tokens_accepted"] > 20, "drafts were of use"


@dataclass(frozen=True)
class NoOptions:
    pass


def test_operators_that_decode_one_sequence_do_so_beside_others(tmp_path: Path) -> None:
    class Own(ModelOperator):
        name, options_type, summary = "own", NoOptions, "a plug-in"

        @classmethod
        def build(cls, module: Any, options: Any, context: Any) -> Own:
            return cls(options)

        def placement(self) -> str:
            return self.name

        def generate(self, model: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
            return plain(*args, **kwargs)

    registry = load_registry().with_operators(Own)
    own = "- {id: own, match: {kind: model}, replace: {class: own}}\n"
    drafts = DRAFTING.format("draft: ngram").partition("rules:\n")[2]
    for text, alone in ((CODES, ""), (own, "own"), (CODES + own, "own"), (drafts + own, "own"), (drafts + CODES, "")):
        path = tmp_path / "rules.yaml"
        path.write_text(f"version: 1\nextends: cpu-exact\nrules:\n{text}")
        model = optimize_and_load(demo_path(), path, progress=False, threads=1, registry=registry)
        assert (batching_obstacle(model) or "") == (f"{alone} decodes one sequence at a time with these options" if alone else "")
    with pytest.raises(OptionsError, match=r"stored as codes in pages, .*: speculative_draft decodes one sequence at a time"):
        Service(with_drafts(tmp_path, "mode: adaptive, tolerance: 0.3", CODES), Limits())


@cache
def plain_answers() -> list[list[int]]:
    return scripted_answers(load_model(ModelOptions(rules="cpu-exact", dtype="float32", threads=1), QUIET))[0]


def grammar_of(service: Service, tokenizer: Any, grammar: str) -> Constraint:
    return Grammars(tokenizer, len(tokenizer), service.ends).constraint(grammar)


def scripted_answers(loaded: LoadedModel) -> tuple[list[list[int]], dict[str, int]]:
    """The tokens of two turns of eight requests, and what was computed."""
    options: list[dict[str, Any]] = [
        {"max_tokens": 40},
        {"max_tokens": 25, "temperature": 0.8, "seed": 3},
        {"max_tokens": 33, "temperature": 1.0, "top_p": 0.9, "seed": 4, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"max_tokens": 3, "logprobs": 2},
        {"max_tokens": 60},
        {"max_tokens": 50, "temperature": 0.9, "seed": 7},
        {"max_tokens": 30, "stop": (" the",)},
        {"max_tokens": 1},
    ]
    forms: dict[int, Any] = {4: SCHEMA, 5: 'start: WORD (" " WORD)*\nWORD: /[a-z]{2,9}/'}
    service, tokenizer = Service(loaded, Limits()), loaded.tokenizer
    assert service.alone_because is None
    found: list[list[int]] = []
    try:
        for turn in ("Who are the kings of England?", "And then?"):
            jobs = []
            for number, given in enumerate(options):
                before = found[number] if turn == "And then?" else []
                ids = [*before, *tokenizer(f"{turn} {number * 'Speak. '}")["input_ids"]]
                form = grammar_of(service, tokenizer, grammars(forms[number])) if number in forms else None
                jobs.append(Job(Ask(ids, end_tokens=service.ends, **{"temperature": 0.0, **given}), tokenizer, constraint=form))
                service.engine.submit(jobs[-1:])
            until(lambda jobs=jobs: all(job.ending for job in jobs))  # type: ignore[misc]
            assert all(job.ending in ("stop", "length") for job in jobs)
            found = [job.token_ids for job in jobs]
        until(lambda: service.engine.running == 0)
        memory = service.engine.memory
        assert memory.promised == 0 and memory.used == memory.kept
        return found, dict(service.engine.work)
    finally:
        service.close()


@contextmanager
def drafted(loaded: LoadedModel, change: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Change the logits of drafts, and of no other pass."""

    def changed(module: Any, args: Any, output: Any) -> None:
        if module.moegraft.drafting:
            change(output.logits)

    hook = loaded.model.register_forward_hook(changed)
    try:
        yield
    finally:
        hook.remove()


def test_a_draft_without_numbers_ends_no_answer(tmp_path: Path) -> None:
    loaded = with_drafts(tmp_path, "max_draft: 4, schedule: fixed")
    damaged = []
    with drafted(loaded, lambda logits: damaged.append(logits.mul_(torch.nan))), serving(loaded) as server:
        assert ask(server, "Who are the kings of England?", max_tokens=40).choices[0].finish_reason in ("stop", "length")
    assert damaged, "drafts were made"


def test_a_text_near_its_end_leaves_the_drafts_of_others(tmp_path: Path) -> None:
    """Also where memory is for no more than their own tokens and those of a draft; the pass has no padding."""
    loaded = with_drafts(tmp_path, "draft_top_k: 1, confidence: 0, max_draft: 4, schedule: fixed")
    drafts = injection_of(loaded.model).model_operator.batch_drafts()  # type: ignore[union-attr]
    ids = [*loaded.tokenizer("Who are the kings of England? " * 4)["input_ids"]][:30]
    seen: list[tuple[int, int]] = []
    limit = 1 << 22
    for _ in range(2):
        pool = open_pool(loaded.model, limit=limit, prefix_bytes=0, most=2, context=128 + 4)
        decoder = Scheduler(loaded.model, pool, most=2, prefill_chunk=0, drafts=drafts)
        jobs = [Job(Ask(prompt, most), loaded.tokenizer) for prompt, most in (((4 * ids)[:100], 28), (ids, 2))]
        limit = sum(map(decoder.needed_bytes, jobs))
        with torch.inference_mode():
            for job in jobs:
                assert decoder.fits(job)
                decoder.admit(job)
            while not jobs[1].completion_tokens:
                decoder.step()
            hook = loaded.model.register_forward_pre_hook(
                lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
            )
            decoder.step()
            hook.remove()
            while jobs[0].ending is None:
                decoder.step()
        assert [job.ending for job in jobs] == ["length"] * 2
    assert seen == 2 * [*4 * [(1, 1)], (1, 5 + 1)]


@pytest.mark.parametrize("draft", ["ngram", "experts", "mtp"])
def test_short_prompts_are_computed_in_steps_of_a_model_that_drafts(draft: str, tmp_path: Path) -> None:
    loaded = with_drafts(tmp_path, f"draft: {draft}, max_draft: 4, schedule: fixed")
    drafts = injection_of(loaded.model).model_operator.batch_drafts()  # type: ignore[union-attr]
    pool = open_pool(loaded.model, limit=1 << 23, prefix_bytes=0, most=4, context=512, drafts=drafts)
    decoder = Scheduler(loaded.model, pool, most=4, prefill_chunk=64, drafts=drafts)
    ids = [*loaded.tokenizer("Who are the kings of England? " * 4)["input_ids"]]
    jobs = [Job(Ask(ids[:size], 24, temperature=0), loaded.tokenizer) for size in (20, 9, 33)]
    seen: list[tuple[int, int]] = []
    with torch.inference_mode():
        decoder.admit(jobs[0])
        decoder.step()
        decoder.step()
        hook = loaded.model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        for job in jobs[1:]:
            decoder.admit(job)
        decoder.step()
        hook.remove()
        while decoder.jobs:
            decoder.step()
    assert seen[-1] == (1, (1 if draft == "ngram" else 1 + 4) + 9 + 33)  # a text of 20 tokens repeats none
    loaded.model.generation_config.eos_token_id = None
    for job in jobs:
        own = loaded.model.generate(torch.tensor([job.ask.token_ids]), max_new_tokens=24, do_sample=False)
        assert job.token_ids == own[0].tolist()


@pytest.mark.parametrize("alone", [True, False])
def test_the_time_of_a_pass_with_prompts_is_no_estimate_of_drafts(alone: bool, tmp_path: Path) -> None:
    """Drafts begin when plain steps were timed, which these are not."""
    loaded = with_drafts(tmp_path, "draft: ngram, max_draft: 4, schedule: marginal")
    drafts = injection_of(loaded.model).model_operator.batch_drafts()  # type: ignore[union-attr]
    for _ in range(20):
        if drafts.plan(2, 8):
            break
        drafts.record([Round([], 0, 0, 1)] * 2, 0.0, 10.0, alone=alone)
    assert bool(drafts.plan(2, 8)) == alone


def test_a_draft_whose_tokens_make_a_grammar_too_large_fails_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch, and where the answer alone is computed by `generate`."""
    import llguidance

    loaded = with_drafts(tmp_path, "confidence: 0, max_draft: 8, schedule: fixed")
    tokenizer = loaded.tokenizer
    large = [tokenizer(sign)["input_ids"][-1] for sign in "(a"]

    def draws(logits: torch.Tensor) -> None:
        logits[..., large] += torch.tensor([1e4, 2e4])

    grammar = grammars('start: (/[b-z ]/ | "(" s ")")+\ns: s s | "a"')
    ask = Ask(tokenizer("Who?")["input_ids"], 20, logit_bias={large[0]: -100.0})

    def answer() -> Job:
        service = Service(loaded, Limits())
        job = Job(replace(ask, end_tokens=service.ends), tokenizer, constraint=grammar_of(service, tokenizer, grammar))
        try:
            service.engine.submit([job])
            until(lambda: job.ending is not None)
        finally:
            service.close()
        return job

    expected = answer()
    restarted: list[None] = []
    monkeypatch.setattr(llguidance, "LLMatcher", partial(llguidance.LLMatcher, limits=llguidance.LLParserLimits(max_items_in_row=14)))
    restart = Constraint.restart
    monkeypatch.setattr(Constraint, "restart", lambda self: restarted.append(restart(self)))
    with drafted(loaded, draws):
        found = answer()
    assert (found.ending, found.token_ids) == (expected.ending, expected.token_ids) and len(restarted) == 1
    job = Job(ask, tokenizer, constraint=found.constraint.copy())  # type: ignore[union-attr]
    drawn, own = ([*ask.token_ids, *more] for more in ([large[0], *large[1:] * 8], found.token_ids[len(ask.token_ids) :]))
    logits = torch.zeros(1, loaded.model.config.vocab_size)
    for damage in (0.0, torch.nan):
        assert not sequential._Answer(job, lambda: True).adjusted(torch.tensor([drawn]), logits + damage).any()
    assert job.ending is None and len(restarted) == 3
    assert sequential._Answer(job, lambda: False).adjusted(torch.tensor([own]), logits)[0, large[1]] == -torch.inf


def test_drafts_that_pay_for_one_text_may_not_for_many(tmp_path: Path) -> None:
    """Each size of batch has a schedule of its own."""
    operator = injection_of(with_drafts(tmp_path, "max_draft: 4").model).model_operator  # type: ignore[union-attr]
    drafts = operator.batch_drafts()  # type: ignore[union-attr]
    assert drafts is not None
    for texts, draft_ms, verify_ms in ((1, 0.1, 0.3), (8, 1.0, 8.0)):
        for _ in range(200):
            length = drafts.plan(texts, 10)
            row = Round([0.9] * length, length, length, length + 1)
            drafts.record([row] * texts, draft_ms * length, 1.0 + verify_ms * length)
    lengths = {texts: drafts.plan(texts, 10) for texts in (1, 6, 8)}
    state = str(operator.statistics()["schedule"])  # type: ignore[union-attr]
    assert "batches of up to 8: off, as no draft pays" in state, state
    assert lengths[6] == lengths[8] == 0 and "batches of up to 1: 4 tokens per draft" in state


def test_what_drafts_alone_is_served_one_request_at_a_time(chat_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drafting = with_drafts(tmp_path, "mode: adaptive, tolerance: 0.3", model=str(chat_folder))
    with serving(drafting, Limits(prefill_chunk=8)) as server, ThreadPoolExecutor(4) as pool:
        assert "one at a time: speculative_draft decodes one sequence at a time with these options" in caplog.text
        replies = list(pool.map(lambda _: ask(server, "hello there"), range(4)))
        assert replies[-1].usage.completion_tokens == 12
        figures = server.get("/metrics")
        assert float(re.findall(r'moegraft:operator\{module="\(the model\)",name="rounds"\} (\S+)', figures)[0]) > 0


@pytest.fixture
def sliding(loaded: LoadedModel) -> LoadedModel:
    """A stock model whose window is shorter than the longest question."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MixtralConfig(vocab_size=len(loaded.tokenizer), num_local_experts=4, sliding_window=16, eos_token_id=0, **sizes)
    return LoadedModel("sliding", MixtralForCausalLM(config).eval(), loaded.tokenizer, lambda: [])


def test_captured_steps_serve_sliding_windows_one_request_at_a_time(sliding: LoadedModel, tmp_path: Path, gpu: str) -> None:
    questions = ["hello", "a question that is longer than the window"]
    sliding.model.generation_config.repetition_penalty = 1.0001  # which only `generate` applies
    expected = [wanted(sliding, question) for question in questions]
    rules = tmp_path / "rules.yaml"
    experts = f'{{class: hybrid_experts, kwargs: {{gpu: "{gpu}", cache: {{ratio: 0.5}}, decode: graph}}}}'
    rules.write_text(f"version: 1\nrules:\n- match: {{kind: experts}}\n  replace: {experts}\n")
    model = optimize_and_load(placed(copy.deepcopy(sliding.model), gpu), rules, progress=False, threads=1)
    with serving(LoadedModel("sliding", model, sliding.tokenizer, lambda: [])) as server:
        assert [ask(server, question).choices[0].message.content for question in questions] == expected
        again = ask(server, questions[1], expected[1], "and more")
        assert again.choices[0].message.content == wanted(sliding, questions[1], expected[1], "and more")
    (engine,) = model.moegraft.context.gpu_engines
    assert engine.statistics.replayed > 20


def test_where_steps_are_captured_one_answer_at_a_time_is_the_default(sliding: LoadedModel, tmp_path: Path, gpu: str) -> None:
    """With all that a batch offers for answers, and the same greedy texts and scores; only the scores of prompts are refused."""
    rules = tmp_path / "rules.yaml"
    experts = f'{{class: hybrid_experts, kwargs: {{gpu: "{gpu}", cache: {{ratio: 0.5}}, decode: graph}}}}'
    rules.write_text(f"version: 1\nrules:\n- match: {{kind: experts}}\n  replace: {experts}\n")
    model = optimize_and_load(placed(copy.deepcopy(sliding.model), gpu), rules, progress=False, threads=1)
    (engine,) = model.moegraft.context.gpu_engines
    asked: list[dict[str, Any]] = [
        {"logprobs": True, "top_logprobs": 2, "max_tokens": 30},
        {"logprobs": True, "top_logprobs": 1, "extra_body": {"repetition_penalty": 1.5}},
        {"temperature": 0.9, "seed": 4},
    ]
    found: list[list[tuple[str | None, list[float]]]] = []
    for limits in (Limits(max_batch=4), Limits(), Limits(max_batch=1)):
        before = engine.statistics.replayed
        with serving(LoadedModel("sliding", model, sliding.tokenizer, lambda: []), limits) as server:
            alone = server.service.alone_because
            assert (alone is None) == (limits.max_batch == 4)
            assert alone is None or "captured" in alone
            choices = [ask(server, "a question that is longer than the window", **given).choices[0] for given in asked]
            if alone is not None:
                with pytest.raises(openai.BadRequestError, match="logprobs are not available for this model: decode steps are captured"):
                    server.client().completions.create(model=server.service.model_id, prompt="a b", echo=True, logprobs=1)
        assert (engine.statistics.replayed > before) == (alone is not None)
        scores = [[token.logprob for token in choice.logprobs.content] if choice.logprobs else [] for choice in choices]
        found.append([(choice.message.content, each) for choice, each in zip(choices, scores, strict=True)])
    assert found[1][2] == found[2][2], "a seed's text; those of a batch are drawn by another generator"
    for other in found[1:]:
        for (text, scores), (expected, of_batch) in zip(other[:2], found[0], strict=False):
            assert text == expected
            assert scores == pytest.approx(of_batch, abs=1e-3)
    assert any(scores for _, scores in found[0])


CAPTURED = 'version: 1\nrules:\n- match: {{kind: experts}}\n  replace: {{class: hybrid_experts, kwargs: {{gpu: "{gpu}", decode: graph}}}}\n'


@pytest.mark.parametrize("why", ["no static cache", "a capture that is refused", "prefixes on disk"])
def test_without_captured_steps_there_are_batches(why: str, sliding: LoadedModel, tmp_path: Path) -> None:
    class Refusing(VirtualDevice):
        def capture(self, step: Any) -> Any:
            raise DeviceError("the step cannot be captured: injected")

    stock = sliding.model
    if why == "no static cache":
        stock = build_model(next(case for case in served_cases() if case.model_type == "inkling_text"))
    limits = Limits(max_batch=1, prefix_cache_dir=tmp_path / "prefixes") if why == "prefixes on disk" else Limits()
    rules = tmp_path / "rules.yaml"
    with device_kind(Refusing if why == "a capture that is refused" else VirtualDevice) as gpu:
        rules.write_text(CAPTURED.format(gpu=gpu))
        model = optimize_and_load(copy.deepcopy(stock), rules, progress=False, threads=1)
        service = Service(LoadedModel("any", model, sliding.tokenizer, lambda: []), limits)
        try:
            assert service.alone_because is None
            assert (service.prefix_files is not None) == (why == "prefixes on disk")
        finally:
            service.close()


def test_experts_on_a_gpu_and_sliding_windows_are_batched(sliding: LoadedModel, tmp_path: Path, gpu: str) -> None:
    """Several requests in one pass, of which one is longer than the window; then one that begins with a prefix."""
    questions = ["hello", "a question that is longer than the window", "and another", "hello"]
    rules = tmp_path / "rules.yaml"
    experts = f'{{class: hybrid_experts, kwargs: {{gpu: "{gpu}", cache: {{ratio: 0.5}}}}}}'
    rules.write_text(f"version: 1\nrules:\n- match: {{kind: experts}}\n  replace: {experts}\n")
    expected = [wanted(sliding, question) for question in questions]
    model = optimize_and_load(placed(copy.deepcopy(sliding.model), gpu), rules, progress=False, threads=1)
    loaded = LoadedModel("sliding", model, sliding.tokenizer, lambda: [])
    with serving(loaded, Limits(max_batch=4)) as server, ThreadPoolExecutor(4) as pool:
        assert server.service.alone_because is None
        assert list(pool.map(lambda question: ask(server, question).choices[0].message.content, questions)) == expected
        again = ask(server, questions[1], expected[1], "and more")
        assert again.choices[0].message.content == wanted(sliding, questions[1], expected[1], "and more")
        assert again.usage.prompt_tokens_details.cached_tokens > len(questions[1])


@pytest.mark.parametrize("package", ["fastapi", "httptools", "prometheus_client", "uvicorn"])
def test_without_a_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    result = CliRunner().invoke(app, ["serve"], prog_name="moegraft")
    assert result.exit_code == 2
    assert "pip install 'moegraft[serve]'" in result.stderr


def test_a_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = CliRunner().invoke(app, ["serve", "--port", str(taken.getsockname()[1])], prog_name="moegraft")
    assert result.exit_code == 2
    assert "cannot listen on 127.0.0.1" in result.stderr


def test_the_command_of_the_readme_serves_until_ctrl_c() -> None:
    line = next(line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("moegraft serve"))
    arguments = [*shlex.split(line.replace("path/or/hub-id", ""), comments=True)[1:], "--port", "0"]
    arguments.remove("--model")
    arguments += ["--served-model-name", "one", "--served-model-name", "two", "--allow-origin", "https://a.example", "--strict"]
    running = Program(["-m", "moegraft.injection.cli.moegraft", *arguments], os.environ)
    try:
        address = next(match.group(1) for said in running.stderr if (match := re.search(r" at (http://\S+)/v1 ", said)))
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=5, timeout=PATIENCE_S)
        assert [model.id for model in client.models.list()] == ["one", "two"]
        asked: dict[str, Any] = {"model": "two", "messages": messages("Speak"), "max_tokens": 5}
        reply = client.chat.completions.with_raw_response.create(**asked, extra_headers={"Origin": "https://a.example"})
        assert reply.parse().usage and reply.headers["access-control-allow-origin"] == "https://a.example"
        with pytest.raises(openai.BadRequestError, match="keep_alive: no effect"):
            client.chat.completions.create(**asked, extra_body={"keep_alive": "5m"})
        running.send_signal(signal.SIGINT)
        output, errors = running.communicate(timeout=PATIENCE_S)
    finally:
        running.kill()
    assert (running.returncode, output) == (130, "")
    assert "Traceback" not in errors
