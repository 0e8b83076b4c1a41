"""Whole models on the CPU as providers: a prompt, tokens after it and logits, by moegraft, transformers and llama.cpp."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from harness.llama_cpp import IkLlamaCpp, LlamaCpp
from harness.models import injected
from harness.peers import PeerProcess
from harness.rounds import seconds
from moegraft.injection import new_cache
from moegraft.injection.cli.chat.prompt_cache import PREFILL_CHUNK, read_ahead
from moegraft.operators.routing_trace import watch_routing

LONGEST = 2**15  # tokens of the longest prompt of a benchmark
LONG = 4096  # tokens of a context that is read once, and to which the cache is cropped before it is decoded from again
SAMPLED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}  # as Qwen3's generation config
Opener = tuple[Any, ...]  # a function that returns a context of Phases, and its arguments


@dataclass(frozen=True, slots=True)
class Phases:
    """The phases of a provider: `decode(n, context, sampled)` generates n tokens after a prompt of `context`, greedily or by `SAMPLED`, and
    returns the seconds from the first to the last, `prefill(n)` reads a prompt of n tokens, `logits(context)` returns those of the token
    after a prompt, and `experts(n)` how many different experts a layer has in a prompt, on average, where that can be observed."""

    decode: Callable[[int, int, bool], float]
    prefill: Callable[[int], object]
    logits: Callable[[int], NDArray[np.float32]]
    experts: Callable[[int], float] = lambda tokens: math.nan


def decode_rate(phases: Phases, context: int, tokens: int) -> float:
    """Return tokens per second of all tokens except the first, which includes the prompt."""
    return (tokens - 1) / phases.decode(tokens, context, False)


def sampled_rate(phases: Phases, context: int, tokens: int) -> float:
    """Return what `decode_rate` returns, of sampled tokens."""
    return (tokens - 1) / phases.decode(tokens, context, True)


def prompt_rate(phases: Phases, tokens: int) -> float:
    return tokens / seconds(lambda: phases.prefill(tokens))


def experts_of(phases: Phases, tokens: int) -> float:
    return phases.experts(tokens)


def logits_after(phases: Phases, contexts: Sequence[int]) -> list[NDArray[np.float32]]:
    return [phases.logits(context) for context in contexts]


def check_logits(opened: Mapping[str, Opener], contexts: Sequence[int], limit: float) -> float:
    """Return the median relative difference of two providers' logits, which are opened one after the other.

    Raises:
        SystemExit: it is above the limit.
    """
    found = []
    for name, opener in opened.items():
        with PeerProcess(name, *opener) as peer:
            found.append(peer.call(logits_after, contexts))
    error = statistics.median(float(np.linalg.norm(one - other) / np.linalg.norm(other)) for one, other in zip(*found, strict=True))
    if not error <= limit:
        raise SystemExit(f"the logits of {' and '.join(opened)} differ by {error:.2e}; not measured")
    return error


class Clock(BaseStreamer):
    """The times at which `generate` passes on a prompt and each new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def random_tokens(vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (LONGEST,), generator=torch.Generator().manual_seed(1))


def phases_of(model: PreTrainedModel, sampling: Mapping[str, float] = SAMPLED) -> Phases:
    """Return the phases of a transformers model, with our operators or without."""
    prompt = random_tokens(model.config.vocab_size)[None]
    kept: dict[int, Any] = {}  # the cache of the latest long context

    def decode(tokens: int, context: int, sampled: bool) -> float:
        clock, how = Clock(), {"do_sample": True, **sampling} if sampled else {"do_sample": False}
        if context in kept:
            kept[context].crop(context - 1 - kept[context].get_seq_length())  # a negative number: of tokens to remove
        elif context >= LONG:
            kept.clear()
            kept[context] = read_ahead(model, prompt[0, :context].tolist(), new_cache(model), PREFILL_CHUNK)
        how["past_key_values"] = kept.get(context)
        model.generate(prompt[:, :context], **how, min_new_tokens=tokens, max_new_tokens=tokens, streamer=clock)
        _, first, *_, last = clock.times
        return last - first

    def logits(context: int) -> NDArray[np.float32]:
        return np.asarray(model(prompt[:, :context]).logits[0, -1].float())

    def experts(count: int) -> float:
        different: list[int] = []
        with watch_routing(model, lambda call: different.append(call.top_k_index.unique().numel())):
            model(prompt[:, :count], logits_to_keep=1)
        return statistics.mean(different)

    return Phases(decode, lambda count: model(prompt[:, :count], logits_to_keep=1), logits, experts)


@contextmanager
def ours(folder: Path, rules: str) -> Iterator[Phases]:
    """The model of a folder with a config and a GGUF file, with the rules of a text."""
    with torch.inference_mode():
        yield phases_of(injected(folder, rules, gguf=folder / "model.gguf"))


@contextmanager
def stock(folder: Path) -> Iterator[Phases]:
    """transformers on the checkpoint of a folder, in bfloat16."""
    with torch.inference_mode():
        yield phases_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval())


def llama_cpp(folder: Path) -> AbstractContextManager[Phases]:
    return phases_of_engine(LlamaCpp(folder / "model.gguf", torch.get_num_threads()))


def ik_llama_cpp(folder: Path, *, repack: bool = False) -> AbstractContextManager[Phases]:
    return phases_of_engine(IkLlamaCpp(folder / "model.gguf", torch.get_num_threads(), repack=repack))


@contextmanager
def phases_of_engine(engine: LlamaCpp | IkLlamaCpp, sampling: Mapping[str, float] = SAMPLED) -> Iterator[Phases]:
    with engine as peer:
        tokens, kept = random_tokens(peer.vocab).tolist(), 0  # tokens of the latest long context

        def decode(count: int, context: int, sampled: bool) -> float:
            nonlocal kept
            if context == kept:
                peer.crop(context)
            else:
                peer.prefill(tokens[:context])
            kept = context if context >= LONG else 0
            start = time.perf_counter()
            peer.decode(count - 1, **sampling if sampled else {})
            return time.perf_counter() - start

        def prefill(count: int) -> None:
            nonlocal kept
            peer.prefill(tokens[:count])
            kept = 0

        def logits(context: int) -> NDArray[np.float32]:
            prefill(context)
            return peer.logits().copy()

        yield Phases(decode, prefill, logits)
