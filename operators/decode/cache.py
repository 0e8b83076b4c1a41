"""Moegraft's own key-value caches: transformers' caches whose memory native programs append to in place.

`own` makes a cache one of these. Its tensors then become views of buffers with room for more tokens. What belongs to the cache is
overwritten by later steps: a view of `layer.keys` that outlives a crop sees the tokens that come after it. `copy.deepcopy` makes a copy
that keeps them. Between two tokens of one call of `generate`, the cache may lack the tokens of the native steps that are going on.

A tensor that something else has put into the cache is copied to a buffer before the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from moegraft.operators.base import CACHE
from moegraft.operators.errors import UnsupportedModelError

if TYPE_CHECKING:
    from moegraft.operators.decode.native.fit import Affine, CacheTensor

ROOM = 256  # tokens by which the buffers of a cache grow at least
_LONG = 1 << 20  # positions, for a cache of states alone
AnyCache = TypeVar("AnyCache", bound=Cache)


# Of a tensor of a cache: the layer's number, or -1 for the cache itself, then the attribute and the key within it.
StateName = tuple[Any, ...]


def holder(cache: Cache, name: StateName) -> dict[Any, Any] | list[Any]:
    """Return what holds the tensor or number `name` of a cache, which has the key `name[-1]` in it."""
    held = vars(cache.layers[name[0]] if name[0] >= 0 else cache)
    return held if len(name) == 2 else held[name[1]]


def _held(cache: Cache) -> Iterator[tuple[StateName, Any]]:
    """Yield what a cache and its layers hold, itself or in dictionaries and lists, with its names."""
    for number, owner in enumerate((cache, *cache.layers), -1):
        for attribute, value in vars(owner).items():
            if isinstance(value, dict | list):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                yield from (((number, attribute, key), inner) for key, inner in items)
            else:
                yield (number, attribute), value


def cache_tensors(cache: Cache) -> Iterator[tuple[StateName, torch.Tensor]]:
    """Yield the tensors that a cache and its layers hold, with their names."""
    # Names that begin so are those of constants, such as the size of a window.
    return ((name, value) for name, value in _held(cache) if isinstance(value, torch.Tensor) and not name[1].startswith("_"))


def cache_counts(cache: Cache) -> dict[StateName, int]:
    """Return the numbers and flags that a cache and its layers hold, by name."""
    return {name: value for name, value in _held(cache) if isinstance(value, int)}


class ForeignCacheError(Exception):
    """A cache's tensors have other forms than those of the cache that was recorded; the program is not for this cache."""


class _Rows:
    """A tensor of a cache in a buffer with room for more tokens.

    Attributes:
        bytes: the buffer as (bytes,) uint8.
        view: what the cache holds, `length` tokens from `start`.
        form: what the latest program expects of it, to which it was compared.
        anchor: `start` before the first token, which is constant while the cache only grows: a window that is full (`moves`) moves on with
            each token.
    """

    def __init__(self, buffer: torch.Tensor, length: int, each: CacheTensor, held: int) -> None:
        self.buffer = buffer
        self.bytes = storage_bytes(buffer)
        self.dim, self.moves, self.form = each.dim, each.start_slope > 0, each
        self.start, self.length = 0, length
        self.anchor = -held if self.moves else 0
        self.view = buffer.narrow(self.dim, 0, length)

    def adopt(self, part: torch.Tensor) -> bool:
        """Let `part` be the view if it is a part of it, as a crop returns; False for any other tensor."""
        buffer, dim = self.buffer, self.dim
        start, rest = divmod(int(part.storage_offset()), buffer.stride(dim))
        length = part.shape[dim] if part.dim() == buffer.dim() else -1
        if (
            part.untyped_storage()._cdata != buffer.untyped_storage()._cdata
            or part.dtype != buffer.dtype
            or part.stride() != buffer.stride()
            or rest
            or length < 0
            or start + length > self.start + self.length
            or (*part.shape[:dim], *part.shape[dim + 1 :]) != (*buffer.shape[:dim], *buffer.shape[dim + 1 :])
        ):
            return False
        self.start, self.length = start, length
        self.view = part  # last: until then this is repeated where it was interrupted
        return True


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Return an empty cache of moegraft's own, for a model whose `generate` would create transformers' `DynamicCache`.

    Raises:
        UnsupportedModelError: the model makes another cache in its first forward pass.
    """
    if makes_own_cache(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} makes a cache of its own in its first forward pass: pass no cache to that one, and the cache that it "
            f"returns as {CACHE} to later ones"
        )
    return adopt(DynamicCache(config=model.config.get_text_config(decoder=True)))


def makes_own_cache(model: PreTrainedModel) -> bool:
    """Return whether a model makes a cache of a class of its own in its first forward pass, and may refuse any other, as MiniMax does."""
    has_default: Any = getattr(type(model), "_supports_default_dynamic_cache", None)  # only generating classes have it
    return has_default is not None and not has_default()


def adopt(cache: AnyCache) -> AnyCache:
    """Make a cache, which nothing else may refer to, one of moegraft's own."""
    cache.moegraft = CacheBuffers()  # type: ignore[attr-defined] # transformers' classes have no member for it
    return cache


