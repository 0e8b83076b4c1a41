"""Where a command writes: answers on stdout and nothing else there, everything about them on stderr."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console

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
