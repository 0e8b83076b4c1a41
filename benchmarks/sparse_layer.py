"""How much faster is a layer of experts on a CUDA GPU without the neurons that a token does not need? The paper's Figures 6, 7 and Table 2.

    python benchmarks/sparse_layer.py                       # both shapes, T = 1 to 512, total sparsity 0 to 87%
    python benchmarks/sparse_layer.py --tiny                # a test of the script in Triton's interpreter, without a GPU

Without a GPU it prints its measurements' settings and ends. Every path is first compared with the eager reference. Times are those of
replayed CUDA graphs over several routings, so that the L2 cache does not hold the weights. A row's floor is the larger of the time to read
the necessary bytes at the device's measured copy rate and the time of the operations at its matrix rate. Speed-ups are over the fastest
dense path: the project's own kernel, PyTorch's grouped_mm over weights in the checkpoints' layout, and vLLM's experts where vLLM is
installed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOTAL = (0.0, 0.6, 0.7, 0.8, 0.85, 0.87)
DENSE = ("dense", "grouped_mm", "vllm")
LIMIT = 2e-2  # relative error of bfloat16 paths, which round operands three times
Row = dict[str, object]

if "--tiny" in sys.argv:  # Triton reads it when a kernel is defined
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from _sparse_floor import SHAPES, Device, Shape, Work, dense_work, mean_floor_ms, sparse_work  # noqa: E402
from record import percentiles, write_rows  # noqa: E402

from moegraft.cpu_backend import ExpertsShape, GateSpec  # noqa: E402
from moegraft.operators.cpu import as_array  # noqa: E402
from moegraft.operators.kernels.launch import interpreted, why_unavailable  # noqa: E402
from moegraft.operators.reference import reference_experts  # noqa: E402


def measure(calls: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
    """Return the ms of a call by graph replay; in the interpreter by the host's clock, which has no meaning for a GPU."""
    from moegraft.operators.sparse.slots import replay_ms

    if not interpreted():
        return replay_ms(calls, device, replays=31)
    start = time.perf_counter()
    for call in calls:
        call()
    return [(time.perf_counter() - start) * 1e3 / len(calls)]


