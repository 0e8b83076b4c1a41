"""Record one forward pass of a model: its ATen calls and kernel calls, with the memory that each reads and writes.

A `TorchDispatchMode` sees every ATen call. The kernels of `cpu_backend` are no ATen calls: while a pass is recorded, the methods of the
model's `Runtime` are replaced on that one object by methods that also record. Views are not calls: a tensor is described by its storage,
offset, sizes and strides.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten

from moegraft.cpu_backend import Runtime
from moegraft.operators.timeline import Timeline

if TYPE_CHECKING:
    from moegraft.operators.decode.replay import StepReplay

KERNELS = ("linear", "forward", "norm", "route", "attention", "paged_attention", "matmul", "recurrent")
NODE_KINDS = {"forward": "experts", "route": "router", "paged_attention": "attention"}  # where users know a kernel by another name
_ALLOCATIONS = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
# A value that Python reads may decide what is computed next; the calls that depend on it are not in the recording.
_HOST_READS = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "unique_dim", "_unique2", "bincount"}
# How many values these return depends on the data. A replay compares it with the recorded number.
_SIZED_BY_VALUES = {"nonzero", "index"}
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_NUMPY_TYPES = {
    np.dtype(np.uint16): torch.bfloat16,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float16): torch.float16,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.bool_): torch.bool,
}


class NotRecordableError(Exception):
    """A forward pass cannot be replayed as a list of calls; the message names the reason."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A tensor of a recording; offset and strides count elements.

    Attributes:
        storage: its number in `Recording.storages`.
    """

    storage: int
    dtype: torch.dtype
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A recorded call, or what the same calls of two recordings have in common.

    Attributes:
        target: an ATen overload, or the name of a kernel.
        leaves: the arguments, flattened: Memory for tensors, all else as it was given. Of two recordings, Place for tensors, and Affine
            for integers that depend on the position.
        form: how `leaves` make up the arguments and keyword arguments.
        outputs: Memory, or Place, for each tensor that an ATen overload returned; a kernel writes to its arguments.
    """

    target: Any
    leaves: Sequence[Any]
    form: TreeSpec
    outputs: Sequence[Any]

    @property
    def name(self) -> str:
        return str(self.target).removeprefix("aten.")


@dataclass(frozen=True, slots=True)
class Counters:
    """An array that a kernel adds counts to. Recordings have to use the same array; its contents are not compared."""

    array: np.ndarray[Any, np.dtype[Any]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counters) and other.array is self.array

    def __hash__(self) -> int:
        return id(self.array)


@dataclass(slots=True)
class Storage:
    """Memory that a recording touched.

    Attributes:
        produced: whether it was allocated while the pass ran.
        tensor: a tensor in it, which keeps it alive, so that no two storages of a recording have the same address; None once the
            recording is finished, for what only lives as long as the step or its cache.
    """

    nbytes: int
    produced: bool
    tensor: torch.Tensor | None


@dataclass(slots=True)
class Recording:
    """The calls of one forward pass, in order."""

    calls: list[Call] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    obstacle: str | None = None  # why it cannot be replayed

    def release(self, others: Iterable[Memory]) -> None:
        """Free what the finished pass allocated, and the storages of `others`; a recording may wait long for a second one."""
        gone = {memory.storage for memory in others}
        for number, storage in enumerate(self.storages):
            if storage.produced or number in gone:
                storage.tensor = None


@contextmanager
def _wrapped_kernels(runtime: Runtime, wrapper: Callable[..., None]) -> Iterator[None]:
    """Let `wrapper(name, method, *args, **kwargs)` answer the kernel calls of `runtime` while the body runs."""
    attributes = vars(runtime)
    before = {name: attributes.get(name) for name in KERNELS}
    for name in KERNELS:
        attributes[name] = partial(wrapper, name, getattr(runtime, name))
    try:
        yield
    finally:
        for name, method in before.items():
            if method is None:
                del attributes[name]
            else:
                attributes[name] = method


