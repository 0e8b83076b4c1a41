"""`moegraft verify`: compare the injected model with the stock model; `moegraft drafts`: measure what drafts cost it, and when they pay."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from moegraft.injection.cli.options import PROGRAM, JsonOption, LoadedModelOptions, option, takes_options
from moegraft.injection.cli.output import FINDINGS, Json, columns, open_terminal, plural, user_errors, write_result
from moegraft.injection.texts import text_content

if TYPE_CHECKING:
    from moegraft.injection.verify import LayerError, Verification
    from moegraft.operators.decode.draft_costs import DraftCosts

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)


@user_errors(PROGRAM, wrong_rules=FINDINGS)
@takes_options
def verify(
    options: LoadedModelOptions,
    text: Annotated[Path | None, option("--text", "FILE", "Text to use; default: the Gettysburg address.")] = None,
    tokens: Annotated[int, option("--tokens", "N", "Tokens of the text to use.", min=2)] = 256,
    json: JsonOption = False,
) -> None:
    """Compare the injected model with the stock one on real text: every replaced module, the logits and the perplexity.

    One stock module is in memory at a time, so the stock model need not fit. Exit code 0: every error is within the limit of its
    weight type; 1: one is not, or the rules are wrong; 2: a file or the model cannot be read, or the command is wrong.
    """
    content = text_content(text, "gettysburg")
    from moegraft.injection.cli.models import find_source, load_model, text_ids
    from moegraft.injection.verify import verify as compare

    terminal = open_terminal()
    loaded = load_model(options, terminal)
    ids = text_ids(loaded, content, text, min(tokens, loaded.context_tokens or tokens), least=2)
    with terminal.stage(f"comparing on {len(ids)} tokens"):
        verification = compare(loaded.model, find_source(options), ids)
    write_result(terminal, _lines(verification), _as_json(verification), as_json=json, ok=verification.ok)


def _lines(verification: Verification) -> list[str]:
    rows: list[tuple[str, ...]] = [("module", "operator", "weights", "relative error", "cosine", "limit", "")]
    rows += [_row(layer) for layer in verification.layers]
    logits = verification.logits
    left_out = f"{100 * (verification.left_out or 0):.1f} % of the routed ones"
    return [
        *columns(rows, right=(3, 4, 5)),
        *(f"{path}: not compared, no token reaches it" for path in verification.unreached),
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


@user_errors(PROGRAM, wrong_rules=FINDINGS)
@takes_options
def drafts(
    options: LoadedModelOptions,
    text: Annotated[Path | None, option("--text", "FILE", "Text to verify; default: the Gettysburg address.")] = None,
    longest: Annotated[int, option("--longest", "N", "Tokens of the longest draft.", min=1, max=15)] = 7,
    json: JsonOption = False,
) -> None:
    """Measure drafting and verifying 1 to N tokens, and show the acceptance at which each length of draft is as fast as plain decoding.

    The drafters are n-grams, the MTP layers or the EAGLE-3 head that the rules load, and fewer experts as the rules' speculative_draft has
    them, or one expert for each token without one. The text is given, so that every draft is accepted: what a model's own drafts gain
    follows from the share of accepted tokens, which /stats of local_chat shows. Measure while no other programs run.
    """
    content = text_content(text, "gettysburg")
    import psutil
    import torch

    from moegraft.injection.cli.models import load_model, text_ids
    from moegraft.injection.estimate.measure import BUSY
    from moegraft.injection.injected import Injection
    from moegraft.operators.decode.draft_costs import measure_draft_costs
    from moegraft.operators.draft import DraftSettings
    from moegraft.operators.machine import probe_machine

    terminal = open_terminal()
    load = psutil.getloadavg()[0] / probe_machine().cores
    if load > BUSY:
        terminal.notice(f"other programs are running (load {load:.1f} per core): measure again when they are done", style="yellow")
    loaded = load_model(options, terminal)
    ids = text_ids(loaded, content, text, 4096, least=2)
    injection = loaded.model.moegraft
    assert isinstance(injection, Injection), "load_model gives injected models"
    of_model = [swap.traits for swap in injection.plan.swaps if not swap.module]
    settings = next((traits.drafting for traits in of_model if traits.drafting is not None), None if of_model else DraftSettings(1))
    with terminal.stage("measuring drafts"), torch.inference_mode():
        found = measure_draft_costs(loaded.model, injection.context, ids, longest=longest, settings=settings)
    tables = "\n\n".join("\n".join(_costs_lines(costs)) for costs in found)
    write_result(terminal, [tables], {"drafters": [_costs_json(costs) for costs in found]}, as_json=json)


def _costs_lines(costs: DraftCosts) -> list[str]:
    rows: list[tuple[str, ...]] = [("tokens", "draft ms", "verify ms", "needed", *(f"at {share:g}" for share in ACCEPTANCES))]
    for length, (draft_ms, verify_ms) in enumerate(zip(costs.draft_ms, costs.verify_ms, strict=True), 1):
        needed = costs.needed(length)
        gains = [f"{costs.gain(length, share):.2f}" for share in ACCEPTANCES]
        rows.append((str(length), f"{draft_ms:.2f}", f"{verify_ms:.2f}", "never" if needed is None else f"{needed:.2f}", *gains))
    table = columns(rows, right=tuple(range(len(rows[0]))))
    return [f"{costs.drafter}: a plain step takes {costs.plain_ms:.2f} ms", *table, _summary(costs)]


def _summary(costs: DraftCosts) -> str:
    """Return the least acceptance that pays, and the gain of the best length at 0.8, in one sentence."""
    known = {length: needed for length in range(1, len(costs.draft_ms) + 1) if (needed := costs.needed(length)) is not None}
    if not known:
        return "no draft pays, even if every token is accepted"
    length = min(known, key=known.__getitem__)
    best, gain = costs.best(0.8)
    at = f"the best draft has {plural(best, 'token')} and {gain:.2f} times the speed" if best else "plain decoding is faster"
    return f"pays from an acceptance of {known[length]:.2f} ({plural(length, 'token')}); at 0.8 {at}"


def _costs_json(costs: DraftCosts) -> Json:
    lengths = range(1, len(costs.draft_ms) + 1)
    gains = {f"{share:g}": [costs.gain(length, share) for length in lengths] for share in ACCEPTANCES}
    return {**asdict(costs), "needed": [costs.needed(length) for length in lengths], "gain": gains}
