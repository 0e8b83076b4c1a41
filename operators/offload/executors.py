"""How the experts of one call are computed: on the CPU from host memory, and on the device from the slots that hold them.

Shapes: T tokens, E experts, K experts per token, H hidden, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.cpu_backend import PackedExperts, Runtime
from moegraft.operators.cpu import as_array
from moegraft.operators.offload.deferral import DeferredSum, LayerDeferral
from moegraft.operators.offload.devices.base import Buffer, CpuTicket, Event, Waiter
from moegraft.operators.offload.scheduler import Ids
from moegraft.operators.router_maps import RouterMaps
from moegraft.operators.routing import Router, RouterRows
from moegraft.operators.routing_trace import DEPTHS
from moegraft.operators.sparsity import LayerSparsity

Name = TypeVar("Name")
SlotKernel = Callable[..., None]
"""`kernel(hidden_states (T, H), slots (T, K) int32, top_k_weights (T, K) float32, out (T, H) float32)`; a slot of -1 is skipped.

`experts=(T, K)` integers, the layer's expert of each pair, spares kernels from looking at all slots.
"""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a call and their routing, all on one device.

    Attributes:
        hidden_states: (T, H) float32, float16 or bfloat16, contiguous.
        top_k_index: (T, K) int64; ids out of range are padded slots.
        top_k_weights: (T, K) float32.
    """

    hidden_states: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor


