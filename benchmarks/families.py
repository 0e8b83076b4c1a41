"""Does an injected model give the stock model's output? One row for each family of the installed transformers.

Tiny random models of the cases in tests/support/family_rows.py are saved in float32 and loaded by transformers and by `optimize_and_load`
with the rules `cpu-exact`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
# Before this file's own folder, which has a module of the same name.
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from harness.record import Recorder, parser
from support.families import build_model, family_cases, prompt, save_checkpoint, stock_model
from support.family_rows import FamilyCase
from transformers import PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.operators.errors import MoegraftError
from moegraft.operators.experts.hybrid import HybridExperts

NEW_TOKENS = 64


@dataclass(slots=True)
class Row:
    """The result of one case; the fields are the columns."""

    model_type: str
    model_class: str
    outcome: str = "served"  # or refused, or failed
    layers: int | None = None
    experts_modules: int | None = None
    layout: str = ""
    activation: str = ""
    max_relative_error: str = ""
    equal_greedy_tokens: str = ""
    reason: str = ""


@torch.no_grad()
def relative_error(injected: PreTrainedModel, stock: PreTrainedModel) -> float:
    """Return max|a - b| / max|b| of the logits of two prompts of 9 tokens."""
    found, expected = (model(input_ids=prompt(9, batch=2)).logits.double() for model in (injected, stock))
    return float((found - expected).abs().max() / expected.abs().max())


def equal_tokens(injected: PreTrainedModel, stock: PreTrainedModel) -> int:
    """Return the number of equal greedy tokens before the first difference."""
    ids = prompt(7)
    generates: list[Callable[..., torch.Tensor]] = [injected.generate, stock.generate]  # type: ignore[list-item]
    found, expected = (generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :] for generate in generates)
    return int((found == expected).long().cumprod(0).sum())


def describe(operator: HybridExperts) -> tuple[str, str]:
    """Describe the stored layout and the gate of an experts module."""
    layout = operator.layout
    words = {
        "gated": layout.gated,
        "ungated": not layout.gated,
        "interleaved": layout.interleaved,
        "transposed": layout.transposed,
        "bias": layout.bias,
    }
    limits = {"gate": layout.gate.gate_limit, "act": layout.gate.act_limit, "up": layout.gate.up_limit}
    clamps = [f"{name}<={limit:g}" for name, limit in limits.items() if limit != float("inf")]
    return " ".join(word for word, holds in words.items() if holds), " ".join([layout.gate.activation, *clamps])


def measure(case: FamilyCase, folder: Path) -> Row:
    row = Row(case.model_type, case.model_class)
    if not case.buildable:
        row.outcome, row.reason = "refused", case.reason or ""
        return row
    save_checkpoint(case, folder, shards=3)
    stock = stock_model(case, folder)
    row.layers = stock.config.get_text_config().num_hidden_layers
    try:
        injected = optimize_and_load(folder if case.generates else build_model(case), "cpu-exact", progress=False)
    except (MoegraftError, AttributeError, KeyError, RuntimeError, TypeError) as error:  # one failed family is one row
        row.outcome = "refused" if case.reason and isinstance(error, MoegraftError) else "failed"
        row.reason = " ".join(str(error).split("error: ")[-1].replace(str(folder), "checkpoint").split())
        return row
    operators = [module for module in injected.modules() if isinstance(module, HybridExperts)]
    row.experts_modules = len(operators)
    row.layout, row.activation = describe(operators[0])
    row.max_relative_error = f"{relative_error(injected, stock):.1e}"
    if case.generates:
        row.equal_greedy_tokens = f"{equal_tokens(injected, stock)}/{NEW_TOKENS}"
    return row


def main() -> None:
    rows = Recorder("families", write=parser(__doc__).parse_args().write)
    for case in family_cases():
        with tempfile.TemporaryDirectory() as folder:
            rows.add(dataclasses.asdict(measure(case, Path(folder))))
    failed = [str(row["model_type"]) for row in rows.rows if row["outcome"] == "failed"]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
