"""Fit two recordings of the same step: every number in them becomes a linear function of the position.

Where a model pools tokens in groups, steps differ by the position within a group. Such steps have a program for each of these positions,
and "position" then stands for the number of groups before it (`period` tokens each).

Storages are compared as well: memory that a step allocates is a temporary, the inputs and the cache are known by name, parameters have
one address, and whatever else differs is the result of a computation in Python that a replay would miss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache

from moegraft.operators.decode.native.record import Memory, NotRecordableError, Recording


@dataclass(frozen=True, slots=True)
class Affine:
    """base + slope * position + capacity * (tokens that a cache buffer has room for)."""

    base: int
    slope: int = 0
    capacity: int = 0

    def at(self, position: int, capacity: int = 0) -> int:
        return self.base + self.slope * position + self.capacity * capacity

    def plus(self, other: Affine) -> Affine:
        return Affine(self.base + other.base, self.slope + other.slope, self.capacity + other.capacity)

    def times(self, factor: int) -> Affine:
        return Affine(self.base * factor, self.slope * factor, self.capacity * factor)

    def as_tuple(self) -> tuple[int, int, int]:
        return self.base, self.slope, self.capacity


def product(one: Affine, other: Affine) -> Affine:
    """
    Raises:
        NotRecordableError: both depend on the position or on the room of a buffer.
    """
    if one.slope == one.capacity == 0:
        return other.times(one.base)
    if other.slope == other.capacity == 0:
        return one.times(other.base)
    raise NotRecordableError("a size is no linear function of the position")


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of a fitted step, as `Memory` with linear numbers."""

    storage: int
    dtype: torch.dtype
    offset: Affine
    sizes: tuple[Affine, ...]
    strides: tuple[Affine, ...]

    @property
    def dims(self) -> int:
        return len(self.sizes)

    def permuted(self, order: Sequence[int]) -> Place:
        return replace(self, sizes=tuple(self.sizes[dim] for dim in order), strides=tuple(self.strides[dim] for dim in order))

    def with_last(self, dim: int) -> Place:
        """Return the place with dimension `dim` moved to the end."""
        return self.permuted([other for other in range(self.dims) if other != dim % self.dims] + [dim % self.dims])

    def expanded(self, sizes: Sequence[Affine]) -> Place:
        """Return the place broadcast to `sizes`."""
        missing = len(sizes) - self.dims
        none = Affine(0)
        strides = [none] * missing
        for own, stride, wanted in zip(self.sizes, self.strides, sizes[missing:], strict=True):
            strides.append(none if own == Affine(1) and wanted != own else stride)
        return replace(self, sizes=tuple(sizes), strides=tuple(strides))

    def sliced(self, dim: int, start: Affine, size: Affine) -> Place:
        """Return a part of dimension `dim`, whose stride is constant in the position if `start` is not."""
        dim %= self.dims
        sizes = [*self.sizes[:dim], size, *self.sizes[dim + 1 :]]
        return replace(self, offset=self.offset.plus(_product(self.strides[dim], start)), sizes=tuple(sizes))


def _product(one: Affine, other: Affine) -> Affine:
    if one == Affine(0) or other == Affine(0):
        return Affine(0)
    if other.slope == other.capacity == 0:
        return one.times(other.base)
    if one.slope == one.capacity == 0:
        return other.times(one.base)
    raise NotRecordableError("an offset is no linear function of the position")


# Of a tensor of a cache: the layer's number, or -1 for the cache itself, then the attribute and the key within it.
StateName = tuple[Any, ...]


def holder(cache: Cache, name: StateName) -> dict[Any, Any] | list[Any]:
    """Return what holds the tensor or number `name` of a cache, which has the key `name[-1]` in it."""
    held = vars(cache.layers[name[0]] if name[0] >= 0 else cache)
    return held if len(name) == 2 else held[name[1]]


def _holders(cache: Cache) -> Iterator[tuple[int, dict[str, Any]]]:
    yield -1, vars(cache)
    yield from ((number, vars(layer)) for number, layer in enumerate(cache.layers))


def cache_tensors(cache: Cache) -> Iterator[tuple[StateName, torch.Tensor]]:
    """Yield the tensors that a cache and its layers hold, with their names."""
    for number, attributes in _holders(cache):
        for attribute, value in attributes.items():
            if attribute.startswith("_"):  # constants such as the size of a window
                continue
            if isinstance(value, torch.Tensor):
                yield (number, attribute), value
            elif isinstance(value, dict | list):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                for key, inner in items:
                    if isinstance(inner, torch.Tensor):
                        yield (number, attribute, key), inner


def cache_counts(cache: Cache) -> dict[StateName, int]:
    """Return the numbers and flags that a cache and its layers hold, by name."""
    found: dict[StateName, int] = {}
    for number, attributes in _holders(cache):
        for attribute, value in attributes.items():
            if isinstance(value, int):
                found[number, attribute] = value
            elif isinstance(value, dict | list):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                found.update({(number, attribute, key): inner for key, inner in items if isinstance(inner, int)})
    return found


@dataclass(slots=True)
class RecordedStep:
    """One recorded forward pass with its inputs and its effect on the cache; `position` counts groups where there are any."""

    position: int
    recording: Recording
    inputs: Mapping[str, Memory]
    before: Mapping[StateName, Memory]
    after: Mapping[StateName, Memory]
    counts: Mapping[StateName, tuple[int, int]]  # before and after
    outputs: Any  # the model's, with Memory in place of tensors


@dataclass(frozen=True, slots=True)
class FittedCall:
    target: Any
    leaves: Sequence[Any]  # Place for tensors, Affine for integers that depend on the position
    form: Any
    outputs: Sequence[Place]

    @property
    def name(self) -> str:
        return self.target if isinstance(self.target, str) else str(self.target).removeprefix("aten.")


@dataclass(slots=True)
class FittedStep:
    """What two recorded steps have in common.

    Attributes:
        storage_bytes: of each storage.
        produced: the storages that the step allocates.
        constants: the other storages but those of the inputs and the cache, each with a tensor in it.
        counts: by how much each number of the cache grows.
    """

    calls: list[FittedCall]
    storage_bytes: list[Affine]
    produced: set[int]
    constants: dict[int, torch.Tensor]
    inputs: Mapping[str, Place]
    before: Mapping[StateName, Place]
    after: Mapping[StateName, Place]
    counts: Mapping[StateName, int]
    outputs: Any


def fit(one: RecordedStep, other: RecordedStep, *, choices_grow: bool = False) -> FittedStep:
    """Return the step of which both are instances.

    `choices_grow`: a topk that chooses all values, one more in each step, reaches its limit at a border that the caller knows.

    Raises:
        NotRecordableError: they differ in more than numbers, or in numbers that do not follow the position.
    """
    for step in (one, other):
        if step.recording.obstacle is not None:
            raise NotRecordableError(step.recording.obstacle)
    fitted = _Fit(one, other)
    first, second = one.recording, other.recording
    names = [[call.name for call in recording.calls] for recording in (first, second)]
    if names[0] != names[1]:
        places = [index for index, pair in enumerate(zip(*names, strict=False)) if pair[0] != pair[1]]
        what = names[1][places[0]] if places else f"{len(names[1])} calls after {len(names[0])}"
        raise NotRecordableError(f"two steps differ in what they compute ({what})")
    if len(first.storages) != len(second.storages):
        raise NotRecordableError("two steps differ in the memory that they use")
    calls = []
    for a, b in zip(first.calls, second.calls, strict=True):
        if len(a.leaves) != len(b.leaves) or a.form != b.form or len(a.outputs) != len(b.outputs):
            raise NotRecordableError(f"two steps call {a.name} with other arguments")
        leaves = [fitted.leaf(x, y, a.name) for x, y in zip(a.leaves, b.leaves, strict=True)]
        outputs = [fitted.place(x, y) for x, y in zip(a.outputs, b.outputs, strict=True)]
        if b.name == "aten.topk.default" and isinstance(leaves[1], Affine):
            # min(limit, tokens), as in sparse attention: the limit is in neither recording.
            if choices_grow and leaves[1] in leaves[0].sizes:
                calls.append(FittedCall(b.target, leaves, b.form, outputs))
                continue
            raise NotRecordableError("topk chooses more values from step to step, up to a limit that is not known")
        calls.append(FittedCall(b.target, leaves, b.form, outputs))
    own = {memory.storage for memory in (*other.inputs.values(), *other.before.values())}
    produced, constants = set(), {}
    for number, (x, y) in enumerate(zip(first.storages, second.storages, strict=True)):
        if x.produced != y.produced:
            raise NotRecordableError("two steps differ in the memory that they use")
        if y.produced:
            produced.add(number)
            continue
        if number in own:
            continue
        assert x.tensor is not None and y.tensor is not None, "only what a step allocates is freed"
        constants[number] = y.tensor
        same = x.tensor.untyped_storage().data_ptr() == y.tensor.untyped_storage().data_ptr()
        if not same and not (x.nbytes == y.nbytes and torch.equal(storage_bytes(x.tensor), storage_bytes(y.tensor))):
            raise NotRecordableError("a tensor that Python makes differs from step to step")
    counts = {}
    for key, (before, after) in other.counts.items():
        if key not in one.counts or after - before != one.counts[key][1] - one.counts[key][0]:
            raise NotRecordableError("the cache counts in another way from step to step")
        counts[key] = after - before
    sizes = [fitted.number(x.nbytes, y.nbytes) for x, y in zip(first.storages, second.storages, strict=True)]
    return FittedStep(
        calls,
        sizes,
        produced,
        constants,
        fitted.places(one.inputs, other.inputs),
        fitted.places(one.before, other.before),
        fitted.places(one.after, other.after),
        counts,
        fitted.tree(one.outputs, other.outputs),
    )


class _Fit:
    def __init__(self, one: RecordedStep, other: RecordedStep) -> None:
        self._at = other.position
        self._apart = other.position - one.position
        assert self._apart, "two steps at one position"

    def number(self, one: int, other: int) -> Affine:
        slope, rest = divmod(other - one, self._apart)
        if rest:
            raise NotRecordableError("a number of the step does not follow the position")
        return Affine(other - slope * self._at, slope)

    def place(self, one: Memory, other: Memory) -> Place:
        if one.storage != other.storage or one.dtype != other.dtype or len(one.sizes) != len(other.sizes):
            raise NotRecordableError("two steps differ in the memory that they use")
        sizes = tuple(map(self.number, one.sizes, other.sizes))
        strides = tuple(map(self.number, one.strides, other.strides))
        return Place(other.storage, other.dtype, self.number(one.offset, other.offset), sizes, strides)

    def places(self, one: Mapping[Any, Memory], other: Mapping[Any, Memory]) -> dict[Any, Place]:
        if one.keys() != other.keys():
            raise NotRecordableError("two steps differ in the tensors of their cache")
        return {key: self.place(one[key], memory) for key, memory in other.items()}

    def leaf(self, one: Any, other: Any, name: str) -> Any:
        if isinstance(other, Memory) and isinstance(one, Memory):
            return self.place(one, other)
        if type(one) is int and type(other) is int:
            return other if one == other else self.number(one, other)
        if one is other or (type(one) is type(other) and one == other):
            return other
        raise NotRecordableError(f"an argument of {name} differs from step to step")

    def tree(self, one: Any, other: Any) -> Any:
        if isinstance(other, dict):
            if not isinstance(one, dict) or one.keys() != other.keys():
                raise NotRecordableError("two steps return other outputs")
            return {key: self.tree(one[key], value) for key, value in other.items()}
        return self.leaf(one, other, "the outputs")


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as (bytes,) uint8."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
