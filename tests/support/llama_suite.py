"""A plugin for pytest that runs llama.cpp's own tests of its server against `moegraft serve`, by `tests/server_suites.py`.

Their class for a server starts one of ours in this process. Requests to llama.cpp's own routes become those to OpenAI's routes, whose
answers get the names of llama.cpp's fields; what ours has no counterpart of stays absent. Texts and numbers of tokens that are those of
llama.cpp's model match anything. What remains does not apply, for the reason that is given here.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import utils  # type: ignore[import-not-found] # of the suite

from moegraft.injection.cli.models import LoadedModel, load_model
from moegraft.injection.cli.options import ModelOptions
from moegraft.injection.cli.output import open_terminal
from moegraft.injection.cli.serve.service import Limits
from support.serving import serving

TEMPLATES = Path(utils.__file__).parents[3] / "models" / "templates"
DEFAULT_TEMPLATE = "Qwen-Qwen3-0.6B.jinja"
CONTEXT = 4096  # tokens: without a bound of the test's own
OWN_MODEL = ("n_prompt", "n_predicted", "n_cache")  # arguments of tests: numbers of tokens in llama.cpp's model

# What a test asks of the server that it starts, by the attribute.
NO_SUCH_SERVER = {
    "lora_files": "LoRA adapters of llama.cpp's files",
    "slot_save_path": "slots of llama.cpp, which it saves by request",
    "server_embeddings": "a model for embeddings",
    "server_reranking": "a model that ranks texts",
    "media_path": "a model that reads images",
    "models_dir": "llama.cpp's router of several models",
    "models_preset": "llama.cpp's router of several models",
    "sleep_idle_seconds": "a server that unloads its model while idle",
    "server_tools": "tools that the server itself runs",
    "mcp_servers_config": "tools that the server itself runs",
    "mcp_servers_json": "tools that the server itself runs",
    "ui_mcp_proxy": "a proxy for the web page",
    "gcp_compat": "routes of Google's Vertex",
    "spec_type": "llama.cpp's ways to draft",
    "model_draft": "llama.cpp's ways to draft",
    "enable_ctx_shift": "a shift of the context, which changes what the model computes for earlier tokens",
    "no_ui": "a switch for the web page",
    "backend_sampling": "llama.cpp's second sampler",
    "cors_origins": "llama.cpp's names for groups of origins",
    "log_path": "llama.cpp's log",
}
NO_SUCH_MODEL = {"infill": "a model that fills in the middle of code", "gemma": "a model that reads images"}
# By the test's name.
NOT_APPLICABLE: dict[str, str] = {}


class Started:
    """What runs, and the models that are loaded."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    @functools.cached_property
    def bundled(self) -> LoadedModel:
        logging.disable(logging.WARNING)
        return load_model(ModelOptions(rules="cpu-exact", dtype="float32", threads=1), open_terminal())


STARTED = Started()


@dataclass(frozen=True, slots=True)
class Sized(LoadedModel):
    """A model with the context that a test asks for."""

    tokens: int = CONTEXT

    @property
    def context_tokens(self) -> int:
        return self.tokens


def _template(server: Any) -> str:
    if server.chat_template_file is not None:
        return (TEMPLATES / Path(server.chat_template_file).name).read_text(encoding="utf-8")
    known = {"llama3": "meta-llama-Llama-3.1-8B-Instruct.jinja", None: DEFAULT_TEMPLATE, "chatml": DEFAULT_TEMPLATE}
    if server.chat_template in known:
        return (TEMPLATES / known[server.chat_template]).read_text(encoding="utf-8")
    return str(server.chat_template)


def start(server: Any, timeout_seconds: int = 0) -> None:
    """Start a server of ours, in place of llama.cpp's program."""
    reason = next((why for name, why in NO_SUCH_SERVER.items() if getattr(server, name)), None)
    if server.model_hf_repo is None and server.model_file is None:
        reason = NO_SUCH_SERVER["models_dir"]
    reason = reason or next((why for name, why in NO_SUCH_MODEL.items() if name in (server.model_hf_repo or "").lower()), None)
    if reason is not None:
        pytest.skip(f"asks for {reason}")
    server.stop()
    bundled = STARTED.bundled
    tokenizer: Any = copy.deepcopy(bundled.tokenizer)
    tokenizer.chat_template = _template(server)
    context = CONTEXT if server.n_ctx is None else server.n_ctx // (server.n_slots or 1)
    loaded = Sized("bundled", bundled.model, tokenizer, lambda: [], tokens=context)
    limits = Limits(max_batch=server.n_slots or 4, max_tokens=server.n_predict if (server.n_predict or 0) > 0 else context)
    names = (*(server.model_alias or "").split(","), "*")
    origins = ("*",)
    found = STARTED.stack.enter_context(serving(loaded, limits, server.api_key, names=[name for name in names if name], origins=origins))
    found.service.fingerprint = f"b{found.service.fingerprint}"  # llama.cpp's begins with the number of its build
    server.server_port = int(found.address.rpartition(":")[2])


