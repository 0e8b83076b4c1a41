"""Whatever computes where: the sum is right, under every schedule, cache, prefetch and fault, and nothing stays held."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from support import combinations
from support.engine_rig import EXPERTS, LAYERS, TABLES, TOP_K, EngineRig, Setting, engine_rig
from support.faulty_device import EVERY, Faults
from support.gpus import ON_CUDA
from support.kernel_cases import make_batch, relative_error

from moegraft.operators.offload.costs import CostModel
from moegraft.operators.offload.devices.cuda import CudaDevice
from moegraft.operators.offload.prefetch import PrefetchOptions
from moegraft.operators.offload.scheduler import SCHEDULES, LayerStep
from moegraft.operators.offload.slots import SlotState
from moegraft.operators.offload.transfers import Urgency

NO_PREFETCH = PrefetchOptions(policy="none", promote=False)
CAPACITIES = [
    (0,) * LAYERS,  # none
    (1,) * LAYERS,  # one
    (2,) * LAYERS,  # below-k
    (3,) * LAYERS,  # k
    (EXPERTS,) * LAYERS,  # all
    (3, 2, 0),  # uneven
]
KINDS = pytest.mark.parametrize("kind", ["virtual", pytest.param("cuda", marks=ON_CUDA)])
BATCHES = (1, 1, 4, 1, 17, 0, 1)  # decode, a verified draft, a prompt, nothing


def run(rig: EngineRig, rounds: int = 1) -> None:
    """Every layer, batch after batch, each result checked."""
    for step, tokens in enumerate(BATCHES * rounds):
        for number in range(LAYERS):
            found, expected = rig.call(number, tokens, seed=100 * step + number)
            assert relative_error(found, expected) < rig.limit, f"step {step}, layer {number}"


def assert_nothing_held(rig: EngineRig) -> None:
    slots = rig.engine.cache.slots
    rig.engine.device.synchronize()
    assert not any(slots._pins), "every pin was released"
    for layer in range(LAYERS):
        assert all(slots.state(slot) is SlotState.READY for slot in slots.slot_of(layer) if slot >= 0)


@pytest.mark.parametrize("capacity", CAPACITIES, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
@KINDS
def test_every_schedule_computes_the_same(kind: str, schedule: str, capacity: tuple[int, ...]) -> None:
    with engine_rig(Setting(schedule, capacity, kind=kind)) as rig:  # type: ignore[arg-type]
        run(rig)
        assert_nothing_held(rig)
        assert rig.engine.statistics.recoveries == 0


@pytest.mark.parametrize(("prefetch", "policy"), combinations(["impact", "next_layer", "none"], ["mrs", "lru", "lfu", "score_frequency"]))
@KINDS
def test_every_policy_and_prefetch_computes_the_same(kind: str, prefetch: str, policy: str) -> None:
    options = PrefetchOptions(policy=prefetch)  # type: ignore[arg-type]
    for seed in range(3):
        device = {"seed": seed, "jitter": 1.0} if kind == "virtual" else {}
        with engine_rig(Setting("greedy", policy=policy, prefetch=options, kind=kind, device=device)) as rig:
            run(rig, rounds=3)
            assert_nothing_held(rig)
            landed = rig.engine.cache.queue.statistics.landed
            assert landed > 0, "something was loaded"


def test_threads_compute_the_same() -> None:
    with engine_rig(Setting(kind="threaded", staging=1)) as rig:
        run(rig, rounds=2)
        assert_nothing_held(rig)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@KINDS
def test_half_precision_is_summed_in_float32(kind: str, dtype: torch.dtype) -> None:
    with engine_rig(Setting(kind=kind), dtype) as rig:
        for number in range(LAYERS):
            found, expected = rig.call(number, 5, seed=number)
            assert found.dtype == torch.float32
            assert relative_error(found, expected) < (2e-2 if dtype == torch.bfloat16 else 2e-3)


@KINDS
def test_a_prompt_streams_any_number_of_experts_through_one_slot(kind: str) -> None:
    """Nothing resident, all experts wanted, one slot to load into: they come one after another."""
    with engine_rig(Setting("on_demand", (0,) * LAYERS, staging=1, prefetch=NO_PREFETCH, kind=kind)) as rig:
        found, expected = rig.call(0, 40, seed=1)
        assert relative_error(found, expected) < rig.limit
        rig.engine.device.synchronize()  # a real device reports a landed transfer after the result is there
        assert rig.engine.cache.queue.statistics.landed == EXPERTS
        assert rig.engine.statistics.on_cpu == 0


@KINDS
def test_a_fixed_map_stays(kind: str) -> None:
    with engine_rig(Setting("fixed", prefetch=NO_PREFETCH, kind=kind)) as rig:
        run(rig)
        assert rig.engine.cache.queue.statistics.requested == 0


def test_what_is_equal_gives_equal_bits_whatever_is_loaded_ahead() -> None:
    """Capacity for all: prefetching changes when experts come, and nobody computes anything else for it."""
    results = []
    for policy in ("none", "next_layer"):
        setting = Setting("all_cpu", (EXPERTS,) * LAYERS, prefetch=PrefetchOptions(policy=policy, promote=False))  # type: ignore[arg-type]
        with engine_rig(setting) as rig:
            results.append([rig.call(number, 4, seed=number)[0] for number in range(LAYERS)])
            assert (rig.engine.cache.queue.statistics.landed > 0) == (policy != "none")
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_prefetched_experts_are_found() -> None:
    """A prediction that is right makes the next layer's experts resident before they are asked for."""
    with engine_rig(Setting("greedy", (3,) * LAYERS, prefetch=PrefetchOptions(policy="next_layer", promote=False))) as rig:
        for _ in range(20):
            for number in range(LAYERS):
                rig.call(number, 1, seed=7 + number)  # the same experts each time
        statistics = rig.engine.statistics
        assert statistics.found > 0.5 * statistics.used
        assert rig.engine.cache.slots.prefetches_used > 0


