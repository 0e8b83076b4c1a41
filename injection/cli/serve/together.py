"""Answers several requests at once: one forward pass makes a token for each of them."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from moegraft.injection.cli.serve.batch import Batch, cut
from moegraft.injection.cli.serve.choice import choose, generator, usable
from moegraft.injection.cli.serve.job import BadLogitsError, Job
from moegraft.injection.cli.serve.kept import KeptConversations

logger = logging.getLogger(__name__)
# What a model's own generation config may ask of every token, which only `generate` does.
PROCESSED = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_p": 0.0, "typical_p": 1.0, "bad_words_ids": None}


def why_not_together(model: PreTrainedModel) -> str | None:
    """Why requests for this model are answered one at a time, or None when they can be decoded together."""
    injection: Any = getattr(model, "moegraft", None)
    operator = getattr(injection, "model_operator", None)
    if operator is not None:
        return f"{operator.name} decodes one text at a time"
    if not {"position_ids", "attention_mask", "past_key_values"} <= inspect.signature(model.forward).parameters.keys():
        return "the model does not take positions and a mask"
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    if getattr(model, "_is_stateful", False) or any(type(layer) is not DynamicLayer for layer in layers):
        return "not all of the model's layers attend to everything, and caches of texts of different lengths cannot be joined"
    asked = [name for name, off in PROCESSED.items() if getattr(model.generation_config, name, None) not in (None, off)]
    return f"the model's generation config asks for {', '.join(asked)}" if asked else None


class Together:
    """Texts under way and the prompt being read. Between two steps of the texts at most a chunk of a prompt is read.

    An answer that fails ends alone; a forward pass that fails ends the answers that it computes. The caches of all others stay.
    """

    def __init__(self, model: PreTrainedModel, *, most: int, prefill_chunk: int) -> None:
        self._model: Any = model  # torch types every attribute of a module as a tensor
        self._most = most
        self._chunk = prefill_chunk
        self._kept = KeptConversations()
        self._reading: Job | None = None
        self._read: DynamicCache | None = None
        self._drop_texts()

    def _drop_texts(self) -> None:
        self._batch = Batch(self._model)
        self._jobs: list[Job] = []
        self._numbers: list[torch.Generator] = []

    @property
    def jobs(self) -> list[Job]:
        return [*self._jobs, *([self._reading] if self._reading else [])]

    @property
    def has_room(self) -> bool:
        return self._reading is None and len(self._jobs) < self._most

    def admit(self, job: Job) -> None:
        """Begins with a request; only where there is room."""
        assert self._reading is None, "one prompt is read at a time"
        self._read, job.kept_tokens = self._kept.take(job.ask.token_ids)
        self._reading = job

    def step(self) -> None:
        """Reads a chunk of a prompt, and makes a token for each text."""
        for row in reversed(range(len(self._jobs))):
            if self._jobs[row].cancelled:
                self._jobs[row].finish("cancelled")
                self._leave(row)
        if self._jobs:
            self._decode()
        if self._reading is not None:
            self._read_on(self._reading)

    def forget(self) -> None:
        """Gives up everything, after a failure that may have left caches half-written."""
        self._drop_texts()
        self._reading = self._read = None
        self._kept.drop()

    def _decode(self) -> None:
        try:
            logits = self._batch.step([job.token_ids[-1] for job in self._jobs])
            good = usable(logits).tolist()
            likeliest = logits.argmax(-1).tolist()  # for all greedy texts at once
        except torch.AcceleratorError:  # the device computes nothing after it
            raise
        except Exception as error:  # whatever it is, other prompts and the requests that wait are to be served
            logger.exception("serve: a forward pass failed; the %d answers in it end", len(self._jobs))
            for job in self._jobs:
                job.fail(error)
            self._drop_texts()
            if isinstance(error, torch.OutOfMemoryError):
                self._kept.drop()
            return
        for row in reversed(range(len(self._jobs))):
            job = self._jobs[row]
            with job.failing_alone():
                if not good[row]:
                    raise BadLogitsError
                job.take(likeliest[row] if job.ask.greedy else choose(logits[row], job.ask, self._numbers[row]))
            if job.ending is not None:
                self._leave(row)

    def _leave(self, row: int) -> None:
        job = self._jobs.pop(row)
        self._numbers.pop(row)
        if job.ending != "failed" or job.kept_tokens:
            try:
                self._keep(job, self._batch.copy(row))
            except RuntimeError:  # for lack of memory
                logger.exception("serve: the keys and values of an answer are not kept")
        self._batch.remove(row)

    def _keep(self, job: Job, cache: DynamicCache) -> None:
        """Keeps what the model knows of an answer that ended; of one that failed what it had taken over, as the rest may be bad."""
        if job.ending != "failed":
            self._kept.keep(job.token_ids, cache)
        elif job.kept_tokens:
            self._kept.keep(job.token_ids, cut(cache, job.kept_tokens))

    def _read_on(self, job: Job) -> None:
        with job.failing_alone():
            if job.cancelled:
                job.finish("cancelled")
                self._read = None
            else:
                self._read_chunk(job)
        if job.ending is not None:
            if self._read is not None:
                self._keep(job, self._read)
            self._reading = self._read = None

    def _read_chunk(self, job: Job) -> None:
        cache = self._read if self._read is not None else DynamicCache(config=self._model.config.get_text_config(decoder=True))
        self._read, held = cache, cache.get_seq_length()
        end = min(len(job.token_ids), held + self._chunk) if self._chunk else len(job.token_ids)
        ids = torch.tensor([job.token_ids[held:end]], device=self._model.device)
        extra = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self._model.forward).parameters else {}
        try:
            output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, **extra)
        except torch.OutOfMemoryError:
            self._kept.drop()
            raise
        if end < len(job.token_ids):
            return
        logits = output.logits[0, -1].float()
        if not usable(logits):
            raise BadLogitsError
        numbers = generator(job.seed, logits.device)
        if not job.take(choose(logits, job.ask, numbers)):
            self._batch.add(cache)
            self._jobs.append(job)
            self._numbers.append(numbers)
            self._reading = self._read = None
