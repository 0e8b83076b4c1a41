"""The sets of layers of one model that share GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moegraft.cpu_backend import Runtime
from moegraft.operators.cache_form import CacheForm
from moegraft.operators.experts.engine.decode_steps import DecodeSteps
from moegraft.operators.experts.engine.model_experts import ModelExperts
from moegraft.operators.experts.engine.options import GpuOptions


class GpuGroups:
    """One a model, `context.shared(GpuGroups, GpuGroups)`."""

    def __init__(self) -> None:
        self._groups: dict[GpuOptions, ModelExperts] = {}
        self._steps: DecodeSteps | None = None

    def group(self, options: GpuOptions, runtime: Runtime, cache_form: CacheForm) -> ModelExperts:
        """The layers whose rules give them these options."""
        found = self._groups.get(options)
        if found is None:
            found = self._groups[options] = ModelExperts(options, runtime, cache_form)
        return found

    def __iter__(self) -> Iterator[ModelExperts]:
        return iter(self._groups.values())

    @property
    def captures(self) -> bool:
        """Whether a rule lets whole decode steps be captured."""
        return any(options.captures for options in self._groups)

    @property
    def decode_steps(self) -> DecodeSteps:
        """What runs the model's decode steps; asked for when all groups are there."""
        if self._steps is None:
            self._steps = DecodeSteps([*self])
        return self._steps

    def statistics(self) -> Mapping[str, object]:
        """What each device did, by its name."""
        return {name: found for group in self for name, found in group.statistics().items()}

    def close(self) -> None:
        """Ends transfers and frees the slots; the model computes no more."""
        if self._steps is not None:
            self._steps.release()
        for group in self:
            group.close()
