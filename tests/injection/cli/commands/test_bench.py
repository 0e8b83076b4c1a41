"""`moegraft bench`: names, a run with its tables, and what is said where there are none."""

from __future__ import annotations

import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from typer.testing import Result

from moegraft.injection.bench import checkout

Run = Callable[..., Result]
PROGRAM = """\
\"\"\"How many rows are asked for? As many as come.

With notes.
\"\"\"

import argparse
import sys
from pathlib import Path

from record import write_rows

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--fail", action="store_true")
    arguments = parser.parse_args()
    print("said while it ran", flush=True)
    if arguments.rows:
        long = "a_figure_with_a_name_that_is_long"
        one = {"always": "same", "empty": ""}
        write_rows("rows", [{"number": n, "name": f"[b]row {n}", long: n, f"{long}er": n, **one} for n in range(arguments.rows)])
    if arguments.fail:
        sys.exit(3)
"""
PLAIN = '"""Draws what was measured."""\nif __name__ == "__main__":\n    raise SystemExit("not to be run for its help")\n'
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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Benchmarks that take no time."""
    made = tmp_path / "benchmarks"
    made.mkdir()
    (made / "rows.py").write_text(PROGRAM)
    (made / "plain.py").write_text(PLAIN)
    (made / "record.py").write_text((ROOT / "benchmarks" / "record.py").read_text(encoding="utf-8"))
    monkeypatch.setattr(checkout, "benchmarks_folder", lambda: made)
    return made


def test_they_are_listed_with_what_they_ask(run: Run, run_json: Callable[..., dict[str, Any]]) -> None:
    result = run("bench")
    assert result.exit_code == 0
    assert "serve                 How many tokens a second does `moegraft serve` make for 1, 8 and 32 clients at once?" in result.stdout
    assert "report " in result.stdout and "record " not in result.stdout
    found = run_json("bench")
    names = {one["name"]: one for one in found["benchmarks"]}
    assert names["cpu_experts"]["measures"] and not names["readme_tables"]["measures"]
    assert names["cpu_experts"]["question"].startswith("How fast is one MoE layer on the CPU")


def test_a_run_shows_its_tables_and_where_they_are(run: Run, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = run("bench", "rows", "--rows", "3")
    assert result.exit_code == 0, result.stderr
    assert capfd.readouterr().out == "said while it ran\n"
    for text in (
        "a_figure_with_a_name_that_is_longer",
        "[b]row 0",
        "[b]row 2",
        "same in every row: always same, hardware ",
        f"written: {folder / 'results' / 'rows.csv'}",
    ):
        assert text in result.stdout
    assert "empty" not in result.stdout


def test_long_tables_say_that_they_go_on(run: Run, folder: Path) -> None:
    result = run("bench", "rows", "--rows", "50")
    assert "[b]row 39" in result.stdout and "[b]row 40" not in result.stdout and "and 10 more rows, in the file" in result.stdout


@pytest.mark.parametrize("arguments", [("rows", "--rows", "2", "--json"), ("--json", "rows", "--rows", "2")])
def test_json_is_all_that_standard_output_has(folder: Path, arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", _program(folder), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder.parent)
    found = json.loads(result.stdout)
    assert found["benchmark"] == "rows" and found["exit_code"] == 0 and found["written"] == [str(folder / "results" / "rows.csv")]
    assert [row["number"] for row in found["results"]["rows"]] == ["0", "1"] and found["results"]["rows"][0]["commit"]
    assert "said while it ran" in result.stderr


def _program(folder: Path) -> str:
    return (
        f"import sys; from pathlib import Path; from moegraft.injection.bench import checkout; sys.argv[0] = 'moegraft';"
        f"sys.argv.insert(1, 'bench'); checkout.benchmarks_folder = lambda: Path({str(folder)!r});"
        "from moegraft.injection.cli.moegraft import main; main()"
    )


def test_exit_codes_are_the_programs(run: Run, folder: Path) -> None:
    assert run("bench", "rows", "--rows", "0").exit_code == 0
    failed = run("bench", "rows", "--fail")
    assert failed.exit_code == 1 and "rows failed: it ended with exit code 3" in failed.stderr
    assert run("bench", "rows", "--wrong").exit_code == 2


def test_a_benchmarks_help_is_its_own(run: Run, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "rows", "--help").exit_code == 0
    assert "--rows ROWS" in capfd.readouterr().out
    plain = run("bench", "plain", "--help")
    assert (plain.exit_code, plain.stdout) == (0, "Draws what was measured.\n\nplain has no options.\n")
    own = run("bench", "--help")
    assert "[NAME] [ARGS]..." in own.stdout and "report" in own.stdout


def test_ctrl_c_ends_a_benchmark_and_leaves_no_traceback_of_ours(folder: Path) -> None:
    (folder / "slow.py").write_text(SLOW)
    command = [sys.executable, "-c", _program(folder), "slow"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder.parent, start_new_session=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "begun\n"
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        output, errors = running.communicate(timeout=60)
    assert (running.returncode, output, errors) == (130, "cleaned up\n", "")


def test_an_unknown_name_is_told_the_nearest(run: Run) -> None:
    for name, near in [("serv", "serve"), ("reports", "report"), ("cpu_expert", "cpu_experts")]:
        result = run("bench", name)
        assert result.exit_code == 2
        assert f"no benchmark '{name}'; did you mean '{near}'?" in result.stderr
    assert "known are: " in run("bench", "qqqq").stderr


@pytest.mark.parametrize("arguments", [("bench",), ("bench", "serve"), ("bench", "report")])
def test_an_installed_wheel_says_so(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    monkeypatch.setattr(checkout, "__file__", str(tmp_path / "moegraft" / "injection" / "bench" / "checkout.py"))
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "not in an installed wheel" in result.stderr and "pip install -e" in result.stderr


def test_the_report_is_written_where_it_is_asked_for(run: Run, run_json: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    result = run("bench", "report", "--out", out)
    assert result.exit_code == 0 and result.stdout.startswith(f"{out}: ")
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    found = run_json("bench", "report", "--out", out)
    assert "serve" in found["results"] and "cpu_model" in found["plots"] and found["commit"] != "unknown"
    assert run("bench", "report", "--out", tmp_path / "no" / "folder.html").exit_code == 2


def test_the_commands_of_the_readme_work(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a copy, for the results of this checkout are to stay; and with less work."""
    copied = tmp_path / "benchmarks"
    shutil.copytree(ROOT / "benchmarks", copied, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(checkout, "benchmarks_folder", lambda: copied)
    monkeypatch.chdir(tmp_path)
    lines = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("moegraft bench")]
    assert len(lines) == 3
    for line in lines:
        arguments = shlex.split(line, comments=True)[1:]
        less = ["--rounds", "2", "--prompt", "32", "--new", "4"] if "demo_speed" in arguments else []
        result = run(*arguments, *less)
        assert result.exit_code == 0, (line, result.output)
        assert not less or (f"written: {copied / 'results' / 'demo_speed.csv'}" in result.stdout and "cpu-exact" in result.stdout)
    assert (tmp_path / "report.html").is_file()


def test_a_terminal_gets_its_width(folder: Path) -> None:
    master, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": "60", "TERM": "xterm"}
    running = subprocess.Popen(
        [sys.executable, "-c", _program(folder), "rows"], stdout=terminal, stderr=subprocess.DEVNULL, env=environment, cwd=folder.parent
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # Linux reports the end of a terminal so
            break
        if not piece:
            break
        shown += piece
    os.close(master)
    assert running.wait() == 0 and b"[b]row 1" in shown and b"\x1b" not in shown
    table = shown.decode().partition("the same in every row")[0].splitlines()
    assert max(map(len, table)) <= 60
    assert any("longer" in line.split() for line in table), "long heads stand in several lines, word by word"
