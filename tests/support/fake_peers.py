"""Peers that the benchmarks' processes import by name: one that works, and some that fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phases:
    """The interface of `whole_models.Phases`; a `deadly` phase ends the process like an illegal instruction."""

    deadly: str = ""

    def decode(self, tokens: int, context: int, sampled: bool) -> float:
        if self.deadly == f"decode after {context}":
            os.kill(os.getpid(), signal.SIGILL)
        return 0.002 * tokens  # rates are finite

    def experts(self, tokens: int) -> float:
        return 3.0

    def prefill(self, tokens: int) -> None:
        if self.deadly == "prefill":
            os.kill(os.getpid(), signal.SIGILL)


@contextmanager
def working() -> Iterator[Phases]:
    yield Phases()


@contextmanager
def dying_at(phase: str) -> Iterator[Phases]:
    yield Phases(phase)


@contextmanager
def dying_when_opened() -> Iterator[Phases]:
    os.kill(os.getpid(), signal.SIGILL)
    yield Phases()


@contextmanager
def unloadable() -> Iterator[Phases]:
    raise RuntimeError("cannot load model.gguf")
    yield Phases()


def process_id(peer: Phases) -> int:
    return os.getpid()


def kill(peer: Phases, number: int) -> None:
    os.kill(os.getpid(), number)


def leave(peer: Phases, code: int) -> None:
    os._exit(code)


def fail(peer: Phases, text: str) -> None:
    raise ValueError(text)


def refuse(peer: Phases, text: str) -> None:
    raise SystemExit(text)


@contextmanager
def layer_provider(name: str, weight_type: str, threads: int) -> Iterator[str]:
    """A layer for `cpu_experts`; the peer with two threads ends its process."""
    yield "dies" if (name, threads) == ("kt-kernel", 2) else "works"


def measured_layer(provider: str, seed: int) -> dict[str, object]:
    if provider == "dies" and seed == 1:
        os.kill(os.getpid(), signal.SIGILL)
    return {"error": 1e-3, "times": {tokens: [1.0 + seed, 2.0 + seed] for tokens in (1, 4, 16, 64, 512)}}
