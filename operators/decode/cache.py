"""The tensors of a key-value cache in buffers with room for more tokens, to which native programs append.

The cache stays transformers' own: its tensors become views of the buffers, and a cache that something else has changed is copied to
buffers again.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moegraft.operators.decode.native.fit import Affine, FittedStep, Place, StateName, holder, product, storage_bytes
from moegraft.operators.decode.native.record import NotRecordableError

ROOM = 256  # tokens by which the buffers of a cache grow at least
_COUNTED = 1  # reference that sys.getrefcount itself holds
_LONG = 1 << 20  # positions, for a cache of states alone
_ZERO, _ONE = Affine(0), Affine(1)


class ForeignCacheError(Exception):
    """A cache's tensors have other forms than those of the cache that was recorded; the program is not for this cache."""


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
        """
        Raises:
            ForeignCacheError: `tensor`, that of a cache at this place, has another type or other sizes than the recorded one would have
                with `length` tokens.
        """
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
        strides, stride = [], _ONE
        for dim in reversed(range(len(self.shape))):
            strides.append(stride)
            stride = Affine(0, 0, stride.base) if dim == self.dim else stride.times(self.shape[dim].base)
            if dim != self.dim and self.shape[dim].slope:
                raise NotRecordableError("a cache grows in two dimensions")
        return tuple(reversed(strides))

    def place(self, start: Affine, sizes: Sequence[Affine]) -> Place:
        """Return the place of new tokens, of `sizes`, behind `start` tokens."""
        strides = self.strides()
        moved = Affine(start.base, start.slope + self.start_slope)
        return Place(self.before, self.dtype, _row_offset(strides[self.dim], moved), tuple(sizes), strides)

    def translated(self, place: Place) -> Place:
        """Return where a view of the tensor with its new tokens is in the buffer."""
        if _ZERO in place.sizes:  # as of a model without a rotary part
            return Place(self.before, place.dtype, _ZERO, place.sizes, (_ZERO,) * place.dims)
        stride, packed = _ONE, []
        for size in reversed(self.shape):
            packed.append(stride)
            stride = product(size, stride)
        packed.reverse()
        own = self.strides()
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
            if one.slope == 0 and one.capacity == 0 and one.base and rest.base % one.base == 0 and rest.slope % one.base == 0:
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
                strides.append(_ZERO if stride == _ZERO else stride if stride in (_ONE,) else _ZERO)
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


class _Rows:
    """A tensor of a cache in a buffer with room for more tokens.

    Attributes:
        bytes: the buffer as (bytes,) uint8.
        view: what the cache holds, `length` tokens from `start`.
        anchor: `start` before the first token, which is constant while the cache only grows: a window that is full (`moves`) moves on with
            each token.
    """

    def __init__(self, buffer: torch.Tensor, length: int, each: CacheTensor, held: int) -> None:
        self.buffer = buffer
        self.bytes = storage_bytes(buffer)
        self.dim, self.moves = each.dim, each.start_slope > 0
        self.start, self.length = 0, length
        self.anchor = -held if self.moves else 0
        self.view = buffer.narrow(self.dim, 0, length)
        self._storage = buffer.untyped_storage()
        self._uses = torch._C._storage_Use_Count(self._storage._cdata)

    def adopt(self, held: torch.Tensor) -> bool:
        """Let `held` be the view if it is a part of it, as a crop returns, and if nothing else sees the tokens outside that part."""
        buffer, dim = self.buffer, self.dim
        start, rest = divmod(int(held.storage_offset()), buffer.stride(dim))
        length = held.shape[dim] if held.dim() == buffer.dim() else -1
        if (
            held.untyped_storage()._cdata != self._storage._cdata
            or held.dtype != buffer.dtype
            or held.stride() != buffer.stride()
            or rest
            or length < 0
            or start + length > self.start + self.length
            or (*held.shape[:dim], *held.shape[dim + 1 :]) != (*buffer.shape[:dim], *buffer.shape[dim + 1 :])
            or torch._C._storage_Use_Count(self._storage._cdata) != self._uses + 1  # another view was kept
            or sys.getrefcount(self.view) != 1 + _COUNTED
        ):
            return False
        self.start, self.length = start, length
        self.view = held  # last: until then this is repeated where it was interrupted
        return True


