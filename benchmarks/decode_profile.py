"""Which parts take the time of a decode step on the CPU, layer by layer? moegraft's kernels, PyTorch and Python, in the six-layer model.

moegraft's operators are timed around their calls. PyTorch's operations are timed by its profiler, whose overhead is only in their rows.
With `--threads own` the kernels run on threads of their own instead of PyTorch's, which shows the cost of two thread pools.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from cpu_model import provider
from record import write_rows
from torch.profiler import ProfilerActivity, profile

from moegraft.cpu_backend import Runtime
from moegraft.injection.injected import injection_of
from moegraft.operators import linear as quantized
from moegraft.operators.experts import hybrid
from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.linear import QuantizedLinear

TOP = 8  # number of PyTorch's operations that are shown


class OwnThreads(Runtime):
    """A runtime that does not use PyTorch's threads."""

    def __init__(self, threads: int = 0) -> None:
        super().__init__(threads, None, False)


@contextmanager
def on_threads(whose: str) -> Iterator[None]:
    if whose == "shared":
        yield
        return
    with mock.patch.object(hybrid, "Runtime", OwnThreads), mock.patch.object(quantized, "Runtime", OwnThreads):
        yield


@contextmanager
def timed_operators(spent: dict[str, float]) -> Iterator[None]:
    """Add the seconds of every call of moegraft's operators to `spent`."""

    def timed(name: str, compute: object, *args: object) -> object:
        start = time.perf_counter()
        found = compute(*args)  # type: ignore[operator]
        spent[name] += time.perf_counter() - start
        return found

    def wrapped(name: str, kind: type) -> mock._patch:  # type: ignore[type-arg]
        original = kind.compute
        return mock.patch.object(kind, "compute", lambda self, *args: timed(name, partial(original, self), *args))

    with wrapped("experts", HybridExperts), wrapped("linear layers", QuantizedLinear):
        yield


def measure(weights: str, whose: str, tokens: int, rounds: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    prompt = torch.randint(0, 8192, (1, 8), generator=torch.Generator().manual_seed(1))

    def row(part: str, ms: float) -> dict[str, object]:
        return {"model": "6 layers of Qwen3-30B-A3B", "provider": weights, "threads": whose, "part": part, "ms_per_token": round(ms, 3)}

    with on_threads(whose), provider(weights, 6) as model, torch.inference_mode():
        injection = injection_of(model)
        if injection is not None:
            injection.context.replay = None  # operators are not called in a native program

        def decode() -> float:
            start = time.perf_counter()
            model.generate(prompt, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens)
            return 1e3 * (time.perf_counter() - start) / tokens

        decode()
        whole = statistics.median(decode() for _ in range(rounds))
        spent: dict[str, float] = defaultdict(float)
        with timed_operators(spent):
            timed = decode()
        rows.append(row("a token", whole))
        rows += [row(name, 1e3 * seconds / tokens) for name, seconds in spent.items()]
        rows.append(row("PyTorch, Python and transformers", timed - sum(1e3 * seconds / tokens for seconds in spent.values())))
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            decode()
        slowest = sorted(profiled.key_averages(), key=lambda event: -event.self_cpu_time_total)[:TOP]
        rows += [row(f"profiled: {event.key}", event.self_cpu_time_total / 1e3 / tokens) for event in slowest]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--providers", nargs="+", default=["ours-int4", "ours-int8", "stock"])
    parser.add_argument("--threads", nargs="+", default=["shared", "own"], choices=["shared", "own"])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    for weights in arguments.providers:
        for whose in arguments.threads if weights != "stock" else ["shared"]:
            found = measure(weights, whose, arguments.tokens, arguments.rounds)
            for each in found:
                print(each, flush=True)
            rows += found
    print(write_rows("decode_profile", rows))


if __name__ == "__main__":
    main()
