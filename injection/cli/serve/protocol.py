"""Requests and answers in the form of OpenAI's chat and text completions. Unsupported parameters are refused by name."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from moegraft.injection.cli.serve.answer_parser import AnswerParser, ParsedDelta
from moegraft.injection.cli.serve.job import Job, Piece, TokenScore

Kind = Literal["chat", "text"]
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MOST_STOPS = 16
# Unsupported parameters that would change the answer, with the values that mean "off".
REFUSED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "functions": (None, []),
    "suffix": (None, ""),
    "audio": (None,),
}
OF_NO_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "reasoning_effort",
    "modalities",
    "safety_identifier",
    "prompt_cache_key",
    "verbosity",
)
TAKEN = (
    *("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "echo"),
    *("tools", "tool_choice", "parallel_tool_calls", "response_format", "grammar"),
)
MOST_ANSWERS = 16  # to one request
MOST_LOGPROBS = 20
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
    """A parsed request; None means the server's or the model's own value.

    Attributes:
        messages: as chat templates take them; calls of tools have their arguments as objects.
        logprobs: how many of the likeliest tokens are reported beside each token; None reports no scores.
        single_tool_call: whether calls of tools after an answer's first are left out.
        form: the JSON Schema or the grammar that an answer follows; None: any text.
    """

    kind: Kind
    model: str | None
    messages: list[dict[str, Any]] = field(default_factory=list)
    prompt: str | list[int] = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    n: int = 1
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    echo: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)
    single_tool_call: bool = False
    form: dict[str, Any] | str | None = None


def read_object(body: bytes) -> dict[str, Any]:
    """
    Raises:
        RequestError: the body is no JSON object.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "the body is not JSON") from error
    if not isinstance(data, dict):
        raise RequestError(400, "the body is not a JSON object")
    return data


def read_request(kind: Kind, body: bytes) -> Request:
    """
    Raises:
        RequestError: 400 for a malformed request, 422 for an unsupported one.
    """
    data = read_object(body)
    for name in data:
        if name not in KNOWN:
            shown = name[:60].encode(errors="replace").decode()  # a reply cannot hold the lone surrogates that JSON can
            raise RequestError(422, f"unknown parameter {shown!r}", param=shown)
        if name in REFUSED and data[name] not in REFUSED[name]:
            raise RequestError(422, f"{name} is not supported", param=name)
    options = _typed(data, "stream_options", dict) or {}
    echo = kind == "text" and bool(_typed(data, "echo", bool))
    asked_tokens = _number(data, "max_completion_tokens", 1, integer=True)
    if asked_tokens is None:
        asked_tokens = _number(data, "max_tokens", 0 if echo else 1, integer=True)
    chooses_tools = _tool_choice(data)
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
        n=_number(data, "n", 1, MOST_ANSWERS, integer=True) or 1,
        min_p=_number(data, "min_p", 0, 1),
        repetition_penalty=_number(data, "repetition_penalty", 0.01, 100),
        presence_penalty=_number(data, "presence_penalty", -2, 2) or 0.0,
        frequency_penalty=_number(data, "frequency_penalty", -2, 2) or 0.0,
        logit_bias=_logit_bias(data),
        logprobs=_logprobs(kind, data),
        echo=echo,
        tools=_tools(kind, data) if chooses_tools else [],
        single_tool_call=_typed(data, "parallel_tool_calls", bool) is False,
        form=_form(data),
    )


def _form(data: Mapping[str, Any]) -> dict[str, Any] | str | None:
    asked, grammar = _typed(data, "response_format", dict) or {"type": "text"}, _typed(data, "grammar", str)
    kind = asked.get("type")
    if grammar is not None:
        if kind != "text":
            raise RequestError(400, "response_format and grammar contradict each other; give one of them", param="grammar")
        return readable(grammar)
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    described = asked.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        message = (
            "response_format is none of {'type': 'text'}, {'type': 'json_object'}, {'type': 'json_schema', 'json_schema': {'schema': ...}}"
        )
        raise RequestError(400, message, param="response_format")
    return schema


def _logprobs(kind: Kind, data: Mapping[str, Any]) -> int | None:
    if kind == "text":
        found: int | None = _number(data, "logprobs", 0, MOST_LOGPROBS, integer=True)
        return found
    wanted, most = _typed(data, "logprobs", bool), _number(data, "top_logprobs", 0, MOST_LOGPROBS, integer=True)
    if most and not wanted:
        raise RequestError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    return (most or 0) if wanted else None