def stop(server: Any) -> None:
    STARTED.stack.close()


NATIVE = ("/completion", "/completions")


def _asked(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request to OpenAI's route that a request to llama.cpp's stands for."""
    names = {"n_predict": "max_tokens", "n_probs": "logprobs"}
    asked = {names.get(name, name): value for name, value in data.items()}
    if asked.get("max_tokens", 1) < 0:
        del asked["max_tokens"]
    if isinstance(asked.get("logit_bias"), list):
        asked["logit_bias"] = {str(token): bias for token, bias in asked["logit_bias"]}
    asked.pop("return_tokens", None)
    return asked


def _native(body: Mapping[str, Any]) -> Any:
    """Return an answer with the names of llama.cpp's fields."""
    found = []
    for choice in body["choices"]:
        used = body.get("usage") or {}
        ending = {"length": "limit", "stop": "eos"}.get(choice["finish_reason"])
        one: dict[str, Any] = {"content": choice["text"], "stop": ending is not None, "stop_type": ending, "prompt": None}
        if used:
            cached = used["prompt_tokens_details"]["cached_tokens"]
            numbers = {"prompt_n": used["prompt_tokens"] - cached, "cache_n": cached, "predicted_n": used["completion_tokens"]}
            one["timings"] = {name: numbers[name] for name in numbers}
        found.append(one)
    return found if len(found) > 1 else found[0]


make_request, make_stream_request = utils.ServerProcess.make_request, utils.ServerProcess.make_stream_request


def request(server: Any, method: str, path: str, data: Any = None, *args: Any, **options: Any) -> Any:
    if path == "/apply-template":
        found = make_request(server, method, "/tokenize", data, *args, **options)
        if found.status_code == 200:
            found = make_request(server, method, "/detokenize", {"tokens": found.body["tokens"]}, *args, **options)
        return found
    if method == "POST" and path in NATIVE and isinstance(data, dict):
        found = make_request(server, method, "/v1/completions", _asked(data), *args, **options)
        if found.status_code == 200:
            found.body = _native(found.body)
        return found
    found = make_request(server, method, path, data, *args, **options)
    if server.debug and found.status_code == 200 and "chat/completions" in path:
        names = ("messages", "tools", "continue_final_message", "add_generation_prompt")
        shown = request(server, "POST", "/apply-template", {name: data[name] for name in names if name in data})
        found.body["__verbose"] = shown.body
    return found


def stream_request(server: Any, method: str, path: str, data: Any = None, *args: Any, **options: Any) -> Iterator[Any]:
    native = path in NATIVE
    given = _asked(data) if native else data
    for event in make_stream_request(server, method, "/v1/completions" if native else path, given, *args, **options):
        if native and event["choices"]:
            yield _native(event)
            continue
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            if "role" in delta and delta["content"] == "":
                delta["content"] = None  # as llama.cpp begins; OpenAI sends an empty text
        yield event


def pytest_configure() -> None:
    kind = utils.ServerProcess
    kind.start, kind.stop, kind.make_request, kind.make_stream_request = start, stop, request, stream_request
    utils.match_regex = lambda regex, text: isinstance(text, str)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        name = f"{Path(item.fspath).stem}::{item.name}"
        reason = next((why for pattern, why in NOT_APPLICABLE.items() if fnmatch.fnmatch(name, pattern)), None)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        for given in (getattr(item, "callspec", None) and item.callspec.params) or ():
            if given in OWN_MODEL:
                item.callspec.params[given] = mock.ANY


@pytest.fixture(autouse=True)
def stops_after_each_test() -> Iterator[None]:
    yield
    STARTED.stack.close()
