"""Measured rates of this machine, of memory, of operators and of PyTorch's own layers, and of the messages between processes.

Of messages, the exchange of the forward pass itself is measured, with experts that return their input.

Measurements are saved in the user's cache folder; they are valid for the machine and the versions that they were made with.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moegraft.injection.api import optimize_and_load
from moegraft.injection.checkpoint.sources import ModuleSource
from moegraft.injection.injected import injection_of
from moegraft.injection.parallel import Processes
from moegraft.operators.atomic_file import user_cache, write_file
from moegraft.operators.base import CACHE, GpuRates, Operator, Rate
from moegraft.operators.context import InjectionContext
from moegraft.operators.cpu import kernel_in_use
from moegraft.operators.expert_group import Peer, Shares
from moegraft.operators.machine import cpu_info, probe_machine, read_gbps, version_of
from moegraft.operators.registry import load_registry

# Qwen3-30B-A3B's widths. 32 such experts, and 256 MiB of other data, are larger than the caches of most CPUs.
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 768, 32, 8
READ_BYTES = 1 << 28
LINEAR_COLUMNS = 4096
PREFILL_TOKENS = 256
MANY_TOKENS = 2048  # enough that a GPU computes rather than reads
LINK_BYTES = 1 << 26
LINEAR_TYPES = ("float32", "bfloat16")  # of PyTorch's own layers
OVERHEAD_LAYERS = 8
ATTENTION_HEADS, ATTENTION_TOKENS, ATTENTION_WIDTH = 8, 1024, 128  # of Qwen3-30B-A3B's width
RECORDED_STEPS = 6  # by then a decode step is replayed
MESSAGE_TOKENS = 1024  # 4 MiB of bfloat16 in each direction
FEW_CALLS, MANY_CALLS = 400, 12
DISK_BYTES, DISK_DEPTHS, DISK_S, DISK_SMALL_READS = 1 << 30, (1, 2, 4, 8), 1.0, 200
BUSY = 0.5  # load average per core above which other programs disturb the measurement


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Disk:
    """Reads of a disk past the page cache.

    Attributes:
        folder: on the disk.
        gbps: of random experts of 2.5 MiB, by how many threads read.
        latency_us: of one of 4 KiB, the median.
    """

    folder: str
    gbps: Mapping[str, float]
    latency_us: float

    @property
    def best_gbps(self) -> float:
        return max(self.gbps.values())  # frames have four threads; where fewer read faster, the disk's speed has changed meanwhile

    def describe(self) -> str:
        """Return a line for users."""
        rates = ", ".join(f"{rate:.2f} with {depth}" for depth, rate in self.gbps.items())
        return f"disk of {self.folder}: GB/s by threads that read: {rates}; {self.latency_us:.0f} us for 4 KiB"


@dataclass(frozen=True, slots=True)
class Measurements:
    """Rates with the default number of threads, each the best fifth of its calls, which other programs disturb least.

    Attributes:
        read_gbps: of plain memory.
        experts, linear: by weight type; `linear` includes PyTorch's own layers and those of operators.
        layer_overhead_ms: time of a decoder layer with almost no weights, which Python runs layer by layer.
        step_overhead_ms: the same in a decode step on the CPU that is one native program; None where it was not measured.
        attention_gflops: of PyTorch's causal attention in bfloat16, forward and backward, which training has; None where it was not
            measured.
        load: the load average per core when measuring began; near 0 on a quiet machine.
        gpu: of the first GPU and the link to it; None without a GPU.
        disk: None where none was measured.
    """

    read_gbps: float
    experts: Mapping[str, Rate]
    linear: Mapping[str, Rate]
    layer_overhead_ms: float
    load: float
    gpu: GpuRates | None = None
    step_overhead_ms: float | None = None
    attention_gflops: float | None = None
    disk: Disk | None = None

    @property
    def busy(self) -> bool:
        """Whether other programs ran during the measurement, so that predictions from it are rough."""
        return self.load > BUSY


def measure(progress: Callable[[str], None] = lambda text: None, disk: Path | None = None) -> Measurements:
    """Measure all rates, in some ten seconds.

    Args:
        progress: called with the name of each measurement.
        disk: a folder on the disk to measure.

    Raises:
        OSError: no file can be written there, or read past the page cache.
    """
    machine = probe_machine()
    load = psutil.getloadavg()[0] / machine.cores
    if disk is not None:
        progress(f"disk of {disk}")
    of_disk = None if disk is None else measure_disk(disk)
    registry = load_registry()
    operators = [registry[name] for name in registry]
    context = InjectionContext(dtype=torch.float32)
    with torch.no_grad():
        progress("memory")
        data = torch.ones(READ_BYTES // 4)
        reading_s = _best_fifth_s(data.sum, budget_s=1.5, most=25)
        del data
        experts: dict[str, Rate] = {}
        linear: dict[str, Rate] = {}
        config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts=EXPERTS, dtype=torch.bfloat16)
        with torch.device("meta"):
            module = Qwen3MoeExperts(config).to(torch.bfloat16)
        _fill(module)
        for weights, operator, options in _cases(operators, "experts"):
            progress(f"experts, {weights}")
            experts[weights] = _experts_rate(weights, _loaded(operator, module, options, context), _bytes(operator, module, options))
        for weights in LINEAR_TYPES:
            progress(f"linear layers, {weights}")
            layer = _linear_module(getattr(torch, weights))
            linear[weights] = _linear_rate(layer, layer.weight.dtype, layer.weight.nbytes)
        for weights, operator, options in _cases(operators, "linear"):
            progress(f"linear layers, {weights}")
            layer = _linear_module(torch.bfloat16)
            linear[weights] = _linear_rate(_loaded(operator, layer, options, context), torch.bfloat16, _bytes(operator, layer, options))
        progress("overhead")
        layer_ms, step_ms = _overheads_ms()
        progress("attention")
        attention_gflops = _attention_gflops()
        if machine.gpus:
            progress("GPU")
        gpu = measure_gpu(torch.device("cuda:0")) if machine.gpus else None
    return Measurements(READ_BYTES / reading_s / 1e9, experts, linear, layer_ms, load, gpu, step_ms, attention_gflops, of_disk)


def measure_disk(folder: Path) -> Disk:
    """Measure a disk with a file of 1 GiB, which is removed, by the reads that experts in frames have.

    Raises:
        OSError: it cannot be written, or not be read past the page cache.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix="moegraft-disk-") as file:
        block = os.urandom(1 << 20)
        for _ in range(DISK_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        if not hasattr(os, "O_DIRECT"):
            raise OSError(errno.ENOTSUP, "this system has no reads past the page cache")
        descriptor = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        try:
            places, times = random.Random(0), []
            memory = mmap.mmap(-1, 4096)  # aligned, as direct reads need it
            for _ in range(DISK_SMALL_READS):
                place = places.randrange(DISK_BYTES // 4096) * 4096
                began = time.perf_counter()
                os.preadv(descriptor, [memory], place)
                times.append(time.perf_counter() - began)
        finally:
            os.close(descriptor)
        rates = {str(depth): round(read_gbps(Path(file.name), depth, DISK_S), 3) for depth in DISK_DEPTHS}
    return Disk(str(folder), rates, round(1e6 * statistics.median(times), 1))


def _cases(operators: list[type[Operator]], kind: str) -> list[tuple[str, type[Operator], Any]]:
    """Return weight type, operator and options of each measurement; of several operators for a weight type, the first by name."""
    cases: dict[str, tuple[str, type[Operator], Any]] = {}
    for operator in operators:
        if operator.kind == kind and operator.packing is not None:
            for weights, options in operator.packing.measured.items():
                cases.setdefault(weights, (weights, operator, options))
    return list(cases.values())


def _loaded(operator: type[Operator], module: nn.Module, options: Any, context: InjectionContext) -> nn.Module:
    built = operator.build(module, options, context)
    built.load(ModuleSource(operator.kind, module), lambda size: None)
    return built


def _bytes(operator: type[Operator], module: nn.Module, options: Any) -> int:
    return operator.footprint(module, options, torch.bfloat16).total_bytes


def measure_gpu(device: torch.device) -> GpuRates:
    """Measure products with one token and with many on a device, and copies from page-locked host memory to it."""
    side = 8192
    weight = torch.empty(READ_BYTES // 2 // side, side, dtype=torch.bfloat16, device=device).normal_()
    token, tokens = (torch.randn(side, count, device=device).to(torch.bfloat16) for count in (1, MANY_TOKENS))
    host = torch.zeros(LINK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty_like(host, device=device)

    def finished(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return run

    reading_s, computing_s, copying_s = (
        _best_fifth_s(finished(call))
        for call in (lambda: weight @ token, lambda: weight @ tokens, lambda: there.copy_(host, non_blocking=True))
    )
    flops = 2 * weight.numel() * MANY_TOKENS
    return GpuRates(weight.nbytes / reading_s / 1e9, flops / computing_s / 1e12, LINK_BYTES / copying_s / 1e9, "measured here")


def _best_fifth_s(call: Callable[[], object], *, budget_s: float = 0.6, most: int = 15) -> float:
    """Return the 20th percentile of the times of at least 3 calls, and of more as the budget allows, after one to warm up."""
    call()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget_s and len(times) < most):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 5]


def _linear_module(dtype: torch.dtype) -> nn.Linear:
    """A layer of `READ_BYTES` in 16 bits."""
    layer = nn.Linear(LINEAR_COLUMNS, READ_BYTES // (2 * LINEAR_COLUMNS), bias=False, dtype=dtype, device="meta")
    _fill(layer)
    return layer


def _fill(module: nn.Module) -> None:
    """Allocate the weights of a module on meta: one random row repeated, which is fast and does not change the times."""
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape[-1]) / parameter.shape[-1] ** 0.5)


def _experts_rate(weights: str, operator: nn.Module, held_bytes: int) -> Rate:
    dtype = torch.bfloat16 if weights == "bfloat16" else torch.float32

    def run(tokens: int) -> Callable[[], object]:
        hidden, shares = torch.randn(tokens, HIDDEN, dtype=dtype), torch.full((tokens, TOP_K), 1 / TOP_K)
        calls = iter(range(1 << 30))
        # Different experts in every call, so that none is in a CPU cache.
        return lambda: operator(hidden, (torch.arange(tokens * TOP_K).view(tokens, TOP_K) + next(calls) * TOP_K) % EXPERTS, shares)

    decode_s, prefill_s = _best_fifth_s(run(1), most=100), _best_fifth_s(run(PREFILL_TOKENS))
    flops = 6 * HIDDEN * INTERMEDIATE * TOP_K * PREFILL_TOKENS
    return Rate(held_bytes * TOP_K / EXPERTS / decode_s / 1e9, flops / prefill_s / 1e9)


def _linear_rate(layer: nn.Module, dtype: torch.dtype, held_bytes: int) -> Rate:
    one, many = torch.randn(1, LINEAR_COLUMNS, dtype=dtype), torch.randn(PREFILL_TOKENS, LINEAR_COLUMNS, dtype=dtype)
    decode_s, prefill_s = _best_fifth_s(lambda: layer(one)), _best_fifth_s(lambda: layer(many))
    return Rate(held_bytes / decode_s / 1e9, READ_BYTES * PREFILL_TOKENS / prefill_s / 1e9)  # two operations and two bytes per weight


def _overheads_ms() -> tuple[float, float]:
    """Return the times of a small decoder layer, run by Python and within a native program."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=OVERHEAD_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
    )
    model = optimize_and_load(Qwen3MoeForCausalLM(config), "cpu", progress=False)
    token = torch.ones(1, 1, dtype=torch.int64)
    context = injection_of(model).context  # type: ignore[union-attr] # it was injected just now

    def layer_ms() -> float:
        cache = model(token, use_cache=True)[CACHE]
        step = partial(model, input_ids=token, use_cache=True, **{CACHE: cache})
        for _ in range(RECORDED_STEPS):
            step()
        return _best_fifth_s(step) / OVERHEAD_LAYERS * 1e3

    replayed_ms = layer_ms()
    context.replay = None
    return layer_ms(), replayed_ms


@torch.enable_grad()
def _attention_gflops() -> float:
    """Return the rate of a forward and a backward pass, of which the forward pass is two products of seven."""
    shape = 1, ATTENTION_HEADS, ATTENTION_TOKENS, ATTENTION_WIDTH
    queries, keys, values = (torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    gradient = torch.randn(shape, dtype=torch.bfloat16)

    def run() -> None:
        out = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        torch.autograd.grad(out, (queries, keys, values), gradient)

    product = 2 * ATTENTION_HEADS * ATTENTION_TOKENS**2 * ATTENTION_WIDTH / 2  # half of a square is in the future
    return 7 * product / _best_fifth_s(run) / 1e9


@dataclass(frozen=True, slots=True)
class Link:
    """The exchange between rank 0 and another rank.

    Attributes:
        layer_us: that a layer takes longer when the other rank is asked for one row, and answers at once.
        gbit: bits of rows and sums in a second, with many rows.
    """

    host: str
    layer_us: float
    gbit: float


@dataclass(frozen=True, slots=True)
class Network:
    """The links of rank 0 to all other ranks.

    Attributes:
        all_us: that a layer takes longer when all are asked for one row.
    """

    links: tuple[Link, ...]
    all_us: float

    @property
    def slowest(self) -> Link:
        return min(self.links, key=lambda link: link.gbit)


class _Echo:
    """Experts that return their input."""

    def compute(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(rows)


def measure_network() -> Network | None:
    """Measure between the processes that torchrun has started; None in all but that of rank 0.

    Raises:
        MoegraftError: they cannot reach each other, or one has ended.
    """
    echo = _Echo()
    with Processes() as processes, processes.agreed():
        count = processes.count
        group = processes.group(Shares((1,) * count, processes.rank))
        layer = group.join(count, echo.compute)
    group.start()
    if processes.rank:
        group.follow()
        return None

    def seconds(tokens: int, ids: list[int], calls: int) -> float:
        """Return the median time of a layer whose rows all choose one expert on each of some ranks."""
        rows = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16)
        index = torch.tensor([ids]).repeat(tokens, 1)
        weights = torch.ones(index.shape)
        times = []
        for number in range(calls + calls // 4):
            began = time.perf_counter()
            group.forward(layer, rows, index, weights)
            if number >= calls // 4:
                times.append(time.perf_counter() - began)
        return statistics.median(times)

    alone_s, many_alone_s = seconds(1, [0], FEW_CALLS), seconds(MESSAGE_TOKENS, [0], MANY_CALLS)

    def link(peer: Peer) -> Link:
        few_s, many_s = seconds(1, [0, peer.rank], FEW_CALLS), seconds(MESSAGE_TOKENS, [0, peer.rank], MANY_CALLS)
        bits = 2 * 8 * MESSAGE_TOKENS * HIDDEN * torch.bfloat16.itemsize
        return Link(peer.host, _longer_us(few_s, alone_s), round(bits / max(many_s - many_alone_s, 1e-9) / 1e9, 2))

    links = tuple(link(peer) for peer in processes.peers if peer.rank)
    all_s = seconds(1, list(range(count)), FEW_CALLS)
    group.close()
    return Network(links, _longer_us(all_s, alone_s))


def _longer_us(measured_s: float, alone_s: float) -> float:
    return max(0.0, round(1e6 * (measured_s - alone_s), 1))  # a busy machine may have disturbed the one more than the other


def save(figures: Measurements | Network) -> Path:
    """Write the figures of a measurement to a file in the user's cache folder, with what they are valid for, and return it.

    Raises:
        OSError: the cache folder cannot be written.
    """
    path = user_cache(_FILES[type(figures)])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps({"made_with": _made_with(type(figures)), "measured": asdict(figures)}, indent=1))
    return path


def _saved(kind: type[T], read: Callable[[dict[str, Any]], T]) -> T | None:
    """Return what `read` makes of figures that `save` wrote; None if there are none that are valid here."""
    made_with = _made_with(kind)
    try:
        data = json.loads(user_cache(_FILES[kind]).read_text(encoding="utf-8"))
        return read(data["measured"]) if data["made_with"] == made_with else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def load() -> Measurements | None:
    """Return the saved measurements; None if there are none for this machine and these versions."""

    def read(measured: dict[str, Any]) -> Measurements:
        rates = {kind: {name: Rate(**rate) for name, rate in measured[kind].items()} for kind in ("experts", "linear")}
        gpu, disk = measured.get("gpu"), measured.get("disk")
        made = {"gpu": None if gpu is None else GpuRates(**gpu), "disk": None if disk is None else Disk(**disk)}
        return Measurements(**{**measured, **rates, **made})

    return _saved(Measurements, read)


def load_network() -> Network | None:
    """Return the saved measurement; None if there is none of this version."""
    return _saved(Network, lambda found: Network(tuple(Link(**link) for link in found["links"]), float(found["all_us"])))


_FILES: Mapping[type, str] = {Measurements: "measurements.json", Network: "network.json"}


def _made_with(kind: type) -> object:
    """Return what figures depend on: the version, and rates also the machine and the versions of libraries."""
    if kind is Network:
        return version_of("moegraft")
    gpus = [gpu.name for gpu in probe_machine().gpus]
    kernel = kernel_in_use()
    versions = {name: version_of(name) for name in ("moegraft", "torch", "transformers")}
    nodes = {"memory_nodes": kernel.memory_nodes} if kernel.memory_nodes > 1 else {}
    return {"cpu": cpu_info("model name"), "threads": kernel.threads, **nodes, "isa": kernel.isa, "gpus": gpus, **versions}
