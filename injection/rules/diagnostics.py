"""What is found wrong in a rule file, each finding at its line and column, all reported together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal, NoReturn

from moegraft.operators.errors import RuleFileError

Severity = Literal["error", "warning", "notice"]
MAX_ERRORS = 100  # a damaged file could have tens of thousands; nobody mends by the hundred
MAX_WORD = 100  # difflib is quadratic in a word's length


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place in a rule file; line and column count from 1."""

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
    """Every finding of a rule file, or of a plan, that has at least one error; `diagnostics` has them in the order of the files."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics: tuple[Diagnostic, ...] = tuple(diagnostics)
        super().__init__("\n".join(map(str, self.diagnostics)))


@dataclass(slots=True)
class Findings:
    """Collects findings while reading goes on, so that one run shows them all."""

    diagnostics: list[Diagnostic] = field(default_factory=list)
    errors: int = 0
    _void: set[Position] = field(default_factory=set)

    def error(self, position: Position, message: str) -> None:
        """
        Raises:
            RuleErrors: this is one error too many.
        """
        if position in self._void:
            return
        self.diagnostics.append(Diagnostic(position, "error", message))
        self.errors += 1
        if self.errors == MAX_ERRORS:
            self.diagnostics.append(Diagnostic(position, "notice", f"stopped after {MAX_ERRORS} errors"))
            raise RuleErrors(self.diagnostics)

    def void(self, position: Position, message: str) -> None:
        """Reports an error in a value; what else would be said of that value follows from it and is not."""
        self.error(position, message)
        self._void.add(position)

    def stop(self, position: Position, message: str) -> NoReturn:
        """Reports an error past which nothing can be read.

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
        """All findings by file, in the order in which files were first found at fault, then by line and column."""
        files = list(dict.fromkeys(finding.position.file for finding in self.diagnostics))
        return tuple(sorted(self.diagnostics, key=lambda finding: (files.index(finding.position.file), finding.position)))

    def raise_errors(self) -> None:
        """
        Raises:
            RuleErrors: an error has been found; warnings and notices go with it.
        """
        if self.errors:
            raise RuleErrors(self.in_order())


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be, whatever its case."""
    if len(word) > MAX_WORD:
        return None
    by_lower = {name.lower(): name for name in known}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error's sentence: the near miss, else everything that is known."""
    names = list(known)
    near = nearest(word, names)
    if near is not None:
        return f"; did you mean '{near}'?"
    return f"; known are: {', '.join(names)}" if names else ""


def shown(text: str) -> str:
    """A value as messages quote it, cut where it is long."""
    return f"'{text}'" if len(text) <= MAX_WORD else f"'{text[: MAX_WORD - 3]}...'"
