"""Results as CSV rows with their provenance: hardware, commit and versions beside every figure."""

from __future__ import annotations

import argparse
import csv
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("torch", "transformers")


def hardware() -> str:
    """The CPU's name, its family and model, and the number of its cores, and the GPU's name where there is one."""
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    first: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        first.setdefault(key.strip(), value.strip())
    name = first.get("model name") or platform.processor() or "unknown CPU"
    if "cpu family" in first and "model" in first:
        name += f", family {first['cpu family']} model {first['model']}"
    cores = sum(line.startswith("processor") for line in lines) or 1
    gpu = f" + {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{name}, {cores} cores{gpu}"


def commit() -> str:
    """The short hash of the checked-out commit, with `+` where tracked files other than results differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return (git("describe", "--always") or "unknown") + ("+" if changed else "")


def versions(*packages: str) -> str:
    """`name=version` of each package that is installed."""
    found = []
    for package in packages:
        try:
            found.append(f"{package}={version(package)}")
        except PackageNotFoundError:
            continue
    return " ".join(found)


def provenance(packages: Sequence[str]) -> dict[str, str]:
    return {"hardware": hardware(), "commit": commit(), "versions": versions(*packages)}


def read_rows(name: str) -> list[dict[str, str]]:
    """Return the rows of `results/NAME.csv`; none where the file does not exist."""
    path = RESULTS / f"{name}.csv"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_rows(name: str, rows: Sequence[Mapping[str, object]], packages: Sequence[str] = PACKAGES) -> Path:
    """Write `results/NAME.csv`, each row with its provenance, and return its path.

    A row that was read from results keeps its own provenance. The columns are the union of all rows' columns: a failed provider's row has
    a `failure` and no figures.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError(f"{name}: nothing was measured")
    return _write(name, rows, provenance(packages))


def _write(name: str, rows: Sequence[Mapping[str, object]], measured: Mapping[str, str]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        columns = dict.fromkeys(column for row in rows for column in row if column not in measured)
        writer = csv.DictWriter(file, [*columns, *measured], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**measured, **row} for row in rows)
    return path


class Recorder:
    """Prints rows and writes them to `results/NAME.csv` as they are measured, so that an interrupted run keeps what it has.

    Args:
        replaces: columns; rows of the file that differ from all new ones in one of these stay. By default the file is replaced.
        write: False only prints.
    """

    def __init__(self, name: str, packages: Sequence[str] = PACKAGES, *, replaces: Sequence[str] = (), write: bool = True) -> None:
        self.name = name
        self.rows: list[dict[str, object]] = []
        self._measured = provenance(packages) if write else None
        self._replaces = replaces
        self._earlier = read_rows(name) if replaces else []

    def add(self, row: Mapping[str, object]) -> None:
        self.rows.append(dict(row))
        print(" ".join(f"{name}={value}" for name, value in row.items() if value != ""), flush=True)
        if self._measured is not None:
            new = {self._key(row) for row in self.rows}
            kept = [row for row in self._earlier if self._key(row) not in new]
            _write(self.name, [*kept, *self.rows], self._measured)

    def _key(self, row: Mapping[str, object]) -> tuple[str, ...]:
        return tuple(str(row.get(name, "")) for name in self._replaces)


NUMBERS = {
    "layers": "layers of the model",
    "new": "decoded tokens",
    "rounds": "rounds, in which providers alternate",
    "seed": "of what is drawn",
    "tokens": "tokens that are measured",
}


def parser(about: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Return a parser with the benchmark's docstring as help, `--no-write`, and options of `NUMBERS` by their defaults."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--no-write", dest="write", action="store_false", help="print the rows and write no file")
    for name, default in numbers.items():
        made.add_argument(f"--{name}", type=int, default=default, help=f"{NUMBERS[name]} (default: {default})")
    return made
