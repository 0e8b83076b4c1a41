"""Turns tokens into text as `generate` makes them, and notes when each came."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder gives for the first bytes of a character


class AnswerStreamer(BaseStreamer):
    """Calls `on_text` with each piece of the answer that can no longer change."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._on_text = on_text
        self._saw_prompt = False
        self._shown = 0  # tokens whose text was passed on
        self._context = 0  # tokens before this one do not change how the next are spelt
        self.token_ids: list[int] = []
        self.text = ""
        self.started_s = time.perf_counter()
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt first, then tokens in any number at a time."""
        if not self._saw_prompt:
            self._saw_prompt = True
            return
        self.last_token_s = time.perf_counter()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s
        self.token_ids.extend(value.reshape(-1).tolist())
        self._advance(finished=False)

    def end(self) -> None:
        self._advance(finished=True)

    def _advance(self, *, finished: bool) -> None:
        # A token's text can depend on the one before it (a leading space), so some tokens before are always decoded with it.
        known = self._decode(self.token_ids[self._context : self._shown])
        text = self._decode(self.token_ids[self._context :])
        if len(text) <= len(known) or (text.endswith(UNFINISHED) and not finished):
            return
        self._context, self._shown = self._shown, len(self.token_ids)
        self.text += text[len(known) :]
        self._on_text(text[len(known) :])

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str), "one sequence decodes to one string"
        return text
