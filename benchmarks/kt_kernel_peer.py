"""How fast is one MoE layer on the CPU beside KTransformers' own kernel? Shapes of Qwen3-30B-A3B, bfloat16, int8 and int4.

`kt-kernel` (`pip install --no-deps kt-kernel`, since it pins a PyTorch of its own that this use does not need) chooses its instruction set
by the CPU, like moegraft. Its idle workers spin and would disturb other providers, so each provider runs in a process of its own; processes
alternate round by round, so that changes of the machine affect all alike. The row of a provider that crashes has its `failure`. Weights,
ids and their order are equal, and results are first checked against float64. On all cores, kt-kernel's workers and its spinning caller
compete for time slices, so it is also measured with one thread less, and the better figure counts. Its int4 has one scale per row,
moegraft's one for 32 columns: `relative_error` shows the difference.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from _peer_process import PeerFailed, PeerProcess
from cpu_experts import (
    DISTINCT,
    ERROR_LIMIT,
    HIDDEN,
    INTERMEDIATE,
    NUM_EXPERTS,
    TOP_K,
    Forward,
    Provider,
    check,
    draw_weights,
    ours,
    routings,
)
from record import percentiles, write_rows

CALLS = {1: 120, 4: 60, 16: 20, 64: 8, 512: 3}
WEIGHT_TYPES = ("bfloat16", "int8", "int4")


def kt_kernel(weights: dict[str, torch.Tensor], weight_type: str, threads: int) -> Provider:
    """Return kt-kernel's layer over the same experts, whose weights it quantises in memory."""
    from kt_kernel import kt_kernel_ext as kt

    pool = kt.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
    infer = kt.CPUInfer(pool)
    parts = {part: matrix.repeat(NUM_EXPERTS // DISTINCT, 1, 1).contiguous() for part, matrix in weights.items()}
    on_gpu = torch.zeros(NUM_EXPERTS, dtype=torch.bool)
    config = kt.moe.MOEConfig(NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, on_gpu.data_ptr())
    config.layer_idx, config.pool, config.max_len, config.save, config.load = 0, infer.backend_, max(CALLS), False, False
    for part, matrix in parts.items():
        if weight_type == "bfloat16":
            setattr(config, f"{part}_projs", [[expert.data_ptr() for expert in matrix]])
        else:
            setattr(config, f"{part}_proj", matrix.data_ptr())
    classes = {"bfloat16": kt.moe.AMXBF16_MOE, "int8": kt.moe.AMXInt8_MOE, "int4": kt.moe.AMXInt4_MOE}
    layer = classes[weight_type](config)
    order = torch.arange(NUM_EXPERTS)
    infer.submit(layer.load_weights_task(order.data_ptr()))
    infer.sync()
    kept = (parts, on_gpu, order)  # read by its threads

    def run(x: torch.Tensor, ids: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        assert kept
        out, tokens = torch.empty_like(x), torch.tensor([len(x)], dtype=torch.int32)
        pointers = (tensor.data_ptr() for tensor in (ids, share, x, out))
        infer.submit(layer.forward_task(tokens.data_ptr(), TOP_K, *pointers, False))
        infer.sync()
        return out

    return Provider("kt-kernel", weight_type, threads, 0, run)


def timed(run: Forward, tokens: int, seed: int) -> list[float]:
    """Return the ms of each call except the first few."""
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
    found = []
    for ids, share in routings(tokens, CALLS[tokens] + 2, seed):
        start = time.perf_counter()
        run(x, ids, share)
        found.append(1e3 * (time.perf_counter() - start))
    return found[2:]


@contextmanager
def open_provider(name: str, weight_type: str, threads: int) -> Iterator[Provider]:
    torch.set_num_threads(1)
    if name == "kt-kernel":
        ERROR_LIMIT.update(int8=5e-2, int4=0.4)
        yield kt_kernel(draw_weights(), weight_type, threads)
    else:
        yield next(ours(draw_weights(), threads, (weight_type,)))


def measured(provider: Provider, seed: int) -> dict[str, Any]:
    error = check(provider, draw_weights())
    return {"error": error, "times": {tokens: timed(provider.run, tokens, seed) for tokens in CALLS}}


def rows_of(weight_type: str, threads: int, rounds: int) -> list[dict[str, object]]:
    runs = [("moegraft", threads), *(("kt-kernel", count) for count in (threads, threads - 1) if count)]
    found: dict[tuple[str, int], list[dict[str, Any]]] = {run: [] for run in runs}
    rows: list[dict[str, object]] = []
    failed = set()
    for turn in range(rounds):
        for run in runs:
            if run in failed:
                continue
            name, count = run
            try:
                with PeerProcess(name, open_provider, name, weight_type, count) as peer:
                    found[run].append(peer.call(measured, turn))
            except PeerFailed as failure:
                failed.add(run)
                rows.append({"provider": name, "weights": weight_type, "threads": count, "failure": failure.reason})
                print(rows[-1], flush=True)
    for tokens in CALLS:
        times = {run: np.concatenate([each["times"][tokens] for each in found[run]]) for run in runs if found[run]}
        best = min((float(np.median(times[run])) for run in times if run[0] == "kt-kernel"), default=math.nan)
        for run in times:
            figures = percentiles(times[run], "ms", 3)
            rows.append(
                {
                    "provider": run[0],
                    "weights": weight_type,
                    "threads": run[1],
                    "tokens": tokens,
                    **figures,
                    "times_as_fast_as_kt_kernel": "" if math.isnan(best) else round(best / figures["p50_ms"], 2),
                    "relative_error": f"{found[run][0]['error']:.1e}",
                }
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--weights", nargs="+", default=list(WEIGHT_TYPES), choices=WEIGHT_TYPES)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    if find_spec("kt_kernel") is None:
        raise SystemExit("kt-kernel is not installed: pip install --no-deps kt-kernel")

    rows = [row for kind in arguments.weights for row in rows_of(kind, arguments.threads, arguments.rounds)]
    if not arguments.no_write:
        print(write_rows("kt_kernel", rows, ("torch", "kt-kernel")))


if __name__ == "__main__":
    main()
