"""How fast is one MoE layer on the CPU, beside the limits of the machine? Shapes of Qwen3-30B-A3B, by provider and tokens per call.

Providers are moegraft by weight type and instruction set, with GGUF's Q4_K and Q6_K where `gguf` is installed (q4_k+q6_k has down in Q6_K,
like half of the layers of most files), and in the sparse layout without nine of ten neurons; and stock transformers with `grouped_mm` and
with its loop over experts (both oneDNN). llama.cpp has no Python API for a layer and is measured with whole models in `cpu_model.py`;
kt-kernel's idle workers would disturb the next provider, so it has a benchmark of its own, `kt_kernel_peer.py`. Every provider's result is
first checked against the reference. Providers and the probes of reading and of GEMM alternate within each round, so that changes of the
machine affect all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from _probe import ReadProbe, gemm_probe
from record import percentiles, seconds, write_rows
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts, Runtime
from moegraft.operators.reference import reference_experts
from moegraft.operators.weight_formats import FORMATS
from moegraft.operators.weights import WeightTypes

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768
DISTINCT = 8  # experts that are drawn; the others are copies at other addresses
ROUNDS = {1: 40, 4: 25, 16: 15, 64: 10, 512: 10}
CALLS = {1: 8, 4: 4, 16: 3, 64: 2, 512: 1}  # consecutive calls of one provider in a round
SETTLE_S = 0.01  # pause before each provider: OpenMP's threads spin for some milliseconds after PyTorch's last call
WEIGHT_TYPES = ("int4", "q4_k", "q4_k+q6_k", "q6_k", "int8", "bfloat16")
# Largest relative error against float64 with the original weights, from rounding weights and activations. Weights in Q4_K and Q6_K are
# drawn in these types, so that only activations are rounded.
ERROR_LIMIT = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 2.5e-2, "int4": 0.2}
STORED_ERROR_LIMIT = 2e-2  # of formats of files, whose weights are not rounded
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Provider:
    """One way to compute the layer: `run(hidden_states (T, H) bfloat16, top_k_index (T, K), top_k_weights (T, K))`."""

    name: str
    weights: str
    threads: int
    expert_bytes: int
    run: Forward
    tokens: tuple[int, ...] = tuple(ROUNDS)
    threshold: float = 0.0


def draw_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    return {part: (torch.randn(DISTINCT, *size, generator=generator) * 0.02).bfloat16() for part, size in sizes.items()}


def routings(tokens: int, count: int, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids and weights for `count` calls; few tokens use permutations of the experts, so that weights are never in cache."""
    generator = np.random.default_rng((tokens, seed))
    pool = np.empty(0, np.int64)
    for _ in range(count):
        if tokens * TOP_K <= NUM_EXPERTS:
            if len(pool) < tokens * TOP_K:
                pool = np.concatenate([pool, generator.permutation(NUM_EXPERTS)])
            ids, pool = pool[: tokens * TOP_K].reshape(tokens, TOP_K), pool[tokens * TOP_K :]
            if tokens * TOP_K == NUM_EXPERTS:  # with 16 tokens, routing is random instead of using every expert exactly once
                ids = generator.random((tokens, NUM_EXPERTS)).argsort(-1)[:, :TOP_K]
        else:
            ids = generator.random((tokens, NUM_EXPERTS)).argsort(-1)[:, :TOP_K]
        weights = generator.random((tokens, TOP_K), dtype=np.float32)
        yield torch.from_numpy(np.ascontiguousarray(ids)), torch.from_numpy(weights / weights.sum(-1, keepdims=True))


def part_type(weight_type: str, part: str) -> str:
    types = WeightTypes.parse(weight_type)
    return types.down if part == "down" else types.gate_up


def original(weights: dict[str, torch.Tensor], weight_type: str) -> dict[str, torch.Tensor]:
    """Return the weights before packing: the drawn ones, or random blocks of the type, dequantised."""
    kinds = {part: part_type(weight_type, part) for part in weights}
    found = dict(weights)
    for part, kind in kinds.items():
        if FORMATS[kind].stored:
            from gguf import GGMLQuantizationType, dequantize

            found[part] = torch.from_numpy(dequantize(drawn_blocks(kind, weights[part]), GGMLQuantizationType[kind.upper()]))
    return found


def drawn_blocks(kind: str, like: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return random blocks. Of all codes of NVFP4's scales, some are subnormal, which CPUs multiply slowly and checkpoints hardly have."""
    found = FORMATS[kind]
    blocks = found.random_blocks(tuple(like.shape), np.random.default_rng(0))
    if kind == "nvfp4":
        scales = blocks.reshape(-1, found.block_bytes)[:, 1:9]
        scales[:] = 0x28 + scales % 32  # 0.25 to 3.75
    return blocks


def pack(weights: dict[str, torch.Tensor], weight_type: str, sparse: bool = False) -> PackedExperts:
    packed = PackedExperts(ExpertsShape(NUM_EXPERTS, HIDDEN, INTERMEDIATE), GateSpec("silu"), weight_type, sparse=sparse)
    for part, matrix in weights.items():
        kind = part_type(weight_type, part)
        blocks = drawn_blocks(kind, matrix) if FORMATS[kind].stored else None
        for expert in range(DISTINCT):
            if blocks is not None:
                packed.pack_blocks(expert, part, blocks[expert])
            else:
                packed.pack(expert, part, matrix[expert].view(torch.uint16).numpy())
    blocks = packed.buffer.reshape(NUM_EXPERTS, -1)
    for expert in range(DISTINCT, NUM_EXPERTS):
        blocks[expert] = blocks[expert % DISTINCT]
    sealed = packed.buffer[:]
    sealed.flags.writeable = False
    return PackedExperts(packed.shape, packed.gate_spec, weight_type, sealed, sparse=sparse)


def ours(weights: dict[str, torch.Tensor], threads: int, weight_types: tuple[str, ...] = WEIGHT_TYPES) -> Iterator[Provider]:
    """Yield, by weight type, the default instruction set for all numbers of tokens, then the others except the scalar one."""
    for weight_type in weight_types:
        packed = pack(weights, weight_type)
        best = Runtime(threads).isa
        for isa in (best, *(isa for isa in Runtime.available_isas() if isa not in (best, "scalar"))):
            runtime = Runtime(threads, isa)

            def run(
                x: torch.Tensor, ids: torch.Tensor, share: torch.Tensor, runtime: Runtime = runtime, packed: PackedExperts = packed
            ) -> torch.Tensor:
                out = torch.empty_like(x)
                arrays = (x.view(torch.uint16).numpy(), ids.numpy(), share.numpy(), out.view(torch.uint16).numpy())
                runtime.forward(packed, *arrays)
                return out

            tokens = tuple(ROUNDS) if isa == best else (1, 512)
            yield Provider(f"ours-{isa}", weight_type, threads, packed.expert_bytes, run, tokens)


def sparse(weights: dict[str, torch.Tensor], threads: int, off: float = 0.9) -> Iterator[Provider]:
    """Yield the sparse layout with the threshold that a share `off` of the neurons do not reach; bytes are those that must be read."""
    runtime = Runtime(threads)
    x = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    acted = torch.nn.functional.silu(torch.einsum("eih,th->eti", weights["gate"].float(), x)).abs()
    threshold = float(np.quantile(acted.numpy(), off))
    for weight_type in ("int4", "int8", "bfloat16"):
        packed = pack(weights, weight_type, sparse=True)

        def run(x: torch.Tensor, ids: torch.Tensor, share: torch.Tensor, packed: PackedExperts = packed) -> torch.Tensor:
            out = torch.empty_like(x)
            arrays = (x.view(torch.uint16).numpy(), ids.numpy(), share.numpy(), out.view(torch.uint16).numpy())
            runtime.forward(packed, *arrays, threshold=threshold)
            return out

        bytes_read = int(packed.expert_bytes * (1 + 2 * (1 - off)) / 3)
        yield Provider(f"ours-sparse-{off:.0%}-off", weight_type, threads, bytes_read, run, (1, 4), threshold)


def stock(weights: dict[str, torch.Tensor], threads: int) -> Iterator[Provider]:
    experts: Any = None
    for implementation in ("grouped_mm", "eager"):
        config = Qwen3MoeConfig(
            hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K, dtype=torch.bfloat16
        )
        config._experts_implementation = implementation
        with torch.device("meta"):
            module: Any = Qwen3MoeExperts(config).to(torch.bfloat16)
        if experts is None:
            experts = module.to_empty(device="cpu").requires_grad_(False)
            repeat = (NUM_EXPERTS // DISTINCT, 1, 1)
            experts.gate_up_proj.data.copy_(torch.cat([weights["gate"], weights["up"]], dim=1).repeat(repeat))
            experts.down_proj.data.copy_(weights["down"].repeat(repeat))
        module.gate_up_proj, module.down_proj = experts.gate_up_proj, experts.down_proj

        def run(x: torch.Tensor, ids: torch.Tensor, share: torch.Tensor, module: Callable[..., torch.Tensor] = module) -> torch.Tensor:
            return module(x, ids, share.to(x.dtype))

        yield Provider(f"transformers-{implementation}", "bfloat16", threads, 3 * HIDDEN * INTERMEDIATE * 2, run)


def check(provider: Provider, weights: dict[str, torch.Tensor]) -> float:
    """Return the relative error against float64; end the program if it is too large."""
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    ids, share = next(routings(16, 1))
    ids, share = ids[:5].contiguous(), share[:5].contiguous()
    held = original(weights, provider.weights)
    parts = (held["gate"], held["up"], held["down"])
    expected = reference_experts(x, ids % DISTINCT, share, *parts, GateSpec("silu"), threshold=provider.threshold)
    found = provider.run(x, ids, share).double()
    error = float((found - expected).norm() / expected.norm())
    # Rounding may move a neuron near the threshold to the other side.
    if not error <= ERROR_LIMIT.get(provider.weights, STORED_ERROR_LIMIT) + (0.1 if provider.threshold > 0.0 else 0.0):
        raise SystemExit(f"{provider.name} {provider.weights}: relative error {error:.2e} against the reference; not measured")
    return error


def measure(providers: list[Provider], errors: dict[Provider, float], tokens: int, rounds: int, read: ReadProbe) -> list[dict[str, object]]:
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
    probes = {kind: gemm_probe(kind) for kind in ("bfloat16", "int8")}
    present = [provider for provider in providers if tokens in provider.tokens]
    times: dict[Provider, list[float]] = {provider: [] for provider in present}
    read_rates: list[float] = []
    gemm_rates: dict[str, list[float]] = {kind: [] for kind in probes}
    distinct = []
    # Each provider has its own routings: providers that share weights would find them in the last-level cache.
    ways = [routings(tokens, (rounds + 1) * (CALLS[tokens] + 1), seed) for seed in range(len(present))]
    with torch.inference_mode():
        for turn in range(rounds + 1):
            for provider, way in zip(present, ways, strict=True):
                time.sleep(SETTLE_S)
                for call in range(CALLS[tokens] + 1):
                    ids, share = next(way)
                    distinct.append(len(ids.unique()))
                    if call == 0 and CALLS[tokens] == 1 and turn > 0:
                        continue  # long calls need no warm-up after the first round
                    taken = seconds(lambda: provider.run(x, ids, share))  # noqa: B023  run at once
                    if turn > 0 and call > 0:
                        times[provider].append(taken)
            time.sleep(SETTLE_S)
            read_rates.extend(read.run() for _ in range(3))
            for kind, (run, operations) in probes.items():
                gemm_rates[kind].append(operations / min(seconds(run), seconds(run)))
    read_rate = statistics.median(read_rates)
    gemm_rate = {kind: statistics.median(rates[1:]) for kind, rates in gemm_rates.items()}
    loaded, operations = statistics.mean(distinct), 6.0 * tokens * TOP_K * HIDDEN * INTERMEDIATE
    rows: list[dict[str, object]] = []
    for provider in present:
        p50 = statistics.median(times[provider])
        limit = gemm_rate["bfloat16" if provider.weights == "bfloat16" else "int8"]
        bytes_read = loaded * provider.expert_bytes
        rows.append(
            {
                "provider": provider.name,
                "weights": provider.weights,
                "threads": provider.threads,
                "tokens": tokens,
                **percentiles(1e3 * np.asarray(times[provider]), "ms", 3),
                "tokens_s": round(tokens / p50, 1),
                "gb_s": round(bytes_read / p50 / 1e9, 1),
                "read_probe_gb_s": round(read_rate / 1e9, 1),
                "read_share": round(bytes_read / p50 / read_rate, 3),
                "gop_s": round(operations / p50 / 1e9, 1),
                "gemm_probe_gop_s": round(limit / 1e9, 1),
                "gemm_share": round(operations / p50 / limit, 3),
                "relative_error": f"{errors[provider]:.1e}",
            }
        )
    return rows


def show(row: dict[str, object]) -> None:
    name = f"{row['provider']:24s} {row['weights']:9s} T={row['tokens']:<4d}"
    reading = f"{row['gb_s']:6.1f} GB/s ({row['read_share']:.2f} of read)"
    print(f"{name} {row['p50_ms']:9.3f} ms  {reading}  {row['gop_s']:7.1f} GOP/s ({row['gemm_share']:.2f} of GEMM)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=Runtime().threads)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(ROUNDS), choices=list(ROUNDS))
    parser.add_argument("--rounds", type=float, default=1.0, help="factor on the default number of rounds")
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    weights = draw_weights()
    threads = arguments.threads
    installed = WEIGHT_TYPES if find_spec("gguf") else tuple(name for name in WEIGHT_TYPES if "_k" not in name)
    providers = [*ours(weights, threads, installed), *sparse(weights, threads), *stock(weights, threads)]
    errors = {provider: check(provider, weights) for provider in providers}
    read = ReadProbe(arguments.threads)
    rows: list[dict[str, object]] = []
    for tokens in arguments.tokens:
        rows += measure(providers, errors, tokens, max(3, int(ROUNDS[tokens] * arguments.rounds)), read)
        for row in rows[-sum(tokens in provider.tokens for provider in providers) :]:
            show(row)
    if not arguments.no_write:
        print(write_rows("cpu_experts", rows, ("torch", "transformers", "numpy")))


if __name__ == "__main__":
    main()
