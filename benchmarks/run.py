"""Runs the benchmarks of this folder by name.

    python benchmarks/run.py --list
    python benchmarks/run.py NAME [OPTION ...]        # the benchmark's own options: NAME --help

A benchmark prints its rows as it measures them, and writes them and its plots to benchmarks/results, where it replaces existing ones. Exit
code 0: it ran; 1: it failed; 2: there is no benchmark of that name, or its arguments are wrong.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from moegraft.injection.cli.output import columns
from moegraft.injection.rules.document import did_you_mean

FOLDER = Path(__file__).parent


def find_benchmarks() -> dict[str, str]:
    """Return the docstring of every program of the folder by name, without importing it."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "\nif __name__ == " in source and path.name != "run.py":
            found[path.stem] = ast.get_docstring(ast.parse(source)) or ""
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every benchmark and the question it answers")
    parser.add_argument("name", metavar="NAME", nargs="?", help="a benchmark")
    parser.add_argument("options", metavar="OPTION", nargs=argparse.REMAINDER, help="options of the benchmark")
    given = parser.parse_args(arguments)
    benchmarks = find_benchmarks()
    if given.name is None:
        print("\n".join(columns([(name, " ".join(about.partition("\n\n")[0].split())) for name, about in benchmarks.items()])))
        print("\nRun one: python benchmarks/run.py NAME; its options: python benchmarks/run.py NAME --help")
        return 0
    if given.name not in benchmarks:
        parser.error(f"no benchmark '{given.name}'{did_you_mean(given.name, list(benchmarks))}")
    return _run(given.name, given.options)


def _run(name: str, options: Sequence[str]) -> int:
    """Run a benchmark in a process of its own and print the paths of what it wrote."""
    before = _modified()
    with subprocess.Popen([sys.executable, str(FOLDER / f"{name}.py"), *options]) as running:
        try:
            exit_code = running.wait()
        except KeyboardInterrupt:
            running.wait()  # the benchmark receives Ctrl-C too, and may have servers to stop
            return 130
    print("".join(f"written: {path}\n" for path, state in _modified().items() if before.get(path) != state), end="")
    if exit_code:
        print(f"{name} failed with exit code {exit_code}", file=sys.stderr)
    return exit_code if exit_code in (0, 2) else 1


def _modified() -> dict[Path, tuple[int, int]]:
    """Return the modification time in nanoseconds and the size in bytes of each result and plot."""
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted((FOLDER / "results").glob("*"))}


if __name__ == "__main__":
    sys.exit(main())
