"""Build the native program of a lowered step, with memory for its temporaries, and run what only PyTorch computes.

The memory of temporaries is assigned by the operations between which each is alive.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_leaves, tree_unflatten
from transformers import Cache
from transformers.utils.generic import ModelOutput

from moegraft.cpu_backend import Program, Runtime
from moegraft.operators.custom_ops import without_dispatch
from moegraft.operators.decode.cache import CacheBuffers, ForeignCacheError, cache_tensors, holder, storage_bytes
from moegraft.operators.decode.native.fit import Affine, FittedStep, Place, grown_tensors
from moegraft.operators.decode.native.lower import ELEMENT_NAMES, Lowering, Node, Operand
from moegraft.operators.decode.native.record import NotRecordableError
from moegraft.operators.timeline import Timeline

HIDDEN_STATES = "hidden_states"  # the output of a model
ARENA = 0  # the buffer of all temporaries
_ALIGNMENT = 64


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
        self.origins: dict[int, int] = {}  # the byte of each buffer at which offsets start, where it is not the first
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
        name = "int8" if value.dtype == torch.int8 else ELEMENT_NAMES[value.dtype]  # the codes of pages, which no other kernel reads
        return buffer, name, offset.as_tuple(), sizes, tuple(stride.as_tuple() for stride in value.strides)

    def where(self, place: Place) -> tuple[int, int]:
        """Return the buffer of a place and the first byte of its storage there."""
        offset = self._offsets.get(place.storage)
        if offset is not None:
            return ARENA, offset
        return self.buffers.setdefault(place.storage, len(self.buffers) + 1), 0

    def set_loop(self, logits: Place, hidden: Place | None, tokens: Place, positions: Sequence[Place]) -> bool:
        """Let the native program feed tokens by itself; return False where a step is more than that."""
        places = [*([] if hidden is None else [hidden]), logits, tokens, *positions]
        packed = all(all(size.fixed for size in place.sizes) and place.is_contiguous for place in places)
        if len(self.parts) > 1 or any(place.dtype != torch.int64 for place in (tokens, *positions)) or not packed:
            return False
        operands = [self.operand(place) for place in (logits, tokens, *positions)]
        self.native.set_loop(operands, None if hidden is None else self.operand(hidden))
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
        elif node.kind == "recurrent":
            native.add_recurrent(node.name, operands, node.numbers)
        else:
            native.add_matmul(operands)
        if node.kind not in ("small", "norm"):
            self.kernels.append(node.kind)

    def stays(self, leaf: Any) -> bool:
        """Whether an argument is the same in each step: a number, or a temporary in the arena."""
        if not isinstance(leaf, Place):
            return not isinstance(leaf, Affine) or leaf.fixed
        return leaf.storage in self._offsets and all(number.fixed for number in (leaf.offset, *leaf.sizes, *leaf.strides))

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


class StepProgram:
    """The native program of one kind of step, bound to one cache at a time.

    Args:
        output_type: of the model's outputs.
        position: tokens in the cache of the recording.
        period: tokens of a group that the model pools, else 1; programs count groups.

    Attributes:
        rewinds: whether a step does nothing but append to the cache, so that it may be run again at an earlier position.
        goes_on: whether `follow` can run steps.
    """

    def __init__(self, fitted: FittedStep, runtime: Runtime, output_type: type[ModelOutput], position: int, period: int) -> None:
        self._fitted = fitted
        self._runtime = runtime
        self._output_type = output_type
        self._no_outputs = {field.name: None for field in fields(output_type)}  # type: ignore[arg-type] # models return its dataclasses
        self._period, self._place = period, position % period
        self._grown = grown_tensors(fitted, period)
        grown_names = {name for tensor in self._grown for name in tensor.names}
        self._pages = [name for name, place in fitted.before.items() if any(size.capacity for size in place.sizes)]
        others = [name for name in fitted.before if name not in grown_names and name not in self._pages]
        self._states = [name for name in others if fitted.after[name].storage == fitted.before[name].storage]
        self.replaced = [name for name in others if fitted.after[name].storage != fitted.before[name].storage]
        for name in self.replaced:
            before, after = fitted.before[name], fitted.after[name]
            fixed = not any(number.slope for number in (*before.sizes, *before.strides, before.offset))
            if not fixed or (after.sizes, after.dtype) != (before.sizes, before.dtype) or after.storage not in fitted.produced:
                raise NotRecordableError(f"a tensor of the cache ({name[1]}) is replaced by one of another form in each step")
        self._tokens = fitted.inputs["input_ids"].sizes[1].base  # of each sequence
        added = [each.added for each in self._grown] + list(fitted.counts.values())
        appends = all(each.added and not each.start_slope and not each.drained for each in self._grown)
        others_stay = not self._states and not self.replaced and not any(count % self._tokens for count in added)
        self.rewinds = bool(self._grown or self._pages) and appends and others_stay
        self._lowering = Lowering(fitted, self._grown, self.replaced)
        rounded = [node.payload[0].weight_type not in ("float32", "float64") for node in self._nodes("linear", "experts")]
        rounded += [
            place.dtype == torch.int8 for node in self._nodes("paged attention") for place in node.reads if isinstance(place, Place)
        ]
        self.exact = not any(rounded)
        self.counters = [node.payload[2] for node in self._nodes("experts") if node.payload[2] is not None]  # of neurons
        self.sized_by_values = self._lowering.sized_by_values
        self._logits = self._fitted.outputs["logits"]
        self._hidden: list[Place] = list(self._fitted.outputs.get(HIDDEN_STATES, {}).values())
        self._binding: _Binding | None = None
        self._followed: tuple[NDArray[np.float32], torch.Tensor] | None = None  # the logits of `follow`, in one memory
        self._last_position = -1
        self.kernels_ns = 0  # of the last step
        self._build(-(-max(1024, 2 * position) // self._period))

    def _nodes(self, *kinds: str) -> Iterator[Node]:
        return (node for node in self._lowering.nodes if node.kind in kinds)

    def describe(self) -> str:
        kinds = [node.kind for node in self._lowering.nodes]
        calls = sorted({node.name for node in self._lowering.nodes if node.kind == "call"})
        others = f", {kinds.count('call')} calls of PyTorch ({', '.join(calls)})" if calls else ""
        return f"{len(kinds)} operations{others}, {self._native.arena_bytes / 1e6:.1f} MB"

    def states(self, cache: Any) -> list[torch.Tensor]:
        """Return the tensors of a cache that a step changes in place."""
        return [holder(cache, name)[name[-1]] for name in self._states]

    def saved(self, cache: Any) -> Callable[[], None]:
        """Copy what a run overwrites; the result puts it back."""

        def overwritten() -> list[torch.Tensor]:  # those that the program owns are others after a run
            return [*self.states(cache), *(holder(cache, name)[name[-1]] for name in self.replaced)]

        with torch.inference_mode():  # the states may have been made in it
            kept = [tensor.clone() for tensor in overwritten()]
        counts = [array.copy() for array in self.counters]

        def put_back() -> None:
            with torch.inference_mode():
                for tensor, old in zip(overwritten(), kept, strict=True):
                    tensor.copy_(old)
            for array, before in zip(self.counters, counts, strict=True):
                array[:] = before

        return put_back

    def run(self, cache: Cache, buffers: CacheBuffers, inputs: Mapping[str, torch.Tensor], position: int, *, advance: bool) -> Any:
        """Run the step that follows `position` tokens; return the model's outputs.

        Args:
            advance: whether the cache then holds the new tokens.

        Raises:
            ForeignCacheError, OtherSizeError: the program is not for this cache, or not for this step.
        """
        held_tokens, position = position, position // self._period
        if position > self._last_position:
            self._build(2 * position)
        tokens = inputs["input_ids"].shape[1]
        buffers.hold(cache, self._grown, tokens, position, held_tokens)
        buffers.take(cache, self.replaced)
        binding = self._binding  # the end of another cache may clear the attribute at any time
        if binding is None or not binding.holds(buffers, position):
            binding = self._bind(cache, buffers, position, tokens)
        elif not all(map(operator.is_, states := self.states(cache), binding.states)):
            binding = self._bind_states(binding, states, buffers.room)
        for name, value in inputs.items():
            into = self._inputs[name]
            (into if into.numel() == value.numel() else into[: value.numel()]).copy_(value.reshape(-1))
        native = self._native
        before_ns = native.native.kernel_ns
        for part in native.parts:
            if isinstance(part, PythonCall):
                native.call(part, binding.tensors, position, buffers.room)
            else:
                native.native.run(position, *part)
        self.kernels_ns = native.native.kernel_ns - before_ns
        if advance:
            self.advance(cache, buffers, tokens)
        logits = binding.logits
        logits = (native.view(self._logits, binding.tensors, position, buffers.room) if logits is None else logits).clone()
        # As the type's own constructor does it, which takes 15 us to look its fields up again for each of them.
        outputs = self._output_type.__new__(self._output_type)
        vars(outputs).update(self._no_outputs)
        made: dict[str, Any] = {"logits": logits}
        if (hidden := self._hidden_states(binding, position, buffers.room)) is not None:
            made[HIDDEN_STATES] = (hidden,)
        for name in self._fitted.outputs:
            vars(outputs)[name] = made.get(name, cache)
            OrderedDict.__setitem__(outputs, name, vars(outputs)[name])
        return outputs

    def _hidden_states(self, binding: _Binding, position: int, room: int) -> torch.Tensor | None:
        """Return a copy of the hidden states of the latest step, (B, T, H of all that it returns); None if recorded without."""
        states = binding.hidden or [self._native.view(place, binding.tensors, position, room) for place in self._hidden]
        return None if not states else states[0].clone() if len(states) == 1 else torch.cat(states, dim=-1)

    @property
    def fed(self) -> tuple[int, int]:
        """How many steps the program has run by itself, and the nanoseconds that its kernels took, since it was built."""
        return self._native.native.fed, self._native.native.kernel_ns

    def rebind(self, cache: Cache, buffers: CacheBuffers, position: int) -> bool:
        """Prepare for `follow` over a cache with `position` tokens; return False where another run must come first.

        Raises:
            ForeignCacheError: the program is not for this cache.
        """
        if self.is_bound(buffers):
            buffers.hold(cache, self._grown, self._tokens, position, position)
        return self.is_bound(buffers)

    def follow(self, position: int, tokens: Sequence[int], states: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the step of some tokens, of one sequence or one of each of several, at a position for which there is room.

        Args:
            states: what an MTP layer is given beside the tokens, (1, T, H).

        Returns:
            Logits, (R, V) float32 until the next step, and a copy of the last hidden states, (B, T, H), if it was recorded with them.
        """
        if states is not None:
            self._inputs["states"].copy_(states.reshape(-1))
        if self._followed is None:
            rows, vocabulary = math.prod(size.base for size in self._logits.sizes[:-1]), self._logits.sizes[-1].base
            logits = np.empty((rows, vocabulary), np.float32)
            self._followed = logits, torch.from_numpy(logits)
        self._native.native.follow(position, tokens, self._followed[0])
        assert self._binding is not None, "the caller has asked"
        return self._followed[1], self._hidden_states(self._binding, position, 0)

    @property
    def native(self) -> Program:
        return self._native.native

    def states_of(self, steps: int) -> torch.Tensor | None:
        """Return memory for the hidden states of some steps of a token, (1, steps, H); None where each step returns several, or none."""
        if len(self._hidden) != 1:
            return None
        return torch.empty((1, steps, self._hidden[0].sizes[-1].base), dtype=self._hidden[0].dtype)

    def advance(self, cache: Any, buffers: CacheBuffers, tokens: int) -> None:
        """Let a cache have `tokens` more tokens of each sequence, which steps have computed."""
        buffers.advance(cache, self._grown, self._fitted.counts, tokens, self._tokens)

    def is_bound(self, buffers: CacheBuffers) -> bool:
        binding = self._binding
        return binding is not None and binding.buffers() is buffers and binding.version == buffers.version

    def positions(self, buffers: CacheBuffers, position: int) -> range:
        """Return the positions that were checked, and for which the buffers of a cache with `position` tokens have room."""
        binding = self._binding
        if binding is None:
            return range(0)
        first, last = binding.checked
        return range(first, min(last, position + buffers.steps_left(self._tokens)) + 1)

    def add_spans(self, timeline: Timeline) -> None:
        """Add the kernels of the last step to the lane `CPU`."""
        for name, (began_ns, ended_ns) in zip(self._native.kernels, self._native.native.spans(), strict=True):
            if ended_ns:
                timeline.add("CPU", name, timeline.at(began_ns), timeline.at(ended_ns))

    def _build(self, last_position: int) -> None:
        self._native = NativeStep(self._lowering, self._runtime, [self._logits, *self._hidden], last_position)
        self._last_position = last_position
        self._arena = torch.empty(self._native.arena_bytes, dtype=torch.uint8)
        self._inputs = {
            name: torch.empty(math.prod(size.at(last_position) for size in place.sizes), dtype=place.dtype)
            for name, place in self._fitted.inputs.items()
        }
        inputs = dict(self._fitted.inputs)
        token = inputs.pop("input_ids")
        inputs.pop("states", None)  # `follow` copies them
        hidden = self._hidden[0] if len(self._hidden) == 1 else None
        self.goes_on = self._native.set_loop(self._logits, hidden, token, list(inputs.values())) and not self.sized_by_values
        self.goes_on &= (self._tokens == 1 or self.rewinds) and all(map(self._native.stays, self._hidden))
        self._followed = None
        self._binding = None

    def _bind(self, cache: Any, buffers: CacheBuffers, position: int, tokens: int) -> _Binding:
        self._binding = None  # first: from here on the program has parts of both caches, and the end of the old one concerns it no more
        native, fitted = self._native, self._fitted
        tensors: dict[int, torch.Tensor] = {}
        origins: dict[int, int] = {}
        held = dict(cache_tensors(cache))
        by_storage = {tensor.before: tensor for tensor in self._grown}
        others = {place.storage: self._inputs[name] for name, place in fitted.inputs.items()} | dict(fitted.constants)
        own = {fitted.before[name].storage: (held[name], fitted.before[name]) for name in (*self._states, *self.replaced, *self._pages)}
        for storage, buffer in native.buffers.items():
            grown = by_storage.get(storage)
            if grown is not None:
                rows = buffers.tensors[grown.name]
                row_bytes = rows.buffer.stride(grown.dim) * rows.buffer.element_size()
                origins[buffer] = (rows.anchor + rows.moves * self._place) * row_bytes
                tensors[buffer] = rows.bytes
            elif storage in own:
                origins[buffer], tensors[buffer] = _memory(*own[storage], buffers.room)
            else:
                tensors[buffer] = storage_bytes(others[storage])
        tensors[ARENA] = self._arena
        native.origins = origins
        for buffer, tensor in tensors.items():
            native.native.bind(buffer, tensor, origins.get(buffer, 0))
        last = min(position + buffers.steps_left(tokens) // self._period, self._last_position)
        native.native.check(position, max(last, position), buffers.room)
        logits = native.view(self._logits, tensors, position, buffers.room) if native.stays(self._logits) else None
        stay = all(map(native.stays, self._hidden))
        hidden = [native.view(place, tensors, position, buffers.room) for place in self._hidden] if stay else []
        reference = weakref.ref(buffers, partial(_unbind, weakref.ref(self)))
        self._binding = binding = _Binding(reference, buffers.version, tensors, self.states(cache), logits, hidden, (position, last))
        return binding

    def _bind_states(self, binding: _Binding, states: Sequence[torch.Tensor], room: int) -> _Binding:
        """Bind other states of the same cache: those after a verification change places with earlier ones."""
        self._binding = None  # until all of them are bound
        native = self._native
        for name, tensor, held in zip(self._states, states, binding.states, strict=True):
            recorded = self._fitted.before[name]
            buffer = native.buffers.get(recorded.storage)
            if tensor is not held and buffer is not None:
                native.origins[buffer], binding.tensors[buffer] = _memory(tensor, recorded, room)
                native.native.bind(buffer, binding.tensors[buffer], native.origins[buffer])
        native.native.check(*binding.checked, room)
        self._binding = binding = replace(binding, states=states)
        return binding


def _memory(tensor: torch.Tensor, recorded: Place, room: int) -> tuple[int, torch.Tensor]:
    """Return the byte at which the offsets of a cache's states or pages start, and their whole storage.

    Raises:
        ForeignCacheError: they have another form than the recorded ones.
    """
    sizes, strides = (tuple(each.at(0, room) for each in numbers) for numbers in (recorded.sizes, recorded.strides))
    if (tensor.dtype, tensor.shape, tensor.stride()) != (recorded.dtype, sizes, strides):
        raise ForeignCacheError("a cache has its states or pages in another form than the cache of the recording")
    return (int(tensor.storage_offset()) - recorded.offset.base) * tensor.element_size(), storage_bytes(tensor)


@dataclass(frozen=True, slots=True)
class _Binding:
    """The memory of one cache, which a program reads and writes.

    Attributes:
        version: of the buffers.
        tensors: the bytes of each of the program's buffers.
        states: those of the cache that a step changes in place.
        logits, hidden: over the program's memory, where they are at the same place in each step.
        checked: the first and the last position for which all places are within this memory.
    """

    buffers: weakref.ref[CacheBuffers]
    version: int
    tensors: dict[int, torch.Tensor]
    states: Sequence[torch.Tensor]
    logits: torch.Tensor | None
    hidden: list[torch.Tensor]
    checked: tuple[int, int]

    def holds(self, buffers: CacheBuffers, position: int) -> bool:
        same = self.buffers() is buffers and self.version == buffers.version
        return same and self.checked[0] <= position <= self.checked[1]


def _unbind(program: weakref.ref[StepProgram], buffers: weakref.ref[CacheBuffers]) -> None:
    """Let a program go of the memory of a cache that is gone; any thread may do so, at any time."""
    bound = program()
    binding = None if bound is None else bound._binding
    if bound is not None and binding is not None and binding.buffers is buffers:
        bound._binding = None


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
