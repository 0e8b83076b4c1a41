"""The experts of one model that have a GPU: gathered while the model loads, then one engine is opened for each GPU."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import torch

from moegraft.cpu_backend import PackedExperts, Runtime
from moegraft.operators.cache_form import KvCache
from moegraft.operators.cpu import as_array
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.offload.costs import CostModel, warm_up
from moegraft.operators.offload.deferral import connect
from moegraft.operators.offload.devices.base import DEVICE_KINDS, DeviceError, DeviceKind
from moegraft.operators.offload.devices.cuda import CudaDevice, why_no_cuda
from moegraft.operators.offload.engine import Engine
from moegraft.operators.offload.executors import CallExecutor, EngineLayers, Tokens
from moegraft.operators.offload.options import GpuOptions, free_for_slots, make_policy
from moegraft.operators.offload.queue import open_expert_cache
from moegraft.operators.offload.scheduler import Scheduler, layers_that_fit
from moegraft.operators.offload.statistics import TimingRecorder
from moegraft.operators.offload.store import ExpertStore, SlotPlan
from moegraft.operators.offload.transfers import Urgency
from moegraft.operators.router_maps import RouterMaps
from moegraft.operators.routing import Router
from moegraft.operators.sparsity import LayerSparsity, SparseLayers
from moegraft.operators.timeline import Timeline

if TYPE_CHECKING:
    from moegraft.operators.offload.gpu_layer import GpuLayer

logger = logging.getLogger(__name__)
CUDA = DeviceKind(CudaDevice, EngineLayers)
QUANTILE_EXPERTS, QUANTILE_TOKENS = 8, 16  # whose activations give the threshold that leaves out a share of synthetic tokens' neurons


@dataclass(frozen=True, slots=True)
class LoadedLayer:
    """A layer whose weights are in host memory.

    Attributes:
        number: from `ModelEngines.join`.
        defer: experts per token that may be added to the next layer.
        attach: makes what computes layer `index` of an engine, unless the layer is gone.
    """

    number: int
    packed: PackedExperts
    sparsity: LayerSparsity | None
    router: Router
    defer: int
    attach: Callable[[Engine, EngineLayers, int], GpuLayer | None]

    @property
    def device(self) -> torch.device:
        """Where the rest of the layer is."""
        return next(self.router.module.parameters()).device

    @property
    def kind(self) -> tuple[int, int, str, bool]:
        """Layers of one kind can share slots."""
        return self.packed.shape.num_experts, self.packed.expert_bytes, self.packed.weight_type, self.packed.sparse


class ModelEngines:
    """The engines of one model, and the layers that they compute.

    Layers `join` while the model is built and are `ready` when it is loaded; with the last one the engines open. Layers share an engine
    where they are on one GPU, have equal options, and hold experts of one kind. Engines close with the model: threads, page-locked memory
    and slots do not outlive it.

    Attributes:
        options: the different options that rules give to layers.
        cache: the model's key-value cache, for which slots leave memory.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.cache: KvCache | None = None
        self.options: list[GpuOptions] = []
        self._joined: list[GpuOptions] = []
        self._loaded: dict[int, LoadedLayer] = {}
        self._engines: list[Engine] = []
        self._layers: dict[int, weakref.ref[GpuLayer]] = {}  # by number
        weakref.finalize(self, _close_all, self._engines)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    @property
    def layers(self) -> Sequence[GpuLayer]:
        """The layers that engines compute, in the model's order."""
        return [layer for layer in (each() for _, each in sorted(self._layers.items())) if layer is not None]

    @property
    def may_open(self) -> bool:
        """Whether an engine may open: where all rules name CUDA devices and this machine has none, all experts run on the CPU."""
        return why_no_cuda() is None or not all(options.on_cuda for options in self.options)

    @property
    def captures(self) -> bool:
        """Whether a rule lets whole decode steps be captured."""
        return any(options.captures for options in self.options)

    def join(self, options: GpuOptions) -> int:
        """Return the number of a new layer, in the model's order."""
        if options not in self.options:
            self.options.append(options)
        self._joined.append(options)
        return len(self._joined) - 1

    def ready(self, layer: LoadedLayer) -> None:
        """Take a loaded layer; with the last one, open the engines."""
        self._loaded[layer.number] = layer
        if len(self._loaded) < len(self._joined):
            return
        defer = {number: loaded.defer for number, loaded in self._loaded.items()}
        for options in self.options:
            layers = [self._loaded.pop(number) for number, joined in enumerate(self._joined) if joined == options]
            kv_bytes = 0 if self.cache is None else self.cache.nbytes(options.cache.context)
            self._open_engines(options, layers, kv_bytes)
        if any(defer.values()):
            connect([(kept, defer[number]) for number, each in sorted(self._layers.items()) if (kept := each()) is not None])

    def _open_engines(self, options: GpuOptions, layers: Sequence[LoadedLayer], kv_bytes: int) -> None:
        # Layers are computed where their routers are; devices that hold no routers share them out evenly, in order.
        names, devices = [str(layer.device) for layer in layers], options.devices
        if not options.on_cuda:
            names = [devices[number * len(devices) // len(layers)] for number in range(len(layers))]
        elif (reason := why_no_cuda()) is not None or any(layer.device.type != "cuda" for layer in layers):
            reason = reason or "the rest of the model is not on a GPU; load it with device_map='cuda:0' or 'auto'"
            logger.warning("all experts run on the CPU (gpu: %s): %s", options.gpu, reason)
            return
        shared: dict[tuple[str, object], list[LoadedLayer]] = {}
        for name, layer in zip(names, layers, strict=True):
            shared.setdefault((name, layer.kind), []).append(layer)
        taken = dict.fromkeys(names, 0)  # bytes of slots
        for (name, _), members in shared.items():
            here = [layer for place, layer in zip(names, layers, strict=True) if place == name]
            share = _packed_bytes(members) / _packed_bytes(here)
            opened = open_engine(
                name, members, self._runtime, options, kv_bytes * len(here) // len(layers), share=share, taken_bytes=taken[name]
            )
            if opened is None:
                continue
            engine, engine_layers = opened
            self._engines.append(engine)
            taken[name] += engine.cache.slots.plan.slots * members[0].packed.expert_bytes
            for index, member in enumerate(members):
                gpu_layer = member.attach(engine, engine_layers, index)
                if gpu_layer is not None:
                    self._layers[member.number] = weakref.ref(gpu_layer)  # its module keeps it

    @torch.no_grad()
    def expect(self, states: torch.Tensor) -> None:
        """Load the experts that the verification of drafted tokens will probably need: those that the body's routers choose for `states`.

        Args:
            states: (1, T, H), an MTP layer's, of these tokens.
        """
        for layer in {layer.engine: layer for layer in self.layers}.values():
            layer.expect_verification(states.reshape(-1, states.shape[-1]))

    def statistics(self) -> Mapping[str, object]:
        """Return what each engine did, by its device."""
        return {engine.device.name: engine.report() for engine in self._engines}

    def counts(self) -> list[tuple[str, Mapping[str, object]]]:
        """Return the device and the counters of each engine."""
        found = ((engine.device.name, engine.statistics) for engine in self._engines)
        return [(device, {field.name: getattr(counts, field.name) for field in fields(counts)}) for device, counts in found]

    @contextmanager
    def timelines(self) -> Iterator[list[Timeline]]:
        """Record the spans of each engine while the body runs."""
        engines = list(self._engines)
        found = [Timeline(engine.device.name, engine.device.now_ms) for engine in engines]
        for engine, timeline in zip(engines, found, strict=True):
            engine.timings.timeline = timeline
        try:
            yield found
        finally:
            for engine in engines:
                engine.device.synchronize()
                engine.timings.collect()
                engine.timings.timeline = None

    def close(self) -> None:
        """End transfers and free the slots; the model computes no more."""
        _close_all(self._engines)


def _close_all(engines: list[Engine]) -> None:
    while engines:
        engines.pop().close()


def _packed_bytes(layers: Sequence[LoadedLayer]) -> int:
    return sum(layer.packed.buffer.nbytes for layer in layers)


def open_engine(
    device_name: str,
    loaded: Sequence[LoadedLayer],
    runtime: Runtime,
    options: GpuOptions,
    kv_bytes: int,
    *,
    share: float,
    taken_bytes: int,
) -> tuple[Engine, EngineLayers] | None:
    """Open the engine of one device and fill its slots; None where the device cannot hold or compute a single expert, which is logged.

    Args:
        kv_bytes: memory to leave for the KV cache on that device.
        share: of the memory for slots that these layers may take; layers of other formats have the rest.
        taken_bytes: of that memory, what slots of other layers have taken already.
    """
    packed, routers = [layer.packed for layer in loaded], [layer.router for layer in loaded]
    name, _, number = device_name.partition(":")
    kind = DEVICE_KINDS.get(name, CUDA)
    try:
        device = kind.open(int(number or 0))
    except DeviceError as error:
        logger.warning("%s cannot be used, all experts run on the CPU: %s", device_name, error)
        return None
    try:
        top_k = routers[0].top_k()
    except UnsupportedModelError:
        top_k = 1  # the cache then learns from fewer scores of each token
    store = ExpertStore.of_packed(packed)
    on_cuda = device.torch_device.type == "cuda"
    free_bytes = free_for_slots(device.torch_device, kv_bytes) + taken_bytes if on_cuda else math.ceil(store.nbytes / share)
    policy = make_policy(options.cache, [each.path for each in routers], store.num_experts, top_k)
    timings = TimingRecorder(device)
    cache = open_expert_cache(
        device,
        store,
        _slot_plan(options, store, free_bytes, share),
        policy.priority,
        "bypass" if options.cache.bypasses else "always",
        on_span=timings.on_span,
        on_transfer=timings.on_transfer,
    )
    if cache is None:
        device.close()
        return None
    slots = cache.slots
    sparsity = [layer.sparsity for layer in loaded]
    layers = kind.engine_layers(device.torch_device, runtime, packed, routers, sparsity, cache.arena)
    if options.prefetch.maps is not None:
        layers.look_ahead.use(RouterMaps(options.prefetch.maps), device.torch_device)
    synthetic = SyntheticCalls(layers, top_k)
    costs = CostModel(warm_up(device, cache, synthetic.executor))
    gpu_layers = None
    if options.schedule == "layer_map":
        gpu_layers = [slots.capacity_of(layer) >= slots.num_experts for layer in range(slots.layers)]
    engine = Engine(device, cache, Scheduler(options.schedule, gpu_layers), costs, policy, options.effective_prefetch, timings)
    _fill_slots(engine)
    return engine, layers


def _slot_plan(options: GpuOptions, store: ExpertStore, free_bytes: int, share: float) -> SlotPlan:
    """The slots that a rule asks for; `layer_map` has them in whole layers, the last ones."""
    plan = options.cache.plan(store.layers, store.num_experts, store.expert_bytes, free_bytes, captured=options.captures, share=share)
    if options.schedule != "layer_map":
        return plan
    whole = layers_that_fit(store.layers, store.num_experts, plan.total)
    return SlotPlan(tuple(store.num_experts * on_gpu for on_gpu in whole), plan.staging)


def _fill_slots(engine: Engine) -> None:
    """Load what the cache would keep, so that the first tokens find full slots: the profile's best, else the first experts."""
    slots, queue = engine.cache.slots, engine.cache.queue
    store = queue.store
    for layer in range(slots.layers):
        count = min(slots.capacity_of(layer), slots.num_experts)
        best = np.argsort(-engine.policy.priority(layer), kind="stable")[:count]
        for expert in best.tolist():
            with store.in_reach(layer, expert):
                if store.in_memory(layer, expert):  # or it cannot be read, which its first use reports
                    queue.request(layer, expert, Urgency.PROMOTION)
                if store.in_frames(layer):  # where the next one may take its place
                    _settle(engine)
    _settle(engine)


def _settle(engine: Engine) -> None:
    while not engine.cache.queue.idle:
        engine.device.stream("copy").record().wait()
        engine.device.synchronize()


class SyntheticCalls:
    """Calls of layer 0 on synthetic tokens, for the warm-up.

    The tokens are zeros, as the time of an expert does not depend on them. Where neurons are left out it does: then they are random,
    and have a threshold of their own that leaves out the share that the model is to leave out.

    Args:
        top_k: experts per token of the model, which kernels are compiled for. Tokens of calls with fewer experts have padded slots.

    Attributes:
        sparsity: leaves out that share; None where the model leaves nothing out.
    """

    def __init__(self, layers: EngineLayers, top_k: int = 1) -> None:
        self._layers = layers
        self._top_k = top_k
        self._packed = layers.packed[0]
        self._random = np.random.default_rng(0)
        of_model = layers.sparsity[0]
        self.sparsity = None if of_model is None else SparseLayers().join(of_model.options)
        self._kernel = layers.device_kernel(self.sparsity)
        if self.sparsity is not None and of_model is not None and of_model.routed_target:
            self.sparsity.set_threshold(self._quantile(of_model.routed_target), of_model.routed_target)

    def executor(self, experts: Sequence[int], load: int) -> CallExecutor:
        """Return the executor of a call in which each of these experts has `load` tokens."""
        layers, host = self._layers, self._tokens(experts, load)
        on_device = Tokens(*(tensor.to(layers.device) for tensor in (host.hidden_states, host.top_k_index, host.top_k_weights)))
        return CallExecutor(layers, self._packed, self.sparsity, self._kernel, host, on_device, grouped=False)

    def _tokens(self, experts: Sequence[int], load: int) -> Tokens:
        dtype = {"float32": torch.float32, "float16": torch.float16}.get(self._packed.weight_type, torch.bfloat16)
        hidden = torch.zeros(load, self._packed.shape.hidden, dtype=dtype)
        if self.sparsity is not None:
            hidden = torch.from_numpy(self._random.standard_normal(hidden.shape, np.float32)).to(dtype)
        chosen = torch.tensor([*experts, *[-1] * (self._top_k - len(experts))]).repeat(load, 1)
        return Tokens(hidden, chosen, torch.ones(chosen.shape))

    def _quantile(self, share: float) -> float:
        """The threshold that leaves out that share of the neurons of synthetic tokens."""
        tokens = self._tokens(range(min(self._layers.num_experts, QUANTILE_EXPERTS)), QUANTILE_TOKENS)
        acted = np.empty((*tokens.top_k_index.shape, self._packed.shape.intermediate), np.float32)
        hidden, out = as_array(tokens.hidden_states), as_array(torch.empty_like(tokens.hidden_states))
        index, weights = tokens.top_k_index.numpy(), tokens.top_k_weights.numpy()
        self._layers.runtime.forward(self._packed, hidden, index, weights, out, acted=acted)
        return float(np.quantile(np.abs(acted), share))
