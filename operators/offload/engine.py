"""Carries out one layer after another: what is where, who computes what, what is loaded, and what is learnt from it.

HybriMoE, section IV: the scheduler simulates the CPU, the GPU and the link and assigns every active expert; transfers that the plan asks
for run beside the work on what is there already; later layers' experts are loaded while the link is idle; the cache learns from every
token's scores. The same code drives CUDA and the emulated devices.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.offload.cache import CachePolicy
from moegraft.operators.offload.costs import CostModel
from moegraft.operators.offload.devices.base import CpuTicket, Device, DeviceError, Event, Work
from moegraft.operators.offload.drafts import VerifyAhead
from moegraft.operators.offload.prefetch import Prefetcher, PrefetchOptions
from moegraft.operators.offload.queue import Loading, Uninterrupted
from moegraft.operators.offload.scheduler import UNBOUNDED, LayerPlan, LayerProblem, Scheduler
from moegraft.operators.offload.slots import Pin
from moegraft.operators.offload.statistics import EngineStatistics, Observer
from moegraft.operators.offload.step import LayerExecutor, LayerStep, Prediction
from moegraft.operators.offload.transfers import Transfer, Urgency

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Hold:
    """What a layer holds and has yet to ask for.

    Attributes:
        wanted: positions, among the active experts, of those to bring, in order; `asked` are those on their way and not read yet.
    """

    pin: Pin
    wanted: deque[int] = field(default_factory=deque)
    asked: deque[tuple[int, Transfer]] = field(default_factory=deque)


class Engine:
    """Computes the experts of all layers of a model on the CPU and one device.

    One layer at a time; calls from several threads take turns.

    Args:
        loading: the device's slots and queue.
        policy: learns from every step; its priorities are those that `loading` evicts by.
        observer: the one that `loading` tells of its transfers.
    """

    def __init__(
        self,
        device: Device,
        loading: Loading,
        scheduler: Scheduler,
        costs: CostModel,
        policy: CachePolicy,
        prefetch: PrefetchOptions,
        observer: Observer | None = None,
    ) -> None:
        self.device = device
        self.observer = observer or Observer(device)
        self.observer.costs = costs
        self.loading = loading
        self.scheduler = scheduler
        self.costs = costs
        self.policy = policy
        self.statistics = EngineStatistics(loading.slots.layers)
        self.prefetcher = Prefetcher(prefetch, loading.slots, loading.queue, self._gains)
        self.verify_ahead = VerifyAhead(loading.slots, loading.queue)
        self._slots = loading.slots
        self._queue = loading.queue
        self._compute = device.stream("compute")
        self._expert_bytes = loading.queue.store.expert_bytes
        self._beside_ms = 0.0  # of the GPU's other work in the layer at hand; that of the next layers is taken to be the same
        self._lock = Lock()

    def run(self, step: LayerStep, executor: LayerExecutor, between: Callable[[], None] | None = None) -> None:
        """Computes `step.experts` through `executor`, whose `join` has returned when this does.

        `between` hands over other work of the GPU, behind the experts that are there: the CPU and the link are busy meanwhile.

        A device that fails costs a warning and the layer's time on the CPU; what fails there is raised.
        """
        with self._lock, Uninterrupted():
            try:
                self._run(step, executor, between)
            except DeviceError as error:
                self.statistics.recoveries += 1
                logger.warning("%s: layer %d is computed anew on the CPU: %s", self.device.name, step.layer, error)
                executor.restart()
                executor.join(self._start_cpu(step, np.ones(len(step.experts), bool), executor), ())

    def _run(self, step: LayerStep, executor: LayerExecutor, between: Callable[[], None] | None) -> None:
        hold = _Hold(self._slots.pin(step.layer, step.experts.tolist()))
        reads: list[Event] = []  # after each launch: what failed is told by the first event behind it
        cpu: CpuTicket | None = None
        try:
            start_ms = self.device.now_ms()
            self._beside_ms = 0.0 if between is None else self.observer.beside.ms(len(step.chosen))
            problem = self._problem(step, hold.pin)
            plan = self.scheduler.plan(step.layer, problem)
            self.observer.planned(step.layer, start_ms, on_cpu=int(plan.on_cpu.sum()), experts=len(step.experts), ms=plan.makespan_ms)
            arriving = np.flatnonzero(~plan.on_cpu & (problem.arrival_ms > 0) & np.isfinite(problem.arrival_ms))
            hold.wanted.extend(arriving[np.argsort(problem.arrival_ms[arriving])].tolist())
            hold.wanted.extend(plan.transfers.tolist())
            self._ask(step, hold)
            cpu = self._start_cpu(step, plan.on_cpu, executor)
            self._start_resident(step, plan.on_cpu, hold, executor, reads)
            if between is not None:
                self.observer.beside.run(len(step.chosen), self._compute, between)
            self._start_arriving(step, hold, executor, reads)
            self._meanwhile(step, plan.on_cpu)
            executor.join(cpu, reads)
            self._learn(step, problem, plan, cpu)
            self._compute_rest(step, hold, executor)
        except DeviceError:
            self._settle(cpu)
            raise
        finally:
            for _, transfer in hold.asked:
                self._queue.release(transfer, reads[-1] if reads else None)
            if not hold.pin.released:
                self._slots.release(hold.pin, None)

    def _problem(self, step: LayerStep, pin: Pin) -> LayerProblem:
        link_free_ms = self._queue.busy_ms()
        arrival_ms = np.where(np.asarray(pin.slots, np.int32) >= 0, 0.0, np.inf)
        under_way = self._queue.in_flight(step.layer)
        for expert, alone_ms in sorted(under_way.items(), key=lambda item: item[1]):
            at = int(np.searchsorted(step.experts, expert))
            if at == len(step.experts) or step.experts[at] != expert or arrival_ms[at] == 0:
                continue
            # Each would land that early if it alone were demanded; together what is left of them goes one after another.
            left_ms = max(0.0, alone_ms - self._queue.busy_ms())
            link_free_ms += left_ms
            arrival_ms[at] = max(alone_ms if left_ms == 0 else link_free_ms, 1e-3)  # 0 would say that it is there
        return LayerProblem(
            loads=step.loads,
            cpu_ms=self.costs.cpu_ms(step.loads),
            gpu_ms=self.costs.gpu_ms(step.loads),
            arrival_ms=arrival_ms,
            transfer_ms=self.costs.transfer_ms(self._expert_bytes),
            first_cpu_ms=self.costs.first_cpu_ms,
            gpu_free_ms=self._beside_ms,
            link_free_ms=link_free_ms,
            max_transfers=UNBOUNDED if not (step.draft and step.draft.resident) and self._can_stream(step.layer) else 0,
        )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No layer is computed meanwhile, and Ctrl-C waits."""
        with self._lock, Uninterrupted():
            yield

    def settle(self) -> None:
        """Lets what was handed over end, however it ends: nothing of it may touch the results of what comes next."""
        with suppress(DeviceError):
            self.device.synchronize()

    def _settle(self, cpu: CpuTicket | None) -> None:
        self.settle()
        if cpu is not None:
            with suppress(RuntimeError, ValueError):  # if it fails for a reason of its own, it will again
                cpu.wait()

    def _can_stream(self, layer: int) -> bool:
        """One slot is enough to bring any number of experts, one after another: free now, or once who is there was read."""
        slots = self._slots
        return self._queue.available > 0 or len(slots.residents(layer)) > min(slots.capacity_of(layer), slots.num_experts - 1)

    def _ask(self, step: LayerStep, hold: _Hold) -> None:
        """Asks for what is wanted, as far as there are slots: those of experts that were read already come free for the next."""
        while hold.wanted:
            transfer = self._queue.request(step.layer, int(step.experts[hold.wanted[0]]), Urgency.DEMAND)
            if transfer is None:
                return
            hold.asked.append((hold.wanted.popleft(), transfer))

    def _start_cpu(self, step: LayerStep, on_cpu: NDArray[np.bool_], executor: LayerExecutor) -> CpuTicket | None:
        if not on_cpu.any():
            return None
        work = Work("experts", tuple(step.loads[on_cpu].tolist()), self._expert_bytes, neurons=step.neurons)
        return self.device.submit_cpu(executor.on_cpu(step.experts[on_cpu]), work)

    def _start_resident(self, step: LayerStep, on_cpu: NDArray[np.bool_], hold: _Hold, executor: LayerExecutor, reads: list[Event]) -> None:
        """What is there, in one launch."""
        slots = np.asarray(hold.pin.slots, np.int32)
        there = np.flatnonzero(~on_cpu & (slots >= 0))
        if len(there):
            reads.append(self._launch(step, there, slots[there], executor, waited=False))
        # Who is above the layer's capacity may leave for what arrives.
        self._slots.release(hold.pin, reads[-1] if reads else None)

    def _start_arriving(self, step: LayerStep, hold: _Hold, executor: LayerExecutor, reads: list[Event]) -> None:
        """What comes, in its order."""
        self._ask(step, hold)
        while hold.asked:
            at, transfer = hold.asked[0]
            self._compute.wait(transfer.ready())
            reads.append(self._launch(step, np.array([at]), np.array([transfer.slot], np.int32), executor, waited=True))
            hold.asked.popleft()
            self._queue.release(transfer, reads[-1])
            self._ask(step, hold)

    def _compute_rest(self, step: LayerStep, hold: _Hold, executor: LayerExecutor) -> None:
        """On the CPU, what no slot could be had for: others hold them all."""
        if hold.wanted:
            self.device.synchronize()  # the results of the CPU's first part were copied from where these come now
            rest = np.zeros(len(step.experts), bool)
            rest[list(hold.wanted)] = True
            executor.join(self._start_cpu(step, rest, executor), ())

    def _launch(self, step: LayerStep, at: NDArray[np.intp], slots: NDArray[np.int32], executor: LayerExecutor, *, waited: bool) -> Event:
        """The event after it."""
        work = Work("experts", tuple(step.loads[at].tolist()), self._expert_bytes, neurons=step.neurons)
        timed = self.observer.wants_launch()
        before = self._compute.record(timed=True) if timed else None
        self.device.launch(self._compute, executor.on_gpu(step.experts[at], slots), work)
        after = self._compute.record(timed=timed)
        if before is not None:
            self.observer.launched(step.layer, step.loads[at], before, after, waited=waited)
        return after

    def _meanwhile(self, step: LayerStep, on_cpu: NDArray[np.bool_]) -> None:
        """While both devices are busy: the cache learns, and the link gets its next tasks."""
        draft = step.draft
        if draft is None:
            self.verify_ahead.verified(step)
        elif draft.ahead and self.prefetcher.options.policy != "none":
            self.verify_ahead.drafted(step, draft)
            return
        if step.scores is not None and draft is None:  # a draft's tokens come again, with all their experts
            self.policy.update(step.layer, step.scores, step.chosen)
        self.prefetcher.look_ahead(step)
        missed = step.experts[on_cpu & (self._slots.slot_of(step.layer)[step.experts] < 0)]
        self.prefetcher.promote(step.layer, missed.tolist(), self.policy.priority)

    def _learn(self, step: LayerStep, problem: LayerProblem, plan: LayerPlan, cpu: CpuTicket | None) -> None:
        if cpu is not None:
            self.observer.computed_on_cpu(step.layer, step.loads[plan.on_cpu], cpu.elapsed_ms)
        self.observer.collect()
        self.statistics.count(step.layer, problem, plan.on_cpu, plan.makespan_ms)

    def _gains(self, prediction: Prediction, there: NDArray[np.bool_]) -> NDArray[np.float64]:
        # The scheduler makes experts resident one after another, equal loads in order of position: the likeliest first.
        order = np.argsort(prediction.ranks, kind="stable")
        loads = prediction.loads[order]
        problem = LayerProblem(
            loads=loads,
            cpu_ms=self.costs.cpu_ms(loads),
            gpu_ms=self.costs.gpu_ms(loads),
            arrival_ms=np.where(there[order], 0.0, np.inf),
            transfer_ms=self.costs.transfer_ms(self._expert_bytes),
            first_cpu_ms=self.costs.first_cpu_ms,
        )
        gains = np.empty(len(order))
        gains[order] = self.scheduler.gains(prediction.layer, problem)
        return gains

    def report(self) -> Mapping[str, object]:
        """What it did so far, by name, for programs that show it."""
        slots, transfers = self._slots, self._queue.statistics
        held = int((slots.table >= 0).sum())
        return {
            "slots": f"{held} of {slots.plan.total} hold an expert",
            **self.statistics.as_mapping(),
            "experts loaded": transfers.landed,
            "loaded ahead and used": slots.prefetches_used,
            "loaded ahead for nothing": slots.prefetches_wasted,
            "loaded while drafting for the verification": self.verify_ahead.served,
            "spared by verifying tokens together": self.verify_ahead.shared,
        }

    def close(self) -> None:
        """Ends the transfers and frees the slots; the model's last layer has returned."""
        self.device.synchronize()
        self.loading.close()
        self.device.close()
