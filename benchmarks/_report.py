"""The benchmarks of this folder, their results, and one HTML page of all results that loads no files and runs no scripts."""

from __future__ import annotations

import ast
import base64
import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import record

PROVENANCE = ("hardware", "commit", "versions")
FIRST_ROWS = 12  # visible rows of a long table; the others are folded
FOLD_FROM = 25  # rows of a long table
_WRITES = re.compile(r"""write_rows\(\s*f?["'](\w+)""")


@dataclass(frozen=True, slots=True)
class Result:
    """One results file; every cell is the file's own text."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def constant(self) -> dict[str, str]:
        """Return the columns with one value in all rows."""
        return {name: self.rows[0][index] for index, name in enumerate(self.columns) if len({row[index] for row in self.rows}) == 1}

    @property
    def modelled(self) -> bool:
        """Whether the times are those of a simulated machine."""
        return any(cell.startswith("modelled") for cell in (*self.columns, *(cell for row in self.rows for cell in row)))

    def without(self, names: Sequence[str]) -> Result:
        kept = [index for index, name in enumerate(self.columns) if name not in names]
        return Result(self.name, [self.columns[index] for index in kept], [[row[index] for index in kept] for row in self.rows])


def read_result(path: Path) -> Result:
    """Read one results file.

    Raises:
        ValueError: the file is not UTF-8 or empty, has a column twice, or has a row of another length than the head.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            columns, *rows = csv.reader(file)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}: not a table of comma-separated values") from error
    if len(set(columns)) < len(columns):
        raise ValueError(f"{path}:1: column {next(name for name in columns if columns.count(name) > 1)!r} occurs twice")
    for number, row in enumerate(rows, 2):
        if len(row) != len(columns):
            raise ValueError(f"{path}:{number}: {len(row)} cells under {len(columns)} columns")
    return Result(path.stem, columns, rows)


def is_number(cell: str) -> bool:
    """Return whether a cell is aligned as a number, such as `2.5`, `64/64` or an empty cell."""
    try:
        float(cell.strip("%").replace("/", "") or 0)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A program of this folder with its results and plots; `about` is its docstring, `source` its source text."""

    name: str
    about: str
    source: str
    results: list[Result] = field(default_factory=list)
    plots: dict[str, bytes] = field(default_factory=dict)  # PNG by name

    @property
    def question(self) -> str:
        """The docstring's first paragraph on one line."""
        return " ".join(self.about.partition("\n\n")[0].split())

    @property
    def measures(self) -> bool:
        """Whether the program writes results; other programs draw or print existing ones."""
        return "write_rows(" in self.source

    def claims(self, result: str) -> int:
        """Return how many leading characters a result's name shares with a name that the program writes; 1 where it mentions the result."""
        stems = (self.name, *_WRITES.findall(self.source))
        return max((len(stem) for stem in stems if result.startswith(stem)), default=int(f'"{result}"' in self.source))


def find_benchmarks(folder: Path) -> dict[str, Benchmark]:
    """Return every program of the folder by name, without results and without importing it."""
    found = {}
    for path in sorted(folder.glob("[!_]*.py")):
        source = path.read_text(encoding="utf-8")
        if "\nif __name__ == " in source and path.name != "run.py":
            found[path.stem] = Benchmark(path.stem, ast.get_docstring(ast.parse(source)) or "", source)
    return found


def gather(folder: Path) -> list[Benchmark]:
    """Return every benchmark that has results or plots in `folder/results`, with these.

    Raises:
        ValueError: a file is not a table.
    """
    benchmarks = [*find_benchmarks(folder).values(), Benchmark("others", "Results that no benchmark here names as its own.", "")]
    for path in sorted((folder / "results").iterdir()):
        claims = [benchmark.claims(path.stem) for benchmark in benchmarks]
        owner = benchmarks[claims.index(max(claims))] if any(claims) else benchmarks[-1]
        if path.suffix == ".csv":
            owner.results.append(read_result(path))
        elif path.suffix == ".png":
            owner.plots[path.stem] = path.read_bytes()
    return [benchmark for benchmark in benchmarks if benchmark.results or benchmark.plots]


