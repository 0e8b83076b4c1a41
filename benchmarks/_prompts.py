"""Prompts from published sets, by length in tokens: ChatGPT prompts (CSV), MT-Bench and Vicuna-Bench (JSON lines)."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

FILES = {"chatgpt_prompts": "chatgpt_prompts.csv", "mt_bench": "mt_bench.jsonl", "vicuna_bench": "vicuna_bench.jsonl"}


def read_sets(folder: Path) -> dict[str, list[str]]:
    """Return the prompts of each set whose file is in the folder; conversations contribute their first turn.

    Raises:
        FileNotFoundError: the folder has no file of a known set.
    """
    found = {name: list(_prompts(folder / file)) for name, file in FILES.items() if (folder / file).is_file()}
    if not found:
        raise FileNotFoundError(f"{folder}: none of {', '.join(FILES.values())} is there")
    return found


def _prompts(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            yield from (row["prompt"] for row in csv.DictReader(file))
        else:
            yield from (json.loads(line)["turns"][0] for line in file if line.strip())


def sampled(sets: Mapping[str, list[str]], tokenizer: PreTrainedTokenizerBase, tokens: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Return one sequence (1, tokens) int64 per set: the concatenation of randomly drawn prompts, from a fixed seed.

    Args:
        vocabulary: larger ids are taken modulo this number, for models with random weights.
    """
    found = {}
    for name, prompts in sets.items():
        order = random.Random(f"{name} {tokens}").sample(prompts, len(prompts))
        ids: list[int] = []
        while len(ids) < tokens:
            for prompt in order:
                ids += tokenizer(prompt, truncation=False)["input_ids"]
                if len(ids) >= tokens:
                    break
        found[name] = torch.tensor([ids[:tokens]]) % vocabulary
    return found


def sequences(sets: Mapping[str, list[str]], tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[torch.Tensor]:
    """Return single prompts, each (T,) int64, drawn alternately from the sets with a fixed seed, of `tokens` tokens in all.

    Raises:
        ValueError: the sets have fewer tokens.
    """
    drawn = {name: random.Random(name).sample(prompts, len(prompts)) for name, prompts in sets.items()}
    found: list[torch.Tensor] = []
    left = tokens
    for place in range(max(map(len, drawn.values()))):
        for prompts in drawn.values():
            if place < len(prompts) and left > 0:
                found.append(torch.tensor(tokenizer(prompts[place], truncation=False)["input_ids"][:left]))
                left -= len(found[-1])
    if left > 0:
        raise ValueError(f"the prompts have {tokens - left} tokens; {tokens} are needed")
    return found
