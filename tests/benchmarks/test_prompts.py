"""Prompts from published sets have the requested length, come from each existing set, and are equal in every run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support import ROOT

sys.path.append(str(ROOT / "benchmarks"))  # after the tests, which have a module `families` as well

from _prompts import read_sets, sampled, sequences


class Letters:
    """A tokenizer whose tokens are letters."""

    def __call__(self, text: str, truncation: bool) -> dict[str, list[int]]:
        assert not truncation
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "chatgpt_prompts.csv").write_text('act,prompt\nA,"one, two"\nB,three\n')
    (tmp_path / "mt_bench.jsonl").write_text('{"turns": ["abcde", "again"]}\n\n{"turns": ["fg"]}\n')
    return tmp_path


def test_existing_sets_are_read(folder: Path) -> None:
    assert read_sets(folder) == {"chatgpt_prompts": ["one, two", "three"], "mt_bench": ["abcde", "fg"]}
    with pytest.raises(FileNotFoundError, match=r"none of chatgpt_prompts\.csv, mt_bench\.jsonl"):
        read_sets(folder / "nowhere")


@pytest.mark.parametrize("tokens", [1, 7, 50])  # fewer than a prompt, most of a set, more than a set
def test_prompts_have_the_requested_length(folder: Path, tokens: int) -> None:
    found = sampled(read_sets(folder), Letters(), tokens, 100)  # type: ignore[arg-type]
    again = sampled(read_sets(folder), Letters(), tokens, 100)  # type: ignore[arg-type]
    assert set(found) == {"chatgpt_prompts", "mt_bench"}
    for name, ids in found.items():
        assert ids.shape == (1, tokens) and int(ids.max()) < 100 and ids.equal(again[name])


def test_sequences_alternate_between_the_sets(folder: Path) -> None:
    found = sequences(read_sets(folder), Letters(), 18)  # type: ignore[arg-type]
    texts = ["".join(map(chr, ids.tolist())) for ids in found]
    assert sum(map(len, texts)) == 18 and texts[0] in ("one, two", "three") and texts[1] in ("abcde", "fg")
    with pytest.raises(ValueError, match="the prompts have 20 tokens; 21 are needed"):
        sequences(read_sets(folder), Letters(), 21)  # type: ignore[arg-type]
