"""Build the native program of a lowered step, with memory for its temporaries, and run what only PyTorch computes.

The memory of temporaries is assigned by the operations between which each is alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_unflatten

from moegraft.cpu_backend import Program, Runtime
from moegraft.operators.custom_ops import without_dispatch
from moegraft.operators.decode.native.fit import Affine, Place
from moegraft.operators.decode.native.lower import ELEMENT_NAMES, Lowering, Node, Operand

ARENA = 0  # the buffer of all temporaries
_ALIGNMENT = 64
_ONE = Affine(1)


class OtherSizeError(Exception):
    """A result whose size depends on the data has another size than in the recording; the program is not for this step."""


@dataclass(frozen=True, slots=True)
class _Bound:
    arena: torch.Tensor
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    targets: Sequence[torch.Tensor]


@dataclass(slots=True)
class PythonCall:
    """A call of PyTorch between two runs of the native program, over the program's memory.

    Attributes:
        stays: whether it always has the same arguments: temporaries of fixed place and size, and constants.
        bound: the tensors over these, and the arena that they lie in.
    """

    target: Any
    leaves: Sequence[Any]
    form: Any
    outputs: Sequence[Place]
    stays: bool
    bound: _Bound | None = None


class NativeStep:
    """The native program of a lowered step.

    Attributes:
        parts: what a step runs in order: a range of native stages, or a call of PyTorch.
        kernels: the name of each stage's kernel; empty for a stage without one.
        arena_bytes: of the temporaries, by position.
    """

    def __init__(self, lowering: Lowering, runtime: Runtime, kept: Sequence[Place], last_position: int) -> None:
        self.native = Program(runtime)
        self.parts: list[tuple[int, int] | PythonCall] = []
        self.kernels: list[str] = []
        self.buffers: dict[int, int] = {}  # by storage, of what is no temporary
        self.origins: Mapping[int, int] = {}  # the byte of each buffer at which offsets start, where it is not the first
        self._offsets, self.arena_bytes = _assign(lowering, kept, last_position)
        self._first = 0
        for node in lowering.nodes:
            self._emit(node)
        self._close()

    def operand(self, value: Operand) -> tuple[Any, ...]:
        """Return an operand in the form of `Program`."""
        if isinstance(value, Affine):
            return float(value.base), float(value.slope)
        if not isinstance(value, Place):
            return float(value), 0.0
        buffer, start = self.where(value)
        offset = value.offset.plus(Affine(start // value.dtype.itemsize))
        sizes = tuple(size.as_tuple() for size in value.sizes)
        return buffer, ELEMENT_NAMES[value.dtype], offset.as_tuple(), sizes, tuple(stride.as_tuple() for stride in value.strides)

    def where(self, place: Place) -> tuple[int, int]:
        """Return the buffer of a place and the first byte of its storage there."""
        offset = self._offsets.get(place.storage)
        if offset is not None:
            return ARENA, offset
        return self.buffers.setdefault(place.storage, len(self.buffers) + 1), 0

    def set_loop(self, logits: Place, tokens: Place, positions: Sequence[Place]) -> bool:
        """Let the native program feed a token of each sequence by itself; return False where a step is more than that."""
        batch, length = tokens.sizes
        fixed = [size.slope == size.capacity == 0 for size in logits.sizes]
        form = logits.sizes[:-1] == (batch, length) and length == _ONE and all(fixed) and logits.strides[::2] == (logits.sizes[-1], _ONE)
        if not form or len(self.parts) > 1 or any(place.dtype != torch.int64 for place in (tokens, *positions)):
            return False
        self.native.set_loop([self.operand(place) for place in (logits, tokens, *positions)])
        return True

    def _emit(self, node: Node) -> None:
        if node.kind == "call":
            self._close()
            target, leaves, form = node.payload
            for place in (*node.writes, *(leaf for leaf in leaves if isinstance(leaf, Place))):
                self.where(place)
            stays = all(self.stays(leaf) for leaf in (*node.writes, *leaves))
            self.parts.append(PythonCall(without_dispatch(target), leaves, form, node.writes, stays))
            return
        operands = [self.operand(value) for value in (*node.writes, *node.reads)]
        native = self.native
        if node.kind == "small":
            native.add_small(node.name, operands, node.numbers)
        elif node.kind == "norm":
            native.add_norm(node.payload, operands)
        elif node.kind == "linear":
            native.add_linears(node.payload, [operands[-1], *operands[:-1]])
        elif node.kind == "experts":
            experts, threshold, neuron_counts = node.payload
            native.add_experts(experts, operands, threshold, neuron_counts)
        elif node.kind == "router":
            native.add_router(node.payload, operands)
        elif node.kind == "attention":
            native.add_attention(operands, **node.payload)
        elif node.kind == "paged attention":
            native.add_paged_attention(operands, **node.payload)
        else:
            native.add_matmul(operands)
        if node.kind not in ("small", "norm"):
            self.kernels.append(node.kind)

    def stays(self, leaf: Any) -> bool:
        """Whether an argument is the same in each step: a number, or a temporary in the arena."""
        if not isinstance(leaf, Place):
            return not isinstance(leaf, Affine) or leaf.slope == leaf.capacity == 0
        numbers = (leaf.offset, *leaf.sizes, *leaf.strides)
        return leaf.storage in self._offsets and all(number.slope == number.capacity == 0 for number in numbers)

    def _close(self) -> None:
        end = self.native.end_stage()
        self.kernels += [""] * (end - len(self.kernels))
        self.parts.append((self._first, end))
        self._first = end

    def view(self, place: Place, tensors: Mapping[int, torch.Tensor], position: int, room: int) -> torch.Tensor:
        """Return a tensor over the memory of a place; `tensors` has the bytes of each buffer."""
        buffer, start = self.where(place)
        start += self.origins.get(buffer, 0)
        values = tensors[buffer].view(place.dtype)
        sizes = [size.at(position, room) for size in place.sizes]
        strides = [stride.at(position, room) for stride in place.strides]
        return values.as_strided(sizes, strides, start // place.dtype.itemsize + place.offset.at(position, room))

    def call(self, part: PythonCall, tensors: Mapping[int, torch.Tensor], position: int, room: int) -> None:
        """Run a call of PyTorch over the program's memory."""

        def given(leaf: Any) -> Any:
            if isinstance(leaf, Place):
                return self.view(leaf, tensors, position, room)
            return leaf.at(position, room) if isinstance(leaf, Affine) else leaf

        arena = tensors[ARENA]
        bound = part.bound
        if bound is None or bound.arena is not arena:
            args, kwargs = tree_unflatten([given(leaf) for leaf in part.leaves], part.form)
            bound = _Bound(arena, args, kwargs, [self.view(place, tensors, position, room) for place in part.outputs])
            part.bound = bound if part.stays else None
        found = part.target(*bound.args, **bound.kwargs)
        results = [found] if isinstance(found, torch.Tensor) else [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        for result, target in zip(results, bound.targets, strict=True):
            if result.shape != target.shape:
                raise OtherSizeError(f"{part.target} returns {tuple(result.shape)}, expected {tuple(target.shape)}")
            if target.data_ptr() != result.data_ptr():
                target.copy_(result)


def _assign(lowering: Lowering, kept: Sequence[Place], last_position: int) -> tuple[dict[int, int], int]:
    """Return the first byte of each temporary in the arena, and the arena's size; temporaries that are alive together do not overlap."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, node in enumerate(lowering.nodes):
        for storage in node.storages():
            if storage in lowering.produced:
                first.setdefault(storage, place)
                last[storage] = place
    for output in kept:
        if output.storage in lowering.produced:
            first.setdefault(output.storage, 0)
            last[output.storage] = len(lowering.nodes)
    free: list[tuple[int, int]] = []  # start, end
    ending: dict[int, list[int]] = {}
    offsets: dict[int, int] = {}
    sizes: dict[int, int] = {}
    top = 0
    for storage in sorted(first, key=lambda each: first[each]):
        for done in [place for place in ending if place < first[storage]]:
            for other in ending.pop(done):
                free.append((offsets[other], offsets[other] + sizes[other]))
        free = _joined(free)
        nbytes = lowering.storage_bytes[storage]
        size = max(nbytes.at(0), nbytes.at(last_position), 1)
        size = (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        gap = next((index for index, (start, end) in enumerate(free) if end - start >= size), None)
        if gap is None:
            offsets[storage], top = top, top + size
        else:
            start, end = free[gap]
            offsets[storage] = start
            free[gap : gap + 1] = [(start + size, end)] if end - start > size else []
        sizes[storage] = size
        ending.setdefault(last[storage], []).append(storage)
    return offsets, top


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined
