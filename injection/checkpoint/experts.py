"""One experts module's weights as its checkpoint holds them: each piece read straight from the mapped file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist

from moegraft.injection.checkpoint.convert import convert
from moegraft.injection.checkpoint.files import SUPPORTED, LazyTensor, fingerprint
from moegraft.injection.checkpoint.keymap import Target
from moegraft.operators.errors import CheckpointError
from moegraft.operators.experts.layout import ExpertsLayout
from moegraft.operators.weights import Part, widest


class _Store(Protocol):
    """How one parameter is stored; `piece` cuts one expert's part out of it."""

    def piece(self, part: Part, expert: int) -> torch.Tensor: ...

    def origin(self, part: Part, expert: int) -> str: ...


class _Fused:
    """The parameter is stored as it is: `(E, ...)`; one expert's slice is read at a time."""

    def __init__(self, layout: ExpertsLayout, tensor: LazyTensor, expected: tuple[int, ...]) -> None:
        if tensor.shape != expected:
            raise CheckpointError(f"{tensor.origin}: shape {tensor.shape} where the model has {expected}")
        self._layout = layout
        self._tensor = tensor
        self._held: tuple[int, torch.Tensor] | None = None

    def piece(self, part: Part, expert: int) -> torch.Tensor:
        # Gate and up share a slice: it is read once and kept for the second.
        if self._held is None or self._held[0] != expert:
            self._held = (expert, self._tensor[expert])
        return self._layout.cut(part, self._held[1])

    def origin(self, part: Part, expert: int) -> str:
        return f"{self._tensor.origin}[{expert}]"


class _PerExpert:
    """One key an expert and a part, as `experts.N.gate_proj.weight`, or an expert's fused key."""

    def __init__(self, layout: ExpertsLayout, by_part: Mapping[Part, Sequence[LazyTensor]], *, fused: bool) -> None:
        self._layout = layout
        self._by_part = by_part
        self._fused = fused
        if not fused:
            self._check_shapes()

    def _check_shapes(self) -> None:
        for part, tensors in self._by_part.items():
            expected = self._layout.part_shape(part)
            for tensor in tensors:
                if tensor.shape != expected:
                    raise CheckpointError(f"{tensor.origin}: shape {tensor.shape} where the model has {expected}")

    def piece(self, part: Part, expert: int) -> torch.Tensor:
        tensor = self._by_part[part][expert][...]
        return self._layout.cut(part, tensor) if self._fused else tensor

    def origin(self, part: Part, expert: int) -> str:
        return self._by_part[part][expert].origin


class _Converted:
    """A form that only transformers' own converter knows: the whole parameter is made at its first piece."""

    def __init__(self, layout: ExpertsLayout, target: Target, tensors: Mapping[str, LazyTensor], skeleton: PreTrainedModel) -> None:
        self._layout = layout
        self._target = target
        self._tensors = tensors
        self._skeleton = skeleton
        self._whole: torch.Tensor | None = None

    def piece(self, part: Part, expert: int) -> torch.Tensor:
        if self._whole is None:
            self._whole = convert(self._target, self._tensors, self._skeleton)
        return self._layout.cut(part, self._whole[expert])

    def origin(self, part: Part, expert: int) -> str:
        return self._tensors[self._target.all_keys[0]].origin


class CheckpointExperts:
    """A `WeightSource` over one experts module's part of a checkpoint.

    Raises:
        CheckpointError: when made, if a parameter, an expert or a part is missing, doubled, or of the wrong shape or dtype.
    """

    def __init__(
        self,
        module: str,
        layout: ExpertsLayout,
        targets: Mapping[str, Target],
        tensors: Mapping[str, LazyTensor],
        skeleton: PreTrainedModel,
    ) -> None:
        self._layout = layout
        self._stores: dict[str, _Store] = {}
        for name in dict.fromkeys(layout.parameter(part) for part in layout.parts()):
            target = targets.get(name)
            if target is None:
                raise CheckpointError(f"{_folder(tensors)}: nothing in this checkpoint feeds {module}.{name}; a shard or keys are missing")
            _check_dtypes([tensors[key] for key in target.all_keys])
            expected = tuple(skeleton.get_parameter(f"{module}.{name}").shape)
            self._stores[name] = _store(layout, name, target, tensors, skeleton, expected)
        self._all_tensors = [tensors[key] for target in targets.values() for key in target.all_keys]
        matrices = [tensors[key] for name, target in targets.items() if not name.endswith("_bias") for key in target.all_keys]
        self._dtype = widest(tensor.dtype for tensor in matrices if tensor.dtype is not None)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def fingerprint(self) -> str | None:
        return fingerprint(self._all_tensors)

    def parts(self) -> Sequence[Part]:
        return self._layout.parts()

    def read(self, part: Part, expert: int = 0) -> torch.Tensor:
        return self._stores[self._layout.parameter(part)].piece(part, expert)

    def origin(self, part: Part, expert: int = 0) -> str:
        return self._stores[self._layout.parameter(part)].origin(part, expert)


def _folder(tensors: Mapping[str, LazyTensor]) -> str:
    return str(next(iter(tensors.values())).file.parent)


def _check_dtypes(tensors: Sequence[LazyTensor]) -> None:
    for tensor in tensors:
        if tensor.dtype is None:
            raise CheckpointError(f"{tensor.origin}: dtype {tensor.stored_dtype} cannot be an expert's weight; {SUPPORTED}")


def _store(
    layout: ExpertsLayout,
    name: str,
    target: Target,
    tensors: Mapping[str, LazyTensor],
    skeleton: PreTrainedModel,
    expected: tuple[int, ...],
) -> _Store:
    if target.converter is None:
        return _Fused(layout, tensors[target.all_keys[0]], expected)
    operations = target.converter.operations
    stacked = isinstance(operations[0], MergeModulelist)
    joined = len(operations) == 2 and isinstance(operations[1], Concatenate)
    plain = not (layout.transposed or layout.interleaved) and len(target.converter.target_patterns) == 1
    if not (stacked and (joined or len(operations) == 1) and plain):
        return _Converted(layout, target, tensors, skeleton)
    parts = [part for part in layout.parts() if layout.parameter(part) == name]
    patterns = [pattern for pattern in target.converter.source_patterns if pattern in target.keys]
    columns = [_by_expert(layout, pattern, [tensors[key] for key in target.keys[pattern]]) for pattern in patterns]
    fused = not joined and len(parts) > 1
    if not fused and len(columns) != len(parts):
        lacking = [pattern for pattern in target.converter.source_patterns if pattern not in target.keys]
        raise CheckpointError(f"{_folder(tensors)}: {target.name}: no key matches {', '.join(lacking)}; a shard or keys are missing")
    by_part = {part: columns[0 if fused else position] for position, part in enumerate(parts)}
    return _PerExpert(layout, by_part, fused=fused)


def _by_expert(layout: ExpertsLayout, pattern: str, tensors: Sequence[LazyTensor]) -> list[LazyTensor]:
    """The tensors in the order of the expert number in their keys, each expert exactly once."""
    number = re.compile(r"experts\.(\d+)\.")
    found: dict[int, LazyTensor] = {}
    for tensor in tensors:
        match = number.search(tensor.key)
        if match is None:
            raise CheckpointError(f"{tensor.origin}: no expert number in this key")
        found[int(match[1])] = tensor
    extra = [expert for expert in sorted(found) if expert >= layout.num_experts]
    if extra:
        raise CheckpointError(f"{found[extra[0]].origin}: expert {extra[0]}, but the model has {layout.num_experts} experts (0-based)")
    lacking = [expert for expert in range(layout.num_experts) if expert not in found]
    if lacking:
        example = number.sub(f"experts.{lacking[0]}.", tensors[0].key)
        raise CheckpointError(f"{tensors[0].file}: {example} is missing ({len(lacking)} of {layout.num_experts} experts lack it)")
    return [found[expert] for expert in range(layout.num_experts)]
