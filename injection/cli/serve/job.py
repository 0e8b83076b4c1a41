"""One request on its way through the engine: what is asked, and the text that comes of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from moegraft.injection.cli.chat.streamer import AnswerStreamer
from moegraft.injection.cli.serve.stop_text import StopText

Ending = Literal["stop", "length", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt and how to go on from it; temperature 0 takes the likeliest token, top_k 0 draws from all."""

    token_ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that can no longer change; the last one says why there is no more."""

    text: str
    ending: Ending | None = None


class Job:
    """An `Ask` being answered. The engine's thread writes; whoever asked may call `cancel` from any other."""

    def __init__(
        self, ask: Ask, tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int], listener: Callable[[Piece], None] | None = None
    ) -> None:
        self.ask = ask
        self.listener = listener
        self.token_ids = list(ask.token_ids)  # prompt and answer
        self.seed = random.SystemRandom().getrandbits(63) if ask.seed is None else ask.seed
        self.kept_tokens = 0  # of the prompt, known from an earlier request
        self.completion_tokens = 0
        self.ending: Ending | None = None
        self.cancelled = False
        self.asked_s = time.perf_counter()
        self._end_tokens = frozenset(end_tokens)
        self._stop = StopText(ask.stop)
        self._streamer = AnswerStreamer(tokenizer, self._spell)
        self._streamer.put(torch.empty(0))  # it takes the prompt first

    def cancel(self) -> None:
        """Nobody wants the answer any more."""
        self.cancelled = True

    def take(self, token: int) -> bool:
        """Takes the next token of the answer; whether the answer ends with it."""
        assert self.ending is None, "nothing follows the end of an answer"
        self.token_ids.append(token)
        self.completion_tokens += 1
        if token in self._end_tokens:
            self.finish("stop")
        else:
            self._streamer.put(torch.tensor([token]))
            if self._stop.stopped:
                self.finish("stop")
            elif self.completion_tokens >= self.ask.max_tokens:
                self.finish("length")
            elif self.cancelled:
                self.finish("cancelled")
        return self.ending is not None

    def finish(self, ending: Ending) -> None:
        """Ends the answer, once, with the text that was held back."""
        if self.ending is not None:
            return
        self._streamer.end()
        self.ending = ending
        self._tell(Piece(self._stop.rest(), ending))

    def _spell(self, text: str) -> None:
        safe = self._stop.feed(text)
        if safe:
            self._tell(Piece(safe))

    def _tell(self, piece: Piece) -> None:
        if self.listener is not None:
            self.listener(piece)
