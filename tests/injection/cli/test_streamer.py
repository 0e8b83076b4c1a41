"""The streamer: text appears as soon as it cannot change, and is the same however the tokens arrive."""

from __future__ import annotations

import pytest
import torch

from moegraft.injection.cli.chat.answer import AnswerStreamer
from moegraft.injection.cli.models import LoadedModel

TEXT = "Ça va ? 你好 \N{GRINNING FACE}!"  # characters of 1, 2, 3 and 4 bytes, each byte a token


@pytest.mark.parametrize("group", [1, 3, 100])  # one by one; across characters; all at once
def test_whole_characters_are_streamed(loaded: LoadedModel, group: int) -> None:
    pieces: list[str] = []
    streamer = AnswerStreamer(loaded.tokenizer, pieces.append)
    streamer.put(torch.tensor([[5, 6, 7]]))  # the prompt
    token_ids = loaded.tokenizer(TEXT)["input_ids"]
    for start in range(0, len(token_ids), group):
        streamer.put(torch.tensor(token_ids[start : start + group]))
    streamer.end()
    assert "".join(pieces) == streamer.text == TEXT
    assert streamer.token_ids == token_ids
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def test_half_a_character_is_shown_only_at_the_end(loaded: LoadedModel) -> None:
    pieces: list[str] = []
    streamer = AnswerStreamer(loaded.tokenizer, pieces.append)
    streamer.put(torch.tensor([[5]]))
    streamer.put(torch.tensor(loaded.tokenizer("a你")["input_ids"][:-1]))
    assert pieces == []
    streamer.end()
    assert streamer.text == "a\N{REPLACEMENT CHARACTER}"


def test_special_tokens_are_not_text(loaded: LoadedModel) -> None:
    pieces: list[str] = []
    streamer = AnswerStreamer(loaded.tokenizer, pieces.append)
    for value in ([[5]], loaded.tokenizer("ab")["input_ids"], [loaded.tokenizer.eos_token_id]):
        streamer.put(torch.tensor(value))
    streamer.end()
    assert streamer.text == "ab"
    assert len(streamer.token_ids) == 3


def test_bytes_that_never_make_a_character_are_not_held_for_ever(loaded: LoadedModel) -> None:
    """Each further token would decode all of them again."""
    pieces: list[str] = []
    streamer = AnswerStreamer(loaded.tokenizer, pieces.append)
    streamer.put(torch.tensor([[1]]))
    [byte, _] = loaded.tokenizer("é")["input_ids"]
    for _ in range(100):
        streamer.put(torch.tensor([byte]))
    assert len(pieces) > 3
    for token in loaded.tokenizer("é!")["input_ids"]:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(pieces) == loaded.tokenizer.decode([*[byte] * 100, *loaded.tokenizer("é!")["input_ids"]])
