"""The state that the operators of one model share: the CPU runtime, drafting, sparsity and GPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from moegraft.cpu_backend import Runtime
from moegraft.operators.cpu import open_runtime
from moegraft.operators.draft import DraftSwitch

# Members that only some models need are imported on first use: a model on the CPU does not wait for the GPU engine, and runs where
# Triton is not installed.
if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moegraft.operators.cache_form import QuantisedForm
    from moegraft.operators.expert_group import ExpertGroup
    from moegraft.operators.offload.decode_steps import DecodeSteps
    from moegraft.operators.offload.model_experts import ModelEngines
    from moegraft.operators.sparse.choice import PathChoices
    from moegraft.operators.sparsity import SparseLayers
    from moegraft.operators.step_program.steps import StepPrograms
    from moegraft.operators.timeline import Timeline


@dataclass(eq=False)
class InjectionContext:
    """The state that one model's operators share; two models never share it. Members are created on first use.

    A context is hashable and can be weakly referenced, so that an operator of another package can keep shared state of its own by context.

    Attributes:
        dtype: the dtype of activations and of modules that are not replaced.
        threads: CPU threads of the operators; 0 for one per physical core.
        expert_group: the processes that hold the experts; None where this one holds all.
        cache_form: the form that the plan gives the key-value cache; None for the dtype of the model.
        replays_steps: whether the plan lets decode steps on the CPU be replayed as native programs.
        draft_switch: how many experts run while a draft is computed.
    """

    dtype: torch.dtype
    threads: int = 0
    expert_group: ExpertGroup | None = None
    cache_form: QuantisedForm | None = None
    replays_steps: bool = True
    draft_switch: DraftSwitch = field(default_factory=DraftSwitch, init=False)
    _captured_steps: DecodeSteps | None = field(default=None, init=False, repr=False)
    _step_programs: StepPrograms | None = field(default=None, init=False, repr=False)
    _warnings: set[str] = field(default_factory=set, init=False, repr=False)

    @cached_property
    def runtime(self) -> Runtime:
        """The thread pool and kernels of the CPU."""
        return open_runtime(self.threads)

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

    def warn_once(self, logger: logging.Logger, message: str) -> None:
        """Log a warning that holds for many layers of this model once."""
        if message not in self._warnings:
            self._warnings.add(message)
            logger.warning(message)

    @property
    def decode_steps(self) -> DecodeSteps | StepPrograms | None:
        """What replays the model's decode steps; None where nothing does. To be read when all operators are built."""
        return self.step_programs or self.captured_steps

    @property
    def step_programs(self) -> StepPrograms | None:
        """What replays the model's decode steps on the CPU; None where nothing does."""
        if self._gpu_engines_in_use is not None or "runtime" not in vars(self) or not self.replays_steps:
            return None
        if self._step_programs is None:
            from moegraft.operators.step_program.steps import StepPrograms

            self._step_programs = StepPrograms(self.runtime, self.draft_switch, vars(self).get("sparse_layers"))
        return self._step_programs

    def generate(self, model: PreTrainedModel, stock: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what `stock(*args, **kwargs)`, the model's own `generate`, returns, by the quickest way to its decode steps."""
        if self.step_programs is not None:
            from moegraft.operators.generation import plain_generation

            return plain_generation(model, stock, self.step_programs, args, kwargs)
        captured = self.captured_steps
        return stock(*args, **(kwargs if captured is None else captured.generation(model, args, kwargs)))

    @property
    def captured_steps(self) -> DecodeSteps | None:
        """What captures decode steps on GPUs, which then need caches of fixed size; None where nothing does."""
        engines = self._gpu_engines_in_use
        if self._captured_steps is None and engines is not None and engines.captures:
            from moegraft.operators.offload.decode_steps import DecodeSteps

            self._captured_steps = DecodeSteps(engines)
        return self._captured_steps

    def statistics(self) -> dict[str, object]:
        """Return the shared statistics.

        `sparsity` of each target that rules give, `devices` for each GPU that holds experts, `decode_steps`: how many steps were
        replayed as native programs on the CPU, and why others were not, and `ranks` that hold experts.
        """
        sparsity = self.sparse_layers.statistics() if "sparse_layers" in vars(self) else []
        engines = self._gpu_engines_in_use
        devices: Mapping[str, object] = {} if engines is None else engines.statistics()
        programs: Mapping[str, object] = {} if self._step_programs is None else self._step_programs.statistics()
        ranks = [] if self.expert_group is None else self.expert_group.statistics()
        return {"sparsity": sparsity, "devices": dict(devices), "decode_steps": dict(programs), "ranks": ranks}

    def device_counts(self) -> list[tuple[str, Mapping[str, object]]]:
        """Return the name and the monotonic counters of each GPU that holds experts."""
        engines = self._gpu_engines_in_use
        return [] if engines is None else engines.counts()

    def timelines(self) -> AbstractContextManager[list[Timeline]]:
        """Return a context that records the work of each GPU that holds experts, or else of the CPU, and yields their timelines."""
        engines = self._gpu_engines_in_use
        if engines is not None:
            return engines.timelines()
        return self._cpu_timeline() if "runtime" in vars(self) else nullcontext([])

    @contextmanager
    def _cpu_timeline(self) -> Iterator[list[Timeline]]:
        from moegraft.operators.step_program.recording import timed_kernels
        from moegraft.operators.timeline import Timeline

        timeline, steps = Timeline("CPU"), self._step_programs
        try:
            if steps is not None:
                steps.timeline = timeline
            with timed_kernels(self.runtime, timeline):
                yield [timeline]
        finally:
            if steps is not None:
                steps.timeline = None

    def close(self) -> None:
        """End captured steps and transfers and free the GPUs' slots; the model cannot compute afterwards."""
        for steps in (self._captured_steps, self._step_programs):
            if steps is not None:
                steps.release()
        engines = self._gpu_engines_in_use
        if engines is not None:
            engines.close()
        if self.expert_group is not None:
            self.expert_group.close()

    @property
    def _gpu_engines_in_use(self) -> ModelEngines | None:
        return self.gpu_engines if "gpu_engines" in vars(self) else None
