"""`moegraft verify`: does the injected model compute what the stock model does?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moegraft.injection.cli.options import PROGRAM, GgufOption, JsonOption, OptionsError, TrustOption, VarOption, model_options
from moegraft.injection.cli.output import FINDINGS, Json, Terminal, columns, open_terminal, plural, user_errors, write_json

if TYPE_CHECKING:
    import torch

    from moegraft.injection.cli.loading import LoadedModel
    from moegraft.injection.verify import LayerError, Verification


@user_errors(PROGRAM, wrong_rules=FINDINGS)
def verify(
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="Hub id or folder; default: the bundled model.")] = None,
    rules: Annotated[
        str | None, typer.Option("--rules", metavar="FILE", help="Rule file, or the name of a shipped one; default: cpu.")
    ] = None,
    text: Annotated[Path | None, typer.Option("--text", metavar="FILE", help="Text to compare on; default: a speech of 1863.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=2, help="Tokens of the text to take.")] = 256,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw each layer's error (needs matplotlib).")] = None,
    threads: Annotated[int, typer.Option("--threads", metavar="N", min=0, help="CPU threads; 0: one per core.")] = 0,
    var: VarOption = None,
    gguf: GgufOption = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Compare the injected model with the stock one on real text: every replaced module, the logits and the perplexity.

    One stock module is in memory at a time, so the stock model need not fit. Exit code 0: each error is what its weight type
    explains; 1: one is not, or the rules are wrong; 2: a file or the model cannot be read, or the command is wrong.
    """
    options = model_options(model, rules, var, gguf=gguf, threads=threads, trust_remote_code=trust_remote_code)
    content = text.read_bytes() if text is not None else None
    from moegraft.injection.cli.loading import load_model, model_of
    from moegraft.injection.model_source import find_model
    from moegraft.injection.plots import plot_errors, require_matplotlib
    from moegraft.injection.verify import verify as compare

    if plot is not None:
        require_matplotlib("--plot")  # before minutes of loading
    terminal = open_terminal()
    loaded = load_model(options, terminal)
    ids = _ids(loaded, content, str(text), tokens)
    with terminal.waiting(f"comparing on {len(ids)} tokens"):
        found = compare(loaded.model, find_model(model_of(options), trust_remote_code=trust_remote_code, gguf=gguf), ids)
    if plot is not None:
        plot_errors(found, plot)
    if json:
        write_json(terminal, _as_json(found))
    else:
        _write(found, terminal)
    if not found.ok:
        raise typer.Exit(FINDINGS)


def _ids(loaded: LoadedModel, content: bytes | None, name: str, tokens: int) -> torch.Tensor:
    """
    Raises:
        OptionsError: the text is not UTF-8, or too short to predict anything of.
    """
    import torch

    from moegraft.injection.texts import read_text

    try:
        text = read_text("gettysburg") if content is None else content.decode()
    except UnicodeDecodeError as error:
        raise OptionsError(f"{name}: not UTF-8 text (offset {error.start})") from error
    ids = loaded.tokenizer(text).input_ids[: min(tokens, loaded.context_tokens or tokens)]
    if len(ids) < 2:
        raise OptionsError(f"{name}: {plural(len(ids), 'token')} of text are too few; 2 are needed, and some hundred say more")
    return torch.tensor(ids)


def _write(found: Verification, terminal: Terminal) -> None:
    rows: list[tuple[str, ...]] = [("module", "operator", "weights", "relative error", "cosine", "limit", "")]
    rows += [_row(layer) for layer in found.layers]
    logits = found.logits
    lines = columns(rows, right=(3, 4, 5))
    lines += [f"{path}: no token reaches it" for path in found.unreached]
    lines += [
        f"logits over {logits.positions} positions: KL(stock || injected) {logits.kl_nats:.3g} nats, "
        f"the same likeliest token at {100 * logits.top1_agreement:.1f} %",
        *_sparsity_line(found),
        f"perplexity: stock {logits.stock_perplexity:.4g}, injected {logits.injected_perplexity:.4g}",
        verdict(found),
    ]
    terminal.write("\n".join(lines) + "\n")


def _sparsity_line(found: Verification) -> list[str]:
    if found.left_out is None:
        return []
    return [f"layers were compared with every neuron; the injected logits leave out {100 * found.left_out:.1f} % of the routed ones"]


def _row(layer: LayerError) -> tuple[str, ...]:
    limit = f"{layer.expected.limit:.2g}" if layer.expected else "unknown"
    mark = "" if layer.ok else "<- too far"
    return layer.module, layer.operator, layer.weight_type or "-", f"{layer.relative_error:.3g}", f"{layer.cosine:.6f}", limit, mark


def verdict(found: Verification) -> str:
    """The outcome in one sentence."""
    bad = found.first_bad
    if bad is not None:
        count = sum(not layer.ok for layer in found.layers)
        limit = f"; {bad.weight_type} explains {bad.expected.limit:.2g} at most ({bad.expected.reason})" if bad.expected else ""
        more = f" ({count} of {len(found.layers)} modules are)" if count > 1 else ""
        return f"verdict: WRONG: {bad.module} is the first that is too far from stock{more}: relative error {bad.relative_error:.3g}{limit}"
    if not found.ok:
        return "verdict: WRONG: the logits are not finite although every replaced module is right; the checkpoint itself may be damaged"
    if not found.layers:
        return "verdict: nothing was replaced that text passes"
    reasons = {layer.weight_type: layer.expected.reason for layer in found.layers if layer.expected}
    unknown = sum(layer.expected is None for layer in found.layers)
    known = "; ".join(f"{weights}: {reason}" for weights, reason in reasons.items())
    rest = f"; for {plural(unknown, 'module')} no limit is known" if unknown else ""
    return f"verdict: right: every error is within what its weights explain ({known}){rest}"


def _as_json(found: Verification) -> Json:
    bad = found.first_bad
    return {
        "ok": found.ok,
        "verdict": verdict(found),
        "first_bad": bad.module if bad else None,
        "tokens": found.tokens,
        "layers": [{**asdict(layer), "ok": layer.ok} for layer in found.layers],
        "unreached": found.unreached,
        "logits": asdict(found.logits),
        "left_out": found.left_out,
    }
