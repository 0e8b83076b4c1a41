"""One decode step of a model, captured and replayed for every token. Of all GPUs, only an NVIDIA H100 has run this yet.

Within a step no decision is made and nothing is waited for: all layers read one routing and one slot table, which changes between steps
alone. Resident experts are computed from their slots, the others by the CPU, in a host function that the GPU calls on a branch of its own
while it computes the resident ones. Experts that are added to the next layer (`deferral.py`) have a second one, which the branch does not
return from before that layer's. A layer with a slot for each of its experts, all of them resident when the step is captured, keeps them:
nothing is evicted but for lack of slots. It has no branch. The engine learns from a step while the next one runs, and loads experts that
the CPU had to compute.

Shapes: L layers, T tokens (fixed), E experts, K experts per token, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.operators.cpu import as_array, rounded
from moegraft.operators.offload.deferral import LayerDeferral
from moegraft.operators.offload.devices.base import ALIGNMENT, Device, DeviceError, Graph
from moegraft.operators.offload.engine import Engine
from moegraft.operators.offload.executors import EngineLayers
from moegraft.operators.offload.transfers import Urgency

HOST_STREAM = "experts on the host"
MAX_REQUESTS = 16  # experts requested in a step at most: between two steps the host handles each, and evicts another
LEAST_REQUESTS = 4  # so that the link never waits for the next step


@dataclass(frozen=True, slots=True)
class CallShape:
    """The shape of a call of a layer's experts: (T, H) hidden states of `dtype`, (T, K) choices.

    Attributes:
        routing: the dtypes of the choices, their weights and the scores; None for scores where no router was seen. Layers may differ.
    """

    tokens: int
    top_k: int
    dtype: torch.dtype
    routing: tuple[torch.dtype, torch.dtype, torch.dtype | None] = field(default=(torch.int64, torch.float32, torch.float32), compare=False)


class StepBuffers:
    """Memory at fixed addresses that a captured step reads and writes.

    What the host reads of a layer is gathered in the layer's row of bytes on the device, and copied in one go to its row in host memory.
    A row holds `tokens` (T, H), `scores` (T, E) float32, `weights` (T, K) float32, and, with -1 for padded slots, `chosen` (T, K) int64,
    `ids` (T, K) int64 of the experts without a slot, `later` (T, K) int64 of those that are deferred instead, and `slots` (T, K) int32.

    Attributes:
        table: (L, E) int32 on the device, the slot table of a step.
        rows: the parts of all rows in host memory, (L, T, ...).
        routed: `chosen`, `slots`, `scores` and `later` of `rows`.
        out: (2, T, H), the CPU's part of a layer, and what is deferred to the next one, in host memory.
        returned: (2, T, H) on the device, where `out` is copied.
        scored: (L,), the layers that have scores: those whose routers were seen.

    Steps may be captured in inference mode and replayed outside of it, where what inference mode makes cannot be written.
    """

    @torch.inference_mode(False)
    def __init__(self, device: Device, layers: int, num_experts: int, hidden: int, call: CallShape) -> None:
        on_device, pinned = device.torch_device, device.torch_device.type == "cuda"
        tokens, choices = (call.tokens, hidden), (call.tokens, call.top_k)
        parts = {
            "tokens": (tokens, call.dtype),
            "scores": ((call.tokens, num_experts), torch.float32),
            "weights": (choices, torch.float32),
            "chosen": (choices, torch.int64),
            "ids": (choices, torch.int64),
            "later": (choices, torch.int64),
            "slots": (choices, torch.int32),
        }
        starts, row_bytes = {}, 0
        for name, (shape, dtype) in parts.items():
            starts[name] = row_bytes
            row_bytes += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self._host_table = torch.full((layers, num_experts), -1, dtype=torch.int32, pin_memory=pinned)
        self._host_slots = self._host_table.numpy()
        self._version = -1
        self._device_rows = torch.zeros(layers, row_bytes, dtype=torch.uint8, device=on_device)
        self._rows = torch.zeros(layers, row_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.table = self._host_table.to(on_device, copy=True)
        self._device_parts: dict[str, torch.Tensor] = {}
        self.rows: dict[str, torch.Tensor] = {}
        for name, (shape, dtype) in parts.items():
            part = slice(starts[name], starts[name] + math.prod(shape) * dtype.itemsize)
            self._device_parts[name] = self._device_rows[:, part].view(dtype).view(layers, *shape)
            self.rows[name] = self._rows[:, part].view(dtype).view(layers, *shape)
        self.rows["chosen"].fill_(-1)
        self.rows["ids"].fill_(-1)
        self.rows["later"].fill_(-1)
        self.routed = tuple(self.rows[name].numpy() for name in ("chosen", "slots", "scores", "later"))
        self.out = torch.zeros(2, *tokens, dtype=call.dtype, pin_memory=pinned)
        self.returned = torch.zeros(2, *tokens, dtype=call.dtype, device=on_device)
        self.scored = np.zeros(layers, bool)

    def set_table(self, table: NDArray[np.int32], version: int) -> None:
        """Queue the copy of a new slot table for the next step; the last step is done."""
        if version != self._version:
            self._host_slots[:] = table
            self.table.copy_(self._host_table, non_blocking=True)
            self._version = version

    def row(self, layer: int) -> dict[str, torch.Tensor]:
        """Return the parts of a layer's row on the device."""
        return {name: part[layer] for name, part in self._device_parts.items()}

    def to_host(self, layer: int | slice) -> None:
        """Copy a layer's row, or those of several, to host memory."""
        self._rows[layer].copy_(self._device_rows[layer], non_blocking=True)


