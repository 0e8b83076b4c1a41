"""One layer's forward pass through its engine: what the host must know is fetched once, then both devices get their part.

A call of one layer's experts whose tokens lie in host memory: the CPU's part everywhere, and the GPU's on emulated devices.

On an emulated device slots are host memory, and the CPU kernel computes out of them by the number of the slot: an expert that is not
there, not yet there or not there any more gives wrong numbers.

A call of one layer's experts whose tokens lie in GPU memory: no GPU has run this yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moegraft.cpu_backend import ExpertsShape, PackedExperts, Runtime
from moegraft.operators.cpu import as_array, rounded
from moegraft.operators.draft import DraftSettings
from moegraft.operators.offload.captured import CallShape, CapturedLayer
from moegraft.operators.offload.devices.base import Bytes, CpuTicket, Event, Waiter
from moegraft.operators.offload.drafts import ResidentDraft
from moegraft.operators.offload.shared_overlap import Compute, Once, SharedOverlap
from moegraft.operators.offload.step import DraftStep, LayerStep, Prediction
from moegraft.operators.routing import Router, Scoring
from moegraft.operators.sparsity import LayerSparsity

if TYPE_CHECKING:
    from moegraft.operators.offload.engine import Engine
    from moegraft.operators.offload.model_experts import EngineParts


Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HostTokens:
    """The tokens of a call and their routing, in host memory.

    Attributes:
        hidden_states: (T, H) float32, float16 or bfloat16, contiguous.
        top_k_index: (T, K) int64; ids out of range are padded slots.
        top_k_weights: (T, K) float32.
    """

    hidden_states: torch.Tensor
    top_k_index: Ids
    top_k_weights: NDArray[np.float32]

    def places(self, num_experts: int) -> Ids:
        """(T, K): the ids, with `num_experts` for padded slots."""
        index = self.top_k_index
        return np.where((index < 0) | (index >= num_experts), num_experts, index)


class CpuPart:
    """The experts of a call that the CPU computes.

    Args:
        out: (T, H), where they are summed; of the dtype of the hidden states.
    """

    def __init__(
        self, runtime: Runtime, packed: PackedExperts, tokens: HostTokens, out: torch.Tensor, sparsity: LayerSparsity | None = None
    ) -> None:
        self.out = out
        self._runtime = runtime
        self._packed = packed
        self._tokens = tokens
        self._options = sparse_arguments(sparsity)
        self._places = tokens.places(packed.shape.num_experts)

    def start(self, experts: Ids) -> Waiter:
        """Submits them; what it returns blocks until they are summed in `out`."""
        ids = np.full(self._packed.shape.num_experts + 1, -1, np.int64)
        ids[experts] = experts
        tokens = self._tokens
        ticket = self._runtime.submit(
            self._packed,
            as_array(tokens.hidden_states),
            ids[self._places],
            tokens.top_k_weights,
            as_array(self.out),
            **self._options,
        )
        return partial(self._runtime.wait, ticket)


def sparse_arguments(sparsity: LayerSparsity | None) -> dict[str, Any]:
    """What the kernel is told of a layer's sparsity."""
    if sparsity is None:
        return {}
    now = sparsity.in_force()
    return {"threshold": now.threshold, "neuron_counts": now.counts}


class SlotArena:
    """The slots of an emulated device, computed by the CPU kernel."""

    def __init__(self, runtime: Runtime, packed: PackedExperts, array: Bytes) -> None:
        shape = packed.shape
        slots = array.nbytes // packed.expert_bytes
        self.runtime = runtime
        self.experts = PackedExperts(
            ExpertsShape(slots, shape.hidden, shape.intermediate, gated=shape.gated, bias=shape.bias),
            packed.gate_spec,
            packed.weight_type,
            _read_only(array),
            sparse=packed.sparse,
        )


def _read_only(array: Bytes) -> Bytes:
    """What is packed elsewhere counts as whole."""
    view = array.view()
    view.flags.writeable = False
    return view


class HostExecution:
    """One call on an emulated device; `result` (T, H) float32 holds the sum when `join` has returned."""

    def __init__(self, cpu: CpuPart, arena: SlotArena, tokens: HostTokens, num_experts: int, sparsity: LayerSparsity | None = None) -> None:
        self.result = torch.zeros_like(tokens.hidden_states, dtype=torch.float32)
        self._cpu = cpu
        self._arena = arena
        self._tokens = tokens
        self._options = sparse_arguments(sparsity)
        self._num_experts = num_experts
        self._places = tokens.places(num_experts)

    def on_cpu(self, experts: Ids) -> Callable[[], Waiter | None]:
        return partial(self._cpu.start, experts)

    def on_gpu(self, experts: Ids, slots: NDArray[np.int32]) -> Callable[[], None]:
        slot_of = np.full(self._num_experts + 1, -1, np.int64)
        slot_of[experts] = slots
        return partial(self._launch, slot_of[self._places])

    def _launch(self, ids: Ids) -> None:
        tokens = self._tokens
        part = torch.empty_like(tokens.hidden_states)
        self._arena.runtime.forward(
            self._arena.experts, as_array(tokens.hidden_states), ids, tokens.top_k_weights, as_array(part), **self._options
        )
        self.result += part

    def join(self, cpu: CpuTicket | None, gpu: Sequence[Event]) -> None:
        for event in gpu:
            event.wait()
        if cpu is not None:
            cpu.wait()
            self.result += self._cpu.out

    def restart(self) -> None:
        self.result.zero_()