def _logit_bias(data: Mapping[str, Any]) -> dict[int, float]:
    biases = _typed(data, "logit_bias", dict) or {}
    try:
        found = {int(token): float(bias) for token, bias in biases.items()}
    except (TypeError, ValueError) as error:
        raise RequestError(400, "logit_bias is not an object of tokens and numbers", param="logit_bias") from error
    if not all(-100 <= bias <= 100 for bias in found.values()):
        raise RequestError(400, "logit_bias has values outside of the range from -100 to 100", param="logit_bias")
    return found


def _tools(kind: Kind, data: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = _typed(data, "tools", list) or []
    if kind == "text" and tools:
        raise RequestError(422, "tools are supported in chats only", param="tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(400, "a tool is not of the form {'type': 'function', 'function': {'name': ...}}", param="tools")
    return tools


def _tool_choice(data: Mapping[str, Any]) -> bool:
    """Return whether the model may call tools."""
    choice = data.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise RequestError(422, "tool_choice can be 'auto' or 'none'; a call cannot be forced", param="tool_choice")
    return choice != "none"


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


def _messages(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    entries = data.get("messages")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise RequestError(400, "messages is not a list of messages", param="messages")
    messages = [_message(entry) for entry in entries]
    if messages[-1]["role"] not in ("user", "tool"):
        raise RequestError(422, "the last message must be the user's or a tool's", param="messages")
    return messages


def _message(entry: Mapping[str, Any]) -> dict[str, Any]:
    role, content = entry.get("role"), entry.get("content")
    if not isinstance(role, str):
        raise RequestError(400, "a message has no role", param="messages")
    if role not in ROLES:
        raise RequestError(422, f"messages of role {role[:40]!r} are not supported", param="messages")
    message: dict[str, Any] = {"role": ROLES[role]}
    if role == "assistant" and entry.get("tool_calls"):
        message["tool_calls"] = _tool_calls(entry["tool_calls"])
        content = content or ""
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(entry.get(name), str):
            message[name] = readable(entry[name])
    if isinstance(content, list):
        if not all(isinstance(part, dict) for part in content):
            raise RequestError(400, "a message's content is not a list of parts", param="messages")
        if any(part.get("type") != "text" for part in content):
            raise RequestError(422, "only text is supported in messages", param="messages")
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        raise RequestError(400, "a message has no text", param="messages")
    return {**message, "content": readable(content)}


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        call = call if isinstance(call, dict) else {}
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(400, "a call of a tool has no function with a name", param="messages")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(readable(arguments) or "{}")
            except (ValueError, RecursionError) as error:
                raise RequestError(400, f"the arguments of a call of {function['name'][:60]!r} are not JSON", param="messages") from error
        found.append({"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments or {}}})
    return found


def _prompt(data: Mapping[str, Any]) -> str | list[int]:
    prompt = data.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return readable(prompt)
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(part, str | list) for part in prompt):
        raise RequestError(422, "several prompts in one request are not supported; send one at a time", param="prompt")
    raise RequestError(400, "prompt is neither text nor a list of tokens", param="prompt")


def readable(text: str) -> str:
    """Return `text`.

    Raises:
        RequestError: it is not valid Unicode.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(400, "the text has lone surrogates, which are not valid Unicode") from error
    return text


class Choice:
    """One answer to a request, as its pieces arrive: text, reasoning, calls of tools and scores of tokens.

    Args:
        parser: finds reasoning and calls of tools in the text; None if the model's templates mark none.
        before: text that the answer begins with.
    """

    def __init__(self, kind: Kind, index: int, job: Job, spell: Callable[[int], str], parser: AnswerParser | None, before: str) -> None:
        self.kind = kind
        self.index = index
        self.job = job
        self.text = self.reasoning = ""
        self.tool_calls: list[dict[str, Any]] = []
        self._spell = spell
        self._parser = parser
        self._before = before
        self._scores: list[TokenScore] = []
        self._offset = 0  # in the text, of the next token with a score
        self._started = False

    @property
    def finish_reason(self) -> str | None:
        return "tool_calls" if self.tool_calls and self.job.ending == "stop" else self.job.ending

    def add(self, piece: Piece) -> list[dict[str, Any]]:
        """Take the next piece, and return the parts of the answer that a stream sends for it."""
        parts: list[dict[str, Any]] = []
        scores, before = list(piece.scores), ""
        if not self._started:
            self._started = True
            scores, before = [*self.job.prompt_scores, *scores], self._before
            if self.kind == "chat":
                parts.append(self._part({"delta": {"role": "assistant", "content": ""}}, []))
        if self.kind == "text" or self._parser is None:
            text = before + piece.text
            self.text += text
            if text or scores:
                parts.append(self._part({"text": text} if self.kind == "text" else {"delta": {"content": text}}, scores))
        else:
            for delta in self._parser.feed(piece.text, last=piece.ending is not None):
                parts.append(self._part({"delta": self._parsed(delta)}, scores))
                scores = []
            if scores:
                parts.append(self._part({"delta": {}}, scores))
        if piece.ending is not None:
            empty: dict[str, Any] = {"text": ""} if self.kind == "text" else {"delta": {}}
            parts.append({**self._part(empty, []), "finish_reason": self.finish_reason})
        return parts

    def whole(self) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self.index, "logprobs": self._logprobs(self._scores, 0), "finish_reason": self.finish_reason}
        if self.kind == "text":
            return {**choice, "text": self.text}
        message: dict[str, Any] = {"role": "assistant", "content": self.text if self.text or not self.tool_calls else None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return {**choice, "message": message}

    def _part(self, content: Mapping[str, Any], scores: list[TokenScore]) -> dict[str, Any]:
        offset = self._offset
        self._offset += sum(len(self._spell(score.token)) for score in scores)
        self._scores += scores
        return {"index": self.index, **content, "logprobs": self._logprobs(scores, offset), "finish_reason": None}

    def _parsed(self, delta: ParsedDelta) -> dict[str, Any]:
        if delta.kind == "content":
            self.text += delta.text
            return {"content": delta.text}
        if delta.kind == "reasoning":
            self.reasoning += delta.text
            return {"reasoning_content": delta.text}
        function = {"name": delta.name, "arguments": delta.text}
        call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
        self.tool_calls.append(call)
        return {"tool_calls": [{"index": len(self.tool_calls) - 1, **call}]}

    def _logprobs(self, scores: list[TokenScore], offset: int) -> dict[str, Any] | None:
        if self.job.ask.logprobs is None or not scores:
            return None
        if self.kind == "text":
            texts = [self._spell(score.token) for score in scores]
            return {
                "tokens": texts,
                "token_logprobs": [score.logprob for score in scores],
                "top_logprobs": [
                    None if score.logprob is None else {self._spell(token): value for token, value in score.top} for score in scores
                ],
                "text_offset": [offset + sum(map(len, texts[:place])) for place in range(len(texts))],
            }

        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            text = self._spell(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        return {"content": [{**entry(s.token, s.logprob), "top_logprobs": [entry(*top) for top in s.top]} for s in scores]}


@dataclass(frozen=True, slots=True)
class Reply:
    """The answers to one request in OpenAI's form."""

    kind: Kind
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        head = self._head("text_completion" if self.kind == "text" else "chat.completion")
        jobs = [choice.job for choice in choices]
        return {**head, "choices": [choice.whole() for choice in choices], "usage": usage(jobs), "moegraft": figures(jobs[0])}

    def chunk(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return a part of an answer as a chunk of the stream."""
        return {**self._chunk_head(), "choices": [part]}

    def usage_chunk(self, jobs: Sequence[Job]) -> dict[str, Any]:
        return {**self._chunk_head(), "choices": [], "usage": usage(jobs), "moegraft": figures(jobs[0])}

    def _chunk_head(self) -> dict[str, Any]:
        return self._head("text_completion" if self.kind == "text" else "chat.completion.chunk")

    def _head(self, form: str) -> dict[str, Any]:
        prefix = "cmpl" if self.kind == "text" else "chatcmpl"
        return {"id": f"{prefix}-{self.id}", "object": form, "created": self.created, "model": self.model}


def usage(jobs: Sequence[Job]) -> dict[str, Any]:
    """Return the tokens of the answers and of their common prompt."""
    prompt, completion = len(jobs[0].ask.token_ids), sum(job.completion_tokens for job in jobs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": jobs[0].kept_tokens},
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
