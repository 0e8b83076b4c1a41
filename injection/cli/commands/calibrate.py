"""`moegraft calibrate`: find a model's sparsity thresholds from a text and measure what they cost, or record the text's routing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from moegraft.injection.cli.options import PROGRAM, JsonOption, LoadedModelOptions, OptionsError, check_new_file, option, takes_options
from moegraft.injection.cli.output import FINDINGS, Json, columns, open_terminal, plural, user_errors, write_result
from moegraft.injection.texts import text_content

if TYPE_CHECKING:
    from moegraft.operators.routing_trace import Trace
    from moegraft.operators.sparsity import Thresholds


@user_errors(PROGRAM, wrong_rules=FINDINGS)
@takes_options
def calibrate(
    options: LoadedModelOptions,
    out: Annotated[Path | None, option("--out -o", "FILE", "The thresholds file to write.")] = None,
    routing: Annotated[
        Path | None, option("--routing", "FILE.npz", "Record the routers' choices: a profile for expert caches and weights.")
    ] = None,
    router_maps: Annotated[
        Path | None, option("--router-maps", "FILE", "Fit maps that name the experts of later layers: 'prefetch: {maps: FILE}' in rules.")
    ] = None,
    text: Annotated[Path | None, option("--text", "FILE", "Text like that of the model's later use; default: a short bundled one.")] = None,
    target: Annotated[
        list[float] | None, option("--target", "SHARE", "Sparsity to try, such as 0.85; may be repeated; default: 0.5, 0.7 and 0.85.")
    ] = None,
    scope: Annotated[
        Literal["routed", "total"],
        option("--scope --counts", None, "The neurons that targets are a share of: the routed ones, or shared ones as well."),
    ] = "routed",
    mode: Annotated[Literal["layer", "global"], option("--mode", None, "Try one threshold per layer, or one for all.")] = "layer",
    tokens: Annotated[int, option("--tokens", "N", "Tokens of the text to use.", min=1)] = 65536,
    window: Annotated[int, option("--window", "N", "Tokens of one forward pass.", min=2)] = 512,
    force: Annotated[bool, option("--force", None, "Overwrite existing files.")] = False,
    json: JsonOption = False,
) -> None:
    """Find the thresholds below which operators leave neurons of experts out, and measure what that costs; or record routing.

    With --out, one pass over the first four fifths of the text finds the quantiles of each layer's activations. The last fifth is
    then run with every neuron and with each target, which gives sparsity, perplexity and how often the most likely next token stays
    the same. The file is valid for this model's weights and for any target; rules name it in 'sparsity' (see the guide). With
    --routing, one pass over the whole text records each router's scores and choices, for expert caches. With --router-maps, the first four
    fifths fit a map from the input of each router to the logits of the next three, and the last fifth shows how many experts they name.
    Exit code 0: the files are written; 1: the rules are wrong; 2: a file or the model cannot be read, or the command is wrong.
    """
    if out is None and routing is None and router_maps is None:
        raise OptionsError("nothing to write: give --out FILE for thresholds, --routing FILE.npz for the routing, or --router-maps FILE")
    for name, path in (("--out", out), ("--routing", routing), ("--router-maps", router_maps)):
        if path is not None:
            check_new_file(path, name, force=force)
    if len(given := [path for path in (out, routing, router_maps) if path is not None]) > len(set(given)):
        raise OptionsError(f"two files would be written to {given[0]}: give each its own name")
    content = text_content(text, "calibration")
    from moegraft.injection.calibration import (
        CalibrationOptions,
        fit_router_maps,
        record_routing,
        sparse_rules,
        work_tokens,
    )
    from moegraft.injection.calibration import calibrate as find_thresholds
    from moegraft.injection.cli.models import find_source, load_model, rules_of, short_name, text_ids
    from moegraft.injection.rules import read_rules
    from moegraft.operators.registry import load_registry
    from moegraft.operators.sparsity import write_thresholds

    try:
        run = CalibrationOptions(tuple(target or (0.5, 0.7, 0.85)), scope, mode, window)
    except ValueError as error:
        raise OptionsError(str(error)) from error
    terminal = open_terminal()
    registry = load_registry()
    source = find_source(options)
    rule_file = read_rules(rules_of(options), vars=options.vars(), registry=registry)
    loaded = load_model(options, terminal, rule_file if out is None else sparse_rules(rule_file, registry))
    ids = text_ids(loaded, content, text, tokens)
    lines: list[str] = []
    data: dict[str, object] = {}
    if out is not None:
        about = {"name": short_name(options.model), "text_sha256": hashlib.sha256(content).hexdigest()}
        with terminal.stage("calibrating", work_tokens(loaded.model, ids, run)) as advance:
            thresholds = find_thresholds(loaded.model, source, ids, run, advance, **about)
        write_thresholds(thresholds, out)
        lines += _thresholds_lines(thresholds, out)
        data |= _thresholds_json(thresholds, out)
    if routing is not None:
        name = f"{short_name(options.model)}, {text.name if text is not None else 'the bundled text'}"
        with terminal.stage("recording", len(ids)) as advance:
            trace = record_routing(loaded.model, ids, window, name, advance)
        trace.save(routing)
        lines += _routing_lines(trace, routing)
        data["routing"] = _routing_json(trace, routing)
    if router_maps is not None:
        with terminal.stage("fitting", len(ids)) as advance:
            shares = fit_router_maps(loaded.model, ids, window, router_maps, advance)
        lines += _maps_lines(shares, router_maps)
        data["router_maps"] = {"file": router_maps, "named_by_routers": [a for a, _ in shares], "named_by_maps": [b for _, b in shares]}
    write_result(terminal, lines, data, as_json=json)


def _thresholds_lines(thresholds: Thresholds, out: Path) -> list[str]:
    rows: list[tuple[str, ...]] = [("target", "left out", "perplexity", "against all neurons", "same next token")]
    for row in thresholds.held_out:
        against = f"{100 * (row.perplexity / row.dense_perplexity - 1):+.1f} %"
        rows.append((f"{row.target:g}", f"{100 * row.achieved:.1f} %", f"{row.perplexity:.4g}", against, f"{100 * row.agreement:.1f} %"))
    dense = thresholds.held_out[0].dense_perplexity
    last = thresholds.held_out[-1]
    return [
        f"{plural(len(thresholds.layers), 'layer')} calibrated on {plural(thresholds.tokens, 'token')}",
        f"with every neuron, the perplexity on {plural(thresholds.held_out_tokens, 'held-out token')} is {dense:.4g}",
        *columns(rows, right=(0, 1, 2, 3, 4)),
        f"{out}: written; in rules: sparsity: {{target: {last.target:g}, scope: {last.scope}, thresholds: {out.name}}}",
    ]


def _routing_lines(trace: Trace, routing: Path) -> list[str]:
    return [
        f"routing of {plural(trace.num_tokens, 'token')} in {plural(trace.num_layers, 'layer')}, "
        f"{trace.top_k} of {trace.num_experts} experts per token",
        f"{routing}: written; in rules: cache: {{policy: static, profile: {routing.name}}}",
    ]


def _maps_lines(shares: Sequence[tuple[float, float]], path: Path) -> list[str]:
    rows: list[tuple[str, ...]] = [("layers ahead", "named by routers", "named by maps")]
    rows += [(str(depth), *(f"{100 * share:.1f} %" for share in pair)) for depth, pair in enumerate(shares, 1)]
    worse = ["somewhere the maps name fewer experts than the routers: fit them to more text, or do without them"]
    return [
        "experts of the last fifth of the text, by the number of layers between the input and the router:",
        *columns(rows, right=(0, 1, 2)),
        *(worse if any(fitted < routed for routed, fitted in shares) else []),
        f"{path}: written; in rules: prefetch: {{maps: {path.name}}}",
    ]


def _thresholds_json(thresholds: Thresholds, out: Path) -> Json:
    return {
        "file": out,
        "model": thresholds.model,
        "layers": list(thresholds.layers),
        "tokens": thresholds.tokens,
        "held_out_tokens": thresholds.held_out_tokens,
        "text_sha256": thresholds.text_sha256,
        "held_out": [asdict(row) for row in thresholds.held_out],
    }


def _routing_json(trace: Trace, routing: Path) -> Json:
    sizes = {"tokens": trace.num_tokens, "layers": list(trace.layers), "num_experts": trace.num_experts, "top_k": trace.top_k}
    return {"file": routing, "source": trace.source, **sizes}
