"""Users' regular expressions: what `re` would find in module paths, and an error at its place for a pattern that takes too long."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.rule_support import findings_of, plan_for, read, write
from torch import nn

from moegraft.injection.rules import read_rules
from moegraft.injection.rules.ktransformers import Paths, convert, read_their_rules
from moegraft.injection.rules.patterns import Patterns, SlowPatternError, why_unusable
from moegraft.operators.registry import load_registry
from moegraft.rules import shipped_rules

LONG = "a_module_with_a_long_name_that_can_be_divided_in_many_ways"
SLOW = r"(\w|\w\w|\.)*?(\w|\.|\w\w)*[^\w.]"
SLOW_ON_LONG = rf"^{LONG[:9]}{SLOW}"  # no common path begins so
BACKTRACKING = (r"^(\w+\.?)+!$", r"(([a-z_.0-9])+.)+[A-Z]([a-z ])+$")  # `re` takes longer than anyone waits
TYPICAL = Paths.typical()
PATHS = (
    *TYPICAL.experts[::40],
    *TYPICAL.linears[:60],
    *TYPICAL.linears[2000::333],
    "model.layers.3.self_attn",
    "model.visual.blocks.3.mlp.up_proj",
    LONG,
)
KTRANSFORMERS = (
    r"^model\.layers\.(?!.*self_attn\.kv_b_proj).*$",
    r"^model\.layers\.([3-5][0-9])\.(?!self_attn\.kv_b_proj).*$",
    r"^model\.layers\.(0|[1-9]|[1-2][0-9])\.",
    r"^model\.layers\..*\.self_attn$",
    r"(^model\.layers\.([3456][0-9])\.)|(^model.norm)|(^lm_head)",
    r"^(?!.*\.self_attn\.).*experts$",
    r"^model\.layers\.(?:[0-9]|1\d{1,2})\.mlp\.gate(?:_proj)?\b",
)
READ_OTHERWISE_BY_REGEX = (
    (r"a{e}", "a{e}"),  # as many characters as `regex` likes
    (r"a{i<=1}", "ab"),
    (r"{e}", "{e}"),
    (r"a{1}{e}", "aa"),
    (r"[[:alpha:]]", "b"),  # one of [:alph, then ]
    (r"[a[:alpha:]]", "b"),
    (r"[]a[]", "["),
    (r"[\[{]x", "{x"),
    (r"\{e}\N{DIGIT ONE}", "{e}1"),
    (r"x{}y{,}z{,2}", "x{}yyzz"),
)


def shipped_names() -> list[str]:
    files = (read_rules(name, registry=load_registry()) for name in sorted(shipped_rules()))
    return sorted({rule.match.name for file in files for rule in file.rules if rule.match.name is not None})


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
def test_matches_are_those_of_re() -> None:
    names = shipped_names()
    assert names
    for pattern in (*names, *KTRANSFORMERS):
        found = [path for path in PATHS if Patterns().found_in(pattern, path)]
        assert found == [path for path in PATHS if re.search(pattern, path)] != [], pattern
    for pattern, text in READ_OTHERWISE_BY_REGEX:
        assert Patterns().found_in(pattern, text) == (re.search(pattern, text) is not None), pattern


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (SLOW, "takes too long to match to 'model.layers.10.self_attn.kv_a_proj_with_mqa'; repeats inside repeats"),
        ("(" * 60 + "a" + ")+" * 60, "is not a valid regular expression: repeats inside repeats make it too large; write one repeat"),
        (r"(?:(?:a{900}){900}){900}", "is not a valid regular expression: repeats inside repeats make it too large"),
        (r"(?ix) mlp  # (", "is not a valid regular expression: the flag x is not supported"),
        (r"(?<=a+)b", "is not a valid regular expression: look-behind requires fixed-width pattern"),  # `regex` would take it
        (r"\p{Lu}", "is not a valid regular expression: bad escape \\p"),
    ],
)
def test_patterns_that_rules_cannot_have(pattern: str, reason: str) -> None:
    assert (why_unusable(pattern) or "").startswith(reason)


@pytest.mark.parametrize("pattern", [r"\(?x", "(?i:MLP)", "(" * 90 + "a" + ")" * 90, r"(?:(?:a+b)+c)+", *KTRANSFORMERS, *BACKTRACKING])
def test_patterns_that_rules_can_have(pattern: str) -> None:
    assert why_unusable(pattern) is None


def test_time_is_limited_for_a_pattern_and_not_for_each_path() -> None:
    pattern = r"(?=(.|..)+[A-C]$)(.|..)*"  # milliseconds for each path
    assert not Patterns(0.5).found_in(pattern, "model.layers.0.mlp.up")
    patterns = Patterns(0.5)
    with pytest.raises(SlowPatternError):
        for number in range(10_000):
            patterns.found_in(pattern, f"model.layers.{number % 10}.mlp.up")
    with pytest.raises(SlowPatternError, match="takes too long to match to the names of modules"):
        patterns.found_in(pattern, "lm_head")
    assert patterns.found_in("head", "lm_head")


def test_time_is_limited_for_all_patterns_together() -> None:
    patterns = Patterns(0.1, total_seconds=0.25)
    for number in range(3):
        with pytest.raises(SlowPatternError, match="takes too long to match to 'a_module"):
            patterns.found_in(f"^{LONG[:number]}{SLOW}", LONG)
    with pytest.raises(SlowPatternError, match="all patterns together take too long"):
        patterns.found_in("module", LONG)


def test_a_slow_pattern_is_an_error_without_a_model(tmp_path: Path) -> None:
    path = write(tmp_path, f"- match: {{kind: linear, name: '{SLOW}'}}\n  replace: {{class: packed_linear}}\n")
    (found,) = findings_of(lambda: read(path))
    assert str(found).startswith(f"{path}:1:31: error: name '{SLOW}' takes too long to match")


def model_with_a_long_name() -> nn.Module:
    return nn.ModuleDict({LONG: nn.Linear(2, 2, device="meta")})


def test_slow_patterns_are_errors_with_a_model(tmp_path: Path) -> None:
    rule = "- match: {name: '%s'}\n  replace: {class: packed_linear}\n"
    others = f"^{LONG[:8]}{SLOW}"
    path = write(tmp_path, rule % SLOW_ON_LONG + "- match: {kind: linear}\n  replace: {class: packed_linear}\n" + rule % others)
    assert findings_of(lambda: read(path)) == ()
    first, second = findings_of(lambda: plan_for(path, model_with_a_long_name()))
    assert str(first).startswith(f"{path}:1:17: error: rule 'rule-1': name '{SLOW_ON_LONG}' takes too long to match to '{LONG}'; repeats")
    assert str(second).startswith(f"{path}:5:17: error: rule 'rule-3': name '{others}' takes too long")


@pytest.mark.parametrize("pattern", BACKTRACKING)
def test_a_pattern_that_backtracks_matches_nothing_soon(pattern: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"- match: {{name: '{pattern}'}}\n  replace: {{class: packed_linear}}\n")
    (found,) = findings_of(lambda: plan_for(path, model_with_a_long_name()))
    assert str(found).startswith(f"{path}:1:17: error: rule 'rule-1' matches no module of ModuleDict\n    name: '{pattern}'")


def test_a_suggestion_that_would_be_slow_is_not_made(tmp_path: Path) -> None:
    """The pattern is quick since no path has its first word; with the nearest word it is not."""
    path = write(tmp_path, f"- match: {{name: '^{LONG.replace('long', 'lang')}{SLOW}'}}\n  replace: {{class: packed_linear}}\n")
    model = nn.ModuleDict({LONG: nn.ModuleDict({LONG: nn.Linear(2, 2, device="meta")})})
    (found,) = findings_of(lambda: plan_for(path, model))
    assert "matches no module" in found.message and "did you mean" not in found.message


def test_a_slow_pattern_of_ktransformers(tmp_path: Path) -> None:
    rule = "- match: {name: '%s'}\n  replace: {class: KTransformersExperts}\n"
    (outcome,) = convert(read_their_rules(write(tmp_path, rule % SLOW)), TYPICAL)
    assert outcome.doubtful and outcome.notes[0].startswith(f"name '{SLOW}' takes too long to match")
    path = write(tmp_path, rule % SLOW_ON_LONG)
    (found,) = findings_of(lambda: convert(read_their_rules(path), Paths((LONG,), ())))
    assert str(found).startswith(f"{path}:1:17: error: name '{SLOW_ON_LONG}' takes too long to match to '{LONG}'")