def page(benchmarks: Sequence[Benchmark]) -> str:
    """Return the HTML of the page."""
    results = [result for benchmark in benchmarks for result in benchmark.results]
    rows, plots = sum(len(result.rows) for result in results), sum(len(benchmark.plots) for benchmark in benchmarks)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<title>moegraft: benchmark results</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            "<header>",
            "<h1>moegraft: benchmark results</h1>",
            f"<p>{len(results)} results of {rows:,} rows and {plots} plots, commit <code>{escape(record.commit())}</code>. Every figure "
            "is the results file&rsquo;s own text. A commit with a + had uncommitted changes.</p>",
            "</header>",
            '<nav aria-label="Contents">',
            '<h2><a href="#overview">Contents</a></h2>',
            "<ul>",
            *(f'<li><a href="#{escape(benchmark.name)}">{escape(benchmark.name)}</a></li>' for benchmark in benchmarks),
            "</ul>",
            "</nav>",
            "<main>",
            *_overview(benchmarks),
            *(line for benchmark in benchmarks for line in _section(benchmark)),
            "</main>",
            "</body>",
            "</html>\n",
        ]
    )


def _overview(benchmarks: Sequence[Benchmark]) -> Iterator[str]:
    rows = []
    for benchmark in benchmarks:
        for result in benchmark.results:
            measured = _provenance(result)
            rows.append(
                [
                    f'<a href="#{escape(result.name)}.csv">{escape(result.name)}</a>{_badge(result)}',
                    f'<a href="#{escape(benchmark.name)}">{escape(benchmark.name)}</a>',
                    str(len(result.rows)),
                    *(escape(", ".join(measured.get(name, {"not recorded": 0}))) for name in ("commit", "hardware")),
                ]
            )
    yield from ('<section id="overview">', "<h2>Overview</h2>")
    yield from _table("Overview", ["result", "benchmark", "rows", "commit", "hardware"], rows, [False, False, True, False, False])
    yield "</section>"


def _section(benchmark: Benchmark) -> Iterator[str]:
    yield f'<section id="{escape(benchmark.name)}">'
    yield f"<h2>{escape(benchmark.name)}</h2>"
    yield f'<p class="question">{escape(benchmark.question)}</p>'
    notes = benchmark.about.partition("\n\n")[2].strip("\n")
    if notes:
        yield f"<details><summary>How it is measured</summary><pre>{escape(notes)}</pre></details>"
    for result in benchmark.results:
        yield from _article(result, benchmark.plots.get(result.name))
    names = {result.name for result in benchmark.results}
    yield from (_figure(name, png) for name, png in benchmark.plots.items() if name not in names)
    yield "</section>"


def _article(result: Result, plot: bytes | None) -> Iterator[str]:
    yield f'<article id="{escape(result.name)}.csv">'
    yield f"<h3>{escape(result.name)}{_badge(result)}</h3>"
    yield "<dl>"
    measured = _provenance(result)
    for name in PROVENANCE:
        values = measured.get(name, {})
        text = "; ".join(f"{escape(value)} ({count} rows)" for value, count in values.items()) or "not recorded"
        if len(values) == 1:
            yield f'<dt>{name}</dt><dd data-of="{escape(result.name)}" data-column="{name}">{escape(next(iter(values)))}</dd>'
        else:
            yield f"<dt>{name}</dt><dd>{text}</dd>"
    yield "</dl>"
    if plot is not None:
        yield _figure(result.name, plot)
    shown = result.without([name for name, values in measured.items() if len(values) == 1])
    right = [all(is_number(row[index]) for row in shown.rows) for index in range(len(shown.columns))]
    rows = [[escape(cell) for cell in row] for row in shown.rows]
    folded = len(rows) > FOLD_FROM
    yield from _table(result.name, shown.columns, rows[:FIRST_ROWS] if folded else rows, right, csv_name=result.name)
    if folded:
        yield f"<details><summary>The other {len(rows) - FIRST_ROWS:,} of {len(rows):,} rows</summary>"
        yield from _table(result.name, shown.columns, rows[FIRST_ROWS:], right, csv_name=result.name)
        yield "</details>"
    yield "</article>"


def _provenance(result: Result) -> dict[str, Counter[str]]:
    """Return the values of each provenance column with their numbers of rows."""
    return {name: Counter(row[result.columns.index(name)] for row in result.rows) for name in PROVENANCE if name in result.columns}


def _badge(result: Result) -> str:
    return ' <span class="badge">modelled</span>' if result.modelled else ""


def _figure(name: str, png: bytes) -> str:
    data, name = base64.b64encode(png).decode("ascii"), escape(name)
    return f'<figure><img src="data:image/png;base64,{data}" alt="Plot of {name}"><figcaption>{name}.png</figcaption></figure>'


