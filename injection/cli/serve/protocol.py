"""Requests: the one form behind all routes, and the pydantic models of the parts that bodies share.

What is unsupported and would change an answer is refused by name. Parameters that cannot change one are ignored, some of them with a
notice. OpenAPI's document is made from the models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

Kind = Literal["chat", "text", "response", "message"]
MOST_STOPS = 16
MOST_ANSWERS = 16  # to one prompt
MOST_PROMPTS = 64  # of one request
MOST_LOGPROBS = 20
MOST_STOP_SIGNS = 256  # of one stop string
MOST_BIASES = 1024
MOST_GRAMMAR_SIGNS = 1 << 16  # of Lark or GBNF: a grammar of ten times that takes seconds to prepare
MOST_CHOICES = 1024  # of texts that an answer may be
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
        return RequestError(400, errors[0]["msg"] if kind == "no_text" else "the body is not a JSON object")
    for error in errors[:SHOWN_ERRORS]:
        path = ".".join(str(part) for part in error["loc"][1:] if "[" not in str(part))[:200]  # without the branches of unions
        messages.append(f"unknown parameter {path!r}" if error["type"] == "extra_forbidden" else f"{path}: {error['msg']}")
    return RequestError(400, "; ".join(messages), code=CODES.get(kind), param=str(place[0])[:60])


@dataclass(frozen=True, slots=True)
class Request:
    """A request in whichever form it came; None means the server's or the model's own value.

    Attributes:
        options: those that all forms have, as the client gave them.
        messages: as chat templates take them; calls of tools have their arguments as objects, and images their `url`.
        instructions: of a response, the text of the first message.
        prompts: of text completions; each has `n` answers.
        continue_final_message: whether the answer continues the last message, which is the assistant's.
        add_generation_prompt: whether the chat template begins the answer.
        truncate: whether the oldest messages are left out where the prompt is too long.
        include_usage, continuous_usage: whether a stream ends with the usage, and whether each of its chunks has it.
        form_name: the client's name of a JSON Schema.
        logprobs: how many of the likeliest tokens are reported beside each token; None reports no scores.
        forced_tools: names of tools of which the answer has to call one; empty: the model is free.
        single_tool_call: whether calls of tools after an answer's first are left out.
        form: the JSON Schema or the grammar that an answer follows; None: any text.
    """

    kind: Kind
    options: Options
    messages: list[dict[str, Any]] = field(default_factory=list)
    instructions: str | None = None
    prompts: tuple[str | list[int], ...] = ()
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    truncate: bool = False
    max_tokens: int | None = None
    include_usage: bool = False
    continuous_usage: bool = False
    n: int = 1
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


def parsed_arguments(value: Any) -> Any:
    """Return the arguments of a call of a tool, which chat templates take as an object; servers send them as a string."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError) as error:
            raise PydanticCustomError("not_json", "Input should be a string with JSON") from error
    return _writable(value)


def _schema(value: Any) -> Any:
    """Return a JSON Schema, which may come as a string."""
    if not isinstance(value := parsed_arguments(value), dict):
        raise PydanticCustomError("no_schema", "Input should be a JSON Schema as an object, or a string with one")
    return value


Grammar = Annotated[Text, Field(max_length=MOST_GRAMMAR_SIGNS)]
Schema = Annotated[str | dict[str, Any], AfterValidator(_schema)]
Choices = Annotated[list[Grammar], Field(min_length=1, max_length=MOST_CHOICES)]


