"""How fast is one MoE layer on the CPU beside an earlier commit's kernels? Shapes of Qwen3-30B-A3B, by weight type and tokens per call.

    git worktree add ../base COMMIT && (cd ../base && python setup.py build_ext --inplace)
    python benchmarks/cpu_layer_pairs.py ../base

Both have the same weights and routings, each in a process of its own, and alternate within each round; `ratio` is the median over rounds of
the new time over the earlier one. Results are first checked against the reference. With no new tokens in cache, weights come from memory.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from _peer_process import PeerProcess
from record import ROOT, percentiles, write_rows

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768
DISTINCT = 8  # experts that are drawn; the others are copies at other addresses
CALLS = {1: 40, 64: 6, 512: 2, 2048: 1}  # consecutive calls of a round
WEIGHT_TYPES = ("int4", "int8", "bfloat16", "q4_k", "q6_k")
ERROR_LIMIT = 3e-2  # against the weights as they are packed
SETTLE_S = 0.01
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@contextmanager
def layer(package: str, weight_type: str, threads: int) -> Iterator[Run]:
    """Yield the forward pass of a layer by the package in a folder, checked.

    Raises:
        RuntimeError: its result is wrong.
    """
    sys.path.insert(0, package)
    from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts, Runtime

    generator = torch.Generator().manual_seed(0)
    sizes = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    packed = PackedExperts(ExpertsShape(NUM_EXPERTS, HIDDEN, INTERMEDIATE), GateSpec("silu"), weight_type)
    for part, (rows, columns) in sizes.items():
        for expert in range(DISTINCT):
            if weight_type.startswith("q"):
                import gguf

                quantised = gguf.GGMLQuantizationType[weight_type.upper()]
                block, held = gguf.GGML_QUANT_SIZES[quantised]
                blocks = np.random.default_rng(expert).integers(0, 256, (rows, columns // block, held), np.uint8)
                scales = (slice(0, 2), slice(2, 4)) if weight_type == "q4_k" else (slice(208, 210),)
                for place in scales:
                    blocks[..., place] = np.full((*blocks.shape[:2], 1), 1e-4, np.float16).view(np.uint8)
                pack = getattr(packed, "pack_blocks" if hasattr(packed, "pack_blocks") else "pack_super_blocks")  # its earlier name
                pack(expert, part, np.ascontiguousarray(blocks.reshape(rows, -1)))
            else:
                matrix = (torch.randn(rows, columns, generator=generator) * 0.02).bfloat16()
                packed.pack(expert, part, matrix.view(torch.uint16).numpy())
    copies = packed.buffer.reshape(NUM_EXPERTS, -1)
    for expert in range(DISTINCT, NUM_EXPERTS):
        copies[expert] = copies[expert % DISTINCT]
    sealed = packed.buffer[:]
    sealed.flags.writeable = False
    packed = PackedExperts(packed.shape, packed.gate_spec, weight_type, sealed)
    runtime = Runtime(threads)

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        runtime.forward(packed, x.view(torch.uint16).numpy(), ids.numpy(), weights.numpy(), out.view(torch.uint16).numpy())
        return out

    x, ids, weights = batch(40, 0)
    ids %= DISTINCT
    expected = torch.zeros(40, HIDDEN)
    for expert in range(DISTINCT):
        gate, up, down = (torch.from_numpy(packed.unpack(expert, part)) for part in sizes)
        share = (weights * (ids == expert)).sum(1, keepdim=True)
        expected += share * ((torch.nn.functional.silu(x.float() @ gate.T) * (x.float() @ up.T)) @ down.T)
    error = float((run(x, ids, weights).float() - expected).norm() / expected.norm())
    if not error <= ERROR_LIMIT:
        raise RuntimeError(f"relative error {error:.1e} against the reference")
    yield run


def batch(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(tokens, NUM_EXPERTS, generator=generator).argsort(-1)[:, :TOP_K].contiguous()
    weights = torch.rand(tokens, TOP_K, generator=generator)
    return x, ids, weights / weights.sum(-1, keepdim=True)


def timed(run: Run, tokens: int, seed: int) -> float:
    """Return the median ms of the calls of a round."""
    batches = [batch(tokens, seed + call) for call in range(CALLS[tokens])]
    time.sleep(SETTLE_S)
    run(*batches[-1])
    found = []
    for each in batches:
        start = time.perf_counter()
        run(*each)
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def rows_of(weight_type: str, packages: dict[str, str], threads: int, rounds: int) -> Iterator[dict[str, object]]:
    """Yield a row for each provider and number of tokens, by the package's folder of each provider."""
    base, new = packages
    taken: dict[tuple[str, int], list[float]] = {(name, tokens): [] for tokens in CALLS for name in packages}
    with (
        PeerProcess(base, layer, packages[base], weight_type, threads) as earlier,
        PeerProcess(new, layer, packages[new], weight_type, threads) as later,
    ):
        for turn in range(rounds + 1):
            for tokens in CALLS:
                for name, peer in ((base, earlier), (new, later)):
                    ms = peer.call(timed, tokens, 1000 * turn)
                    if turn:  # the first round warms up
                        taken[name, tokens].append(ms)
    for name, tokens in taken:
        ratios = [ms / before for ms, before in zip(taken[name, tokens], taken[base, tokens], strict=True)]
        row = {"provider": name, "weights": weight_type, "threads": threads, "tokens": tokens}
        yield {**row, **percentiles(taken[name, tokens], "ms", 3), "ratio": round(statistics.median(ratios), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="a checkout of the earlier commit, with its extension built")
    parser.add_argument("--weights", nargs="+", default=list(WEIGHT_TYPES), choices=WEIGHT_TYPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    named = subprocess.run(["git", "describe", "--always"], cwd=arguments.base, capture_output=True, text=True, check=True).stdout.strip()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        packages = {}
        for name, root in ((named, arguments.base), ("moegraft", ROOT)):
            package = Path(folder) / name / "moegraft"
            package.mkdir(parents=True)
            (package / "cpu_backend").symlink_to(root.resolve() / "cpu_backend")
            packages[name] = str(package.parent)
        for weight_type in arguments.weights:
            for row in rows_of(weight_type, packages, arguments.threads, arguments.rounds):
                rows.append(row)
                print(row, flush=True)
    if not arguments.no_write:
        print(write_rows("cpu_layer_pairs", rows, ("torch",)))


if __name__ == "__main__":
    main()