class CapturedLayer:
    """One layer of a captured step; must live as long as the graph, which holds the addresses of its host calls.

    Args:
        deferral: of the layer, where it may defer experts of the step.
        receives: whether the layer before may.
        resident: whether all of the layer's experts stay in their slots, so that the CPU has no part in it.

    Attributes:
        form: layers of one form launch the same kernels.
    """

    def __init__(
        self,
        device: Device,
        layers: EngineLayers,
        index: int,
        buffers: StepBuffers,
        deferral: LayerDeferral | None,
        *,
        receives: bool,
        resident: bool,
    ) -> None:
        assert deferral is None or not resident, "the CPU computes what is deferred"
        self._device = device
        self._layers = layers
        self._index = index
        self._buffers = buffers
        self._deferral = deferral
        self._receives = receives
        self._resident = resident
        self.form = deferral is not None, receives, resident
        self._row = buffers.row(index)
        self._function, make = layers.runtime.host_function()
        tokens, weights = (buffers.rows[name][index] for name in ("tokens", "weights"))
        computed = () if resident else ("ids",) if deferral is None else ("ids", "later")
        self._calls = [
            make(layers.packed[index], as_array(tokens), buffers.rows[ids][index].numpy(), weights.numpy(), as_array(out))
            for ids, out in zip(computed, buffers.out, strict=False)
        ]

    def check(self) -> None:
        """Raise what the CPU's part of the last step raised, once."""
        for call in self._calls:
            call.check()

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        scores: torch.Tensor | None,
        overlap: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """(T, H), (T, K), (T, K), (T, E) or None -> (T, H); hands work over and waits for nothing. `overlap`: see `Engine.run`."""
        buffers, device, layers = self._buffers, self._device, self._layers
        compute, host = device.stream("compute"), device.stream(HOST_STREAM)
        tokens = rounded(hidden_states.detach()).contiguous()
        index, weights = top_k_index.detach().contiguous(), top_k_weights.detach().contiguous()
        scores = None if scores is None else scores.contiguous()
        buffers.scored[self._index] = scores is not None
        row = self._row
        layers.write_routing(tokens, scores, index, weights, buffers.table[self._index], row)
        if self._deferral is not None:
            self._deferral.divide(row["ids"], row["later"], index, weights)

        def return_cpu_part() -> None:
            parts = slice(int(self._resident), 1 + self._receives)
            buffers.returned[parts].copy_(buffers.out[parts], non_blocking=True)

        branches = not self._resident or self._receives
        if branches:
            device.order(compute, host)
        for own in self._calls[:1]:
            device.launch(host, partial(buffers.to_host, self._index))
            device.launch_host(host, self._function, own.address)
        if branches:
            device.launch(host, return_cpu_part)
        resident = torch.empty(tokens.shape, dtype=torch.float32 if branches else tokens.dtype, device=tokens.device)
        kernel = layers.bound_kernel(layers.kernels[self._index], layers.sparsity[self._index])
        device.launch(compute, partial(kernel, tokens, row["slots"], row["weights"], resident, experts=index))
        if overlap is not None:
            overlap()
        if branches:
            device.order(host, compute)
        for later in self._calls[1:]:
            device.launch_host(host, self._function, later.address)
        if self._receives:
            resident += buffers.returned[1]
        if self._resident:
            return resident.to(hidden_states.dtype)
        return torch.add(resident, buffers.returned[0], out=torch.empty_like(hidden_states))


