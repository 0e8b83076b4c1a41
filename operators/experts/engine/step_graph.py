"""One decode step of a model, captured: replayed for every token, while the slot table changes between steps alone.

What a step chose is learnt while the next one runs, and experts that the CPU had to serve are brought up for later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from moegraft.operators.experts.devices.interface import DeviceError, Graph
from moegraft.operators.experts.engine.captured_layer import HOST_STREAM, CallShape, CapturedLayer, Routed, StepBuffers
from moegraft.operators.experts.transfer.transfers import Urgency

if TYPE_CHECKING:
    from moegraft.operators.experts.engine.assembly import EngineParts
    from moegraft.operators.experts.engine.engine import Engine

MOST_BROUGHT = 32  # experts asked for in a step; more than a link brings in its time, except for the smallest


class StepGraph:
    """The step of one engine's model.

    Args:
        call: what every layer is called with.

    Attributes:
        layers: what computes each layer's experts while the step is captured.
    """

    def __init__(self, engine: Engine, parts: EngineParts, call: CallShape) -> None:
        self._engine = engine
        self._slots, self._queue = engine.loading.slots, engine.loading.queue
        self._compute = engine.device.stream("compute")
        engine.device.stream(HOST_STREAM)  # made before anything is captured
        shape = parts.packed[0].shape
        self._buffers = StepBuffers(engine.device, len(parts.packed), shape.num_experts, shape.hidden, call)
        self.layers: Sequence[CapturedLayer] = [
            CapturedLayer(engine.device, parts, index, self._buffers) for index in range(len(parts.packed))
        ]
        self._graph: Graph | None = None
        self._last: Routed | None = None  # of a step that nothing was learnt from yet

    def capture(self, step: Callable[[], None]) -> None:
        """Notes `step`, which calls `layers`; nothing of it is done.

        Raises:
            DeviceError: it cannot be captured.
        """
        with self._engine.alone():
            self._graph = self._engine.device.capture(step)

    def replay(self) -> None:
        """One step on what its tensors hold now; it is done when this returns.

        Raises:
            DeviceError: the device failed.
            RuntimeError, ValueError: the CPU's part failed. The results are wrong then, and the next step is like any other.
        """
        assert self._graph is not None, "replay after capture"
        with self._engine.alone():
            self._slots.freeze()
            done = None
            try:
                with self._slots.lock:
                    self._buffers.show(self._slots.table, self._slots.version)
                began_ms = self._engine.device.now_ms()
                self._graph.replay()
                done = self._compute.record()
                self._learn()
                done.wait()
                self._engine.observer.replayed(began_ms)
            except DeviceError:
                self._engine.settle()
                raise
            finally:
                self._slots.thaw(done)
            for layer in self.layers:
                layer.check()
            self._last = self._buffers.routed()

    def release(self) -> None:
        """No step comes after this."""
        if self._graph is not None:
            self._graph.release()
            self._graph = None

    def _learn(self) -> None:
        routed, self._last = self._last, None
        if routed is None:
            return
        engine = self._engine
        for layer in np.flatnonzero(routed.scored).tolist():
            engine.policy.update(layer, routed.scores[layer], routed.chosen[layer])
        for layer, (chosen, on_cpu) in enumerate(zip(routed.chosen, routed.on_cpu, strict=True)):
            engine.statistics.count_split(layer, len(np.unique(chosen[chosen >= 0])), len(np.unique(chosen[on_cpu])))
        engine.statistics.replayed += 1
        if engine.prefetcher.options.promote:
            self._bring(routed)

    def _bring(self, routed: Routed) -> None:
        """Asks for what the CPU served and the cache ranks above who would leave for it, the widest gap first."""
        wanted: list[tuple[float, int, int]] = []
        for layer in range(self._slots.layers):
            ranks, there = self._engine.policy.priority(layer), self._slots.slot_of(layer) >= 0
            lowest = float(ranks[there].min()) if self._slots.full(layer) and there.any() else -np.inf
            missed = np.unique(routed.chosen[layer][routed.on_cpu[layer]])
            wanted += [(lowest - float(ranks[expert]), layer, expert) for expert in missed.tolist() if ranks[expert] > lowest]
        best = sorted(wanted)[:MOST_BROUGHT]
        self._queue.replan({(layer, expert) for _, layer, expert in best})
        for _, layer, expert in best:
            self._queue.request(layer, expert, Urgency.PROMOTION)
