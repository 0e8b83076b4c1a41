"""Requests in the form of OpenAI's Responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from moegraft.injection.cli.serve.protocol import (
    AllowedTools,
    Choosing,
    Content,
    FlatFormat,
    FlatSchemaFormat,
    FlatTool,
    FlatToolChoice,
    Lenient,
    NoEffect,
    Off,
    OpenAITool,
    Options,
    Request,
    RequestError,
    Text,
    content_of,
    parsed_arguments,
    tool_call,
    tool_options,
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

    def request(self) -> Request:
        """
        Raises:
            RequestError: parameters contradict each other, or the conversation has nothing to answer.
        """
        functions = [tool for tool in self.tools or [] if isinstance(tool, FlatTool)]
        tools = tool_options(functions, self.tool_choice, self.parallel_tool_calls)
        shared = self._shared()
        shared["ignored"] += tuple(f"tools.{tool.type}" for tool in self.tools or [] if isinstance(tool, OpenAITool))
        form = self.text.format if self.text else None
        if not (messages := self._messages()):
            raise RequestError(400, "input: there is nothing to answer", param="input")
        return Request(
            kind="response",
            **shared,
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
