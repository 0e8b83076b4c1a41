"""The answer to one prompt: from tokens to streamed text, with its speed and the reason why it ended."""

from __future__ import annotations

import logging
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_layers import GradientCheckpointingLayer

from moegraft.injection.cli.chat.prompt_cache import PREFILL_CHUNK, Checkpoint, PromptCache, why_not_appendable
from moegraft.injection.cli.images import ImageInputs
from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.options import SamplingOptions
from moegraft.injection.injected import injection_of
from moegraft.operators.errors import NotEnoughMemoryError, human_bytes


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """Token counts and seconds of one answer."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, in the cache of the turn before
    generated_tokens: int
    first_token_s: float  # from the request to the first token
    decode_s: float  # from the first token to the last

    @property
    def prefill_tokens_per_s(self) -> float:
        return (self.prompt_tokens - self.cached_tokens) / self.first_token_s if self.first_token_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float | None:
        """The decode speed; None for an answer of one token, which has no decode step."""
        return (self.generated_tokens - 1) / self.decode_s if self.generated_tokens > 1 and self.decode_s else None

    def line(self) -> str:
        computed = f" ({self.prompt_tokens - self.cached_tokens} new)" if self.cached_tokens else ""
        decode = f" at {self.decode_tokens_per_s:.1f}/s" if self.decode_tokens_per_s else ""
        return (
            f"prompt: {_tokens(self.prompt_tokens)}{computed} at {self.prefill_tokens_per_s:.1f}/s; "
            f"answer: {_tokens(self.generated_tokens)}{decode}"
        )


def sums_line(answers: Sequence[AnswerStats]) -> str:
    """Return one line on the answers since the program started."""
    if not answers:
        return "no answer yet"
    computed, prefill_s = sum(each.prompt_tokens - each.cached_tokens for each in answers), sum(each.first_token_s for each in answers)
    generated, decode_s = sum(each.generated_tokens for each in answers), sum(each.decode_s for each in answers)
    prefill = f" at {computed / prefill_s:.1f}/s" if prefill_s else ""
    decode = f" at {(generated - len(answers)) / decode_s:.1f}/s" if decode_s else ""
    return f"answers so far: {len(answers)}; computed of prompts: {_tokens(computed)}{prefill}; generated: {_tokens(generated)}{decode}"


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


class PromptInterrupted(Exception):
    """Generation was stopped before the first token."""


class StopRequest(StoppingCriteria):
    """A stopping criterion that the first Ctrl-C sets; a second Ctrl-C raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.requested = False
        self._hooks: list[RemovableHandle] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._remove_hooks()
        return torch.full((input_ids.shape[0],), self.requested, dtype=torch.bool, device=input_ids.device)

    @contextmanager
    def listening(self, model: PreTrainedModel) -> Iterator[None]:
        """Handle Ctrl-C while the body runs.

        Raises:
            PromptInterrupted: stopped between two layers while the prompt was computed, which can take minutes.
        """
        # For the prompt alone: decode steps of a model with hooks run layer by layer.
        self._hooks = [
            module.register_forward_pre_hook(self._between_layers)
            for module in model.modules()
            if isinstance(module, GradientCheckpointingLayer)  # the base class of transformers' decoder layers
        ]
        main_thread = threading.current_thread() is threading.main_thread()  # others cannot set signal handlers
        previous = signal.signal(signal.SIGINT, self._request) if main_thread else None
        try:
            yield
        finally:
            if main_thread:
                signal.signal(signal.SIGINT, previous)
            self._remove_hooks()

    def _request(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def _between_layers(self, module: torch.nn.Module, args: Any) -> None:
        if self.requested:
            raise PromptInterrupted

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


MOST_HELD = 16  # tokens without complete characters, which are decoded again with each further one
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how tokenizers decode an incomplete character


class AnswerStreamer(BaseStreamer):
    """Decodes tokens to text, and calls `on_text` with each piece that later tokens cannot change."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._on_text = on_text
        self._saw_prompt = False
        self._shown = 0  # the number of tokens whose text was passed on
        self._context = 0  # tokens before this index do not affect the text of later ones
        self.token_ids: list[int] = []
        self.text = ""
        self.started_s = time.perf_counter()
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    def put(self, value: torch.Tensor) -> None:
        """Add tokens, any number at a time; the first call is with the prompt."""
        if self._saw_prompt:
            self.add(value.reshape(-1).tolist())
        self._saw_prompt = True

    def add(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the answer."""
        self.last_token_s = time.perf_counter()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s
        self.token_ids.extend(token_ids)
        self._advance(finished=False)

    def end(self) -> None:
        self._advance(finished=True)

    def _advance(self, *, finished: bool) -> None:
        # A token's text can depend on the one before (a leading space), so it is decoded together with some tokens before.
        known = self._decode(self.token_ids[self._context : self._shown])
        text = self._decode(self.token_ids[self._context :])
        unfinished = len(self.token_ids) - self._shown < MOST_HELD and not finished
        if unfinished and (len(text) <= len(known) or text.endswith(UNFINISHED)):
            return
        self._context, self._shown = self._shown, len(self.token_ids)
        if len(text) > len(known):
            self.text += text[len(known) :]
            self._on_text(text[len(known) :])

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        assert isinstance(text, str), "one sequence decodes to one string"
        return text


def token_texts(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text of all; of several tokens that make one character, the last adds it."""
    texts: list[str] = []

    def add(text: str) -> None:
        texts[-1] += text

    streamer = AnswerStreamer(tokenizer, add, skip_special_tokens=False)
    for token in token_ids:
        texts.append("")
        streamer.add([token])
    streamer.end()
    return texts


logger = logging.getLogger(__name__)
DEFAULT_NEW_TOKENS = 512
Ending = Literal["finished", "length", "context", "interrupted"]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's text; `stats` is None if it was stopped before the first token."""

    text: str
    ending: Ending
    stats: AnswerStats | None


class Answerer:
    """Answers prompts with one model, and keeps its key-value cache between them.

    Prompts longer than `prefill_chunk` tokens are computed in chunks of this size; 0 computes them whole.
    """

    def __init__(
        self, loaded: LoadedModel, sampling: SamplingOptions, seed: int | None = None, *, prefill_chunk: int = PREFILL_CHUNK
    ) -> None:
        self._loaded = loaded
        self.cache = PromptCache(loaded.model)
        self._prefill_chunk = prefill_chunk
        self._warned = False
        defaults = loaded.model.generation_config
        assert defaults is not None, "a model that generates has a generation config"
        sampled = sampling.overrides(model_samples=bool(defaults.do_sample), model_temperature=defaults.temperature)
        ends, padding = end_tokens(loaded), pad_token(loaded)
        self._arguments = {**sampled, "eos_token_id": ends or None, "pad_token_id": padding, "tokenizer": loaded.tokenizer}
        self.max_new_tokens: int = sampling.max_new_tokens or defaults.max_new_tokens or DEFAULT_NEW_TOKENS
        self.seed = random.SystemRandom().getrandbits(31) if seed is None else seed
        self.reset()

    def reset(self) -> None:
        """Drop the cache and reset the random numbers, so that the same questions get the same answers."""
        self.cache.drop()
        torch.manual_seed(self.seed)

    def resume(self, token_ids: list[int], cache: DynamicCache | None, checkpoints: Sequence[Checkpoint]) -> None:
        """Continue from a cache that holds `token_ids`."""
        if cache is not None:
            self.cache.keep(token_ids, cache, checkpoints)

    def answer(self, token_ids: list[int], on_text: Callable[[str], None], images: ImageInputs | None = None) -> Answer:
        """Generate an answer to a prompt and its images, and pass its text to `on_text`; Ctrl-C ends it early.

        Raises:
            NotEnoughMemoryError: the conversation does not fit in a GPU's memory.
        """
        streamer, stop = AnswerStreamer(self._loaded.tokenizer, on_text), StopRequest()
        cache, cached_tokens = self.cache.take(token_ids if images is None else images.cache_ids, images)
        limit = self._loaded.context_tokens
        room = self.max_new_tokens if limit is None else min(self.max_new_tokens, limit - len(token_ids))
        given = {**self._arguments, "streamer": streamer, "stopping_criteria": [stop], "max_new_tokens": room}
        if images is None:
            self._warn_of_whole_prompt(token_ids)
        try:
            with stop.listening(self._loaded.model):
                self.cache.generate(token_ids, cache, images, self._prefill_chunk, **given)
        except (PromptInterrupted, KeyboardInterrupt):
            stop.requested = True
        except torch.OutOfMemoryError as error:
            message = f"a conversation of {len(token_ids)} tokens does not fit in the GPU's memory; /reset starts a new one"
            raise NotEnoughMemoryError(message) from error
        finally:
            streamer.end()
        return Answer(streamer.text, self._ending(streamer, stop, room), _stats(streamer, len(token_ids), cached_tokens))

    def _warn_of_whole_prompt(self, token_ids: list[int]) -> None:
        if self._prefill_chunk and len(token_ids) > self._prefill_chunk and not self._warned:
            reason = why_not_appendable(self._loaded.model)
            if reason is not None:
                self._warned = True
                logger.warning("long prompts are computed whole, which takes memory: this model does not support chunks (%s)", reason)

    def _ending(self, streamer: AnswerStreamer, stop: StopRequest, room: int) -> Ending:
        if stop.requested:
            return "interrupted"
        ended = streamer.token_ids and streamer.token_ids[-1] in (self._arguments["eos_token_id"] or ())
        if ended or len(streamer.token_ids) < room:  # as by a stop string of the model's
            return "finished"
        return "length" if room == self.max_new_tokens else "context"


def end_tokens(loaded: LoadedModel) -> list[int]:
    """Return the tokens that end an answer: the model's and the tokenizer's, as many chat models have only the base model's own."""
    of_model: Any = loaded.model.generation_config.eos_token_id
    ends = [of_model] if isinstance(of_model, int) else list(of_model or [])
    of_tokenizer = loaded.tokenizer.eos_token_id
    return ends if of_tokenizer is None or of_tokenizer in ends else [*ends, of_tokenizer]


def pad_token(loaded: LoadedModel) -> int:
    """Return the padding token that `generate` requires; its value has no effect on one sequence."""
    padding = loaded.tokenizer.pad_token_id
    return padding if padding is not None else next(iter(end_tokens(loaded)), 0)


def _stats(streamer: AnswerStreamer, prompt_tokens: int, cached_tokens: int) -> AnswerStats | None:
    if streamer.first_token_s is None or streamer.last_token_s is None:
        return None
    return AnswerStats(
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        generated_tokens=len(streamer.token_ids),
        first_token_s=streamer.first_token_s - streamer.started_s,
        decode_s=streamer.last_token_s - streamer.first_token_s,
    )


def work_lines(model: PreTrainedModel) -> list[str]:
    """Return lines on drafts, if there were any, on decode steps, and on each device that experts share."""
    injection = injection_of(model)
    if injection is None:
        return []
    lines = []
    operator = injection.model_operator
    if operator is not None and operator.statistics().get("rounds"):
        lines.append(f"drafts: {_drafts(operator.statistics())}")
    statistics: Any = injection.statistics()  # nested mappings without a common type
    if any(statistics["decode_steps"].values()):
        lines.append(f"decode steps: {_steps(statistics['decode_steps'])}")
    if statistics["files"]:
        lines.append(f"experts in files: {_files(statistics['files'])}")
    for device, figures in statistics["devices"].items():
        parts = (f"{name} {value}" if name == "slots" else f"{name}: {value}" for name, value in figures.items())
        lines.append(f"{device}: {', '.join(parts)}")
    return lines


def _steps(statistics: Mapping[str, Any]) -> str:
    times = f", {statistics['step_us']} us each" if statistics["replayed_steps"] else ""
    if times and "outside_kernels_us" in statistics:
        times += f", {statistics['outside_kernels_us']} us of them outside kernels"
    others = f"; others layer by layer: {'; '.join(statistics['reasons'])}" if statistics["reasons"] else ""
    return f"{statistics['replayed_steps']} as {'native programs' if 'programs' in statistics else 'captured graphs'}{times}{others}"


def _files(statistics: Mapping[str, Any]) -> str:
    demanded, waited_s = statistics["demanded"], statistics["waited_ms"] / 1e3
    there, on_their_way = (statistics[name] / max(demanded, 1) for name in ("resident", "arriving"))
    rate = f" at {statistics['waited_bytes'] / waited_s / 1e9:.2f} GB/s" if waited_s else ""
    return (
        f"{statistics['frames']:.0f} in memory; of {demanded:.0f} that were used {there:.1%} were there and {on_their_way:.1%} on their "
        f"way; {human_bytes(int(statistics['read_bytes']))} read, {waited_s:.2f} s waited{rate}"
    )


def _drafts(statistics: Mapping[str, Any]) -> str:
    seconds = {name: f"{statistics[f'{name}_ms'] / 1e3:.2f} s" for name in ("draft", "verify", "plain")}
    accepted = " ".join(f"{share:.2f}" for share in statistics["acceptance_by_position"])
    lossy = ""
    if statistics["agreement"] is not None:
        agreement, perplexity = statistics["agreement"], statistics["perplexity"]
        lossy = f"; {agreement:.1%} of tokens as in lossless decoding, perplexity {perplexity:.2f} under the full model"
    return (
        f"{statistics['rounds']} rounds of {statistics['tokens_per_round']:.2f} tokens; accepted by position "
        f"{accepted}; {seconds['draft']} drafting, {seconds['verify']} verifying, "
        f"{seconds['plain']} for {statistics['plain_tokens']} tokens without a draft; {statistics['schedule']}{lossy}"
    )
