"""What commands print: one JSON object for programs, or columns for people, which look the same in a pipe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from moegraft.injection.cli.terminal import Terminal
from moegraft.injection.rulefile import Diagnostic

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
