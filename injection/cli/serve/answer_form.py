"""The form of an answer: its reasoning and calls of tools, found by transformers' response templates, and grammars that it follows.

Tokens that a JSON Schema or a grammar does not allow are left out by the package llguidance.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
REASONING = ("reasoning_content", "thinking")  # names of the field in response templates
UNPARSED = (ValueError, KeyError, TypeError, AttributeError)  # such as for a call whose arguments are not JSON
Reasoning = Literal["begun", "possible", "none"]  # in an answer: by the prompt, by the model, or not at all


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """A part of a message: text of its content or reasoning, or a complete call with the tool's name and JSON arguments.

    Attributes:
        start: of content, where its text begins in the answer's.
    """

    kind: Literal["content", "reasoning", "tool_call"]
    text: str
    name: str = ""
    start: int = 0


def response_template(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any] | None:
    """Return the tokenizer's response template, or transformers' own for the model's type; None if there is none."""
    template: Mapping[str, Any] | None = getattr(tokenizer, "response_template", None)
    if template is None:
        try:
            from transformers.cli.serving.utils import get_response_template
        except ImportError:  # transformers before response templates
            return None
        template = get_response_template(tokenizer, model)
    return template


class AnswerParser:
    """Parses one answer as it arrives. Text that the template cannot parse is passed on as content.

    Attributes:
        reasoning: how the prompt leaves the answer's reasoning.
        reasoning_tokens: tokens of the answer that have brought reasoning, with the marks around it.

    Args:
        opening: what the chat template begins the answer with, such as its reasoning.
        single_tool_call: whether calls after the first are left out.
    """

    def __init__(
        self, template: Mapping[str, Any], opening: str, tools: Sequence[Mapping[str, Any]], *, single_tool_call: bool = False
    ) -> None:
        from transformers.utils.chat_parsing.response_parser import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template

        spec = load_response_template(dict(template))
        begun = spec.truncate_past_last_anchor(opening)

        def parser(prefix: str) -> Any:
            return ResponseParser(spec, prefix=prefix, tools=[dict(tool) for tool in tools] or None)

        whole, trimmed = parser(begun), parser(begun.rstrip())
        # White space of the prompt that is undecided, as perhaps before a mark, would be passed on as the answer's.
        shorter = trimmed.initial_events == whole.initial_events
        self._parser: Any = trimmed if shorter else whole
        # So would other text that may be the beginning of a mark, as in a message that is continued.
        held: list[Mapping[str, Any]] = []
        with suppress(*UNPARSED):
            held = parser(begun.rstrip() if shorter else begun).finalize()[1]
        self._held = "".join(event["text"] for event in held if event["type"] == "region_chunk")
        self._fields = spec.fields
        self._field: str | None = None  # to which text belongs now; None: no text has come since the last mark
        self._reasoned = False  # and no content has come since: it begins behind white space
        for event in self._parser.initial_events:
            self._follow(event)
        known = any(name in self._fields for name in REASONING)
        self.reasoning: Reasoning = "begun" if self._inside else "none" if self._reasoned or not known else "possible"
        self.reasoning_tokens = self._undecided = 0
        self._has_tools = bool(tools)
        self._single = single_tool_call
        self._calls = 0
        self._text = ""
        self._at = self._passed = 0  # in the text: behind the last event, and behind what the last delta stands for

    @property
    def _inside(self) -> bool:
        return self._field in REASONING

    def feed(self, text: str, *, last: bool, cut: bool = False, tokens: int = 0) -> Iterator[ParsedDelta]:
        """Yield the parts that are complete with `text`, which `tokens` tokens have brought.

        Args:
            cut: whether the answer was cut off: then an unfinished call, or half of a call's mark, is left out at its end.
        """
        self._text += text
        if self._parser is None:
            if text:
                yield ParsedDelta("content", text, start=len(self._text) - len(text))
            return
        self._undecided += tokens
        try:
            reasons = decided = self._inside
            for event in self._events(text, last=last, cut=cut):
                self._move(event)
                if (delta := self._delta(event)) is not None:
                    yield delta
                self._follow(event)
                reasons |= self._inside
                decided = True
            if decided:  # without an event it is perhaps the beginning of a mark
                self.reasoning_tokens += self._undecided if reasons else 0
                self._undecided = 0
        except UNPARSED as error:
            logger.warning("serve: an answer does not follow the model's response template (%s); the rest is sent as text", error)
            self._parser = None
            if rest := self._text[self._passed :]:
                yield ParsedDelta("content", rest, start=self._passed)

    def spans(self, text: str) -> Iterator[tuple[str, bool]]:
        """Take text instead of `feed`; yield the decided parts, each with whether it is reasoning or one of its marks."""
        self._text += text
        begin = self._at
        try:
            for event in self._own(self._parser.feed(text)) if self._parser is not None else ():
                inside = self._inside
                self._move(event)
                self._follow(event)
                yield self._text[begin : self._at], inside or self._inside
                begin = self._at
        except UNPARSED:
            self._parser = None
        if self._parser is None:
            yield self.rest(), False

    def rest(self) -> str:
        """Return the text that is undecided, perhaps the beginning of a mark; at the end of an answer it counts as content."""
        rest, self._at = self._text[self._at :], len(self._text)
        return rest

    def _events(self, text: str, *, last: bool, cut: bool) -> Iterator[Mapping[str, Any]]:
        yield from self._own(self._parser.feed(text))
        if not last:
            return
        try:
            held = self._parser.finalize()[1]
        except UNPARSED:
            if cut:
                return
            raise
        for event in self._own(held):
            half = event["type"] == "region_chunk" and not event["text"].isspace() and (self._has_tools or self._inside)
            # Of other forms than JSON it is not known whether a call is complete.
            unfinished = event["type"] == "region_close" and self._fields[event["field"]].content != "json"
            if not cut or not (half or unfinished):
                yield event

    def _own(self, events: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Yield the events without the prompt's text that was held back."""
        for event in events:
            held, self._held = self._held, ""
            if held and event["type"] == "region_chunk" and event["text"].startswith(held):
                event = {**event, "text": event["text"][len(held) :]}
            if event.get("text") != "":
                yield event

    def _follow(self, event: Mapping[str, Any]) -> None:
        """Note to which field the text after an event belongs."""
        if event["type"] == "region_open":
            self._field = event["field"]
        elif event["type"] == "region_close":
            self._reasoned |= self._inside
            self._field = None

    def _move(self, event: Mapping[str, Any]) -> None:
        """Move to the end of an event's text or mark: an event does not report where it stands."""
        field = self._fields[event["field"]]
        if event["type"] == "region_chunk":
            self._at = max(self._at, self._text.find(event["text"], self._at)) + len(event["text"])
            return
        pattern = field.open_re if event["type"] == "region_open" else field.close_re
        mark = None if pattern is None else pattern.match(self._text, self._at)
        self._at = self._at if mark is None else mark.end()

    def _delta(self, event: Mapping[str, Any]) -> ParsedDelta | None:
        field = event["field"]
        if event["type"] == "region_chunk" and (field == "content" or field in REASONING):
            text, self._passed = event["text"], self._at
            if field in REASONING:
                return ParsedDelta("reasoning", text)
            shown = text.lstrip() if self._reasoned else text
            self._reasoned &= not shown
            return ParsedDelta("content", shown, start=self._at - len(shown)) if shown else None
        if event["type"] == "region_close" and field == "tool_calls":
            function = event["value"]["function"]
            arguments, name = function["arguments"], function["name"]
            name.encode()  # a model may write a lone surrogate as JSON, or a number
            self._calls += 1
            self._passed = self._at
            if not self._single or self._calls == 1:
                return ParsedDelta("tool_call", arguments if isinstance(arguments, str) else json.dumps(arguments), name)
        return None


NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}  # of a tool that defines none
TOKEN_S, SPARE_S = 0.01, 1.0  # CPU time of a grammar: for each token of an answer, and beyond that for all of them
# Of a JSON text: a space behind commas and colons, and no other. Where white space is free, weak models write little else.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def grammars(start: Mapping[str, Any] | str, form: Mapping[str, Any] | str | None = None) -> str:
    """Return the grammar of an answer, as JSON for llguidance; Lark in `start` may refer to `form` as `@form`.

    Each is a JSON Schema, or text in llguidance's form of Lark. Two grammars do not share the names of their rules.
    """
    named = [{}, {"name": "form"}]
    both = [start] if form is None else [start, form]
    return json.dumps(
        {
            "grammars": [
                {**name, **({"lark_grammar": each} if isinstance(each, str) else {"json_schema": compact(each)})}
                for name, each in zip(named, both, strict=False)
            ]
        }
    )


