"""YAML text as nodes, each key and value with its position, and the findings at these positions, which are reported together.

PyYAML's safe loader scans and parses, event by event; none of its constructors run, and tags, anchors and aliases are errors. So no file
can run code, expand beyond its size or recurse deeply.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

import yaml

from moegraft.operators.errors import RuleFileError

Severity = Literal["error", "warning", "notice"]
MAX_ERRORS = 100  # a damaged file could have tens of thousands
MAX_WORD = 100  # difflib is quadratic in a word's length


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A position in a rule file; line and column count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding; further lines of its message are indented below the first."""

    position: Position
    severity: Severity
    message: str

    def __str__(self) -> str:
        return f"{self.position}: {self.severity}: {self.message}"


class RuleErrors(RuleFileError):
    """The findings of a rule file or plan with at least one error; `diagnostics` are in the order of the files."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics: tuple[Diagnostic, ...] = tuple(diagnostics)
        super().__init__("\n".join(map(str, self.diagnostics)))


@dataclass(slots=True)
class Findings:
    """The findings so far, collected so that one run reports all of them."""

    diagnostics: list[Diagnostic] = field(default_factory=list)
    errors: int = 0
    _void: set[Position] = field(default_factory=set)

    def error(self, position: Position, message: str) -> None:
        """
        Raises:
            RuleErrors: there are `MAX_ERRORS` errors.
        """
        if position in self._void:
            return
        self.diagnostics.append(Diagnostic(position, "error", message))
        self.errors += 1
        if self.errors == MAX_ERRORS:
            self.diagnostics.append(Diagnostic(position, "notice", f"stopped after {MAX_ERRORS} errors"))
            raise RuleErrors(self.diagnostics)

    def void(self, position: Position, message: str) -> None:
        """Report an error in a value, and ignore further errors at its position, which would follow from it."""
        self.error(position, message)
        self._void.add(position)

    def stop(self, position: Position, message: str) -> NoReturn:
        """Report an error after which nothing can be read.

        Raises:
            RuleErrors: always, with everything found so far.
        """
        self.error(position, message)
        raise RuleErrors(self.in_order())

    def warning(self, position: Position, message: str) -> None:
        self.diagnostics.append(Diagnostic(position, "warning", message))

    def notice(self, position: Position, message: str) -> None:
        self.diagnostics.append(Diagnostic(position, "notice", message))

    def in_order(self) -> tuple[Diagnostic, ...]:
        """Return all findings, sorted by file (in the order of their first findings), line and column."""
        files = list(dict.fromkeys(finding.position.file for finding in self.diagnostics))
        return tuple(sorted(self.diagnostics, key=lambda finding: (files.index(finding.position.file), finding.position)))

    def raise_errors(self) -> None:
        """
        Raises:
            RuleErrors: there are errors; warnings and notices are included.
        """
        if self.errors:
            raise RuleErrors(self.in_order())


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word nearest to `word`, ignoring case; None if none is near."""
    if len(word) > MAX_WORD:
        return None
    by_lower = {name.lower(): name for name in known}
    matches = get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the nearest known word, else all of them."""
    names = list(known)
    near = nearest(word, names)
    if near is not None:
        return f"; did you mean '{near}'?"
    return f"; known are: {', '.join(names)}" if names else ""


def shown(text: str) -> str:
    """Return a value in quotes, shortened if it is long."""
    return f"'{text}'" if len(text) <= MAX_WORD else f"'{text[: MAX_WORD - 3]}...'"


Value: TypeAlias = str | int | float | bool | None

# YAML 1.2's core schema: `yes`, `no`, `on` and `off` are text, `010` is not octal, and `1:30` is not a number in base 60.
_WORDS: dict[str, Value] = {"true": True, "false": False, "null": None, "~": None, "": None}
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?(?:[0-9]{1,18}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][-+]?[0-9]{1,3})?")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]")


@dataclass(frozen=True, slots=True)
class ScalarNode:
    """One value; `origin` is the `${...}` that it comes from, for messages, with its place where that is another file."""

    value: Value
    position: Position
    origin: str | None = None

    def __str__(self) -> str:
        origin = f" (from {self.origin})" if self.origin else ""
        if isinstance(self.value, str):
            return f"text {shown(self.value)}{origin}"
        return f"{plain_text(self.value)}{origin}"


@dataclass(frozen=True, slots=True)
class ListNode:
    items: tuple[Node, ...]
    position: Position

    def __str__(self) -> str:
        return "a list"


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a mapping with its value."""

    key: str
    position: Position
    value: Node


