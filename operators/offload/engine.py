"""The engine of one device: computes one layer's experts after another on the CPU and the GPU, loads experts, and learns from each step.

HybriMoE, section IV: the scheduler simulates the CPU, the GPU and the link and assigns every active expert; transfers that the plan asks
for run while resident experts are computed; later layers' experts are loaded while the link is idle; the cache learns from every token's
scores. The same code drives any device.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from moegraft.cpu_backend import CachePolicy
from moegraft.operators.interrupts import Uninterrupted
from moegraft.operators.offload.costs import CostModel
from moegraft.operators.offload.devices.base import CpuTicket, Device, DeviceError, Event
from moegraft.operators.offload.executors import CallExecutor
from moegraft.operators.offload.prefetch import Prefetcher, PrefetchOptions, VerificationPrefetcher
from moegraft.operators.offload.queue import ExpertCache
from moegraft.operators.offload.scheduler import UNBOUNDED, LayerProblem, LayerStep, Prediction, Scheduler
from moegraft.operators.offload.slots import Pin
from moegraft.operators.offload.statistics import EngineStatistics, TimingRecorder
from moegraft.operators.offload.transfers import Transfer

logger = logging.getLogger(__name__)


class Engine:
    """Computes the experts of all layers of a model on the CPU and one device.

    One layer at a time: calls from several threads wait for each other.

    Args:
        cache: the device's slots and queue.
        policy: learns from every step; `cache` evicts by its priorities.
        timings: the recorder whose hooks `cache` calls for its transfers.
    """

    def __init__(
        self,
        device: Device,
        cache: ExpertCache,
        scheduler: Scheduler,
        costs: CostModel,
        policy: CachePolicy,
        prefetch: PrefetchOptions,
        timings: TimingRecorder,
    ) -> None:
        self.device = device
        self.cache = cache
        self.scheduler = scheduler
        self.costs = timings.costs = costs
        self.policy = policy
        self.timings = timings
        self.statistics = EngineStatistics(cache.slots.layers)
        self.verification_prefetcher = VerificationPrefetcher(cache.slots, cache.queue, self.statistics)
        self.prefetcher = Prefetcher(prefetch, cache.slots, cache.queue, self._gains, self.verification_prefetcher)
        self._slots = cache.slots
        self._queue = cache.queue
        self._compute = device.stream("compute")
        self._expert_bytes = cache.queue.store.expert_bytes
        self._fixed = Scheduler("fixed")
        self._by_residency = False
        self._lock = Lock()

    def run(self, step: LayerStep, executor: CallExecutor, overlap: Callable[[], None] | None = None) -> None:
        """Compute `step.experts` through `executor`, whose `join` has returned when this does.

        If the device fails, the layer is computed again on the CPU and a warning is logged; a failure there is raised.

        Args:
            overlap: launches other work of the GPU, such as shared experts. It is called once the CPU, the link and the GPU have their
                first work, so that it runs while the CPU and the link are busy; not at all if the device fails before.
        """
        with self._lock, Uninterrupted():
            try:
                self._run(step, executor, overlap)
            except DeviceError as error:
                self.statistics.recoveries += 1
                logger.warning("%s: layer %d is computed again on the CPU: %s", self.device.name, step.layer, error)
                executor.restart()
                executor.join(self._submit_cpu(step, np.ones(len(step.experts), bool), executor), ())

    def _run(self, step: LayerStep, executor: CallExecutor, overlap: Callable[[], None] | None) -> None:
        pin = self._slots.pin(step.layer, step.experts.tolist())
        wanted: deque[int] = deque()  # positions of the experts to transfer, in order
        requested: deque[tuple[int, Transfer]] = deque()  # those of them that have a slot, until they are launched
        launches: list[Event] = []  # after each launch: a failure surfaces at the first event behind it
        cpu: CpuTicket | None = None

        def request() -> None:
            """Request what is wanted, as far as there are slots: the slot of an expert that was read becomes free for the next."""
            if wanted:
                for transfer in self._queue.demand(step.layer, step.experts[list(wanted)].tolist()):
                    requested.append((wanted.popleft(), transfer))

        try:
            with self.device.errors():
                start_ms = self.device.now_ms()
                problem = self._problem(step, pin, 0.0 if overlap is None else self.timings.overlap_ms(len(step.chosen)))
                plan = (self._fixed if self._by_residency else self.scheduler).plan(step.layer, problem)
                self.timings.planned(step.layer, start_ms, plan)
                in_flight = np.flatnonzero(~plan.on_cpu & (problem.arrival_ms > 0) & np.isfinite(problem.arrival_ms))
                wanted.extend(in_flight[np.argsort(problem.arrival_ms[in_flight])].tolist())
                wanted.extend(plan.transfers.tolist())
                request()
                deferred = plan.on_cpu & np.isin(step.experts, step.deferrable)
                submitted_ms = self.device.now_ms()
                cpu = self._submit_cpu(step, plan.on_cpu & ~deferred, executor)
                if deferred.any():  # behind the others; the next layer waits for these
                    executor.defer(step.experts[deferred], self.device.submit_cpu)
                    self.statistics.deferred += int(deferred.sum())

                slots = np.asarray(pin.slots, np.int32)
                resident = np.flatnonzero(~plan.on_cpu & (slots >= 0))
                if len(resident):
                    launches.append(self._launch(step, resident, slots[resident], executor, waited=False))
                # Experts above the layer's capacity may be evicted for those that arrive.
                self._slots.release(pin, launches[-1] if launches else None)
                if overlap is not None:
                    self.timings.launch_overlap(self._compute, len(step.chosen), overlap)
                request()
                while requested:
                    loads = step.loads[[position for position, _ in requested]]
                    group = list(islice(requested, self._group_size(loads, more=bool(wanted))))
                    for event in self._queue.ready([transfer for _, transfer in group]):
                        self._compute.wait(event)
                    positions, arrived = zip(*group, strict=True)
                    at, filled = np.array(positions), np.array([transfer.slot for transfer in arrived], np.int32)
                    launches.append(self._launch(step, at, filled, executor, waited=True))
                    for _ in arrived:
                        requested.popleft()
                    self._queue.release_all(arrived, launches[-1])
                    request()

                if not self._by_residency:
                    self._prefetch(step, plan.on_cpu)  # while both devices are busy
                executor.join(cpu, launches)
                if cpu is not None:
                    self.timings.computed_on_cpu(step.layer, step.loads[plan.on_cpu & ~deferred], cpu, submitted_ms)
                self.timings.collect()
                self.statistics.count_planned(step.layer, problem, plan)
                if wanted:  # no slot could be had for these, all are held: the CPU computes them
                    self.device.synchronize()  # the results of the CPU's first part were copied from where these come now
                    rest = np.zeros(len(step.experts), bool)
                    rest[list(wanted)] = True
                    executor.join(self._submit_cpu(step, rest, executor), ())
        except DeviceError:
            self.settle()
            if cpu is not None:
                with suppress(RuntimeError, ValueError):  # if it fails for a reason of its own, it will again
                    cpu.wait()
            raise
        finally:
            if requested:
                self._queue.release_all([transfer for _, transfer in requested], launches[-1] if launches else None)
            if not pin.released:
                self._slots.release(pin, None)

    def _group_size(self, loads: NDArray[np.int32], *, more: bool) -> int:
        """How many of the experts in flight, with these loads, are launched together.

        As many as arrive while the host makes a launch, so that it keeps up with the link, and as many as take the GPU as long: computing
        the first of them before the last have arrived gains less than a further launch costs.

        Args:
            more: whether others wait for their slots: then half of them at most, so that the link is busy while these are computed.
        """
        launch_ms, transfer_ms = self.costs.first_gpu_ms, self.costs.transfer_ms(self._expert_bytes)
        arriving = math.ceil(launch_ms / transfer_ms) if transfer_ms > 0 else len(loads)
        computed = 1 + int(np.searchsorted(np.cumsum(self.costs.gpu_ms(loads)), launch_ms))
        return max(1, min(max(arriving, computed), (len(loads) + 1) // 2 if more else len(loads)))

    def _problem(self, step: LayerStep, pin: Pin, gpu_free_ms: float) -> LayerProblem:
        slots, queue = self._slots, self._queue
        busy_ms = link_free_ms = queue.busy_ms()
        arrival_ms = np.where(np.asarray(pin.slots, np.int32) >= 0, 0.0, np.inf)
        for expert, alone_ms in sorted(queue.in_flight(step.layer).items(), key=lambda item: item[1]):
            at = int(np.searchsorted(step.experts, expert))
            if at == len(step.experts) or step.experts[at] != expert or arrival_ms[at] == 0:
                continue
            # Each would land that early if it alone were demanded; together what is left of them goes one after another.
            left_ms = max(0.0, alone_ms - busy_ms)
            link_free_ms += left_ms
            arrival_ms[at] = max(alone_ms if left_ms == 0 else link_free_ms, 1e-3)  # 0 would mean that it is resident
        # The GPU cannot begin before its first launch has reached it.
        gpu_free_ms += self.costs.first_gpu_ms
        # One slot is enough to transfer any number of experts, one after another: free now, or once a resident expert was read.
        most = min(slots.capacity_of(step.layer), slots.num_experts - 1)
        transfers = queue.available > 0 or len(slots.residents(step.layer)) > most
        return LayerProblem(
            loads=step.loads,
            cpu_ms=self.costs.cpu_ms(step.loads),
            gpu_ms=self.costs.gpu_ms(step.loads),
            arrival_ms=arrival_ms,
            transfer_ms=self.costs.transfer_ms(self._expert_bytes),
            first_cpu_ms=self.costs.first_cpu_ms,
            gpu_free_ms=gpu_free_ms,
            link_free_ms=link_free_ms + self.costs.first_gpu_ms,  # what arrives is launched behind what is resident
            max_transfers=UNBOUNDED if transfers else 0,
        )

    def _gains(self, prediction: Prediction, resident: NDArray[np.bool_]) -> NDArray[np.float64]:
        # The scheduler makes experts resident one after another, equal loads in order of position: the likeliest first.
        order = np.argsort(prediction.ranks, kind="stable")
        loads = prediction.loads[order]
        problem = LayerProblem(
            loads=loads,
            cpu_ms=self.costs.cpu_ms(loads),
            gpu_ms=self.costs.gpu_ms(loads),
            arrival_ms=np.where(resident[order], 0.0, np.inf),
            transfer_ms=self.costs.transfer_ms(self._expert_bytes),
            first_cpu_ms=self.costs.first_cpu_ms,
            gpu_free_ms=self.costs.first_gpu_ms,
            link_free_ms=self.costs.first_gpu_ms,
        )
        gains = np.empty(len(order))
        gains[order] = self.scheduler.gains(prediction.layer, problem)
        return gains

    def _submit_cpu(self, step: LayerStep, on_cpu: NDArray[np.bool_], executor: CallExecutor) -> CpuTicket | None:
        if not on_cpu.any():
            return None
        return self.device.submit_cpu(executor.on_cpu(step.experts[on_cpu]))

    def _launch(self, step: LayerStep, at: NDArray[np.intp], slots: NDArray[np.int32], executor: CallExecutor, *, waited: bool) -> Event:
        def launch() -> None:
            self.device.launch(self._compute, executor.on_gpu(step.experts[at], slots))

        return self.timings.launch(self._compute, step.layer, step.loads[at], launch, waited=waited)

    def _prefetch(self, step: LayerStep, on_cpu: NDArray[np.bool_]) -> None:
        """Let the cache learn from the step, and give the link its next tasks."""
        draft = step.draft
        if draft is None:
            self.verification_prefetcher.verified(step)
            if step.scores is not None:  # a draft's tokens come again, with all their experts
                self.policy.update([step.layer], step.scores[None], step.chosen[None])
        elif self.prefetcher.options.policy != "none":
            self.verification_prefetcher.drafted(step, draft)
            return
        self.prefetcher.look_ahead(step)
        missed = step.experts[on_cpu & (self._slots.slot_of(step.layer)[step.experts] < 0)]
        self.prefetcher.promote(step.layer, missed.tolist(), self.policy.priority)

    def expect_verification(self, predictions: Sequence[Prediction]) -> None:
        """Load what the verification of drafted tokens is expected to need; no layer is computed."""
        with self.exclusive():
            if self.prefetcher.options.policy != "none":
                self.verification_prefetcher.expect(predictions)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold off all layers, and Ctrl-C, while the body runs."""
        with self._lock, Uninterrupted():
            yield

    @property
    def loads(self) -> bool:
        """Whether experts are loaded; not while the body of `by_residency` runs."""
        return not self._by_residency

    @contextmanager
    def by_residency(self) -> Iterator[None]:
        """Compute as captured steps do while the body runs: what is resident on the GPU, the rest on the CPU. Neither loads any."""
        with self.exclusive():
            self._queue.replan(started=True)
            self.device.synchronize()  # what was sent lands
            self._by_residency = True
        try:
            yield
        finally:
            self._by_residency = False

    def settle(self) -> None:
        """Wait until all handed-over work ended, even by failing: nothing of it may touch the results of what comes next."""
        with suppress(DeviceError):
            self.device.synchronize()

    def report(self) -> Mapping[str, object]:
        """Return the statistics so far, under names for users."""
        slots = self._slots
        return {
            "slots": f"{int((slots.table >= 0).sum())} of {slots.plan.total} hold an expert",
            **self.statistics.as_mapping(),
            "experts loaded": self._queue.statistics.landed,
            "experts prefetched and used": slots.prefetches_used,
            "experts prefetched and not used": slots.prefetches_wasted,
        }

    def close(self) -> None:
        """End the transfers and free the slots; the model's last layer has returned."""
        self.device.synchronize()
        self.cache.close()
        self.device.close()
