"""What the page of all results says: results and plots by the benchmark that made them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moegraft.injection.bench.checkout import Benchmark, checked_out_commit, find_benchmarks, owner
from moegraft.injection.bench.results import Result, read_result

OTHERS = Benchmark("others", Path(), "Results that no benchmark here names as its own.", True, False, ())


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture as its file has it."""

    name: str
    png: bytes


@dataclass(frozen=True, slots=True)
class Section:
    """One benchmark with what it measured and drew."""

    benchmark: Benchmark
    results: Sequence[Result]
    plots: Sequence[Plot]

    def plots_of(self, result: Result) -> list[Plot]:
        return [plot for plot in self.plots if plot.name == result.name]

    @property
    def other_plots(self) -> list[Plot]:
        names = {result.name for result in self.results}
        return [plot for plot in self.plots if plot.name not in names]


@dataclass(frozen=True, slots=True)
class Report:
    """All results of one checkout."""

    commit: str
    sections: Sequence[Section]

    @property
    def results(self) -> list[Result]:
        return [result for section in self.sections for result in section.results]

    @property
    def plots(self) -> list[Plot]:
        return [plot for section in self.sections for plot in section.plots]


def gather(folder: Path) -> Report:
    """Everything in `folder/results`, by benchmark; benchmarks without results have no section.

    Raises:
        ResultError: a file is no table.
    """
    benchmarks = find_benchmarks(folder)
    results: dict[str, list[Result]] = {}
    plots: dict[str, list[Plot]] = {}
    for path in sorted((folder / "results").glob("*.csv")):
        results.setdefault(_owner_name(path, benchmarks.values()), []).append(read_result(path))
    for path in sorted((folder / "results").glob("*.png")):
        plots.setdefault(_owner_name(path, benchmarks.values()), []).append(Plot(path.stem, path.read_bytes()))
    sections = [
        Section(benchmarks.get(name, OTHERS), results.get(name, []), plots.get(name, []))
        for name in [*benchmarks, OTHERS.name]
        if name in results or name in plots
    ]
    return Report(checked_out_commit(folder), sections)


def _owner_name(path: Path, benchmarks: Iterable[Benchmark]) -> str:
    found = owner(path.stem, benchmarks)
    return (found or OTHERS).name
