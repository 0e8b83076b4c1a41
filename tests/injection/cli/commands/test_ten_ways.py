"""A good rule file, broken in ten ways and two as a newcomer might: each time `check` and `explain` say where, what, and what was meant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import Result

Run = Callable[..., Result]
GOOD = """\
version: 1
vars: {bits: int8}
requires: {model_type: qwen3_moe}
rules:
- id: ends
  match: {kind: experts, layers: "0,4"}
  replace: {class: hybrid_experts, kwargs: {weights: stored}}
- id: experts
  match: {kind: experts}
  replace:
    class: hybrid_experts
    kwargs: {weights: "${bits}"}
  expect: 3
- id: attention
  match: {kind: linear, name: '\\.self_attn\\.[qkvo]_proj$'}
  replace: {class: quantized_linear}
"""


@dataclass(frozen=True, slots=True)
class Break:
    """One change to the good file.

    Attributes:
        old, new: what is written instead of what.
        place: line and column of the one error.
        says: parts of its message: what is wrong, and the mend.
        needs_model: whether it takes a model to see it.
    """

    label: str
    old: str
    new: str
    place: str
    says: tuple[str, ...]
    needs_model: bool = True


BREAKS = (
    Break("a typo in a name", "self_attn", "self_atn", "15:31", ("rule 'attention' matches no module", "did you mean '\\.self_attn\\.")),
    Break(
        "a typo in a key", "match: {kind: experts}", "macth: {kind: experts}", "9:3", ("unknown key 'macth'", "did you mean 'match'"), False
    ),
    Break(
        "a typo in an option",
        "{weights: stored}",
        "{wieghts: stored}",
        "7:45",
        ("unknown option 'wieghts'", "did you mean 'weights'"),
        False,
    ),
    Break("a weight type that is none", "{bits: int8}", "{bits: int9}", "12:23", ("one of stored, ", "text 'int9' (from ${bits})"), False),
    Break("an operator that is none", "quantized_linear", "quantised_linear", "16:20", ("unknown operator", "'quantized_linear'?"), False),
    Break("a variable that is none", "${bits}", "${bit}", "12:23", ("'${bit}' is not defined", "did you mean 'bits'"), False),
    Break(
        "the broad rule first",
        'experts, layers: "0,4"}',
        "experts}",
        "9:10",
        ("'experts' takes no module", "'ends' (line 5)", "move it up"),
    ),
    Break("another count", "expect: 3", "expect: 5", "13:11", ("takes model.layers.{1-3}.mlp.experts (3 modules) and 5 are expected",)),
    Break(
        "another model's file", "qwen3_moe}", "mixtral}", "3:24", ("is for models of type 'mixtral'", "this model is of type 'qwen3_moe'")
    ),
    Break("a tab", "    class: hybrid", "\tclass: hybrid", "11:1", ("a tab indents this line",), False),
    Break(
        "an operator of another kind",
        "class: quantized_linear",
        "class: hybrid_experts",
        "15:17",
        ("replaces modules of kind experts",),
        False,
    ),
    Break(
        "KTransformers' class",
        "quantized_linear",
        "KTransformersLinear",
        "16:20",
        ("class of KTransformers", "class: quantized_linear"),
        False,
    ),
)


def test_the_good_file_is_good(run: Run, rules: Callable[[str], Path]) -> None:
    result = run("check", rules(GOOD), "--model", demo(), "--strict")
    assert result.exit_code == 0, result.output


def demo() -> Path:
    from moegraft.injection.demo import demo_path

    return Path(demo_path())


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.label)
def test_a_mistake_has_place_reason_and_suggestion(broken: Break, run: Run, rules: Callable[[str], Path]) -> None:
    assert broken.old in GOOD
    path = rules(GOOD.replace(broken.old, broken.new, 1))
    result = run("check", path, *(("--model", demo()) if broken.needs_model else ()))
    assert result.exit_code == 1
    (first, *_) = errors = [line for line in result.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 1, "one mistake is one error"
    assert first.startswith(f"{path}:{broken.place}: error: "), first
    for part in broken.says:
        assert part in result.stdout, part
    explained = run("explain", path, "--model", demo())
    assert explained.exit_code == 1 and first in explained.stdout + explained.stderr, "explain says the same"
