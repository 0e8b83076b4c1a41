"""How much CPU time did the last build of the extension take, by unit?

Seconds are those of the compiler and the linker, user and system together: they hardly depend on the number of cores.
"""

from __future__ import annotations

import json
import runpy

from harness.record import ROOT


def units() -> dict[str, float]:
    """Return the CPU seconds of each unit of the last build of this checkout."""
    records = sorted((ROOT / "build" / "objects").glob("*.json"), key=lambda path: path.stat().st_mtime)  # the newest of a name counts
    found = {path.stem.rpartition("-")[0]: json.loads(path.read_text())["cpu_s"] for path in records}
    names = runpy.run_path(str(ROOT / "setup.py"))["UNITS"]  # earlier versions had others, whose records are kept
    return {name: found[name] for name in names if name in found}


if __name__ == "__main__":
    for unit, seconds in sorted(units().items(), key=lambda row: -row[1]):
        print(f"{unit:22} {seconds:6} CPU s")
