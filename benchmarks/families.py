"""Does an injected model give the stock model's output? One row for each family of the installed transformers.

Tiny random models of the cases in tests/support/family_rows.py are saved in float32 and loaded by transformers and by `optimize_and_load`
with the rules `cpu-exact`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import torch
from harness.record import Recorder, parser
from support.families import build_model, family_cases, prompt, save_checkpoint, stock_model
from support.family_rows import FamilyCase

from moegraft.injection import optimize_and_load
from moegraft.operators.errors import MoegraftError

NEW_TOKENS = 64
COLUMNS = ("outcome", "layers", "max_relative_error", "equal_greedy_tokens", "reason")


@torch.no_grad()
def measure(case: FamilyCase, folder: Path) -> dict[str, object]:
    """Return the outcome, max|a - b| / max|b| of the logits of two prompts, and the number of greedy tokens before one differs."""
    row: dict[str, object] = {"model_type": case.model_type, "model_class": case.model_class, **dict.fromkeys(COLUMNS, "")}
    if not case.buildable:
        return {**row, "outcome": "refused", "reason": case.reason or ""}
    save_checkpoint(case, folder, shards=3)
    stock = stock_model(case, folder)
    row["layers"] = stock.config.get_text_config().num_hidden_layers
    try:
        injected = optimize_and_load(folder if case.generates else build_model(case), "cpu-exact", progress=False)
    except (MoegraftError, AttributeError, KeyError, RuntimeError, TypeError) as error:  # one failed family is one row
        outcome = "refused" if case.reason and isinstance(error, MoegraftError) else "failed"
        return {**row, "outcome": outcome, "reason": " ".join(str(error).split("error: ")[-1].replace(str(folder), "checkpoint").split())}
    found, expected = (model(input_ids=prompt(9, batch=2)).logits.double() for model in (injected, stock))
    row |= {"outcome": "served", "max_relative_error": f"{float((found - expected).abs().max() / expected.abs().max()):.1e}"}
    if case.generates:
        texts = [model.generate(prompt(7), max_new_tokens=NEW_TOKENS, do_sample=False)[0, 7:] for model in (injected, stock)]
        row["equal_greedy_tokens"] = f"{int((texts[0] == texts[1]).long().cumprod(0).sum())}/{NEW_TOKENS}"
    return row


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", metavar="TYPE", help="a model type alone")
    given = options.parse_args()
    rows = Recorder("families", write=given.write)
    for case in family_cases():
        if given.only in (None, case.model_type):
            with tempfile.TemporaryDirectory() as folder:
                rows.add(measure(case, Path(folder)))
    failed = [str(row["model_type"]) for row in rows.rows if row["outcome"] == "failed"]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
