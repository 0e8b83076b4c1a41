"""One request on its way through the engine: what is asked, and the text that comes of it.

Stop strings: text is held back while it could be the beginning of one.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from moegraft.injection.cli.chat.answer import AnswerStreamer
from moegraft.injection.cli.options import LEAST_TEMPERATURE


class StopText:
    """Passes text on up to the first stop string, which is not passed on itself."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """What is safe to show of the text so far and was not shown yet."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            safe, self._held = self._held[: min(found)], ""
            return safe
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def rest(self) -> str:
        """What was held back, at the end of a text that no stop string ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that are the beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


logger = logging.getLogger(__name__)
Ending = Literal["stop", "length", "cancelled", "failed"]
FAILED = "the model failed on this request; the server's log has the reason"
LEAST_TOP_P = torch.finfo(torch.float32).tiny


class AnswerError(Exception):
    """A failure of one answer whose message is safe to show to the client."""


class BadLogitsError(AnswerError):
    """No token can be chosen."""

    def __init__(self) -> None:
        super().__init__("the model's logits for this request are not numbers (NaN or infinite)")


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt and how to go on from it; top_k 0 draws from all tokens."""

    token_ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: Sequence[str] = ()

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken: asked for by 0, and by values that a float32 step cannot divide by or tell from 0."""
        return self.temperature < LEAST_TEMPERATURE or self.top_p < LEAST_TOP_P


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that can no longer change; the last one says why there is no more."""

    text: str
    ending: Ending | None = None


class Job:
    """An `Ask` being answered. The engine's thread writes; whoever asked may call `cancel` from any other.

    A failure in the answer's own work, such as decoding its tokens to text, ends it with "failed" and raises nothing.

    Attributes:
        error: the message for the client of an answer that failed.
        work: what the model did between the job's first step and its last, by name; None until its end.
        together: others were answered meanwhile, so that `work` is theirs too.
    """

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
        self.error = FAILED
        self.cancelled = False
        self.work: Mapping[str, int] | None = None
        self.together = False
        self._asked_s = time.perf_counter()
        self._first_s = self._last_s = 0.0
        self._told = False
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
        self._last_s = time.perf_counter()
        self._first_s = self._first_s or self._last_s
        if token in self._end_tokens:
            self.finish("stop")
        else:
            with self.failing_alone():
                self._streamer.put(torch.tensor([token]))
            if self._stop.stopped:
                self.finish("stop")
            elif self.completion_tokens >= self.ask.max_tokens:
                self.finish("length")
            elif self.cancelled:
                self.finish("cancelled")
        return self.ending is not None

    def finish(self, ending: Ending) -> None:
        """Ends the answer, once; `tell_end` says so."""
        if self.ending is not None:
            return
        with self.failing_alone():
            self._streamer.end()
        self.ending = self.ending or ending

    def fail(self, error: Exception) -> None:
        """End the answer with an error. Shows no text that is held back: decoding it may be what failed."""
        if self.ending is None:
            self.ending = "failed"
            if isinstance(error, AnswerError):
                self.error = str(error)

    @contextmanager
    def failing_alone(self) -> Iterator[None]:
        """Turn an exception of the block into the failure of this answer.

        Raises:
            torch.AcceleratorError: the device itself failed, which concerns every answer.
        """
        try:
            yield
        except torch.AcceleratorError:
            raise
        except Exception as error:  # whatever it is, the other answers go on
            logger.exception("serve: a request failed; the others go on")
            self.fail(error)

    def tell_end(self) -> None:
        """Tells the listener of the end, once, with the text that was held back."""
        assert self.ending is not None, "the answer has ended"
        if not self._told:
            self._told = True
            self._tell(Piece(self._stop.rest(), self.ending))

    @property
    def first_token_ms(self) -> float | None:
        """From asking to the first token, the wait in the queue included."""
        return 1e3 * (self._first_s - self._asked_s) if self._first_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """From the first token to the last; None of an answer of one token."""
        taken_s = self._last_s - self._first_s
        return (self.completion_tokens - 1) / taken_s if self.completion_tokens > 1 and taken_s > 0 else None

    def _spell(self, text: str) -> None:
        safe = self._stop.feed(text)
        if safe:
            self._tell(Piece(safe))

    def _tell(self, piece: Piece) -> None:
        if self.listener is None:
            return
        try:
            self.listener(piece)
        except Exception:  # whoever asked cannot be reached, for example because its event loop is closed
            logger.exception("serve: nobody takes an answer any more; it is cancelled")
            self.listener = None
            self.cancel()
