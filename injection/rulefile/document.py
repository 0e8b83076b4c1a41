"""Bytes to nodes: YAML read event by event, so that positions are kept and no text can cause a call, a blow-up or deep recursion.

PyYAML's safe loader scans and parses; nothing of its constructors is used. Tags, anchors and aliases are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import yaml

from moegraft.injection.rulefile.diagnostics import Findings, Position
from moegraft.injection.rulefile.nodes import Entry, ListNode, MappingNode, Node, ScalarNode, parse_value, plain_text

MAX_BYTES = 1 << 16  # the longest KTransformers file has 30 kB; the scanner reads 50 kB a second
MAX_DEPTH = 16
MAX_TEXT = 4096
_INDENTING_TAB = re.compile(r"^ *\t[ \t]*(?=[^\s#])", re.MULTILINE)
_UNPRINTABLE = yaml.reader.Reader.NON_PRINTABLE


def read_document(path: Path, findings: Findings, *, plain_keys: bool = False) -> Node:
    """The one document of a file.

    Args:
        plain_keys: numbers and the like are keys too, by their text: a rule file has none, and what others wrote may.

    Raises:
        RuleErrors: the file cannot be read, is no YAML, or is empty, too large or too deep; earlier findings are included.
    """
    start = Position(str(path), 1, 1)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        findings.stop(start, f"this rule file cannot be read: {reason}")
    if len(data) > MAX_BYTES:
        findings.stop(start, f"a rule file may have {MAX_BYTES >> 10} KiB and this one has more")
    return parse_document(_decoded(data, start.file, findings), start.file, findings, plain_keys=plain_keys)


def parse_document(text: str, file: str, findings: Findings, *, plain_keys: bool = False) -> Node:
    """The one document of `text`; `file` is what positions name.

    Raises:
        RuleErrors: as `read_document`.
    """
    _refuse_characters(text, file, findings)
    builder = _Builder(file, findings, plain_keys)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        findings.stop(builder.position(mark), _syntax_message(error))
    if builder.root is None or (isinstance(builder.root, ScalarNode) and builder.root.value is None):
        findings.stop(Position(file, 1, 1), "this rule file is empty; it needs a list of rules (see rules/README.md)")
    return builder.root


def _decoded(data: bytes, file: str, findings: Findings) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig", errors="replace")
        byte = data[error.start]
        message = f"byte 0x{byte:02x} is not UTF-8; save the file with the encoding UTF-8"
        findings.stop(_position_in(before, file), message)


def _position_in(before: str, file: str) -> Position:
    return Position(file, before.count("\n") + 1, len(before) - before.rfind("\n"))


def _refuse_characters(text: str, file: str, findings: Findings) -> None:
    unprintable = _UNPRINTABLE.search(text)
    if unprintable is not None:
        code = f"U+{ord(unprintable.group()):04X}"
        findings.stop(_position_in(text[: unprintable.start()], file), f"character {code} has no place in a rule file")
    tab = _INDENTING_TAB.search(text)
    if tab is not None:
        position = _position_in(text[: text.index("\t", tab.start())], file)
        findings.stop(position, "a tab indents this line; YAML indents with spaces")


def _syntax_message(error: yaml.MarkedYAMLError) -> str:
    if error.problem is not None and "'\\t'" in error.problem:
        return "a tab stands here; YAML wants a space"
    parts = [part for part in (error.context, error.problem) if part]
    return f"not valid YAML: {', '.join(parts)}"


class Mark(Protocol):
    """A place as PyYAML's scanner and its C twin give it; both count from 0."""

    line: int
    column: int


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end has not come yet; a mapping's keys and values alternate in `children`."""

    position: Position
    is_mapping: bool
    children: list[Node] = field(default_factory=list)


class _Builder:
    """Builds nodes from parse events with a stack of its own."""

    def __init__(self, file: str, findings: Findings, plain_keys: bool) -> None:
        self._file = file
        self._findings = findings
        self._plain_keys = plain_keys
        self._open: list[_Open] = []
        self._documents = 0
        self.root: Node | None = None

    def position(self, mark: Mark | None) -> Position:
        return Position(self._file, 1, 1) if mark is None else Position(self._file, mark.line + 1, mark.column + 1)

    def take(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents == 2:
                self._findings.stop(self.position(event.start_mark), "a second YAML document starts here; a rule file is one")
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
                self._findings.stop(position, f"more than {MAX_DEPTH} lists and mappings in each other; no rule is that deep")
            self._open.append(_Open(position, isinstance(event, yaml.MappingStartEvent)))

    def _refuse_reference(self, event: yaml.NodeEvent, position: Position) -> None:
        mend = "name the value in vars: and write ${name}"
        if isinstance(event, yaml.AliasEvent):
            self._findings.void(position, f"alias '*{event.anchor}': rule files take no aliases; {mend}")
        elif event.anchor is not None:
            self._findings.error(position, f"anchor '&{event.anchor}': rule files take no anchors; {mend}")
        tag = getattr(event, "tag", None)
        if tag is not None:
            self._findings.void(
                position, f"tag '{tag}': rule files take no tags; a value's type is that of its text, and quotes make it text"
            )

    def _value(self, event: yaml.ScalarEvent, position: Position) -> str | int | float | bool | None:
        text: str = event.value
        if len(text) > MAX_TEXT:
            self._findings.void(position, f"a value may have {MAX_TEXT} characters and this one has {len(text)}")
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