@dataclass(frozen=True, slots=True)
class _Routed:
    """Copies of what the layers of a step chose; see `StepBuffers`. Experts `on_cpu`, (L, T, K), had no slot; `later` are deferred ones."""

    chosen: NDArray[np.int64]
    on_cpu: NDArray[np.bool_]
    later: NDArray[np.int64]
    scores: NDArray[np.float32]
    scored: NDArray[np.bool_]


class StepGraph:
    """The captured decode step of one engine's model.

    Args:
        calls: the last call of each layer, layer by layer; None where there was none.
        deferrals: of each layer, in the model's order; None where no layer defers experts.

    Attributes:
        layers: what computes each layer's experts while the step is captured.

    Raises:
        DeviceError: the layers' calls differ in shape.
    """

    def __init__(
        self,
        engine: Engine,
        layers: EngineLayers,
        calls: Sequence[CallShape | None],
        deferrals: Sequence[LayerDeferral | None] | None = None,
    ) -> None:
        call = calls[0]
        if call is None or set(calls) != {call}:
            raise DeviceError("the calls of this model's layers differ in shape")
        self._engine = engine
        self._layers = layers
        self._call = call
        self._routings = {each.routing for each in calls if each is not None}
        self._slots, self._queue = engine.cache.slots, engine.cache.queue
        self._compute = engine.device.stream("compute")
        engine.device.stream(HOST_STREAM)  # must exist before anything is captured
        count, self._hidden = len(layers.packed), layers.packed[0].shape.hidden
        self._buffers = StepBuffers(engine.device, count, layers.num_experts, self._hidden, call)
        with self._slots.lock:
            whole = np.array([self._slots.capacity_of(layer) >= layers.num_experts for layer in range(count)])
            self._resident = whole & (self._slots.table >= 0).all(axis=1)
            self._checked, self._kept = self._slots.version, True
        deferring = [
            each if each is not None and each.defers(call.tokens) and not resident else None
            for each, resident in zip(deferrals or [None] * count, self._resident.tolist(), strict=True)
        ]
        self._deferring = np.array([each is not None for each in deferring])[:, None, None]
        receives = [False, *(each is not None for each in deferring)]
        self.layers: Sequence[CapturedLayer] = [
            CapturedLayer(
                engine.device,
                layers,
                index,
                self._buffers,
                deferring[index],
                receives=receives[index],
                resident=bool(self._resident[index]),
            )
            for index in range(count)
        ]
        self._graph: Graph | None = None
        self._last: _Routed | None = None  # of the last step, which nothing was learnt from yet
        self._start_ms: float | None = None  # of the last step
        self._requests = MAX_REQUESTS  # in a step, by what the link transfers from one to the next

    @property
    def valid(self) -> bool:
        """Whether the layers without a branch still have all of their experts in slots; if not, the step must be captured again."""
        with self._slots.lock:
            if self._checked != self._slots.version:
                self._kept = bool((self._slots.table[self._resident] >= 0).all())
                self._checked = self._slots.version
            return self._kept

    def capture(self, step: Callable[[], None]) -> None:
        """Capture `step`, which calls `layers`; nothing of it is executed.

        Raises:
            DeviceError: it cannot be captured.
        """
        with self._engine.exclusive():
            with self._engine.device.errors():
                self._warm_up()
                self._engine.device.synchronize()  # a capture that fails frees what the launches use
            self._graph = self._engine.device.capture(partial(self._whole, step))

    def _whole(self, step: Callable[[], None]) -> None:
        step()
        if self._resident.any():  # layers with a branch have copied theirs, which are the same still
            self._engine.device.launch(self._compute, partial(self._buffers.to_host, slice(None)))

    def _warm_up(self) -> None:
        """Launch once what every layer launches: the first launch compiles a kernel and loads it, which drivers may refuse in a capture."""
        call, buffers = self._call, self._buffers
        on_device, num_experts = buffers.table.device, buffers.table.shape[1]
        for index_dtype, weights_dtype, scores_dtype in self._routings:
            tokens = torch.zeros(call.tokens, self._hidden, dtype=call.dtype, device=on_device)
            absent = torch.full((call.tokens, call.top_k), -1, dtype=index_dtype, device=on_device)
            weights = torch.zeros(absent.shape, dtype=weights_dtype, device=on_device)
            scores = None
            if scores_dtype is not None:
                scores = torch.zeros(call.tokens, num_experts, dtype=scores_dtype, device=on_device)
            for layer in {each.form: each for each in self.layers}.values():
                layer.forward(tokens, absent, weights, scores)

    def replay(self) -> None:
        """Execute one step on what its tensors hold now; it is done when this returns.

        Raises:
            DeviceError: the device failed, or the step is not `valid`.
            RuntimeError, ValueError: the CPU's part failed. The results are wrong then, and the next step is like any other.
        """
        assert self._graph is not None, "replay after capture"
        engine, buffers = self._engine, self._buffers
        with engine.exclusive():
            self._slots.freeze()
            done = None
            try:
                with self._slots.lock:
                    if not self.valid:
                        raise DeviceError(f"{engine.device.name}: experts left the slots that a captured step relies on; capture it again")
                    buffers.set_table(self._slots.table, self._slots.version)
                start_ms = engine.device.now_ms()
                self._pace(start_ms)
                # The GPU calls the host once a layer with a branch, sooner than sleeping threads wake.
                with nullcontext() if self._resident.all() else self._layers.runtime.keep_awake():
                    self._graph.replay()
                    done = self._compute.record()
                    self._learn()
                    done.wait()
                engine.timings.replayed(start_ms)
            except DeviceError:
                engine.settle()
                raise
            finally:
                self._slots.thaw(done)
            for layer in self.layers:
                layer.check()
            chosen, slots, scores, later = buffers.routed
            later = np.where(self._deferring, later, -1)
            self._last = _Routed(chosen.copy(), (slots < 0) & (chosen >= 0), later, scores.copy(), buffers.scored.copy())

    def release(self) -> None:
        """Give the graph's memory back; no step comes after this."""
        if self._graph is not None:
            self._graph.release()
            self._graph = None

    def _pace(self, start_ms: float) -> None:
        """Limit requests to what the link transfers until the next step; what is requested and does not come costs the host time."""
        last_ms, self._start_ms = self._start_ms, start_ms
        transfer_ms = self._engine.costs.transfer_ms(self._queue.store.expert_bytes)
        if last_ms is not None and transfer_ms > 0:
            self._requests = max(LEAST_REQUESTS, min(MAX_REQUESTS, 1 + int((start_ms - last_ms) / transfer_ms)))

    def _learn(self) -> None:
        routed, self._last = self._last, None
        if routed is None:
            return
        engine = self._engine
        layers = np.flatnonzero(routed.scored)
        engine.policy.update(layers.tolist(), routed.scores[layers], routed.chosen[layers])
        missed = self._marked(np.where(routed.on_cpu, routed.chosen, -1))
        engine.statistics.count_layers(self._marked(routed.chosen).sum(axis=1), missed.sum(axis=1))
        engine.statistics.deferred += int(self._marked(routed.later).sum())
        engine.statistics.replayed += 1
        if engine.prefetcher.options.promote and engine.loads:
            self._promote(missed)

    def _marked(self, chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(L, E), the experts of each layer that are among (L, T, K), -1 for padded slots."""
        layers, num_experts = self._slots.layers, self._slots.num_experts
        marked = np.zeros((layers, num_experts + 1), np.bool_)  # the last column is that of -1
        marked[np.arange(layers)[:, None], chosen.reshape(layers, -1)] = True
        return marked[:, :-1]

    def _promote(self, missed: NDArray[np.bool_]) -> None:
        """Request experts (L, E) that the CPU served and the cache ranks above those they would evict, the widest gap first."""
        slots = self._slots
        ranks = self._engine.policy.priorities()
        resident = slots.table >= 0
        full = np.array([slots.full(layer) for layer in range(slots.layers)])
        lowest = np.where(resident, ranks, np.inf).min(axis=1)
        lowest[~full | ~resident.any(axis=1)] = -np.inf
        layers, experts = np.nonzero(missed & (ranks > lowest[:, None]))
        best = np.argsort(lowest[layers] - ranks[layers, experts], kind="stable")[: self._requests]
        wanted = list(zip(layers[best].tolist(), experts[best].tolist(), strict=True))
        self._queue.replan(set(wanted))
        self._queue.prefetch(wanted, Urgency.PROMOTION)
