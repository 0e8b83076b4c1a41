"""The experts of one model whose rules give them a GPU: gathered while the model loads, then opened, one engine for each GPU.

One device's engine, from what the layers hold and what the rule says.

The sets of layers of one model that share GPUs.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.cpu_backend import PackedExperts, Runtime
from moegraft.operators.cpu import as_array
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.kv_cache import CacheForm
from moegraft.operators.kv_cache_size import kv_cache_bytes
from moegraft.operators.offload.cache import make_policy
from moegraft.operators.offload.costs import CostModel, warm_up
from moegraft.operators.offload.decode_steps import DecodeSteps
from moegraft.operators.offload.devices.base import Device, DeviceError, Neurons, Waiter
from moegraft.operators.offload.devices.cuda import CudaDevice, why_no_cuda
from moegraft.operators.offload.devices.profiles import PROFILES
from moegraft.operators.offload.devices.virtual import VirtualDevice
from moegraft.operators.offload.engine import Engine
from moegraft.operators.offload.executors import (
    CpuPart,
    CudaExecution,
    GpuLayer,
    HostExecution,
    HostMirror,
    HostTokens,
    SlotArena,
    SlotKernels,
)
from moegraft.operators.offload.options import GpuOptions, free_for_slots
from moegraft.operators.offload.queue import Loading, LoadingOptions, open_loading
from moegraft.operators.offload.scheduler import Scheduler, layers_that_fit, make_scheduler
from moegraft.operators.offload.statistics import Observer
from moegraft.operators.offload.store import ExpertStore, SlotPlan
from moegraft.operators.offload.transfers import Urgency
from moegraft.operators.routing import Router
from moegraft.operators.sparse.choice import PathChoices, choices_path
from moegraft.operators.sparsity import LayerSparsity, SparseLayers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from moegraft.operators.sparse.slots import TimedSlotPaths


logger = logging.getLogger(__name__)
EMULATED_PROFILE = "a6000_10core"
QUANTILE_EXPERTS, QUANTILE_TOKENS = 8, 16  # whose activations say which threshold leaves out a share of made up tokens' neurons


@dataclass(slots=True)
class EngineParts:
    """What the layers of one engine share.

    Attributes:
        device: its name.
        packed, routers: of each layer, in the model's order.
        sparsity: what each layer leaves out; None for layers that leave nothing out.
        arena: the slots where they lie in host memory, on emulated devices.
    """

    device: str
    packed: Sequence[PackedExperts]
    routers: Sequence[Router]
    runtime: Runtime
    sparsity: Sequence[LayerSparsity | None]
    arena: SlotArena | None = None
    _slots: torch.Tensor | None = None
    _kernels: Sequence[SlotKernels] = ()
    _paths: TimedSlotPaths | None = None
    _mirror: HostMirror = field(default_factory=HostMirror)

    def use(self, loading: Loading) -> None:
        """Takes the slots that the engine has opened."""
        first = self.packed[0]
        if loading.arena.array is not None:
            self.arena = SlotArena(self.runtime, first, loading.arena.array)
            return
        self._slots = loading.arena.tensor.view(-1, first.expert_bytes)
        self._kernels = [self.kernels_of(sparsity) for sparsity in self.sparsity]

    def kernels_of(self, sparsity: LayerSparsity | None) -> SlotKernels:
        """What computes one layer from slots. A layer that leaves neurons out has its threshold and its counts on the device."""
        # Triton need not be installed where no GPU is
        from moegraft.operators.kernels.slots import SlotExperts
        from moegraft.operators.sparse.slots import SparseSlotExperts

        first = self.packed[0]
        if sparsity is None:
            return SlotExperts(first.shape, first.gate_spec, first.weight_type).forward
        kernels = SparseSlotExperts(first.shape, first.gate_spec, first.weight_type, torch.device(self.device), self._paths)
        sparsity.attach(kernels)
        return kernels.forward

    def time_paths(self, resident: int, top_k: int, choices: PathChoices) -> None:
        """Has the kernels of sparse experts take the path that is fastest, by what is timed now; slots are empty before and after.

        Args:
            resident: experts of a layer that have slots.
        """
        if self._slots is None or self.sparsity[0] is None or resident == 0:
            return
        from moegraft.operators.sparse.slots import SparseSlotExperts, TimedSlotPaths

        first, slots = self.packed[0], self._slots

        def fill() -> torch.Tensor:
            experts = first.buffer.reshape(first.shape.num_experts, -1)
            for expert in range(resident):
                slots[expert].copy_(torch.from_numpy(experts[expert].copy()))
            return slots

        paths = TimedSlotPaths(choices, first.shape.num_experts, resident)
        measured = SparseSlotExperts(first.shape, first.gate_spec, first.weight_type, torch.device(self.device))
        measured.set_threshold(0.0, self.sparsity[0].routed_target)
        paths.time(measured, top_k, fill)
        self._paths = paths
        self._kernels = [self.kernels_of(sparsity) for sparsity in self.sparsity]

    @property
    def slot_memory(self) -> torch.Tensor:
        """(S, expert_bytes) uint8 on a CUDA device."""
        assert self._slots is not None, "a CUDA device has its slots in its own memory"
        return self._slots

    def fetch(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors in host memory."""
        if self.arena is not None:
            return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        return self._mirror.fetch(tensors)

    def host_buffer(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the GPU can be copied from."""
        if self.arena is not None:
            return torch.empty(shape, dtype=dtype)
        return self._mirror.buffer(name, shape, dtype)

    def cuda_execution(
        self, cpu: CpuPart, tokens: HostTokens, hidden_states: torch.Tensor, top_k_weights: torch.Tensor, kernels: SlotKernels
    ) -> CudaExecution:
        """`kernels`: of the layer, `kernels_for`."""
        assert self._slots is not None, "a CUDA device has its slots in its own memory"
        num_experts = self.packed[0].shape.num_experts
        return CudaExecution(cpu, tokens, kernels, self._slots, hidden_states, top_k_weights, num_experts)

    def neurons_of(self, sparsity: LayerSparsity | None) -> Neurons | None:
        """What a token is meant to need of an expert in a call of the calling thread; None: all of it."""
        return None if sparsity is None else Neurons.without(sparsity.target_in_force, gated=self.packed[0].shape.gated)

    def kernels_for(self, layer: int) -> SlotKernels:
        """`SlotExperts.forward` for a layer, leaving out what the calling thread leaves out there."""
        sparsity = self.sparsity[layer]
        return partial(self._kernels[layer], drafting=True) if sparsity is not None and sparsity.drafting else self._kernels[layer]


class WarmUpJobs:
    """Zeros as tokens: what an expert takes does not depend on them. Where neurons are left out it does: then they are random.

    Attributes:
        sparsity: leaves out the share that the model is to leave out, of these tokens; None where the model leaves nothing out.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._packed = parts.packed[0]
        self._random = np.random.default_rng(0)
        of_model = parts.sparsity[0]
        self.sparsity = None if of_model is None else SparseLayers().join(of_model.options)
        self._kernels = None if parts.arena is not None else parts.kernels_of(self.sparsity)
        if self.sparsity is not None and of_model is not None and of_model.routed_target:
            self.sparsity.set_threshold(self._quantile(of_model.routed_target), of_model.routed_target)

    @property
    def neurons(self) -> Neurons | None:
        return self._parts.neurons_of(self.sparsity)

    def _quantile(self, share: float) -> float:
        """The threshold that leaves out that share of the neurons of the tokens made up here."""
        packed = self._packed
        experts = np.arange(min(packed.shape.num_experts, QUANTILE_EXPERTS))
        tokens, cpu = self._tokens(experts, QUANTILE_TOKENS)
        acted = np.empty((*tokens.top_k_index.shape, packed.shape.intermediate), np.float32)
        hidden, out = as_array(tokens.hidden_states), as_array(cpu.out)
        self._parts.runtime.forward(packed, hidden, tokens.top_k_index, tokens.top_k_weights, out, acted=acted)
        return float(np.quantile(np.abs(acted), share))

    def _tokens(self, experts: NDArray[np.int64], load: int) -> tuple[HostTokens, CpuPart]:
        packed, parts = self._packed, self._parts
        dtype = {"float32": torch.float32, "float16": torch.float16}.get(packed.weight_type, torch.bfloat16)
        hidden = torch.zeros(load, packed.shape.hidden, dtype=dtype)
        if self.sparsity is not None:
            hidden = torch.from_numpy(self._random.standard_normal(hidden.shape, np.float32)).to(dtype)
        tokens = HostTokens(hidden, np.tile(experts, (load, 1)), np.ones((load, len(experts)), np.float32))
        return tokens, CpuPart(parts.runtime, packed, tokens, parts.host_buffer("out", hidden.shape, dtype), self.sparsity)

    def on_cpu(self, experts: list[int], load: int) -> Callable[[], Waiter]:
        _, cpu = self._tokens(np.asarray(experts), load)
        return partial(cpu.start, np.asarray(experts))

    def on_gpu(self, slots: list[int], load: int) -> Callable[[], None]:
        experts = np.arange(len(slots))
        tokens, cpu = self._tokens(experts, load)
        return self._execution(cpu, tokens).on_gpu(experts, np.asarray(slots, np.int32))

    def _execution(self, cpu: CpuPart, tokens: HostTokens) -> HostExecution | CudaExecution:
        parts = self._parts
        if parts.arena is not None:
            return HostExecution(cpu, parts.arena, tokens, self._packed.shape.num_experts, self.sparsity)
        device = torch.device(parts.device)
        shares = torch.from_numpy(tokens.top_k_weights).to(device)
        assert self._kernels is not None, "a CUDA device computes by kernels"
        return parts.cuda_execution(cpu, tokens, tokens.hidden_states.to(device), shares, self._kernels)


def open_engine(parts: EngineParts, options: GpuOptions, kv_bytes: int) -> Engine | None:
    """The engine of one device; None where the device cannot hold or compute a single expert, which was said.

    Args:
        kv_bytes: room to leave for the KV cache on that device.
    """
    try:
        device = _open_device(parts.device)
    except DeviceError as error:
        logger.warning("%s cannot be used, all experts run on the CPU: %s", parts.device, error)
        return None
    store = ExpertStore.of_packed(parts.packed)
    free_bytes = free_for_slots(device.torch_device, kv_bytes) if device.torch_device.type == "cuda" else store.nbytes
    plan = slot_plan(options, store, free_bytes)
    policy = make_policy(options.cache, store.layers, store.num_experts, _top_k(parts))
    observer = Observer(device)
    loading = open_loading(
        device,
        store,
        policy.priority,
        LoadingOptions(plan, "bypass" if options.cache.bypasses else "always"),
        on_span=observer.on_span,
        on_transfer=observer.on_transfer,
    )
    if loading is None:
        device.close()
        return None
    parts.use(loading)
    parts.time_paths(min(loading.slots.capacity_of(0), store.num_experts), _top_k(parts), PathChoices(choices_path()))
    costs = CostModel(warm_up(device, loading, WarmUpJobs(parts)))
    engine = Engine(device, loading, _scheduler(options, loading), costs, policy, options.loading_ahead, observer)
    fill(engine)
    return engine


def _top_k(parts: EngineParts) -> int:
    try:
        return parts.routers[0].top_k()
    except UnsupportedModelError:
        return 1  # the cache then learns from fewer scores of each token


def _open_device(name: str) -> Device:
    kind, _, index = name.partition(":")
    if kind == "emulated":
        return VirtualDevice(PROFILES[EMULATED_PROFILE], index=int(index))
    return CudaDevice(int(index or 0))


def slot_plan(options: GpuOptions, store: ExpertStore, free_bytes: int) -> SlotPlan:
    """The slots a rule asks for; `layer_map` has them in whole layers, the last ones."""
    plan = options.cache.plan(store.layers, store.num_experts, store.expert_bytes, free_bytes, captured=options.captures)
    if options.schedule != "layer_map":
        return plan
    whole = layers_that_fit(store.layers, store.num_experts, plan.total)
    return SlotPlan(tuple(store.num_experts * on_gpu for on_gpu in whole), plan.staging)


def _scheduler(options: GpuOptions, loading: Loading) -> Scheduler:
    if options.schedule != "layer_map":
        return make_scheduler(options.schedule)
    slots = loading.slots
    return make_scheduler("layer_map", [slots.capacity_of(layer) >= slots.num_experts for layer in range(slots.layers)])


def fill(engine: Engine) -> None:
    """Loads what the cache would keep, so that the first tokens find full slots: the profile's best, else the first experts."""
    slots, queue = engine.loading.slots, engine.loading.queue
    room = slots.plan.total
    for layer in range(slots.layers):
        count = min(slots.capacity_of(layer), slots.num_experts, room)
        best = np.argsort(-engine.policy.priority(layer), kind="stable")[:count]
        for expert in best.tolist():
            queue.request(layer, expert, Urgency.PROMOTION)
        room -= count if isinstance(slots.plan.capacity, int) else 0
    while not queue.idle:
        engine.device.stream("copy").record().wait()
        engine.device.synchronize()


@dataclass(slots=True)
class Member:
    """One layer: what it holds in host memory, and where its router lives."""

    packed: PackedExperts
    sparsity: LayerSparsity | None
    router: Router
    attach: Callable[[GpuLayer], None]

    @property
    def device(self) -> torch.device:
        """Where the rest of the layer is."""
        return next(self.router.module.parameters()).device

    @property
    def kind(self) -> tuple[int, int, str, bool]:
        """Layers of one kind share slots."""
        return self.packed.shape.num_experts, self.packed.expert_bytes, self.packed.weight_type, self.packed.sparse


@dataclass(slots=True, weakref_slot=True)
class ModelExperts:
    """The layers of one model under one set of GPU options.

    Layers join while the model is built and are `ready` when it is loaded; with the last one the engines open. They close with the
    model: threads, page-locked memory and slots do not outlive it.
    """

    options: GpuOptions
    runtime: Runtime
    cache_form: CacheForm = field(default_factory=CacheForm)
    expected: int = 0
    engines: list[Engine] = field(default_factory=list)
    _members: dict[int, Member] = field(default_factory=dict)
    _layers: list[weakref.ref[GpuLayer]] = field(default_factory=list)

    def __post_init__(self) -> None:
        weakref.finalize(self, _close_all, self.engines)

    def join(self) -> int:
        """The number of a new layer, in the model's order."""
        self.expected += 1
        return self.expected - 1

    def ready(self, number: int, member: Member, config: PretrainedConfig, dtype: torch.dtype) -> None:
        """`config` and `dtype` are the model's."""
        self._members[number] = member
        if len(self._members) == self.expected:
            kv_bytes = kv_cache_bytes(config, self.options.cache.context, dtype, self.cache_form.quantised)
            self._open([self._members[number] for number in sorted(self._members)], kv_bytes)
            self._members.clear()

    def _open(self, members: Sequence[Member], kv_bytes: int) -> None:
        reason = self._why_on_cpu(members)
        if reason is not None:
            logger.warning("all experts run on the CPU (gpu: %s): %s", self.options.gpu, reason)
            return
        for device, together in self._by_device(members).items():
            for layers in _by_kind(together).values():
                packed, routers, sparsity = zip(*((member.packed, member.router, member.sparsity) for member in layers), strict=True)
                parts = EngineParts(device, packed, routers, self.runtime, sparsity)
                engine = open_engine(parts, self.options, kv_bytes * len(layers) // len(members))
                if engine is None:
                    continue
                self.engines.append(engine)
                for index, member in enumerate(layers):
                    layer = GpuLayer(engine, parts, index, member.sparsity)
                    self._layers.append(weakref.ref(layer))  # its module keeps it
                    member.attach(layer)

    @property
    def layers(self) -> Sequence[GpuLayer]:
        """Those that engines compute, in the model's order where there is one engine."""
        return [layer for layer in (each() for each in self._layers) if layer is not None]

    def _why_on_cpu(self, members: Sequence[Member]) -> str | None:
        if self.options.emulated:
            return None
        reason = why_no_cuda()
        if reason is None and any(member.device.type != "cuda" for member in members):
            reason = "the rest of the model is not on a GPU; load it with device_map='cuda:0' or 'auto'"
        return reason

    def _by_device(self, members: Sequence[Member]) -> Mapping[str, Sequence[Member]]:
        """Layers are computed where their routers are; emulated devices share them out evenly, in order."""
        names = [str(member.device) for member in members]
        if self.options.emulated:
            devices = self.options.devices
            names = [devices[number * len(devices) // len(members)] for number in range(len(members))]
        found: dict[str, list[Member]] = {}
        for name, member in zip(names, members, strict=True):
            found.setdefault(name, []).append(member)
        return found

    def statistics(self) -> Mapping[str, object]:
        """By device."""
        return {engine.device.name: engine.report() for engine in self.engines}

    def close(self) -> None:
        _close_all(self.engines)


def _close_all(engines: list[Engine]) -> None:
    while engines:
        engines.pop().close()


def _by_kind(members: Sequence[Member]) -> Mapping[tuple[int, int, str, bool], Sequence[Member]]:
    found: dict[tuple[int, int, str, bool], list[Member]] = {}
    for member in members:
        found.setdefault(member.kind, []).append(member)
    return found


class GpuGroups:
    """One a model, `context.shared(GpuGroups, GpuGroups)`."""

    def __init__(self) -> None:
        self._groups: dict[GpuOptions, ModelExperts] = {}
        self._steps: DecodeSteps | None = None

    def group(self, options: GpuOptions, runtime: Runtime, cache_form: CacheForm) -> ModelExperts:
        """The layers whose rules give them these options."""
        found = self._groups.get(options)
        if found is None:
            found = self._groups[options] = ModelExperts(options, runtime, cache_form)
        return found

    def __iter__(self) -> Iterator[ModelExperts]:
        return iter(self._groups.values())

    @property
    def captures(self) -> bool:
        """Whether a rule lets whole decode steps be captured."""
        return any(options.captures for options in self._groups)

    @property
    def decode_steps(self) -> DecodeSteps:
        """What runs the model's decode steps; asked for when all groups are there."""
        if self._steps is None:
            self._steps = DecodeSteps([*self])
        return self._steps

    def statistics(self) -> Mapping[str, object]:
        """What each device did, by its name."""
        return {name: found for group in self for name, found in group.statistics().items()}

    def close(self) -> None:
        """Ends transfers and frees the slots; the model computes no more."""
        if self._steps is not None:
            self._steps.release()
        for group in self:
            group.close()
