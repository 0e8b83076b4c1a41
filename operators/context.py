"""The state that the operators of one model share: the machine, the CPU runtime, drafting, sparsity and GPUs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from moegraft.cpu_backend import Runtime
from moegraft.operators.cache_form import CacheForm
from moegraft.operators.draft import DraftSwitch
from moegraft.operators.machine import Machine

# Members that only some models need are imported on first use: a model on the CPU does not wait for the GPU engine, and runs where
# Triton is not installed.
if TYPE_CHECKING:
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
        draft_switch: how many experts run while a draft is computed.
        cache_form: the form that the rules give the key-value cache.
    """

    machine: Machine
    dtype: torch.dtype
    threads: int = 0
    draft_switch: DraftSwitch = field(default_factory=DraftSwitch, init=False)
    cache_form: CacheForm = field(default_factory=CacheForm, init=False)
    _decode_steps: DecodeSteps | StepPrograms | None = field(default=None, init=False, repr=False)
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

    def warn_once(self, logger: logging.Logger, message: str) -> None:
        """Log a warning that holds for many layers of this model once."""
        if message not in self._warnings:
            self._warnings.add(message)
            logger.warning(message)

    @property
    def decode_steps(self) -> DecodeSteps | StepPrograms | None:
        """What replays the model's decode steps; None where nothing does. To be read when all operators are built."""
        engines = self._gpu_engines_in_use
        if self._decode_steps is not None:
            return self._decode_steps
        if engines is not None and engines.captures:
            from moegraft.operators.offload.decode_steps import DecodeSteps

            self._decode_steps = DecodeSteps(engines)
        elif engines is None and "runtime" in vars(self):
            from moegraft.operators.step_program.steps import StepPrograms

            self._decode_steps = StepPrograms(self.runtime, self.draft_switch)
        return self._decode_steps

    def statistics(self) -> dict[str, object]:
        """Return the shared statistics: `sparsity` of each target that rules give, and `devices` for each GPU that holds experts."""
        sparsity = self.sparse_layers.statistics() if "sparse_layers" in vars(self) else []
        engines = self._gpu_engines_in_use
        devices: Mapping[str, object] = {} if engines is None else engines.statistics()
        return {"sparsity": sparsity, "devices": dict(devices)}

    def device_counts(self) -> list[tuple[str, Mapping[str, object]]]:
        """Return the name and the monotonic counters of each GPU that holds experts."""
        engines = self._gpu_engines_in_use
        return [] if engines is None else engines.counts()

    def timelines(self) -> AbstractContextManager[list[Timeline]]:
        """Return a context that records the work of each GPU that holds experts and yields one timeline per GPU."""
        engines = self._gpu_engines_in_use
        return nullcontext([]) if engines is None else engines.timelines()

    def close(self) -> None:
        """End captured steps and transfers and free the GPUs' slots; the model cannot compute afterwards."""
        if self._decode_steps is not None:
            self._decode_steps.release()
        engines = self._gpu_engines_in_use
        if engines is not None:
            engines.close()

    @property
    def _gpu_engines_in_use(self) -> ModelEngines | None:
        return self.gpu_engines if "gpu_engines" in vars(self) else None