class EngineLayers:
    """The layers of one engine, which share its slots: all have experts of one shape and weight type.

    Args:
        device: of the slots' kernels.
        packed, routers: of each layer, in the model's order.
        sparsity: which neurons each layer leaves out; None for layers that leave none out.
        slots: the memory of the slots, one after another.

    Attributes:
        kernels: of each layer, from `device_kernel`.
        look_ahead: predicts what later layers choose.
    """

    def __init__(
        self,
        device: torch.device,
        runtime: Runtime,
        packed: Sequence[PackedExperts],
        routers: Sequence[Router],
        sparsity: Sequence[LayerSparsity | None],
        slots: Buffer,
    ) -> None:
        first = packed[0]
        self.device = device
        self.runtime = runtime
        self.packed = packed
        self.routers = routers
        self.sparsity = sparsity
        self.look_ahead = LookAhead(routers)
        self.num_experts = first.shape.num_experts
        self._pinned: dict[str, torch.Tensor] = {}  # page-locked host tensors, kept between calls: one call at a time
        self._slot_memory = slots.tensor.view(-1, first.expert_bytes)  # (S, expert_bytes) uint8
        self.kernels: Sequence[Any] = [self.device_kernel(each) for each in sparsity]

    def device_kernel(self, sparsity: LayerSparsity | None) -> Any:
        """Return the kernel that computes a layer from slots, for `bound_kernel`; it follows the layer's threshold, and counts for it."""
        # Triton need not be installed where no GPU is
        from moegraft.operators.kernels.slots import SlotExperts
        from moegraft.operators.kernels.sparse_slots import SparseSlotExperts

        first = self.packed[0]
        if sparsity is None:
            return SlotExperts(first.shape, first.gate_spec, first.weight_type)
        kernel = SparseSlotExperts(first.shape, first.gate_spec, first.weight_type, self.device)
        sparsity.attach(kernel)
        return kernel

    def bound_kernel(self, kernel: Any, sparsity: LayerSparsity | None) -> SlotKernel:
        """Return `kernel`, made by `device_kernel` for this sparsity, for a call of the calling thread, which may be drafting."""
        drafting = {"drafting": True} if sparsity is not None and sparsity.drafting else {}

        def compute(
            x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, experts: torch.Tensor | None = None
        ) -> None:
            kernel.forward(x, self._slot_memory, slots, weights, out, experts=experts, **drafting)

        return compute

    def begin_grouped(self, kernel: Any, tokens: Tokens) -> Any:
        """Return the call of a layer's `device_kernel` that computes experts as they arrive; None where there is none."""
        if not hasattr(kernel, "begin"):
            return None
        return kernel.begin(tokens.hidden_states, self._slot_memory, tokens.top_k_index, tokens.top_k_weights)

    def fetch(self, tensors: dict[Name, torch.Tensor]) -> dict[Name, torch.Tensor]:
        """Return the tensors in host memory, fetched with one copy and one wait: the GPU has done all work before them."""
        # Gathered on the device, so that one copy does; wider types first, so that each part begins at a multiple of its type's size.
        order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
        parts = [tensors[name].contiguous().view(-1).view(torch.uint8) for name in order]
        gathered = torch.cat(parts)
        held = self.host_buffer("fetched", gathered.shape, torch.uint8)
        held.copy_(gathered, non_blocking=True)
        torch.cuda.current_stream(gathered.device).synchronize()
        found = (
            part.view(tensors[name].dtype).view(tensors[name].shape)
            for name, part in zip(order, held.split([*map(len, parts)]), strict=True)
        )
        return dict(zip(order, found, strict=True))

    def host_buffer(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory that the GPU can be copied from and to; overwritten by the next call that asks for this name."""
        key = f"{name} {dtype}"
        held = self._pinned.get(key)
        if held is None or held.numel() < shape.numel():
            with torch.inference_mode(False):  # what inference mode makes cannot be written outside of it
                held = self._pinned[key] = torch.empty(shape.numel(), dtype=dtype, pin_memory=self.device.type == "cuda")
        return held[: shape.numel()].view(shape)

    def write_routing(
        self,
        tokens: torch.Tensor,
        scores: torch.Tensor | None,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        slot_of: torch.Tensor,
        row: Mapping[str, torch.Tensor],
    ) -> None:
        """Write the parts of `StepBuffers.row` that a captured layer's host call reads."""
        from moegraft.operators.kernels.routing import route

        route(tokens, scores, top_k_index, top_k_weights, slot_of, row)

    def wait_for(self, launches: Sequence[Event]) -> None:
        """Wait for launches whose results are used next. On CUDA what uses them is queued behind them on the same stream."""


class LookAhead:
    """What later layers would choose on the current hidden states (HybriMoE, section IV-C), without their routers where that is the same.

    Most routers choose the largest products of their rows of weights with a token. The rows of all layers are kept in one block, so that
    one product and one `topk` replace the calls of several routers. Layers whose router chooses otherwise, by corrections or groups, keep
    calling it.
    """

    def __init__(self, routers: Sequence[Router]) -> None:
        self._routers = routers
        self._maps: dict[tuple[int, int], RouterRows] = {}

    @cached_property
    def _top_k(self) -> list[int]:
        """Experts per token of each layer; 0 where its router does not choose by its rows."""
        return [router.chooses_by_rows() for router in self._routers]

    @cached_property
    def _rows(self) -> torch.Tensor | None:
        """The rows of all layers, (L, E, H); None where these have several forms, or biases."""
        found = [router.rows() for router in self._routers]
        plain = [each.weight for each in found if each is not None and each.bias is None and each.choice_bias is None]
        alike = len(plain) == len(found) and len({(each.shape, each.dtype, each.device) for each in plain}) == 1
        return torch.stack(plain) if alike else None

    def use(self, maps: RouterMaps, device: torch.device) -> None:
        """Name experts by fitted maps where there are some, and for routers that choose as maps do."""
        for source, target in combinations(range(len(self._routers)), 2):
            near = target - source <= DEPTHS and self._top_k[target]
            rows = maps.rows(self._routers[source].path, self._routers[target]) if near else None
            if rows is not None:
                self._maps[source, target] = rows.to(device)

    def chosen(self, tokens: torch.Tensor, layers: range, source: int | None = None) -> list[torch.Tensor]:
        """(T, H) -> for each of the layers (T, K) int64, the likeliest expert first.

        Args:
            source: the layer whose router's input the tokens are; None for those of a draft, behind the last layer.
        """
        if source is not None and len(tokens) and all((source, layer) in self._maps for layer in layers):
            return [self._maps[source, layer].choose(tokens, self._top_k[layer]) for layer in layers]
        if len(layers) and len(tokens) and self._rows is not None:
            top_k, *others = {self._top_k[layer] for layer in layers}
            if top_k and not others:
                rows = self._rows[layers.start : layers.stop]
                products = torch.nn.functional.linear(tokens.to(rows.dtype), rows.flatten(0, 1)).view(len(tokens), len(layers), -1)
                return list(products.topk(top_k, dim=-1).indices.unbind(1))
        return [self._routers[layer].route(tokens) for layer in layers]


class CallExecutor:
    """Does the arithmetic of one call of a layer; the engine decides which experts run where, and when.

    Args:
        host, on_device: the call's tokens in host memory, and where the slots are.
        kernel: of the layer, from `EngineLayers.device_kernel`.
        grouped: whether launches may share the work of one call.
        deferral: given where experts of the call may be deferred.
        arrived: what the layer before has deferred; it is waited for, and not added.

    Attributes:
        result: (T, H) float32, the sum once `join` has returned; on a CUDA device it is then queued on the current stream.
    """

    def __init__(
        self,
        layers: EngineLayers,
        packed: PackedExperts,
        sparsity: LayerSparsity | None,
        kernel: Any,
        host: Tokens,
        on_device: Tokens,
        *,
        grouped: bool = True,
        deferral: LayerDeferral | None = None,
        arrived: DeferredSum | None = None,
    ) -> None:
        hidden_states, index = host.hidden_states, host.top_k_index.numpy()
        self.result = torch.empty(hidden_states.shape, dtype=torch.float32, device=on_device.hidden_states.device)
        self._written = False  # whether `result` holds a sum yet, once the launches have run
        self._layers = layers
        self._packed = packed
        self._sparse_arguments = sparse_arguments(sparsity)
        self._kernel = kernel
        self._slot_kernel = layers.bound_kernel(kernel, sparsity)
        self._groups = grouped
        self._deferral = deferral
        self._arrived = arrived
        self._grouped: Any = None  # the call that launches add to, where they do
        self._launches = 0
        self._host = host
        self._on_device = on_device
        self._cpu_out = layers.host_buffer("out", hidden_states.shape, hidden_states.dtype)
        # (T, K): the ids, `num_experts` for padded slots: the last entry of the maps that are made below.
        self._index = np.where((index < 0) | (index >= layers.num_experts), layers.num_experts, index)

    def on_cpu(self, experts: Ids) -> Callable[[], Waiter]:
        """Return a job for `Device.submit_cpu`: these experts from host memory."""
        return partial(self._start_cpu, experts, self._host, self._cpu_out)

    def defer(self, experts: Ids, submit: Callable[[Callable[[], Waiter]], CpuTicket]) -> None:
        """Leave these experts to the next layer: `submit` hands a job to the CPU, which may outlast this call and what it reads."""
        assert self._deferral is not None, "experts of this call may be deferred"
        host = Tokens(self._host.hidden_states.clone(), self._host.top_k_index, self._host.top_k_weights.clone())
        out = torch.empty_like(host.hidden_states)
        self._deferral.put(out, submit(partial(self._start_cpu, experts, host, out)))

    def _start_cpu(self, experts: Ids, host: Tokens, out: torch.Tensor) -> Waiter:
        ids = np.full(self._layers.num_experts + 1, -1, np.int64)
        ids[experts] = experts
        runtime = self._layers.runtime
        arrays = as_array(host.hidden_states), ids[self._index], host.top_k_weights.numpy(), as_array(out)
        return partial(runtime.wait, runtime.submit(self._packed, *arrays, **self._sparse_arguments))

    def on_gpu(self, experts: Ids, slots: NDArray[np.int32]) -> Callable[[], None]:
        """Return a launch for `Device.launch`: these experts from their slots, added to earlier ones; copies are made at once."""
        slot_of = np.full(self._layers.num_experts + 1, -1, np.int32)
        slot_of[experts] = slots
        first, self._written = not self._written, True
        self._launches += 1
        if first and self._groups:
            self._grouped = self._layers.begin_grouped(self._kernel, self._on_device)
        if self._grouped is not None:
            pairs = int((slot_of[self._index] >= 0).sum())
            return partial(self._grouped.add, self._on_the_device(slot_of[:-1]), len(experts), pairs)
        return partial(self._launch, self._on_the_device(slot_of[self._index]), first)

    def _on_the_device(self, slots: NDArray[np.int32]) -> torch.Tensor:
        # Each launch of a call has memory of its own: the copy may be later than the next launch.
        held = self._layers.host_buffer(f"slots {self._launches}", torch.Size(slots.shape), torch.int32)
        held.numpy()[:] = slots
        return held.to(self.result.device, non_blocking=True)

    def _launch(self, slots: torch.Tensor, first: bool) -> None:
        tokens = self._on_device
        part = self.result if first else torch.empty_like(self.result)
        self._slot_kernel(tokens.hidden_states, slots, tokens.top_k_weights, part, experts=tokens.top_k_index)
        if not first:
            self.result += part

    def join(self, cpu: CpuTicket | None, gpu: Sequence[Event]) -> None:
        """Sum what both devices computed, and raise what went wrong there. Without a ticket or an event, that one had no work."""
        if self._arrived is not None:
            self._arrived.wait()  # first, as the CPU computes it first
        self._layers.wait_for(gpu)
        if self._grouped is not None:
            self._grouped.finish(self.result)
            self._grouped = None
        if cpu is not None:
            cpu.wait()
            if self._written:
                self.result += self._cpu_out.to(self.result.device, non_blocking=True)
            else:
                self.result.copy_(self._cpu_out, non_blocking=True)
        elif not self._written:
            self.result.zero_()
        self._written = True

    def restart(self) -> None:
        """Discard the results so far: all experts are computed again, on the CPU."""
        self._grouped = None
        self._written = False
        if self._deferral is not None:
            self._deferral.drop()


def sparse_arguments(sparsity: LayerSparsity | None) -> dict[str, Any]:
    """Return the CPU kernel's arguments for what a call of the calling thread leaves out."""
    if sparsity is None:
        return {}
    now = sparsity.in_force()
    return {"threshold": now.threshold, "neuron_counts": now.counts}
