"""`python benchmarks/run.py`: the list, a run with its rows and files, and the error for a wrong name."""

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

import sys

from harness.record import Recorder, parser

if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=2)
    options.add_argument("--fail", action="store_true")
    given = options.parse_args()
    rows = Recorder("rows", replaces=("number",), write=given.write)
    for number in range(given.rows):
        rows.add({"number": number, "name": f"row {number}", "empty": ""})
    if given.fail:
        sys.exit(3)
"""
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
    shutil.copy(ROOT / "benchmarks" / "run.py", made)
    shutil.copytree(ROOT / "benchmarks" / "harness", made / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in (("rows", PROGRAM), ("slow", SLOW)):
        (made / f"{name}.py").write_text(text)
    return made


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder.parent)


def test_benchmarks_are_listed_with_the_questions_they_answer() -> None:
    result = run(ROOT / "benchmarks", "--list")
    assert result.returncode == 0
    listed = {line.split()[0]: line.split(maxsplit=1)[1] for line in result.stdout.splitlines() if len(line.split()) > 1}
    assert listed["serve"].startswith("How does `moegraft serve` compare with other servers under load?")
    assert {"cpu_experts", "readme_tables", "gpu_day"} <= set(listed) and "run" not in listed and "harness" not in listed


def test_a_run_prints_its_rows_and_the_paths_that_it_wrote(folder: Path) -> None:
    result = run(folder, "rows", "--rows", "3")
    assert result.returncode == 0, result.stderr
    written = f"written: {folder / 'results' / 'rows.csv'}\n"
    assert result.stdout == "".join(f"number={n} name=row {n}\n" for n in range(3)) + written
    assert run(folder, "rows", "--rows", "3", "--no-write").stdout == result.stdout.removesuffix(written)


@pytest.mark.long
def test_an_interrupted_or_a_partial_run_keeps_other_rows(folder: Path) -> None:
    """Rows are written as they are measured, and those of other conditions stay."""
    run(folder, "rows", "--rows", "3")
    path = folder / "results" / "rows.csv"
    path.write_text(path.read_text().replace("row 2", "an earlier row 2").replace("row 0", "an earlier row 0"))
    assert run(folder, "rows", "--rows", "1", "--fail").returncode == 1
    assert [line.split(",")[:2] for line in path.read_text().splitlines()[1:]] == [
        ["1", "row 1"],
        ["2", "an earlier row 2"],
        ["0", "row 0"],
    ]


@pytest.mark.long
def test_exit_codes(folder: Path) -> None:
    nothing = run(folder, "rows", "--rows", "0")
    assert (nothing.returncode, nothing.stdout) == (0, "")
    failed = run(folder, "rows", "--fail")
    assert failed.returncode == 1 and failed.stderr == "rows failed with exit code 3\n" and "written: " in failed.stdout
    assert run(folder, "rows", "--wrong").returncode == 2


def test_the_help_of_a_benchmark_is_its_own(folder: Path) -> None:
    assert "--rows ROWS" in run(folder, "rows", "--help").stdout
    assert "--list" in run(folder, "--help").stdout


def test_ctrl_c_waits_for_the_benchmark_to_clean_up(folder: Path) -> None:
    command = [sys.executable, str(folder / "run.py"), "slow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "begun\n"
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        output, errors = running.communicate(timeout=60)
    assert (running.returncode, output, errors) == (130, "cleaned up\n", "")


@pytest.mark.parametrize(("name", "near"), [("row", "rows"), ("qqqq", None)])
def test_the_nearest_name_is_suggested_for_an_unknown_one(folder: Path, name: str, near: str | None) -> None:
    result = run(folder, name)
    assert result.returncode == 2
    assert f"no benchmark '{name}'; " + (f"did you mean '{near}'?" if near else "known are: rows, slow") in result.stderr


@pytest.mark.long
def test_the_commands_of_the_readme_work(tmp_path: Path) -> None:
    """Run on a copy, to keep the results of this checkout, and with less work."""
    copied = tmp_path / "benchmarks"
    shutil.copytree(ROOT / "benchmarks", copied, ignore=shutil.ignore_patterns("__pycache__"))
    start = "python benchmarks/run.py"
    documents = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
    text = "\n".join(path.read_text(encoding="utf-8") for path in documents if path.is_file())
    lines = [line for line in text.splitlines() if line.startswith(start)]
    assert len(lines) >= 2
    for line in lines:
        arguments = shlex.split(line.removeprefix(start), comments=True)
        less = ["--rounds", "2", "--prompt", "32", "--new", "4"] if "demo_speed" in arguments else []
        result = run(copied, *arguments, *less)
        assert result.returncode == 0, (line, result.stderr)
        assert not less or (f"written: {copied / 'results' / 'demo_speed.csv'}" in result.stdout and "cpu-exact" in result.stdout)
