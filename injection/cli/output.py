"""What commands print: one JSON object for programs, or columns for people, which look the same in a pipe.

Where a command writes: answers on stdout and nothing else there, everything about them on stderr.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console

from moegraft.injection.rules import Diagnostic

# What a terminal would obey rather than show; a model may write any of them. Tab and newline stay.
CONTROLS = dict.fromkeys([*range(0x00, 0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)])


@dataclass(frozen=True, slots=True)
class Terminal:
    """The two output streams of one program run."""

    out: TextIO
    notices: Console
    quiet: bool = False

    def write(self, text: str) -> None:
        """Shows a piece of an answer at once.

        Raises:
            BrokenPipeError: nobody reads stdout any more.
        """
        self.out.write(text.translate(CONTROLS) if self.out.isatty() else text)
        self.out.flush()

    def notice(self, text: str, style: str = "dim") -> None:
        """A line about the run, for people; silent under --quiet."""
        if not self.quiet:
            self._print(text, style)

    def reply(self, text: str) -> None:
        """Lines that the user asked for, so shown under --quiet too."""
        self._print(text, "")

    def complain(self, text: str) -> None:
        """A line about something that could not be done."""
        self._print(text, "red")

    @contextmanager
    def waiting(self, text: str) -> Iterator[Callable[[], None]]:
        """A spinner where one can turn, else nothing; gives what stops it before the body ends."""
        if self.notices.is_terminal and not self.notices.is_dumb_terminal and self.out.isatty() and not self.quiet:
            with self.notices.status(text, spinner_style="dim") as spinner:
                yield spinner.stop
        else:
            yield lambda: None

    def _print(self, text: str, style: str) -> None:
        self.notices.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def open_terminal(*, quiet: bool = False) -> Terminal:
    """The terminal of this process. NO_COLOR and a dumb terminal mean no escape sequence at all."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a Latin-1 terminal cannot show every answer
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return Terminal(sys.stdout, Console(stderr=True, color_system=None if plain else "auto"), quiet)


Json = Mapping[str, Any]  # what a command reports differs from command to command


def write_json(terminal: Terminal, data: Json) -> None:
    """One object; numbers that JSON lacks (NaN, infinity) become null, paths and the like their text."""
    terminal.write(json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def diagnostic_json(found: Diagnostic) -> Json:
    position = found.position
    return {
        "file": position.file,
        "line": position.line,
        "column": position.column,
        "severity": found.severity,
        "message": found.message,
    }


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Rows in aligned columns; `right` are the columns of numbers. Nothing is cut: a pipe has no width."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if index in right else cell.ljust(width) for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines


def plural(number: int, noun: str) -> str:
    """`1 module`, `2 modules`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
