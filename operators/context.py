"""The state that the operators of one model share: the machine, the CPU runtime, drafting, sparsity and GPUs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moegraft.cpu_backend import Runtime
from moegraft.operators.cache_form import CacheForm
from moegraft.operators.draft import DraftSwitch
from moegraft.operators.machine import Machine

# Members that only some models need are imported when they are first asked for: a model on the CPU must not wait for the GPU engine,
# nor fail where Triton is not installed.
if TYPE_CHECKING:
    from moegraft.operators.base import ModelOperator
    from moegraft.operators.kernels.workspace import Workspace
    from moegraft.operators.offload.decode_steps import DecodeSteps
    from moegraft.operators.offload.model_experts import ModelEngines
    from moegraft.operators.offload.statistics import EngineStatistics, Timeline
    from moegraft.operators.sparse.choice import PathChoices
    from moegraft.operators.sparsity import SparseLayers


@dataclass(eq=False)
class InjectionContext:
    """The shared state of one model; two models never share one. Members are created when an operator first asks for them.

    It is hashable and can be weakly referenced, so that an operator of another package can keep shared state of its own by context.

    Attributes:
        dtype: that of activations and of what is not replaced.
        threads: CPU threads of the operators; 0: one for each physical core.
        draft_switch: how many experts run while a draft is drawn.
        cache_form: the form of the key-value cache that the rules ask for.
    """

    machine: Machine
    dtype: torch.dtype
    threads: int = 0
    draft_switch: DraftSwitch = field(default_factory=DraftSwitch, init=False)
    cache_form: CacheForm = field(default_factory=CacheForm, init=False)
    _workspaces: dict[torch.device, Workspace] = field(default_factory=dict, init=False, repr=False)
    _decode_steps: DecodeSteps | None = field(default=None, init=False, repr=False)
    _warnings: set[str] = field(default_factory=set, init=False, repr=False)

    @cached_property
    def runtime(self) -> Runtime:
        """The thread pool and kernels of the CPU."""
        return Runtime(threads=self.threads)

    @cached_property
    def sparse_layers(self) -> SparseLayers:
        """The layers that leave neurons out, grouped by target."""
        from moegraft.operators.sparsity import SparseLayers

        return SparseLayers()

    @cached_property
    def gpu_engines(self) -> ModelEngines:
        """The engines of the layers whose experts run on the CPU and on GPUs."""
        from moegraft.operators.offload.model_experts import ModelEngines

        return ModelEngines(self.runtime, self.cache_form)

    @cached_property
    def path_choices(self) -> PathChoices:
        """The measured choice among the kernels for sparse experts."""
        from moegraft.operators.sparse.choice import PathChoices, choices_path

        return PathChoices(choices_path())

    def workspace(self, device: torch.device) -> Workspace:
        """Return the scratch memory that the layers on `device` share."""
        from moegraft.operators.kernels.workspace import Workspace

        return self._workspaces.setdefault(device, Workspace(device))

    def warn_once(self, logger: logging.Logger, message: str) -> None:
        """Log a warning that holds for many layers of this model once."""
        if message not in self._warnings:
            self._warnings.add(message)
            logger.warning(message)

    @property
    def decode_steps(self) -> DecodeSteps | None:
        """What captures the model's decode steps; None where no rule asks for it. To be read when all operators are built."""
        engines = self._gpu_engines_in_use
        if self._decode_steps is None and engines is not None and engines.captures:
            from moegraft.operators.offload.decode_steps import DecodeSteps

            self._decode_steps = DecodeSteps(engines)
        return self._decode_steps

    def statistics(self) -> dict[str, object]:
        """Return what operators did together: `sparsity` for each target that rules give, and `devices` for each GPU that experts share."""
        sparsity = self.sparse_layers.statistics() if "sparse_layers" in vars(self) else []
        engines = self._gpu_engines_in_use
        devices: Mapping[str, object] = {} if engines is None else engines.statistics()
        return {"sparsity": sparsity, "devices": dict(devices)}

    def engine_statistics(self) -> Mapping[str, EngineStatistics]:
        """Return the counts of each GPU that experts share, by its name."""
        engines = self._gpu_engines_in_use
        return {} if engines is None else {engine.device.name: engine.statistics for engine in engines}

    @contextmanager
    def traced(self, path: Path, model_operator: ModelOperator | None) -> Iterator[Sequence[Timeline]]:
        """Record what GPUs, transfers and drafts do while the body runs, and write it to a trace file, whatever ends the body.

        Yields the timelines; there are none, and there is no file, where the CPU computes everything and nothing is drafted.

        Raises:
            OSError: the file cannot be written, raised before the body runs.
        """
        engines = list(self._gpu_engines_in_use or ())
        drafts = model_operator if model_operator is not None and model_operator.drafts else None
        if not engines and drafts is None:
            yield ()
            return
        from moegraft.operators.offload.statistics import Timeline, round_spans, write_trace

        write_trace(path, [])
        timelines = [Timeline(engine.device.name) for engine in engines] or [Timeline("CPU")]
        clocks = [engine.device.now_ms for engine in engines] or [lambda: 1e3 * time.perf_counter()]
        for engine, timeline in zip(engines, timelines, strict=False):
            engine.timings.timeline = timeline
        if drafts is not None:
            drafts.observe_rounds(partial(round_spans, list(zip(timelines, clocks, strict=True))))
        try:
            yield timelines
        finally:
            if drafts is not None:
                drafts.observe_rounds(None)
            for engine in engines:
                engine.device.synchronize()
                engine.timings.collect()
                engine.timings.timeline = None
            write_trace(path, timelines)

    def close(self) -> None:
        """End captured steps and transfers and free the GPUs' slots; the model computes no more."""
        if self._decode_steps is not None:
            self._decode_steps.release()
        engines = self._gpu_engines_in_use
        if engines is not None:
            engines.close()

    @property
    def _gpu_engines_in_use(self) -> ModelEngines | None:
        return self.gpu_engines if "gpu_engines" in vars(self) else None
