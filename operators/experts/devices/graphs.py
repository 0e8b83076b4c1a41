"""A CUDA graph's stand-in on emulated devices: the operations of a step, noted once and done again on the same tensors.

As in a real capture nothing happens to anybody's tensors while a step is noted, addresses and shapes are fixed, and Python code runs once
alone: what a step should decide anew each time, and does in Python, shows as a wrong result here as well. What was noted is handed to the
device's streams at each replay, so forks and joins run side by side as far as the device lets them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moegraft.operators.experts.devices.interface import DeviceError, Work

if TYPE_CHECKING:
    from moegraft.operators.experts.devices.emulated import EmulatedDevice

Step = Callable[[], None]
# What has to wait for the device, since the host reads a value or a shape depends on one.
WAITING = frozenset(
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
    """One operation on tensors; done again, its results go to where the first ones are."""

    __slots__ = ("_arguments", "_function", "_named", "_results")

    def __init__(self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any], results: Any) -> None:
        self._function = function
        self._arguments = arguments
        self._named = named
        self._results = _tensors(results)

    def again(self) -> None:
        found = _tensors(self._function(*self._arguments, **self._named))
        for kept, new in zip(self._results, found, strict=bool(self._results)):
            kept.copy_(new)


class StepRecorder(TorchDispatchMode):
    """Notes operations, and the device's own calls between them.

    Attributes:
        items: in their order; operations with nothing between them together.
        thread: the one that captures.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.items: list[Step | list[Operation]] = []
        self.thread = threading.get_ident()
        self._device = device

    def keep(self, hand_over: Step) -> None:
        self.items.append(hand_over)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func.overloadpacket.__name__ in WAITING or _selects(func, args):
            raise DeviceError(f"{self._device}: {func} waits for the device, which a captured step cannot")
        with self:  # under inference mode operations come whole that are others put together
            whole = func.decompose(*args, **named)
        if whole is not NotImplemented:
            return whole
        written = [result.alias_info for result in func._schema.returns if result.alias_info is not None]
        if func._schema.is_mutable:
            self._note(Operation(func, args, named, None))
            return _written(func, args, named)
        results = func(*args, **named)
        if not written:  # views are made once
            self._note(Operation(func, args, named, results))
        return results

    def _note(self, operation: Operation) -> None:
        if not self.items or not isinstance(self.items[-1], list):
            self.items.append([])
        last = self.items[-1]
        assert isinstance(last, list), "it was just put there"
        last.append(operation)


class EmulatedGraph:
    """What a recorder noted, for the streams of its device."""

    def __init__(self, device: EmulatedDevice, items: Sequence[Step | list[Operation]]) -> None:
        self._device = device
        self._items = items

    def replay(self) -> None:
        compute = self._device.stream("compute")
        for item in self._items:
            if isinstance(item, list):
                self._device.launch(compute, partial(_all_again, item), Work("dense"))
            else:
                item()

    def release(self) -> None:
        self._items = ()


@torch.inference_mode()
def _all_again(operations: Sequence[Operation]) -> None:
    for operation in operations:
        operation.again()


def _selects(func: Any, args: Sequence[Any]) -> bool:
    """Whether an index says which places are meant, so that the shape depends on values."""
    if func.overloadpacket.__name__ not in ("index", "index_put", "index_put_"):
        return False
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _tensors(results: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """What an operation that writes into its arguments returns: those arguments."""
    given = dict(_given(func, args, named))
    places = {argument.alias_info: argument.name for argument in func._schema.arguments if argument.alias_info is not None}
    names = [_place_of(result, func, places) for result in func._schema.returns]
    found = [given[name] for name in names]
    return found[0] if len(found) == 1 else tuple(found) or None


def _given(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        yield argument.name, value
    yield from named.items()


def _place_of(result: Any, func: Any, places: Mapping[Any, str]) -> str:
    for alias, name in places.items():
        if result.alias_info is not None and alias.before_set & result.alias_info.before_set:
            return name
    raise DeviceError(f"{func} writes into what it is given and makes new tensors: an emulated device cannot capture it")