@contextmanager
def cpu_timeline(runtime: Runtime, replay: StepReplay | None) -> Iterator[Timeline]:
    """Yield a timeline that receives the kernel calls of `runtime` and the replayed steps while the body runs."""
    timeline = Timeline("CPU")

    def timed(name: str, compute: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        start_ms = timeline.now_ms()
        compute(*args, **kwargs)
        timeline.add("CPU", NODE_KINDS.get(name, name), start_ms, timeline.now_ms())

    try:
        if replay is not None:
            replay.timeline = timeline
        with _wrapped_kernels(runtime, timed):
            yield timeline
    finally:
        if replay is not None:
            replay.timeline = None


def is_recorded() -> bool:
    """Return whether this thread computes a pass that is recorded."""
    return isinstance(_python_dispatch._get_current_dispatch_mode(), Recorder)


class _Operation(NamedTuple):
    """What the recording of an ATen call depends on beside its arguments.

    Attributes:
        obstacle: why no pass with it can be replayed, or "".
    """

    composite: bool
    obstacle: str
    allocates: bool
    mutable: bool


@cache
def _operation(func: Any) -> _Operation:
    name = func._schema.name.removeprefix("aten::")
    # Attention is only random with dropout, which no model has while it generates.
    random = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in name
    by_value = torch.Tag.dynamic_output_shape in func.tags and name not in _SIZED_BY_VALUES
    unknown = name in _HOST_READS or random or by_value or torch.Tag.data_dependent_output in func.tags
    return _Operation(
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
        f"it calls {name}, whose result Python reads or which is random" if unknown else "",
        name in _ALLOCATIONS or name == "lift_fresh",
        func._schema.is_mutable,
    )


@cache
def _plain_form(arguments: int, names: tuple[str, ...]) -> TreeSpec:
    return tree_flatten(((0,) * arguments, dict.fromkeys(names)))[1]


def _flattened(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
    """Return the leaves and the form of a call's arguments; `tree_flatten` alone would take longer than a small operation."""
    leaves = [*args, *kwargs.values()]
    if not any(isinstance(leaf, (list, tuple, dict)) for leaf in leaves):
        return leaves, _plain_form(len(args), tuple(kwargs))
    return tree_flatten((tuple(args), kwargs))


class Recorder(TorchDispatchMode):
    """Fills `recording` while it is entered.

    Args:
        runtime: the runtime of the model's operators.
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self._runtime = runtime
        self._thread = threading.get_ident()
        self._within_operation = False  # of this package, whose kernel calls are its own
        self._numbers: dict[int, int] = {}  # of storages, by the address of PyTorch's own object
        self._starts: list[int] = []  # addresses of storages, sorted
        self._by_start: dict[int, int] = {}

    @contextmanager
    def recorded(self) -> Iterator[Recording]:
        """Record what the body computes."""
        depth = torch._C._len_torch_dispatch_stack()
        flags = {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_") and isinstance(value, bool)}
        try:
            with _wrapped_kernels(self._runtime, self._kernel), self:
                yield self.recording
        finally:
            # Where Ctrl-C came while PyTorch left the mode, the mode would stay for the whole process.
            while torch._C._len_torch_dispatch_stack() > depth:
                torch._C._pop_torch_dispatch_stack(None)
            vars(_python_dispatch).update(flags)

    def memory(self, tensor: torch.Tensor, *, produced: bool = False) -> Memory:
        """Return the description of a tensor, and give its storage a number if it has none yet."""
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.recording.storages)
            self.recording.storages.append(Storage(storage.nbytes(), produced, tensor.detach()))
            start = storage.data_ptr()
            if storage.nbytes():
                bisect.insort(self._starts, start)
                self._by_start[start] = number
        return Memory(number, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def __torch_dispatch__(self, func: Any, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        operation = _operation(func)
        if operation.composite:
            with self:  # inference mode hands such operations over whole
                found = func._op_dk(_COMPOSITE, *args, **kwargs)
            return found
        leaves, form = _flattened(args, kwargs)
        known = [self.memory(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._within_operation = func.namespace == "moegraft"
        try:
            found = func(*args, **kwargs)
        finally:
            self._within_operation = False
        if operation.obstacle:
            self.recording.obstacle = self.recording.obstacle or operation.obstacle
        returned = [found] if isinstance(found, torch.Tensor) else tree_flatten(found)[0]
        outputs = [self.memory(tensor, produced=True) for tensor in returned if isinstance(tensor, torch.Tensor)]
        read = {leaf.storage for leaf in known if isinstance(leaf, Memory)}
        is_view = not operation.mutable and all(output.storage in read for output in outputs)
        if not operation.allocates and not is_view:
            self.recording.calls.append(Call(func, known, form, outputs))
        return found

    def _kernel(self, name: str, compute: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        compute(*args, **kwargs)
        if threading.get_ident() != self._thread:
            return  # another thread computes with the same model, which this mode does not see
        if self._within_operation:
            return  # replayed as a whole
        counts = kwargs.get("neuron_counts")
        if counts is not None:
            kwargs["neuron_counts"] = Counters(counts)
        leaves, form = _flattened(args, kwargs)
        self.recording.calls.append(Call(name, [self._kernel_leaf(leaf) for leaf in leaves], form, ()))

    def _kernel_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.memory(leaf)
        if not isinstance(leaf, np.ndarray):
            return leaf
        address = leaf.__array_interface__["data"][0]
        place = bisect.bisect_right(self._starts, address) - 1
        start = self._starts[place] if place >= 0 else -1
        number = self._by_start.get(start)
        if number is None or address >= start + self.recording.storages[number].nbytes:
            self.recording.obstacle = self.recording.obstacle or "a kernel reads memory that no tensor of the step holds"
            return None
        strides = tuple(stride // leaf.itemsize for stride in leaf.strides)
        return Memory(number, _NUMPY_TYPES[leaf.dtype], (address - start) // leaf.itemsize, leaf.shape, strides)
