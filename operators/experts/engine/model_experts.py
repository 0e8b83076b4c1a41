"""The experts of one model whose rules give them a GPU: gathered while the model loads, then opened, one engine for each GPU."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from moegraft.cpu_backend import PackedExperts, Runtime
from moegraft.operators.cache_form import CacheForm
from moegraft.operators.experts.devices.cuda import why_no_cuda
from moegraft.operators.experts.engine.assembly import EngineParts, open_engine
from moegraft.operators.experts.engine.gpu_layer import GpuLayer
from moegraft.operators.experts.engine.options import GpuOptions
from moegraft.operators.experts.engine.room import kv_cache_bytes
from moegraft.operators.experts.routing import Router
from moegraft.operators.sparse.layer import LayerSparsity

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from moegraft.operators.experts.engine.engine import Engine

logger = logging.getLogger(__name__)


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
