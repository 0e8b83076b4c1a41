"""An engine over real layers of random experts on a device, and the reference result of every call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from moegraft.cpu_backend import Runtime
from moegraft.operators.experts.forecast import MachineProfile
from moegraft.operators.offload.costs import CostModel, CostTables
from moegraft.operators.offload.engine import Engine
from moegraft.operators.offload.executors import CallExecutor, EngineLayers, Tokens
from moegraft.operators.offload.options import CacheOptions, make_policy
from moegraft.operators.offload.prefetch import PrefetchOptions
from moegraft.operators.offload.queue import open_expert_cache
from moegraft.operators.offload.scheduler import LayerStep, Prediction, ScheduleName, Scheduler
from moegraft.operators.offload.statistics import TimingRecorder
from moegraft.operators.offload.store import ExpertStore, SlotPlan
from moegraft.operators.timeline import Timeline
from support.emulated import HostSlotLayers, TimedExecutor
from support.kernel_cases import Layer, make_batch, make_layer, make_stored_layer
from support.transfer_harness import make_device

LAYERS, EXPERTS, TOP_K = 3, 6, 3
# An expert of the tests has 24 KiB: 1 ms over this link, as long as on the CPU, so that plans depend on the resident set.
MACHINE = MachineProfile("even", cpu_gb_s=0.03, cpu_gflop_s=1.0, gpu_gb_s=1.0, gpu_tflop_s=1.0, link_gb_s=0.025)
TABLES = CostTables(
    cpu_ms=((1, 0.8), (64, 8.0)), gpu_ms=((1, 0.1), (64, 0.2)), transfer_ms=((1, 1.0 / 24576), (24576, 1.0)), first_cpu_ms=0.2
)


@dataclass(frozen=True, slots=True)
class Setting:
    """The configuration of an engine."""

    schedule: ScheduleName = "two_threshold"
    capacity: tuple[int, ...] = (2,) * LAYERS
    staging: int = 2
    policy: str = "mrs"
    prefetch: PrefetchOptions = field(default_factory=PrefetchOptions)
    kind: str = "virtual"
    device: dict[str, Any] = field(default_factory=dict)
    stored: str = ""  # weights of a file, of as many bytes; the layers are larger, and equal


class EngineRig:
    """Calls layers in a model's order, with predictions that are sometimes correct."""

    def __init__(self, setting: Setting, dtype: torch.dtype = torch.float32) -> None:
        self.layers: list[Layer] = [
            make_stored_layer(setting.stored, EXPERTS, 256, 128)
            if setting.stored
            else make_layer(num_experts=EXPERTS, hidden=64, intermediate=32, seed=seed)
            for seed in range(LAYERS)
        ]
        self.runtime = Runtime(1)
        self.dtype = dtype
        device = make_device(setting.kind, MACHINE, **setting.device)
        store = ExpertStore.of_packed([layer.packed for layer in self.layers])
        policy = make_policy(CacheOptions(policy=setting.policy), list(map(str, range(LAYERS))), EXPERTS, TOP_K)  # type: ignore[arg-type]
        timings = TimingRecorder(device)
        slots = SlotPlan(setting.capacity, setting.staging)
        cache = open_expert_cache(
            device, store, slots, policy.priority, chunk_bytes=8192, on_span=timings.on_span, on_transfer=timings.on_transfer
        )
        assert cache is not None, "the device has room"
        self.arena = cache.arena
        self.layers_type: type[EngineLayers] = EngineLayers if device.torch_device.type == "cuda" else HostSlotLayers
        gpu_layers = [True, *[False] * (LAYERS - 1)] if setting.schedule == "layer_map" else None
        scheduler = Scheduler(setting.schedule, gpu_layers)
        self.engine = Engine(device, cache, scheduler, CostModel(TABLES), policy, setting.prefetch, timings)
        self._rng = np.random.default_rng(0)

    def call(self, number: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the engine's result and the reference's."""
        layer = self.layers[number]
        x, index, weights = make_batch(tokens, TOP_K, layer, self.dtype, seed)
        if seed % 3 == 0 and tokens:
            index[0, 0] = -1  # a padded slot
        scores = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed)).numpy()
        executor = self.executor(number, x, index, weights)
        self.engine.run(LayerStep.of(number, index.numpy(), scores, self._predictions(number, tokens)), executor)
        return executor.result.cpu(), layer.reference(x, index, weights)

    @property
    def torch_device(self) -> torch.device:
        return self.engine.device.torch_device

    @property
    def limit(self) -> float:
        """The largest relative error of float32 results; a GPU sums in another order, and in three passes of tf32."""
        return 1e-5 if self.torch_device.type == "cuda" else 2e-6

    def engine_layers(self) -> EngineLayers:
        packed = [layer.packed for layer in self.layers]
        return self.layers_type(self.engine.device.torch_device, self.runtime, packed, [], [None] * LAYERS, self.arena)

    def executor(self, number: int, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> CallExecutor:
        layers, tokens = self.engine_layers(), Tokens(x, index, weights)
        on_device = Tokens(*(each.to(self.torch_device) for each in (x, index, weights)))
        return TimedExecutor(layers, layers.packed[number], None, layers.kernels[number], tokens, on_device)

    def _predictions(self, number: int, tokens: int) -> list[Prediction]:
        later = range(number + 1, min(number + 4, LAYERS))
        chosen = [self._rng.permuted(np.tile(np.arange(EXPERTS), (max(tokens, 1), 1)), axis=1)[:, :TOP_K] for _ in later]
        return [Prediction.of(layer, ids) for layer, ids in zip(later, chosen, strict=True)]


@contextmanager
def engine_rig(setting: Setting, dtype: torch.dtype = torch.float32) -> Iterator[EngineRig]:
    rig = EngineRig(setting, dtype)
    try:
        yield rig
    finally:
        rig.engine.close()


def busy_ms(timeline: Timeline, lane: str) -> float:
    """Return the time that spans of a lane cover, overlaps counted once."""
    covered, end_ms = 0.0, float("-inf")
    for span in sorted((span for span in timeline.spans if span.lane == lane), key=lambda span: span.start_ms):
        covered += max(0.0, span.end_ms - max(span.start_ms, end_ms))
        end_ms = max(end_ms, span.end_ms)
    return covered
