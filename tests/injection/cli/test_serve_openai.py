"""What OpenAI's and vLLM's servers accept: continued messages, prompts in lists, parameters without effect, names, other sites' pages."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openai", reason="an extra for tests: pip install 'moegraft[test]'")
pytest.importorskip("pydantic", reason="an extra for tests: pip install 'moegraft[test]'")

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.serving import CALL, SCHEMA, WEATHER, Server, ask, call, messages, openai, scripted, serving

from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.serve.service import Limits


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Server]:
    with serving(loaded) as found:
        yield found


def test_the_last_message_is_continued(server: Server, loaded: LoadedModel) -> None:
    """By the tokens that follow its text in one prompt; only what is new is answered."""
    whole = ask(server, "hello", max_tokens=20).choices[0].message.content
    chat = messages("hello", whole[:8])
    options = {"continue_final_message": True, "add_generation_prompt": False}
    rest = ask(server, messages=chat, max_tokens=12, extra_body=options)
    assert rest.choices[0].message.content == whole[8:]
    assert rest.usage.prompt_tokens == len("hello") + 3 + 8
    chunks = ask(server, messages=chat, max_tokens=12, extra_body={"continue_final_message": True}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole[8:]


def test_a_last_message_of_the_assistant_is_followed_by_another(server: Server) -> None:
    reply = ask(server, "hello", "hi")
    assert reply.usage.prompt_tokens == len("hello") + len("hi") + 5  # a mark of the role before each, and two ends of messages
    assert (
        reply.choices[0].message.content
        != ask(server, "hello", "hi", extra_body={"continue_final_message": True}).choices[0].message.content
    )


def test_the_template_may_be_asked_to_begin_no_answer(loaded: LoadedModel) -> None:
    tokenizer: Any = copy.deepcopy(loaded.tokenizer)
    head = tokenizer.chat_template.removesuffix("<assistant>")
    tokenizer.chat_template = head + "{% if add_generation_prompt %}<assistant>{% endif %}"
    with serving(LoadedModel("prompted", loaded.model, tokenizer, lambda: [])) as server:
        plain, without = (ask(server, "hello", extra_body=options) for options in ({}, {"add_generation_prompt": False}))
        assert plain.usage.prompt_tokens == without.usage.prompt_tokens + 1


@pytest.mark.parametrize("opening", ["<assistant>", "<assistant><think>\n"])
def test_what_is_continued_is_no_reasoning(loaded: LoadedModel, opening: str) -> None:
    """Where the template begins each answer with reasoning as well, since the message that is continued has its text."""
    with scripted(loaded, "lo again", opening) as server:
        reply = ask(server, messages=messages("hello", "Hel"), max_tokens=50, extra_body={"continue_final_message": True})
        assert reply.choices[0].message.content == "lo again"
        assert getattr(reply.choices[0].message, "reasoning_content", None) is None


def test_the_beginning_of_a_mark_in_what_is_continued_is_not_sent_again(loaded: LoadedModel) -> None:
    with scripted(loaded, "p>text") as server:
        reply = ask(server, messages=messages("hello", "<div><"), max_tokens=50, extra_body={"continue_final_message": True})
        assert reply.choices[0].message.content == "p>text"


@pytest.mark.parametrize(
    ("chat", "options", "message"),
    [
        (messages("hello", "hi"), {"add_generation_prompt": True}, "contradict each other"),
        (messages("hello"), {}, "messages: only text of the assistant can be continued"),
        (messages("hello", "hi"), {"grammar": 'start: "a"'}, "has no form of its own"),
        (messages("hello", "hi"), {"response_format": {"type": "json_object"}}, "has no form of its own"),
    ],
)
def test_what_cannot_be_continued_is_refused(server: Server, chat: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(server, messages=chat, extra_body={"continue_final_message": True, **options})


def test_a_message_of_the_assistant_may_have_no_content(server: Server) -> None:
    chat: Any = [*messages("hello"), {"role": "assistant", "content": None}, *messages("more")]
    empty: Any = [*messages("hello"), {"role": "assistant", "content": ""}, *messages("more")]
    assert ask(server, messages=chat).choices[0].message.content == ask(server, messages=empty).choices[0].message.content


def test_top_logprobs_alone_ask_for_scores(server: Server) -> None:
    alone = ask(server, "hello", top_logprobs=2).choices[0].logprobs
    assert alone == ask(server, "hello", top_logprobs=2, logprobs=True).choices[0].logprobs
    assert [len(token.top_logprobs) for token in alone.content] == [2] * 12
    with pytest.raises(openai.BadRequestError, match="contradicts"):
        ask(server, "hello", top_logprobs=2, logprobs=False)


def test_each_of_several_prompts_has_its_own_answers(server: Server, loaded: LoadedModel) -> None:
    client, model = server.client(), server.service.model_id
    tokens = loaded.tokenizer("how are")["input_ids"]
    single = [
        client.completions.create(model=model, prompt=prompt, max_tokens=8, n=2, temperature=1.5, seed=3) for prompt in ("once", tokens)
    ]
    both = client.completions.create(model=model, prompt=["once", tokens], max_tokens=8, n=2, temperature=1.5, seed=3)  # type: ignore[list-item]
    assert [choice.text for choice in both.choices] == [choice.text for reply in single for choice in reply.choices]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.usage is not None and all(reply.usage is not None for reply in single)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(both.usage, name) == sum(getattr(reply.usage, name) for reply in single)
    echoed = client.completions.create(model=model, prompt=["once", "how are"], max_tokens=1, echo=True)
    assert [choice.text[:-1] for choice in echoed.choices] == ["once", "how are"]
    chunks = client.completions.create(model=model, prompt=["once", "how are"], max_tokens=8, stream=True)
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert all(len(text) == 8 for text in texts)
    with pytest.raises(openai.BadRequestError, match="at most 64 answers"):
        client.completions.create(model=model, prompt=["once"] * 33, n=2)


def test_an_answer_is_at_most_as_long_as_the_server_allows(loaded: LoadedModel) -> None:
    with serving(loaded, Limits(max_tokens=20)) as server:
        reply = ask(server, "hello", max_tokens=1_000_000)
        assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (20, "length")


def test_parameters_without_effect_are_ignored_and_reported(server: Server, loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    given = {"messages": messages("hello"), "max_tokens": 2, "keep_alive": "5m", "num_ctx": 4096, "prediction": None}
    for stream in (False, True):
        status, headers, _ = call(server, "POST", "/v1/chat/completions", {**given, "stream": stream})
        assert (status, headers["x-moegraft-ignored"]) == (200, "keep_alive, num_ctx")
    assert [record.getMessage() for record in caplog.records].count("serve: the parameter num_ctx is ignored: it has no effect here") == 1
    assert "x-moegraft-ignored" not in call(server, "POST", "/v1/chat/completions", {"messages": messages("hello"), "max_tokens": 2})[1]
    with serving(loaded, Limits(strict=True)) as strict:
        status, _, body = call(strict, "POST", "/v1/chat/completions", given)
        assert (status, body["error"]["message"]) == (400, "keep_alive, num_ctx: no effect on this server")
        assert ask(strict, "hello", user="me").choices[0].message.content


@pytest.mark.parametrize("schema", ["text", 1, [], True, None, {"type": "hiccup"}, {"type": 1}])
@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_a_schema_that_is_none_is_refused(server: Server, schema: Any, path: str) -> None:
    form = {"name": "x", "schema": schema}
    chat = {"messages": messages("hello"), "response_format": {"type": "json_schema", "json_schema": form}}
    response = {"input": "hello", "text": {"format": {"type": "json_schema", **form}}}
    status, _, body = call(server, "POST", f"/v1/{path}", chat if path == "chat/completions" else response)
    assert (status, "schema" in body["error"]["message"] or "format" in body["error"]["message"]) == (400, True)


def test_a_conversation_that_is_too_long_loses_its_oldest_turns(server: Server) -> None:
    items: Any = [{"role": "system", "content": "be brief"}]
    for number in range(8):
        items += [{"role": "user", "content": f"{number}" + "x" * 800}, {"role": "assistant", "content": "so"}]
    items.append({"role": "user", "content": "last"})
    client, model = server.client(), server.service.model_id
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.responses.create(model=model, input=items, max_output_tokens=8)
    found = client.responses.create(model=model, input=items, max_output_tokens=8, truncation="auto")
    kept: Any = [items[0], *items[7:]]  # five questions of 800 signs with their answers leave room for an answer
    expected = client.responses.create(model=model, input=kept, max_output_tokens=8)
    assert (found.truncation, expected.truncation) == ("auto", "disabled")
    assert found.usage and expected.usage and found.usage.input_tokens == expected.usage.input_tokens > 3200
    assert found.output_text == expected.output_text
    short = client.responses.create(model=model, input="hello", max_output_tokens=8, truncation="auto")
    assert short.output_text == client.responses.create(model=model, input="hello", max_output_tokens=8).output_text


def test_a_response_repeats_what_was_asked(server: Server) -> None:
    client, model = server.client(), server.service.model_id
    form: Any = {"format": {"type": "json_schema", "name": "weather", "schema": SCHEMA}}
    reply = client.responses.create(model=model, input="hello", text=form, max_output_tokens=40, temperature=0.5, top_p=0.9)
    assert reply.text and reply.text.format and getattr(reply.text.format, "name", None) == "weather"
    assert (reply.temperature, reply.top_p) == (0.5, 0.9)
    plain = client.responses.create(model=model, input="hello", max_output_tokens=2)
    assert isinstance(plain.temperature, float) and isinstance(plain.top_p, float)
    assert plain.usage and plain.usage.input_tokens_details.cache_write_tokens == 0


def test_models_and_answers_state_when_and_by_what(server: Server) -> None:
    [model] = server.client().models.list()
    assert time.time() - 3600 < model.created <= time.time()
    reply = ask(server, "hello")
    assert reply.system_fingerprint.startswith("moegraft-")
    assert all(chunk.system_fingerprint == reply.system_fingerprint for chunk in ask(server, "hello", stream=True))
    assert server.client().completions.create(model=model.id, prompt="x", max_tokens=1).system_fingerprint == reply.system_fingerprint


def test_a_model_may_have_several_names(loaded: LoadedModel) -> None:
    with serving(loaded, names=("one", "two")) as server:
        assert [model.id for model in server.client().models.list()] == ["one", "two"]
        assert {ask(server, "hello", model=name).model for name in ("one", "two")} == {"one"}
        with pytest.raises(openai.NotFoundError, match="this server has 'one' and 'two'"):
            ask(server, "hello", model="three")
    with serving(loaded, names=("*",)) as server:
        reply = ask(server, "hello", model="gpt-5")
        assert reply.model == server.service.model_id and server.client().models.retrieve("gpt-5").id == "gpt-5"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/status", "/health", "/metrics", "/", "/docs", "/openapi.json"])
def test_posts_to_what_is_only_read_are_refused_as_such(server: Server, path: str) -> None:
    for headers in ({}, {"Content-Type": "application/json"}):
        status, found, body = call(server, "POST", path, None, **headers)
        assert (status, body["error"]["type"]) == (405, "invalid_request_error"), headers
        assert "GET" in found["allow"]
    assert call(server, "GET", "/v1/chat/completions")[0] == 405


def test_paths_may_leave_out_the_version(server: Server) -> None:
    assert call(server, "GET", "/models")[2] == call(server, "GET", "/v1/models")[2]
    asked = {"messages": messages("hello"), "max_tokens": 2}
    with_version, without = (call(server, "POST", f"{root}/chat/completions", asked)[2] for root in ("/v1", ""))
    assert with_version["choices"] == without["choices"]
    assert call(server, "GET", "/modelsx")[0] == 404


def test_the_tokens_of_a_response_are_counted(server: Server) -> None:
    client, model = server.client(), server.service.model_id
    counted = client.responses.input_tokens.count(model=model, input="hello", instructions="be brief")
    answered = client.responses.create(model=model, input="hello", instructions="be brief", max_output_tokens=1)
    assert answered.instructions == "be brief" and answered.completed_at and answered.completed_at >= answered.created_at
    assert answered.usage and counted.input_tokens == answered.usage.input_tokens > 0


def test_embeddings_are_refused_with_the_reason(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="generates text"):
        server.client().embeddings.create(model=server.service.model_id, input="hello")


def test_pages_of_other_sites_may_call_only_where_allowed(server: Server, loaded: LoadedModel) -> None:
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert "access-control-allow-origin" not in call(server, "OPTIONS", "/v1/chat/completions", **asks)[1]
    with serving(loaded, key="secret", origins=("https://a.example",)) as open_server:
        status, headers, _ = call(open_server, "OPTIONS", "/v1/chat/completions", **asks)
        assert (status, headers["access-control-allow-origin"]) == (200, "https://a.example")
        assert "POST" in headers["access-control-allow-methods"] and "authorization" in headers["access-control-allow-headers"].lower()
        status, headers, _ = call(open_server, "GET", "/v1/models", Authorization="Bearer secret", Origin="https://a.example")
        assert (status, headers["access-control-allow-origin"]) == (200, "https://a.example")
        status, headers, _ = call(open_server, "GET", "/v1/models", Origin="https://a.example")
        assert (status, headers["access-control-allow-origin"]) == (401, "https://a.example"), "or the page could not read the refusal"
        other = call(open_server, "OPTIONS", "/v1/chat/completions", **{**asks, "Origin": "https://b.example"})
        assert other[0] == 400 and "access-control-allow-origin" not in other[1]


def test_a_json_object_may_have_a_schema(server: Server) -> None:
    """As llama.cpp and others take it, who ignore none that is wrong."""
    form = {"type": "json_object", "schema": SCHEMA}
    found = ask(server, "hello", response_format=form, max_tokens=200, temperature=1.2, seed=1)
    assert set(json.loads(found.choices[0].message.content)) == {"city", "degrees"}
    for schema in (123, {"type": 123}, {"type": "hiccup"}):
        with pytest.raises(openai.BadRequestError):
            ask(server, "hello", response_format={**form, "schema": schema})


def test_tokens_may_be_asked_for_with_their_text(server: Server, loaded: LoadedModel) -> None:
    plain, pieces = (call(server, "POST", "/tokenize", {"content": "hé", "with_pieces": wanted})[2] for wanted in (False, True))
    assert [token["id"] for token in pieces["tokens"]] == plain["tokens"]
    assert pieces["tokens"][0]["piece"] == "h" and pieces["count"] == 3


def test_the_tokens_of_a_chat_may_lack_the_beginning_of_an_answer(server: Server) -> None:
    chat = messages("hello", "hi")
    whole, continued = (
        call(server, "POST", "/tokenize", {"messages": chat, **options})[2]["count"] for options in ({}, {"continue_final_message": True})
    )
    assert whole == continued + 2  # the end of the message, and the mark of the next


def test_an_empty_grammar_is_none(server: Server) -> None:
    """As clients of llama.cpp send it."""
    given = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, "grammar": ""}
    assert set(json.loads(ask(server, "hello", extra_body=given, max_tokens=200).choices[0].message.content)) == {"city", "degrees"}
    assert ask(server, "hello", extra_body={"grammar": ""}).choices[0].message.content == ask(server, "hello").choices[0].message.content


def test_answers_and_events_are_strictly_of_openais_types(loaded: LoadedModel) -> None:
    """Which its client does not check. Of text completions, its types exclude what it sends: the first token's score, and parts."""
    chat: dict[str, Any] = {"messages": messages("weather?"), "tools": [WEATHER], "max_tokens": 200, "logprobs": True, "top_logprobs": 2}
    response = {"input": "weather?", "tools": [{"type": "function", **WEATHER["function"]}], "max_output_tokens": 200}  # type: ignore[dict-item]
    asked: list[tuple[str, dict[str, Any], Any, Any]] = [
        ("chat/completions", chat, ChatCompletion, ChatCompletionChunk),
        ("completions", {"prompt": ["a", "b"], "max_tokens": 5, "logprobs": 2}, Completion, None),
        ("responses", response, Response, ResponseStreamEvent),
    ]
    with scripted(loaded, f"<think>\nRome?</think>I look.{CALL}") as server:
        for path, body, whole, event in asked:
            status, _, found = call(server, "POST", f"/v1/{path}", body)
            assert status == 200
            TypeAdapter(whole).validate_json(json.dumps(found), strict=True)
            if event is None:
                continue
            text = server.http.post(f"{server.address}/v1/{path}", json={**body, "stream": True}).text
            events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
            assert len(events) > 3
            for one in events:
                TypeAdapter(event).validate_json(one, strict=True)
