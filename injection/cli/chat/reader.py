"""Reads what a person types: one line, lines that end in a backslash, or a block between \"\"\" fences."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass

FENCE = '"""'
FIRST, NEXT = ">>> ", "... "


@dataclass(frozen=True, slots=True)
class Typed:
    """Something to act on; `command` for a line that starts with one slash."""

    text: str
    command: bool = False


def prepare_editing() -> None:
    """Gives `input` line editing, a history and lines of any length, where the system has readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401


def read_typed() -> Typed:
    """The next thing typed.

    Raises:
        EOFError: the input ended, also in the middle of several lines.
        KeyboardInterrupt: Ctrl-C.
        UnicodeError: the line is not UTF-8 text.
    """
    line = _line(FIRST)
    if line.lstrip().startswith(FENCE):
        return Typed(_block(line.lstrip().removeprefix(FENCE)))
    if line.startswith("/") and not line.startswith("//") and "\n" not in line:
        return Typed(line, command=True)
    text = _joined(line)
    return Typed(text.removeprefix("/") if text.startswith("//") else text)


def _block(line: str) -> str:
    lines = []
    while not line.rstrip().endswith(FENCE):
        lines.append(line)
        line = _line(NEXT)
    lines.append(line.rstrip().removesuffix(FENCE))
    return "\n".join(lines).strip("\n")


def _joined(line: str) -> str:
    lines = []
    while line.endswith("\\"):
        lines.append(line.removesuffix("\\"))
        line = _line(NEXT)
    return "\n".join([*lines, line])


def _line(mark: str) -> str:
    if sys.stdout.isatty():
        return _checked(input(mark))
    print(mark, end="", file=sys.stderr, flush=True)  # stdout goes to a file: it takes answers alone
    return _checked(input())


def _checked(line: str) -> str:
    line.encode()  # some locales let bytes that are no text through as lone surrogates, which no tokenizer takes
    return line