class _Owned:
    """A tensor of a cache that the model replaces in each step, and that a program overwrites instead; `view` is what the cache holds."""

    def __init__(self, content: torch.Tensor) -> None:
        self.buffer = content.clone()
        self.bytes = storage_bytes(self.buffer)
        self._storage = self.buffer.untyped_storage()
        self.renew()
        self._uses = torch._C._storage_Use_Count(self._storage._cdata)

    def renew(self) -> None:
        """Let the cache hold another view: one that someone has kept shows."""
        self.view = self.buffer.detach()

    @property
    def alone(self) -> bool:
        """Whether only this object and the cache hold the view."""
        return torch._C._storage_Use_Count(self._storage._cdata) == self._uses and sys.getrefcount(self.view) == 2 + _COUNTED


@dataclass(slots=True)
class CacheBuffers:
    """The buffers of one cache.

    Attributes:
        serial: that no other cache's buffers have.
        version: changes with every buffer that is new or has moved its contents.
        room: tokens that each buffer has room for.
    """

    serial: int = field(default_factory=itertools.count().__next__)
    tensors: dict[StateName, _Rows] = field(default_factory=dict)
    owned: dict[StateName, _Owned] = field(default_factory=dict)
    version: int = 0
    room: int = 0

    def hold(self, cache: Any, grown: Sequence[CacheTensor], tokens: int, position: int, held_tokens: int) -> None:
        """Make sure that the grown tensors are in buffers with room for `tokens` more, of a cache with `held_tokens`.

        Raises:
            ForeignCacheError: a tensor has another form than in the recording, or another number of tokens than the cache.
        """
        moved = []
        for each in grown:
            rows = self.tensors.get(each.name)
            held, *others = (holder(cache, name)[name[-1]] for name in each.names)
            length = each.rows.at(position)
            if any(other is not held and not torch.equal(other, held) for other in others):
                raise ForeignCacheError("a cache has two tensors where the cache of the recording had one")
            if (
                rows is None
                or rows.moves != (each.start_slope > 0)
                or (held is not rows.view and (others or not rows.adopt(held)))
                or any(other is not held for other in others)
                or rows.start + rows.length + tokens > self.room
                or rows.length != length
                or rows.buffer.shape[each.dim] != self.room
            ):
                each.require_form(held, length)
                moved.append((each, held))
            elif rows.moves and rows.start - held_tokens != rows.anchor:
                rows.anchor = rows.start - held_tokens
                self.version += 1
        if not moved:
            return
        self.version += 1  # first: programs bind again even if this is interrupted
        needed = max(held.shape[each.dim] for each, held in moved) + tokens
        if needed + 1 > self.room:
            self.room = -(-max(needed + needed // 4, needed + ROOM) // ROOM) * ROOM
            moved = [(each, holder(cache, each.name)[each.name[-1]]) for each in grown]
        for each, content in moved:
            length = content.shape[each.dim]
            sizes = list(content.shape)
            sizes[each.dim] = self.room
            rows = _Rows(content.new_empty(sizes), length, each, held_tokens)
            rows.view.copy_(content)
            self.tensors[each.name] = rows
            for name in each.names:
                holder(cache, name)[name[-1]] = rows.view

    def own(self, cache: Any, names: Sequence[StateName]) -> None:
        """Make sure that nothing but the cache sees the tensors that a program overwrites."""
        for name in names:
            owned, held = self.owned.get(name), holder(cache, name)
            if owned is None or held[name[-1]] is not owned.view or not owned.alone:
                self.version += 1
                owned = self.owned[name] = _Owned(held[name[-1]])
                held[name[-1]] = owned.view

    def steps_left(self, tokens: int) -> int:
        """Return the positions by which a step may still move on before a buffer is full."""
        return min((self.room - rows.start - rows.length - tokens for rows in self.tensors.values()), default=_LONG)

    def advance(
        self, cache: Any, grown: Sequence[CacheTensor], counts: Mapping[StateName, int], replaced: Sequence[StateName], steps: int = 1
    ) -> None:
        """Let the cache show the tokens that `steps` steps have written."""
        for name in replaced:
            self.owned[name].renew()
            holder(cache, name)[name[-1]] = self.owned[name].view
        for each in grown:
            if not each.added:
                continue
            rows = self.tensors[each.name]
            if each.drained:
                rows.start = rows.length = 0
            elif rows.moves:
                rows.start += steps * each.added
            else:
                rows.length += steps * each.added
            rows.view = rows.buffer.narrow(rows.dim, rows.start, rows.length)
            for name in each.names:
                holder(cache, name)[name[-1]] = rows.view
        for name, count in counts.items():
            if count:
                holder(cache, name)[name[-1]] += steps * count
