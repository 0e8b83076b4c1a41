"""Requests and answers in the form of OpenAI's chat and text completions. Unsupported parameters are refused by name."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moegraft.injection.cli.chat.conversation import Message
from moegraft.injection.cli.serve.job import Job

Kind = Literal["chat", "text"]
ROLES: dict[str, Any] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MOST_STOPS = 16
# Unsupported parameters that would change the answer, with the values that mean "off".
REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "echo": (None, False),
    "suffix": (None, ""),
    "audio": (None,),
}
OF_NO_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "modalities",
    "safety_identifier",
    "prompt_cache_key",
    "verbosity",
)
TAKEN = ("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "stop")
KNOWN = {*TAKEN, "stream", "stream_options", *REFUSED, *OF_NO_EFFECT}


class RequestError(Exception):
    """A request that is refused; `status` is the HTTP status."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed request; None means the server's or the model's own value."""

    kind: Kind
    model: str | None
    messages: list[Message] = field(default_factory=list)
    prompt: str | list[int] = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False


def read_request(kind: Kind, body: bytes) -> Request:
    """
    Raises:
        RequestError: 400 for a malformed request, 422 for an unsupported one.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "the body is not JSON") from error
    if not isinstance(data, dict):
        raise RequestError(400, "the body is not a JSON object")
    for name in data:
        if name not in KNOWN:
            shown = name[:60].encode(errors="replace").decode()  # a reply cannot hold the lone surrogates that JSON can
            raise RequestError(422, f"unknown parameter {shown!r}", param=shown)
        if name in REFUSED and data[name] not in REFUSED[name]:
            raise RequestError(422, f"{name} is not supported", param=name)
    options = _typed(data, "stream_options", dict) or {}
    asked_tokens = _number(data, "max_completion_tokens", 1, integer=True) or _number(data, "max_tokens", 1, integer=True)
    return Request(
        kind=kind,
        model=_typed(data, "model", str),
        messages=_messages(data) if kind == "chat" else [],
        prompt=_prompt(data) if kind == "text" else "",
        max_tokens=asked_tokens,
        temperature=_number(data, "temperature", 0, 2),
        top_p=_number(data, "top_p", 0, 1),
        top_k=_number(data, "top_k", 0, integer=True),
        seed=_number(data, "seed", -(1 << 63), (1 << 63) - 1, integer=True),
        stop=_stops(data),
        stream=bool(_typed(data, "stream", bool)),
        include_usage=options.get("include_usage") is True,
    )


def _typed(data: Mapping[str, Any], name: str, kind: type) -> Any:
    value = data.get(name)
    if value is not None and not isinstance(value, kind):
        raise RequestError(400, f"{name} is a {type(value).__name__}, not a {kind.__name__}", param=name)
    return value


def _number(data: Mapping[str, Any], name: str, low: float, high: float | None = None, *, integer: bool = False) -> Any:
    value = data.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int if integer else int | float):
        raise RequestError(400, f"{name} is not {'an integer' if integer else 'a number'}", param=name)
    if not (value >= low and (high is None or value <= high)):  # NaN too
        raise RequestError(400, f"{name} must be {f'{low} or more' if high is None else f'from {low} to {high}'}", param=name)
    return value


def _stops(data: Mapping[str, Any]) -> tuple[str, ...]:
    stop = data.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise RequestError(400, "stop is neither a string nor a list of strings", param="stop")
    if len(stops) > MOST_STOPS:
        raise RequestError(422, f"stop has {len(stops)} strings; at most {MOST_STOPS} are supported", param="stop")
    return tuple(stops)


def _messages(data: Mapping[str, Any]) -> list[Message]:
    entries = data.get("messages")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise RequestError(400, "messages is not a list of messages", param="messages")
    messages = [_message(entry) for entry in entries]
    if messages[-1].role != "user":
        raise RequestError(422, "the last message must be the user's", param="messages")
    return messages


def _message(entry: Mapping[str, Any]) -> Message:
    role, content = entry.get("role"), entry.get("content")
    if not isinstance(role, str):
        raise RequestError(400, "a message has no role", param="messages")
    if role not in ROLES:
        raise RequestError(422, f"messages of role {role[:40]!r} are not supported", param="messages")
    if isinstance(content, list):
        if not all(isinstance(part, dict) for part in content):
            raise RequestError(400, "a message's content is not a list of parts", param="messages")
        if any(part.get("type") != "text" for part in content):
            raise RequestError(422, "only text is supported in messages", param="messages")
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        raise RequestError(400, "a message has no text", param="messages")
    return Message(ROLES[role], _text(content))


def _prompt(data: Mapping[str, Any]) -> str | list[int]:
    prompt = data.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _text(prompt)
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(part, str | list) for part in prompt):
        raise RequestError(422, "several prompts in one request are not supported; send one at a time", param="prompt")
    raise RequestError(400, "prompt is neither text nor a list of tokens", param="prompt")


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(400, "the text has lone surrogates, which are not valid Unicode") from error
    return text


@dataclass(frozen=True, slots=True)
class Reply:
    """The answers to one request in OpenAI's form."""

    kind: Kind
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, job: Job) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": job.ending}
        choice |= {"text": text} if self.kind == "text" else {"message": {"role": "assistant", "content": text}}
        head = self._head("text_completion" if self.kind == "text" else "chat.completion")
        return {**head, "choices": [choice], "usage": usage(job), "moegraft": figures(job)}

    def chunk(self, text: str | None, finish_reason: str | None = None) -> dict[str, Any]:
        """Return a piece of the answer; None for `text` starts the answer of a chat."""
        if self.kind == "text":
            choice: dict[str, Any] = {"text": text or ""}
        elif text is None:
            choice = {"delta": {"role": "assistant", "content": ""}}
        else:
            choice = {"delta": {"content": text} if text else {}}
        return {**self._chunk_head(), "choices": [{"index": 0, **choice, "logprobs": None, "finish_reason": finish_reason}]}

    def usage_chunk(self, job: Job) -> dict[str, Any]:
        return {**self._chunk_head(), "choices": [], "usage": usage(job), "moegraft": figures(job)}

    def _chunk_head(self) -> dict[str, Any]:
        return self._head("text_completion" if self.kind == "text" else "chat.completion.chunk")

    def _head(self, form: str) -> dict[str, Any]:
        prefix = "cmpl" if self.kind == "text" else "chatcmpl"
        return {"id": f"{prefix}-{self.id}", "object": form, "created": self.created, "model": self.model}


def usage(job: Job) -> dict[str, Any]:
    prompt, completion = len(job.ask.token_ids), job.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": job.kept_tokens},
    }


def figures(job: Job) -> dict[str, Any]:
    """Return figures beyond OpenAI's interface: the server's times, and the model's work for the answer."""
    first_ms, rate = job.first_token_ms, job.tokens_per_s
    return {
        "first_token_ms": None if first_ms is None else round(first_ms, 2),
        "tokens_per_second": None if rate is None else round(rate, 2),
        "together": job.together,
        "work": job.work or {},
    }


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
