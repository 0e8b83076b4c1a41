"""One layer of experts in slots on a device: bytes and operations a second by batch and weight type, and the launch constants that win.

Every path is held to the eager reference first. Times are of replayed graphs over several routings, so that the L2 cache does not hold the
weights. An emulated device has the kernels interpreted at a tiny shape, whose times mean nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple
from functools import cache, partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu_day import TABLE, TUNED, Case, Row, Session, SkippedError, add_constants
from harness.models import DISTINCT_EXPERTS, distinct_experts
from harness.rounds import percentiles
from harness.work_floor import Shape, Work, dense_work, sparse_work

from moegraft.cpu_backend import ExpertsShape, GateSpec
from moegraft.operators.offload.devices.cuda import capture_graph
from moegraft.operators.reference import reference_experts

QWEN3 = Shape(2048, 768, 128, 8, 0)  # Qwen3-30B-A3B
TINY = Shape(64, 64, 8, 2, 0)
TOKENS = (1, 4, 8, 64, 512, 2048)
WEIGHTS = ("int4", "bfloat16", "int8", "float16", "float32")
STORED = ("mxfp4", "fp8", "int4_g128", "q4_k", "q6_k", "iq4_xs", "q3_k")  # one of each way to unpack
SPARSITY = 0.85
ROUTINGS = 4
MOST_DECODE = 64  # tokens up to which each pair reads its own weights, beside the grouped path
LIMITS = {"float32": 1e-4, "float16": 1e-2}  # relative, against float32; the other types have bfloat16 activations
GAIN = 1.02  # over the default: two timings of one program differ by as much
COMPILERS = 8  # processes; one compiles a variant in seconds
Constants = Mapping[str, int]
Call = Callable[[], object]


class Layer(NamedTuple):
    """Experts in slots, all of them: `weights` are those of the distinct ones, dequantised, `(DISTINCT_EXPERTS, rows, columns)` float32."""

    shape: Shape
    weight_type: str
    arena: torch.Tensor
    expert_bytes: int
    weights: Mapping[str, torch.Tensor]
    dtype: torch.dtype

    @property
    def weight_bytes(self) -> float:
        """Of one weight, with its share of the scales."""
        return self.expert_bytes / (3 * self.shape.hidden * self.shape.intermediate)


class Batch(NamedTuple):
    x: torch.Tensor
    slots: torch.Tensor
    shares: torch.Tensor
    out: torch.Tensor


def kernels(session: Session) -> list[Case]:
    """Constants are timed first, so that what follows is measured with them."""
    few = session.emulated
    tokens, quantised = (1, 4) if few else TOKENS, WEIGHTS[: 1 if few else 3]
    kinds: list[tuple[str, Callable[..., Iterator[Row]], Sequence[str], float]] = [
        ("tune", tune, quantised, 120),
        ("dense", partial(dense, tokens=tokens), quantised, 90),
        ("sparse", partial(sparse, tokens=tokens[:1] if few else tokens), WEIGHTS[1:2] if few else ("bfloat16", "int4", "int8"), 90),
        ("dense", partial(dense, tokens=tokens), () if few else (*STORED, *WEIGHTS[3:]), 90),
        ("sparsities", partial(sparse, tokens=(64, 512), shares=(0.6, 0.7, 0.8)), () if few else ("bfloat16",), 90),
    ]
    cases = [Case(f"{kind} {name}", partial(run, session, name), limit_s) for kind, run, names, limit_s in kinds for name in names]
    return [Case("ceilings", partial(_ceilings_rows, session)), *cases]


def place(session: Session) -> tuple[Shape, torch.device]:
    """
    Raises:
        SkippedError: there is no GPU, or no Triton.
    """
    gpu = session.gpu
    try:
        import triton  # noqa: F401  asked for once, here
    except ImportError as error:
        raise SkippedError(f"Triton is not installed: {error}") from error
    return (TINY, torch.device("cpu")) if gpu == "emulated" else (QWEN3, torch.device(gpu))


def measure(calls: Sequence[Call], device: torch.device, replays: int = 15) -> list[float]:
    """Milliseconds of one of `calls`, for each replay of a graph of them all; interpreted, once by the host's clock."""

    def run() -> None:
        for call in calls:
            call()

    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return [(time.perf_counter() - start) * 1e3 / len(calls)]
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()  # compiles
        graph = capture_graph(device, stream, run)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        graph.replay()
        for event in events[:-1]:
            event.record(stream)
            graph.replay()
        events[-1].record(stream)
        stream.synchronize()
    torch.cuda.current_stream(device).wait_stream(stream)
    return [start.elapsed_time(end) / len(calls) for start, end in pairwise(events)]


