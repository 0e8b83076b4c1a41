"""`moegraft`: commands on rule files, models and this machine."""

from __future__ import annotations

import typer

from moegraft.injection.cli.commands.calibrate import calibrate
from moegraft.injection.cli.commands.doctor import doctor
from moegraft.injection.cli.commands.plan import init, plan
from moegraft.injection.cli.commands.quantize import quantize
from moegraft.injection.cli.commands.rules import check, diff, explain, schema
from moegraft.injection.cli.commands.serve import serve
from moegraft.injection.cli.commands.verify import drafts, verify
from moegraft.injection.cli.options import PROGRAM, VersionOption, option_name

EXIT_CODES = "Exit codes: 0 success; 1 a negative result (wrong rules, does not fit, differs); 2 the command or its input cannot be used."

app = typer.Typer(
    add_completion=True,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",  # joins the lines of paragraphs in docstrings
    epilog=EXIT_CODES,
    context_settings={"token_normalize_func": option_name, "help_option_names": ["--help", "-h"]},
)


@app.callback()
def moegraft(
    show_version: VersionOption = False,
) -> None:
    """Write, check and explain rule files, and predict, verify, measure, calibrate, quantise and serve models.

    To chat with a model, see local_chat.
    """


app.command(epilog="Example: moegraft check rules.yaml --model Qwen/Qwen3-30B-A3B")(check)
app.command(epilog="Example: moegraft explain rules.yaml --model Qwen/Qwen3-30B-A3B --module model.layers.3.mlp.experts")(explain)
app.command(epilog="Example: moegraft diff rules.yaml cpu --model Qwen/Qwen3-30B-A3B")(diff)
app.command(epilog="Example: moegraft init --model Qwen/Qwen3-30B-A3B --goal quality --ram 64GiB")(init)
app.command(epilog="Example: moegraft plan rules.yaml --model Qwen/Qwen3-30B-A3B --context 32768 --ram 64GiB")(plan)
app.command(epilog="Example: moegraft verify --model Qwen/Qwen3-30B-A3B --rules rules.yaml")(verify)
app.command(epilog="Example: moegraft drafts --model Qwen/Qwen3-30B-A3B --rules speculative")(drafts)
app.command(epilog="Example: moegraft calibrate --model Qwen/Qwen3-30B-A3B --text mine.txt --out thresholds.json")(calibrate)
app.command(epilog="Example: moegraft quantize --model Qwen/Qwen3-30B-A3B --weights Q4_K,down=Q6_K --out model.gguf")(quantize)
app.command(epilog="Example: moegraft serve --model Qwen/Qwen3-30B-A3B --rules cpu --port 8000")(serve)
app.command(epilog="Example: moegraft doctor --measure")(doctor)
app.command(epilog="Example: moegraft schema > moegraft.schema.json")(schema)


def main() -> None:
    """The console script."""
    app(prog_name=PROGRAM)


if __name__ == "__main__":
    main()
