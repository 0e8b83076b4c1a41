"""Reasoning and calls of tools in a model's text, found by transformers' response templates, and grammars of answers that have both."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from moegraft.injection.cli.serve.constraints import grammars, with_whitespace

logger = logging.getLogger(__name__)
REASONING = ("reasoning_content", "thinking")  # names of the field in response templates
UNPARSED = (ValueError, KeyError, TypeError, AttributeError)  # such as for a call whose arguments are not JSON
Reasoning = Literal["begun", "possible", "none"]  # in an answer: by the prompt, by the model, or not at all


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


class AnswerGrammar:
    """Grammars for llguidance of answers in which reasoning or a call of a tool is marked as in a response template.

    Args:
        tokens: texts that are one token each; llguidance matches them by their numbers alone.
        chat_template: of a model that begins its reasoning by itself, it has the mark too. transformers' templates are for all models of
            a type, of which not all reason.
    """

    def __init__(self, template: Mapping[str, Any], tokens: Mapping[str, int], chat_template: str = "") -> None:
        self._fields: Mapping[str, Any] = template["fields"]
        self._tokens = tokens
        self._chat_template = chat_template

    def calls(self, tools: Sequence[Mapping[str, Any]], *, single: bool, reasoning: Reasoning) -> str:
        """Return the grammar of an answer that consists of calls of `tools`, after reasoning.

        Args:
            single: whether there is exactly one call.

        Raises:
            ValueError: the template does not define how a call is written.
        """
        calls = [f"call_{number}: {self._call(tool['function'])}" for number, tool in enumerate(tools)]
        names = " | ".join(f"call_{number}" for number in range(len(calls)))
        repeated = "" if single else r' ("\n"? call)*'
        return grammars("\n".join([self._start(f"call{repeated}", reasoning=reasoning), f"call: {names}", *calls]))

    def form(self, form: Mapping[str, Any] | str, *, reasoning: Reasoning) -> str:
        """Return the grammar of an answer whose content follows a JSON Schema or a grammar of Lark, after reasoning.

        Raises:
            ValueError: the template does not define where the content begins.
        """
        content = self._fields.get("content") or {}
        opening = self._spell(_literal(content, "open")) if {"open", "open_pattern"} & content.keys() else ""
        if reasoning == "none" and not opening:
            return grammars(form)
        return grammars(self._start(f"{opening} @form", reasoning=reasoning), form)

    def _start(self, rest: str, *, reasoning: Reasoning) -> str:
        field = next((self._fields[name] for name in REASONING if name in self._fields), None)
        if field is None or reasoning == "none":
            return f"start: {rest}"
        opening, close = _literal(field, "open"), _literal(field, "close")
        if reasoning == "possible" and opening not in self._tokens and opening not in self._chat_template:
            return f"start: {rest}"
        one_token = f"thought: /(?s:.*)/ {self._spell(close)}"
        thought = one_token if close in self._tokens else f"thought[suffix={json.dumps(close)}]: /(?s:.*)/"
        begin = r'thought "\n"*' if reasoning == "begun" else rf'({self._spell(opening)} thought "\n"*)?'
        return f"start: {begin} {rest}\n{thought}"

    def _call(self, function: Mapping[str, Any]) -> str:
        field = self._fields.get("tool_calls") or {}
        shape = (field.get("transform") or {}).get("function")
        if shape == "{content}":
            shape = {"name": "{content.name}", "arguments": "{content.arguments}"}
        if field.get("content") != "json" or field.get("transform_each") or not isinstance(shape, Mapping):
            raise ValueError("the model's response template does not define how a call is written")
        if {"unquoted_keys", "string_delims"} & (field.get("content_args") or {}).keys():
            raise ValueError("the model writes calls in a form of its own, which is not JSON")
        schema: dict[str, Any] = dict(function.get("parameters") or {"type": "object"})
        captures = {}
        name, arguments = shape["name"].strip("{}"), shape["arguments"].strip("{}")
        if arguments != "content":
            properties = {arguments.removeprefix("content."): schema}
            if name.startswith("content."):
                properties = {name.removeprefix("content."): {"const": function["name"]}, **properties}
            schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        if not name.startswith("content."):
            captures[name] = function["name"]
        opening, closing = (self._spell(_literal(field, key, captures)) for key in ("open", "close"))
        return rf'{opening} "\n"? %json {json.dumps(with_whitespace(schema))} "\n"? {closing}'

    def _spell(self, text: str) -> str:
        """Return a text as a rule."""
        known = "|".join(map(re.escape, sorted(self._tokens, key=len, reverse=True)))
        parts = [part for part in (re.split(f"({known})", text) if known else [text]) if part]
        return " ".join(f"<[{self._tokens[part]}]>" if part in self._tokens else json.dumps(part) for part in parts)


def _literal(field: Mapping[str, Any], key: str, captures: Mapping[str, str] | None = None) -> str:
    """Return the text that a field's anchor stands for.

    Raises:
        ValueError: the anchor is a pattern that is not one text with optional white space before it, and with `captures` in it.
    """
    if key in field:
        given: str | list[str] = field[key]
        return given if isinstance(given, str) else given[0]
    pattern = field.get(f"{key}_pattern", "")
    text = re.sub(r"\(\?P<(\w+)>[^()]*\)", lambda found: (captures or {}).get(found[1], ""), pattern.replace(r"\s*", ""))
    text = re.sub(r"\\(\W)", r"\1", text)
    match = re.fullmatch(pattern, text)
    if not text or match is None or not match.groupdict().items() <= (captures or {}).items():
        raise ValueError(f"the model's response template has a pattern, {pattern!r}, which does not define how a call is written")
    return text


class AnswerParser:
    """Parses one answer as it arrives. Text that the template cannot parse is passed on as content.

    Attributes:
        reasoning: how the prompt leaves the answer's reasoning.
        reasoning_tokens: tokens of the answer that have brought reasoning, with the marks around it.

    Args:
        prompt: the text of the prompt: templates of chats may begin the answer, such as its reasoning.
        single_tool_call: whether calls after the first are left out.
    """

    def __init__(
        self, template: Mapping[str, Any], prompt: str, tools: Sequence[Mapping[str, Any]], *, single_tool_call: bool = False
    ) -> None:
        from transformers.utils.chat_parsing.response_parser import ResponseParser

        self._parser: Any = ResponseParser(dict(template), prefix=prompt, tools=[dict(tool) for tool in tools] or None)
        self._inside = ended = False  # of the reasoning
        for event in self._parser.initial_events:
            self._inside, left = self._follow(event), self._inside
            ended |= left and not self._inside
        known = any(name in template["fields"] for name in REASONING)
        self.reasoning: Reasoning = "begun" if self._inside else "none" if ended or not known else "possible"
        self.reasoning_tokens = self._undecided = 0
        self._single = single_tool_call
        self._calls = 0
        self._unparsed = ""  # fed since the last event

    def feed(self, text: str, *, last: bool, tokens: int = 0) -> Iterator[ParsedDelta]:
        """Yield the parts that are complete with `text`, which `tokens` tokens have brought."""
        if self._parser is None:
            if text:
                yield ParsedDelta("content", text)
            return
        self._unparsed += text
        try:
            events = list(self._parser.feed(text)) if text else []
            if last:
                events += self._parser.finalize()[1]
            reasons = self._inside
            for event in events:
                self._inside = self._follow(event)
                reasons |= self._inside
            self._undecided += tokens  # without an event: perhaps the beginning of a mark
            if events or reasons:
                self.reasoning_tokens += self._undecided if reasons else 0
                self._undecided = 0
            deltas = [delta for event in events if (delta := self._delta(event)) is not None]
        except UNPARSED as error:
            logger.warning("serve: an answer does not follow the model's response template (%s); the rest is sent as text", error)
            self._parser = None
            yield ParsedDelta("content", self._unparsed)
            return
        if deltas:
            self._unparsed = ""
        yield from deltas

    def reasons(self, text: str) -> bool | None:
        """Take text instead of `feed`; return whether all that was undecided is reasoning with its marks, None while it is undecided."""
        if self._parser is None:
            return False
        reasons = self._inside
        try:
            events = self._parser.feed(text)
        except UNPARSED:
            self._parser = None
            return False
        for event in events:
            self._inside = self._follow(event)
            reasons |= self._inside
        return reasons if events else None

    def _follow(self, event: Mapping[str, Any]) -> bool:
        """Return whether the text after an event is reasoning."""
        if event["type"] in ("region_open", "region_close"):
            return event["type"] == "region_open" and event.get("field") in REASONING
        return self._inside

    def _delta(self, event: Mapping[str, Any]) -> ParsedDelta | None:
        field = event.get("field")
        if event["type"] == "region_chunk" and not event.get("dirty") and event.get("text"):
            if field == "content" or field in REASONING:
                return ParsedDelta("content" if field == "content" else "reasoning", event["text"])
        elif event["type"] == "region_close" and field == "tool_calls":
            function = event["value"]["function"]
            arguments, name = function["arguments"], function["name"]
            name.encode()  # a model may write a lone surrogate as JSON, or a number
            self._calls += 1
            if not self._single or self._calls == 1:
                return ParsedDelta("tool_call", arguments if isinstance(arguments, str) else json.dumps(arguments), name)
        return None


class ReasoningParts:
    """Divides an answer's text, as it arrives, into its reasoning, with the marks around it, and the rest."""

    def __init__(self, template: Mapping[str, Any], prompt: str) -> None:
        self._parser = AnswerParser(template, prompt, ())
        self._undecided = ""  # perhaps the beginning of a mark

    def feed(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield the next parts, each with whether it is reasoning."""
        for sign in text:  # as the parser does not report where in a text a mark ends
            self._undecided += sign
            reasons = self._parser.reasons(sign)
            if reasons is not None:
                yield self.rest(), reasons

    def rest(self) -> str:
        """Return the text that is undecided; at the end of an answer it is no reasoning."""
        rest, self._undecided = self._undecided, ""
        return rest
