"""Helpers that tests of several folders share."""

import importlib
import sys
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]  # of the repository


def import_benchmark(name: str) -> ModuleType:
    """Import a script of `benchmarks/`, where scripts import each other by their bare names."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def with_long(values: Iterable[Any], *short: Any) -> list[Any]:
    """Return `values` for `parametrize`, of which every run has `short`, and --long has all."""
    import pytest

    values = list(values)
    assert all(value in values for value in short), "a case that no run has"
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=() if value in short else pytest.mark.long)
        for value in values
    ]


def combinations(first: Sequence[Any], *others: Sequence[Any]) -> list[Any]:
    """Return all combinations for `parametrize`: every run has each of the others' with one value of `first`, in turn, and --long has all.

    `first` is the shortest, or every value of it may not come up.
    """
    import pytest  # benchmarks import other modules of this package, where pytest may be missing

    found = []
    turns = product(*(range(len(axis)) for axis in (first, *others)))
    for turn, values in zip(turns, product(first, *others), strict=True):
        marks = () if turn[0] == sum(turn[1:]) % len(first) else (pytest.mark.long,)
        found.append(pytest.param(*values, marks=marks))
    return found
