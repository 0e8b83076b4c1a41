"""How fast is one MoE layer on the CPU, beside the bandwidth of memory or KTransformers' kernel? Qwen3-30B-A3B's shapes.

    python benchmarks/cpu_experts.py                     # by weight type and instruction set, beside transformers and a probe of reading
    python benchmarks/cpu_experts.py --beside-kt-kernel  # pip install --no-deps kt-kernel, as it pins another PyTorch

Providers are moegraft by weight type and instruction set, also with GGUF's Q4_K and Q6_K (q4_k+q6_k has down in Q6_K, like half of the
layers of most files); and stock transformers with `grouped_mm` and with its loop over experts (both oneDNN). llama.cpp has no Python API
for a layer and is measured with whole models in `cpu_model.py`. Every provider's result is first checked against the reference. Providers
and the probe of reading alternate within each round, so that changes of the machine affect all alike.

Beside kt-kernel (`results/kt_kernel.csv`), each provider runs in a process of its own, since kt-kernel's idle workers spin and would
disturb the others; processes alternate round by round. The row of a provider that crashes has its `failure`. Weights, ids and their order
are equal. `ratio` is the median over rounds of a provider's time over moegraft's. On all cores, kt-kernel's workers and its spinning caller
compete for time slices, so it is also measured with one thread less, and the better figure counts. Its int4 has one scale per row,
moegraft's one for 32 columns: `relative_error` shows the difference.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from harness.peers import PeerFailed, PeerProcess
from harness.probe import ReadProbe
from harness.record import Recorder, parser
from harness.rounds import median_ratio, percentiles, seconds
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
PAIR_CALLS = {1: 120, 4: 60, 16: 20, 64: 8, 512: 3}  # of each process of a pair
PAIR_TYPES = ("bfloat16", "int8", "int4")
Run = tuple[str, int]  # a provider and its threads
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Provider:
    """One way to compute the layer: `run(hidden_states (T, H) bfloat16, top_k_index (T, K), top_k_weights (T, K))`.

    Attributes:
        original: the weights before they were packed, of the distinct experts.
    """

    name: str
    weights: str
    threads: int
    expert_bytes: int
    run: Forward
    original: Mapping[str, torch.Tensor]
    tokens: tuple[int, ...] = tuple(ROUNDS)


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


def pack(weights: Mapping[str, torch.Tensor], weight_type: str) -> tuple[PackedExperts, Mapping[str, torch.Tensor]]:
    """Return the packed experts and their weights before; of formats of files, random blocks."""
    packed = PackedExperts(ExpertsShape(NUM_EXPERTS, HIDDEN, INTERMEDIATE), GateSpec("silu"), weight_type)
    stored = set()
    for part, matrix in weights.items():
        form = FORMATS[part_type(weight_type, part)]
        blocks = form.random_blocks(tuple(matrix.shape), np.random.default_rng(0)) if form.stored else None
        for expert in range(DISTINCT):
            if blocks is not None:
                packed.pack_blocks(expert, part, blocks[expert])
                stored.add(part)
            else:
                packed.pack(expert, part, matrix[expert].view(torch.uint16).numpy())
    copies = packed.buffer.reshape(NUM_EXPERTS, -1)
    for expert in range(DISTINCT, NUM_EXPERTS):
        copies[expert] = copies[expert % DISTINCT]
    sealed = packed.buffer[:]
    sealed.flags.writeable = False
    packed = PackedExperts(packed.shape, packed.gate_spec, weight_type, sealed)
    unpacked = {part: torch.stack([torch.from_numpy(packed.unpack(expert, part)) for expert in range(DISTINCT)]) for part in stored}
    return packed, {**weights, **unpacked}


def forward(runtime: Runtime, packed: PackedExperts) -> Forward:
    def run(x: torch.Tensor, ids: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        arrays = (x.view(torch.uint16).numpy(), ids.numpy(), share.numpy(), out.view(torch.uint16).numpy())
        runtime.forward(packed, *arrays)
        return out

    return run


def ours(weights: Mapping[str, torch.Tensor], threads: int, weight_types: tuple[str, ...] = WEIGHT_TYPES) -> Iterator[Provider]:
    """Yield, by weight type, the default instruction set for all numbers of tokens, then the others except the scalar one."""
    for weight_type in weight_types:
        packed, original = pack(weights, weight_type)
        best = Runtime(threads).isa
        for isa in (best, *(isa for isa in Runtime.available_isas() if isa not in (best, "scalar"))):
            run, tokens = forward(Runtime(threads, isa), packed), tuple(ROUNDS) if isa == best else (1, 512)
            yield Provider(f"ours-{isa}", weight_type, threads, packed.expert_bytes, run, original, tokens)


def stock(weights: Mapping[str, torch.Tensor], threads: int) -> Iterator[Provider]:
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

        yield Provider(f"transformers-{implementation}", "bfloat16", threads, 3 * HIDDEN * INTERMEDIATE * 2, run, weights)


def check(provider: Provider) -> float:
    """Return the relative error against float64; end the program if it is too large."""
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    ids, share = next(routings(16, 1))
    ids, share = ids[:5].contiguous(), share[:5].contiguous()
    expected = reference_experts(x, ids % DISTINCT, share, **provider.original, gate_spec=GateSpec("silu"))
    found = provider.run(x, ids, share).double()
    error = float((found - expected).norm() / expected.norm())
    if not error <= ERROR_LIMIT.get(provider.weights, STORED_ERROR_LIMIT):
        raise SystemExit(f"{provider.name} {provider.weights}: relative error {error:.2e} against the reference; not measured")
    return error


def measure(providers: list[Provider], errors: dict[Provider, float], tokens: int, rounds: int, read: ReadProbe, rows: Recorder) -> None:
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
    present = [provider for provider in providers if tokens in provider.tokens]
    times: dict[Provider, list[float]] = {provider: [] for provider in present}
    read_rates: list[float] = []
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
    read_rate = statistics.median(read_rates)
    loaded, operations = statistics.mean(distinct), 6.0 * tokens * TOP_K * HIDDEN * INTERMEDIATE
    for provider in present:
        p50 = statistics.median(times[provider])
        bytes_read = loaded * provider.expert_bytes
        about = {"provider": provider.name, "weights": provider.weights, "threads": provider.threads, "tokens": tokens}
        rates = {"tokens_s": round(tokens / p50, 1), "gb_s": round(bytes_read / p50 / 1e9, 1), "read_probe_gb_s": round(read_rate / 1e9, 1)}
        rates |= {"read_share": round(bytes_read / p50 / read_rate, 3), "gop_s": round(operations / p50 / 1e9, 1)}
        error = {"relative_error": f"{errors[provider]:.1e}"}
        rows.add({**about, **percentiles(1e3 * np.asarray(times[provider]), "ms", 3), **rates, **error})


def kt_kernel(weights: Mapping[str, torch.Tensor], weight_type: str, threads: int) -> Provider:
    """Return kt-kernel's layer over the same experts, whose weights it quantises in memory."""
    from kt_kernel import kt_kernel_ext as kt

    pool = kt.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
    infer = kt.CPUInfer(pool)
    parts = {part: matrix.repeat(NUM_EXPERTS // DISTINCT, 1, 1).contiguous() for part, matrix in weights.items()}
    on_gpu = torch.zeros(NUM_EXPERTS, dtype=torch.bool)
    config = kt.moe.MOEConfig(NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, on_gpu.data_ptr())
    config.layer_idx, config.pool, config.max_len, config.save, config.load = 0, infer.backend_, max(PAIR_CALLS), False, False
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
    for ids, share in routings(tokens, PAIR_CALLS[tokens] + 2, seed):
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
    return {"error": check(provider), "times": {tokens: timed(provider.run, tokens, seed) for tokens in PAIR_CALLS}}


def rows_of(weight_type: str, runs: Sequence[Run], rounds: int) -> Iterator[dict[str, object]]:
    """Yield a row for each provider and number of tokens, moegraft's first."""
    found: dict[Run, list[dict[str, Any]]] = {run: [] for run in runs}
    failed = set()
    for turn in range(rounds):
        for run in (run for run in runs if run not in failed):
            name, threads = run
            try:
                with PeerProcess(name, open_provider, name, weight_type, threads) as peer:
                    found[run].append(peer.call(measured, turn))
            except PeerFailed as failure:
                failed.add(run)
                yield {"provider": name, "weights": weight_type, "threads": threads, "failure": failure.reason}
    for tokens in PAIR_CALLS:
        rounds_ms = {run: [statistics.median(each["times"][tokens]) for each in found[run]] for run in runs if found[run]}
        own = next(iter(rounds_ms.values()), [])
        for run, medians in rounds_ms.items():
            about = {"provider": run[0], "weights": weight_type, "threads": run[1], "tokens": tokens}
            ms = percentiles(np.concatenate([each["times"][tokens] for each in found[run]]), "ms", 3)
            ratio = {"ratio": round(median_ratio(medians, own[: len(medians)]), 3)}
            yield {**about, **ms, **ratio, "relative_error": f"{found[run][0]['error']:.1e}"}


def beside_kt_kernel(threads: int, rounds: int, rows: Recorder) -> None:
    if find_spec("kt_kernel") is None:
        raise SystemExit("kt-kernel is not installed: pip install --no-deps kt-kernel")
    runs = [("moegraft", threads), *(("kt-kernel", count) for count in (threads, threads - 1) if count)]
    for kind in PAIR_TYPES:
        for row in rows_of(kind, runs, rounds):
            rows.add(row)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=Runtime().threads)
    options.add_argument("--tokens", type=int, nargs="+", default=list(ROUNDS), choices=list(ROUNDS))
    options.add_argument("--rounds", type=float, default=1.0, help="factor on the number of rounds, which is 3 beside kt-kernel")
    options.add_argument("--beside-kt-kernel", action="store_true", help="measure processes of both kernels instead")
    given = options.parse_args()
    if given.beside_kt_kernel:
        rows = Recorder("kt_kernel", ("torch", "kt-kernel"), write=given.write)
        beside_kt_kernel(given.threads, max(1, round(3 * given.rounds)), rows)
        return
    torch.set_num_threads(given.threads)
    weights = draw_weights()
    providers = [*ours(weights, given.threads), *stock(weights, given.threads)]
    errors = {provider: check(provider) for provider in providers}
    read, rows = ReadProbe(given.threads), Recorder("cpu_experts", ("torch", "transformers", "numpy"), write=given.write)
    for tokens in given.tokens:
        measure(providers, errors, tokens, max(3, int(ROUNDS[tokens] * given.rounds)), read, rows)


if __name__ == "__main__":
    main()
