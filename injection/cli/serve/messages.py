"""Requests and answers in the form of Anthropic's Messages: one translation to the form behind all routes, and one from it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from moegraft.injection.cli.serve.answers import Choice, event, new_id, usage
from moegraft.injection.cli.serve.protocol import (
    MOST_STOPS,
    Choosing,
    FlatSchemaFormat,
    Function,
    Ignored,
    JsonObject,
    Lenient,
    NoEffect,
    Off,
    Options,
    Request,
    StopText,
    Text,
    ToolName,
    content_of,
    tool_call,
    tool_options,
)

# What a coding agent begins its system prompt with, different in each request: with it, no prompt would begin as an earlier one.
MARKER = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")


class TextBlock(Lenient):
    type: Literal["text"]
    text: Text

    def for_template(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class ImageContent(Lenient):
    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
    data: Text


class ImageAddress(Lenient):
    type: Literal["url"]
    url: Text
    """As in chats: a `data:` URL, or a file of `--image-folder`; nothing is fetched."""


class ImageBlock(Lenient):
    type: Literal["image"]
    source: Annotated[ImageContent | ImageAddress, Field(discriminator="type")]

    def for_template(self) -> dict[str, Any]:
        source = self.source
        url = source.url if isinstance(source, ImageAddress) else f"data:{source.media_type};base64,{source.data}"
        return {"type": "image", "url": url}


class UnreadBlock(Lenient):
    type: Literal["document"]

    @model_validator(mode="after")
    def _refuse(self) -> UnreadBlock:
        raise PydanticCustomError("unsupported", "{kind} input is not supported: send its text", {"kind": self.type})


class ThinkingBlock(Lenient):
    type: Literal["thinking"]
    thinking: Text


class RedactedBlock(Lenient):
    type: Literal["redacted_thinking"]


class CallBlock(Lenient):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: JsonObject


Read = Annotated[TextBlock | ImageBlock | UnreadBlock, Field(discriminator="type")]


class ResultBlock(Lenient):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | list[Read] | None = None


Block = Annotated[
    TextBlock | ImageBlock | UnreadBlock | ThinkingBlock | RedactedBlock | CallBlock | ResultBlock, Field(discriminator="type")
]


class Turn(Lenient):
    role: Literal["user", "assistant", "system"]
    content: Text | list[Block]

    def for_template(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that chat templates take for this one: results of tools, which follow their calls, and the rest."""
        blocks = [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        results = [block for block in blocks if isinstance(block, ResultBlock)]
        for result in results:
            yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": _content(result.content)}
        calls = [tool_call(block.id, block.name, block.input) for block in blocks if isinstance(block, CallBlock)]
        thinking = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        content = _content(blocks)
        if content or calls or thinking or not results:
            parts = {"tool_calls": calls, "reasoning_content": thinking}
            yield {"role": self.role, "content": content, **{name: part for name, part in parts.items() if part}}


def _content(content: str | list[Any] | None) -> str | list[dict[str, Any]]:
    """Return a content as chat templates take it, without blocks that have places of their own."""
    return content if isinstance(content, str) else content_of([each for each in content or () if isinstance(each, TextBlock | ImageBlock)])


class MessageTool(Lenient):
    type: Literal["custom"] | None = None
    name: Annotated[Text, Field(min_length=1)]
    description: Text | None = None
    input_schema: JsonObject

    def function(self) -> Function:
        return Function(name=self.name, description=self.description, parameters=self.input_schema)


class MessageChoice(Lenient):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Lenient):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class OutputConfig(Lenient):
    effort: Text | None = None
    format: FlatSchemaFormat | None = None


class MessageBody(Options):
    """A request to `/v1/messages`, or for the count of its tokens."""

    messages: Annotated[list[Turn], Field(min_length=1)]
    system: Text | list[TextBlock] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageChoice | None = None
    thinking: Thinking | None = None
    """`enabled` and `disabled` set `enable_thinking` and `thinking` of the chat template; a budget of tokens has no effect."""
    output_config: OutputConfig | None = None
    """`effort` is given to the chat template; an answer follows the JSON Schema in `format`."""
    cache_control: NoEffect = None
    """Prefixes are kept by themselves."""
    mcp_servers: Annotated[Any, Off(None, [])] = None
    container: Annotated[Any, Off(None)] = None
    context_management: Ignored = None
    diagnostics: Ignored = None
    inference_geo: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None

    @property
    def stop_texts(self) -> list[str]:
        return super().stop_texts + (self.stop_sequences or [])

    def request(self) -> Request:
        """
        Raises:
            RequestError: parameters contradict each other.
        """
        given = self.tool_choice or MessageChoice(type="auto")
        choice: Choosing | ToolName = ToolName(name=given.name or "") if given.type == "tool" else CHOICES[given.type]
        tools = tool_options([tool.function() for tool in self.tools or []], choice, not given.disable_parallel_tool_use)
        config = self.output_config or OutputConfig()
        begins = (
            self.system
            if isinstance(self.system, str)
            else "\n".join(block.text for block in self.system or [] if not MARKER.fullmatch(block.text))
        )
        begins = MARKER.sub("", begins, count=1) if MARKER.match(begins) else begins
        messages = [{"role": "system", "content": begins}] if begins else []
        messages += [message for turn in self.messages for message in turn.for_template()]
        continues = messages[-1]["role"] == "assistant"
        thinks = {"enabled": True, "disabled": False}.get(self.thinking.type if self.thinking else "")
        return Request(
            kind="message",
            options=self,
            messages=messages,
            continue_final_message=continues,
            add_generation_prompt=not continues,
            max_tokens=self.max_tokens,
            reasoning_effort=config.effort,
            template_variables={} if thinks is None else {"enable_thinking": thinks, "thinking": thinks},
            **tools,
            form=self.answer_form(config.format, tools["forced_tools"]),
        )