class StructuredOutputs(BaseModel):
    """The form of an answer, by one of these."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None


def _forms(schema: Any, regex: str | None, choices: list[str] | None, grammar: str | None) -> Iterator[dict[str, Any] | str | None]:
    """Yield each as a JSON Schema or a grammar."""
    yield schema
    if regex is not None:
        written = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
        escaped = re.sub(r"\\.|/|\n", lambda found: written.get(found[0], found[0]), regex, flags=re.DOTALL)
        yield f"start: /{escaped}/"
    if choices is not None:
        # Lark has no literal with a raw DEL, which JSON leaves as it is.
        yield "start: " + " | ".join(json.dumps(each, ensure_ascii=False).replace("\x7f", r"\u007f") for each in choices)
    yield grammar or None


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
    grammar: Grammar | None = None
    """The answer's grammar, in llguidance's form of Lark or in GBNF."""
    structured_outputs: StructuredOutputs | None = None
    """The answer's form, as vLLM takes it; below are the older names of its fields."""
    guided_json: Schema | None = None
    guided_regex: Grammar | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """Before so many tokens, an answer ends neither by itself nor by a stop string."""
    ignore_eos: bool | None = None
    """Whether an answer ends by a stop string or at its maximum of tokens alone, as measurements of speed need it."""
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

    @property
    def stop_texts(self) -> list[str]:
        """The stop strings of the request, whichever parameters have them."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def ignored(self) -> list[str]:
        """The names of given parameters without effect, which the answer's headers report."""
        fields = type(self).model_fields.items()
        return [name for name, field in fields if field.description == IGNORED and getattr(self, name) is not None]

    def answer_form(self, form: AnyFormat | None, forced: Sequence[str] = ()) -> dict[str, Any] | str | None:
        """Return the JSON Schema or grammar that an answer follows; `form` is that of OpenAI's or Anthropic's parameter.

        Raises:
            RequestError: several are given, or one beside another rule for the answer's end.
        """
        given = [None if form is None else form.json_schema_of(), self.grammar or None]
        given += _forms(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        if (outer := self.structured_outputs) is not None:
            given += [*_forms(outer.json_, outer.regex, outer.choice, outer.grammar), ANY_OBJECT if outer.json_object else None]
        forms = [each for each in given if each is not None]
        if len(forms) + bool(forced) > 1:
            raise RequestError(
                400, "response_format, structured_outputs, grammar and a forced call of a tool contradict each other; give one of them"
            )
        if (forms or forced) and (self.min_tokens or self.ignore_eos):
            name = "min_tokens" if self.min_tokens else "ignore_eos"
            raise RequestError(400, f"{name}: the form of the answer decides where it ends", param=name)
        return forms[0] if forms else None


class TextFormat(Lenient):
    type: Literal["text"]

    def json_schema_of(self) -> None:
        """Return no JSON Schema: any text will do."""


class JsonFormat(Lenient):
    type: Literal["json_object"]
    schema_: JsonObject | None = Field(None, alias="schema")
    """As llama.cpp and others take it."""

    def json_schema_of(self) -> dict[str, Any]:
        return ANY_OBJECT if self.schema_ is None else self.schema_


class NamedSchema(Lenient):
    name: Text = "answer"
    schema_: JsonObject = Field(alias="schema")


class SchemaFormat(Lenient):
    type: Literal["json_schema"]
    json_schema: NamedSchema

    def json_schema_of(self) -> dict[str, Any]:
        return self.json_schema.schema_


class FlatSchemaFormat(NamedSchema):
    type: Literal["json_schema"]

    def json_schema_of(self) -> dict[str, Any]:
        return self.schema_


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]
FlatFormat = Annotated[TextFormat | JsonFormat | FlatSchemaFormat, Field(discriminator="type")]
AnyFormat = TextFormat | JsonFormat | SchemaFormat | FlatSchemaFormat


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


class ContentPart(Protocol):
    def for_template(self) -> dict[str, Any]:
        """Return the part as chat templates take it; an image has its `url`."""
        ...


class TextPart(Lenient):
    type: Literal["text", "input_text", "output_text"]
    text: Text

    def for_template(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class RefusalPart(Lenient):
    """What the assistant has written instead of an answer."""

    type: Literal["refusal"]
    refusal: Text

    def for_template(self) -> dict[str, Any]:
        return {"type": "text", "text": self.refusal}


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


Content = Text | list[Annotated[TextPart | RefusalPart | ImagePart | InputImage, Field(discriminator="type")]]


def content_of(content: str | Sequence[ContentPart]) -> str | list[dict[str, Any]]:
    """Return a content as chat templates take it: a text, or the parts of one with images, each of which has its `url`."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = [part.for_template() for part in content]
    return parts if any(part["type"] == "image" for part in parts) else "".join(part["text"] for part in parts)


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


class FlatToolChoice(ToolName):
    type: Literal["function"]


class AllowedTools(Lenient):
    """Tools that the answer may call, or with `required` has to call one of."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatToolChoice], Field(min_length=1)]


Choosing = Literal["auto", "none", "required"]


def tool_options(functions: Sequence[Function], choice: Choosing | ToolName | AllowedTools | None, parallel: bool | None) -> dict[str, Any]:
    """Return what `Request` takes about tools. Where some are allowed, the model sees no others.

    Raises:
        RequestError: the choice names no tool.
    """
    names = [function.name for function in functions]
    wanted = choice.tools if isinstance(choice, AllowedTools) else [choice] if isinstance(choice, ToolName) else []
    for tool in wanted:
        if tool.name not in names:
            raise RequestError(400, f"tool_choice: there is no tool {tool.name[:80]!r}", param="tool_choice")
    if isinstance(choice, AllowedTools):
        names = [tool.name for tool in choice.tools]
        functions = [function for function in functions if function.name in names]
        choice = choice.mode
    if choice == "required" and not names:
        raise RequestError(400, "tool_choice: there are no tools of which one could be called", param="tool_choice")
    return {
        "tools": [] if choice == "none" else [function.tool() for function in functions],
        "forced_tools": (choice.name,) if isinstance(choice, ToolName) else tuple(names) if choice == "required" else (),
        "single_tool_call": parallel is False or isinstance(choice, ToolName),
    }


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
