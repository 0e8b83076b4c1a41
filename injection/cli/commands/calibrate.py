"""`moegraft calibrate`: thresholds for a model from a text with what leaving neurons out costs it, and the routing of the text."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moegraft.injection.cli.options import BUNDLED, PROGRAM, GgufOption, JsonOption, OptionsError, TrustOption, VarOption, model_options
from moegraft.injection.cli.output import FINDINGS, Json, columns, open_terminal, plural, user_errors, write_json

if TYPE_CHECKING:
    import torch

    from moegraft.injection.cli.loading import LoadedModel
    from moegraft.operators.routing_trace import Trace
    from moegraft.operators.thresholds import Thresholds

TARGETS = (0.5, 0.7, 0.85)
MOST_CHARACTERS = 32  # that one token of a text stands for on average


@user_errors(PROGRAM, wrong_rules=FINDINGS)
def calibrate(
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="The thresholds file to write.")] = None,
    routing: Annotated[
        Path | None,
        typer.Option("--routing", metavar="FILE.npz", help="Record what the routers choose: a profile for 'cache: {policy: static}'."),
    ] = None,
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
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="Tokens of the text to use.")] = 65536,
    window: Annotated[int, typer.Option("--window", metavar="N", min=2, help="Tokens of one forward pass.")] = 512,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.png", help="Draw a layer's activations (needs matplotlib).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    threads: Annotated[int, typer.Option("--threads", metavar="N", min=0, help="CPU threads; 0: one for each core.")] = 0,
    var: VarOption = None,
    gguf: GgufOption = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Find the thresholds that let operators leave neurons of experts out, and measure what that costs; or record routing.

    With --out, one pass over the first four fifths of the text finds every quantile of each layer's activations. The last fifth is
    then read with every neuron and with each target: sparsity, perplexity and how often the most likely next token stays the same.
    The file belongs to this model's weights; rules name it in 'sparsity' (see the guide), with any target. With --routing, one pass
    over the whole text records each router's scores and choices, for expert caches. Exit code 0: the files are written; 1: the rules
    are wrong; 2: a file or the model cannot be read, or the command is wrong.
    """
    if out is None and routing is None:
        raise OptionsError("nothing to write: give --out FILE for thresholds, --routing FILE.npz for the routing, or both")
    if out is None and report is not None:
        raise OptionsError("--report draws what thresholds are made from: give --out FILE as well")
    for option, path in (("--out", out), ("--routing", routing)):
        if path is not None and path.exists() and not force:
            raise OptionsError(f"{path} exists; give --force to overwrite it, or {option} with another FILE")
    for path in (out, routing, report):
        if path is not None and not path.parent.is_dir():
            raise OptionsError(f"{path.parent}: no such folder to write {path.name} to")
    options = model_options(model, rules, var, gguf=gguf, threads=threads, trust_remote_code=trust_remote_code)
    content = text.read_bytes() if text is not None else None
    from moegraft.injection.calibration import CalibrationOptions, describe_source, record_routing, sparse_rules, work_tokens
    from moegraft.injection.calibration import calibrate as find_thresholds
    from moegraft.injection.cli.loading import load_model, model_of
    from moegraft.injection.model_source import find_model
    from moegraft.injection.plots import plot_activations, require_matplotlib
    from moegraft.injection.progress import token_bar
    from moegraft.injection.rules import default_rules, read_rules
    from moegraft.injection.texts import read_text
    from moegraft.operators.registry import load_registry
    from moegraft.operators.thresholds import write_thresholds

    try:
        run = CalibrationOptions(targets=tuple(target or TARGETS), scope=scope, mode=mode, window=window)
    except ValueError as error:
        raise OptionsError(str(error)) from error
    if report is not None:
        require_matplotlib("--report")
    terminal = open_terminal()
    registry = load_registry()
    source = find_model(model_of(options), trust_remote_code=trust_remote_code, gguf=gguf)
    rule_file = read_rules(options.rules or default_rules(source.config.model_type), vars=options.vars(), registry=registry)
    loaded = load_model(options, terminal, rule_file if out is None else sparse_rules(rule_file, registry))
    content = read_text("calibration").encode() if content is None else content
    ids = _ids(loaded, content, str(text), tokens)
    lines: list[str] = []
    data: dict[str, object] = {}
    if out is not None:
        about = describe_source(loaded.model, source, name=_short(model), text_sha256=hashlib.sha256(content).hexdigest())
        with token_bar(work_tokens(loaded.model, ids, run), "Calibrating", enabled=terminal.notices.is_terminal) as advance:
            found, calibration = find_thresholds(loaded.model, about, ids, run, advance)
        write_thresholds(found, out)
        if report is not None:
            plot_activations(calibration, report)
        lines += _thresholds_lines(found, out)
        data |= _thresholds_json(found, out)
    if routing is not None:
        name = f"{_short(model)}, {text.name if text is not None else 'the bundled text'}"
        with token_bar(len(ids), "Recording", enabled=terminal.notices.is_terminal) as advance:
            trace = record_routing(loaded.model, ids, window, name, advance)
        trace.save(routing)
        lines += _routing_lines(trace, routing)
        data["routing"] = _routing_json(trace, routing)
    if json:
        write_json(terminal, data)
    else:
        terminal.write("\n".join(lines) + "\n")


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


def _thresholds_lines(found: Thresholds, out: Path) -> list[str]:
    rows: list[tuple[str, ...]] = [("target", "left out", "perplexity", "against all neurons", "same likeliest token")]
    for row in found.held_out:
        against = f"{100 * (row.perplexity / row.dense_perplexity - 1):+.1f} %"
        rows.append((f"{row.target:g}", f"{100 * row.achieved:.1f} %", f"{row.perplexity:.4g}", against, f"{100 * row.agreement:.1f} %"))
    dense = found.held_out[0].dense_perplexity
    last = found.held_out[-1]
    return [
        f"{plural(len(found.layers), 'layer')} calibrated on {plural(found.tokens, 'token')}",
        f"with every neuron, the perplexity on {plural(found.held_out_tokens, 'token')} held out is {dense:.4g}",
        *columns(rows, right=(0, 1, 2, 3, 4)),
        f"{out}: written; in rules: sparsity: {{target: {last.target:g}, scope: {last.scope}, thresholds: {out.name}}}",
    ]


def _routing_lines(trace: Trace, routing: Path) -> list[str]:
    return [
        f"routing of {plural(trace.num_tokens, 'token')} in {plural(trace.num_layers, 'layer')}, "
        f"{trace.top_k} of {trace.num_experts} experts per token",
        f"{routing}: written; in rules: cache: {{policy: static, profile: {routing.name}}}",
    ]


def _thresholds_json(found: Thresholds, out: Path) -> Json:
    return {
        "file": out,
        "model": found.model,
        "layers": list(found.layers),
        "tokens": found.tokens,
        "held_out_tokens": found.held_out_tokens,
        "text_sha256": found.text_sha256,
        "held_out": [asdict(row) for row in found.held_out],
    }


def _routing_json(trace: Trace, routing: Path) -> Json:
    sizes = {"tokens": trace.num_tokens, "layers": list(trace.layers), "num_experts": trace.num_experts, "top_k": trace.top_k}
    return {"file": routing, "source": trace.source, **sizes}