@dataclass(frozen=True, slots=True)
class MappingNode:
    """A mapping whose keys are text, each once."""

    entries: tuple[Entry, ...]
    position: Position

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def get(self, key: str) -> Node | None:
        return next((entry.value for entry in self.entries if entry.key == key), None)

    def __str__(self) -> str:
        return "a mapping"


Node: TypeAlias = ScalarNode | ListNode | MappingNode


def parse_value(text: str) -> Value:
    """Return the value of unquoted text: true, false, null or a finite decimal number; else the text."""
    if text.lower() in _WORDS and text in (text.lower(), text.upper(), text.capitalize()):
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and not _LEADING_ZERO.match(text) and isfinite(float(text)):
        return float(text)
    return text


def plain_text(value: Value) -> str:
    """Return a value as YAML text, the inverse of `parse_value`."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


MAX_BYTES = 1 << 16  # the longest KTransformers file has 30 kB; the scanner reads 50 kB per second
MAX_DEPTH = 16
MAX_TEXT = 4096
_INDENTING_TAB = re.compile(r"^ *\t[ \t]*(?=[^\s#])", re.MULTILINE)
_UNPRINTABLE = yaml.reader.Reader.NON_PRINTABLE


def read_document(path: Path, findings: Findings, *, plain_keys: bool = False) -> Node:
    """Return the one document of a file.

    Args:
        plain_keys: accept numbers, booleans and null as keys, by their text; KTransformers' files may have them.

    Raises:
        RuleErrors: the file cannot be read, is no valid YAML, or is empty, too large or too deep; earlier findings are included.
    """
    start = Position(str(path), 1, 1)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        findings.stop(start, f"this rule file cannot be read: {reason}")
    if len(data) > MAX_BYTES:
        findings.stop(start, f"a rule file may have at most {MAX_BYTES >> 10} KiB, and this one has more")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig", errors="replace")
        message = f"byte 0x{data[error.start]:02x} is not UTF-8; save the file with the encoding UTF-8"
        findings.stop(_position_in(before, start.file), message)
    return parse_document(text, start.file, findings, plain_keys=plain_keys)


def parse_document(text: str, file: str, findings: Findings, *, plain_keys: bool = False) -> Node:
    """Return the one document of `text`; positions are in `file`.

    Raises:
        RuleErrors: as `read_document`.
    """
    unprintable = _UNPRINTABLE.search(text)
    if unprintable is not None:
        findings.stop(_position_in(text[: unprintable.start()], file), why_unprintable(unprintable[0]) or "")
    tab = _INDENTING_TAB.search(text)
    if tab is not None:
        position = _position_in(text[: text.index("\t", tab.start())], file)
        findings.stop(position, "a tab indents this line; YAML indents with spaces")
    builder = _Builder(file, findings, plain_keys)
    loader = yaml.SafeLoader(text)
    try:
        while loader.check_event():
            builder.take(loader.get_event())  # type: ignore[no-untyped-call]
    except yaml.MarkedYAMLError as error:
        message = f"not valid YAML: {', '.join(part for part in (error.context, error.problem) if part)}"
        if error.problem is not None and "'\\t'" in error.problem:
            message = "this is a tab; YAML needs a space here"
        findings.stop(builder.position(error.problem_mark or error.context_mark), message)
    except RuleErrors:
        raise
    except (ValueError, OverflowError):  # from chr() and int() within the scanner
        position = builder.position(loader.get_mark())
        if text[: loader.index].endswith("\\U"):
            findings.stop(replace(position, column=position.column - 2), "not valid YAML: this escape is not a Unicode character")
        findings.stop(position, "not valid YAML: this number has too many digits")
    finally:
        loader.dispose()
    if builder.root is None or (isinstance(builder.root, ScalarNode) and builder.root.value is None):
        findings.stop(Position(file, 1, 1), "this rule file is empty; it needs a list of rules (see rules/README.md)")
    return builder.root


def _position_in(before: str, file: str) -> Position:
    return Position(file, before.count("\n") + 1, len(before) - before.rfind("\n"))


def why_unprintable(text: str) -> str | None:
    """Return the reason why `text` is not allowed in a rule file, raw or escaped, such as control characters; None if it is allowed."""
    match = _UNPRINTABLE.search(text)
    return None if match is None else f"character U+{ord(match[0]):04X} is not allowed in a rule file"


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end is not read yet; a mapping's keys and values alternate in `children`."""

    position: Position
    is_mapping: bool
    children: list[Node] = field(default_factory=list)


