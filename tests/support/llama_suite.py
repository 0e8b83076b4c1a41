"""A plugin for pytest that runs llama.cpp's own tests of its server against `moegraft serve`, for `tests/server_suites.py`.

Their class for a server starts one of ours in this process. Requests to llama.cpp's own routes become those to OpenAI's routes, whose
answers get the names of llama.cpp's fields; what ours has no counterpart of stays absent. Texts and numbers of tokens that are those of
llama.cpp's model match anything. What remains and does not apply has its reason here.
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
TEMPLATE_NAMES = {None: "Qwen-Qwen3-0.6B", "chatml": "Qwen-Qwen3-0.6B", "llama3": "meta-llama-Llama-3.1-8B-Instruct"}
CONTEXT = 4096  # tokens, where a test has no bound of its own
OWN_NUMBER = "n_prompt"  # an argument of tests: the length of the prompt in tokens of llama.cpp's model

# What a test asks of the server that it starts, by the attribute.
NO_SUCH_SERVER = {
    "server_embeddings": "a model for embeddings",
    "server_reranking": "a model that ranks texts",
    "media_path": "a model that reads images",
    "slot_save_path": "files of llama.cpp's slots",
    "models_dir": "llama.cpp's router of several models",
    "models_preset": "llama.cpp's router of several models",
    "sleep_idle_seconds": "a server that unloads its model while idle",
    "server_tools": "tools that the server itself runs",
    "mcp_servers_config": "tools that the server itself runs",
    "mcp_servers_json": "tools that the server itself runs",
    "ui_mcp_proxy": "a proxy for the web page",
    "gcp_compat": "routes of Google's Vertex",
    "enable_ctx_shift": "a shift of the context, which computes no tokens again that have lost earlier ones",
    "no_ui": "a server without the web page",
    "backend_sampling": "llama.cpp's second sampler",
    "cors_origins": "llama.cpp's names for groups of origins",
}
NO_SUCH_MODEL = {"infill": "a model that fills in the middle of code", "gemma": "a model that reads images"}
# The reasons why tests do not apply, with the patterns of their names.
NOT_APPLICABLE = {
    "asks for files that it downloads: another model, a draft model or an adapter": ("test_lora::*", "test_speculative::*"),
    "asks for llama.cpp's router of several models": ("test_router::*",),
    "reads llama.cpp's log": ("test_kv_keep_only_active::*",),
    "asks for tools that the server itself runs": ("test_tools_builtin::*",),
    "asks for a model for embeddings": ("test_embedding::*",),
    "asks for llama.cpp's own state: /props, slots, progress, timings, fields of its own completions": (
        "test_basic::test_server_props",
        "test_basic::test_server_slots",
        "test_chat_completion::test_chat_completion_with_timings_per_token",
        "test_chat_completion::test_return_progress*",
        "test_chat_completion::test_verbose_debug",
        "test_compat_oai_responses::test_responses_stream_with_llama_telemetry",
        "test_completion::test_completion[[]*",
        "test_completion::test_completion_stream[[]*",
        "test_completion::test_completion_response_fields*",
        "test_completion::test_completion_prompt_cache",
        "test_completion::test_n_probs*",
        "test_ctx_shift::test_ctx_shift_disabled_short_prompt*",
        "test_ignore_eos::*",
        "test_metrics::*",
    ),
    "asks for llama.cpp's forms of prompts and biases: JSON, texts among tokens, texts instead of tokens": (
        "test_completion::test_json_prompt_no_mtmd",
        "test_completion::test_completion_with_tokens_input",
        "test_completion::test_logit_bias[[]False-*",
    ),
    "asks for llama.cpp's types of errors, where ours are OpenAI's": (
        "test_chat_completion::test_context_size_exceeded*",
        "test_ctx_shift::test_ctx_shift_disabled_long_prompt",
        "test_security::test_incorrect_api_key*",
        "test_proxy::test_mcp_no_proxy",
    ),
    "expects 500 for an image, which is refused with 400": (
        "test_compat_anthropic::test_anthropic_tool_result_with_image",
        "test_compat_anthropic::test_anthropic_vision_format_accepted",
    ),
    "asks for an answer to no message, which OpenAI and Anthropic refuse": ("test_compat_anthropic::test_anthropic_empty_messages",),
    "refuses two messages of the assistant in a row, which OpenAI accepts": ("test_chat_completion::test_invalid_*[[]messages7[]]",),
    "continues a last message of the assistant unasked, which OpenAI and vLLM do not": (
        "test_chat_completion::test_chat_template_assistant_prefill*",
    ),
    "expects content: null at the beginning of a stream, where OpenAI sends an empty text": ("test_chat_completion::test_logprobs_stream",),
    "counts tokens, or spells marks, of llama.cpp's model": (
        "test_chat_completion::test_chat_completion_cached_tokens",
        "test_chat_completion::test_chat_template",
        "test_tokenize::test_tokenize_with_bos",
    ),
    "asks for a template of llama.cpp's by its name, or with the date that it adds": (
        "test_chat_completion::test_apply_chat_template",
        "test_template::test_date_inside_prompt*",
    ),
    "gives tools to a template without a place for them, which is refused": ("test_template::test_reasoning[[]deepseek-*-tools2[]]",),
    "asks for a route of llama.cpp's own, or for files of its page": (
        "test_chat_completion::test_chat_completions_token_count",
        "test_security::test_access_static_assets_without_api_key",
    ),
    "expects several names of one model as an object of llama.cpp's, where vLLM has a model for each": (
        "test_basic::test_server_model_aliases_and_tags",
    ),
    "expects several addresses at once": ("test_basic::test_server_multiple_addresses",),
    "expects that pages of any site may call with cookies, whereas a site has to be allowed": ("test_security::test_cors_options*",),
}


class Started:
    """What runs, and the model."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    @functools.cached_property
    def bundled(self) -> LoadedModel:
        logging.disable(logging.WARNING)
        return load_model(ModelOptions(rules="cpu-exact", dtype="float32", threads=1), open_terminal())

    @property
    def endless(self) -> dict[str, int]:
        """Biases by which a text does not end: llama.cpp's small model never ends one."""
        tokenizer: Any = self.bundled.tokenizer
        return {str(tokenizer.eos_token_id): -100}


