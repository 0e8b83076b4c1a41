"""How much CPU time does building the extension take, by unit, and beside an earlier commit?

    python benchmarks/build_time.py                                             # the units of the last build, as it recorded them
    git worktree add ../base COMMIT && python benchmarks/build_time.py ../base  # full builds of both, alternating

Seconds are those of the compiler and the linker, user and system together: they hardly depend on the number of cores.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.record import ROOT, commit, write_rows


def units() -> dict[str, float]:
    """The CPU seconds of each unit of the last build of this checkout."""
    records = sorted((ROOT / "build" / "objects").glob("*.json"), key=lambda path: path.stat().st_mtime)  # the newest of a name counts
    found = {path.stem.rpartition("-")[0]: json.loads(path.read_text())["cpu_s"] for path in records}
    names = runpy.run_path(str(ROOT / "setup.py"))["UNITS"]  # earlier versions had others, whose records are kept
    return {name: found[name] for name in names if name in found}


def full_build(tree: Path) -> float:
    """Build the extension of a checkout in full, into a temporary folder, and return the CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--force", "--build-lib", f"{folder}/lib", "--build-temp", f"{folder}/temp"]
        process = subprocess.Popen([sys.executable, "setup.py", "-q", "build_ext", *arguments], cwd=tree, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the extension of {tree} cannot be built")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, nargs="?", help="a checkout of an earlier commit")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    if options.base:
        described = subprocess.run(["git", "describe", "--always"], cwd=options.base, capture_output=True, text=True, check=True)
        times: dict[Path, list[float]] = {options.base: [], ROOT: []}
        for _ in range(options.rounds):
            for tree, seconds in times.items():
                seconds.append(full_build(tree))
        for tree, name in ((options.base, described.stdout.strip()), (ROOT, commit())):
            share = statistics.median(a / b for a, b in zip(times[tree], times[options.base], strict=True))
            rows.append({"unit": "all", "cpu_s": round(statistics.median(times[tree]), 1), "of_base": round(share, 2), "commit": name})
    rows += [{"unit": unit, "cpu_s": seconds} for unit, seconds in sorted(units().items(), key=lambda row: -row[1])]
    for row in rows:
        print(f"{row['unit']:22} {row['cpu_s']:6} CPU s", f"{row['of_base']} of the base's at {row['commit']}" if "of_base" in row else "")
    if options.base:
        compiler = subprocess.run(["c++", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
        write_rows(
            "build_time", [{**row, "compiler": f"g++ {compiler}", "rounds": options.rounds} for row in rows], ("pybind11", "setuptools")
        )


if __name__ == "__main__":
    main()
