"""Fit two recordings of the same step: every number in them becomes a linear function of the position.

Where a model pools tokens in groups, steps differ by the position within a group. Such steps have a program for each of these positions,
and "position" then stands for the number of groups before it (`period` tokens each).

Storages are compared as well: memory that a step allocates is a temporary, the inputs and the cache are known by name, parameters have
one address, and whatever else differs is the result of a computation in Python that a replay would miss.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from transformers import PretrainedConfig

from moegraft.operators.decode.cache import ForeignCacheError, StateName, storage_bytes
from moegraft.operators.decode.native.record import Call, Memory, NotRecordableError, Recording

MAX_GROUP = 16  # tokens, with a program for each position in the group
_LENGTH = re.compile("window|chunk|block|position|context|length|seq|topk|top_k|stride|factor|budget")  # in names of a config
_CHOICES = re.compile("topk|top_k|budget")  # in names of a config: how many tokens are looked at
_GROUP = re.compile("compress|pool|block_size")  # in names of a config: how many tokens a model pools


@dataclass(frozen=True, slots=True)
class Affine:
    """base + slope * position + capacity * (tokens that a cache buffer has room for)."""

    base: int
    slope: int = 0
    capacity: int = 0

    @property
    def fixed(self) -> bool:
        return self.slope == self.capacity == 0

    def at(self, position: int, capacity: int = 0) -> int:
        return self.base + self.slope * position + self.capacity * capacity

    def plus(self, other: Affine) -> Affine:
        return Affine(self.base + other.base, self.slope + other.slope, self.capacity + other.capacity)

    def times(self, factor: int) -> Affine:
        return Affine(self.base * factor, self.slope * factor, self.capacity * factor)

    def as_tuple(self) -> tuple[int, int, int]:
        return self.base, self.slope, self.capacity


_ZERO, _ONE, _ROOM = Affine(0), Affine(1), Affine(0, 0, 1)


def product(one: Affine, other: Affine, what: str = "a size") -> Affine:
    """Raise NotRecordableError where both depend on the position or on the room of a buffer; `what`: the product, for its message."""
    if one.fixed:
        return other.times(one.base)
    if other.fixed:
        return one.times(other.base)
    raise NotRecordableError(f"{what} is no linear function of the position")


def contiguous_strides(sizes: Sequence[Affine]) -> tuple[Affine, ...]:
    """Return the strides of a tensor without gaps; raise NotRecordableError as `product` does."""
    strides, stride = [], _ONE
    for size in reversed(sizes):
        strides.append(stride)
        stride = product(size, stride)
    return tuple(reversed(strides))


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

    @property
    def is_contiguous(self) -> bool:
        parts = zip(self.sizes, self.strides, contiguous_strides(self.sizes), strict=True)
        return all(size == _ONE or own == stride for size, own, stride in parts)

    def permuted(self, order: Sequence[int]) -> Place:
        return replace(self, sizes=tuple(self.sizes[dim] for dim in order), strides=tuple(self.strides[dim] for dim in order))

    def with_last(self, dim: int) -> Place:
        """Return the place with dimension `dim` moved to the end."""
        return self.permuted([other for other in range(self.dims) if other != dim % self.dims] + [dim % self.dims])

    def unsqueezed(self, dim: int) -> Place:
        """Return the place with a dimension of size 1 inserted before dimension `dim`, or at the end for `dims`."""
        sizes, strides = ((*numbers[:dim], new, *numbers[dim:]) for numbers, new in ((self.sizes, Affine(1)), (self.strides, Affine(1))))
        return replace(self, sizes=sizes, strides=strides)

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
        return replace(self, offset=self.offset.plus(product(self.strides[dim], start, "an offset")), sizes=tuple(sizes))


_constant = lru_cache(1 << 12)(Affine)


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


@dataclass(slots=True)
class FittedStep:
    """What two recorded steps have in common.

    Attributes:
        storage_bytes: of each storage.
        produced: the storages that the step allocates.
        constants: the other storages but those of the inputs and the cache, each with a tensor in it.
        counts: by how much each number of the cache grows.
    """

    calls: list[Call]
    storage_bytes: list[Affine]
    produced: set[int]
    constants: dict[int, torch.Tensor]
    inputs: Mapping[str, Place]
    before: Mapping[StateName, Place]
    after: Mapping[StateName, Place]
    counts: Mapping[StateName, int]
    outputs: Any


def fit(
    one: RecordedStep, other: RecordedStep, sized_by_room: Mapping[StateName, Sequence[Affine]], *, choices_grow: bool = False
) -> FittedStep:
    """Return the step of which both are instances.

    Args:
        sized_by_room: of the cache, from `CacheBuffers`.
        choices_grow: a topk that chooses all values, one more in each step, reaches its limit at a border that the caller knows.

    Raises:
        NotRecordableError: they differ in more than numbers, or in numbers that do not follow the position.
    """
    for step in (one, other):
        if step.recording.obstacle is not None:
            raise NotRecordableError(step.recording.obstacle)
    fitted = _Fit(one, other, sized_by_room)
    first, second = one.recording, other.recording
    targets = [[call.target for call in recording.calls] for recording in (first, second)]
    if targets[0] != targets[1]:
        places = [index for index, pair in enumerate(zip(*targets, strict=False)) if pair[0] != pair[1]]
        what = targets[1][places[0]] if places else f"{len(targets[1])} calls after {len(targets[0])}"
        raise NotRecordableError(f"two steps differ in what they compute ({what})")
    if len(first.storages) != len(second.storages):
        raise NotRecordableError("two steps differ in the memory that they use")
    calls = []
    for a, b in zip(first.calls, second.calls, strict=True):
        if len(a.leaves) != len(b.leaves) or a.form != b.form or len(a.outputs) != len(b.outputs):
            raise NotRecordableError(f"two steps call {a.target} with other arguments")
        leaves = [fitted.leaf(x, y, a.target) for x, y in zip(a.leaves, b.leaves, strict=True)]
        outputs = [fitted.place(x, y) for x, y in zip(a.outputs, b.outputs, strict=True)]
        grows = b.name == "topk.default" and isinstance(leaves[1], Affine)
        if grows and not (choices_grow and leaves[1] in leaves[0].sizes):
            # min(limit, tokens), as in sparse attention: the limit is in neither recording.
            raise NotRecordableError("topk chooses more values from step to step, up to a limit that is not known")
        calls.append(Call(b.target, leaves, b.form, outputs))
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
    pairs = enumerate(zip(first.storages, second.storages, strict=True))
    sizes = [Affine(y.nbytes) if number in fitted.by_room else fitted.number(x.nbytes, y.nbytes) for number, (x, y) in pairs]
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
    """
    Attributes:
        by_room: by storage, the places of the cache's tensors whose sizes follow its room.
    """

    def __init__(self, one: RecordedStep, other: RecordedStep, sized_by_room: Mapping[StateName, Sequence[Affine]]) -> None:
        self._at = other.position
        self._apart = other.position - one.position
        self.by_room: dict[int, Place] = {}
        for name, sizes in sized_by_room.items():
            memory = other.before[name]
            self.by_room[memory.storage] = Place(memory.storage, memory.dtype, _ZERO, tuple(sizes), contiguous_strides(sizes))
        assert self._apart, "two steps at one position"

    def number(self, one: int, other: int) -> Affine:
        if one == other:
            return _constant(other)
        slope, rest = divmod(other - one, self._apart)
        if rest:
            raise NotRecordableError("a number of the step does not follow the position")
        return Affine(other - slope * self._at, slope)

    def place(self, one: Memory, other: Memory) -> Place:
        if one.storage != other.storage or one.dtype != other.dtype or len(one.sizes) != len(other.sizes):
            raise NotRecordableError("two steps differ in the memory that they use")
        if other.storage in self.by_room:
            return self.by_room[other.storage]
        sizes = tuple(map(self.number, one.sizes, other.sizes))
        strides = tuple(map(self.number, one.strides, other.strides))
        return Place(other.storage, other.dtype, self.number(one.offset, other.offset), sizes, strides)

    def places(self, one: Mapping[Any, Memory], other: Mapping[Any, Memory]) -> dict[Any, Place]:
        if one.keys() != other.keys():
            raise NotRecordableError("two steps differ in the tensors of their cache")
        return {key: self.place(one[key], memory) for key, memory in other.items()}

    def leaf(self, one: Any, other: Any, name: object) -> Any:
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


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """A tensor of the cache that is kept in a buffer with room for more tokens: steps append to it, at least those of other kinds.

    Attributes:
        names: in the cache; several where it holds one tensor twice.
        before, after: the storages of the tensor before the step and with the new tokens; the first is its buffer. They are one where a
            step appends nothing.
        dim: along which it grows.
        shape: of the tensor with the new tokens.
        rows: before the step.
        added: the rows that the step appends.
        drained: whether the tensor is empty after the step, which has used its rows.
        first: the new rows, where the tensor was empty and nothing is appended to it by a call; else None.
        start_slope: by how many rows the tensor's start moves with the position: 1 for a window that is full, or the tokens of a group
            where positions count groups; else 0.
    """

    names: tuple[StateName, ...]
    before: int
    after: int
    dim: int
    shape: tuple[Affine, ...]
    dtype: torch.dtype
    rows: Affine
    added: int
    start_slope: int = 0
    drained: bool = False
    first: Place | None = None

    @property
    def name(self) -> StateName:
        return self.names[0]

    def require_form(self, tensor: torch.Tensor, length: int) -> None:
        """Raise ForeignCacheError where a cache's `tensor` has another form than the recorded one would have with `length` tokens."""
        sizes = [size.base for dim, size in enumerate(self.shape) if dim != self.dim]
        if (
            tensor.dtype != self.dtype
            or tensor.dim() != len(self.shape)
            or [*tensor.shape[: self.dim], *tensor.shape[self.dim + 1 :]] != sizes
            or tensor.shape[self.dim] != length
        ):
            raise ForeignCacheError(f"a cache has its {self.name[1]} in another form than the cache of the recording")

    def strides(self) -> tuple[Affine, ...]:
        """Return the strides of the buffer: contiguous, with its room in dimension `dim`."""
        before, behind = self.shape[: self.dim], self.shape[self.dim + 1 :]
        if any(size.slope for size in (*before, *behind)):
            raise NotRecordableError("a cache grows in two dimensions")
        return contiguous_strides((*before, _ROOM, *behind))

    def place(self, start: Affine, sizes: Sequence[Affine]) -> Place:
        """Return the place of new tokens, of `sizes`, behind `start` tokens."""
        strides = self.strides()
        moved = Affine(start.base, start.slope + self.start_slope)
        return Place(self.before, self.dtype, _row_offset(strides[self.dim], moved), tuple(sizes), strides)

    def translated(self, place: Place) -> Place:
        """Return where a view of the tensor with its new tokens is in the buffer."""
        if _ZERO in place.sizes:  # as of a model without a rotary part
            return Place(self.before, place.dtype, _ZERO, place.sizes, (_ZERO,) * place.dims)
        packed, own = contiguous_strides(self.shape), self.strides()
        rest, offset = place.offset, Affine(0, self.start_slope).times(own[self.dim].base)
        if own[self.dim].capacity or own[self.dim].slope:
            raise NotRecordableError("a cache grows along a dimension with a stride that is not constant")
        # The offset is that of a row, or of heads: the largest stride first.
        for dim, one in enumerate(packed):
            if rest == _ZERO:
                break
            if one.slope > 0:  # all of the tensor's tokens, as from one sequence of a batch to the next
                whole = min(rest.slope // one.slope, rest.base // one.base) if one.base > 0 else rest.slope // one.slope
                if whole > 0 and dim != self.dim:
                    offset = offset.plus(_row_offset(own[dim], Affine(whole)))
                    rest = rest.plus(one.times(-whole))
                continue
            if one.fixed and one.base and rest.base % one.base == 0 and rest.slope % one.base == 0:
                count = Affine(rest.base // one.base, rest.slope // one.base)
                if dim != self.dim and (count.slope or not count.base >= 0):
                    continue
                offset = offset.plus(_row_offset(own[dim], count))
                rest = _ZERO
        if rest != _ZERO:
            raise NotRecordableError("a view of the cache begins in the middle of it")
        strides = []
        for size, stride in zip(place.sizes, place.strides, strict=True):
            if size == _ONE or stride == _ZERO:
                strides.append(_ONE if stride == _ONE else _ZERO)
                continue
            known = [
                own[dim]
                for dim, one in enumerate(packed)
                if one == stride and self.shape[dim] != _ONE and (size.slope, size.base) <= (self.shape[dim].slope, self.shape[dim].base)
            ]
            if not known:
                raise NotRecordableError("a view of the cache joins its dimensions")
            strides.append(known[0])
        return Place(self.before, place.dtype, offset, place.sizes, tuple(strides))


def _row_offset(stride: Affine, rows: Affine) -> Affine:
    if stride.capacity and (rows.slope or rows.capacity):
        raise NotRecordableError("a cache grows along a dimension with a stride that is not constant")
    if stride.capacity:
        return Affine(0, 0, stride.capacity * rows.base)
    return rows.times(stride.base)


def grown_tensors(fitted: FittedStep, period: int) -> list[CacheTensor]:
    """Return the tensors of the cache that steps append to; a position of the step is one of `period` tokens.

    Raises:
        NotRecordableError: one changes in another way.
    """
    appended = {call.outputs[0].storage: call for call in fitted.calls if call.name == "cat.default" and call.outputs}
    same: dict[tuple[Place, Place], list[StateName]] = {}
    for name, after in fitted.after.items():
        same.setdefault((fitted.before[name], after), []).append(name)
    found = []
    for (before, after), names in same.items():
        name, held = names[0], tuple(names)
        call = appended.get(after.storage)
        growing = [dim for dim, size in enumerate(before.sizes) if size.slope]
        if after == before and len(growing) == 1:
            dim = growing[0]
            found.append(CacheTensor(held, before.storage, before.storage, dim, before.sizes, before.dtype, before.sizes[dim], 0))
            continue
        empty = [dim for dim, size in enumerate(before.sizes) if size == _ZERO and after.sizes[dim] != _ZERO]
        if call is None and after.storage in fitted.produced and len(empty) == 1:
            dim = empty[0]
            added = after.sizes[dim].base
            found.append(CacheTensor(held, before.storage, -1, dim, after.sizes, before.dtype, _ZERO, added, first=after))
            continue
        if after.storage == before.storage or call is None:
            continue
        pieces = call.leaves[:-1] if isinstance(call.leaves[-1], int) else call.leaves
        dim = call.leaves[-1] if isinstance(call.leaves[-1], int) else 0
        out = call.outputs[0]
        dim %= out.dims
        if len(pieces) != 2 or pieces[0].storage != before.storage:
            raise NotRecordableError(f"a tensor of the cache ({name[1]}) is not appended to")
        row = out.strides[dim]
        if row.slope or (after.offset.slope and not row.base):
            raise NotRecordableError(f"a tensor of the cache ({name[1]}) grows in another way than by tokens")
        dropped = after.offset
        drained = after.sizes[dim] == _ZERO
        if dropped.slope or dropped.base % row.base:
            raise NotRecordableError(f"a tensor of the cache ({name[1]}) drops another number of tokens in each step")
        tokens, gone = pieces[1].sizes[dim].base, dropped.base // row.base
        if gone not in (0, tokens) and not drained:
            raise NotRecordableError("a window is about to be full")
        moved = 0 if drained else period * int(gone > 0)
        rows = before.sizes[dim]
        found.append(CacheTensor(held, before.storage, after.storage, dim, out.sizes, before.dtype, rows, tokens, moved, drained))
    return found


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The positions at which a model may begin to compute in another way.

    A program is only used between two of them; numbers that are linear on one side need not be so on the other.

    Attributes:
        lengths: the config's windows, chunks, lengths and the like.
        choices: those of them from which on sparse attention leaves tokens out.
        groups: sizes of groups of tokens that are pooled, with a boundary after each group.
        period: a number of tokens after which steps are alike again; its groups have a program for each position in them.
    """

    lengths: Sequence[int]
    choices: Sequence[int]
    groups: Sequence[int]
    period: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> Boundaries:
        """Return the boundaries that the numbers of a config suggest."""

        def numbers(values: Mapping[str, Any], names: re.Pattern[str], inner: bool = False) -> Iterator[int]:
            for name, value in values.items():
                named = inner or names.search(str(name)) is not None
                if isinstance(value, Mapping):
                    yield from numbers(value, names, named and names is _GROUP)
                elif type(value) is int and named:
                    yield value

        settings = config.get_text_config().to_dict()
        groups = sorted({value for value in numbers(settings, _GROUP) if value > 1})

        def lengths(names: re.Pattern[str]) -> list[int]:
            found = {value for value in numbers(settings, names) if value > 1}
            return sorted(found | {value * group for value in found for group in groups})  # a length may count groups

        period = 1
        for group in groups:
            if math.lcm(period, group) <= MAX_GROUP:
                period = math.lcm(period, group)
        return cls(lengths(_LENGTH), lengths(_CHOICES), [group for group in groups if period % group], period)

    def regime(self, position: int, total: int) -> object | None:
        """Return what a step from `position` to `total` tokens depends on; None at a boundary itself, where models differ by a token."""
        place = bisect.bisect(self.lengths, total)
        if (place and self.lengths[place - 1] == total) or (place < len(self.lengths) and self.lengths[place] == total + 1):
            return None
        if any((position - 1) // group != (total + 1) // group for group in self.groups):
            return None
        return place, *(total // group for group in self.groups), position % self.period
