"""Results as CSV rows that say where they come from: hardware, commit and versions beside every figure."""

from __future__ import annotations

import csv
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"


def hardware() -> str:
    """The CPU's name and the number of its cores, and the GPU's name where there is one."""
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor() or "unknown CPU")
    cores = sum(line.startswith("processor") for line in lines) or 1
    gpu = f" + {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{name}, {cores} cores{gpu}"


def commit() -> str:
    """The short hash of the checked-out commit, with `+` where the tree differs from it."""
    run = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def versions(*packages: str) -> str:
    """`name=version` of each package that is installed."""
    found = []
    for package in packages:
        try:
            found.append(f"{package}={version(package)}")
        except PackageNotFoundError:
            continue
    return " ".join(found)


def write_rows(name: str, rows: Sequence[Mapping[str, object]], packages: Sequence[str] = ("torch", "transformers")) -> Path:
    """Writes `results/NAME.csv`, each row with its provenance, and returns its path. A row that was read from results keeps its own.
    Columns are those of all rows: what failed has no figures, and names its failure.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError(f"{name}: nothing was measured")
    provenance = {"hardware": hardware(), "commit": commit(), "versions": versions(*packages)}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        columns = dict.fromkeys(column for row in rows for column in row if column not in provenance)
        writer = csv.DictWriter(file, [*columns, *provenance], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**provenance, **row} for row in rows)
    return path
