"""How long does attention take on the CPU, beside PyTorch's? One layer of Qwen3-30B-A3B: 32 query heads, 4 of keys and values, 128 columns.

Queries of one token (decode), of six (verifying a draft) and of whole prompts attend to caches of several lengths. Both providers run
alternately in one process on PyTorch's own threads, and their results are first checked against float64. `gb_s` counts the cache once,
`gflop_s` the visible keys.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from record import percentiles, write_rows

from moegraft.cpu_backend import Runtime
from moegraft.operators.cpu import as_array

HEADS, KV_HEADS, COLUMNS = 32, 4, 128
SIZES = ((1, 32), (1, 512), (1, 4096), (6, 512), (6, 4096), (512, 512), (2048, 2048), (512, 4096))
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ERROR_LIMIT = {"bfloat16": 1e-2, "float32": 1e-5}


def providers(runtime: Runtime, dtype: torch.dtype, queries: int, keys: int) -> tuple[dict[str, Callable[[], torch.Tensor]], torch.Tensor]:
    """Return both providers of one call and its float64 result, (queries, heads, columns); the queries are the last tokens of the keys."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, rows, COLUMNS, generator=generator).to(dtype)
        for heads, rows in ((HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys))
    )
    seen = torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries)
    causal = queries == keys
    mask = None if causal or queries == 1 else seen
    out = torch.empty(1, queries, HEADS, COLUMNS, dtype=dtype)

    def ours() -> torch.Tensor:
        arrays = (as_array(tensor) for tensor in (query, key, value, out))
        runtime.attention(*arrays, scale=COLUMNS**-0.5, mask=None if mask is None else mask.numpy(), causal=causal)
        return out[0]

    def pytorch() -> torch.Tensor:
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=True)
        return found[0].transpose(0, 1)

    wide = (tensor.double() for tensor in (query, key, value))
    expected = F.scaled_dot_product_attention(*wide, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)
    return {"moegraft": ours, "pytorch": pytorch}, expected


def measure(runtime: Runtime, name: str, queries: int, keys: int, rounds: int) -> list[dict[str, object]]:
    runs, expected = providers(runtime, DTYPES[name], queries, keys)
    errors = {who: float((run().double() - expected).norm() / expected.norm()) for who, run in runs.items()}
    if not errors["moegraft"] <= ERROR_LIMIT[name]:
        raise SystemExit(f"{name} {queries} of {keys}: relative error {errors['moegraft']:.1e}; not measured")
    calls = max(1, 2000 // (queries * keys // 64 + 20))
    times: dict[str, list[float]] = {who: [] for who in runs}
    for _ in range(rounds):
        for who, run in runs.items():
            run()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            times[who].append(1e3 * (time.perf_counter() - start) / calls)
    ms = {who: statistics.median(taken) for who, taken in times.items()}
    shown = queries * keys - queries * (queries - 1) / 2
    size = DTYPES[name].itemsize
    return [
        {
            "provider": who,
            "dtype": name,
            "queries": queries,
            "keys": keys,
            **percentiles(times[who], "ms", 4),
            "times_as_fast_as_pytorch": round(ms["pytorch"] / ms[who], 2),
            "gb_s": round(2 * KV_HEADS * keys * COLUMNS * size / ms[who] / 1e6, 1),
            "gflop_s": round(4 * HEADS * COLUMNS * shown / ms[who] / 1e6, 1),
            "relative_error": f"{errors[who]:.1e}",
        }
        for who in runs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    runtime = Runtime()
    rows: list[dict[str, object]] = []
    with torch.inference_mode():
        for name in arguments.dtypes:
            for queries, keys in SIZES:
                rows += measure(runtime, name, queries, keys, arguments.rounds)
                print(*rows[-2:], sep="\n", flush=True)
    if not arguments.no_write:
        print(write_rows("cpu_attention", rows, ("torch",)))


if __name__ == "__main__":
    main()
