"""Requests in the form of OpenAI's chat and text completions: pydantic models, and the one form behind these and all others.

What is unsupported and would change an answer is refused by name. Parameters that cannot change one are ignored, some of them with a
notice. OpenAPI's document is made from the models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

Kind = Literal["chat", "text", "response", "message"]
MOST_STOPS = 16
MOST_ANSWERS = 16  # to one prompt
MOST_PROMPTS = 64  # of one request
MOST_LOGPROBS = 20
MOST_STOP_SIGNS = 256  # of one stop string
MOST_BIASES = 1024
MOST_GRAMMAR_SIGNS = 1 << 16  # of Lark or GBNF: a grammar of ten times that takes seconds to prepare
SHOWN_ERRORS = 3  # of one request


class RequestError(Exception):
    """A request that is refused; `status` is the HTTP status."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


CODES = {"extra_forbidden": "unknown_parameter", "unsupported": "unsupported_parameter"}  # OpenAI's, by pydantic's


def refusal(errors: Sequence[Mapping[str, Any]]) -> RequestError:
    """Return the refusal of a body that pydantic refused for `errors`."""
    messages = []
    kind, place = errors[0]["type"], errors[0]["loc"][1:]  # after "body"
    if kind == "json_invalid":
        return RequestError(400, "the body is not JSON")
    if kind == "string_unicode" and not place:  # a name with lone surrogates
        return RequestError(400, "unknown parameter", code="unknown_parameter")
    if not place:
        return RequestError(400, "the body is not a JSON object")
    for error in errors[:SHOWN_ERRORS]:
        path = ".".join(str(part) for part in error["loc"][1:] if "[" not in str(part))[:200]  # without the branches of unions
        messages.append(f"unknown parameter {path!r}" if error["type"] == "extra_forbidden" else f"{path}: {error['msg']}")
    return RequestError(400, "; ".join(messages), code=CODES.get(kind), param=str(place[0])[:60])


@dataclass(frozen=True, slots=True)
class Request:
    """A request in whichever form it came; None means the server's or the model's own value.

    Attributes:
        messages: as chat templates take them; calls of tools have their arguments as objects, and images their `url`.
        instructions: of a response, the text of the first message.
        prompts: of text completions; each has `n` answers.
        continue_final_message: whether the answer continues the last message, which is the assistant's.
        add_generation_prompt: whether the chat template begins the answer.
        truncate: whether the oldest messages are left out where the prompt is too long.
        ignored: names of parameters without effect, which the answer's headers report.
        form_name: the client's name of a JSON Schema.
        logprobs: how many of the likeliest tokens are reported beside each token; None reports no scores.
        forced_tools: names of tools of which the answer has to call one; empty: the model is free.
        single_tool_call: whether calls of tools after an answer's first are left out.
        form: the JSON Schema or the grammar that an answer follows; None: any text.
    """

    kind: Kind
    model: str | None
    messages: list[dict[str, Any]] = field(default_factory=list)
    instructions: str | None = None
    prompts: tuple[str | list[int], ...] = ()
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    truncate: bool = False
    ignored: tuple[str, ...] = ()
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
    forced_tools: tuple[str, ...] = ()
    single_tool_call: bool = False
    form: dict[str, Any] | str | None = None
    form_name: str = ""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None

    @property
    def asked_by(self) -> str:
        """The parameter that has the prompt."""
        return {"text": "prompt", "response": "input"}.get(self.kind, "messages")


class Off:
    """Marks an unsupported parameter that would change the answer: only the values that mean "off" are taken.

    Args:
        reason: follows "is not supported" in the refusal.
    """

    def __init__(self, *values: Any, reason: str = "") -> None:
        self._values = values
        self._refusal = f"is not supported{reason and ': '}{reason}"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {"enum": list(self._values), "description": self._refusal.removeprefix("is ")}

    def _check(self, value: Any) -> Any:
        if not any(value == off and type(value) is type(off) for off in self._values):  # False equals 0
            raise PydanticCustomError("unsupported", "{refusal}", {"refusal": self._refusal})
        return value


def _writable(value: Any) -> Any:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise PydanticCustomError("not_writable", "Input has lone surrogates, or is nested too deeply") from error
    return value


