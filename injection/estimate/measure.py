"""Rates of this machine: how fast memory is read, and how fast the operators and PyTorch's own layers run.

Measurements kept in the user's cache folder, good for the machine and the versions that they were made with.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moegraft.injection.api import optimize_and_load
from moegraft.injection.checkpoint.sources import live_source
from moegraft.injection.estimate.work import GpuRates
from moegraft.operators.context import InjectionContext
from moegraft.operators.experts.hybrid import HybridExperts, HybridExpertsOptions
from moegraft.operators.linear import QuantizedLinear, QuantizedLinearOptions
from moegraft.operators.machine import probe_machine
from moegraft.operators.self_test import kernel_isa, kernel_threads

# Qwen3-30B-A3B's widths. 32 experts of them, and 256 MiB of anything else, are more than the caches of most CPUs hold.
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 768, 32, 8
READ_BYTES = 1 << 28
PREFILL_TOKENS = 256
MANY_TOKENS = 2048  # enough that a GPU computes rather than reads
LINK_BYTES = 1 << 26
EXPERT_TYPES = ("float32", "bfloat16", "int8", "int4")
LINEAR_TYPES = ("float32", "bfloat16")
QUANTIZED_TYPES = ("int8", "int4")
OVERHEAD_LAYERS = 8
BUSY = 0.5  # load average by core; from half a core on, rates are of the other programs too


@dataclass(frozen=True, slots=True)
class Rate:
    """One kind of layer: bytes of weights read a second with one token, arithmetic a second with many."""

    decode_gbps: float
    prefill_gflops: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """Rates that one call in five reaches, with the threads that programs take by themselves.

    The fastest fifth is what the machine can do; medians would be of the machine and of what else runs on it.

    Attributes:
        read_gbps: of plain memory.
        experts, linear: by weight type; linear has PyTorch's own layers and `quantized_linear`.
        layer_overhead_ms: of a decoder layer with next to no weights: what Python and PyTorch take for each layer and token.
        load: of each core by other programs when measuring began (the load average over cores); near 0 on a quiet machine.
        gpu: of the first GPU and the link to it; None where there is none.
    """

    read_gbps: float
    experts: Mapping[str, Rate]
    linear: Mapping[str, Rate]
    layer_overhead_ms: float
    load: float
    gpu: GpuRates | None = None

    @property
    def busy(self) -> bool:
        """Whether other programs ran while this was measured, so that figures made of it are rough."""
        return self.load > BUSY


def measure(progress: Callable[[str], None] = lambda text: None) -> Measurements:
    """Measures everything; takes some ten seconds. `progress` is told what comes next."""
    machine = probe_machine()
    context = InjectionContext(machine=machine, dtype=torch.float32)
    load = os.getloadavg()[0] / machine.cores
    with torch.no_grad():
        progress("memory")
        reading = _seconds(_reader(), budget_s=1.5, most=25)
        config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts=EXPERTS, dtype=torch.bfloat16)
        with torch.device("meta"):
            module = Qwen3MoeExperts(config).to(torch.bfloat16)
        _filled(module)
        experts = {}
        for weights in EXPERT_TYPES:
            progress(f"experts, {weights}")
            experts[weights] = _experts_rate(weights, module, context)
        linear = {}
        for weights in (*LINEAR_TYPES, *QUANTIZED_TYPES):
            progress(f"linear layers, {weights}")
            linear[weights] = _linear_rate(weights, context)
        progress("overhead")
        overhead_ms = _overhead_ms()
        if machine.gpus:
            progress("GPU")
        gpu = measure_gpu(torch.device("cuda:0")) if machine.gpus else None
    return Measurements(READ_BYTES / _best_fifth(reading) / 1e9, experts, linear, overhead_ms, load, gpu)


def measure_gpu(device: torch.device) -> GpuRates:
    """What the device reaches at products with one token and with many, and copies from page-locked host memory to it."""
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
        _best_fifth(_seconds(finished(call)))
        for call in (lambda: weight @ token, lambda: weight @ tokens, lambda: there.copy_(host, non_blocking=True))
    )
    flops = 2 * weight.numel() * MANY_TOKENS
    return GpuRates(weight.nbytes / reading_s / 1e9, flops / computing_s / 1e12, LINK_BYTES / copying_s / 1e9, "measured here")


def _seconds(call: Callable[[], object], *, budget_s: float = 0.6, most: int = 15) -> list[float]:
    """Sorted times of a call, after one to warm up: 3 at least, then as many as the budget allows."""
    call()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget_s and len(times) < most):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)


def _best_fifth(times: list[float]) -> float:
    return times[len(times) // 5]


def _reader() -> Callable[[], object]:
    data = torch.ones(READ_BYTES // 4)
    return data.sum


def _filled(module: nn.Module) -> nn.Module:
    """A module on meta with weights: one random row again and again, which takes no time and times like any other."""
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape[-1]) / parameter.shape[-1] ** 0.5)
    return module


def _experts_rate(weights: str, module: nn.Module, context: InjectionContext) -> Rate:
    options: Any = HybridExpertsOptions(weights=weights)  # type: ignore[arg-type]
    operator = HybridExperts.build(module, options, context)
    operator.load(live_source("experts", module), lambda size: None)
    dtype = torch.bfloat16 if weights == "bfloat16" else torch.float32
    held_bytes = HybridExperts.footprint(module, options, torch.bfloat16).total_bytes

    def run(tokens: int) -> Callable[[], object]:
        hidden, shares = torch.randn(tokens, HIDDEN, dtype=dtype), torch.full((tokens, TOP_K), 1 / TOP_K)
        turns = iter(range(1 << 30))
        # Other experts at every call, so that none is still in a cache.
        return lambda: operator(hidden, (torch.arange(tokens * TOP_K).view(tokens, TOP_K) + next(turns) * TOP_K) % EXPERTS, shares)

    decode_s, prefill_s = _best_fifth(_seconds(run(1), most=100)), _best_fifth(_seconds(run(PREFILL_TOKENS)))
    flops = 6 * HIDDEN * INTERMEDIATE * TOP_K * PREFILL_TOKENS
    return Rate(held_bytes * TOP_K / EXPERTS / decode_s / 1e9, flops / prefill_s / 1e9)


def _linear_rate(weights: str, context: InjectionContext) -> Rate:
    columns = 4096
    rows = READ_BYTES // (2 * columns)
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    layer: nn.Module = _filled(nn.Linear(columns, rows, bias=False, dtype=dtype, device="meta"))
    held_bytes = sum(parameter.nbytes for parameter in layer.parameters())
    if weights in QUANTIZED_TYPES:
        options: Any = QuantizedLinearOptions(weights=weights)  # type: ignore[arg-type]
        held_bytes = QuantizedLinear.footprint(layer, options, dtype).total_bytes
        operator = QuantizedLinear.build(layer, options, context)
        operator.load(live_source("linear", layer), lambda size: None)
        layer = operator
    one, many = torch.randn(1, columns, dtype=dtype), torch.randn(PREFILL_TOKENS, columns, dtype=dtype)
    decode_s, prefill_s = _best_fifth(_seconds(lambda: layer(one))), _best_fifth(_seconds(lambda: layer(many)))
    return Rate(held_bytes / decode_s / 1e9, 2 * rows * columns * PREFILL_TOKENS / prefill_s / 1e9)


def _overhead_ms() -> float:
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
    cache = model(token, use_cache=True).past_key_values
    return _best_fifth(_seconds(lambda: model(token, past_key_values=cache, use_cache=True))) / OVERHEAD_LAYERS * 1e3


def linear_rate(measured: Measurements, dtype: torch.dtype) -> Rate:
    """That of PyTorch's own layers in `dtype`; float16 runs as bfloat16 does."""
    return measured.linear["float32" if dtype == torch.float32 else "bfloat16"]


