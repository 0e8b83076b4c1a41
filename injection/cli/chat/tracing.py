"""`--trace FILE`: who worked when while the chat ran, for Perfetto."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from moegraft.injection.cli.loading import LoadedModel
from moegraft.injection.cli.output import Terminal
from moegraft.injection.graft import Injection
from moegraft.operators.offload.statistics import Timeline, round_spans, write_trace
from moegraft.operators.speculative.operator import SpeculativeDraft
from moegraft.operators.speculative.options import unseen


@contextmanager
def traced(loaded: LoadedModel, path: Path | None, terminal: Terminal) -> Iterator[None]:
    """Writes what the engines of the model did while the body ran, whatever ends it; says so where there is nothing to trace.

    Raises:
        OSError: the file cannot be written, told before the chat begins.
    """
    if path is None:
        yield
        return
    injection = loaded.model.moegraft
    assert isinstance(injection, Injection), "a model that was loaded by rules"
    engines = list(injection.context.gpu_engines)
    drafts = injection.model_operator if isinstance(injection.model_operator, SpeculativeDraft) else None
    if not engines and drafts is None:
        terminal.notice("--trace: experts run on the CPU alone, so there is no timeline of a GPU and its transfers")
        yield
        return
    write_trace(path, [])
    timelines = [Timeline(engine.device.name) for engine in engines]
    for engine, timeline in zip(engines, timelines, strict=True):
        engine.timings.timeline = timeline
    clocks = [(timeline, engine.device.now_ms) for engine, timeline in zip(engines, timelines, strict=True)]
    if not engines:
        timelines = [Timeline("CPU")]
        clocks = [(timelines[0], lambda: 1e3 * time.perf_counter())]
    if drafts is not None:
        drafts.spans = partial(round_spans, clocks)
    try:
        yield
    finally:
        if drafts is not None:
            drafts.spans = unseen
        for engine in engines:
            engine.device.synchronize()
            engine.timings.collect()
            engine.timings.timeline = None
        write_trace(path, timelines)
        spans = sum(len(timeline.spans) for timeline in timelines)
        terminal.notice(f"{path}: {spans} spans; open it in https://ui.perfetto.dev")
