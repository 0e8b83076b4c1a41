"""The emulated devices' counterpart of a CUDA graph: the operations of a step, recorded once and repeated on the same tensors.

As in a real capture, recording changes no tensor of the caller, addresses and shapes are fixed, and Python code runs once: a decision that
a step should make each time, and makes in Python, shows as a wrong result here as well. A replay submits the recorded calls to the device's
streams, so that forks and joins overlap as far as the device lets them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moegraft.operators.offload.devices.base import Device, DeviceError

Step = Callable[[], None]

# Operations that wait for the device, since the host reads a value or a shape depends on one.
BLOCKING = frozenset(
    {
        "_local_scalar_dense",
        "is_nonzero",
        "equal",
        "nonzero",
        "nonzero_numpy",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
        "repeat_interleave",
    }
)


class Operation:
    """One operation on tensors; repeating it writes into the tensors that its first run returned."""

    __slots__ = ("_arguments", "_function", "_keywords", "_results")

    def __init__(self, function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], results: Any) -> None:
        self._function = function
        self._arguments = arguments
        self._keywords = keywords
        self._results = _tensors(results)

    def repeat(self) -> None:
        found = _tensors(self._function(*self._arguments, **self._keywords))
        for kept, new in zip(self._results, found, strict=bool(self._results)):
            kept.copy_(new)


class StepRecorder(TorchDispatchMode):
    """Records operations, and the device's own calls between them.

    Attributes:
        items: in order: a call of the device, or a run of operations without one in between.
        thread: the capturing thread.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.items: list[Step | list[Operation]] = []
        self.thread = threading.get_ident()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func.overloadpacket.__name__ in BLOCKING or _selects_by_mask(func, args):
            raise DeviceError(f"{self._device}: {func} waits for the device, which a captured step cannot")
        with self:  # in inference mode composite operations arrive undecomposed
            decomposed = func.decompose(*args, **keywords)
        if decomposed is not NotImplemented:
            return decomposed
        if func._schema.is_mutable:
            self._add(Operation(func, args, keywords, None))
            return _written_arguments(func, args, keywords)
        results = func(*args, **keywords)
        if all(result.alias_info is None for result in func._schema.returns):  # views are made once
            self._add(Operation(func, args, keywords, results))
        return results

    def _add(self, operation: Operation) -> None:
        if self.items and isinstance(self.items[-1], list):
            self.items[-1].append(operation)
        else:
            self.items.append([operation])


class NumberGuard(TorchFunctionMode):
    """Refuses tensors on the device that are made from numbers: the host copies them there, and waits, which a captured step cannot.

    Without a device, or on "cpu" by name, they stay on the host, where operations of a GPU read them as numbers.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        name = getattr(func, "__name__", "")
        made = name == "new_tensor" or (name in ("tensor", "as_tensor") and keywords.get("device") not in (None, "cpu"))
        given = args[1:2] if name == "new_tensor" else args[:1]
        if made and not isinstance(given[0] if given else keywords.get("data"), torch.Tensor):
            raise DeviceError(f"{self._device}: torch.{name} copies a number from the host, which a captured step cannot")
        return func(*args, **keywords)


class EmulatedGraph:
    """A recorded step, ready to be submitted to the streams of its device."""

    def __init__(self, device: Device, items: Sequence[Step | list[Operation]]) -> None:
        self._device = device
        self._items = items

    def replay(self) -> None:
        compute = self._device.stream("compute")
        for item in self._items:
            if isinstance(item, list):
                self._device.launch(compute, partial(_repeat, item))
            else:
                item()

    def release(self) -> None:
        self._items = ()


@torch.inference_mode()
def _repeat(operations: Sequence[Operation]) -> None:
    for operation in operations:
        operation.repeat()


def _selects_by_mask(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an index is a mask, so that the shape depends on values."""
    if func.overloadpacket.__name__ not in ("index", "index_put", "index_put_"):
        return False
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _tensors(results: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def _written_arguments(func: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Return what an operation that writes into its arguments returns: those arguments."""
    arguments = func._schema.arguments
    values = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(keywords)
    found = []
    for result in func._schema.returns:
        aliases = result.alias_info.before_set if result.alias_info is not None else set()
        written = (each.name for each in arguments if each.alias_info is not None and each.alias_info.before_set & aliases)
        name = next(written, None)
        if name is None:
            raise DeviceError(f"{func} writes into its arguments and also makes new tensors: an emulated device cannot capture it")
        found.append(values[name])
    return found[0] if len(found) == 1 else tuple(found) or None