@cache
def ceilings(device: torch.device) -> tuple[float, dict[str, float]]:
    """GB/s of a large copy, counting what is read and what is written, and TFLOP/s of large products by dtype."""
    size, width = (1 << 16, 64) if device.type == "cpu" else (1 << 31, 8192)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    copy_ms = statistics.median(measure([copy], device))
    products = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
        product_ms = statistics.median(measure([partial(torch.matmul, a, b)], device))
        products[str(dtype).removeprefix("torch.")] = 2 * width**3 / product_ms / 1e9
    return 2 * size / copy_ms / 1e6, products


def _ceilings_rows(session: Session) -> Iterator[Row]:
    _, device = place(session)
    copied, products = ceilings(device)
    yield {"copy_gb_s": round(copied, 1), **{f"{dtype}_tflop_s": round(rate, 2) for dtype, rate in products.items()}}


@cache
def packed_layer(shape: Shape, weight_type: str, device: torch.device, *, rows: bool = False) -> Layer:
    """Random experts in every slot; `rows`: in the sparse layout."""
    packed = distinct_experts(experts_of(shape), GateSpec(), weight_type, sparse=rows)
    arena = torch.from_numpy(packed.buffer.reshape(DISTINCT_EXPERTS, -1)).to(device).repeat(shape.num_experts // DISTINCT_EXPERTS, 1)
    dtype = {"float32": torch.float32, "float16": torch.float16}.get(weight_type, torch.bfloat16)
    weights = {
        part: torch.stack([torch.from_numpy(packed.unpack(expert, part)) for expert in range(DISTINCT_EXPERTS)]).to(device)
        for part in ("gate", "up", "down")
    }
    return Layer(shape, weight_type, arena, packed.expert_bytes, weights, dtype)


def experts_of(shape: Shape) -> ExpertsShape:
    return ExpertsShape(shape.num_experts, shape.hidden, shape.intermediate)


def batches(layer: Layer, tokens: int) -> list[Batch]:
    """Random tokens, each with experts of its own."""
    device, generator = layer.arena.device, torch.Generator(layer.arena.device).manual_seed(tokens)
    found = []
    for _ in range(1 if device.type == "cpu" else ROUTINGS):
        x = torch.randn(tokens, layer.shape.hidden, generator=generator, device=device).to(layer.dtype)
        scores, chosen = torch.rand(tokens, layer.shape.num_experts, generator=generator, device=device).topk(layer.shape.top_k, dim=-1)
        found.append(Batch(x, chosen.to(torch.int32), scores, torch.empty_like(x)))
    return found


def checked(layer: Layer, batch: Batch, call: Call, name: str, threshold: float = 0.0, limit: float | None = None) -> float:
    """Return the relative error of the first tokens' outputs against the reference in float32.

    Raises:
        RuntimeError: the call computes something else.
    """
    batch.out.fill_(float("nan"))
    call()
    x, slots, shares, out = (each[:4] for each in batch)
    others: dict[str, Any] = {**layer.weights, "gate_spec": GateSpec(), "threshold": threshold, "dtype": torch.float32}
    expected = reference_experts(x, slots.long() % DISTINCT_EXPERTS, shares, **others)
    error = float((out.float() - expected).norm() / expected.norm())
    limit = limit or LIMITS.get(layer.weight_type, 2.5e-2)
    if not error <= limit:
        raise RuntimeError(f"{name} is wrong: relative error {error:.2e} at T = {len(batch.x)}")
    return error


def timed(layer: Layer, calls: Sequence[Call], works: Sequence[Work], about: Row) -> Row:
    """Return the times of calls that do so much work, and what they reach of the ceilings."""
    copied, products = ceilings(layer.arena.device)
    times, peak = measure(calls, layer.arena.device), products[str(layer.dtype).removeprefix("torch.")]
    ms, read, flops = statistics.median(times), *(statistics.mean(each) for each in zip(*map(astuple, works), strict=True))
    reached, multiplied = read / ms / 1e6, flops / ms / 1e9
    # The floor: bytes at the rate of the copy, or operations at that of the product.
    floor_ms = max(read / copied / 1e6, flops / peak / 1e9)
    rates = {"gb_s": round(reached, 2), "copy_share": round(reached / copied, 4), "tflop_s": round(multiplied, 3)}
    rates |= {"product_share": round(multiplied / peak, 4), "floor_share": round(floor_ms / ms, 4)}
    return {**about, **percentiles(times, "ms", 5), **rates}


def dense(session: Session, weight_type: str, tokens: Sequence[int]) -> Iterator[Row]:
    """The dense layout, by both paths where both are in question; in bfloat16 also PyTorch's grouped_mm."""
    from moegraft.operators.kernels.slots import SlotExperts

    shape, device = place(session)
    layer = packed_layer(shape, weight_type, device)
    experts = SlotExperts(experts_of(shape), GateSpec(), weight_type)
    stacked = _stacked(layer) if weight_type == "bfloat16" else None
    for count in tokens:
        calls = batches(layer, count)
        works = [dense_work(batch.slots, shape, element_bytes=layer.weight_bytes) for batch in calls]
        for path in ("decode", "grouped") if count <= MOST_DECODE else ("grouped",):
            run = [partial(experts.forward, batch.x, layer.arena, batch.slots, batch.shares, batch.out, path) for batch in calls]
            error = checked(layer, calls[0], run[0], f"{weight_type} {path}")
            about = {"layout": "dense", "weights": weight_type, "tokens": count, "path": path, "error": error}
            yield timed(layer, run, works, about)
        if stacked is not None:
            run = [partial(grouped_mm, stacked, batch) for batch in calls]
            error = checked(layer, calls[0], run[0], "grouped_mm")
            yield timed(
                layer, run, works, {"layout": "dense", "weights": weight_type, "tokens": count, "path": "grouped_mm", "error": error}
            )


def _stacked(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights in the checkpoints' layout, transposed: (E, H, 2I) and (E, I, H)."""
    copies = (layer.shape.num_experts // DISTINCT_EXPERTS, 1, 1)
    gate_up = torch.cat([layer.weights["gate"], layer.weights["up"]], dim=1)
    return tuple(part.to(layer.dtype).repeat(copies).transpose(1, 2) for part in (gate_up, layer.weights["down"]))  # type: ignore[return-value]


def grouped_mm(weights: tuple[torch.Tensor, torch.Tensor], batch: Batch) -> None:
    """Compute all neurons by PyTorch's grouped_mm, as transformers does, without waiting for the device, so that a graph can capture it."""
    gate_up, down = weights
    order = batch.slots.flatten().sort(stable=True)
    experts = torch.arange(1, len(down) + 1, dtype=batch.slots.dtype, device=batch.slots.device)
    ends = torch.searchsorted(order.values, experts).to(torch.int32)
    gate, up = F.grouped_mm(batch.x[order.indices // batch.slots.shape[1]], gate_up, offs=ends).chunk(2, dim=1)
    rows = F.grouped_mm(F.silu(gate) * up, down, offs=ends).float() * batch.shares.flatten()[order.indices][:, None]
    unsorted = torch.empty_like(rows)
    unsorted[order.indices] = rows
    batch.out.copy_(unsorted.view(*batch.slots.shape, -1).sum(1))


def sparse(session: Session, weight_type: str, tokens: Sequence[int], shares: Sequence[float] = (SPARSITY,)) -> Iterator[Row]:
    """The sparse layout with a share of the neurons left out, by every path."""
    from moegraft.operators.kernels.sparse_slots import SLOT_PATHS, SparseSlotExperts

    shape, device = place(session)
    layer = packed_layer(shape, weight_type, device, rows=True)
    experts = SparseSlotExperts(experts_of(shape), GateSpec(), weight_type, device)
    for count, share in product(tokens, shares):
        calls = batches(layer, count)
        # the threshold that leaves the share out of the first batch
        _, acted = next(experts.activations(calls[0].x[:64], layer.arena, calls[0].slots[:64]))
        threshold = float(acted.abs().flatten()[: 1 << 24].quantile(share))
        experts.set_threshold(threshold)
        works = []
        for batch in calls:
            parts = [(part, acts.abs() >= threshold) for part, acts in experts.activations(batch.x, layer.arena, batch.slots)]
            ids, active = torch.cat([part for part, _ in parts]), torch.cat([kept for _, kept in parts])
            works.append(sparse_work(ids, active, shape, layer.weight_bytes))
        for path in SLOT_PATHS:
            run = [partial(experts.forward, batch.x, layer.arena, batch.slots, batch.shares, batch.out, path) for batch in calls]
            # A neuron at the threshold may be in or out by rounding: one of thousands.
            error = checked(layer, calls[0], run[0], f"sparse {weight_type} {path}", threshold, limit=6e-2)
            about = {"layout": "sparse", "weights": weight_type, "sparsity": share, "tokens": count, "path": path, "error": error}
            yield timed(layer, run, works, about)


class Question(NamedTuple):
    """Which of some constants is fastest for a batch; the first of `choices` is the default."""

    tokens: int
    path: str
    choices: Sequence[Constants]


def questions(shape: Shape, *, few: bool) -> list[Question]:
    """The constants of the decode path by its two kernels, and of the grouped path by the pairs of a block."""
    from moegraft.operators.kernels.slots import DOWN_ROWS, UNITS, WARPS

    # A tile has fewer columns than the program has threads, see kernels/slots.py.
    tiles = [(WARPS, UNITS), *((warps, units) for warps, units in product((2, 4, 8), (32, 64, 128)) if units < 32 * warps)]
    gates = [{"gate_warps": warps, "gate_units": units} for warps, units in dict.fromkeys(tiles)]
    downs = [
        {"down_warps": warps, "down_units": units, "down_rows": rows} for rows in (DOWN_ROWS, 32) for warps, units in dict.fromkeys(tiles)
    ]
    if few:
        return [Question(1, "decode", gates[:2])]
    found = [Question(1, "decode", gates), Question(1, "decode", downs)]
    for tokens, block in ((64, 16), (512, 32), (2048, 64)):
        default = (128, 8 if block >= 64 else 4, 3)
        variants = [default, *((rows, warps, stages) for rows, warps, stages in product((64, 128), (4, 8), (2, 3, 4)))]
        choices = [
            {f"grouped_rows:{block}": rows, f"grouped_warps:{block}": warps, f"grouped_stages:{block}": stages}
            for rows, warps, stages in dict.fromkeys(variants)
        ]
        found.append(Question(tokens, "grouped", choices))
    return found


def tune(session: Session, weight_type: str) -> Iterator[Row]:
    """Time each question's choices and keep the winners as they are found."""
    from moegraft.operators.kernels.launch import trial
    from moegraft.operators.kernels.slots import SlotExperts

    shape, device = place(session)
    asked = questions(shape, few=session.emulated)
    if not session.emulated:
        yield compile_ahead(asked, weight_type, min(COMPILERS, os.cpu_count() or 1), min(60.0, session.left_s / 3))
    layer = packed_layer(shape, weight_type, device)
    experts = SlotExperts(experts_of(shape), GateSpec(), weight_type)
    winners: dict[str, int] = {}
    for tokens, path, choices in asked:
        calls = batches(layer, tokens)
        run = [partial(experts.forward, batch.x, layer.arena, batch.slots, batch.shares, batch.out, path) for batch in calls]
        medians: list[float] = []
        for constants in choices:
            about = {"weights": weight_type, "tokens": tokens, "path": path, **constants}
            try:
                with trial({**winners, **constants}):
                    checked(layer, calls[0], run[0], f"{weight_type} {path} {dict(constants)}")
                    times = measure(run, device)
            except Exception as error:  # too many registers, or too much shared memory: this choice is none
                if "CUDA error" in str(error):
                    raise
                yield {**about, "refused": f"{type(error).__name__}: {error}"[:300]}
                medians.append(float("inf"))
                continue
            medians.append(statistics.median(times))
            yield {**about, **percentiles(times, "ms", 5)}
        best = min(range(len(medians)), key=medians.__getitem__)
        if medians[best] * GAIN < medians[0]:
            winners |= choices[best]
            keep_constants(session, device, weight_type, winners)
    with trial(winners):
        crossover = decode_tokens(layer, experts, (1, 2) if session.emulated else (1, 2, 4, 8, 16, 32))
    if crossover:
        winners["decode_tokens"] = crossover
    yield {"weights": weight_type, "winners": winners}
    keep_constants(session, device, weight_type, winners)


def keep_constants(session: Session, device: torch.device, weight_type: str, winners: Constants) -> None:
    """Write constants where the kernels of this checkout read them, and where a later call finds them."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "emulated"
    for table in [session.out / TUNED, *([TABLE] if device.type == "cuda" else [])]:
        add_constants(table, {name: {weight_type: winners}})


def decode_tokens(layer: Layer, experts: Any, tokens: Sequence[int]) -> int:
    """Return the largest batch up to which every pair reading its own weights is faster than grouping them."""
    most = 0
    for count in tokens:
        calls = batches(layer, count)
        medians = [
            statistics.median(
                measure([partial(experts.forward, *batch[:1], layer.arena, *batch[1:], path) for batch in calls], layer.arena.device)
            )
            for path in ("decode", "grouped")
        ]
        if medians[0] >= medians[1]:
            break
        most = count
    return most


def compile_ahead(asked: Sequence[Question], weight_type: str, processes: int, limit_s: float) -> Row:
    """Compile every choice in several processes into Triton's cache on disk, where this process finds it; what fails, fails later again."""
    start, jobs = time.perf_counter(), [(question, constants) for question in asked for constants in question.choices]
    done = failed = 0
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        futures = [pool.submit(compile_one, weight_type, question.tokens, question.path, dict(constants)) for question, constants in jobs]
        for future in as_completed(futures, timeout=limit_s):
            done += 1
            failed += future.exception() is not None
    except TimeoutError:
        pass
    finally:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
    return {"weights": weight_type, "compiled": done, "of": len(jobs), "failed": failed, "seconds": round(time.perf_counter() - start, 1)}


def compile_one(weight_type: str, tokens: int, path: str, constants: dict[str, int]) -> None:
    """Launch one choice once."""
    from moegraft.operators.kernels.launch import trial
    from moegraft.operators.kernels.slots import SlotExperts

    torch.set_num_threads(1)
    layer = packed_layer(QWEN3, weight_type, torch.device("cuda:0"))
    experts = SlotExperts(experts_of(QWEN3), GateSpec(), weight_type)
    batch = batches(layer, tokens)[0]
    with trial(constants):
        experts.forward(batch.x, layer.arena, batch.slots, batch.shares, batch.out, path)
    torch.cuda.synchronize()