@pytest.mark.parametrize("kind", ["copies", "refused_copies", "launches"])
def test_a_failing_device_costs_a_warning_and_no_result(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults(**{kind: range(3, 40, 7)})
    with caplog.at_level(logging.WARNING), engine_rig(Setting("on_demand", device={"faults": faults})) as rig:
        run(rig, rounds=2)
        assert_nothing_held(rig)
        assert rig.engine.statistics.recoveries > 0
    assert "is computed again on the CPU: emulated:0: injected" in caplog.text


def test_a_device_that_always_fails_leaves_the_cpu() -> None:
    with engine_rig(Setting("on_demand", device={"faults": Faults(copies=EVERY)})) as rig:
        run(rig)


def test_what_fails_on_the_cpu_is_raised_and_the_next_call_is_right() -> None:
    with engine_rig(Setting("all_cpu", prefetch=NO_PREFETCH, device={"faults": Faults(cpu_jobs=(0,))})) as rig:
        with pytest.raises(RuntimeError, match="injected: a job of the CPU engine failed"):
            rig.call(0, 2, seed=1)
        assert_nothing_held(rig)
        run(rig)


def test_the_cache_learns_from_every_token() -> None:
    with engine_rig(Setting("all_cpu", prefetch=NO_PREFETCH)) as rig:
        before = rig.engine.policy.priority(0).copy()
        rig.call(0, 4, seed=1)
        assert not np.array_equal(rig.engine.policy.priority(0), before)


@KINDS
def test_statistics_add_up(kind: str) -> None:
    with engine_rig(Setting("two_threshold", kind=kind)) as rig:
        run(rig)
        statistics = rig.engine.statistics
        assert statistics.used == statistics.used_by_layer.sum() and statistics.found == statistics.found_by_layer.sum()
        assert 0 < statistics.found <= statistics.used and statistics.on_cpu + statistics.transferred <= statistics.used
        report = rig.engine.report()
        assert report["experts found on the GPU"] == f"{statistics.hit_rate:.1%}"


def test_errors_of_pytorch_and_triton_take_the_way_of_a_failing_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever raises them: here other work of the GPU that runs beside the experts."""

    def failing() -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    with engine_rig(Setting("fixed", prefetch=NO_PREFETCH)) as rig:
        monkeypatch.setattr(rig.engine.device, "errors", partial(CudaDevice.errors, rig.engine.device))  # type: ignore[arg-type]
        x, index, weights = make_batch(4, TOP_K, rig.layers[0], torch.float32, seed=0)
        executor = rig.executor(0, x, index, weights)
        rig.engine.run(LayerStep.of(0, index.numpy()), executor, failing)
        assert relative_error(executor.result, rig.layers[0].reference(x, index, weights)) < 2e-6
        assert rig.engine.statistics.recoveries == 1
        assert_nothing_held(rig)


@pytest.mark.parametrize(
    ("first_gpu_ms", "gpu_ms", "launches"),
    [(0.0, 0.01, [1] * 6), (0.25, 0.01, [2, 4]), (9.0, 0.01, [2, 4]), (0.05, 9.0, [1] * 6), (0.05, 0.03, [2, 2, 2])],
)
def test_arrivals_are_launched_together_where_launches_are_slow(first_gpu_ms: float, gpu_ms: float, launches: list[int]) -> None:
    """As many as arrive, or are computed, in the time of a launch; while others wait for slots, at most half of the four in flight."""
    with engine_rig(Setting("on_demand", (0,) * LAYERS, staging=4, prefetch=NO_PREFETCH)) as rig:
        rig.engine.costs = CostModel(replace(TABLES, first_gpu_ms=first_gpu_ms, gpu_ms=((1, gpu_ms), (64, gpu_ms))))
        x, index, weights = make_batch(40, TOP_K, rig.layers[0], torch.float32, seed=0)
        executor, found = rig.executor(0, x, index, weights), list[int]()
        prepare = executor.on_gpu
        executor.on_gpu = lambda experts, slots: found.append(len(experts)) or prepare(experts, slots)  # type: ignore[method-assign, func-returns-value]
        rig.engine.run(LayerStep.of(0, index.numpy()), executor)
        assert relative_error(executor.result, rig.layers[0].reference(x, index, weights)) < 2e-6
        assert found == launches
        assert_nothing_held(rig)


@pytest.mark.parametrize(("first_gpu_ms", "on_cpu"), [(0.0, False), (50.0, True)])
def test_plans_know_what_a_launch_takes(first_gpu_ms: float, on_cpu: bool) -> None:
    """One token's experts are computed by the CPU before a launch has reached the GPU."""
    with engine_rig(Setting("two_threshold", (EXPERTS,) * LAYERS, prefetch=NO_PREFETCH)) as rig:
        for expert in range(EXPERTS):
            rig.engine.cache.queue.request(0, expert, Urgency.PROMOTION)
        rig.engine.device.synchronize()
        rig.engine.costs = CostModel(replace(TABLES, first_gpu_ms=first_gpu_ms))
        rig.call(0, 1, seed=1)
        statistics = rig.engine.statistics
        assert (statistics.on_cpu == statistics.used) == on_cpu
