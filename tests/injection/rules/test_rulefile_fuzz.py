"""A rule file damaged in any way ends in a rule file or in its errors, soon, and in nothing else."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
from support.rule_support import findings_of, plan_for, read, tiny_model, write

VALID = """\
version: 1
extends: cpu-exact
vars: {cache: 0.5, weights: int8}
requires: {model_type: tiny}
rules:
- id: experts
  match: {name: '\\.mlp\\.experts$', kind: experts, layers: "1-3"}
  replace:
    class: hybrid_experts
    kwargs: {weights: "${weights}", cache: {policy: lru, ratio: "${cache}"}, devices: [cpu]}
  expect: 3
- match:
    class: torch.nn.Linear
  replace: {class: packed_linear}
  recursive: false
"""
PIECES = (
    *"\"'{}[]:,#&*!|>%@`-?~\n\t \\\0.$(+",
    *("${", "${x}", "\r", "\ufeff", "é", "\U0001f600", "<<: *a", "&a ", "!!python/name:os.system ", "---\n", "...\n", "? ", "- ", "  "),
    *(
        "null",
        "true",
        "1e9",
        "-1",
        "[" * 40,
        "{a: " * 40,
        "(" * 200,
        "a" * 5000,
        "9" * 400,
        "(?P<a>",
        "[[a-",
        "{9999999}",
        "\x85",
        "\u2028",
    ),
)


WORD = re.compile(r"[A-Za-z0-9_.\\$^-]+")
WORDS = (
    *WORD.findall(VALID),
    "0",
    "-1",
    "1.5",
    "true",
    "no",
    "null",
    "hybrid_expert",
    "layers.1.",
    "(",
    "KExpertsCPU",
    "0-99",
    "9-1",
    "router",
)


def damaged(chance: random.Random) -> bytes:
    """VALID after one to three edits, most of which leave it YAML."""
    text = VALID
    for _ in range(chance.randint(1, 3)):
        text = chance.choice((_reworded, _reworded, _reworded, _pierced, _cut, _doubled, _shuffled))(text, chance) or "x"
    data = bytearray(text.encode())
    if chance.random() < 0.1:
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


def _reworded(text: str, chance: random.Random) -> str:
    found = list(WORD.finditer(text))
    if not found:
        return text
    word = chance.choice(found)
    return text[: word.start()] + chance.choice(WORDS) + text[word.end() :]


def _pierced(text: str, chance: random.Random) -> str:
    at = chance.randrange(len(text) + 1)
    return text[:at] + chance.choice(PIECES) + text[at:]


def _cut(text: str, chance: random.Random) -> str:
    at = chance.randrange(len(text) + 1)
    return text[:at] + text[at + chance.randint(1, 30) :]


def _doubled(text: str, chance: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    at = chance.randrange(len(lines) + 1)
    return "".join([*lines[:at], *lines[at : at + chance.randint(1, 4)] * 2, *lines[at:]])


def _shuffled(text: str, chance: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    chance.shuffle(lines)
    return "".join(lines)


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_reported_and_nothing_else_happens(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    model = tiny_model()
    for _ in range(100):
        path = write(tmp_path, damaged(chance))
        begin = time.process_time()
        found = findings_of(lambda path=path: plan_for(path, model))  # type: ignore[misc]
        assert time.process_time() - begin < 1, path.read_bytes()
        assert not found or any(finding.severity == "error" for finding in found)
        assert all(finding.position.line >= 1 and finding.position.column >= 1 for finding in found)


def test_the_file_is_valid_before_it_is_damaged(tmp_path: Path) -> None:
    assert findings_of(lambda: read(write(tmp_path, VALID))) == ()


@pytest.mark.parametrize(
    "text",
    ["- [a, b, {c: d}]\n" * 3800, "- " * 30_000, "? " * 30_000, '"' * 60_001, "# x\n" * 15_000, "a:\n" * 20_000, "- !!x y\n" * 8000],
    ids=["many lists", "deep lists", "deep keys", "quotes", "comments", "one key", "tags"],
)
def test_large_files_are_read_or_refused_soon(text: str, tmp_path: Path) -> None:
    begin = time.process_time()
    assert findings_of(lambda: read(write(tmp_path, text)))
    assert time.process_time() - begin < 4  # seconds of the CPU; about 1 on a common machine
