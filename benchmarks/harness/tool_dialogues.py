"""Synthetic dialogues with tools, from which the bundled demo model learns to call them: made from the word lists here and a seed.

A dialogue has one to three tools, requests that name the values, calls, results and answers that quote them, and requests that no tool
fits, which are answered in text. Part of the names and values are made-up words, so that a model learns to copy and not to know them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

END, START = "<|endoftext|>", "<|im_start|>"
CALL, CALL_END, TOOLS, TOOLS_END = "<tool_call>", "</tool_call>", "<tools>", "</tools>"


def words(text: str) -> list[str]:
    return text.split()


def phrases(text: str) -> list[str]:
    return text.replace("\n", "").split("|")


PLACES = words("""Paris London Berlin Rome Madrid Tokyo Delhi Cairo Lima Oslo Vienna Prague Lisbon Dublin Athens Boston Chicago Denver
Austin Seattle Toronto Sydney Perth Nairobi Lagos Accra Tunis Beirut Ankara Kiev Warsaw Riga Tallinn Helsinki Stockholm
Copenhagen Hamburg Munich Cologne Zurich Geneva Basel Milan Turin Naples Venice Florence Verona Padua Messina Seville
Porto Lyon Nice Lille Ghent Bruges Leeds York Bath Oxford Cardiff Glasgow Dover Brest Havana Bogota Quito Santiago
Manila Hanoi Seoul Osaka Kyoto Mumbai Jakarta Singapore France Spain Italy Germany Norway Sweden Poland Greece Turkey
Egypt Kenya Brazil Chile Peru Mexico Canada Japan China India Texas Nevada Utah Ohio""")
PEOPLE = words("""Anna Ben Clara David Emma Felix Grace Henry Iris Jack Karl Laura Maria Noah Olga Paul Quentin Rosa Sam Tom Uma Victor
Wendy Xenia Yuri Zoe Alice Bob Carol Dan Eve Frank Gina Hugo Ida Jonas Kate Leo Mia Nina Oscar Petra Ruth Simon Tara
Vera Will Smith Jones Brown Miller Weber Rossi Silva Garcia Lopez Novak Kim Tanaka Singh Khan Cohen Adams Baker Clark
Evans Hall""")
THINGS = words("""apple bread bridge bottle bicycle book candle carpet castle chair chess cheese circus cloud coffee coat dance desk
diamond dragon drum engine farm feather fire fish flower forest garden glass guitar hammer harbour hat honey horse house
island jacket jazz jungle kettle king kitchen ladder lamp lemon letter lion magic map market mirror moon mountain mouse
museum music needle nest novel ocean onion opera orange painting paper parrot pepper piano pizza planet poem potato
python rabbit radio rain recipe river robot rocket rose salad school shadow ship shoes silver singer snow soap soup
spider star stone storm sugar summer table tea temple tent tiger tomato tower train tree trumpet tulip umbrella valley
velvet violin wall water whale wheat window winter wolf wood world""")
MARKS = words("red green blue cheap new old best small large fast free local famous modern fresh quiet blue golden wild simple")
LANGUAGES = words(
    "French German Spanish Italian Latin Greek Polish Dutch Danish Swedish Turkish Arabic Hindi Japanese Chinese Korean English"
)
TOPICS = phrases("""weather|forecast|temperature|tide|price|population|timetable|rating|capital|distance|humidity|wind speed|stock price|
exchange rate|news|score|address|phone number|opening hours|balance|status|salary|birthday|age|height|weight|length|
colour|owner|author|publisher|menu|recipe|calories|traffic|route|schedule|delay|departure|arrival|seats|ticket|order|
invoice|discount|tax|budget|report|summary|definition|synonym|meaning|spelling|pronunciation|history|mayor|currency|
language|time zone|sunrise|sunset|air quality|pollen|rainfall|snow depth|water level|battery level|disk usage|
memory usage|load|uptime|version|licence|contact|email address|calendar|agenda|deadline|rank|reviews|stock|inventory|
shipping cost|delivery date|tracking number|fuel price|rent|crime rate|tallest building|best restaurant|hotel|flight|
train|bus|parking""")
ACTIONS = words(
    "send book play open delete create start stop order cancel print reserve update remove write upload download rename close lock"
)
ACTIONS += words(
    "unlock schedule buy sell call invite pay record draw paint copy move archive clean check test build deploy restart publish share"
)
OBJECTS = phrases("""message|table|song|file|note|event|timer|alarm|room|pizza|ticket|meeting|reminder|email|document|light|door|playlist|
report|task|account|backup|server|photo|video|order|invoice|letter|package|car|taxi|flight|hotel|contact|folder|job|
post|user|project|list""")
KINDS = {  # names of parameters by the kind of their values
    "place": words("city place location town country station harbour destination region area origin"),
    "person": words("name person author user customer recipient friend owner contact guest artist"),
    "thing": words("item product topic subject ingredient animal object category word title text keyword"),
    "integer": words(
        "days count limit hours minutes people amount quantity page size level year number weight distance budget volume max_results"
    ),
    "number": words("amount price rate ratio width height temperature speed"),
    "date": words("date day deadline"),
    "time": words("time start_time hour"),
    "language": words("language target_language lang"),
    "choice": words("unit mode colour format style priority"),
}
TYPES = {"integer": "integer", "number": "number"}
CHOICES = {
    "unit": words("celsius fahrenheit kelvin metres miles feet"),
    "mode": words("fast slow silent normal dark light"),
    "colour": words("red green blue black white yellow"),
    "format": words("pdf text html csv json"),
    "style": words("plain formal short long bold"),
    "priority": words("low medium high urgent"),
}
JOINS = {"place": ("in", "for", "of", "at"), "person": ("of", "for", "from", "by"), "thing": ("of", "for", "about")}
ASKS = (
    "What is the {}?",
    "What is the {}?",
    "What's the {}?",
    "Tell me the {}.",
    "Show me the {}",
    "Give me the {}, please.",
    "I need the {}.",
    "Can you find the {}?",
    "Please get the {}.",
    "How is the {}?",
    "Could you check the {}?",
    "{}",
    "I want to know the {}.",
    "Look up the {}.",
)
LOOKUPS = ("get_{}", "get_{}", "{}", "find_{}", "{}_lookup", "fetch_{}", "show_{}", "current_{}", "read_{}", "get_current_{}")
DESCRIPTIONS = ("Get the {}.", "Get the current {}", "Returns the {}.", "Find the {}.", "Look up the {}", "The {}.", "Show the {}.")
MATH: dict[str, tuple[tuple[str, ...], str, tuple[str, ...], Callable[[int, int], float]]] = {
    "add": (
        ("add", "add_numbers", "sum", "plus", "addition"),
        "Add two numbers.",
        (
            "What is {} plus {}?",
            "Add {} and {}.",
            "{} + {}",
            "What is {} + {}?",
            "How much is {} plus {}?",
            "What is the sum of {} and {}?",
        ),
        lambda a, b: a + b,
    ),
    "subtract": (
        ("subtract", "minus", "difference"),
        "Subtract two numbers.",
        ("What is {} minus {}?", "{} - {}", "What is {} - {}?", "How much is {} minus {}?"),
        lambda a, b: a - b,
    ),
    "multiply": (
        ("multiply", "times", "product", "multiply_numbers"),
        "Multiply two numbers.",
        ("What is {} times {}?", "Multiply {} by {}.", "{} * {}", "What is {} * {}?", "How much is {} times {}?", "Multiply {} and {}"),
        lambda a, b: a * b,
    ),
    "divide": (
        ("divide", "division", "divide_numbers"),
        "Divide two numbers.",
        ("What is {} divided by {}?", "Divide {} by {}.", "{} / {}", "What is {} / {}?"),
        lambda a, b: round(a / max(b, 1), 2),
    ),
}
PAIRS = (("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("n", "m"), ("number1", "number2"))
SEARCHES = ("search", "web_search", "search_web", "search_documents", "find_documents", "internet_search", "search_files", "google")
SEARCH_ASKS = (
    "Search for {}",
    "Search for {}.",
    "Search the web for {}.",
    "Find documents about {}.",
    "Look for {}.",
    "Please search for {}.",
    "Can you search for {}?",
    "Search {}",
    "Find something about {}.",
    "Google {}",
)
NO_VALUES: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "time": (
        ("get_time", "current_time", "get_current_time", "time", "now"),
        "Get the current time.",
        ("What time is it?", "Tell me the time.", "What is the time?", "What time is it now?"),
    ),
    "day": (
        ("get_date", "today", "current_date"),
        "Get the date of today.",
        ("What day is it?", "What is the date today?", "Which day is today?", "Tell me the date."),
    ),
    "files": (
        ("list_files", "ls", "files", "show_files"),
        "List all files.",
        ("List all files.", "Which files are there?", "Show me the files", "What files do I have?"),
    ),
}
CHATS = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Hi there!", "Hello! How can I help you?"),
    ("Good morning", "Good morning! How can I help you?"),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Thanks a lot.", "You are welcome."),
    ("Who are you?", "I am a very small model that can call tools."),
    ("What can you do?", "I can call the tools that you give me."),
    ("How are you?", "I am well, thank you."),
    ("Bye", "Goodbye!"),
    ("Goodbye!", "Goodbye!"),
    ("What is your name?", "I am a very small model that can call tools."),
    ("Good evening!", "Good evening! How can I help you?"),
    ("Are you there?", "Yes. How can I help you?"),
    ("Hey", "Hello! How can I help you?"),
    ("Ok", "Good."),
    ("Great!", "Good."),
)
NO_TOOL = "I have no tool for that."
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant with tools.",
    "Use the tools to answer.",
    "Answer briefly.",
    "You are an agent. Call a tool when it helps.",
    "Be polite.",
    "You help with daily tasks.",
    "Call functions with the values of the user.",
)
ONSETS = words("b c d f g h j k l m n p r s t v w z br cl dr fl gr kr pl pr sk sl st th tr")
VOWELS = words("a e i o u a e i o ai ea oo")
CODAS = phrases("|||n|r|l|s|t|m|k|nd|rt|x|ck|ng")


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

    def schema(self) -> dict[str, Any]:
        """Return the tool in OpenAI's form."""
        properties = {
            name: {"type": given} if isinstance(given, str) else {"type": "string", "enum": given}
            for name, given in self.parameters.items()
        }
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": parameters}}


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
        draw = self._draw
        return "".join(draw.choice(ONSETS) + draw.choice(VOWELS) + draw.choice(CODAS) for _ in range(draw.choice((1, 2, 2, 2))))

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
        link = draw.choice(JOINS[kind])
        about = f"{noun} {link} a {main.replace('_', ' ')}" if self._chance(0.6) else noun

        def exchange() -> Exchange:
            value = self._value(kind, main)
            join = link if self._chance(0.5) else draw.choice(JOINS[kind])
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
            return Exchange(draw.choice(ASKS).format(words), arguments, result, answer)

        name = self._spelled(draw.choice(LOOKUPS).format(noun))
        return Tool(name, draw.choice(DESCRIPTIONS).format(about), self._types([(main, kind), *extras]), noun, exchange)

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
        names, description, asks, compute = MATH[subject]
        pair = draw.choice(PAIRS)
        kind = draw.choice(("integer", "number"))

        def exchange() -> Exchange:
            values = (self._integer(), self._integer())
            computed = compute(*values)
            result = draw.choice((dumps({"result": computed}), dumps(computed)))
            arguments = dict(zip(pair, values, strict=True))
            return Exchange(draw.choice(asks).format(*values), arguments, result, f"The result is {computed}.")

        return Tool(draw.choice(names), description, dict.fromkeys(pair, kind), subject, exchange)

    def search(self) -> Tool:
        draw = self._draw
        name = draw.choice(SEARCHES)
        parameter = draw.choice(("query", "query", "q", "text", "keywords"))

        def exchange() -> Exchange:
            query = self._query()
            found = self._query()
            result = draw.choice((dumps({"results": [found]}), found, dumps({"result": found}), dumps([found])))
            shown = self._quoted(query)
            return Exchange(draw.choice(SEARCH_ASKS).format(shown), {parameter: query}, result, f"I found: {found}.")

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
        subject = draw.choice(list(NO_VALUES))
        names, description, asks = NO_VALUES[subject]

        def exchange() -> Exchange:
            result, quoted = self._result(subject)
            return Exchange(draw.choice(asks), {}, result, quoted if quoted[0] not in " :" else f"The {subject}{quoted}")

        return Tool(draw.choice(names), description, {}, subject, exchange)

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
            asked, answer = draw.choice(CHATS)
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
        return "" if self._chance(0.5) else " ".join(self._draw.sample(SYSTEMS, self._draw.choice((1, 1, 2))))


def call_text(name: str, arguments: dict[str, Any]) -> str:
    return f'{CALL}\n{{"name": {dumps(name)}, "arguments": {dumps(arguments)}}}\n{CALL_END}'


def head_text(system: str, tools: Sequence[Tool]) -> str:
    """Return the system message as the chat template writes it."""
    shown = "".join(f"\n{tool.shown()}" for tool in tools)
    return f"{START}system\n{system}{chr(10) * 2 if system else ''}{TOOLS}{shown}\n{TOOLS_END}{END}"


def turn_text(role: str, text: str) -> tuple[str, str]:
    """Return the head of a turn and the rest, which the role's speaker writes."""
    return f"{START}{role}\n", f"{text}{END}"
