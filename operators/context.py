"""The state that the operators of one model share: the CPU runtime, drafting, sparsity and GPUs."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from moegraft.cpu_backend import Runtime
from moegraft.operators.cpu import open_runtime
from moegraft.operators.draft import DraftSwitch

# Members that only some models need are imported on first use: a model on the CPU does not wait for the GPU engine, and runs where
# Triton is not installed.
if TYPE_CHECKING:
    from moegraft.operators.decode.replay import StepReplay
    from moegraft.operators.expert_group import ExpertGroup
    from moegraft.operators.offload.frames import FramedLayers
    from moegraft.operators.offload.model_experts import ModelEngines
    from moegraft.operators.sparsity import SparseLayers


@dataclass(eq=False)
class InjectionContext:
    """The state that one model's operators share; two models never share it. Members are created on first use.

    A context is hashable and can be weakly referenced, so that an operator of another package can keep shared state of its own by context.

    Attributes:
        dtype: the dtype of activations and of modules that are not replaced.
        threads: CPU threads of the operators; 0 for one per physical core.
        expert_group: the processes that hold the experts; None where this one holds all.
        draft_switch: how many experts run while a draft is computed.
        replay: what replays decode steps, as native programs or captured graphs; None where nothing does.
    """

    dtype: torch.dtype
    threads: int = 0
    expert_group: ExpertGroup | None = None
    draft_switch: DraftSwitch = field(default_factory=DraftSwitch, init=False)
    replay: StepReplay | None = field(default=None, init=False, repr=False)
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
    def framed_layers(self) -> FramedLayers:
        """The layers whose experts stay in files, and share a budget of memory."""
        from moegraft.operators.offload.frames import FramedLayers

        return FramedLayers()

    @cached_property
    def gpu_engines(self) -> ModelEngines:
        """The engines of the layers whose experts run on the CPU and on GPUs."""
        from moegraft.operators.offload.model_experts import ModelEngines

        return ModelEngines(self.runtime)

    def warn_once(self, logger: logging.Logger, message: str) -> None:
        """Log a warning that holds for many layers of this model once."""
        if message not in self._warnings:
            self._warnings.add(message)
            logger.warning(message)

    @property
    def gpu_engines_in_use(self) -> ModelEngines | None:
        """`gpu_engines`, if an operator uses GPUs; None, without creating them, where none does."""
        return vars(self).get("gpu_engines")