def from_gbnf(grammar: str) -> str:
    """Return a grammar in llguidance's form of Lark; one in GBNF, which llama.cpp reads, is recognised by a rule's `::=`.

    Raises:
        GrammarError: the grammar in GBNF is wrong.
    """
    if re.search(r"^\s*[\w-]+\s*::=", grammar, re.MULTILINE) is None:
        return grammar
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        return str(gbnf_to_lark(grammar))
    except ImportError as error:
        raise GrammarError(MISSING) from error
    except Exception as error:  # its own errors have no type of their own
        raise GrammarError(f"the grammar in GBNF cannot be read: {error}") from error


def compact(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON Schema whose texts have little white space."""
    return {**schema, "x-guidance": COMPACT}


class GrammarError(ValueError):
    """A grammar or schema that cannot be followed; the message may be shown to the client."""


MISSING = "this server lacks the package llguidance: pip install 'moegraft[serve]'"


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

    def form(self, form: Mapping[str, Any] | str, *, reasoning: Reasoning, calls: bool = False) -> str:
        """Return the grammar of an answer whose content follows a JSON Schema or a grammar of Lark, after reasoning.

        Args:
            calls: whether the answer may consist of calls of tools instead, which are as free as those of other answers.

        Raises:
            ValueError: the template does not define where the content begins, or a call.
        """
        content = self._fields.get("content") or {}
        opening = self._spell(_literal(content, "open")) if {"open", "open_pattern"} & content.keys() else ""
        if reasoning == "none" and not opening and not calls:
            return grammars(form)
        rest = f"{opening} @form"
        if calls:
            rest = f"({rest} | {self._spell(_beginning(self._fields.get('tool_calls') or {}))} /(?s:.*)/ <[*]>*)"
        return grammars(self._start(rest, reasoning=reasoning), form)

    def _start(self, rest: str, *, reasoning: Reasoning) -> str:
        field = next((self._fields[name] for name in REASONING if name in self._fields), None)
        if field is None or reasoning == "none":
            return f"start: {rest}"
        opening, close = _literal(field, "open"), _literal(field, "close")
        if reasoning == "possible" and opening not in self._tokens and opening not in self._chat_template:
            return f"start: {rest}"
        one_token = f"thought: /(?s:.*)/ {self._spell(close)}"
        thought = one_token if close in self._tokens else f"thought[suffix={json.dumps(close)}]: /(?s:.*)/"
        begin = r"thought /\n{0,2}/" if reasoning == "begun" else rf"({self._spell(opening)} thought /\n{{0,2}}/)?"
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
        schema: dict[str, Any] = dict(function.get("parameters") or NO_PARAMETERS)
        captures = {}
        name, arguments = shape["name"].strip("{}"), shape["arguments"].strip("{}")
        if arguments != "content":
            # With a name of its own, as its references are to itself and not to the call around it.
            properties = {arguments.removeprefix("content."): {"$id": "urn:arguments", **schema}}
            if name.startswith("content."):
                properties = {name.removeprefix("content."): {"const": function["name"]}, **properties}
            schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        if not name.startswith("content."):
            captures[name] = function["name"]
        opening, closing = (self._spell(_literal(field, key, captures)) for key in ("open", "close"))
        return rf'{opening} "\n"? %json {json.dumps(compact(schema))} "\n"? {closing}'

    def _spell(self, text: str) -> str:
        """Return a text as a rule."""
        known = "|".join(map(re.escape, sorted(self._tokens, key=len, reverse=True)))
        parts = [part for part in (re.split(f"({known})", text) if known else [text]) if part]
        return " ".join(f"<[{self._tokens[part]}]>" if part in self._tokens else json.dumps(part) for part in parts)


def _literal(field: Mapping[str, Any], key: str, captures: Mapping[str, str] | None = None) -> str:
    """Return the text that a field's anchor stands for: a pattern may have optional white space before it, and `captures` in it."""
    if key in field:
        given: str | list[str] = field[key]
        return given if isinstance(given, str) else given[0]
    pattern = field.get(f"{key}_pattern", "")
    text = re.sub(r"\(\?P<(\w+)>[^()]*\)", lambda group: (captures or {}).get(group[1], ""), pattern.replace(r"\s*", ""))
    text = re.sub(r"\\(\W)", r"\1", text)
    match = re.fullmatch(pattern, text)
    if not text or match is None or not match.groupdict().items() <= (captures or {}).items():
        raise ValueError(f"the model's response template has a pattern, {pattern!r}, which does not define how a call is written")
    return text


def _beginning(field: Mapping[str, Any]) -> str:
    """Return the text that a field's opening begins with, up to what its pattern leaves open."""
    if "open" in field:
        return _literal(field, "open")
    text = re.match(r"(?:\\s\*)?((?:\\\W|[^\\.^$*+?{}\[\]|()])*)(?![*+?{])", field.get("open_pattern", ""))
    if text is None or not text[1]:
        raise ValueError("the model's response template does not define how a call begins, so that an answer has calls or a form")
    return re.sub(r"\\(\W)", r"\1", text[1])


class Constraint:
    """The tokens by which one answer may go on.

    The CPU time for each is bounded in the mean. With an ambiguous grammar, as `s: s s | "a"`, it grows with the square of the answer's
    length and more, and all other answers wait for it.

    Attributes:
        drafts: whether drafts of the answer may be followed; not after one that had to be forgotten.
    """

    def __init__(self, matcher: Any) -> None:
        self._first = matcher  # has consumed nothing
        self._matcher = matcher.deep_copy()
        self._consumed: list[int] = []  # tokens that the matcher has consumed
        self._left_s = SPARE_S
        self.drafts = True

    def restrict(self, logits: torch.Tensor, answer: Sequence[int]) -> torch.Tensor:
        """Return `logits` (V,) with -inf for all tokens that cannot follow the tokens of `answer`.

        An answer that a draft continued and a verification cut is followed back. One that has left the grammar, as a draft may, is not
        restricted: its tokens are not accepted.

        Raises:
            GrammarError: the grammar has become too large, or takes too long.
        """
        began_s = time.thread_time()
        shared = next((place for place, pair in enumerate(zip(self._consumed, answer, strict=False)) if pair[0] != pair[1]), None)
        shared = min(len(self._consumed), len(answer)) if shared is None else shared
        if shared < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - shared)
            del self._consumed[shared:]
        following = list(answer[shared:])
        taken = self._matcher.try_consume_tokens(following)
        self._consumed += following[:taken]
        mask = None if taken < len(following) else self._matcher.compute_bitmask()
        if self._matcher.is_error():  # for good; its mask ends the answer, as if it were complete
            raise GrammarError(f"the answer cannot follow its grammar any further: {self._matcher.get_error().strip()}")
        took_s = time.thread_time() - began_s
        self._left_s = min(SPARE_S, self._left_s + TOKEN_S * max(1, len(following)) - took_s)
        if self._left_s < 0:
            raise GrammarError(
                f"the answer cannot follow its grammar any further: its next token took {1e3 * took_s:.0f} ms of CPU time, and in the mean "
                f"no more than {1e3 * TOKEN_S:.0f} ms are allowed; an ambiguous rule, as 's: s s | \"a\"', has ever more readings"
            )
        if mask is None:
            return logits
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        allowed = torch.from_numpy(bits[: logits.shape[-1]]).to(logits.device, torch.bool)
        return logits.masked_fill(~allowed, -torch.inf)

    def restart(self) -> None:
        """Forget a draft whose tokens have made the grammar too large: a matcher with an error follows nothing any more."""
        self._matcher = self._first.deep_copy()
        self._consumed = []
        self._left_s = SPARE_S
        self.drafts = False

    def copy(self) -> Constraint:
        """Return a constraint by the same grammar for another answer."""
        return Constraint(self._first)


class Grammars:
    """Makes constraints for the tokens of one model.

    Args:
        vocabulary: the number of the model's logits.
        ends: the tokens that end an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = ends
        self._lock = threading.Lock()
        self._prepared: Any = None

    def constraint(self, grammar: str) -> Constraint:
        """Return a constraint by a grammar as `grammars` makes it.

        Raises:
            GrammarError: the grammar is wrong or too large, or the model's tokenizer is of no kind that can be followed.
        """
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise GrammarError(MISSING) from error
        with self._lock:
            if self._prepared is None:
                try:
                    given: Any = self._tokenizer
                    self._prepared = from_tokenizer(given, n_vocab=self._vocabulary, eos_token=list(self._ends))
                except Exception as error:
                    raise GrammarError(f"the tokens of this model cannot be followed by a grammar ({error})") from error
        matcher = LLMatcher(self._prepared, grammar)
        if matcher.is_error():
            raise GrammarError(matcher.get_error().strip())
        return Constraint(matcher)
