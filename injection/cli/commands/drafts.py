"""`moegraft drafts`: measure what drafts cost a model on this machine, and from which acceptance they pay."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from moegraft.injection.cli.output import FINDINGS, Json, columns, open_terminal, plural, user_errors, write_json
from moegraft.injection.texts import text_content

if TYPE_CHECKING:
    from moegraft.operators.decode.draft_costs import DraftCosts

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)


@user_errors(PROGRAM, wrong_rules=FINDINGS)
def drafts(
    model: LoadedModelOption = None,
    rules: RulesOption = None,
    text: Annotated[Path | None, option("--text", "FILE", "Text to verify; default: the Gettysburg address.")] = None,
    longest: Annotated[int, option("--longest", "N", "Tokens of the longest draft.", min=1, max=15)] = 7,
    threads: ThreadsOption = 0,
    var: VarOption = None,
    gguf: GgufOption = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Measure drafting and verifying 1 to N tokens, and show the acceptance at which each length of draft is as fast as plain decoding.

    The drafters are n-grams, the MTP layers or the EAGLE-3 head that the rules load, and fewer experts as the rules' speculative_draft has
    them, or one expert for each token without one. The text is given, so that every draft is accepted: what a model's own drafts gain
    follows from the share of accepted tokens, which /stats of local_chat shows. Measure while no other programs run.
    """
    options = ModelOptions(model, rules, var or [], gguf, threads=threads, trust_remote_code=trust_remote_code)
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
    operator = injection.model_operator
    settings = DraftSettings(1) if operator is None else type(operator).traits(operator.options).drafting
    with terminal.stage("measuring drafts"), torch.inference_mode():
        found = measure_draft_costs(loaded.model, injection.context, ids, longest=longest, settings=settings)
    if json:
        write_json(terminal, {"drafters": [_as_json(costs) for costs in found]})
    else:
        terminal.write("\n\n".join("\n".join(_lines(costs)) for costs in found) + "\n")


def _lines(costs: DraftCosts) -> list[str]:
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


def _as_json(costs: DraftCosts) -> Json:
    lengths = range(1, len(costs.draft_ms) + 1)
    gains = {f"{share:g}": [costs.gain(length, share) for length in lengths] for share in ACCEPTANCES}
    return {**asdict(costs), "needed": [costs.needed(length) for length in lengths], "gain": gains}