CHOICES: Mapping[str, Choosing] = {"auto": "auto", "any": "required", "none": "none"}


class MessageReply:
    """The answer to a request to `/v1/messages`, whole or as the events of a stream.

    An answer is a list of blocks: its thinking, its text and its calls of tools. At most the last one grows.
    """

    def __init__(self, request: Request, model: str, choice: Choice) -> None:
        self._choice = choice
        self._blocks: list[dict[str, Any]] = []
        self._grows = False  # the last block
        self._head = {"id": new_id("msg"), "type": "message", "role": "assistant", "model": model}

    def whole(self) -> dict[str, Any]:
        list(self._finish())
        return {**self._head, "content": self._blocks, **self._ending(), "usage": self._usage()}

    def start(self) -> Iterator[str]:
        begun: dict[str, Any] = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        yield self._event("message_start", message=begun)

    def part(self, part: Mapping[str, Any]) -> Iterator[str]:
        """Yield the events for a part of the answer, which is in the form of a chat's chunk."""
        delta = part["delta"]
        if thought := delta.get("reasoning_content"):
            yield from self._grow("thinking", thought)
        if text := delta.get("content"):
            yield from self._grow("text", text)
        for call in delta.get("tool_calls") or ():
            yield from self._close()
            given = _object(call["function"]["arguments"])
            yield from self._open({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}})
            yield self._delta("input_json_delta", partial_json=json.dumps(given, ensure_ascii=False))
            self._blocks[-1] = {**self._blocks[-1], "input": given}
            yield from self._close()

    def end(self) -> Iterator[str]:
        yield from self._finish()
        yield self._event("message_delta", delta=self._ending(), usage=self._usage())
        yield self._event("message_stop")

    def fail(self, message: str) -> Iterator[str]:
        yield event(message_error(500, message), "error")

    def _finish(self) -> Iterator[str]:
        """End the last block; an answer whose parts were not streamed gets its blocks first."""
        if not self._blocks:
            yield from self.part({"delta": self._choice.whole()["message"]})
        if not self._blocks:
            yield from self._grow("text", "")
        yield from self._close()

    def _grow(self, kind: str, text: str) -> Iterator[str]:
        """Add text to the block that grows, or to a new one if that is of another type."""
        if not self._grows or self._blocks[-1]["type"] != kind:
            yield from self._close()
            yield from self._open({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self._blocks[-1][kind] += text
        if text:
            yield self._delta(f"{kind}_delta", **{kind: text})

    def _open(self, block: dict[str, Any]) -> Iterator[str]:
        self._grows = True
        self._blocks.append(block)
        yield self._event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _close(self) -> Iterator[str]:
        if not self._grows:
            return
        self._grows = False
        if self._blocks[-1]["type"] == "thinking":
            yield self._delta("signature_delta", signature="")
        yield self._event("content_block_stop", index=len(self._blocks) - 1)

    def _delta(self, kind: str, **data: Any) -> str:
        return self._event("content_block_delta", index=len(self._blocks) - 1, delta={"type": kind, **data})

    def _event(self, name: str, **data: Any) -> str:
        return event({"type": name, **data}, name)

    def _ending(self) -> dict[str, Any]:
        job = self._choice.job
        reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
        reason = reasons.get(self._choice.finish_reason or "", "stop_sequence" if job.stopped_by else "end_turn")
        return {"stop_reason": reason, "stop_sequence": job.stopped_by if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, Any]:
        used = usage([self._choice])
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": used["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": used["completion_tokens"],
        }


def _object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; what the model wrote instead of an object that JSON can hold is one of its own."""
    try:
        given = json.loads(arguments)
        json.dumps(given, ensure_ascii=False).encode()  # no lone surrogates
    except (ValueError, RecursionError):
        given = arguments
    return given if isinstance(given, dict) else {"arguments": arguments}


KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def message_error(status: int, message: str) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    kind = KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
