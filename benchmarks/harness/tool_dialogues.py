"""Synthetic dialogues with tools, from which the bundled demo model learns to call them: made from the word lists of
`data/tool_dialogues.yaml` and a seed.

A dialogue has one to three tools, requests that name the values, calls, results and answers that quote them, and requests that no tool
fits, which are answered in text. Part of the names and values are made-up words, so that a model learns to copy and not to know them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

END, START = "<|endoftext|>", "<|im_start|>"
CALL, CALL_END, TOOLS, TOOLS_END = "<tool_call>", "</tool_call>", "<tools>", "</tools>"


LISTS = yaml.safe_load((Path(__file__).parents[1] / "data" / "tool_dialogues.yaml").read_text(encoding="utf-8"))
PLACES, PEOPLE, THINGS, MARKS, LANGUAGES = (LISTS[name] for name in ("places", "people", "things", "marks", "languages"))
TOPICS, ACTIONS, OBJECTS = (LISTS[name] for name in ("topics", "actions", "objects"))
KINDS: dict[str, list[str]] = LISTS["kinds"]  # names of parameters by the kind of their values
TYPES = {"integer": "integer", "number": "number"}
CHOICES: dict[str, list[str]] = LISTS["choices"]
MATH: dict[str, Callable[[int, int], float]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: round(a / max(b, 1), 2),
}
NO_TOOL = "I have no tool for that."


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request, the call that it needs (None: no tool fits), the call's result and the last answer."""

    request: str
    arguments: dict[str, Any] | None
    result: str
    answer: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool for which `exchange` makes requests; tools of the same `subject` could be mixed up."""

    name: str
    description: str
    parameters: dict[str, Any]
    subject: str
    exchange: Callable[[], Exchange]

    def shown(self) -> str:
        """Return the tool as the chat template shows it."""
        return f'{{"description": {dumps(self.description)}, "name": {dumps(self.name)}, "arguments": {dumps(self.parameters)}}}'


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class Writer:
    """Makes tools and dialogues.

    Args:
        held_out: use the last sixth of each list of words, which dialogues for training leave out, and other made-up words.
        made_up: share of names and values that are made-up words.
    """

    def __init__(self, seed: int, *, held_out: bool = False, made_up: float = 0.25) -> None:
        self._draw = random.Random(f"{seed} {held_out}")
        self._held_out = held_out
        self._made_up = made_up

    def _pick(self, words: Sequence[str]) -> str:
        """Draw from the part of a list that is for training or held out; the order of the lists is mixed, always in the same way."""
        mixed = sorted(set(words))
        random.Random(len(mixed)).shuffle(mixed)
        cut = len(mixed) * 5 // 6
        return self._draw.choice(mixed[cut:] if self._held_out else mixed[:cut])

    def _chance(self, share: float) -> bool:
        return self._draw.random() < share

    def _invented(self) -> str:
        syllables = range(self._draw.choice((1, 2, 2, 2)))
        return "".join(self._draw.choice(LISTS[part]) for _ in syllables for part in ("onsets", "vowels", "codas"))

    def _word(self, words: Sequence[str]) -> str:
        return self._invented() if self._chance(self._made_up) else self._pick(words)

    def _name_of(self, words: Sequence[str]) -> str:
        return self._invented().capitalize() if self._chance(self._made_up) else self._pick(words)

    def _query(self) -> str:
        words = [self._word(THINGS) for _ in range(self._draw.choice((1, 1, 2, 2, 3)))]
        if self._chance(0.4):
            words.insert(0, self._pick(MARKS))
        if self._chance(0.25):
            words += [self._draw.choice(("in", "for", "near", "from", "and")), self._name_of(PLACES)]
        return " ".join(words)

    def _integer(self) -> int:
        return self._draw.randrange(10 ** self._draw.choice((1, 1, 2, 2, 3, 4)))

    def _value(self, kind: str, name: str) -> Any:
        draw = self._draw
        if kind == "place":
            return self._name_of(PLACES) if self._chance(0.9) else f"{self._name_of(PLACES)} {self._name_of(PEOPLE)}"
        if kind == "person":
            return self._name_of(PEOPLE) if self._chance(0.7) else f"{self._name_of(PEOPLE)} {self._name_of(PEOPLE)}"
        if kind == "thing":
            return self._word(THINGS) if self._chance(0.6) else self._query()
        if kind == "integer":
            return self._integer()
        if kind == "number":
            return float(f"{draw.randrange(100)}.{draw.randrange(1, 10)}")
        if kind == "date":
            return f"20{draw.randrange(20, 40)}-{draw.randrange(1, 13):02}-{draw.randrange(1, 29):02}"
        if kind == "time":
            return f"{draw.randrange(24):02}:{draw.randrange(60):02}"
        if kind == "language":
            return self._name_of(LANGUAGES)
        return draw.choice(CHOICES[name])

    def _quoted(self, value: Any) -> str:
        return f'"{value}"' if isinstance(value, str) and self._chance(0.12) else str(value)

    def _extra(self, kind: str, name: str, value: Any) -> str:
        """Return words that add a parameter to a request."""
        shown, spoken = self._quoted(value), name.replace("_", " ")
        natural = {
            "date": f" on {shown}",
            "time": f" at {shown}",
            "language": f" in {shown}",
            "choice": f" in {shown}",
            "integer": f" for {shown} {spoken}",
            "person": f" for {shown}",
            "place": f" in {shown}",
        }
        named = (f" with {spoken} {shown}", f" and {spoken} {shown}", f", {spoken} {shown}", f" with {name}={shown}", f", {name}: {shown}")
        return natural[kind] if kind in natural and self._chance(0.4) else self._draw.choice(named)

    def _parameters(self, count: int, taken: Sequence[str] = ()) -> list[tuple[str, str]]:
        """Draw names and kinds of parameters."""
        found: list[tuple[str, str]] = []
        kinds = list(KINDS)
        self._draw.shuffle(kinds)
        for kind in kinds[:count]:
            name = self._invented() if kind != "choice" and self._chance(self._made_up / 2) else self._draw.choice(KINDS[kind])
            if name not in taken:
                found.append((name, kind))
        return found

    def _types(self, parameters: Sequence[tuple[str, str]]) -> dict[str, Any]:
        return {name: CHOICES[name] if kind == "choice" else TYPES.get(kind, "string") for name, kind in parameters}

    def _spelled(self, name: str) -> str:
        """Return a function's name in one of the usual spellings."""
        words = name.replace(" ", "_").split("_")
        form = self._draw.random()
        if form < 0.1 and len(words) > 1:
            return words[0] + "".join(word.capitalize() for word in words[1:])
        return "-".join(words) if form < 0.13 else "_".join(words)

    def _result(self, subject: str) -> tuple[str, str]:
        """Return a result as tools give it, and how an answer quotes it."""
        draw = self._draw
        form = draw.random()
        value: Any = draw.choice((self._integer(), self._integer(), self._word(THINGS), self._value("number", ""), self._value("time", "")))
        if form < 0.35:
            key = draw.choice((subject.replace(" ", "_"), "value", "result", "answer"))
            return dumps({key: value}), f" is {value}."
        if form < 0.6:
            keys = [self._word(KINDS["thing"] + KINDS["integer"]), self._word(TOPICS).replace(" ", "_"), self._word(THINGS)]
            values = {
                key: draw.choice((self._integer(), self._word(THINGS), self._name_of(PLACES))) for key in keys[: draw.choice((2, 2, 3))]
            }
            quoted = ", ".join(f"{key.replace('_', ' ')} {one}" for key, one in values.items())
            return dumps(values), f": {quoted}."
        if form < 0.68:
            error = draw.choice(("not found", "no access", "unknown " + self._word(THINGS), "timeout", self._query()))
            return dumps({"error": error}), f"That did not work: {error}."
        words = [str(draw.choice((self._integer(), self._word(THINGS), self._pick(MARKS)))) for _ in range(draw.choice((1, 2, 3, 4)))]
        return " ".join(words), f" is {' '.join(words)}."

    def lookup(self) -> Tool:
        draw = self._draw
        noun = self._word(TOPICS)
        kind = draw.choice(("place", "place", "person", "thing"))
        main = self._invented() if self._chance(self._made_up / 2) else draw.choice(KINDS[kind])
        extras = self._parameters(draw.choice((0, 0, 0, 0, 1, 1)), [main])
        link = draw.choice(LISTS["joins"][kind])
        about = f"{noun} {link} a {main.replace('_', ' ')}" if self._chance(0.6) else noun

        def exchange() -> Exchange:
            value = self._value(kind, main)
            join = link if self._chance(0.5) else draw.choice(LISTS["joins"][kind])
            like = " like" if self._chance(0.06) else ""
            arguments, words = {main: value}, f"{noun}{like} {join} {self._quoted(value)}"
            for name, other in extras:
                if self._chance(0.6):
                    arguments[name] = self._value(other, name)
                    words += self._extra(other, name, arguments[name])
            if self._chance(0.12):
                words += draw.choice((" today", " now", " right now", " today", " at the moment"))
            result, quoted = self._result(noun)
            answer = quoted if quoted[0] not in " :" else f"The {noun} {join} {value}{quoted}"
            return Exchange(draw.choice(LISTS["asks"]).format(words), arguments, result, answer)

        name = self._spelled(draw.choice(LISTS["lookups"]).format(noun))
        return Tool(name, draw.choice(LISTS["descriptions"]).format(about), self._types([(main, kind), *extras]), noun, exchange)

    def action(self) -> Tool:
        draw = self._draw
        verb, thing = self._word(ACTIONS), self._word(OBJECTS)
        parameters = self._parameters(draw.choice((1, 1, 1, 2, 2)))
        kind = draw.choice(("person", "thing", "place"))
        if all(kind != other for _, other in parameters):
            parameters.insert(0, (draw.choice(KINDS[kind]), kind))
        parameters = list(dict(parameters).items())
        article = "an" if thing[0] in "aeiou" else "a"
        link = {"person": ("for", "to", "of"), "thing": ("called", "about", "with"), "place": ("in", "to", "at")}

        def exchange() -> Exchange:
            arguments: dict[str, Any] = {}
            words = f"{verb} {draw.choice((article, 'the', 'my', article))} {thing}"
            for number, (name, other) in enumerate(parameters):
                if number and self._chance(0.3):
                    continue
                value = arguments[name] = self._value(other, name)
                if not number and other in link:
                    words += f" {draw.choice(link[other])} {self._quoted(value)}"
                else:
                    words += self._extra(other, name, value)
            form = draw.choice(("{}.", "{}", "Please {}.", "Can you {}?", "I want to {}.", "Could you {}, please?", "{}, please."))
            request = form.format(words)
            if self._chance(0.55):
                status = draw.choice(("ok", "done", "success"))
                result, answer = draw.choice((dumps({"status": status}), status)), "Done."
            elif self._chance(0.7):
                key, number = draw.choice(("id", "number", "reference", "code")), self._integer()
                result, answer = dumps({"status": "ok", key: number}), f"Done: {key} {number}."
            else:
                error = draw.choice(("not found", "no access", "already exists", self._query()))
                result, answer = dumps({"error": error}), f"That did not work: {error}."
            return Exchange(request[0].upper() + request[1:] if self._chance(0.8) else request, arguments, result, answer)

        description = f"{verb.capitalize()} {article} {thing}{draw.choice(('.', '', '.', ' for the user.'))}"
        return Tool(self._spelled(f"{verb}_{thing}"), description, self._types(parameters), f"{verb} {thing}", exchange)

    def math(self) -> Tool:
        draw = self._draw
        subject = draw.choice(list(MATH))
        known, compute = LISTS["math"][subject], MATH[subject]
        pair = draw.choice(LISTS["pairs"])
        kind = draw.choice(("integer", "number"))

        def exchange() -> Exchange:
            values = (self._integer(), self._integer())
            computed = compute(*values)
            result = draw.choice((dumps({"result": computed}), dumps(computed)))
            arguments = dict(zip(pair, values, strict=True))
            return Exchange(draw.choice(known["asks"]).format(*values), arguments, result, f"The result is {computed}.")

        return Tool(draw.choice(known["names"]), known["description"], dict.fromkeys(pair, kind), subject, exchange)

    def search(self) -> Tool:
        draw = self._draw
        name = draw.choice(LISTS["searches"])
        parameter = draw.choice(("query", "query", "q", "text", "keywords"))

        def exchange() -> Exchange:
            query = self._query()
            found = self._query()
            result = draw.choice((dumps({"results": [found]}), found, dumps({"result": found}), dumps([found])))
            shown = self._quoted(query)
            return Exchange(draw.choice(LISTS["search_asks"]).format(shown), {parameter: query}, result, f"I found: {found}.")

        where = "documents" if "documents" in name else "files" if "files" in name else "the web"
        return Tool(
            name,
            draw.choice(("Search {}.", "Search {} for a text.", "Find pages in {}.")).format(where),
            {parameter: "string"},
            "search",
            exchange,
        )

    def translate(self) -> Tool:
        draw = self._draw
        names = (draw.choice(("text", "word", "sentence")), draw.choice(("language", "target_language", "to", "target")))

        def exchange() -> Exchange:
            values = (self._query(), self._name_of(LANGUAGES))
            form = draw.choice(("Translate {} to {}.", "Translate {} into {}", "What is {} in {}?", "Please translate {} to {}."))
            result = self._query()
            quoted = f'"{values[0]}"' if self._chance(0.5) else values[0]
            arguments = dict(zip(names, values, strict=True))
            return Exchange(
                form.format(quoted, values[1]), arguments, draw.choice((dumps({"translation": result}), result)), f"It is: {result}."
            )

        name = draw.choice(("translate", "translate_text", "translator", "translate_word"))
        return Tool(
            name,
            draw.choice(("Translate a text.", "Translate text to another language.")),
            dict.fromkeys(names, "string"),
            "translate",
            exchange,
        )

    def plain(self) -> Tool:
        draw = self._draw
        subject = draw.choice(list(LISTS["no_values"]))
        known = LISTS["no_values"][subject]

        def exchange() -> Exchange:
            result, quoted = self._result(subject)
            return Exchange(draw.choice(known["asks"]), {}, result, quoted if quoted[0] not in " :" else f"The {subject}{quoted}")

        return Tool(draw.choice(known["names"]), known["description"], {}, subject, exchange)

    def tool(self) -> Tool:
        makers = (self.lookup, self.action, self.math, self.search, self.translate, self.plain)
        return self._draw.choices(makers, (9, 6, 2.5, 1.8, 0.8, 0.6))[0]()

    def tools(self, count: int) -> list[Tool]:
        """Draw tools that cannot be mixed up."""
        found: dict[str, Tool] = {}
        while len(found) < count:
            tool = self.tool()
            if tool.subject not in found and all(tool.name != other.name for other in found.values()):
                found[tool.subject] = tool
        return list(found.values())

    def turns(self, tools: Sequence[Tool]) -> list[tuple[str, str]]:
        """Draw one request and what follows it, as roles and texts."""
        draw = self._draw
        form = draw.random()
        if form < 0.07:
            asked, answer = draw.choice(LISTS["chats"])
            return [("user", asked), ("assistant", answer)]
        if form < 0.25:
            other = self.tool()
            while any(other.subject == tool.subject for tool in tools):
                other = self.tool()
            return [("user", other.exchange().request), ("assistant", NO_TOOL)]
        tool = draw.choice(tools)
        done = tool.exchange()
        turns = [("user", done.request), ("assistant", call_text(tool.name, done.arguments or {}))]
        return [*turns, ("tool", done.result), ("assistant", done.answer)]

    def count(self) -> int:
        """Draw a number of tools."""
        return self._draw.choice((1, 2, 3))

    def dialogue(self, requests: int) -> str:
        """Return a whole dialogue with two tools as the chat template writes it."""
        tools = self.tools(2)
        head = head_text(self.system(), tools)
        return head + "".join("".join(turn_text(*turn)) for _ in range(requests) for turn in self.turns(tools))

    def system(self) -> str:
        return "" if self._chance(0.5) else " ".join(self._draw.sample(LISTS["systems"], self._draw.choice((1, 1, 2))))


def call_text(name: str, arguments: dict[str, Any]) -> str:
    return f'{CALL}\n{{"name": {dumps(name)}, "arguments": {dumps(arguments)}}}\n{CALL_END}'


def head_text(system: str, tools: Sequence[Tool]) -> str:
    """Return the system message as the chat template writes it."""
    shown = "".join(f"\n{tool.shown()}" for tool in tools)
    return f"{START}system\n{system}{chr(10) * 2 if system else ''}{TOOLS}{shown}\n{TOOLS_END}{END}"


def turn_text(role: str, text: str) -> tuple[str, str]:
    """Return the head of a turn and the rest, which the role's speaker writes."""
    return f"{START}{role}\n", f"{text}{END}"
