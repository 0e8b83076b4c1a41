"""`moegraft bench`: the benchmarks of a checkout by name, and one page of all their results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from moegraft.injection.cli.exits import FINDINGS, USER_ERROR, user_errors
from moegraft.injection.cli.options import PROGRAM, JsonOption
from moegraft.injection.cli.output import Terminal, open_terminal, plural, write_json

if TYPE_CHECKING:
    from moegraft.injection.bench.checkout import Benchmark
    from moegraft.injection.bench.results import Result

RUN = "NAME"
SHOWN = 40  # rows of a table; the file has them all


class Names(TyperGroup):
    """Takes a benchmark's name where a subcommand's would stand."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # Typer's own click or the package, by its version
        if args[0] in self.commands:
            return super().resolve_command(ctx, args)
        return RUN, self.commands[RUN], args


bench = typer.Typer(cls=Names, no_args_is_help=False, rich_markup_mode="markdown", subcommand_metavar="[NAME] [ARGS]...")


@bench.callback(invoke_without_command=True)
@user_errors(PROGRAM)
def benchmarks(context: typer.Context, json: JsonOption = False) -> None:
    """Run a benchmark of the checkout by its name; without one, list them.

    What follows the name is the benchmark's own (`moegraft bench serve --help`). It writes tables and plots to benchmarks/results, over
    those that are there, and shows them. Exit code 0: it ran; 1: it failed; 2: there is none of that name, or it was called wrongly.
    """
    if context.invoked_subcommand is not None:
        return
    from moegraft.injection.bench.checkout import benchmarks_folder, find_benchmarks

    folder = benchmarks_folder()
    found = list(find_benchmarks(folder).values())
    terminal = open_terminal()
    if json:
        entries = [{"name": one.name, "question": one.question, "measures": one.measures} for one in found]
        write_json(terminal, {"folder": folder, "benchmarks": entries})
    else:
        _list(found, terminal)


# Typer's help option would take the benchmark's own --help.
@bench.command(RUN, hidden=True, context_settings={"ignore_unknown_options": True, "help_option_names": []})
@user_errors(PROGRAM)
def run_one(
    context: typer.Context, name: str, arguments: Annotated[list[str] | None, typer.Argument()] = None, json: JsonOption = False
) -> None:
    from moegraft.injection.bench.checkout import benchmark_named, benchmarks_folder
    from moegraft.injection.bench.results import read_result
    from moegraft.injection.bench.run import run

    json = json or bool(context.parent and context.parent.params["json"])
    benchmark = benchmark_named(name, benchmarks_folder())
    terminal = open_terminal()
    if {"--help", "-h"} & set(arguments or []) and not benchmark.has_options:
        terminal.write(f"{benchmark.about}\n\n{name} has no options.\n")
        return
    terminal.out.flush()
    done = run(benchmark, arguments or [], sys.stderr if json else None)
    results = [read_result(path) for path in done.written if path.suffix == ".csv"]
    if json:
        tables = {result.name: result.as_mappings() for result in results}
        write_json(terminal, {"benchmark": name, "exit_code": done.exit_code, "written": done.written, "results": tables})
    else:
        _show(results, done.written, terminal)
    if done.exit_code:
        terminal.complain(f"{name} failed: it ended with exit code {done.exit_code}")
        raise typer.Exit(USER_ERROR if done.exit_code == USER_ERROR else FINDINGS)


@bench.command(epilog="Example: moegraft bench report --out report.html")
@user_errors(PROGRAM)
def report(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.html", help="Where to write it; a file that is there is replaced.")] = Path(
        "report.html"
    ),
    json: JsonOption = False,
) -> None:
    """Make one HTML page of everything in benchmarks/results: tables, plots, hardware, commits and versions. It opens offline."""
    from moegraft.injection.bench.checkout import benchmarks_folder
    from moegraft.injection.bench.page import page
    from moegraft.injection.bench.report import gather

    found = gather(benchmarks_folder())
    out.write_text(page(found), encoding="utf-8")
    terminal = open_terminal()
    if json or (context.parent and context.parent.params["json"]):
        names = [result.name for result in found.results]
        write_json(terminal, {"report": out, "results": names, "plots": [plot.name for plot in found.plots], "commit": found.commit})
    else:
        terminal.write(
            f"{out}: {plural(len(found.results), 'result')} and {plural(len(found.plots), 'plot')}, {out.stat().st_size:,} bytes\n"
        )


def _list(found: Sequence[Benchmark], terminal: Terminal) -> None:
    from rich.table import Table

    for title, measures in (("Benchmarks", True), ("What draws or tells of results", False)):
        table = Table.grid(padding=(0, 2))
        for one in found:
            if one.measures is measures:
                table.add_row(one.name, one.question)
        if not measures:
            table.add_row("report", "One HTML page of all results.")
        terminal.write(f"{title}\n")
        _print(table, terminal)
        terminal.write("\n")
    terminal.write("Run one: moegraft bench NAME; its options: moegraft bench NAME --help\n")


def _show(results: Sequence[Result], written: Sequence[Path], terminal: Terminal) -> None:
    for result in results:
        _print(_table(result), terminal, narrow=_table(result, narrow=True))
        same = {name: value for name, value in result.constant.items() if value}
        if same:
            terminal.write("the same in every row: " + ", ".join(f"{name} {value}" for name, value in same.items()) + "\n")
        if len(result.rows) > SHOWN:
            terminal.write(f"and {plural(len(result.rows) - SHOWN, 'more row')}, in the file\n")
        terminal.write("\n")
    terminal.write("".join(f"written: {path}\n" for path in written))


def _table(result: Result, *, narrow: bool = False) -> Any:
    """The columns in which rows differ; narrow: no wider than what they hold, with heads of several lines."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from moegraft.injection.bench.results import is_number

    shown = result.without(list(result.constant)) if len(result.rows) > 1 else result
    rows = shown.rows[:SHOWN]
    table = Table(title=result.name, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, name in enumerate(shown.columns):
        number = all(is_number(row[index]) for row in shown.rows)
        head = name.replace("_", " ") if narrow else name
        most = max(map(len, [*(row[index] for row in rows), *head.split()])) if narrow else None
        table.add_column(Text(head), justify="right" if number else "left", overflow="fold", max_width=most)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _print(table: Any, terminal: Terminal, narrow: Any = None) -> None:
    """In the terminal's width, for which `narrow` is taken where the other is too wide; in a pipe nothing is folded."""
    from rich.console import Console

    console = Console(file=terminal.out, highlight=False, markup=False, emoji=False, color_system=None)
    if not terminal.out.isatty():
        console.width = 100_000
        console.width = console.measure(table).maximum
    elif narrow is not None and console.measure(table, options=console.options.update(width=100_000)).maximum > console.width:
        table = narrow
    console.print(table)
