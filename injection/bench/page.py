"""A report as one HTML page: everything is in it, nothing is fetched and nothing runs."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files

from moegraft.injection.bench.report import Plot, Report, Section
from moegraft.injection.bench.results import PROVENANCE, Result, is_number

SHOWN = 12  # rows of a long table that stand outside its fold
FOLD_FROM = 25  # a fold for fewer rows would hide little
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(report: Report) -> str:
    """The whole page."""
    style = files("moegraft.injection.bench").joinpath("report.css").read_text(encoding="utf-8")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<title>moegraft: benchmark results</title>",
            f"<style>\n{style}</style>",
            "</head>",
            "<body>",
            *_head(report),
            *_contents(report),
            "<main>",
            *_overview(report),
            *(line for section in report.sections for line in _section(section)),
            "</main>",
            "</body>",
            "</html>\n",
        ]
    )


def _head(report: Report) -> Iterator[str]:
    rows = sum(len(result.rows) for result in report.results)
    yield "<header>"
    yield "<h1>moegraft: benchmark results</h1>"
    yield (
        f"<p>{len(report.results)} results of {rows:,} rows and {len(report.plots)} plots from the checkout at "
        f"<code>{escape(report.commit)}</code>. Every figure is the results file&rsquo;s own text. A commit with a + had changes that were "
        "not committed.</p>"
    )
    yield "</header>"


def _contents(report: Report) -> Iterator[str]:
    yield '<nav aria-label="Contents">'
    yield '<h2><a href="#overview">Contents</a></h2>'
    yield "<ul>"
    for section in report.sections:
        yield f'<li><a href="#{escape(section.benchmark.name)}">{escape(section.benchmark.name)}</a></li>'
    yield "</ul>"
    yield "</nav>"


def _overview(report: Report) -> Iterator[str]:
    yield '<section id="overview">'
    yield "<h2>Overview</h2>"
    yield '<div class="wide" tabindex="0" role="region" aria-label="Overview"><table>'
    yield '<thead><tr><th>result</th><th>benchmark</th><th class="n">rows</th><th>commit</th><th>hardware</th></tr></thead>'
    yield "<tbody>"
    for section in report.sections:
        for result in section.results:
            where = result.provenance
            cells = [
                f'<a href="#{escape(result.name)}.csv">{escape(result.name)}</a>{_badge(result)}',
                f'<a href="#{escape(section.benchmark.name)}">{escape(section.benchmark.name)}</a>',
                str(len(result.rows)),
                *(escape(", ".join(where.get(name, {"not recorded": 0}))) for name in ("commit", "hardware")),
            ]
            yield "<tr>" + "".join(f"<td{_aligned(cell)}>{cell}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table></div>"
    yield "</section>"


def _section(section: Section) -> Iterator[str]:
    benchmark = section.benchmark
    yield f'<section id="{escape(benchmark.name)}">'
    yield f"<h2>{escape(benchmark.name)}</h2>"
    yield f'<p class="question">{escape(benchmark.question)}</p>'
    if benchmark.notes:
        yield f"<details><summary>How it is measured</summary><pre>{escape(benchmark.notes)}</pre></details>"
    for result in section.results:
        yield from _result(result, section.plots_of(result))
    for plot in section.other_plots:
        yield _figure(plot)
    yield "</section>"


def _result(result: Result, plots: Sequence[Plot]) -> Iterator[str]:
    yield f'<article id="{escape(result.name)}.csv">'
    yield f"<h3>{escape(result.name)}{_badge(result)}</h3>"
    yield from _provenance(result)
    yield from map(_figure, plots)
    # What is the same in all rows was said above.
    said = [name for name, values in result.provenance.items() if len(values) == 1]
    yield from _tables(result.without(said))
    yield "</article>"


def _badge(result: Result) -> str:
    return ' <span class="badge">modelled</span>' if result.modelled else ""


def _provenance(result: Result) -> Iterator[str]:
    yield "<dl>"
    for name in PROVENANCE:
        values = result.provenance.get(name)
        if not values:
            yield f"<dt>{name}</dt><dd>not recorded</dd>"
        elif len(values) == 1:
            yield f'<dt>{name}</dt><dd data-of="{escape(result.name)}" data-column="{name}">{escape(next(iter(values)))}</dd>'
        else:
            yield f"<dt>{name}</dt><dd>{'; '.join(f'{escape(value)} ({count} rows)' for value, count in values.items())}</dd>"
    yield "</dl>"


def _figure(plot: Plot) -> str:
    data = base64.b64encode(plot.png).decode("ascii")
    name = escape(plot.name)
    return f'<figure><img src="data:image/png;base64,{data}" alt="Plot of {name}"><figcaption>{name}.png</figcaption></figure>'


def _tables(result: Result) -> Iterator[str]:
    """The rows in one table, or in two where there are many: the first ones, and the rest folded."""
    count = len(result.rows)
    if count <= FOLD_FROM:
        yield from _table(result, result.rows)
        return
    yield from _table(result, result.rows[:SHOWN])
    yield f"<details><summary>The other {count - SHOWN:,} of {count:,} rows</summary>"
    yield from _table(result, result.rows[SHOWN:])
    yield "</details>"


def _table(result: Result, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    numbers = [all(is_number(row[index]) for row in result.rows) for index in range(len(result.columns))]
    align = [' class="n"' if number else "" for number in numbers]
    name = escape(result.name)
    yield f'<div class="wide" tabindex="0" role="region" aria-label="{name}"><table data-csv="{name}">'
    heads = (f"<th{style}>{escape(column)}</th>" for column, style in zip(result.columns, align, strict=True))
    yield f"<thead><tr>{''.join(heads)}</tr></thead>"
    yield "<tbody>"
    for row in rows:
        yield "<tr>" + "".join(f"<td{style}>{escape(cell)}</td>" for cell, style in zip(row, align, strict=True)) + "</tr>"
    yield "</tbody></table></div>"


def _aligned(cell: str) -> str:
    return ' class="n"' if is_number(cell) else ""
