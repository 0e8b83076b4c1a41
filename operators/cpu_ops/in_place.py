"""What the small operators share: recognising what a module computes, and computing it in the module's place.

`cpu_attention`, `cpu_norm`, `cpu_router` and others leave a module where it is, with its weights. Once the model is loaded, each compares
its kernel with the module on random tensors and replaces the module's computation where both agree. What a kernel cannot answer
goes to the module's own class, and so does every call in training mode: a checkpoint of activations then recomputes the very path, with
gradients on or off.
"""

from __future__ import annotations

import copy
import functools
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from moegraft.cpu_backend import Runtime
from moegraft.operators.base import InPlaceOperator
from moegraft.operators.context import InjectionContext
from moegraft.operators.cpu import describe, is_dense
from moegraft.operators.kernels.launch import compile_errors, interpreted, why_unavailable

logger = logging.getLogger(__name__)

OPERATOR = "_moegraft_operator"  # the attribute of a module that holds the operator which answers its calls, or None


class NotRecognisedError(Exception):
    """No form of the kernel computes what a module computes; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The small operators have no options."""


class CpuOperator(InPlaceOperator):
    """Base of the operators that compute a module in place wherever a kernel, of the CPU for most, computes the same."""

    options_type = NoOptions
    fallback_level: ClassVar[int] = logging.INFO  # of the log message where a module on the CPU keeps its own computation

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.runtime = runtime
        self._device = torch.device("cpu")  # of the kernel
        self._stock_attributes: Mapping[str, object] = {}  # empty unless the kernel computes for the module

    @classmethod
    def unsupported_reason(cls, module: nn.Module, options: NoOptions) -> str | None:
        return None  # modules are recognised by what they compute, which takes their weights

    @classmethod
    def build(cls, module: nn.Module, options: NoOptions, context: InjectionContext) -> Self:
        return cls(context.runtime)

    @property
    def on_gpu(self) -> bool:
        """Whether Triton kernels compute."""
        return self._device.type != "cpu"

    @abstractmethod
    def install(self, module: nn.Module) -> dict[str, object]:
        """Let the kernel compute for `module`, which is loaded; return the attributes that are replaced, with their former values.

        Raises:
            NotRecognisedError: the kernel does not compute what the module computes.
        """

    def on_model_loaded(self, model: PreTrainedModel, path: str) -> None:
        module = model.get_submodule(path)
        try:
            self._stock_attributes = self.install(module)
        except NotRecognisedError as error:
            # On a GPU nothing is lost: rules name these operators for whichever modules are on the CPU.
            on_cpu = all(tensor.is_cpu for tensor in (*module.parameters(), *module.buffers()))
            level, owner = self.fallback_level if on_cpu else logging.DEBUG, type(module).__name__
            logger.log(level, "%s: %s (%s) keeps its own %s: %s", self.name, path, owner, self.kind, error)

    @contextmanager
    def set_aside(self, module: nn.Module) -> Iterator[None]:
        replaced = {name: module.__dict__[name] for name in self._stock_attributes}
        module.__dict__.update(self._stock_attributes)
        try:
            yield
        finally:
            module.__dict__.update(replaced)

    @contextmanager
    def kernels_compile(self) -> Iterator[None]:
        """
        Raises:
            NotRecognisedError: the kernels that the body launches are of Triton, which cannot compile them here.
        """
        reason = why_unavailable() if self.on_gpu and not interpreted() else None
        if reason is not None:
            raise NotRecognisedError(reason)
        failures = compile_errors() if self.on_gpu else ()
        try:
            yield
        except failures as error:
            raise NotRecognisedError(f"its kernel cannot be compiled here ({error})") from error

    def placement(self) -> str:
        where = f"the CPU ({describe(self.runtime)})" if self._device.type == "cpu" else str(self._device)
        return f"{self.kind}: {self.name}, {where if self._stock_attributes else 'left to PyTorch'}"


