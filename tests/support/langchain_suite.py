"""LangChain's own tests of a chat model, for `langchain-openai` as the client of a server of ours; run by `tests/server_suites.py`.

What a test expects a clever model to write is scripted; forms and forced calls of tools restrict it as they do any model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]
from langchain_tests.integration_tests import ChatModelIntegrationTests  # type: ignore[import-not-found]

from moegraft.injection.cli.serve.service import Limits
from support.serving import scripted
from support.tiny_server import tiny_model

MODEL = tiny_model()


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


JOKE = '{"setup": "Why?", "punchline": "So."}'
# By a part of the test's name: what the model writes before the result of a tool.
WRITTEN = {
    "no_arguments": call("magic_function_no_args", "{}"),
    "runnables_as_tools": call("greeting_generator", '{"answer_style": "pirate"}'),
    "agent_loop": call("get_weather", '{"location": "San Francisco"}'),
    "unicode_tool": call("unicode_customer", '{"customer_name": "你好こんにちは", "description": "x"}'),
    "few_shot": call("my_adder_tool", '{"a": 3, "b": 4}'),
    "tool_c": call("magic_function", '{"input": 3}'),
    "structured": JOKE,
    "json_mode": JOKE,
}


class TestServer(ChatModelIntegrationTests):  # type: ignore[misc]
    address = ""

    @property
    def chat_model_class(self) -> type[Any]:
        return ChatOpenAI  # type: ignore[no-any-return]

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"base_url": f"{self.address}/v1", "model": "scripted", "api_key": "none", "max_retries": 0, "stream_usage": True}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False  # one server has one model

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_schema"}

    @pytest.fixture
    def model(self, request: pytest.FixtureRequest) -> Iterator[Any]:
        first = next((text for name, text in WRITTEN.items() if name in request.node.name), "hello there")
        # Pydantic's first version becomes a tool, and its schema a form. In the other, results of tools are examples.
        second = {"pydantic_2_v1": ("<system>Joke", call("Joke", JOKE)), "few_shot": ("tool:", first)}
        mark, then = next((pair for name, pair in second.items() if name in request.node.name), ("tool:", "well"))
        with scripted(MODEL, first, then=then, mark=mark, limits=Limits(prefix_cache=0)) as server:
            self.address = server.address
            yield self.chat_model_class(**self.chat_model_params)
