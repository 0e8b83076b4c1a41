"""Clients that were not written here: each is skipped where it is not installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import evaluation_harness
from support.serving import CALL, WEATHER, Server, ask, messages, scripted, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.serve.service import Limits
from moegraft.injection.demo import demo_path


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Server]:
    with serving(loaded) as found:
        yield found


def test_litellm(server: Server, loaded: LoadedModel) -> None:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed: pip install litellm")
    options: dict[str, Any] = {"api_base": f"{server.address}/v1", "api_key": "none", "max_tokens": 12, "messages": messages("hello")}
    expected = ask(server, "hello").choices[0].message.content
    reply = litellm.completion(model=f"openai/{server.service.model_id}", **options)
    assert reply.choices[0].message.content == expected and reply.usage.completion_tokens == 12
    chunks = list(litellm.completion(model=f"openai/{server.service.model_id}", stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    with scripted(loaded, f"I look.{CALL}") as tools:
        options |= {"api_base": f"{tools.address}/v1", "max_tokens": 200, "tools": [WEATHER]}
        [call] = litellm.completion(model="openai/scripted", **options).choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
        del options["messages"], options["max_tokens"]
        options["tools"] = [{"type": "function", **WEATHER["function"]}]  # type: ignore[dict-item]
        reply = litellm.responses(model="openai/scripted", input="weather?", max_output_tokens=200, **options)
        assert [item.type for item in reply.output] == ["message", "function_call"]


def test_litellm_recognises_a_prompt_that_is_too_long(loaded: LoadedModel) -> None:
    """By the message; for the context of the model, and for the memory of the server."""
    litellm = pytest.importorskip("litellm", reason="litellm is not installed: pip install litellm")
    for limits, said in ((Limits(), "hello" * 1000), (Limits(kv_memory=1 << 14), "hello" * 100)):
        with serving(loaded, limits) as server:
            options = {"api_base": f"{server.address}/v1", "api_key": "none", "model": f"openai/{server.service.model_id}"}
            for stream in (False, True):
                with pytest.raises(litellm.ContextWindowExceededError):
                    litellm.completion(messages=messages(said), stream=stream, **options)
            with pytest.raises(litellm.ContextWindowExceededError):
                litellm.responses(input=said, **options)


@pytest.mark.parametrize("interface", ["chat", "responses"])
def test_an_agent_of_pydantic_ai_calls_a_tool_and_goes_on(loaded: LoadedModel, interface: str) -> None:
    pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: pip install 'pydantic-ai-slim[openai]'")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    asked = []
    with scripted(loaded, f"<think>\nRome?</think>{CALL}", then="It rains.") as server:
        kind = OpenAIChatModel if interface == "chat" else OpenAIResponsesModel
        agent = Agent(kind("scripted", provider=OpenAIProvider(base_url=f"{server.address}/v1", api_key="none")))

        @agent.tool_plain
        def weather(city: str) -> str:
            """Return the weather of a city."""
            asked.append(city)
            return "rain"

        assert agent.run_sync("weather?").output == "It rains."
    assert asked == ["Rome"]


def test_the_evaluation_harness_finds_the_scores_of_the_model_itself(tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="the evaluation harness is not installed (pip install 'lm-eval[api]')")
    evaluation_harness.write_task(tmp_path, 20)
    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    model = AutoModelForCausalLM.from_pretrained(demo_path())
    (_, expected), *_ = evaluation_harness.scores(model, tokenizer, ["word_order"], 20, tmp_path)
    with serving(LoadedModel("bundled", model, tokenizer, lambda: [])) as server:
        found = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": "bundled",
                "base_url": f"{server.address}/v1/completions",
                "tokenizer": str(demo_path()),
                "num_concurrent": 1,
                "max_retries": 1,
            },
            tasks=["word_order"],
            limit=20,
            task_manager=lm_eval.tasks.TaskManager(include_path=str(tmp_path)),
            bootstrap_iters=0,
        )["results"]["word_order"]
    for name in ("acc,none", "acc_norm,none"):
        assert found[name] == expected[name]