def measurements_path() -> Path:
    """`$XDG_CACHE_HOME/moegraft/measurements.json`, by default in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "moegraft" / "measurements.json"


def save(measured: Measurements) -> Path:
    """
    Raises:
        OSError: the cache folder cannot be written.
    """
    path = measurements_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"made_with": _made_with(), "measured": asdict(measured)}, indent=1), encoding="utf-8")
    return path


def load() -> Measurements | None:
    """What was measured on this machine with these versions; None where nothing was, or nothing that can be read."""
    try:
        data = json.loads(measurements_path().read_text(encoding="utf-8"))
        if data["made_with"] != _made_with():
            return None
        return _measurements(data["measured"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _measurements(data: dict[str, Any]) -> Measurements:
    rates = {kind: {name: Rate(**rate) for name, rate in data[kind].items()} for kind in ("experts", "linear")}
    gpu = data.get("gpu")
    return Measurements(**{**data, **rates, "gpu": None if gpu is None else GpuRates(**gpu)})


def _made_with() -> dict[str, Any]:
    """What rates depend on."""
    names = ("moegraft", "torch", "transformers")
    gpus = [gpu.name for gpu in probe_machine().gpus]
    found: dict[str, Any] = {"cpu": _cpu(), "threads": kernel_threads(), "isa": kernel_isa(), "gpus": gpus}
    return {**found, **{name: version(name) for name in names}}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
