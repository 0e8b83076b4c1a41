"""One answer: from prompt tokens to streamed text, with what it cost and why it ended."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import DynamicCache

from moegraft.injection.cli.chat.answer_stats import AnswerStats
from moegraft.injection.cli.chat.interrupt import PromptInterrupted, StopRequest
from moegraft.injection.cli.chat.prompt_cache import PromptCache
from moegraft.injection.cli.chat.streamer import AnswerStreamer
from moegraft.injection.cli.loading import LoadedModel
from moegraft.injection.cli.sampling import SamplingOptions
from moegraft.injection.graft import decode_steps_of
from moegraft.injection.prefill import PREFILL_CHUNK, read_ahead, why_not_appendable
from moegraft.operators.errors import NotEnoughMemoryError

logger = logging.getLogger(__name__)
DEFAULT_NEW_TOKENS = 512
Ending = Literal["finished", "length", "context", "interrupted"]


@dataclass(frozen=True, slots=True)
class Answer:
    """`stats` is None when the answer was stopped before its first token."""

    text: str
    ending: Ending
    stats: AnswerStats | None


class Answerer:
    """Answers prompts with one model; keeps what the model knows of the conversation between them.

    Prompts longer than `prefill_chunk` tokens are read in chunks of so many; 0 reads them whole.
    """

    def __init__(
        self, loaded: LoadedModel, sampling: SamplingOptions, seed: int | None = None, *, prefill_chunk: int = PREFILL_CHUNK
    ) -> None:
        self._loaded = loaded
        self._cache = PromptCache()
        self._prefill_chunk = prefill_chunk
        self._said_whole = False
        own = loaded.model.generation_config
        assert own is not None, "a model that generates has a generation config"
        self._arguments = sampling.overrides(model_samples=bool(own.do_sample)) | _ending_tokens(loaded)
        self.max_new_tokens: int = sampling.max_new_tokens or own.max_new_tokens or DEFAULT_NEW_TOKENS
        self.seed = random.SystemRandom().getrandbits(31) if seed is None else seed
        self.reset()

    def reset(self) -> None:
        """Forgets the conversation and starts the random numbers anew, so that the same questions get the same answers."""
        self._cache.drop()
        torch.manual_seed(self.seed)

    @property
    def held(self) -> tuple[list[int], DynamicCache | None]:
        """What the model has read of the conversation, in tokens and as its cache."""
        return self._cache.held

    def resume(self, token_ids: list[int], cache: DynamicCache | None) -> None:
        """Goes on from a cache that holds `token_ids`."""
        if cache is not None:
            self._cache.keep(token_ids, cache)

    def answer(self, token_ids: list[int], on_text: Callable[[str], None]) -> Answer:
        """Streams the answer through `on_text`; Ctrl-C ends it early.

        Raises:
            NotEnoughMemoryError: a GPU has no room left for the conversation.
        """
        streamer, stop = AnswerStreamer(self._loaded.tokenizer, on_text), StopRequest()
        cache, kept = self._cache.take(token_ids)
        room = self._room(len(token_ids))
        model, steps = self._loaded.model, decode_steps_of(self._loaded.model)
        try:
            with stop.listening(self._loaded.model):
                cache = self._read_ahead(token_ids, cache)
                given = cache if steps is None else steps.fixed_cache(model, cache, len(token_ids) + room)
                made = self._generate(token_ids, streamer=streamer, stopping_criteria=[stop], past_key_values=given, max_new_tokens=room)
            known = made.past_key_values
            self._cache.keep(made.sequences[0].tolist(), known if steps is None else steps.grown_cache(model, known))
        except (PromptInterrupted, KeyboardInterrupt):
            stop.requested = True
        except torch.OutOfMemoryError as error:
            message = f"the GPU has no memory left for a conversation of {len(token_ids)} tokens; /reset starts a new one"
            raise NotEnoughMemoryError(message) from error
        finally:
            streamer.end()
        return Answer(streamer.text, self._ending(streamer, stop, room), _stats(streamer, len(token_ids), kept))

    def _read_ahead(self, token_ids: list[int], cache: DynamicCache | None) -> DynamicCache | None:
        if self._prefill_chunk and len(token_ids) > self._prefill_chunk and not self._said_whole:
            reason = why_not_appendable(self._loaded.model)
            if reason is not None:
                self._said_whole = True
                logger.warning("long prompts are read whole, which takes memory: this model cannot read them in chunks, as %s", reason)
        return read_ahead(self._loaded.model, token_ids, cache, self._prefill_chunk)

    def _generate(self, token_ids: list[int], **arguments: Any) -> Any:
        input_ids = torch.tensor([token_ids], device=self._loaded.model.device)
        model: Any = self._loaded.model  # torch types every attribute of a module as a tensor
        return model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            num_beams=1,  # beams cannot be streamed
            max_length=None,  # max_new_tokens alone decides
            return_dict_in_generate=True,
            **self._arguments | arguments,
        )

    def _room(self, prompt_tokens: int) -> int:
        limit = self._loaded.context_tokens
        return self.max_new_tokens if limit is None else min(self.max_new_tokens, limit - prompt_tokens)

    def _ending(self, streamer: AnswerStreamer, stop: StopRequest, room: int) -> Ending:
        if stop.requested:
            return "interrupted"
        if streamer.token_ids and streamer.token_ids[-1] in (self._arguments["eos_token_id"] or ()):
            return "finished"
        return "length" if room == self.max_new_tokens else "context"


def _ending_tokens(loaded: LoadedModel) -> dict[str, Any]:
    """The tokens that end an answer: the model's and its tokenizer's, as chat models are often published with the base model's alone."""
    own = loaded.model.generation_config.eos_token_id
    ends = [own] if isinstance(own, int) else list(own or [])
    if loaded.tokenizer.eos_token_id is not None and loaded.tokenizer.eos_token_id not in ends:
        ends.append(loaded.tokenizer.eos_token_id)
    padding = loaded.tokenizer.pad_token_id
    return {"eos_token_id": ends or None, "pad_token_id": padding if padding is not None else next(iter(ends), 0)}


def _stats(streamer: AnswerStreamer, prompt_tokens: int, kept_tokens: int) -> AnswerStats | None:
    if streamer.first_token_s is None or streamer.last_token_s is None:
        return None
    return AnswerStats(
        prompt_tokens=prompt_tokens,
        kept_tokens=kept_tokens,
        generated_tokens=len(streamer.token_ids),
        first_token_s=streamer.first_token_s - streamer.started_s,
        decode_s=streamer.last_token_s - streamer.first_token_s,
    )
