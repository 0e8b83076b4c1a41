"""How fast is one MoE layer on the CPU beside KTransformers' own kernel, or beside an earlier commit's? Shapes of Qwen3-30B-A3B.

    python benchmarks/cpu_layer_pairs.py                 # beside kt-kernel: pip install --no-deps kt-kernel, as it pins another PyTorch
    git worktree add ../base COMMIT && (cd ../base && python setup.py build_ext --inplace)
    python benchmarks/cpu_layer_pairs.py --base ../base  # beside an earlier commit with the same Python interface of the kernels

Each provider runs in a process of its own, since kt-kernel's idle workers spin and would disturb the others; processes alternate round by
round, so that changes of the machine affect all alike. The row of a provider that crashes has its `failure`. Weights, ids and their order
are equal, and results are first checked against float64. `ratio` is the median over rounds of a provider's time over moegraft's. On all
cores, kt-kernel's workers and its spinning caller compete for time slices, so it is also measured with one thread less, and the better
figure counts. Its int4 has one scale per row, moegraft's one for 32 columns: `relative_error` shows the difference.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
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
from harness.peers import PeerFailed, PeerProcess
from harness.record import Recorder, parser
from harness.rounds import median_ratio, percentiles

CALLS = {1: 120, 4: 60, 16: 20, 64: 8, 512: 3}
WEIGHT_TYPES = ("bfloat16", "int8", "int4", "q4_k", "q6_k")  # kt-kernel has the first three
Run = tuple[str, int]  # a provider and its threads


def kt_kernel(weights: Mapping[str, torch.Tensor], weight_type: str, threads: int) -> Provider:
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

    return Provider("kt-kernel", weight_type, threads, 0, run, weights)


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
    return {"error": check(provider), "times": {tokens: timed(provider.run, tokens, seed) for tokens in CALLS}}


def importing(packages: str | None) -> AbstractContextManager[object]:
    """Let processes that start in the body import moegraft's packages from a folder."""
    paths = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
    return mock.patch.dict(os.environ, {"PYTHONPATH": paths}) if packages else nullcontext()


def rows_of(weight_type: str, runs: Mapping[Run, str | None], rounds: int) -> Iterator[dict[str, object]]:
    """Yield a row for each provider and number of tokens, moegraft's first; `runs` has the packages' folder, or None for this checkout."""
    found: dict[Run, list[dict[str, Any]]] = {run: [] for run in runs}
    failed = set()
    for turn in range(rounds):
        for run in (run for run in runs if run not in failed):
            name, threads = run
            try:
                with importing(runs[run]), PeerProcess(name, open_provider, name, weight_type, threads) as peer:
                    found[run].append(peer.call(measured, turn))
            except PeerFailed as failure:
                failed.add(run)
                yield {"provider": name, "weights": weight_type, "threads": threads, "failure": failure.reason}
    for tokens in CALLS:
        rounds_ms = {run: [statistics.median(each["times"][tokens]) for each in found[run]] for run in runs if found[run]}
        own = next(iter(rounds_ms.values()), [])
        for run, medians in rounds_ms.items():
            about = {"provider": run[0], "weights": weight_type, "threads": run[1], "tokens": tokens}
            ms = percentiles(np.concatenate([each["times"][tokens] for each in found[run]]), "ms", 3)
            ratio = {"ratio": round(median_ratio(medians, own[: len(medians)]), 3)}
            yield {**about, **ms, **ratio, "relative_error": f"{found[run][0]['error']:.1e}"}


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--base", type=Path, help="a checkout of an earlier commit, with its extension built")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--weights", nargs="+", choices=WEIGHT_TYPES)
    given = options.parse_args()
    runs: dict[Run, str | None] = {("moegraft", given.threads): None}
    with tempfile.TemporaryDirectory() as folder:
        if given.base is not None:
            named = subprocess.run(
                ["git", "describe", "--always"], cwd=given.base, capture_output=True, text=True, check=True
            ).stdout.strip()
            (Path(folder) / "moegraft").mkdir()
            for package in ("cpu_backend", "operators", "injection", "rules"):
                (Path(folder) / "moegraft" / package).symlink_to(given.base.resolve() / package)
            runs[named, given.threads] = folder
            rows = Recorder("cpu_layer_pairs", ("torch",), write=given.write)
        elif find_spec("kt_kernel") is None:
            raise SystemExit("kt-kernel is not installed: pip install --no-deps kt-kernel; or give --base")
        else:
            runs |= {("kt-kernel", count): None for count in (given.threads, given.threads - 1) if count}
            rows = Recorder("kt_kernel", ("torch", "kt-kernel"), write=given.write)
        for kind in given.weights or WEIGHT_TYPES[: 3 if given.base is None else None]:
            for row in rows_of(kind, runs, given.rounds):
                rows.add(row)


if __name__ == "__main__":
    main()