class CpuForwardOperator(CpuOperator):
    """Base of the operators that answer the calls of a module with one weight, as long as the module is as it was when it was loaded."""

    arguments = 1  # of the calls that are answered
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)  # on other devices than the CPU by Triton
    attribute_names: ClassVar[tuple[str, ...]]  # the names, by family, of the one number of the module that the kernel has a copy of

    @abstractmethod
    def fit(self, module: nn.Module, weight: torch.Tensor, value: float) -> None:
        """Find the form of the kernel that computes what `module` computes, with its number `value`.

        Raises:
            NotRecognisedError: there is none.
        """

    @abstractmethod
    def compute(self, module: nn.Module, x: torch.Tensor, weight: torch.Tensor, *others: Any) -> Any:
        """Return what the module returns for `x`, of the weight's device, dtype and last size; None where the kernel cannot."""

    def install(self, module: nn.Module) -> dict[str, object]:
        weight = module._parameters.get("weight")
        if weight is None or weight.device.type not in self.device_types or not is_dense(weight):
            raise NotRecognisedError(f"it holds no weight on a device of type {' or '.join(self.device_types)} itself")
        names = [name for name in self.attribute_names if isinstance(getattr(module, name, None), int | float)]
        if not names:
            raise NotRecognisedError(f"it holds no number named {' or '.join(self.attribute_names)}")
        self._attribute, self._value = names[0], getattr(module, names[0])
        self._device, self._dtype, self._shape, self._columns = weight.device, weight.dtype, weight.shape, weight.shape[-1:]
        with self.kernels_compile():
            self.fit(module, weight, self._value)
        return let_answer(self, module)

    def __deepcopy__(self, memo: object) -> Self:
        return self  # it answers for the weight of the module that asks, such as PEFT's copy of one that is trained whole

    def answer(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns for these arguments, or None for a call that is left to the module."""
        x = args[0] if len(args) == self.arguments and not kwargs else None
        weight = module._parameters.get("weight")  # None while PEFT puts an adapted one in its place
        if (
            type(x) is not torch.Tensor
            or weight is None
            or not x.dtype == weight.dtype == self._dtype
            or not x.device == weight.device == self._device
            or weight.shape != self._shape
            or x.shape[-1:] != self._columns
            or not is_dense(weight)
            or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
            or module.__dict__.get(self._attribute) != self._value
        ):
            return None
        return self.compute(module, x, weight, *args[1:])


def let_answer(operator: Any, module: nn.Module, method: str = "forward") -> dict[str, object]:
    """Let `operator.answer` answer the calls of a module's method; return what `CpuOperator.install` does.

    The module gets a subclass with another `method`: nothing refers back to the module, copies stay copies, and code that looks for the
    class or for the signature of `forward` finds them.
    """
    cls: Any = type(module)  # mypy takes a module's __hash__ for that of its class
    module.__class__ = _answered(cls, method)
    module.__dict__[OPERATOR] = operator
    return {OPERATOR: None}


@lru_cache(maxsize=512)
def _answered(cls: Any, method: str) -> type[nn.Module]:
    """Return a subclass whose `method` asks the `answer` of the operator that the module's attribute OPERATOR holds."""
    own = getattr(cls, method)

    @functools.wraps(own)
    def asking(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        operator = self.__dict__.get(OPERATOR)
        if operator is not None and not self.training and not torch.compiler.is_compiling():
            answer = operator.answer(self, *args, **kwargs)
            if answer is not None:
                return answer
        return own(self, *args, **kwargs)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {method: asking, **names})


def probe(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a function of the model's returns for random tensors.

    Raises:
        NotRecognisedError: it cannot be called with them.
    """
    try:
        with torch.no_grad():
            return function(*args, **kwargs)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise NotRecognisedError(f"it cannot be run on random tensors ({type(error).__name__}: {error})") from error


def probe_forward(module: nn.Module, x: torch.Tensor, tensors: Mapping[str, torch.Tensor], *others: Any) -> Any:
    """Return what the class of `module` computes for `x` and `others`, without hooks, as if it held `tensors` under their names."""
    stand_in: Any = copy.copy(module)
    parameters = {name: nn.Parameter(tensors[name], False) if name in tensors else own for name, own in module._parameters.items()}
    buffers = {name: tensors.get(name, own) for name, own in module._buffers.items()}
    stand_in.__dict__ = {**module.__dict__, "_parameters": parameters, "_buffers": buffers}
    return probe(type(stand_in).forward, stand_in, x, *others)
