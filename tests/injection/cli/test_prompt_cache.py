"""Families whose layers keep states: conversations go on from checkpoints, and the guide has what works with each."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.families import FamilyCase, build_model, prompt, served_cases

from moegraft.injection import new_cache, optimize_and_load
from moegraft.injection.cli.chat.prompt_cache import PromptCache, read_ahead, why_not_appendable
from moegraft.injection.cli.serve.open_pool import UnbatchableError, open_pool
from moegraft.operators.decode.rollback import unsupported_model_reason

GUIDE = Path(__file__).parents[3] / "rules" / "guide" / "families.md"
LENGTH, CHUNK = 200, 50


def _source(case: FamilyCase) -> str:
    assert transformers.__file__ is not None, "transformers is a namespace package"
    return (Path(transformers.__file__).parent / "models" / case.family / f"modeling_{case.family}.py").read_text(encoding="utf-8")


def _keeps_states(case: FamilyCase) -> bool:
    """Whether transformers marks a family as stateful, or its layers keep states of convolutions."""
    source = _source(case)
    return case.generates and (re.search(r"^ +_is_stateful = True", source, re.M) is not None or "update_conv_state(" in source)


STATEFUL = {case.model_type: case for case in served_cases() if _keeps_states(case)}


@cache
def injected(model_type: str) -> Any:
    return optimize_and_load(build_model(STATEFUL[model_type]), "cpu-exact", progress=False, threads=1)


def documented() -> dict[str, list[str]]:
    """Return the guide's row of each model type."""
    table = GUIDE.read_text(encoding="utf-8").partition("## States")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| `")]
    return {name: row[1:] for row in rows for name in re.findall(r"`(\w+)`", row[0])}


def test_the_guide_has_every_family_with_states() -> None:
    assert len(STATEFUL) > 10 and STATEFUL.keys() <= documented().keys()


@pytest.mark.parametrize("model_type", STATEFUL)
def test_what_the_guide_has_of_a_family_is_so(model_type: str) -> None:
    model = injected(model_type)
    works = why_not_appendable(model) is None
    batched = _opens_a_pool(model)
    drafts = unsupported_model_reason(model) is None
    assert documented()[model_type][1:5] == ["yes" if each else "no" for each in (works, works, batched, drafts)]


def _opens_a_pool(model: Any) -> bool:
    try:
        open_pool(model, limit=1 << 24, prefix_bytes=None, most=2, context=64)
    except UnbatchableError:
        return False
    return True


@pytest.mark.parametrize("model_type", [name for name in STATEFUL if documented().get(name, [""] * 3)[2] == "yes"])
def test_a_changed_turn_goes_on_from_a_checkpoint(model_type: str) -> None:
    model, ids = injected(model_type), prompt(LENGTH)[0].tolist()
    kept = PromptCache(model)
    held, _ = kept.take(ids)
    held = kept.read_ahead(ids, held, CHUNK)
    with torch.no_grad():
        made = model.generate(torch.tensor([ids]), past_key_values=held, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
        kept.keep(made.sequences[0].tolist(), made.past_key_values)
        changed = [*ids[:-3], *prompt(30, seed=1)[0].tolist()]
        again, shared = kept.take(changed)
        assert again is held and LENGTH - 10 < shared < LENGTH
        fresh = new_cache(model)  # with the same chunks, as other sizes round otherwise
        read_ahead(model, ids[: LENGTH - CHUNK + 2], fresh, CHUNK)
        read_ahead(model, ids[: shared + 2], fresh, shared - fresh.get_seq_length())
        assert fresh.get_seq_length() == shared
        rest = torch.tensor([changed[shared:]])
        found, expected = (model(input_ids=rest, past_key_values=each, use_cache=True).logits for each in (again, fresh))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
