"""What the experts of a layer give to a GPU, counted without one: kernels, copies, host nodes and waits.

48 layers of 128 experts, 8 a token, as in Qwen3-30B-A3B; the sizes of an expert, which change no count, are small.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import NoReturn

import numpy as np
import torch
from torch import nn
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts, Runtime
from moegraft.operators.draft import DraftSwitch
from moegraft.operators.offload.costs import CostModel, CostTables
from moegraft.operators.offload.engine import Engine
from moegraft.operators.offload.executors import EngineLayers
from moegraft.operators.offload.gpu_layer import GpuLayer
from moegraft.operators.offload.options import CacheOptions, make_policy
from moegraft.operators.offload.prefetch import PrefetchOptions
from moegraft.operators.offload.queue import open_expert_cache
from moegraft.operators.offload.scheduler import ScheduleName, Scheduler
from moegraft.operators.offload.statistics import TimingRecorder
from moegraft.operators.offload.step_graph import StepGraph
from moegraft.operators.offload.store import ExpertStore, SlotPlan
from moegraft.operators.routing import Router
from support.counted_gpu import GPU, CountedGpu, Counts, GpuTensor
from support.virtual_device import PROFILES

LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 48, 128, 8, 64, 32
RESIDENT = 32  # experts of a layer
PROMPT = 512
COUNTED = 8  # layers of an eager step, each with later ones to look ahead to
STEPS = 12
TOKEN_MS = 10.0  # from one captured step to the next, in which experts land
TABLES = CostTables(
    cpu_ms=((1, 0.06), (64, 0.6)),
    gpu_ms=((1, 0.01), (64, 0.03)),
    transfer_ms=((1, 1e-7), (2_500_000, 0.1)),
    first_cpu_ms=0.05,
    first_gpu_ms=0.05,
)
FIGURES = ("kernels", "copies", "host_nodes", "syncs")


def on_cpu(*call: object) -> NoReturn:
    raise AssertionError("calls of no token, or with an observer, are not measured")


class Model:
    """The experts and routers of a model on a counted GPU."""

    def __init__(self, schedule: ScheduleName) -> None:
        torch.manual_seed(0)
        config = Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=TOP_K, moe_intermediate_size=INTERMEDIATE)
        shape = ExpertsShape(EXPERTS, HIDDEN, INTERMEDIATE)
        self.packed = [PackedExperts(shape, GateSpec(), "int4") for _ in range(LAYERS)]
        weights = np.random.default_rng(0).standard_normal((EXPERTS, 3, INTERMEDIATE, HIDDEN), np.float32)
        for expert, (gate, up, down) in enumerate(weights):
            for layer in self.packed:
                for part, matrix in (("gate", gate), ("up", up), ("down", down.T.copy())):
                    layer.pack(expert, part, matrix)
        self.device = CountedGpu(PROFILES["a6000_10core"])
        self.routers = []
        for index in range(LAYERS):
            module = Qwen3MoeTopKRouter(config)
            module.weight = nn.Parameter(GpuTensor(torch.randn(EXPERTS, HIDDEN)), requires_grad=False)
            self.routers.append(Router(f"layers.{index}.mlp.experts", module, nn.Module(), EXPERTS))
        store = ExpertStore.of_packed(self.packed)
        policy = make_policy(CacheOptions(), list(map(str, range(LAYERS))), EXPERTS, TOP_K)
        timings = TimingRecorder(self.device)
        cache = open_expert_cache(self.device, store, SlotPlan((RESIDENT,) * LAYERS, 16), policy.priority)
        assert cache is not None, "a counted GPU has room"
        self.layers = EngineLayers(GPU, Runtime(1), self.packed, self.routers, [None] * LAYERS, cache.arena)
        scheduler = Scheduler(schedule)
        self.engine = Engine(self.device, cache, scheduler, CostModel(TABLES), policy, PrefetchOptions(), timings)
        draft = DraftSwitch()
        self.gpu_layers = [GpuLayer(self.engine, self.layers, index, draft, on_cpu) for index in range(LAYERS)]
        self._generator = torch.Generator().manual_seed(1)

    def hidden_states(self, tokens: int) -> torch.Tensor:
        return GpuTensor(torch.randn(tokens, HIDDEN, generator=self._generator).bfloat16())

    def forward(self, tokens: int) -> list[dict[str, float]]:
        """Call the first layers, and return what each took."""
        counts, found = self.device.counts, []
        for layer, router in zip(self.gpu_layers[:COUNTED], self.routers, strict=False):
            x = self.hidden_states(tokens)
            _, chosen_weights, chosen = router.module(x.float())
            before = self.engine.statistics.transferred + self.engine.statistics.arriving
            with figures(counts) as taken:
                layer.forward(x, chosen, chosen_weights)
            taken["arrivals"] = self.engine.statistics.transferred + self.engine.statistics.arriving - before
            found.append(taken)
        return found


@contextmanager
def figures(counts: Counts) -> Iterator[dict[str, float]]:
    """Collect what the body takes."""
    counts.clear()
    found: dict[str, float] = {}
    yield found
    found |= {"kernels": counts.kernels, "copies": counts.copies, "host_nodes": counts.host_nodes, "syncs": counts.syncs}


def per(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(row[name] for row in rows) for name in FIGURES}


def eager(schedule: ScheduleName) -> dict[str, float]:
    """Also by arrivals: the experts that were missing, and were brought for a layer."""
    model = Model(schedule)
    for _ in range(4):
        model.forward(1)
    rows = [row for _ in range(STEPS) for row in model.forward(1)]
    return {**per(rows), "arrivals": median(row["arrivals"] for row in rows)}


def prefill() -> dict[str, float]:
    model = Model("on_demand")
    model.forward(PROMPT)
    rows = model.forward(PROMPT)
    return {**per(rows), "arrivals": median(row["arrivals"] for row in rows)}


def captured() -> tuple[dict[str, float], dict[str, float]]:
    """Return the counts of a layer, and those of a token besides, replayed with routing that changes."""
    model = Model("two_threshold")
    for layer, router in zip(model.gpu_layers, model.routers, strict=True):
        x = model.hidden_states(1)
        layer.forward(x, *reversed(router.module(x.float())[1:]))
    graph = StepGraph(model.engine, model.layers, [layer.last_call for layer in model.gpu_layers])
    counts = model.device.counts
    layer_rows: list[dict[str, float]] = []

    def step() -> None:
        for layer, captured_layer, router in zip(model.gpu_layers, graph.layers, model.routers, strict=True):
            layer.captured = threading.get_ident(), captured_layer
            x = model.hidden_states(1)
            _, chosen_weights, chosen = router.module(x.float())
            with figures(counts) as taken:
                layer.forward(x, chosen, chosen_weights)
            layer_rows.append(taken)

    graph.capture(step)
    rng = np.random.default_rng(0)
    token_rows: list[dict[str, float]] = []
    for _ in range(STEPS + 4):
        route(graph, rng)
        with figures(counts) as taken:
            graph.replay()
        token_rows.append(taken)
        model.device.advance(TOKEN_MS)
    return per(layer_rows), per(token_rows[4:])


def route(graph: StepGraph, rng: np.random.Generator) -> None:
    """Write into a step's buffers what its kernels would write there: a routing, and which of the experts have slots."""
    rows = graph._buffers.rows
    for layer in range(LAYERS):
        scores = rng.dirichlet(np.full(EXPERTS, 0.1)).astype(np.float32)
        chosen = np.argsort(-scores)[:TOP_K]
        rows["scores"][layer, 0] = torch.from_numpy(scores)
        rows["chosen"][layer, 0] = torch.from_numpy(chosen.copy())
        rows["slots"][layer, 0] = torch.from_numpy(graph._slots.slot_of(layer)[chosen].astype(np.int32))
