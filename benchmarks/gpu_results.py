"""Write what calls of gpu_day.py have measured as results: `results/gpu_models.csv`, `gpu_kernels.csv` and `gpu_probes.csv`.

    python benchmarks/gpu_results.py day1 day2 --commit 1a2b3c4

Each folder is the output of a call that built moegraft, whose rows name the GPU, the host and the versions. Rows of the files stay where
no new ones are of the same commit, GPU and case.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gpu_day import Rows
from harness.record import commit, read_rows, write_rows

Row = dict[str, Any]
LEFT_OUT = ("call", "phase", "case", "state", "model")
# Of each file: the phases whose rows it has, and a column that these rows have.
FILES = {"gpu_models": (("models", "qwen3", "shapes"), "p50_ms"), "gpu_kernels": (("kernels",), "gb_s"), "gpu_probes": (("probes",), "")}


def provenance(rows: Iterable[Row], commit: str) -> dict[str, str]:
    """Return the columns of results from the rows of the phase `build`."""
    found = [row for row in rows if row["phase"] == "build"]
    cpu = next(row for row in found if "Model name" in row)
    seen = next(row for row in found if "multi_processor_count" in row)
    python = next(row["python"] for row in found if "python" in row)
    packages = {row["requirement"]: row["found"] for row in found if "requirement" in row and "found" in row}
    other = [f"{name}={next(found for key, found in packages.items() if key.startswith(name))}" for name in ("triton", "transformers")]
    return {
        "gpu": seen["name"],
        "hardware": f"{cpu['Model name']}, family {cpu['CPU family']} model {cpu['Model']}, {cpu['CPU(s)']} cores + {seen['name']}",
        "commit": commit,
        "versions": " ".join([f"python={python}", f"torch={seen['torch']}", *other]),
    }


def results(rows: list[Row], phases: tuple[str, ...], column: str, commit: str) -> Iterator[Row]:
    """Yield the measured rows of phases; of each case those of its last run."""
    about = provenance(rows, commit)
    last = {(row["phase"], row["case"]): row["call"] for row in rows if row.get("state") == "done"}
    # Hosts differ more than GPUs of one name do: what a launch takes them beside a captured step, by the profiles.
    launches = [row for row in rows if row.get("name") == "cudaLaunchKernel" and "captured" in row["system"]]
    launch_us = {row["call"]: round(row["us_a_token"] / row["count"], 1) for row in launches}
    for row in rows:
        place = row["phase"], row.get("case")
        if row["phase"] in phases and "state" not in row and last.get(place) == row["call"] and (not column or column in row):
            yield {
                "gpu": about["gpu"],
                "case": row["case"],
                "call": row["call"].split(" ")[0],  # one machine
                "launch_us": launch_us.get(row["call"], ""),
                **{name: value for name, value in row.items() if name not in LEFT_OUT},
                **{name: value for name, value in about.items() if name != "gpu"},
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--commit", default=commit(), help="that was measured (default: the one that is checked out)")
    given = parser.parse_args()
    for name, (phases, column) in FILES.items():
        new = [row for folder in given.folders for row in results(Rows(folder).read(), phases, column, given.commit)]
        measured = {(row["commit"], row["gpu"], row["case"]) for row in new}
        kept = [row for row in read_rows(name) if (row["commit"], row["gpu"], row["case"]) not in measured]
        if new:
            print(write_rows(name, [*kept, *new]))


if __name__ == "__main__":
    main()
