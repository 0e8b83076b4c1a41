"""`moegraft calibrate`: thresholds for a model from a text, and what leaving neurons out costs it."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moegraft.injection.cli.exits import FINDINGS, user_errors
from moegraft.injection.cli.options import BUNDLED, PROGRAM, GgufOption, JsonOption, OptionsError, TrustOption, VarOption, model_options
from moegraft.injection.cli.output import Json, Terminal, columns, open_terminal, plural, write_json

if TYPE_CHECKING:
    import torch

    from moegraft.injection.calibration import CalibrationOptions
    from moegraft.injection.cli.loading import LoadedModel
    from moegraft.injection.cli.options import ModelOptions
    from moegraft.operators.sparse.calibration import Calibration
    from moegraft.operators.sparse.thresholds import Thresholds

TARGETS = (0.5, 0.7, 0.85)
MOST_CHARACTERS = 32  # that one token of a text stands for on average


@user_errors(PROGRAM, wrong_rules=FINDINGS)
def calibrate(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The thresholds file to write.")],
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="Hub id or folder; none: the bundled model.")] = None,
    rules: Annotated[
        str | None, typer.Option("--rules", metavar="FILE", help="Rule file, or a shipped one's name; none: the one for the model's type.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="Text like what the model will see; none: a short one.")
    ] = None,
    target: Annotated[
        list[float] | None, typer.Option("--target", metavar="SHARE", help="Sparsity to try, as 0.85; may be repeated. Default: three.")
    ] = None,
    scope: Annotated[
        Literal["routed", "total"],
        typer.Option("--scope", "--counts", help="What targets are shares of: routed neurons, or shared ones too."),
    ] = "routed",
    mode: Annotated[
        Literal["layer", "global"], typer.Option("--mode", help="A threshold for each layer, or one for all, in the trials.")
    ] = ("layer"),
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="Tokens of the text to take.")] = 65536,
    window: Annotated[int, typer.Option("--window", metavar="N", min=2, help="Tokens of one forward pass.")] = 512,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.png", help="Draw a layer's activations (needs matplotlib).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    threads: Annotated[int, typer.Option("--threads", metavar="N", min=0, help="CPU threads; 0: one for each core.")] = 0,
    var: VarOption = None,
    gguf: GgufOption = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Find the thresholds that let operators leave neurons of experts out, and measure what that costs.

    One pass over the first four fifths of the text finds every quantile of each layer's activations. The last fifth is then read
    with every neuron and with each target: sparsity, perplexity and how often the likeliest next token stays. The file belongs to this
    model's weights; rules name it in 'sparsity' (see the guide), with any target. Exit code 0: it is written; 1: the rules are wrong;
    2: a file or the model cannot be read, or the command is wrong.
    """
    if out.exists() and not force:
        raise OptionsError(f"{out} is there already; give --force to write over it, or --out FILE")
    for path in (out, *([report] if report is not None else [])):
        if not path.parent.is_dir():
            raise OptionsError(f"{path.parent}: no such folder to write {path.name} to")
    options = model_options(model, rules, var, gguf=gguf, threads=threads, trust_remote_code=trust_remote_code)
    content = text.read_bytes() if text is not None else None
    from moegraft.injection.calibration import CalibrationOptions, activation_report
    from moegraft.injection.verify import require_matplotlib

    try:
        run = CalibrationOptions(targets=tuple(target or TARGETS), scope=scope, mode=mode, window=window)
    except ValueError as error:
        raise OptionsError(str(error)) from error
    if report is not None:
        require_matplotlib("--report")  # before minutes of work
    terminal = open_terminal()
    found, calibration = _run(options, content, str(text), tokens, run, terminal)
    from moegraft.operators.sparse.thresholds import write_thresholds

    write_thresholds(found, out)
    if report is not None:
        activation_report(calibration, report)
    if json:
        write_json(terminal, _as_json(found, out))
    else:
        _write(found, out, run, terminal)


def _run(
    options: ModelOptions, content: bytes | None, name: str, tokens: int, run: CalibrationOptions, terminal: Terminal
) -> tuple[Thresholds, Calibration]:
    from moegraft.injection.calibration import CALIBRATION_TEXT, calibrate, describe_source, sparse_rules, work_tokens
    from moegraft.injection.cli.loading import load_model, model_of
    from moegraft.injection.model_source import find_model
    from moegraft.injection.progress import token_bar
    from moegraft.injection.rules import default_rules, read_rules
    from moegraft.operators.registry import load_registry

    registry = load_registry()
    source = find_model(model_of(options), trust_remote_code=options.trust_remote_code, gguf=options.gguf)
    rules = read_rules(options.rules or default_rules(source.config.model_type), vars=options.vars(), registry=registry)
    loaded = load_model(options, terminal, sparse_rules(rules, registry))
    content = CALIBRATION_TEXT.encode() if content is None else content
    ids = _ids(loaded, content, name, tokens)
    about = describe_source(loaded.model, source, name=_short(options.model), text_sha256=hashlib.sha256(content).hexdigest())
    with token_bar(work_tokens(loaded.model, ids, run), "Calibrating", enabled=terminal.notices.is_terminal) as advance:
        return calibrate(loaded.model, about, ids, run, advance)


def _short(model: str | None) -> str:
    """A model's name without the folders of this machine."""
    if model is None:
        return BUNDLED
    return Path(model).resolve().name if Path(model).expanduser().is_dir() else model


def _ids(loaded: LoadedModel, content: bytes, name: str, tokens: int) -> torch.Tensor:
    """
    Raises:
        OptionsError: the text is not UTF-8.
    """
    import torch

    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise OptionsError(f"{name}: not UTF-8 text (offset {error.start})") from error
    text = text[: tokens * MOST_CHARACTERS]  # a tokenizer is slow on what nobody reads
    return torch.tensor(loaded.tokenizer(text, verbose=False)["input_ids"][:tokens], dtype=torch.int64)


def _write(found: Thresholds, out: Path, run: CalibrationOptions, terminal: Terminal) -> None:
    rows: list[tuple[str, ...]] = [("target", "left out", "perplexity", "against all neurons", "same likeliest token")]
    for row in found.held_out:
        against = f"{100 * (row.perplexity / row.dense_perplexity - 1):+.1f} %"
        rows.append((f"{row.target:g}", f"{100 * row.achieved:.1f} %", f"{row.perplexity:.4g}", against, f"{100 * row.agreement:.1f} %"))
    dense = found.held_out[0].dense_perplexity
    lines = [
        f"{plural(len(found.layers), 'layer')} calibrated on {plural(found.tokens, 'token')}",
        f"with every neuron, the perplexity on {plural(found.held_out_tokens, 'token')} held out is {dense:.4g}",
        *columns(rows, right=(0, 1, 2, 3, 4)),
        f"{out}: written; in rules: sparsity: {{target: {found.held_out[-1].target:g}, scope: {run.scope}, thresholds: {out.name}}}",
    ]
    terminal.write("\n".join(lines) + "\n")


def _as_json(found: Thresholds, out: Path) -> Json:
    return {
        "file": out,
        "model": found.model,
        "layers": list(found.layers),
        "tokens": found.tokens,
        "held_out_tokens": found.held_out_tokens,
        "text_sha256": found.text_sha256,
        "held_out": [asdict(row) for row in found.held_out],
    }