LEARN_TOKENS = 512  # of a prompt: the cache's averages have forgotten what came before
PREDICT_TOKENS = 256  # of a prompt: as many say what all will need


class RouterWatch:
    """Keeps what a layer's router last saw and said, for the experts that are called next."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._last: tuple[torch.Tensor, Any] | None = None
        watch = ref(self)

        def routed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            alive = watch()
            if alive is not None:
                alive._last = (args[0] if args else next(iter(kwargs.values()))), output

        router.module.register_forward_hook(routed, with_kwargs=True)

    def note(self, hidden_states: torch.Tensor, output: Any) -> None:
        """A call that hooks have not told yet."""
        self._last = hidden_states, output

    def scoring(self) -> Scoring | None:
        """What the router said of all experts in the call since the last `take`, if there was one."""
        return None if self._last is None else self._router.scoring(self._last[1])

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The router's input (T, H) and its scores (T, E) of the call since the last `take`, if there was one."""
        last, self._last = self._last, None
        if last is None:
            return None
        hidden_states, output = last
        return hidden_states.detach().reshape(-1, hidden_states.shape[-1]), self._router.scores(output)


@dataclass(frozen=True, slots=True)
class DraftRouting:
    """What a router said before a draft narrowed it: (T, K) int64."""

    settings: DraftSettings
    top_k_index: torch.Tensor

    def step(self, chosen: NDArray[np.int64]) -> DraftStep:
        settings = self.settings
        return DraftStep(chosen, settings.top_k, settings.resident, settings.verify_prefetch)


