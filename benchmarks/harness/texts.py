"""The bundled model's text: plays, of which the last tenth was held out of its training."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer

from moegraft.injection.demo import demo_path

TEXT = Path(__file__).parents[1] / "data" / "tinyshakespeare.txt"


def split_text(text: str) -> tuple[str, str]:
    """Split off the last tenth as validation text, between two speeches."""
    cut = text.index("\n\n", len(text) * 9 // 10) + 2
    return text[:cut], text[cut:]


def held_out() -> str:
    return split_text(TEXT.read_text(encoding="utf-8"))[1]


def token_ids(text: str, model: str | Path | None = None) -> torch.Tensor:
    """Return the tokens of a text by a model's tokenizer, (T,) int64; by default the bundled model's."""
    return torch.tensor(AutoTokenizer.from_pretrained(model or demo_path(), model_max_length=len(text) + 1)(text)["input_ids"])


def pieces(text: str, count: int, tokens: int, model: str | Path | None = None) -> list[torch.Tensor]:
    """Return `count` evenly spaced pieces of a text, each (1, tokens); fewer if the text is short."""
    ids = token_ids(text, model)
    step = max(tokens, (len(ids) - tokens) // count)
    return [ids[None, start : start + tokens] for start in range(0, len(ids) - tokens + 1, step)][:count]
