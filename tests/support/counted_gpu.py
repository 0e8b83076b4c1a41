"""A GPU that counts what it is given: kernels, copies, host nodes and waits, on a machine without one.

Tensors of this GPU are CPU tensors that report the device `meta`, so the code for a real GPU runs: its transfers, its waits, and its Triton
launches, which are counted and compute nothing. What a real GPU refuses is refused here as well, such as an operation on tensors of both
devices. Each of PyTorch's operations counts as one kernel; some of them launch several.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from moegraft.operators.experts.forecast import MachineProfile
from moegraft.operators.offload.devices.base import Buffer, Bytes, Stream
from support.virtual_device import Timed, VirtualDevice, VirtualEvent, work_of

GPU = torch.device("meta")
# Operations that allocate or make views, which no kernel does.
FREE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "lift_fresh"})
COPIES = frozenset({"copy_", "_to_copy"})
BLOCKING = frozenset({"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "_unique2"})


@dataclass(slots=True)
class Counts:
    """What a GPU was given.

    Attributes:
        kernels: PyTorch's operations and Triton's launches, memory that is filled included.
        to_host, to_device: copies.
        host_nodes: calls of the host in a stream.
        syncs: waits of the host for the GPU.
        torch_s: the host's time within PyTorch's operations.
    """

    kernels: int = 0
    to_host: int = 0
    to_device: int = 0
    host_nodes: int = 0
    syncs: int = 0
    torch_s: float = 0.0

    def clear(self) -> None:
        for field in fields(self):
            setattr(self, field.name, 0)

    @property
    def copies(self) -> int:
        return self.to_host + self.to_device


class GpuTensor(torch.Tensor):
    """A CPU tensor that reports the counted GPU as its device."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> GpuTensor:
        found: GpuTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=GPU
        )
        return found

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a counted GPU, outside of `counting`")


class _Counter(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts
        self._nested = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._nested:
            return self._run(func, args, kwargs or {})
        start_s, self._nested = time.thread_time(), True
        try:
            return self._run(func, args, kwargs or {})
        finally:
            self._nested = False
            self._counts.torch_s += time.thread_time() - start_s

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name, counts = func.overloadpacket.__name__, self._counts
        if not any(isinstance(leaf, GpuTensor) for leaf in tree_leaves((args, kwargs))) and "device" not in kwargs:
            return func(*args, **kwargs)
        with self:  # in inference mode composite operations arrive undecomposed
            decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        given = [isinstance(leaf, GpuTensor) for leaf in leaves]
        target = kwargs.get("device")
        on_gpu = any(given) if target is None else torch.device(target).type == GPU.type
        if name in COPIES:
            source = given[-1]
            into = given[0] if name == "copy_" else on_gpu
            same_dtype = name == "copy_" and leaves[0].dtype == leaves[-1].dtype
            same_dtype = same_dtype or (name == "_to_copy" and kwargs.get("dtype") in (None, leaves[0].dtype))
            counts.to_host += source and not into
            counts.to_device += into and not source
            counts.kernels += (source and into) or (source != into and not same_dtype)
            counts.syncs += source and not into and not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        elif any(given) and any(not each and leaf.dim() > 0 for each, leaf in zip(given, leaves, strict=True)):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, found the CPU and a GPU")
        elif on_gpu and name in BLOCKING:
            counts.kernels, counts.syncs, counts.to_host = counts.kernels + 1, counts.syncs + 1, counts.to_host + 1
        elif on_gpu and name not in FREE and (func._schema.is_mutable or all(each.alias_info is None for each in func._schema.returns)):
            counts.kernels += 1
        keywords = {**kwargs, "device": torch.device("cpu")} if target is not None else kwargs
        plain_args, plain_kwargs = tree_map(_held, (args, keywords))
        if func._schema.is_mutable:
            func(*plain_args, **plain_kwargs)
            return args[0]
        found = func(*plain_args, **plain_kwargs)
        if name == "empty":
            found.zero_()
        return tree_map(lambda each: GpuTensor(each) if on_gpu and isinstance(each, torch.Tensor) else each, found)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, GpuTensor) else value


@contextmanager
def counting() -> Iterator[Counts]:
    """Count what the body gives to a `CountedGpu`; Triton's kernels are not run, and what they write keeps its zeros."""
    counts = Counts()

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        counts.kernels += 1

    def synchronize() -> None:
        counts.syncs += 1

    wait = VirtualEvent.wait

    def waited(self: VirtualEvent, timeout_s: float | None = None) -> None:
        counts.syncs += not isinstance(self, _CpuEnd)
        wait(self, timeout_s)

    with (
        mock.patch.object(JITFunction, "run", launched),
        mock.patch.object(InterpretedFunction, "run", launched),
        mock.patch.object(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=synchronize)),
        mock.patch.object(VirtualEvent, "wait", waited),
        _Counter(counts),
    ):
        CountedGpu.counts = counts
        yield counts


class _CpuEnd(VirtualEvent):
    """The end of a job of the CPU: waiting for it is no wait for the GPU."""

    __slots__ = ()


class _GpuBuffer:
    array: Bytes | None = None

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.tensor = GpuTensor(torch.zeros(nbytes, dtype=torch.uint8))

    def free(self) -> None:
        return


class _Captured:
    """A captured step that is counted once, when it is captured, and does nothing when it is replayed."""

    def replay(self) -> None:
        return

    def release(self) -> None:
        return


class CountedGpu(VirtualDevice):
    """A virtual device whose tensors are on the counted GPU, and whose launches are made as they are on CUDA."""

    counts = Counts()

    def __init__(self, profile: MachineProfile | None = None) -> None:
        super().__init__(profile)
        self.torch_device = GPU

    def allocate(self, nbytes: int) -> Buffer:  # type: ignore[override]
        return _GpuBuffer(nbytes)

    def copy(self, stream: Stream, target: Buffer | None, target_offset: int, source: Bytes | None, nbytes: int) -> None:
        super().copy(stream, None, 0, None, nbytes)

    def launch(self, stream: Stream, function: Callable[[], None]) -> None:
        function()
        super().launch(stream, Timed(work_of(function)))

    def launch_host(self, stream: Stream, function: int, data: int) -> None:
        self.counts.host_nodes += 1

    def submit_cpu(self, function: Any) -> Any:
        ticket = super().submit_cpu(function)
        if ticket.event is not None:
            ticket.event.__class__ = _CpuEnd
        return ticket

    def capture(self, step: Callable[[], None]) -> _Captured:  # type: ignore[override]
        step()
        return _Captured()