Text = Annotated[str, AfterValidator(_writable)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_writable)]
TokenNumber = Annotated[str, Field(pattern=r"^\d{1,9}$")]
StopText = Annotated[Text, Field(min_length=1, max_length=MOST_STOP_SIGNS)]
NoEffect = Any  # a parameter that clients send and that cannot change this server's answers
IGNORED = "ignored, which the answer's header X-Moegraft-Ignored reports; refused with --strict"
Ignored = Annotated[Any, Field(description=IGNORED)]  # as NoEffect, but of other servers, or an offer that this one does not take


class Lenient(BaseModel):
    """A part of a request, in which unknown fields are ignored: clients return what servers have sent them."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class Options(BaseModel):
    """The parameters of every request for answers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """0 and -1 sample from all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[TokenNumber, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MOST_BIASES)] | None = None
    grammar: Annotated[Text, Field(max_length=MOST_GRAMMAR_SIGNS)] | None = None
    """The answer's grammar, in llguidance's form of Lark or in GBNF."""
    stream: bool | None = None
    user: NoEffect = None
    metadata: NoEffect = None
    store: NoEffect = None
    """Parameters without effect, as nothing is stored."""
    service_tier: NoEffect = None
    safety_identifier: NoEffect = None
    prompt_cache_key: NoEffect = None
    prompt_cache_retention: NoEffect = None
    keep_alive: Ignored = None
    num_ctx: Ignored = None
    cache_prompt: Ignored = None
    id_slot: Ignored = None
    timings_per_token: Ignored = None
    return_progress: Ignored = None

    def _shared(self) -> dict[str, Any]:
        """Return what `Request` takes from all forms."""
        same = ("model", "temperature", "top_p", "min_p", "seed", "repetition_penalty")
        return {
            **{name: getattr(self, name) for name in same},
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "stream": bool(self.stream),
            "ignored": tuple(
                name for name, field in type(self).model_fields.items() if field.description == IGNORED and getattr(self, name) is not None
            ),
        }


class TextFormat(Lenient):
    type: Literal["text"]


class JsonFormat(Lenient):
    type: Literal["json_object"]
    schema_: JsonObject | None = Field(None, alias="schema")
    """As llama.cpp and others take it."""


class NamedSchema(Lenient):
    name: Text = "answer"
    schema_: JsonObject = Field(alias="schema")


class SchemaFormat(Lenient):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class FlatSchemaFormat(NamedSchema):
    type: Literal["json_schema"]


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]
FlatFormat = Annotated[TextFormat | JsonFormat | FlatSchemaFormat, Field(discriminator="type")]


# Any JSON object; keys have an end, since some models write one until `max_tokens`.
ANY_OBJECT: dict[str, Any] = {
    "type": "object",
    "patternProperties": {"^(?s:.{0,128})$": {"$ref": "#/$defs/value"}},
    "additionalProperties": False,
    "$defs": {
        "value": {
            "anyOf": [
                {"type": ["string", "number", "boolean", "null"]},
                {"type": "array", "items": {"$ref": "#/$defs/value"}},
                {"$ref": "#"},
            ]
        }
    },
}


def answer_form(
    form: TextFormat | JsonFormat | SchemaFormat | FlatSchemaFormat | None, grammar: str | None, forced: Sequence[str] = ()
) -> dict[str, Any] | str | None:
    """Return the JSON Schema or grammar that an answer follows.

    Raises:
        RequestError: several are given.
    """
    if isinstance(form, TextFormat):
        form = None
    if (form is not None) + bool(grammar) + bool(forced) > 1:
        raise RequestError(400, "response_format, grammar and a forced call of a tool contradict each other; give one of them")
    if isinstance(form, JsonFormat):
        return ANY_OBJECT if form.schema_ is None else form.schema_
    if form is not None:
        return form.schema_ if isinstance(form, FlatSchemaFormat) else form.json_schema.schema_
    return grammar or None


class ContentPart(Protocol):
    def for_template(self) -> dict[str, Any]:
        """Return the part as chat templates take it; an image has its `url`."""
        ...


class TextPart(Lenient):
    type: Literal["text", "input_text", "output_text"]
    text: Text

    def for_template(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class ImageUrl(Lenient):
    url: Text
    """`data:image/png;base64,CONTENT`, or a file of `--image-folder` as `file:///PATH`; nothing is fetched."""
    detail: NoEffect = None


class ImagePart(Lenient):
    type: Literal["image_url"]
    image_url: ImageUrl

    def for_template(self) -> dict[str, Any]:
        return {"type": "image", "url": self.image_url.url}


class InputImage(Lenient):
    type: Literal["input_image"]
    image_url: Text
    """As in chats."""
    detail: NoEffect = None

    def for_template(self) -> dict[str, Any]:
        return {"type": "image", "url": self.image_url}


Content = Text | list[Annotated[TextPart | ImagePart | InputImage, Field(discriminator="type")]]


def content_of(content: str | Sequence[ContentPart]) -> str | list[dict[str, Any]]:
    """Return a content as chat templates take it: a text, or the parts of one with images, each of which has its `url`."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = [part.for_template() for part in content]
    return parts if any(part["type"] == "image" for part in parts) else "".join(part["text"] for part in parts)


