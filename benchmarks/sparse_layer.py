"""How much faster is a layer of experts without the neurons that a token does not need? On a CUDA GPU; the paper's Figure 6, 7 and Table 2.

    python benchmarks/sparse_layer.py                       # both shapes, T = 1 to 512, total sparsity 0 to 87%
    python benchmarks/sparse_layer.py --tiny                # anywhere, in Triton's interpreter: that it runs, and nothing else

Without a GPU it says what it would measure and ends. Every path is held to the eager reference first. Times are of replayed CUDA graphs
over several routings, so that the L2 cache does not hold the weights; a row's floor is the larger of the bytes that have to be read at the
device's own copy rate and the operations at its own matrix rate. Speed-ups are over the fastest dense path: PyTorch's grouped_mm, the
project's own kernel, and vLLM's where it is installed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOTAL = (0.0, 0.6, 0.7, 0.8, 0.85, 0.87)
DENSE = ("dense", "grouped_mm", "vllm")
LIMIT = 2e-2  # relative error of bfloat16 paths: three roundings of the operands
Row = dict[str, object]

if "--tiny" in sys.argv:  # Triton reads it when a kernel is defined
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from _sparse_floor import SHAPES, Device, Shape, Work, dense_work, mean_floor_ms, sparse_work  # noqa: E402
from record import write_rows  # noqa: E402

from moegraft.cpu_backend import GateSpec  # noqa: E402
from moegraft.operators.kernels.launch import interpreted, why_unavailable  # noqa: E402
from moegraft.operators.kernels.sparse_weights import SparseWeights, sketch_of  # noqa: E402
from moegraft.operators.reference import reference_experts  # noqa: E402


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(calls: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
    """Milliseconds of a call, by replay; in the interpreter by the host's clock, which says nothing about a GPU."""
    from moegraft.operators.sparse.gpu_layer import replay_ms

    if not interpreted():
        return replay_ms(calls, device, replays=31)
    start = time.perf_counter()
    for call in calls:
        call()
    return [(time.perf_counter() - start) * 1e3 / len(calls)]


