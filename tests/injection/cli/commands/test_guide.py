"""The commands of the documentation work as they stand there, page by page, on the bundled model."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.documents import PAGES, ROOT, blocks, the_block
from typer.testing import CliRunner, Result

from moegraft.injection.cli.local_chat import app as chat_app
from moegraft.injection.cli.moegraft import app
from moegraft.injection.demo import demo_path
from moegraft.injection.estimate import measure
from moegraft.injection.estimate import measure as store
from moegraft.injection.estimate.measure import Measurements
from moegraft.injection.verify import BY_WEIGHTS
from moegraft.operators import autoload, cpu
from moegraft.operators.base import Rate
from moegraft.operators.weight_formats import FORMATS

Run = Callable[..., Result]
GUIDE = (ROOT / "rules" / "guide" / "commands.md").read_text(encoding="utf-8")
ANY = Rate(10.0, 100.0)
EXITS = {"diff": 1}  # the two files do differ


# They run until they are stopped, or load and chat: their own tests run them, and here their options are read.
READ_ONLY = ("serve",)
MODEL = "path/or/hub-id"
TEXT = "Speak, what is it that thou wouldst have of me? " * 60
GIVEN = {  # what a page's commands find in the folder
    "README.md": {"rules.yaml": "extends: cpu\n", "mine.txt": TEXT},
    "recipes.md": {
        "two-gpus.yaml": next(block.text for block in blocks("yaml") if "cuda:1" in block.text and "extends" in block.text),
        "mine.txt": TEXT,
    },
    "ktransformers.md": {"theirs.yaml": the_block("", "theirs").text},
}


def lines(page: Path) -> Iterator[list[str]]:
    """The commands of a page that are ours, word by word; what is piped into one is left out."""
    for block in blocks("sh"):
        for line in block.text.splitlines() if block.page == page else ():
            words = shlex.split(line.rpartition(" | ")[2], comments=True)
            if words[:1] in (["moegraft"], ["local_chat"]):
                yield [demo_path().as_posix() if word == MODEL else word for word in words]


def commands() -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in the_block("sh", "tested commands").text.splitlines()]


def read_options(program: str, arguments: list[str]) -> int:
    """The exit code of a command that only reads its options and shows its help: 2 for an option that is not there."""
    return CliRunner().invoke({"moegraft": app, "local_chat": chat_app}[program], [*arguments, "--help"]).exit_code


@pytest.mark.parametrize("page", [page for page in PAGES if list(lines(page))], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_of_the_pages_works(page: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    rates = Measurements(10.0, dict.fromkeys(BY_WEIGHTS, ANY), dict.fromkeys(BY_WEIGHTS, ANY), 0.1, 0.0)
    monkeypatch.setattr(measure, "measure", lambda progress, disk=None: rates)  # takes a minute
    monkeypatch.setattr(cpu, "instruction_sets", list)  # tested, in seconds, where the doctor is
    store.save(rates)
    monkeypatch.setattr(autoload, "MARKER", tmp_path / "autoload")  # not in the environment of the tests
    monkeypatch.setattr(autoload, "is_installed", lambda: True)
    for name, text in GIVEN.get(page.name, {}).items():
        Path(name).write_text(text, encoding="utf-8")
    for program, *arguments in lines(page):
        assert read_options(program, arguments) == 0, (program, arguments)
        if program == "moegraft" and arguments[0] not in READ_ONLY:
            result = run(*arguments)
            assert result.exit_code == EXITS.get(arguments[0], 0), (arguments, result.output)


def test_an_option_that_is_not_there_would_be_found() -> None:
    assert read_options("moegraft", ["serve", "--prot", "8000"]) == 2
    assert read_options("local_chat", ["--tmeperature", "1"]) == 2


def test_the_guide_names_every_command() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback is not None}
    names |= {group.name for group in app.registered_groups if group.name}
    assert {arguments[1] for arguments in commands()} | {"schema", "serve"} == names, "serve does not end by itself: its own tests run it"


def test_the_guide_has_the_errors_of_the_table() -> None:
    for weight_type, expected in BY_WEIGHTS.items():
        found = FORMATS[weight_type]
        name = weight_type if not found.stored else "FP8" if found.floats else "other formats of files"
        assert any(
            f"{name} {shown}" in GUIDE
            for shown in (
                f"{expected.typical:.2g}",
                f"{expected.typical:.0e}".replace("e-0", "e-"),
                f"{expected.typical:.1e}".replace("e-0", "e-"),
            )
        ), name


def test_the_guide_names_every_format() -> None:
    text = (ROOT / "rules" / "guide" / "formats.md").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", text))
    assert {form.gguf or name for name, form in FORMATS.items()} <= words
