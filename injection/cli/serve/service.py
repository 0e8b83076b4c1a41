"""A loaded model with the engine that serves it, and the conversion of requests to jobs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from moegraft.injection.cli.chat.answer import end_tokens, pad_token
from moegraft.injection.cli.chat.conversation import Conversation, PromptRefusedError
from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.serve.decoders import BatchedDecoder, SequentialDecoder, batching_obstacle
from moegraft.injection.cli.serve.engine import Decoder, Engine
from moegraft.injection.cli.serve.job import Ask, Job, Piece
from moegraft.injection.cli.serve.metrics import work_counts
from moegraft.injection.cli.serve.protocol import Request, RequestError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one server.

    Attributes:
        max_queue: requests that may wait.
        max_tokens: of one answer.
        max_body: bytes of one request.
        max_batch: requests answered at once.
        prefill_chunk: prompt tokens computed between two decode steps; 0: all.
    """

    max_queue: int = 64
    max_tokens: int = 4096
    max_body: int = 1 << 20
    max_batch: int = 32
    prefill_chunk: int = 512


class Service:
    """One loaded model and its engine, whose thread starts with the constructor and ends with `close`."""

    def __init__(self, loaded: LoadedModel, limits: Limits) -> None:
        self.loaded = loaded
        self.limits = limits
        self.model_id = Path(loaded.name).resolve().name if Path(loaded.name).expanduser().is_dir() else loaded.name.replace(" ", "-")
        self.placement = loaded.placement()  # before any request; the work of operators is in their statistics
        self.ends = end_tokens(loaded)
        self.alone_because = batching_obstacle(loaded.model)
        self.engine = Engine(self._decoder(), max_queue=limits.max_queue, counts=lambda: work_counts(loaded.model))

    def _decoder(self) -> Decoder:
        loaded, limits = self.loaded, self.limits
        if self.alone_because:
            logger.warning("serve: requests are answered one at a time: %s", self.alone_because)
            return SequentialDecoder(loaded.model, pad_token=pad_token(loaded), prefill_chunk=limits.prefill_chunk)
        return BatchedDecoder(loaded.model, most=limits.max_batch, prefill_chunk=limits.prefill_chunk)

    def close(self) -> None:
        self.engine.close()

    def job(self, request: Request, listener: Callable[[Piece], None] | None = None) -> Job:
        """
        Raises:
            RequestError: the request names another model, or exceeds a limit.
        """
        if request.model is not None and request.model != self.model_id:
            raise RequestError(404, f"unknown model {request.model[:80]!r}; this server has {self.model_id!r}", code="model_not_found")
        return Job(self._ask(request, self._token_ids(request)), self.loaded.tokenizer, self.ends, listener)

    def _token_ids(self, request: Request) -> list[int]:
        if isinstance(request.prompt, list):
            embeddings: Any = self.loaded.model.get_input_embeddings()
            size = embeddings.weight.shape[0]
            if not all(0 <= token < size for token in request.prompt):
                raise RequestError(400, f"prompt has tokens outside of the range from 0 to {size - 1}", param="prompt")
            return request.prompt
        if request.kind == "text":
            token_ids = list(self.loaded.tokenizer(request.prompt)["input_ids"])
            if not token_ids:
                raise RequestError(400, "prompt has no tokens", param="prompt")
            return token_ids
        conversation = Conversation(self.loaded.tokenizer)
        conversation.restore(request.messages)
        try:
            return conversation.prompt(0).token_ids
        except PromptRefusedError as error:
            raise RequestError(422, str(error), param="messages") from error

    def _ask(self, request: Request, token_ids: list[int]) -> Ask:
        context, limit = self.loaded.context_tokens, self.limits.max_tokens
        if request.max_tokens is not None and request.max_tokens > limit:
            raise RequestError(422, f"max_tokens is {request.max_tokens}, and this server's limit is {limit}", param="max_tokens")
        room = limit if context is None else context - len(token_ids)
        if room < 1:
            message = f"the prompt has {len(token_ids)} tokens, and the model's context {context}, including the answer"
            raise RequestError(422, message, code="context_length_exceeded")
        own: Any = self.loaded.model.generation_config
        temperature = request.temperature
        if temperature is None:
            temperature = _own(own, "temperature", 1.0) if own.do_sample else 0.0
        return Ask(
            token_ids=token_ids,
            max_tokens=min(request.max_tokens or own.max_new_tokens or limit, limit, room),
            temperature=float(temperature),  # `generate` requires a float
            top_p=float(request.top_p if request.top_p is not None else _own(own, "top_p", 1.0)),
            top_k=request.top_k if request.top_k is not None else _own(own, "top_k", 0),
            seed=None if request.seed is None else request.seed & ((1 << 63) - 1),
            stop=request.stop,
        )


def _own(config: GenerationConfig, name: str, neutral: Any) -> Any:
    """Return the model's own value of a sampling option, which has no effect if the model does not sample."""
    value = getattr(config, name, None)
    return value if config.do_sample and value is not None else neutral