def rates(device: torch.device) -> Device:
    """What a large copy and a large matrix product reach."""
    if interpreted():
        return Device(1e6, 1e6)
    source = torch.empty(1 << 31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    copy_ms = percentile(measure([lambda: void(target.copy_(source))], device), 0.5)
    product_ms = percentile(measure([lambda: void(a @ b)], device), 0.5)
    return Device(2 * source.numel() / copy_ms, 2 * 8192**3 / product_ms)


def void(result: object) -> None:
    """For what is called for its time alone."""


def make_weights(shape: Shape, device: torch.device) -> SparseWeights:
    generator = torch.Generator(device).manual_seed(0)

    def random(rows: int, columns: int, scale: float) -> torch.Tensor:
        made = torch.empty(shape.num_experts, rows, columns, dtype=torch.bfloat16, device=device)
        for expert in made:
            expert.copy_(torch.randn(rows, columns, generator=generator, device=device) * scale)
        return made

    gate_up = random(2 * shape.intermediate, shape.hidden, shape.hidden**-0.5)
    return SparseWeights(gate_up, random(shape.intermediate, shape.hidden, shape.intermediate**-0.5), GateSpec())


def vllm_experts(weights: SparseWeights) -> Callable[..., None] | None:
    """vLLM's fused experts over the same weights, as a path; None where it is not installed."""
    try:
        from vllm.model_executor.layers.fused_moe import fused_experts
    except ImportError:
        return None
    down = weights.down_t.transpose(1, 2).contiguous()

    def run(call) -> None:  # type: ignore[no-untyped-def]
        call.out.copy_(fused_experts(call.hidden_states, weights.gate_up, down, call.top_k_weights, call.ids))

    return run


def check(call, path: Callable[..., None], threshold: float, name: str) -> None:  # type: ignore[no-untyped-def]
    """
    Raises:
        RuntimeError: a path computes something else.
    """
    weights, tokens = call.weights, slice(0, 4)
    call.out.fill_(float("nan"))
    path(call)
    expected = reference_experts(
        call.hidden_states[tokens],
        call.ids[tokens],
        call.top_k_weights[tokens],
        weights.gate_rows(),
        weights.up_rows(),
        weights.down_t.transpose(1, 2),
        weights.gate_spec,
        threshold=threshold,
        dtype=torch.float32,
    )
    error = float((call.out[tokens].float() - expected).norm() / expected.norm())
    if not error <= LIMIT:
        raise RuntimeError(f"{name} is wrong: relative error {error:.2e} at T = {len(call.ids)}")


def layer_rows(name: str, tokens: Sequence[int], shares: Sequence[float], device: torch.device) -> Iterator[Row]:
    from moegraft.operators.kernels.workspace import Workspace
    from moegraft.operators.sparse.gpu_layer import SparseGpuLayer, synthetic_calls
    from moegraft.operators.sparse.paths import PATHS, takes

    shape, reached = SHAPES[name], rates(device)
    weights = make_weights(shape, device)
    workspace = Workspace(device)
    plain = SparseGpuLayer(weights, workspace, lambda *_: "pair")
    sketched = SparseGpuLayer(replace(weights, sketch=sketch_of(weights)), workspace, lambda *_: "pair")
    paths = {path: (plain, run) for path, run in PATHS.items() if path != "grouped_mm" or takes(weights)}
    paths["sketch"] = (sketched, PATHS["pair"])
    vllm = vllm_experts(weights)
    for count in tokens:
        dense_ms: dict[str, float] = {}
        for total in shares:
            routed = shape.routed(total)
            offered = dict(paths) if total else {path: paths[path] for path in DENSE if path in paths}
            if not total and vllm is not None:
                offered["vllm"] = (plain, vllm)
            for path, (layer, run) in offered.items():
                calls = synthetic_calls(layer, count, shape.top_k, routed)
                threshold = float(calls[0].threshold.value)
                if path != "sketch":  # which may miss a neuron
                    check(calls[0], run, threshold, path)
                works = [_work(layer, call, shape, path, dense=not total or path in DENSE) for call in calls]
                times = measure([lambda run=run, call=call: run(call) for call in calls], device)  # type: ignore[misc]
                median, floor = percentile(times, 0.5), mean_floor_ms(works, reached)
                if not total:
                    dense_ms[path] = median
                yield {
                    "shape": name,
                    "tokens": count,
                    "total_sparsity": total,
                    "routed_sparsity": round(routed, 4),
                    "path": path,
                    "p20_ms": round(percentile(times, 0.2), 5),
                    "p50_ms": round(median, 5),
                    "p80_ms": round(percentile(times, 0.8), 5),
                    "floor_ms": round(floor, 5),
                    "floor_share": round(floor / median, 3),
                    "speedup": round(min(dense_ms.values()) / median, 3),
                    "tokens_per_s": round(count / median * 1e3),
                    "gb_per_s": round(sum(work.read_bytes for work in works) / len(works) / median / 1e6, 1),
                    "copy_gb_per_s": round(reached.bytes_per_ms / 1e6, 1),
                }


def _work(layer, call, shape: Shape, path: str, *, dense: bool) -> Work:  # type: ignore[no-untyped-def]
    if dense:
        return dense_work(call.ids, shape)
    _, acted = next(layer.activations(call.hidden_states, call.ids))
    active = acted.abs() >= call.threshold.value
    return sparse_work(call.ids, active, shape, gate_bytes=0.5625 if path == "sketch" else 2.0)


def kernel_rows(name: str, tokens: int, device: torch.device) -> Iterator[Row]:
    """Time by kernel of each sparse path (Figure 7)."""
    from torch.profiler import ProfilerActivity, profile

    from moegraft.operators.kernels.workspace import Workspace
    from moegraft.operators.sparse.gpu_layer import SparseGpuLayer, synthetic_calls
    from moegraft.operators.sparse.paths import PATHS

    shape = SHAPES[name]
    layer = SparseGpuLayer(make_weights(shape, device), Workspace(device), lambda *_: "pair")
    for total in TOTAL[1:]:
        calls = synthetic_calls(layer, tokens, shape.top_k, shape.routed(total))
        for path in ("pair", "ordered", "union", "dense"):
            for call in calls:  # compiles
                PATHS[path](call)
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                for call in calls:
                    PATHS[path](call)
                torch.cuda.synchronize(device)
            for event in seen.key_averages():
                us = event.device_time_total / len(calls)
                yield {"shape": name, "tokens": tokens, "total_sparsity": total, "path": path, "kernel": event.key, "us": round(us, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=[name for name in SHAPES if name != "tiny"])
    parser.add_argument("--tokens", type=int, action="append", default=None)
    parser.add_argument("--tiny", action="store_true", help="a tiny shape in Triton's interpreter; writes nothing")
    arguments = parser.parse_args()
    shapes = ["tiny"] if arguments.tiny else arguments.shape or ["qwen3.5-35b-a3b", "qwen3.5-122b-a10b"]
    tokens = arguments.tokens or ((2,) if arguments.tiny else TOKENS)
    reason = None if arguments.tiny else why_unavailable()
    if reason is not None:
        print(f"Nothing was measured: {reason}.")
        for name in shapes:
            shape = SHAPES[name]
            held = 6 * shape.num_experts * shape.intermediate * shape.hidden / 2**30
            shares = ", ".join(f"{total:.0%} ({shape.routed(total):.1%} of the routed)" for total in TOTAL)
            print(f"With a GPU: {name}, {held:.1f} GiB a layer, every path at T = {', '.join(map(str, tokens))}, total sparsity {shares}.")
        return
    device = torch.device("cpu" if arguments.tiny else "cuda:0")
    shares = TOTAL[:2] if arguments.tiny else TOTAL
    rows = [row for name in shapes for row in layer_rows(name, tokens, shares, device)]
    for row in rows:
        print(" ".join(f"{key}={value}" for key, value in row.items()))
    if arguments.tiny:
        print("Interpreted on the CPU: all paths agree with the reference, and the times say nothing.")
        return
    print(write_rows("sparse_layer", rows, packages=("torch", "triton", "vllm")))
    kernels = [row for name in shapes for row in kernel_rows(name, 64, device)]
    print(write_rows("sparse_layer_kernels", kernels, packages=("torch", "triton")))
    print("plots: python benchmarks/plot_sparse.py")


if __name__ == "__main__":
    main()
