"""`--trace FILE`: a timeline of the chat for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moegraft.injection.cli.loading import LoadedModel
from moegraft.injection.cli.output import Terminal
from moegraft.injection.graft import Injection


@contextmanager
def traced(loaded: LoadedModel, path: Path | None, terminal: Terminal) -> Iterator[None]:
    """Record what the model does while the body runs, and write it to a file; report it where there is nothing to record.

    Raises:
        OSError: the file cannot be written, raised before the chat begins.
    """
    if path is None:
        yield
        return
    injection = loaded.model.moegraft
    assert isinstance(injection, Injection), "a model that was loaded by rules"
    timelines: Sequence[Any] = ()
    try:
        with injection.traced(path) as timelines:
            if not timelines:
                terminal.notice("--trace: experts run on the CPU alone, so there is no timeline of a GPU and its transfers")
            yield
    finally:
        if timelines:
            spans = sum(len(timeline.spans) for timeline in timelines)
            terminal.notice(f"{path}: {spans} spans; open it in https://ui.perfetto.dev")
