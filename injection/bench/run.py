"""Runs a benchmark in a process of its own and finds what it wrote."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from moegraft.injection.bench.checkout import Benchmark


@dataclass(frozen=True, slots=True)
class Finished:
    """How a benchmark ended, and the results and plots that it wrote."""

    exit_code: int
    written: Sequence[Path]


def run(benchmark: Benchmark, arguments: Sequence[str], output: TextIO | None = None) -> Finished:
    """Runs it to its end, with this Python and in this folder.

    Args:
        output: where what it prints goes; None: to this program's own output.
    """
    results = benchmark.path.parent / "results"
    before = _states(results)
    with subprocess.Popen([sys.executable, str(benchmark.path), *arguments], stdout=output) as running:
        try:
            exit_code = running.wait()
        except KeyboardInterrupt:
            running.wait()  # it heard Ctrl-C as well, and may have servers to end
            raise
    return Finished(exit_code, [path for path, state in _states(results).items() if before.get(path) != state])


def _states(folder: Path) -> Mapping[Path, tuple[int, int]]:
    """When each file was last written, in nanoseconds, and its bytes."""
    found = {}
    for path in sorted(folder.glob("*")):
        if path.suffix in (".csv", ".png"):
            facts = path.stat()
            found[path] = (facts.st_mtime_ns, facts.st_size)
    return found
