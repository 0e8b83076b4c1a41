"""Findings in rule files, each with line and column, reported together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal, NoReturn

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
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


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
