"""A timeline has the spans of every lane, and its trace has the format that Perfetto reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.engine_rig import LAYERS, Setting, busy_ms, engine_rig

from moegraft.operators.offload.prefetch import PrefetchOptions
from moegraft.operators.timeline import LANES, Timeline, chrome_trace, round_spans, write_trace


def test_every_lane_has_spans(tmp_path: Path) -> None:
    with engine_rig(Setting("greedy", prefetch=PrefetchOptions(policy="next_layer"))) as rig:
        timeline = rig.engine.timings.timeline = Timeline("emulated:0", rig.engine.device.now_ms)
        before_ms = rig.engine.device.now_ms()
        for step in range(6):
            for number in range(LAYERS):
                rig.call(number, 2, seed=10 * step + number)
        with round_spans([timeline], "verify") as details:
            rig.call(0, 2, seed=99)
            details["accepted"] = 2
        rig.engine.device.synchronize()
        rig.engine.timings.collect()
        took_ms = rig.engine.device.now_ms() - before_ms
        lanes = set(LANES) - {"step"}  # of the CPU alone
        assert {span.lane for span in timeline.spans} == lanes
        assert all(before_ms <= span.start_ms <= span.end_ms <= before_ms + took_ms + 1e-6 for span in timeline.spans)
        assert 0 < busy_ms(timeline, "CPU") <= took_ms and 0 < busy_ms(timeline, "link") <= took_ms
        (verified,) = [span for span in timeline.spans if span.lane == "rounds"]
        assert verified.end_ms > verified.start_ms and verified.details == {"accepted": 2}
        # By the device's own clock: the CPU lane is complete.
        assert busy_ms(timeline, "CPU") == pytest.approx(rig.engine.device.busy_ms("cpu"), rel=1e-6)  # type: ignore[attr-defined]
        path = tmp_path / "trace.json"
        write_trace(path, [timeline])
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["emulated:0"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(timeline.spans) and min(event["ts"] for event in spans) == 0
    assert {LANES[event["tid"]] for event in spans} == lanes


def test_overlaps_count_once() -> None:
    timeline = Timeline("x")
    for start, end in ((0, 2), (1, 3), (5, 6), (5.5, 5.7)):
        timeline.add("GPU", "work", start, end)
    assert busy_ms(timeline, "GPU") == 4 and busy_ms(timeline, "CPU") == 0


def test_only_the_latest_are_kept() -> None:
    timeline = Timeline("x", capacity=10)
    for number in range(25):
        timeline.add("GPU", str(number), number, number + 1)
    assert len(timeline.spans) <= 10 and timeline.spans[-1].name == "24"
    assert chrome_trace([])["traceEvents"] == []


def test_costs_follow_what_is_measured() -> None:
    """The rig's tables are wrong on purpose: observations bring them near what its device really takes."""
    with engine_rig(Setting("on_demand", prefetch=PrefetchOptions(policy="none", promote=False))) as rig:
        costs = rig.engine.costs
        before_ms = costs.gpu_ms(np.array([1]))
        for step in range(60):
            for number in range(LAYERS):
                rig.call(number, 1, seed=1000 * step + number)
        expert_bytes = rig.engine.cache.queue.store.expert_bytes
        true_ms = expert_bytes / 0.025 / 1e6
        assert abs(costs.transfer_ms(expert_bytes) / true_ms - 1) < 0.05
        assert abs(costs.gpu_ms(np.array([1]))[0] / before_ms[0] - 1) > 0.05, "the GPU's as well"