def _table(label: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], csv_name: str = "") -> Iterator[str]:
    """Return an HTML table; cells are HTML, column names text, and `right` are the columns of numbers."""
    align = [' class="n"' if number else "" for number in right]
    attribute = f' data-csv="{escape(csv_name)}"' if csv_name else ""
    yield f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}"><table{attribute}>'
    yield f"<thead><tr>{''.join(f'<th{style}>{escape(name)}</th>' for name, style in zip(columns, align, strict=True))}</tr></thead>"
    yield "<tbody>"
    for row in rows:
        yield f"<tr>{''.join(f'<td{style}>{cell}</td>' for cell, style in zip(row, align, strict=True))}</tr>"
    yield "</tbody></table></div>"


POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fff; --ink: #1c1e21; --faint: #5d6470; --line: #dfe3e8; --shade: #f5f6f8; --accent: #0b57b7; --badge: #8a4b00; --badge-paper: #fff1dc;
}
@media (prefers-color-scheme: dark) {
  :root { --paper: #14161a; --ink: #e4e6ea; --faint: #9aa3af; --line: #2d323a; --shade: #1c1f25; --accent: #8ab8ff; --badge: #ffd39b; --badge-paper: #3a2a12; }
}
* { box-sizing: border-box; }
html { scroll-padding-top: 1rem; }
body {
  margin: 0 auto; padding: 1.5rem clamp(1rem, 3vw, 2.5rem) 4rem; max-width: 96rem;
  background: var(--paper); color: var(--ink);
  font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
}
a { color: var(--accent); text-decoration-thickness: 1px; text-underline-offset: .15em; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .875em; }
h1 { font-size: 1.75rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 0 0 .5rem; }
h3 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
header p, .question { max-width: 48rem; margin: 0 0 1rem; }
header p, dl, figcaption, summary { color: var(--faint); }
nav { border-block: 1px solid var(--line); padding: .75rem 0; margin: 1rem 0 2rem; }
nav h2 { font-size: .95rem; }
nav h2 a, nav li a { text-decoration: none; }
nav li a:hover, nav h2 a:hover { text-decoration: underline; }
nav ul { list-style: none; margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; font-size: .925rem; }
section { padding-top: 1rem; margin-bottom: 3rem; }
section + section { border-top: 1px solid var(--line); padding-top: 2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 .9rem; margin: 0 0 1rem; font-size: .85rem; }
dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 0 0 1.25rem; }
img { display: block; max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line); border-radius: .5rem; padding: .5rem; }
figcaption { font-size: .8rem; margin-top: .3rem; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; margin-bottom: 1rem; }
details .wide { overflow-y: auto; max-height: 40rem; }
table { border-collapse: separate; border-spacing: 0; width: max-content; min-width: 100%; font-size: .85rem; line-height: 1.4; }
th, td { padding: .35rem .75rem; text-align: left; white-space: nowrap; }
td { border-top: 1px solid var(--line); }
th { position: sticky; top: 0; background: var(--shade); font-weight: 600; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
tbody tr:nth-child(even) td { background: color-mix(in srgb, var(--shade) 55%, transparent); }
tbody tr:hover td { background: var(--shade); }
summary { cursor: pointer; font-size: .9rem; padding: .25rem 0; width: fit-content; }
details[open] > summary { margin-bottom: .5rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--shade); border-radius: .5rem; padding: .75rem 1rem; margin: 0 0 1rem; max-width: 70rem; line-height: 1.5; }
.badge { font-size: .72rem; font-weight: 600; color: var(--badge); background: var(--badge-paper); border-radius: 1rem; padding: .1rem .5rem; vertical-align: .1em; }
@media (min-width: 72rem) {
  body { display: grid; grid-template: auto 1fr / 13rem minmax(0, 1fr); column-gap: 2.5rem; }
  header { grid-column: 1 / -1; }
  nav { position: sticky; top: 1rem; align-self: start; max-height: calc(100vh - 2rem); overflow-y: auto; border: 0; padding: 0; margin: 1rem 0 0; }
  nav ul { display: block; }
  nav li { padding: .1rem 0; }
}
@media print {
  nav { display: none; }
  details .wide { max-height: none; overflow: visible; }
  section, figure { break-inside: auto; }
}
"""  # noqa: E501