class _Builder:
    """Builds nodes from parse events, with an explicit stack instead of recursion."""

    def __init__(self, file: str, findings: Findings, plain_keys: bool) -> None:
        self._file = file
        self._findings = findings
        self._plain_keys = plain_keys
        self._open: list[_Open] = []
        self._documents = 0
        self.root: Node | None = None

    def position(self, mark: Any) -> Position:  # PyYAML's, in Python or C, or None
        return Position(self._file, 1, 1) if mark is None else Position(self._file, mark.line + 1, mark.column + 1)

    def take(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents == 2:
                self._findings.stop(self.position(event.start_mark), "a second YAML document starts here; a rule file is a single document")
        elif isinstance(event, yaml.NodeEvent):
            self._take_node(event, self.position(event.start_mark))
        elif isinstance(event, yaml.CollectionEndEvent):
            self._add(self._closed(self._open.pop()))

    def _take_node(self, event: yaml.NodeEvent, position: Position) -> None:
        self._refuse_reference(event, position)
        if isinstance(event, yaml.ScalarEvent):
            self._add(ScalarNode(self._value(event, position), position))
        elif isinstance(event, yaml.AliasEvent):
            self._add(ScalarNode(None, position))
        else:
            if len(self._open) == MAX_DEPTH:
                self._findings.stop(position, f"more than {MAX_DEPTH} nested lists and mappings; no rule is that deep")
            self._open.append(_Open(position, isinstance(event, yaml.MappingStartEvent)))

    def _refuse_reference(self, event: yaml.NodeEvent, position: Position) -> None:
        advice = "name the value in vars: and write ${name}"
        if isinstance(event, yaml.AliasEvent):
            self._findings.void(position, f"alias '*{event.anchor}': aliases are not allowed in rule files; {advice}")
        elif event.anchor is not None:
            self._findings.error(position, f"anchor '&{event.anchor}': anchors are not allowed in rule files; {advice}")
        tag = getattr(event, "tag", None)
        if tag is not None:
            self._findings.void(
                position,
                f"tag '{tag}': tags are not allowed in rule files; a value's type follows from its form; quotes make it text",
            )

    def _value(self, event: yaml.ScalarEvent, position: Position) -> str | int | float | bool | None:
        text: str = event.value
        unprintable = why_unprintable(text)
        if unprintable is not None:
            self._findings.void(position, unprintable)
            return None
        if len(text) > MAX_TEXT:
            self._findings.void(position, f"a value may have at most {MAX_TEXT} characters, and this one has {len(text)}")
            return None
        return parse_value(text) if event.style is None else text

    def _add(self, node: Node) -> None:
        if self._open:
            self._open[-1].children.append(node)
        else:
            self.root = node

    def _closed(self, opened: _Open) -> Node:
        if not opened.is_mapping:
            return ListNode(tuple(opened.children), opened.position)
        entries: dict[str, Entry] = {}
        for key, value in zip(opened.children[::2], opened.children[1::2], strict=True):
            name = key.value if isinstance(key, ScalarNode) else None
            if self._plain_keys and isinstance(key, ScalarNode):
                name = plain_text(key.value)
            if not isinstance(name, str):
                self._findings.error(key.position, f"a key must be text, and this is {key}")
            elif name in entries:
                first = entries[name].position.line
                self._findings.error(key.position, f"key '{name}' is given twice; the first is in line {first}")
            else:
                entries[name] = Entry(name, key.position, value)
        return MappingNode(tuple(entries.values()), opened.position)
