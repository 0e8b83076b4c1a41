"""`moegraft verify`: compare the injected model with the stock model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moegraft.injection.cli.options import (
    PROGRAM,
    GgufOption,
    JsonOption,
    LoadedModelOption,
    ModelOptions,
    RulesOption,
    ThreadsOption,
    TrustOption,
    VarOption,
    option,
)
from moegraft.injection.cli.output import FINDINGS, Json, Terminal, columns, open_terminal, plural, user_errors, write_json
from moegraft.injection.texts import text_content

if TYPE_CHECKING:
    from moegraft.injection.verify import LayerError, Verification


@user_errors(PROGRAM, wrong_rules=FINDINGS)
def verify(
    model: LoadedModelOption = None,
    rules: RulesOption = None,
    text: Annotated[Path | None, option("--text", "FILE", "Text to use; default: the Gettysburg address.")] = None,
    tokens: Annotated[int, option("--tokens", "N", "Tokens of the text to use.", min=2)] = 256,
    threads: ThreadsOption = 0,
    var: VarOption = None,
    gguf: GgufOption = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Compare the injected model with the stock one on real text: every replaced module, the logits and the perplexity.

    One stock module is in memory at a time, so the stock model need not fit. Exit code 0: every error is within the limit of its
    weight type; 1: one is not, or the rules are wrong; 2: a file or the model cannot be read, or the command is wrong.
    """
    options = ModelOptions(model, rules, var or [], gguf, threads=threads, trust_remote_code=trust_remote_code)
    content = text_content(text, "gettysburg")
    from moegraft.injection.cli.models import load_model, model_of, text_ids
    from moegraft.injection.meta_model import find_model
    from moegraft.injection.verify import verify as compare

    terminal = open_terminal()
    loaded = load_model(options, terminal)
    ids = text_ids(loaded, content, text, min(tokens, loaded.context_tokens or tokens), least=2)
    with terminal.stage(f"comparing on {len(ids)} tokens"):
        verification = compare(loaded.model, find_model(model_of(options), trust_remote_code=trust_remote_code, gguf=gguf), ids)
    if json:
        write_json(terminal, _as_json(verification))
    else:
        _write(verification, terminal)
    if not verification.ok:
        raise typer.Exit(FINDINGS)


def _write(verification: Verification, terminal: Terminal) -> None:
    rows: list[tuple[str, ...]] = [("module", "operator", "weights", "relative error", "cosine", "limit", "")]
    rows += [_row(layer) for layer in verification.layers]
    logits = verification.logits
    left_out = f"{100 * (verification.left_out or 0):.1f} % of the routed ones"
    lines = columns(rows, right=(3, 4, 5))
    lines += [f"{path}: not compared, no token reaches it" for path in verification.unreached]
    lines += [
        f"logits over {logits.positions} positions: KL(stock || injected) {logits.kl_nats:.3g} nats, "
        f"the same likeliest token at {100 * logits.top1_agreement:.1f} %",
        *(
            [f"layers are compared with every neuron; the injected logits leave out {left_out}"]
            if verification.left_out is not None
            else []
        ),
        *(
            [f"layers are compared on a prompt; the injected logits are of decode steps: lossy, as {verification.decode_loss}"]
            if verification.decode_loss is not None
            else []
        ),
        f"perplexity: stock {logits.stock_perplexity:.4g}, injected {logits.injected_perplexity:.4g}",
        verdict(verification),
    ]
    terminal.write("\n".join(lines) + "\n")


def _row(layer: LayerError) -> tuple[str, ...]:
    limit = f"{layer.expected.limit:.2g}" if layer.expected else "unknown"
    mark = "" if layer.ok else "<- too far"
    return layer.module, layer.operator, layer.weight_type or "-", f"{layer.relative_error:.3g}", f"{layer.cosine:.6f}", limit, mark


def verdict(verification: Verification) -> str:
    """Return the outcome in one sentence."""
    bad = verification.first_bad
    if bad is not None:
        count = sum(not layer.ok for layer in verification.layers)
        limit = f"; the limit of {bad.weight_type} is {bad.expected.limit:.2g} ({bad.expected.reason})" if bad.expected else ""
        more = f" of {count} modules" if count > 1 else ""
        return f"verdict: WRONG: {bad.module} is the first{more} too far from stock: relative error {bad.relative_error:.3g}{limit}"
    if not verification.ok:
        return "verdict: WRONG: the logits are not finite although every replaced module is right; the checkpoint itself may be damaged"
    if not verification.layers:
        return "verdict: no replaced module is reached by text"
    reasons = {layer.weight_type: layer.expected.reason for layer in verification.layers if layer.expected}
    unknown = sum(layer.expected is None for layer in verification.layers)
    known = "; ".join(f"{weights}: {reason}" for weights, reason in reasons.items())
    rest = f"; no limit is known for {plural(unknown, 'module')}" if unknown else ""
    return f"verdict: right: every error is within the limit of its weight type ({known}){rest}"


def _as_json(verification: Verification) -> Json:
    bad = verification.first_bad
    return {
        "ok": verification.ok,
        "verdict": verdict(verification),
        "first_bad": bad.module if bad else None,
        "tokens": verification.tokens,
        "layers": [{**asdict(layer), "ok": layer.ok} for layer in verification.layers],
        "unreached": verification.unreached,
        "logits": asdict(verification.logits),
        "left_out": verification.left_out,
        "decode_loss": verification.decode_loss,
    }
