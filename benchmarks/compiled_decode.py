"""Does `torch.compile` make decoding on the CPU faster? An injected model's steps over one static cache, as they are and compiled.

The whole step is one graph (`fullgraph=True`), which calls our kernels as custom operations and fuses what is between them. Both ways
decode the same tokens with the same cache; the time of the first compiled call, which compiles unless the compiler's cache on disk has
it, is a column. It does not pay (`results/compiled_decode.csv`), so no rule asks for it; near ties of random weights fall differently.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from cpu_model import provider
from record import write_rows
from transformers import PreTrainedModel, StaticCache

CONTEXT = 8
ROOM = 128  # tokens of the static cache


def decode(model: PreTrainedModel, step: Callable[..., Any], tokens: int) -> tuple[float, list[int]]:
    """Seconds a token after a prompt, and the tokens."""
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    prompt = torch.randint(0, model.config.vocab_size, (1, CONTEXT), generator=torch.Generator().manual_seed(1))
    last = model(prompt, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    chosen = []
    start = time.perf_counter()
    for position in range(CONTEXT, CONTEXT + tokens):
        logits = step(last, past_key_values=cache, position_ids=torch.tensor([[position]]), use_cache=True).logits
        last = logits[:, -1:].argmax(-1)
        chosen.append(int(last))
    return (time.perf_counter() - start) / tokens, chosen


def measure(weights: str, layers: int, tokens: int, rounds: int) -> list[dict[str, object]]:
    with provider(weights, layers) as model, torch.inference_mode():
        compiled = torch.compile(model.forward, fullgraph=True, dynamic=False)
        start = time.perf_counter()
        decode(model, compiled, 2)
        compiling = time.perf_counter() - start
        ways: dict[str, Callable[..., Any]] = {"eager": model, "compiled": compiled}
        times: dict[str, list[float]] = {way: [] for way in ways}
        said: dict[str, list[int]] = {}
        for _ in range(rounds):  # in turn, so that a slow moment meets both
            for way, step in ways.items():
                seconds, said[way] = decode(model, step, tokens)
                times[way].append(seconds)
    same = sum(a == b for a, b in zip(said["eager"], said["compiled"], strict=True))
    return [
        {
            "model": f"{layers} layers of Qwen3-30B-A3B",
            "provider": weights,
            "way": way,
            "first_call_s": round(compiling, 1) if way == "compiled" else "",
            "ms_per_token": round(1e3 * statistics.median(seconds), 3),
            "tokens_as_eager": f"{same} of {tokens}" if way == "compiled" else "",
        }
        for way, seconds in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--providers", nargs="+", default=["ours-int4"])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 6])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    rows = []
    for weights in arguments.providers:
        for layers in arguments.layers:
            found = measure(weights, layers, arguments.tokens, arguments.rounds)
            for row in found:
                print(row, flush=True)
            rows += found
    print(write_rows("compiled_decode", rows))


if __name__ == "__main__":
    main()
