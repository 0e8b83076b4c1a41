"""Rows have the provenance of their measurement, also when they are written again with new rows."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The benchmarks' module with a temporary folder for results."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from harness import record

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "commit", lambda: "new")
    return record


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        head = next(csv.reader(file))
        assert len(head) == len(set(head)), "a column is there once"
        return [dict(zip(head, row, strict=True)) for row in csv.reader(file)]


def test_a_row_has_its_provenance(record: Any) -> None:
    (row,) = rows(record.write_rows("made", [{"x": 1.5}], packages=("numpy", "no-such-package")))
    assert row["x"] == "1.5" and row["commit"] == "new" and "cores" in row["hardware"]
    assert row["versions"].startswith("numpy=") and "no-such" not in row["versions"]


def test_new_results_are_no_change_of_the_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from harness import record

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "code").write_text("1")
    (tmp_path / "benchmarks" / "results" / "a.csv").write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    clean = record.commit()
    (tmp_path / "benchmarks" / "results" / "a.csv").write_text("2")
    assert record.commit() == clean != "unknown"
    (tmp_path / "code").write_text("2")
    assert record.commit() == clean + "+"


@pytest.mark.parametrize("kept_first", [False, True])
def test_a_kept_row_keeps_its_commit(record: Any, kept_first: bool) -> None:
    kept = {"x": "1", "hardware": "another", "commit": "old", "versions": "numpy=1"}
    new = {"x": 2}
    written = rows(record.write_rows("made", [kept, new] if kept_first else [new, kept]))
    assert {row["x"]: row["commit"] for row in written} == {"1": "old", "2": "new"}
    assert {row["hardware"] for row in written} == {"another", record.hardware()}


def test_writing_no_rows_is_an_error(record: Any) -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        record.write_rows("made", [])
