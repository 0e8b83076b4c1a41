"""One request in the engine: its prompt and options, and its answer as tokens and text, with stop strings."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from moegraft.injection.cli.chat.answer import AnswerStreamer
from moegraft.injection.cli.images import ImageInputs
from moegraft.injection.cli.options import is_greedy
from moegraft.injection.cli.serve.answer_form import AnswerParser, Constraint


class StopFilter:
    """Cuts text before the first stop string, which is `found` then. Text that may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._pending = ""
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        return self.found is not None

    def feed(self, text: str) -> str:
        """Add text, and return the text that may be shown now."""
        if self.stopped:
            return ""
        self._pending += text
        starts = [(at, stop) for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        if starts:
            start, self.found = min(starts)
            safe, self._pending = self._pending[:start], ""
            return safe
        sizes = range(min(len(self._pending), max(map(len, self._stops), default=1) - 1), 0, -1)
        keep = next((size for size in sizes if any(stop.startswith(self._pending[-size:]) for stop in self._stops)), 0)
        cut = len(self._pending) - keep
        safe, self._pending = self._pending[:cut], self._pending[cut:]
        return safe

    def rest(self) -> str:
        """Return the text that is held back, at the end of an answer."""
        pending, self._pending = self._pending, ""
        return pending


logger = logging.getLogger(__name__)
Ending = Literal["stop", "length", "cancelled", "failed"]
FAILED = "the model failed on this request; the server's log has the reason"
LEAST_TOP_P = torch.finfo(torch.float32).tiny


class AnswerError(Exception):
    """A failure of one answer; the message may be shown to the client."""


class BadLogitsError(AnswerError):
    """The logits have NaN or infinite values, so that no token can be chosen."""

    def __init__(self) -> None:
        super().__init__("the model's logits for this request are not numbers (NaN or infinite)")


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The log-probability of a token under the model's own distribution, and the likeliest tokens with theirs; None for a first token.

    Attributes:
        text: what the token adds to the text; of several tokens that make one character, the last adds it.
    """

    token: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt and the options of its answer; top_k 0 samples from all tokens.

    Attributes:
        images: of the prompt; None: it is text alone.
        min_tokens: before which no token of `end_tokens` is chosen, and no stop string is looked for.
        end_tokens: that end the answer.
        max_tokens: 0 is possible with `echo`.
        repetition_penalty: divides or multiplies the logits of all earlier tokens (CTRL, section 4.1).
        presence_penalty, frequency_penalty: subtracted from the logit of a token that the answer has, and for each time it has it.
        logit_bias: added to the logits of tokens.
        logprobs: how many of the likeliest tokens are reported beside each token of the answer; None reports no scores.
        echo: whether the prompt is reported, with its scores if `logprobs` is given.
    """

    token_ids: list[int]
    max_tokens: int
    min_tokens: int = 0
    end_tokens: Sequence[int] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: Sequence[str] = ()
    min_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    echo: bool = False
    images: ImageInputs | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken: temperature or top_p is 0, or too small for float32."""
        return is_greedy(self.temperature) or self.top_p < LEAST_TOP_P


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the answer's text, with the scores of tokens if asked for; the last piece has the reason why the answer ends.

    Attributes:
        tokens: how many tokens came since the piece before.
    """

    text: str
    ending: Ending | None = None
    scores: Sequence[TokenScore] = ()
    tokens: int = 0


class Job:
    """An `Ask` and its answer so far. Only the engine's thread changes it; `cancel` may be called from any thread.

    A failure of this answer alone, such as in decoding its tokens to text, ends it with "failed" and raises nothing.

    Attributes:
        asked_s: when the request came, by `time.perf_counter`.
        error: the message for the client if the answer failed.
        work: the counts of the model's work from the job's first step to its last, by name; None until its end.
        random: the answer's own random numbers, from its seed.
        together: whether other jobs ran at the same time, so that `work` includes theirs.
        prompt_scores: of the prompt's tokens, if they were asked for.

    Args:
        raw: whether the text has special tokens, which mark reasoning and calls of tools.
        parts: finds the answer's reasoning, in which stop strings have no effect; None if it has none.
        constraint: the grammar that the answer follows.
        client: who asks; the engine lets clients take turns.
        scope: whose the conversation is: its cache is used again for requests of this scope only.
        adapter: beside the model's weights; None for the model itself. All jobs that run at one time have the same.
    """

    def __init__(
        self,
        ask: Ask,
        tokenizer: PreTrainedTokenizerBase,
        listener: Callable[[Piece], None] | None = None,
        *,
        raw: bool = False,
        parts: AnswerParser | None = None,
        constraint: Constraint | None = None,
        client: str = "",
        scope: str = "",
        adapter: str | None = None,
    ) -> None:
        self.ask = ask
        self.listener = listener
        self.constraint = constraint
        self.client = client
        self.scope = scope
        self.adapter = adapter
        self.token_ids = list(ask.token_ids)  # prompt and answer
        self.seed = random.SystemRandom().getrandbits(63) if ask.seed is None else ask.seed
        self.random = random.Random(self.seed)
        self.cached_tokens = 0  # tokens of the prompt in the cache of an earlier request
        self.completion_tokens = 0
        self.ending: Ending | None = None
        self.error = FAILED
        self.cancelled = False
        self.work: Mapping[str, int] | None = None
        self.together = False
        self.asked_s = time.perf_counter()
        self._first_s = self._last_s = 0.0
        self._ended = False  # the listener has the last piece
        self._sent_tokens = 0  # of the pieces so far
        self._stop = StopFilter(ask.stop)
        self._parts = parts
        self.prompt_scores: list[TokenScore] = []
        self._scores: list[TokenScore] = []  # not yet sent
        self._streamer = AnswerStreamer(tokenizer, self._spell, skip_special_tokens=not raw)

    @property
    def most_tokens(self) -> int:
        """Tokens of the prompt and the longest answer."""
        return len(self.ask.token_ids) + self.ask.max_tokens

    @property
    def cache_ids(self) -> list[int]:
        """The tokens of prompt and answer; those of images depend on the images' content."""
        images = self.ask.images
        return self.token_ids if images is None else images.cache_ids + self.token_ids[len(images.cache_ids) :]

    @property
    def cut(self) -> bool:
        """Whether the answer was cut off, by its maximum of tokens or a stop string, and not ended by the model."""
        return self.ending == "length" or self._stop.stopped

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has ended the answer."""
        return self._stop.found

    def cancel(self) -> None:
        """End the answer at the next step."""
        self.cancelled = True

    def take(self, token: int, score: TokenScore | None = None) -> bool:
        """Add the next token of the answer; return whether the answer ends with it."""
        assert self.ending is None, "nothing follows the end of an answer"
        ends = token in self.ask.end_tokens
        if score is not None and not ends:
            self._scores.append(score)
        self.token_ids.append(token)
        self.completion_tokens += 1
        self._last_s = time.perf_counter()
        self._first_s = self._first_s or self._last_s
        if ends:
            self.finish("stop")
            if score is not None and self.ask.echo:  # who scores a prompt asks for one token, and takes off the last score
                self._scores.append(score)
        else:
            with self.failing_alone():
                self._streamer.add([token])
            if self._stop.stopped:
                self.finish("stop")
            elif self.completion_tokens >= self.ask.max_tokens:
                self.finish("length")
            elif self.cancelled:
                self.finish("cancelled")
        return self.ending is not None

    def finish(self, ending: Ending) -> None:
        """End the answer, if it has not ended; `report_end` reports it."""
        if self.ending is not None:
            return
        with self.failing_alone():
            self._streamer.end()
            if self._parts is not None:
                self._show(self._stop.feed(self._parts.rest()))
        self.ending = self.ending or ending

    def fail(self, error: Exception) -> None:
        """End the answer with an error, without the text that is held back: decoding it may have failed."""
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
        except Exception as error:  # any error must leave the other answers running
            logger.exception("serve: a request failed; the others continue")
            self.fail(error)

    def report_end(self) -> None:
        """Send the listener the last piece, once, with the text that was held back."""
        assert self.ending is not None, "the answer has ended"
        if not self._ended:
            self._ended = True
            self._send(self._stop.rest(), self._scores)

    @property
    def first_token_ms(self) -> float | None:
        """The time from the request to the first token, including the wait in the queue."""
        return 1e3 * (self._first_s - self.asked_s) if self._first_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """The decode speed; None for an answer of one token."""
        taken_s = self._last_s - self._first_s
        return (self.completion_tokens - 1) / taken_s if self.completion_tokens > 1 and taken_s > 0 else None

    def _spell(self, text: str) -> None:
        if self._scores:
            self._scores[-1] = replace(self._scores[-1], text=text)
        shown = ""
        for part, reasons in [(text, False)] if self._parts is None else self._parts.spans(text):
            free = reasons or self.completion_tokens <= self.ask.min_tokens
            shown += self._stop.rest() + part if free and not self._stop.stopped else self._stop.feed(part)
        self._show(shown)

    def _show(self, safe: str) -> None:
        if safe:
            scores, self._scores = self._scores, []
            self._send(safe, scores)

    def _send(self, text: str, scores: list[TokenScore]) -> None:
        tokens, self._sent_tokens = self.completion_tokens - self._sent_tokens, self.completion_tokens
        if self.listener is None:
            return
        try:
            self.listener(Piece(text, self.ending if self._ended else None, scores, tokens))
        except Exception:  # such as a closed event loop
            logger.exception("serve: an answer cannot be delivered; it is cancelled")
            self.listener = None
            self.cancel()
