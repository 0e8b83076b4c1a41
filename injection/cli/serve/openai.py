"""Requests in the form of OpenAI's chat completions, text completions and responses, and for the tokens of a text or a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from moegraft.injection.cli.serve.protocol import (
    MOST_ANSWERS,
    MOST_LOGPROBS,
    MOST_PROMPTS,
    AllowedTools,
    Choosing,
    Content,
    FlatFormat,
    FlatSchemaFormat,
    FlatTool,
    FlatToolChoice,
    Function,
    Ignored,
    Lenient,
    NoEffect,
    Off,
    OpenAITool,
    Options,
    Request,
    RequestError,
    ResponseFormat,
    Text,
    ToolName,
    content_of,
    parsed_arguments,
    tool_call,
    tool_options,
)


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
    refusal: Text | None = None
    """Of the assistant, instead of `content`."""
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
        return {**message, "content": content_of(self.content or self.refusal or "")}


class Tool(Lenient):
    type: Literal["function"]
    function: Function


class ToolChoice(Lenient):
    type: Literal["function"]
    function: ToolName


class AllowedFunctions(Lenient):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], Field(min_length=1)]


class AllowedToolChoice(Lenient):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions

    def flat(self) -> AllowedTools:
        tools = [FlatToolChoice(type="function", name=tool.function.name) for tool in self.allowed_tools.tools]
        return AllowedTools(type=self.type, mode=self.allowed_tools.mode, tools=tools)


class StreamOptions(Lenient):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether each chunk has the usage so far, with `include_usage`."""


class Completion(Options):
    """The parameters of chat and text completions."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    best_of: Annotated[Any, Off(None, 1)] = None

    def _shared(self) -> dict[str, Any]:
        """Return what `Request` takes from both."""
        streamed = self.stream_options or StreamOptions()
        included = bool(streamed.include_usage)
        continuous = included and bool(streamed.continuous_usage_stats)
        return {"options": self, "n": self.n or 1, "include_usage": included, "continuous_usage": continuous}


TemplateVariables = dict[Text, bool | int | float | Text]


class ChatBody(Completion):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Choosing | Annotated[ToolChoice | AllowedToolChoice, Field(discriminator="type")] | None = None
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
        given = self.tool_choice
        choice = given.function if isinstance(given, ToolChoice) else given.flat() if isinstance(given, AllowedToolChoice) else given
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
            form=self.answer_form(self.response_format, tools["forced_tools"]),
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
            form=self.answer_form(self.response_format),
        )


class InputMessage(Lenient):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class InputCall(Lenient):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Annotated[str, AfterValidator(parsed_arguments)]


class InputResult(Lenient):
    type: Literal["function_call_output"]
    call_id: Text
    output: Content


class ReasoningPart(Lenient):
    text: Text


class InputReasoning(Lenient):
    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = None


def _item_type(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputResult, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_item_type),
]


class TextOptions(Lenient):
    format: FlatFormat | None = None


class ReasoningOptions(Lenient):
    effort: Text | None = None


class ResponseBody(Options):
    """A request to `/v1/responses`. Nothing is stored: each request has the whole conversation."""

    # A store would keep what clients wrote beyond their requests, and forget it at a time that they cannot know; replicas would
    # not share it. Reading a conversation again is what the prefix cache saves.

    input: Text | Annotated[list[InputItem], Field(min_length=1)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextOptions | None = None
    tools: list[Annotated[FlatTool | OpenAITool, Field(discriminator="type")]] | None = None
    """Those that OpenAI runs are ignored, which the answer's header X-Moegraft-Ignored reports; refused with --strict."""
    tool_choice: Choosing | Annotated[FlatToolChoice | AllowedTools, Field(discriminator="type")] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Annotated[
        Any, Off(None, reason="nothing is stored; send the whole conversation as input, of which the server reads what is new")
    ] = None
    conversation: Annotated[Any, Off(None)] = None
    background: Annotated[Any, Off(None, False)] = None
    prompt: Annotated[Any, Off(None)] = None
    truncation: Literal["auto", "disabled"] | None = None
    """`auto` leaves out the oldest items where the conversation is too long."""
    top_logprobs: Annotated[Any, Off(None, 0)] = None
    include: NoEffect = None
    max_tool_calls: NoEffect = None
    client_metadata: NoEffect = None
    reasoning: ReasoningOptions | None = None
    stream_options: NoEffect = None

    @property
    def ignored(self) -> list[str]:
        return super().ignored + [f"tools.{tool.type}" for tool in self.tools or [] if isinstance(tool, OpenAITool)]

    def request(self) -> Request:
        """
        Raises:
            RequestError: parameters contradict each other, or the conversation has nothing to answer.
        """
        functions = [tool for tool in self.tools or [] if isinstance(tool, FlatTool)]
        tools = tool_options(functions, self.tool_choice, self.parallel_tool_calls)
        form = self.text.format if self.text else None
        if not (messages := self._messages()):
            raise RequestError(400, "input: there is nothing to answer", param="input")
        return Request(
            kind="response",
            options=self,
            messages=messages,
            instructions=self.instructions,
            truncate=self.truncation == "auto",
            max_tokens=self.max_output_tokens,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            **tools,
            form=self.answer_form(form, tools["forced_tools"]),
            form_name=form.name if isinstance(form, FlatSchemaFormat) else "",
        )

    def _messages(self) -> list[dict[str, Any]]:
        """Return the items as messages; reasoning and calls of tools become parts of the assistant's message around them."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        reasoning = ""
        for item in self.input:
            if isinstance(item, InputReasoning):
                reasoning += "".join(part.text for part in item.content or [])
            elif isinstance(item, InputResult):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content_of(item.output)})
            elif isinstance(item, InputMessage):
                messages.append({"role": "system" if item.role == "developer" else item.role, "content": content_of(item.content)})
            else:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(tool_call(item.call_id, item.name, item.arguments))
            if reasoning and messages and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"] = reasoning
                reasoning = ""
        return messages


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
