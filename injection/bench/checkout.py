"""The benchmarks of the checkout that this package runs from: their names, what each asks, and which results are whose."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from moegraft.injection.rules.diagnostics import did_you_mean
from moegraft.operators.errors import MoegraftError

_WRITES = re.compile(r"""write_rows\(\s*f?["'](\w+)""")


class NoCheckoutError(MoegraftError):
    """There are no benchmarks beside this package."""


class UnknownBenchmarkError(MoegraftError):
    """No benchmark has that name."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A program of the benchmarks folder.

    Attributes:
        about: its docstring, whose first paragraph says what it asks.
        measures: it writes results; others draw or tell what was measured before.
        has_options: it reads its arguments, so that it has a --help.
        stems: how the names of its results begin.
    """

    name: str
    path: Path
    about: str
    measures: bool
    has_options: bool
    stems: tuple[str, ...]

    @property
    def question(self) -> str:
        """The first paragraph, in one line."""
        return " ".join(self.about.partition("\n\n")[0].split())

    @property
    def notes(self) -> str:
        """What the docstring says after it."""
        return self.about.partition("\n\n")[2].strip("\n")


def benchmarks_folder() -> Path:
    """
    Raises:
        NoCheckoutError: the package was installed from a wheel.
    """
    folder = Path(__file__).resolve().parents[2] / "benchmarks"  # an editable install may be a tree of links
    if not (folder / "record.py").is_file():
        raise NoCheckoutError(
            f"the benchmarks are in the repository and not in an installed wheel, which this is ({folder.parent}); "
            "in a checkout of it: pip install -e '.[bench,serve]'"
        )
    return folder


def find_benchmarks(folder: Path) -> Mapping[str, Benchmark]:
    """Every program there by name: the files that can be run. None of them is imported."""
    found = {}
    for path in sorted(folder.glob("[!_]*.py")):
        source = path.read_text(encoding="utf-8")
        if "\nif __name__ == " in source:
            stems = tuple(_WRITES.findall(source))
            about = ast.get_docstring(ast.parse(source)) or ""
            found[path.stem] = Benchmark(path.stem, path, about, "write_rows(" in source, "ArgumentParser" in source, (path.stem, *stems))
    return found


def benchmark_named(name: str, folder: Path) -> Benchmark:
    """
    Raises:
        UnknownBenchmarkError: there is none; with the nearest name.
    """
    known = find_benchmarks(folder)
    if name not in known:
        raise UnknownBenchmarkError(f"no benchmark '{name}'{did_you_mean(name, [*known, 'report'])}")
    return known[name]


def owner(result: str, benchmarks: Iterable[Benchmark]) -> Benchmark | None:
    """Who writes `results/RESULT`: the one that names the longest part of its beginning, else one that mentions it."""
    every = list(benchmarks)
    named = [(len(stem), one) for one in every for stem in one.stems if result.startswith(stem)]
    if named:
        return max(named, key=lambda pair: pair[0])[1]
    return next((one for one in every if f'"{result}"' in one.path.read_text(encoding="utf-8")), None)


def checked_out_commit(folder: Path) -> str:
    """The short hash of the checked-out commit, with `+` where the tree differs from it; `unknown` without git."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return run.stdout.strip() or "unknown"