def parsed_arguments(value: Any) -> Any:
    """Return the arguments of a call of a tool, which chat templates take as an object; servers send them as a string."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError) as error:
            raise PydanticCustomError("not_json", "Input should be a string with JSON") from error
    return _writable(value)


class Called(Lenient):
    name: Text
    arguments: Annotated[str | dict[str, Any] | None, AfterValidator(parsed_arguments)] = None


class ToolCall(Lenient):
    id: Text | None = None
    function: Called


class Message(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: list[ToolCall] | None = None
    """Of the assistant."""
    tool_call_id: Text | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"role": {"const": "assistant"}}},
                {"properties": {"content": {"not": {"type": "null"}}}, "required": ["content"]},
            ]
        }
    )

    @model_validator(mode="after")
    def _has_text(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("no_text", "a message has no text")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        if self.role == "assistant" and self.tool_calls:
            message["tool_calls"] = [tool_call(call.id, call.function.name, call.function.arguments) for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return {**message, "content": content_of(self.content or "")}


def tool_call(number: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call as chat templates take it."""
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments or {}}}


class Function(Lenient):
    name: Annotated[Text, Field(min_length=1)]
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    def tool(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        given = {name: getattr(self, name) for name in ("name", "description", "parameters")}
        return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


class Tool(Lenient):
    type: Literal["function"]
    function: Function


class FlatTool(Function):
    type: Literal["function"]


class OpenAITool(Lenient):
    """A tool that OpenAI runs, or a form of tools of its models, which agents send unasked: the model does not see it."""

    type: Literal[
        "web_search",
        "web_search_preview",
        "file_search",
        "code_interpreter",
        "image_generation",
        "computer_use_preview",
        "mcp",
        "namespace",
    ]


class ToolName(Lenient):
    name: Text


class ToolChoice(Lenient):
    type: Literal["function"]
    function: ToolName


class FlatToolChoice(ToolName):
    type: Literal["function"]


Choosing = Literal["auto", "none", "required"]


def tool_options(functions: Sequence[Function], choice: Choosing | ToolName | None, parallel: bool | None) -> dict[str, Any]:
    """Return what `Request` takes about tools.

    Raises:
        RequestError: the choice names no tool.
    """
    names = [function.name for function in functions]
    if isinstance(choice, ToolName) and choice.name not in names:
        raise RequestError(400, f"tool_choice: there is no tool {choice.name[:80]!r}", param="tool_choice")
    if choice == "required" and not names:
        raise RequestError(400, "tool_choice: there are no tools of which one could be called", param="tool_choice")
    return {
        "tools": [] if choice == "none" else [function.tool() for function in functions],
        "forced_tools": (choice.name,) if isinstance(choice, ToolName) else tuple(names) if choice == "required" else (),
        "single_tool_call": parallel is False or isinstance(choice, ToolName),
    }


class StreamOptions(Lenient):
    include_usage: bool | None = None


class Completion(Options):
    """The parameters of chat and text completions."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    best_of: Annotated[Any, Off(None, 1)] = None

    def _shared(self) -> dict[str, Any]:
        options = self.stream_options or StreamOptions()
        return {**super()._shared(), "n": self.n or 1, "include_usage": bool(options.include_usage)}


TemplateVariables = dict[Text, bool | int | float | Text]


class ChatBody(Completion):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Choosing | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    """Variables of the model's chat template, such as `enable_thinking`."""
    functions: Annotated[Any, Off(None, [])] = None
    function_call: Annotated[Any, Off(None)] = None
    audio: Annotated[Any, Off(None)] = None
    modalities: NoEffect = None
    reasoning_effort: Text | None = None
    """Given to the chat template, which may have no place for it; `none` also sets its `enable_thinking` and `thinking` to false."""
    verbosity: NoEffect = None
    prediction: Ignored = None
    web_search_options: Ignored = None
    continue_final_message: bool | None = None
    """Whether the answer continues the last message, which is the assistant's; else the assistant writes another one after it."""
    add_generation_prompt: bool | None = None
    """Whether the chat template begins the answer: by default, except where the last message is continued."""

    def request(self) -> Request:
        """
        Raises:
            RequestError: parameters contradict each other, or the conversation has nothing to answer.
        """
        if self.top_logprobs and self.logprobs is False:
            raise RequestError(400, "top_logprobs contradicts logprobs: false", param="top_logprobs")
        continues = bool(self.continue_final_message)
        if continues and self.add_generation_prompt:
            raise RequestError(
                400, "continue_final_message and add_generation_prompt contradict each other", param="continue_final_message"
            )
        choice = self.tool_choice.function if isinstance(self.tool_choice, ToolChoice) else self.tool_choice
        tools = tool_options([tool.function for tool in self.tools or []], choice, self.parallel_tool_calls)
        return Request(
            kind="chat",
            **self._shared(),
            messages=[message.for_template() for message in self.messages],
            continue_final_message=continues,
            add_generation_prompt=not continues if self.add_generation_prompt is None else self.add_generation_prompt,
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs or self.top_logprobs else None,
            template_variables=self.chat_template_kwargs or {},
            reasoning_effort=self.reasoning_effort,
            **tools,
            form=answer_form(self.response_format, self.grammar, tools["forced_tools"]),
        )


Tokens = Annotated[list[int], Field(min_length=1)]


class TextBody(Completion):
    prompt: Text | Tokens | Annotated[list[Text | Tokens], Field(min_length=1, max_length=MOST_PROMPTS)]
    """Text or tokens, or several of them, each of which is continued."""
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: Annotated[Any, Off(None, "")] = None

    def request(self) -> Request:
        """
        Raises:
            RequestError: no tokens are asked for, or too many answers.
        """
        given: Any = self.prompt
        prompts = tuple(given) if isinstance(given, list) and not isinstance(given[0], int) else (given,)
        if len(prompts) * (self.n or 1) > MOST_PROMPTS:
            raise RequestError(400, f"prompt: a request has at most {MOST_PROMPTS} answers, to all prompts together", param="prompt")
        if self.max_tokens == 0 and not self.echo:
            raise RequestError(400, "max_tokens: 0 tokens can be asked for with echo only", param="max_tokens")
        return Request(
            kind="text",
            **self._shared(),
            prompts=prompts,
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            echo=bool(self.echo),
            form=answer_form(self.response_format, self.grammar),
        )


class TokenizeBody(Lenient):
    """Text as `prompt` (or as `content`, as llama.cpp names it), or `messages` by the chat template."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": [name]} for name in ("prompt", "content", "messages")]})

    prompt: Text | None = None
    content: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    """As in chats."""
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None

    @model_validator(mode="after")
    def _has_text(self) -> TokenizeBody:
        if self.prompt is None and self.content is None and self.messages is None:
            raise PydanticCustomError("no_text", "one of prompt, content and messages is needed")
        return self

    @property
    def text(self) -> str | None:
        return self.content if self.prompt is None else self.prompt

    @property
    def special(self) -> bool:
        """Whether special tokens are added; llama.cpp adds none unless it is asked to."""
        given = self.add_special if self.add_special_tokens is None else self.add_special_tokens
        return self.prompt is not None if given is None else given

    def request(self) -> Request:
        names = ("tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")
        return ChatBody(messages=self.messages or [], **{name: getattr(self, name) for name in names}).request()


class DetokenizeBody(Lenient):
    tokens: list[Annotated[int, Field(ge=0)]]


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
