"""Runs the benchmarks of this folder by name, and makes one HTML page of all results.

    python benchmarks/run.py --list
    python benchmarks/run.py NAME [OPTION ...]        # the benchmark's own options: NAME --help
    python benchmarks/run.py report --out report.html

A benchmark writes its tables and plots to benchmarks/results and replaces existing ones. Exit code 0: it ran; 1: it failed; 2: there is no
benchmark of that name, or its arguments are wrong.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from _report import Result, find_benchmarks, gather, is_number, page, read_result

from moegraft.injection.cli.output import columns
from moegraft.injection.rules.diagnostics import did_you_mean

FOLDER = Path(__file__).parent
SHOWN = 40  # printed rows of a table; the file has all rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every benchmark and the question it answers")
    parser.add_argument("name", metavar="NAME", nargs="?", help="a benchmark, or report")
    parser.add_argument("options", metavar="OPTION", nargs=argparse.REMAINDER, help="options of the benchmark")
    given = parser.parse_args(arguments)
    benchmarks = find_benchmarks(FOLDER)
    if given.name is None:
        _print_list()
        return 0
    if given.name == "report":
        return _report(given.options)
    if given.name not in benchmarks:
        parser.error(f"no benchmark '{given.name}'{did_you_mean(given.name, [*benchmarks, 'report'])}")
    benchmark = benchmarks[given.name]
    if {"--help", "-h"} & set(given.options) and "ArgumentParser" not in benchmark.source:
        print(f"{benchmark.about}\n\n{given.name} has no options.")
        return 0
    return _run(given.name, given.options)


def _print_list() -> None:
    benchmarks = find_benchmarks(FOLDER).values()
    for title, measures in (("Benchmarks", True), ("Plots and tables of results", False)):
        rows = [(one.name, one.question) for one in benchmarks if one.measures is measures]
        rows += [] if measures else [("report", "One HTML page of all results.")]
        print("\n".join([title, *columns(rows)]), end="\n\n")
    print("Run one: python benchmarks/run.py NAME; its options: python benchmarks/run.py NAME --help")


def _report(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py report", description="Make one HTML page of benchmarks/results; it opens offline."
    )
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="file to write; an existing one is replaced")
    out: Path = parser.parse_args(arguments).out
    try:
        benchmarks = gather(FOLDER)
        out.write_text(page(benchmarks), encoding="utf-8")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    counts = [sum(len(found) for found in each) for each in zip(*((one.results, one.plots) for one in benchmarks), strict=True)]
    print(f"{out}: {counts[0]} results and {counts[1]} plots, {out.stat().st_size:,} bytes")
    return 0


def _run(name: str, options: Sequence[str]) -> int:
    """Run a benchmark in a process of its own and print the tables that it wrote."""
    before = _modified()
    with subprocess.Popen([sys.executable, str(FOLDER / f"{name}.py"), *options]) as running:
        try:
            exit_code = running.wait()
        except KeyboardInterrupt:
            running.wait()  # the benchmark receives Ctrl-C too, and may have servers to stop
            return 130
    written = [path for path, state in _modified().items() if before.get(path) != state]
    for path in written:
        if path.suffix == ".csv":
            _print_table(read_result(path))
    print("".join(f"written: {path}\n" for path in written), end="")
    if exit_code:
        print(f"{name} failed with exit code {exit_code}", file=sys.stderr)
    return exit_code if exit_code in (0, 2) else 1


def _modified() -> dict[Path, tuple[int, int]]:
    """Return the modification time in nanoseconds and the size in bytes of each result and plot."""
    files = sorted(path for path in (FOLDER / "results").glob("*") if path.suffix in (".csv", ".png"))
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def _print_table(result: Result) -> None:
    """Print the columns in which rows differ, and below them the values that all rows share."""
    shown = result.without(list(result.constant)) if len(result.rows) > 1 else result
    right = [index for index in range(len(shown.columns)) if all(is_number(row[index]) for row in shown.rows)]
    print("\n".join([result.name, *columns([shown.columns, *shown.rows[:SHOWN]], right=right)]))
    same = ", ".join(f"{name} {value}" for name, value in result.constant.items() if value)
    if same:
        print(f"the same in every row: {same}")
    if len(result.rows) > SHOWN:
        print(f"and {len(result.rows) - SHOWN} more rows, in the file")
    print()


if __name__ == "__main__":
    sys.exit(main())