def rates(device: torch.device) -> Device:
    """Return the measured rates of a large copy and a large matrix product."""
    if interpreted():
        return Device(1e6, 1e6)
    source = torch.empty(1 << 31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    copy_ms = statistics.median(measure([lambda: void(target.copy_(source))], device))
    product_ms = statistics.median(measure([lambda: void(a @ b)], device))
    return Device(2 * source.numel() / copy_ms, 2 * 8192**3 / product_ms)


def void(result: object) -> None:
    """Call a function and ignore its result."""


@dataclass(frozen=True)
class Weights:
    """Random bfloat16 experts in the checkpoints' layout: gate_up (E, 2I, H), down (E, H, I)."""

    gate_up: torch.Tensor
    down: torch.Tensor

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        gate, up = self.gate_up.chunk(2, dim=1)
        return {"gate": gate, "up": up, "down": self.down}


def make_weights(shape: Shape, device: torch.device) -> Weights:
    generator = torch.Generator(device).manual_seed(0)

    def random(rows: int, columns: int) -> torch.Tensor:
        made = torch.empty(shape.num_experts, rows, columns, dtype=torch.bfloat16, device=device)
        for expert in made:
            expert.copy_(torch.randn(rows, columns, generator=generator, device=device) * columns**-0.5)
        return made

    return Weights(random(2 * shape.intermediate, shape.hidden), random(shape.hidden, shape.intermediate))


class Layer:
    """All experts in slots."""

    def __init__(self, shape: Shape, weights: Weights, device: torch.device) -> None:
        from moegraft.operators.sparse.slots import SlotPacker, SparseSlotExperts

        sizes = ExpertsShape(shape.num_experts, shape.hidden, shape.intermediate)
        self.shape = shape
        self.experts = SparseSlotExperts(sizes, GateSpec(), "bfloat16", device)
        self.arena = torch.empty(shape.num_experts, self.experts.expert_bytes, dtype=torch.uint8, device=device)
        packer = SlotPacker(sizes, GateSpec(), "bfloat16")
        for expert, slot in enumerate(self.arena):
            for part, values in weights.parts.items():
                packer.pack(part, as_array(values[expert].cpu().contiguous()))  # type: ignore[arg-type]
            slot.copy_(packer.slot_bytes())

    def calls(self, tokens: int, sparsity: float):  # type: ignore[no-untyped-def]
        from moegraft.operators.sparse.slots import synthetic_slot_calls

        self.experts.set_threshold(0.0, sparsity)
        count = self.shape.num_experts
        return synthetic_slot_calls(self.experts, self.arena, tokens, self.shape.top_k, count, count)


def grouped_mm(weights: Weights, call) -> None:  # type: ignore[no-untyped-def]
    """Compute all neurons by PyTorch's grouped_mm, without waiting for the device, so that a graph can capture it."""
    ids, top_k = call.slots.flatten(), call.top_k
    order = ids.sort(stable=True)
    experts = torch.arange(1, len(weights.down) + 1, dtype=ids.dtype, device=ids.device)
    ends = torch.searchsorted(order.values, experts).to(torch.int32)
    sums = F.grouped_mm(call.hidden_states[order.indices // top_k], weights.gate_up.transpose(1, 2), offs=ends)
    gate, up = sums.chunk(2, dim=1)
    rows = F.grouped_mm(F.silu(gate) * up, weights.down.transpose(1, 2), offs=ends).float()
    rows *= call.top_k_weights.flatten()[order.indices][:, None]
    unsorted = torch.empty_like(rows)
    unsorted[order.indices] = rows
    call.out.copy_(unsorted.view(*call.slots.shape, -1).sum(1))


def baselines(weights: Weights) -> dict[str, Callable[..., None]]:
    """Return the dense paths over weights in the checkpoints' layout, with vLLM's fused experts where vLLM is installed."""
    found: dict[str, Callable[..., None]] = {"grouped_mm": partial(grouped_mm, weights)}
    try:
        from vllm.model_executor.layers.fused_moe import fused_experts
    except ImportError:
        return found

    def vllm(call) -> None:  # type: ignore[no-untyped-def]
        call.out.copy_(fused_experts(call.hidden_states, weights.gate_up, weights.down, call.top_k_weights, call.slots))

    return {**found, "vllm": vllm}


def check(call, weights: Weights, path: Callable[..., None], threshold: float, name: str) -> None:  # type: ignore[no-untyped-def]
    """Compare a path with the eager reference.

    Raises:
        RuntimeError: the results differ.
    """
    tokens = slice(0, 4)
    call.out.fill_(float("nan"))
    path(call)
    expected = reference_experts(
        call.hidden_states[tokens],
        call.slots[tokens],
        call.top_k_weights[tokens],
        **weights.parts,
        gate_spec=GateSpec(),
        threshold=threshold,
        dtype=torch.float32,
    )
    error = float((call.out[tokens].float() - expected).norm() / expected.norm())
    if not error <= LIMIT:
        raise RuntimeError(f"{name} is wrong: relative error {error:.2e} at T = {len(call.slots)}")


def layer_rows(name: str, tokens: Sequence[int], shares: Sequence[float], device: torch.device) -> Iterator[Row]:
    from moegraft.operators.sparse.slots import SLOT_PATHS

    shape, reached = SHAPES[name], rates(device)
    weights = make_weights(shape, device)
    layer = Layer(shape, weights, device)
    dense = {"dense": SLOT_PATHS["dense"], **baselines(weights)}
    for count in tokens:
        dense_ms: dict[str, float] = {}
        for total in shares:
            routed = shape.routed(total)
            for path, run in (SLOT_PATHS if total else dense).items():
                calls = layer.calls(count, routed)
                threshold = float(calls[0].threshold.value)
                check(calls[0], weights, run, threshold, path)
                works = [_work(layer, call, dense=not total or path in DENSE) for call in calls]
                times = measure([partial(run, call) for call in calls], device)
                median, floor = statistics.median(times), mean_floor_ms(works, reached)
                if not total:
                    dense_ms[path] = median
                yield {
                    "shape": name,
                    "tokens": count,
                    "total_sparsity": total,
                    "routed_sparsity": round(routed, 4),
                    "path": path,
                    **percentiles(times, "ms", 5),
                    "floor_ms": round(floor, 5),
                    "floor_share": round(floor / median, 3),
                    "speedup": round(min(dense_ms.values()) / median, 3),
                    "tokens_per_s": round(count / median * 1e3),
                    "gb_per_s": round(sum(work.read_bytes for work in works) / len(works) / median / 1e6, 1),
                    "copy_gb_per_s": round(reached.bytes_per_ms / 1e6, 1),
                }


def _work(layer: Layer, call, *, dense: bool) -> Work:  # type: ignore[no-untyped-def]
    if dense:
        return dense_work(call.slots, layer.shape)
    _, acted = next(layer.experts.activations(call.hidden_states, call.arena, call.slots))
    active = acted.abs() >= call.threshold.value
    return sparse_work(call.slots, active, layer.shape)


def kernel_rows(name: str, tokens: int, device: torch.device) -> Iterator[Row]:
    """Return the time of each kernel of each sparse path (Figure 7)."""
    from torch.profiler import ProfilerActivity, profile

    from moegraft.operators.sparse.slots import SLOT_PATHS

    shape = SHAPES[name]
    layer = Layer(shape, make_weights(shape, device), device)
    for total in TOTAL[1:]:
        calls = layer.calls(tokens, shape.routed(total))
        for path, run in SLOT_PATHS.items():
            for call in calls:  # compiles
                run(call)
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                for call in calls:
                    run(call)
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
            print(
                f"With a GPU: {name}, {held:.1f} GiB per layer, every path at T = {', '.join(map(str, tokens))}, total sparsity {shares}."
            )
        return
    device = torch.device("cpu" if arguments.tiny else "cuda:0")
    shares = TOTAL[:2] if arguments.tiny else TOTAL
    rows = [row for name in shapes for row in layer_rows(name, tokens, shares, device)]
    for row in rows:
        print(" ".join(f"{key}={value}" for key, value in row.items()))
    if arguments.tiny:
        print("Interpreted on the CPU: all paths agree with the reference, and the times have no meaning.")
        return
    print(write_rows("sparse_layer", rows, packages=("torch", "triton", "vllm")))
    kernels = [row for name in shapes for row in kernel_rows(name, 64, device)]
    print(write_rows("sparse_layer_kernels", kernels, packages=("torch", "triton")))
    print("plots: python benchmarks/plot_sparse.py")


if __name__ == "__main__":
    main()