class GpuLayer:
    """A layer whose experts run on the CPU and a GPU.

    Args:
        index: of the layer within its engine.

    Attributes:
        captured: while a decode step is captured, by which thread and what the layer hands over there.
        last_call: what the layer was last called with.
        beside: the shared experts of its block, where it has some.
    """

    def __init__(self, engine: Engine, parts: EngineParts, index: int, sparsity: LayerSparsity | None) -> None:
        self.engine = engine
        self._parts = parts
        self._index = index
        self._sparsity = sparsity
        self._packed = parts.packed[index]
        self._watch = RouterWatch(parts.routers[index])
        self._resident_draft = ResidentDraft(parts.routers[index])
        self.captured: tuple[int, CapturedLayer] | None = None
        self.last_call: CallShape | None = None
        self.beside: SharedOverlap | None = None

    @property
    def resident(self) -> NDArray[np.bool_]:
        """(E,): experts with a slot now."""
        return np.asarray(self.engine.loading.slots.slot_of(self._index) >= 0)

    @property
    def parts(self) -> EngineParts:
        return self._parts

    @property
    def sparse(self) -> bool:
        """Whether neurons are left out."""
        return self._sparsity is not None

    def describe(self) -> str:
        """For people: `24 of 128 in slots of cuda:0, two_threshold`."""
        slots = self.engine.loading.slots
        capacity = min(slots.capacity_of(self._index), slots.num_experts)
        return f"{capacity} of {slots.num_experts} in slots of {self.engine.device.name}, {self.engine.scheduler.name}"

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, draft: DraftRouting | None = None
    ) -> torch.Tensor:
        """(T, H), (T, K) int64, (T, K) -> (T, H) in the dtype and on the device of `hidden_states`."""
        captured = self.captured
        if captured is not None and captured[0] == threading.get_ident():
            seen = self._watch.take()
            noted = None if seen is None else seen[1]
            return captured[1].forward(hidden_states, top_k_index, top_k_weights, noted, self._between(hidden_states))
        if self._sparsity is not None:
            self._sparsity.begin(len(hidden_states))
        tokens = rounded(hidden_states.detach()).contiguous()
        self.last_call = CallShape(len(tokens), top_k_index.shape[1], tokens.dtype)
        seen = self._watch.take()
        device = {"index": top_k_index.detach().long(), "weights": top_k_weights.detach().float(), "tokens": tokens}
        ahead: list[tuple[int, torch.Tensor]] = []
        if seen is not None and seen[1].shape[0] == top_k_index.shape[0]:
            device["scores"] = seen[1][-LEARN_TOKENS:]
            ahead = self._predict(seen[0])
        device |= {f"ahead {layer}": chosen for layer, chosen in ahead}
        if draft is not None:
            device["whole"] = draft.top_k_index.detach().long()
        host = self._parts.fetch(device)
        chosen = host["index"].numpy()
        predictions = [Prediction.of(layer, _real(host[f"ahead {layer}"].numpy(), self._packed)) for layer, _ in ahead]
        scores = host["scores"].numpy() if "scores" in host else None
        drafted = None if draft is None else draft.step(_real(host["whole"].numpy(), self._packed))
        step = LayerStep.of(self._index, _real(chosen, self._packed), scores, predictions, drafted, self._parts.neurons_of(self._sparsity))
        execution = self._execution(host, device)
        between = self._between(hidden_states)
        self.engine.run(step, execution, between)
        if between is not None:
            between()  # a device that failed has not come to it
        result: torch.Tensor = execution.result
        return result.to(hidden_states.dtype)

    def narrow(
        self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, settings: DraftSettings, say_once: Callable[[str], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The routing, (T, K) and (T, K), of a draft by experts that have a slot."""
        scoring = None if settings.chosen_only else self._watch.scoring()
        return self._resident_draft.narrow(top_k_index, top_k_weights, scoring, self.resident, settings, say_once)

    def _between(self, hidden_states: torch.Tensor) -> Once | None:
        return None if self.beside is None else self.beside.start(hidden_states)

    def share(self, shared: nn.Module, compute: Compute) -> None:
        """Takes the shared experts of the block along; `compute` is what the block calls for the routed ones."""
        router = self._parts.routers[self._index].module
        if "forward" not in vars(router):  # else somebody has replaced it
            self.beside = SharedOverlap(shared, router, compute, self._watch.note)

    def _predict(self, router_input: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """What the next layers would choose on the hidden states at hand: (layer, (T', K) int64)."""
        last = self._index + self.engine.prefetcher.options.depth
        routers: Sequence[Router] = self._parts.routers
        later = range(self._index + 1, min(last + 1, len(routers)))
        tokens = router_input[-PREDICT_TOKENS:]
        return [(layer, routers[layer].route(tokens).top_k_index) for layer in later]

    def _execution(self, host: dict[str, torch.Tensor], device: dict[str, torch.Tensor]) -> Any:
        tokens = HostTokens(host["tokens"], host["index"].numpy(), host["weights"].numpy())
        out = self._parts.host_buffer("out", tokens.hidden_states.shape, tokens.hidden_states.dtype)
        cpu = CpuPart(self._parts.runtime, self._packed, tokens, out, self._sparsity)
        if self._parts.arena is not None:
            return HostExecution(cpu, self._parts.arena, tokens, self._packed.shape.num_experts, self._sparsity)
        return self._parts.cuda_execution(cpu, tokens, device["tokens"], device["weights"], self._parts.kernels_for(self._index))


def _real(chosen: NDArray[np.int64], packed: Any) -> NDArray[np.int64]:
    """(T, K) with -1 for every padded slot."""
    return np.where((chosen < 0) | (chosen >= packed.shape.num_experts), -1, chosen)


SlotKernels = Callable[..., None]  # `SlotExperts.forward`, or that of `SparseSlotExperts`


class HostMirror:
    """Page-locked host copies of a call's tensors, all fetched with one wait. Kept between calls: one call at a time."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A page-locked host tensor, grown as needed; what it held before is lost."""
        key = f"{name} {dtype}"
        held = self._buffers.get(key)
        if held is None or held.numel() < shape.numel():
            held = self._buffers[key] = torch.empty(shape.numel(), dtype=dtype, pin_memory=True)
        return held[: shape.numel()].view(shape)

    def fetch(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same tensors in host memory; the GPU has done all work before them when this returns."""
        fetched = {name: self.buffer(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            fetched[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values()}:
            torch.cuda.current_stream(device).synchronize()
        return fetched


class CudaExecution:
    """One call on a CUDA device, on its current stream; `result` (T, H) float32 is queued there when `join` has returned.

    Args:
        cpu: computes from `tokens`, host copies of what follows.
        arena: (S, expert_bytes) uint8 on the device.
        hidden_states: (T, H) on the device; `top_k_weights`: (T, K) there.
    """

    def __init__(
        self,
        cpu: CpuPart,
        tokens: HostTokens,
        kernels: SlotKernels,
        arena: torch.Tensor,
        hidden_states: torch.Tensor,
        top_k_weights: torch.Tensor,
        num_experts: int,
    ) -> None:
        self.result = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
        self._cpu = cpu
        self._kernels = kernels
        self._arena = arena
        self._hidden_states = hidden_states
        self._top_k_weights = top_k_weights
        self._num_experts = num_experts
        self._places = tokens.places(num_experts)

    def on_cpu(self, experts: Ids) -> Callable[[], Waiter | None]:
        return partial(self._cpu.start, experts)

    def on_gpu(self, experts: Ids, slots: NDArray[np.int32]) -> Callable[[], None]:
        slot_of = np.full(self._num_experts + 1, -1, np.int32)
        slot_of[experts] = slots
        return partial(self._launch, torch.from_numpy(slot_of[self._places]))

    def _launch(self, slots: torch.Tensor) -> None:
        part = torch.empty_like(self.result)
        on_device = slots.to(self.result.device, non_blocking=True)
        self._kernels(self._hidden_states, self._arena, on_device, self._top_k_weights, part)
        self.result += part

    def join(self, cpu: CpuTicket | None, gpu: Sequence[Event]) -> None:
        if cpu is not None:
            cpu.wait()
            self.result += self._cpu.out.to(self.result.device, non_blocking=True)

    def restart(self) -> None:
        self.result.zero_()
