"""How long does an expert take by its number of tokens, and n experts of one token? On the CPU, and on a GPU where there is one.

The data of HybriMoE's Figures 3e and 3f, which `benchmarks/traces.py plot` draws: on the CPU the first expert takes longer than the next
ones, and time grows with the load; on a GPU it hardly grows. Run it only on a quiet machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from itertools import count

import numpy as np
import torch
from record import percentiles, write_rows

from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts, Runtime

LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
EXPERTS = 32  # used one after the other, so that weights come from memory
Row = dict[str, object]
Prepare = Callable[[int, int], Callable[[], object]]
"""Gives a call that computes so many experts with so many tokens each."""


def packed_experts(hidden: int, intermediate: int, weights: str) -> PackedExperts:
    """Return packed experts with equal weights at different addresses."""
    packed = PackedExperts(ExpertsShape(EXPERTS, hidden, intermediate), GateSpec("silu"), weights)
    sizes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    drawn = {part: (torch.randn(size, generator=torch.Generator().manual_seed(0)) * 0.02).numpy() for part, size in sizes.items()}
    for expert in range(EXPERTS):
        for part, matrix in drawn.items():
            packed.pack(expert, part, matrix)
    return packed


def on_cpu(hidden: int, intermediate: int, weights: str, threads: int) -> Prepare:
    packed, runtime = packed_experts(hidden, intermediate, weights), Runtime(threads)
    following = count()

    def prepare(experts: int, load: int) -> Callable[[], object]:
        index = (next(following) * experts + np.repeat(np.arange(experts), load))[:, None] % EXPERTS
        tokens = torch.randn(experts * load, hidden).bfloat16().view(torch.uint16).numpy()
        out, share = np.empty_like(tokens), np.ones((experts * load, 1), np.float32)
        return lambda: runtime.forward(packed, tokens, index, share, out)

    return prepare


def on_gpu(hidden: int, intermediate: int) -> Prepare:
    """Return a function that computes bfloat16 experts one after another on the first GPU."""
    sizes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    weights = [[torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes] for _ in range(EXPERTS)]

    def prepare(experts: int, load: int) -> Callable[[], object]:
        x = torch.randn(load, hidden, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()

        def run() -> None:
            for gate, up, down in weights[:experts]:
                (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
            torch.cuda.synchronize()

        return run

    return prepare


def taken_ms(devices: Mapping[str, Prepare], rounds: int) -> dict[tuple[str, str, int, int], list[float]]:
    """Return the ms by device, varied quantity, experts and load; devices alternate, and the first round warms up."""
    cases = [("load", 1, load) for load in LOADS] + [("experts", experts, 1) for experts in COUNTS]
    taken: dict[tuple[str, str, int, int], list[float]] = {}
    for round_number in range(rounds + 1):
        for varied, experts, load in cases:
            for device, prepare in devices.items():
                run = prepare(experts, load)
                start = time.perf_counter()
                run()
                if round_number:
                    taken.setdefault((device, varied, experts, load), []).append((time.perf_counter() - start) * 1e3)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048, help="default: the sizes of DeepSeek-V2-Lite")
    parser.add_argument("--intermediate", type=int, default=1408)
    parser.add_argument("--weights", default="int4", help="weight type on the CPU; the GPU uses bfloat16")
    parser.add_argument("--threads", type=int, default=0, help="0 for one per physical core")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    size = (arguments.hidden, arguments.intermediate)
    devices = {f"cpu {arguments.weights}": on_cpu(*size, arguments.weights, arguments.threads)}
    if torch.cuda.is_available():
        devices["gpu bfloat16"] = on_gpu(*size)
    rows: list[Row] = []
    for (device, varied, experts, load), times_ms in taken_ms(devices, arguments.rounds).items():
        row: Row = {"device": device, "hidden": size[0], "intermediate": size[1], "threads": arguments.threads, "varied": varied}
        rows.append(row | {"experts": experts, "load": load, **percentiles(times_ms, "ms", 4)})
        print(rows[-1], flush=True)
    print(write_rows("expert_times", rows))


if __name__ == "__main__":
    main()
