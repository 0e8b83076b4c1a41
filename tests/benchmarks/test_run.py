"""`python benchmarks/run.py`: the list, a run with its tables, the report, and the error for a wrong name."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

PROGRAM = """\
\"\"\"How many rows are asked for? As many as come.\"\"\"

import argparse
import sys

from record import write_rows

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--fail", action="store_true")
    arguments = parser.parse_args()
    print("printed while it ran", flush=True)
    if arguments.rows:
        write_rows("rows", [{"number": n, "name": f"[b]row {n}", "always": "same", "empty": ""} for n in range(arguments.rows)])
    if arguments.fail:
        sys.exit(3)
"""
PLAIN = '"""Draws existing results."""\nif __name__ == "__main__":\n    raise SystemExit("not to be run for its help")\n'
SLOW = """\
import time

if __name__ == "__main__":
    try:
        print("begun", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(0.5)  # longer than an impatient parent would wait
        print("cleaned up", flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A benchmarks folder with programs that take no time."""
    made = tmp_path / "benchmarks"
    made.mkdir()
    for name in ("run.py", "_report.py", "record.py"):
        shutil.copy(ROOT / "benchmarks" / name, made)
    for name, text in (("rows", PROGRAM), ("plain", PLAIN), ("slow", SLOW)):
        (made / f"{name}.py").write_text(text)
    return made


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder.parent)


def test_benchmarks_are_listed_with_the_questions_they_answer() -> None:
    result = run(ROOT / "benchmarks", "--list")
    assert result.returncode == 0
    assert "serve                 How does `moegraft serve` compare with llama.cpp's server under load?" in result.stdout
    measured, drawn = result.stdout.split("Plots and tables of results")
    assert "\ncpu_experts " in measured and "\nreadme_tables " in drawn and "\nreport " in drawn
    assert "\nrecord " not in result.stdout and "\nrun " not in result.stdout


def test_a_run_prints_its_tables_and_their_paths(folder: Path) -> None:
    result = run(folder, "rows", "--rows", "50")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("printed while it ran\nrows\nnumber  name\n     0  [b]row 0\n")
    assert "[b]row 39" in result.stdout and "[b]row 40" not in result.stdout and "and 10 more rows, in the file" in result.stdout
    assert "the same in every row: always same, hardware " in result.stdout and "empty" not in result.stdout
    assert result.stdout.endswith(f"written: {folder / 'results' / 'rows.csv'}\n")


def test_exit_codes(folder: Path) -> None:
    nothing = run(folder, "rows", "--rows", "0")
    assert (nothing.returncode, nothing.stdout) == (0, "printed while it ran\n")
    failed = run(folder, "rows", "--fail")
    assert failed.returncode == 1 and failed.stderr == "rows failed with exit code 3\n" and "written: " in failed.stdout
    assert run(folder, "rows", "--wrong").returncode == 2


def test_the_help_of_a_benchmark_is_its_own(folder: Path) -> None:
    assert "--rows ROWS" in run(folder, "rows", "--help").stdout
    plain = run(folder, "plain", "--help")
    assert (plain.returncode, plain.stdout) == (0, "Draws existing results.\n\nplain has no options.\n")
    assert "report --out report.html" in run(folder, "--help").stdout


def test_ctrl_c_waits_for_the_benchmark_to_clean_up(folder: Path) -> None:
    command = [sys.executable, str(folder / "run.py"), "slow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "begun\n"
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        output, errors = running.communicate(timeout=60)
    assert (running.returncode, output, errors) == (130, "cleaned up\n", "")


@pytest.mark.parametrize(("name", "near"), [("plane", "plain"), ("reports", "report"), ("qqqq", None)])
def test_the_nearest_name_is_suggested_for_an_unknown_one(folder: Path, name: str, near: str | None) -> None:
    result = run(folder, name)
    assert result.returncode == 2
    assert f"no benchmark '{name}'; " + (f"did you mean '{near}'?" if near else "known are: plain, rows, slow, report") in result.stderr


def test_the_report_is_written_to_the_given_file(folder: Path) -> None:
    run(folder, "rows")
    out = folder.parent / "page.html"
    result = run(folder, "report", "--out", str(out))
    assert result.returncode == 0 and result.stdout == f"{out}: 1 results and 0 plots, {out.stat().st_size:,} bytes\n"
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert run(folder, "report", "--out", str(folder / "no" / "page.html")).returncode == 2
    (folder / "results" / "rows.csv").write_text("a,b\n1\n")
    damaged = run(folder, "report", "--out", str(out))
    assert damaged.returncode == 2 and "rows.csv:2: 1 cells under 2 columns" in damaged.stderr


def test_the_commands_of_the_readme_work(tmp_path: Path) -> None:
    """Run on a copy, to keep the results of this checkout, and with less work."""
    copied = tmp_path / "benchmarks"
    shutil.copytree(ROOT / "benchmarks", copied, ignore=shutil.ignore_patterns("__pycache__"))
    start = "python benchmarks/run.py"
    documents = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
    text = "\n".join(path.read_text(encoding="utf-8") for path in documents if path.is_file())
    lines = [line for line in text.splitlines() if line.startswith(start)]
    assert len(lines) >= 3
    for line in lines:
        arguments = shlex.split(line.removeprefix(start), comments=True)
        less = ["--rounds", "2", "--prompt", "32", "--new", "4"] if "demo_speed" in arguments else []
        result = run(copied, *arguments, *less)
        assert result.returncode == 0, (line, result.stderr)
        assert not less or (f"written: {copied / 'results' / 'demo_speed.csv'}" in result.stdout and "cpu-exact" in result.stdout)
    assert (tmp_path / "report.html").is_file()
