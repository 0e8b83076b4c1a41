"""Results as they lie in `benchmarks/results`: text, cell by cell, with nothing computed from it."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moegraft.operators.errors import MoegraftError

PROVENANCE = ("hardware", "commit", "versions")


class ResultError(MoegraftError):
    """A results file that is no table."""


@dataclass(frozen=True, slots=True)
class Result:
    """One results file: every cell is the file's own text."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def provenance(self) -> Mapping[str, Mapping[str, int]]:
        """By column that says where rows come from: its values, and how many rows have each."""
        return {name: Counter(row[self.columns.index(name)] for row in self.rows) for name in PROVENANCE if name in self.columns}

    @property
    def constant(self) -> Mapping[str, str]:
        """The columns in which all rows say the same."""
        return {name: self.rows[0][index] for index, name in enumerate(self.columns) if len({row[index] for row in self.rows}) == 1}

    @property
    def modelled(self) -> bool:
        """Whether its times are those of a machine that was only thought of."""
        return any(cell.startswith("modelled") for cell in (*self.columns, *(cell for row in self.rows for cell in row)))

    def without(self, names: Sequence[str]) -> Result:
        """The same without those columns."""
        kept = [index for index, name in enumerate(self.columns) if name not in names]
        rows = [[row[index] for index in kept] for row in self.rows]
        return Result(self.name, [self.columns[index] for index in kept], rows)

    def as_mappings(self) -> list[dict[str, str]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def read_result(path: Path) -> Result:
    """
    Raises:
        ResultError: not UTF-8, empty, a column twice, or a row that is longer or shorter than the head.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            columns, *rows = csv.reader(file)
    except (ValueError, csv.Error) as error:
        raise ResultError(f"{path}: not a table of comma-separated values") from error
    if len(set(columns)) < len(columns):
        raise ResultError(f"{path}:1: the column {next(name for name in columns if columns.count(name) > 1)!r} is there twice")
    for number, row in enumerate(rows, 2):
        if len(row) != len(columns):
            raise ResultError(f"{path}:{number}: {len(row)} cells under {len(columns)} columns")
    return Result(path.stem, columns, rows)


def is_number(cell: str) -> bool:
    """Whether a cell lines up as a number does: `2.5`, `64/64`, nothing."""
    try:
        float(cell.strip("%").replace("/", "") or 0)
    except ValueError:
        return False
    return True
