"""Reasoning and calls of tools in a model's text, found by transformers' response templates."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
REASONING = ("reasoning_content", "thinking")  # names of the field in response templates


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """A part of a message: text of its content or reasoning, or a complete call with the tool's name and JSON arguments."""

    kind: Literal["content", "reasoning", "tool_call"]
    text: str
    name: str = ""


def response_template(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any] | None:
    """Return the tokenizer's response template, or transformers' own for the model's type; None if there is none."""
    found: Mapping[str, Any] | None = getattr(tokenizer, "response_template", None)
    if found is None:
        try:
            from transformers.cli.serving.utils import get_response_template
        except ImportError:  # transformers before response templates
            return None
        found = get_response_template(tokenizer, model)
    return found


class AnswerParser:
    """Parses one answer as it arrives. Text that the template cannot parse is passed on as content.

    Args:
        prompt: the text of the prompt: templates of chats may begin the answer, such as its reasoning.
        single_tool_call: whether calls after the first are left out.
    """

    def __init__(
        self, template: Mapping[str, Any], prompt: str, tools: Sequence[Mapping[str, Any]], *, single_tool_call: bool = False
    ) -> None:
        from transformers.utils.chat_parsing.response_parser import ResponseParser

        self._parser: Any = ResponseParser(dict(template), prefix=prompt, tools=[dict(tool) for tool in tools] or None)
        self._single = single_tool_call
        self._calls = 0
        self._unparsed = ""  # fed since the last event

    def feed(self, text: str, *, last: bool) -> Iterator[ParsedDelta]:
        """Yield the parts that are complete with `text`."""
        if self._parser is None:
            if text:
                yield ParsedDelta("content", text)
            return
        self._unparsed += text
        try:
            events = list(self._parser.feed(text)) if text else []
            if last:
                events += self._parser.finalize()[1]
            deltas = [delta for event in events if (delta := self._delta(event)) is not None]
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # such as a call whose arguments are not JSON
            logger.warning("serve: an answer does not follow the model's response template (%s); the rest is sent as text", error)
            self._parser = None
            yield ParsedDelta("content", self._unparsed)
            return
        if deltas:
            self._unparsed = ""
        yield from deltas

    def _delta(self, event: Mapping[str, Any]) -> ParsedDelta | None:
        field = event.get("field")
        if event["type"] == "region_chunk" and not event.get("dirty") and event.get("text"):
            if field == "content" or field in REASONING:
                return ParsedDelta("content" if field == "content" else "reasoning", event["text"])
        elif event["type"] == "region_close" and field == "tool_calls":
            function = event["value"]["function"]
            arguments = function["arguments"]
            self._calls += 1
            if not self._single or self._calls == 1:
                return ParsedDelta("tool_call", arguments if isinstance(arguments, str) else json.dumps(arguments), function["name"])
        return None
