"""The official JSON Schema suite (draft 2020-12) over the server's constraints of answers; run by `tests/server_suites.py`.

A text is accepted if each of its tokens may follow those before, and the end may follow the last. An answer has one spelling of a value:
its keys in the schema's order, and whole numbers without a point. So a valid value is to be accepted in one order of keys, and no invalid
one in any.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from moegraft.injection.cli.serve.answer_form import Constraint, GrammarError, Grammars, grammars
from support.tiny_server import tiny_model

FOLDER = Path(os.environ["JSON_SCHEMA_SUITE"])
MODEL = tiny_model()
END = 0
GRAMMARS = Grammars(MODEL.tokenizer, len(MODEL.tokenizer), [END])


def cases() -> list[Any]:
    found = []
    for file in sorted(FOLDER.glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            for test in group["tests"]:
                name = f"{file.stem}: {group['description']}: {test['description']}"
                annotates = "only an annotation by default" in test["description"]
                marks = [pytest.mark.skip(reason="expects formats without effect, which an answer follows")] if annotates else []
                found.append(pytest.param(group["schema"], test["data"], test["valid"], id=name, marks=marks))
    return found


def accepts(constraint: Constraint, data: Any) -> bool:
    tokens = MODEL.tokenizer(json.dumps(data, ensure_ascii=False))["input_ids"]
    allowed = torch.isfinite(constraint.restrict(torch.zeros(len(MODEL.tokenizer)), tokens))
    return bool(allowed[END]) and not bool(allowed.all())  # of a text that has left the grammar, all may follow


def spellings(data: Any) -> Iterator[Any]:
    """Yield a value with the keys of its outermost object in each order, and then with whole numbers as such."""
    whole = json.loads(json.dumps(data), parse_float=lambda text: int(float(text)) if float(text).is_integer() else float(text))
    for given in (data, whole):
        if isinstance(given, dict):
            yield from map(dict, permutations(given.items()))
        else:
            yield given


@pytest.mark.parametrize(("schema", "data", "valid"), cases())
def test_schema(schema: Any, data: Any, valid: bool) -> None:
    if not isinstance(schema, dict):
        pytest.skip("the schema is no object, which is refused")
    try:
        constraint = GRAMMARS.constraint(grammars(schema))
    except GrammarError as error:
        pytest.skip(f"refused: {str(error).splitlines()[0]}")
    assert any(accepts(constraint.copy(), spelling) for spelling in spellings(data)) == valid