def buffers_of(cache: Cache) -> CacheBuffers | None:
    """Return the memory of one of moegraft's own caches; None for others, shallow copies among them, which share tensors."""
    buffers = getattr(cache, "moegraft", None)
    if buffers is None:
        return None
    if buffers.cache is None:
        buffers.cache = weakref.ref(cache)
    found: CacheBuffers | None = buffers if buffers.cache() is cache else None
    return found


class CacheBuffers:
    """The memory of one of moegraft's own caches. A copy of the cache has its own.

    Attributes:
        tensors: those that grow, by their names in the cache.
        replaced: those that the model replaces in each step, and that a program overwrites instead.
        version: changes with every buffer that is new or has moved its contents.
        room: tokens that each buffer has room for.
    """

    def __init__(self) -> None:
        self.tensors: dict[StateName, _Rows] = {}
        self.replaced: dict[StateName, torch.Tensor] = {}
        self.version = 0
        self.room = 0
        self.cache: weakref.ref[Cache] | None = None  # the first that uses it

    def __reduce__(self) -> tuple[Any, ...]:  # of copies as well
        return type(self), ()

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
                continue
            if rows.form is not each:  # another program, perhaps of another model
                each.require_form(held, length)
                rows.form = each
            if rows.moves and rows.start - held_tokens != rows.anchor:
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

    def sized_by_room(self, cache: Any) -> Mapping[StateName, tuple[Affine, ...]]:
        """Return the sizes of tensors that follow `room` and not the tokens, and to which steps write in place; none here."""
        return {}

    def take(self, cache: Any, names: Sequence[StateName]) -> None:
        """Make sure that the tensors that a program overwrites are the cache's own."""
        for name in names:
            container = holder(cache, name)
            if container[name[-1]] is not self.replaced.get(name):
                self.version += 1
                container[name[-1]] = self.replaced[name] = container[name[-1]].clone(memory_format=torch.contiguous_format)

    def steps_left(self, tokens: int) -> int:
        """Return the positions by which a step may still move on before a buffer is full."""
        return min((self.room - rows.start - rows.length - tokens for rows in self.tensors.values()), default=_LONG)

    def advance(self, cache: Any, grown: Sequence[CacheTensor], counts: Mapping[StateName, int], tokens: int, per_step: int) -> None:
        """Let the cache show `tokens` tokens that steps of `per_step` tokens have written: whole steps, or the first tokens of one."""
        for each in grown:
            if not each.added:
                continue
            rows, added = self.tensors[each.name], tokens * each.added // per_step
            if each.drained:
                rows.start = rows.length = 0
            elif rows.moves:
                rows.start += added
            else:
                rows.length += added
            rows.view = rows.buffer.narrow(rows.dim, rows.start, rows.length)
            for name in each.names:
                holder(cache, name)[name[-1]] = rows.view
        for name, count in counts.items():
            if count:
                holder(cache, name)[name[-1]] += tokens * count // per_step


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as (bytes,) uint8."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