STARTED = Started()


@dataclass(frozen=True, slots=True)
class Sized(LoadedModel):
    """A model with the context that a test asks for."""

    tokens: int = CONTEXT

    @property
    def context_tokens(self) -> int:
        return self.tokens


def _template(server: Any) -> str:
    name = server.chat_template_file and Path(server.chat_template_file).stem
    if name is None and server.chat_template not in TEMPLATE_NAMES:
        return str(server.chat_template)
    return (TEMPLATES / f"{name or TEMPLATE_NAMES[server.chat_template]}.jinja").read_text(encoding="utf-8")


def start(server: Any, timeout_seconds: int = 0) -> None:
    """Start a server of ours, in place of llama.cpp's program."""
    reason = next((why for name, why in NO_SUCH_SERVER.items() if getattr(server, name)), None)
    if server.model_hf_repo is None and server.model_file is None:
        reason = NO_SUCH_SERVER["models_dir"]
    reason = reason or next((why for name, why in NO_SUCH_MODEL.items() if name in (server.model_hf_repo or "").lower()), None)
    if reason is not None:
        pytest.skip(f"asks for {reason}")
    stop(server)
    bundled = STARTED.bundled
    tokenizer: Any = copy.deepcopy(bundled.tokenizer)
    tokenizer.chat_template = _template(server)
    context = CONTEXT if server.n_ctx is None else server.n_ctx if server.kv_unified else server.n_ctx // (server.n_slots or 1)
    loaded = Sized("bundled", bundled.model, tokenizer, lambda: [], tokens=context)
    limits = Limits(max_batch=server.n_slots or 4, max_tokens=context)
    names = [name for name in (*(server.model_alias or "").split(","), "*") if name]
    found = STARTED.stack.enter_context(serving(loaded, limits, server.api_key, names=names))
    found.service.fingerprint = f"b{found.service.fingerprint}"  # llama.cpp's begins with the number of its build
    server.server_port = int(found.address.rpartition(":")[2])


