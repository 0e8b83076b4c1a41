"""The commands of the guide work as they stand there, one after the other, on the bundled model."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from moegraft.injection.cli.moegraft import app
from moegraft.injection.predict import store
from moegraft.injection.predict.measure import Measurements, Rate
from moegraft.injection.verify.tolerances import BY_WEIGHTS

Run = Callable[..., Result]
GUIDE = (Path(__file__).parents[3] / "rules" / "README.md").read_text(encoding="utf-8")
ANY = Rate(10.0, 100.0)
EXITS = {"diff": 1}  # the two files do differ


def commands() -> list[list[str]]:
    _, _, block = GUIDE.partition("<!-- tested commands -->\n```sh\n")
    return [shlex.split(line, comments=True) for line in block.partition("```")[0].splitlines()]


def test_every_command_of_the_guide_works(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    store.save(Measurements(10.0, dict.fromkeys(BY_WEIGHTS, ANY), dict.fromkeys(BY_WEIGHTS, ANY), 0.1, 0.0))  # measuring takes a minute
    for program, *arguments in commands():
        result = run(*arguments)
        assert program == "moegraft"
        assert result.exit_code == EXITS.get(arguments[0], 0), (arguments, result.output)


def test_the_guide_names_every_command() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback is not None}
    names |= {group.name for group in app.registered_groups if group.name}
    assert {arguments[1] for arguments in commands()} | {"schema", "serve"} == names, "serve does not end by itself: its own tests run it"


def test_the_guide_has_the_errors_of_the_table() -> None:
    for name, expected in BY_WEIGHTS.items():
        assert any(
            f"{name} {shown}" in GUIDE
            for shown in (
                f"{expected.typical:.2g}",
                f"{expected.typical:.0e}".replace("e-0", "e-"),
                f"{expected.typical:.1e}".replace("e-0", "e-"),
            )
        ), name
