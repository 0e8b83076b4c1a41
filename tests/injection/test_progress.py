"""What takes long is shown on stderr, in place at a terminal and in lines elsewhere; what is quick shows nothing."""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from moegraft.injection import progress
from moegraft.injection.cli.output import Terminal
from moegraft.injection.progress import ProgressLine

PATIENCE_S = 60  # for a busy machine


def until(found: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not found():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes longer than a tenth of a second is shown, instead of two seconds."""
    monkeypatch.setattr(progress, "QUICK_S", 0.1)


def shows_progress() -> bool:
    return any(thread.name == "moegraft-progress" for thread in threading.enumerate())


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("total", "unit", "half", "shown"),
    [
        (4 << 30, "B", 2 << 30, r"loading: 2\.0 of 4\.0 GiB, \d+ s left\n"),
        (3000, "tokens", 1500, r"loading: 1,500 of 3,000 tokens, \d+ s left\n"),
        (3000, "tokens", 0, r"loading: 0 of 3,000 tokens\n"),
        (0, "B", 0, r"loading\n"),
    ],
)
def test_a_pipe_gets_lines(total: int, unit: str, half: int, shown: str) -> None:
    file = io.StringIO()
    with ProgressLine(Console(file=file, width=200)).stage("loading", total, unit) as advance:
        advance(half)
        until(file.getvalue)
    assert re.fullmatch(shown, file.getvalue())
    assert not shows_progress()


@pytest.mark.usefixtures("soon")
def test_a_terminal_gets_one_line_that_is_replaced_and_erased() -> None:
    file = io.StringIO()
    console = Console(file=file, width=200, force_terminal=True)
    with ProgressLine(console).stage("loading", 4, "layers") as advance:
        until(lambda: "0 of 4 layers" in file.getvalue())
        advance(1)
        until(lambda: "1 of 4 layers" in file.getvalue())
        console.print("a notice")
    lines = file.getvalue().split("\n")
    assert len(lines) == 3 and "a notice" in lines[0] and "a notice" not in lines[1], "the notice alone has a line of its own"
    assert "\x1b[2K" in lines[-1] and not shows_progress()


def test_what_is_quick_or_not_wanted_shows_nothing() -> None:
    file = io.StringIO()
    with ProgressLine(Console(file=file)).stage("planning"):
        pass
    with pytest.raises(ValueError, match="of the body"), ProgressLine(Console(file=file)).stage("loading"):
        raise ValueError("of the body")
    with ProgressLine(Console(file=file), enabled=False).stage("loading"):
        assert not shows_progress()
    assert file.getvalue() == "" and not shows_progress()


@pytest.mark.usefixtures("soon")
def test_nothing_is_shown_once_an_answer_has_begun() -> None:
    out, err = io.StringIO(), io.StringIO()
    terminal = Terminal(out, Console(file=err))
    with terminal.answering("computing the prompt") as write:
        until(err.getvalue)
        write("one ")
        assert not shows_progress()
        write("two")
    assert out.getvalue() == "one two\n" and err.getvalue() == "computing the prompt\n"
