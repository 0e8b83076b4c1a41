"""`--trace FILE`: who worked when while the chat ran, for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moegraft.injection.cli.loading import LoadedModel
from moegraft.injection.cli.terminal import Terminal
from moegraft.injection.graft import Injection
from moegraft.operators.experts.engine.groups import GpuGroups
from moegraft.operators.experts.engine.timeline import Timeline, write_trace


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
    groups = injection.context.shared(GpuGroups, GpuGroups)
    engines = [engine for group in groups for engine in group.engines]
    if not engines:
        terminal.notice("--trace: experts run on the CPU alone, so there is no timeline of a GPU and its transfers")
        yield
        return
    write_trace(path, [])
    timelines = [Timeline(engine.device.name) for engine in engines]
    for engine, timeline in zip(engines, timelines, strict=True):
        engine.observer.timeline = timeline
    try:
        yield
    finally:
        for engine in engines:
            engine.device.synchronize()
            engine.observer.collect()
            engine.observer.timeline = None
        write_trace(path, timelines)
        spans = sum(len(timeline.spans) for timeline in timelines)
        terminal.notice(f"{path}: {spans} spans; open it in https://ui.perfetto.dev")