def stop(server: Any) -> None:
    STARTED.stack.close()


NATIVE = ("/completion", "/completions")


def _asked(server: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request to OpenAI's route that a request to llama.cpp's stands for, with what their server was started with."""
    names = {"n_predict": "max_tokens"}
    own = {"temperature": server.temperature, "seed": server.seed, "max_tokens": server.n_predict or -1}
    asked = own | {names.get(name, name): value for name, value in data.items()}
    if asked.get("max_tokens", 1) < 0:
        del asked["max_tokens"]
    biases = asked.get("logit_bias", {})
    asked["logit_bias"] = {**STARTED.endless, **{str(token): bias for token, bias in dict(biases).items()}}
    return asked


def _native(body: Mapping[str, Any]) -> Any:
    """Return an answer with the names of llama.cpp's fields."""
    found = []
    for choice in body["choices"]:
        one: dict[str, Any] = {"content": choice["text"], "stop": choice["finish_reason"] is not None}
        if used := body.get("usage"):
            cached = used["prompt_tokens_details"]["cached_tokens"]
            one["timings"] = {
                "prompt_n": used["prompt_tokens"] - cached,
                "cache_n": cached,
                "predicted_n": used["completion_tokens"],
            }
        found.append(one)
    return found if len(found) > 1 else found[0]


make_request, make_stream_request = utils.ServerProcess.make_request, utils.ServerProcess.make_stream_request


def request(server: Any, method: str, path: str, data: Any = None, *args: Any, **options: Any) -> Any:
    if path == "/slots":
        found = make_request(server, method, "/v1/status", data, *args, **options)
        found.body = [{"is_processing": number < found.body["running"]} for number in range(server.n_slots)]
        return found
    if path == "/apply-template":
        thinks = {"enable_thinking": server.reasoning != "off"}  # which llama.cpp gives to all templates
        found = make_request(server, method, "/tokenize", {**data, "chat_template_kwargs": thinks}, *args, **options)
        if found.status_code == 200:
            found = make_request(server, method, "/detokenize", {"tokens": found.body["tokens"]}, *args, **options)
        return found
    native = method == "POST" and path in NATIVE
    if native:
        path, data = "/v1/completions", _asked(server, data)
    elif isinstance(data, dict) and path.endswith("chat/completions"):
        given = {} if data.get("tools") else {"logit_bias": STARTED.endless}
        if "json_schema" in data:
            given["response_format"] = {"type": "json_schema", "json_schema": {"schema": data["json_schema"]}}
        data = {**given, **{name: value for name, value in data.items() if name != "json_schema"}}
    found = make_request(server, method, path, data, *args, **options)
    found.headers = {name.title(): value for name, value in found.headers.items()}  # names have no case, and their tests one
    if found.status_code == 200 and native:
        found.body = _native(found.body)
    elif found.status_code == 200 and server.debug and path.endswith("chat/completions"):
        names = ("messages", "tools", "continue_final_message", "add_generation_prompt")
        shown = request(server, "POST", "/apply-template", {name: data[name] for name in names if name in data})
        found.body["__verbose"] = shown.body
    return found


def stream_request(server: Any, method: str, path: str, data: Any = None, *args: Any, **options: Any) -> Iterator[Any]:
    native = path in NATIVE
    if path.endswith("completions") or native:
        data = _asked(server, data)
    for event in make_stream_request(server, method, "/v1/completions" if native else path, data, *args, **options):
        if native:
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
        for reason, patterns in NOT_APPLICABLE.items():
            if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                item.add_marker(pytest.mark.skip(reason=reason))
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if OWN_NUMBER in given:
            given[OWN_NUMBER] = mock.ANY


@pytest.fixture(autouse=True)
def stops_after_each_test() -> Iterator[None]:
    yield
    STARTED.stack.close()
