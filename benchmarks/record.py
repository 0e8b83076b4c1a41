"""Results as CSV rows with their provenance: hardware, commit and versions beside every figure."""

from __future__ import annotations

import csv
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"


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


def write_rows(name: str, rows: Sequence[Mapping[str, object]], packages: Sequence[str] = ("torch", "transformers")) -> Path:
    """Write `results/NAME.csv`, each row with its provenance, and return its path.

    A row that was read from results keeps its own provenance. The columns are the union of all rows' columns: a failed provider's row has
    a `failure` and no figures.

    Raises:
        ValueError: there are no rows.
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


def seconds(run: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def percentiles(samples: Sequence[float] | NDArray[np.float64], unit: str, digits: int) -> dict[str, float]:
    """Return the columns `p20_UNIT`, `p50_UNIT` and `p80_UNIT`, linearly interpolated; there must be a sample."""
    return {f"p{share}_{unit}": round(float(np.percentile(samples, share)), digits) for share in (20, 50, 80)}


def with_speedups(rows: Sequence[Mapping[str, object]], conditions: Sequence[str], ms: str) -> list[dict[str, object]]:
    """Return each row with its speed over the systems `all_cpu` and `fixed` under equal `conditions`, by the column `ms`."""

    def over(row: Mapping[str, object], system: str) -> float:
        same = (other for other in rows if other["system"] == system and all(other[key] == row[key] for key in conditions))
        found = next(same, None)
        return float("nan") if found is None else round(float(str(found[ms])) / float(str(row[ms])), 3)

    return [{**row, "over_all_cpu": over(row, "all_cpu"), "over_fixed": over(row, "fixed")} for row in rows]
