"""Whether a model is still the one that steps were recorded of: its modules, parameters, settings and hooks."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from moegraft.operators.base import Operator
from moegraft.operators.structure import is_library

_TORCH_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
_DEPTH = 4  # of lists in lists, and the like
# Once other outputs were asked for, transformers leaves hooks on the model, which do nothing while none are.
_CAPTURING = "transformers.utils.output_capturing"


class ModelState:
    """What the recordings of a model rely on: its modules, their parameters and the absence of hooks.

    Modules count wherever they are reached from an attribute of another: in lists, dicts, closures and objects.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules = list(model.modules())
        self._containers: list[tuple[Any, Any]] = []  # each with a copy
        self._cells: list[tuple[CellType, Any]] = []
        self._seen = set(map(id, self._modules))
        for module in self._modules:  # which grows meanwhile
            own = not is_library(type(module))
            if own:
                self._containers.append((vars(module), vars(module).copy()))
            for name, value in vars(module).items():
                if name not in _TORCH_ATTRIBUTES:
                    self._reach(value, own=own)
        modules = self._modules
        self._tables: list[dict[str, Any]] = [
            table for module in modules for table in (module._modules, module._parameters, module._buffers) if table
        ]
        self._copies = [dict(table) for table in self._tables]
        self._hooks = [table for module in modules for table in (module._forward_hooks, module._forward_pre_hooks)]
        self._tensors = list(
            {id(each): each for table in self._tables for each in table.values() if isinstance(each, torch.Tensor)}.values()
        )
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        # Operators copy small vectors when they are loaded, and compute otherwise once one is edited.
        self._edited = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._versions = [tensor._version for tensor in self._edited]
        self.obstacle = "its modules have hooks" if self._hooked() else None
        self._settings: list[tuple[dict[str, Any], str, Any]] = []
        # Attributes of modules that steps read: a forward pass put in the place of the class's, tensors that are no buffers.
        self._attributes: list[tuple[dict[str, Any], str, Any]]
        self._attributes = [(vars(module), "forward", vars(module).get("forward")) for module in modules]
        for module in modules:
            if not is_library(type(module)) or isinstance(module, Operator):
                continue
            for name, value in vars(module).items():
                if name not in _TORCH_ATTRIBUTES and isinstance(value, bool | int | float | str | None):
                    # Numbers of the libraries' own modules hardly ever change: they are compared once for each prompt.
                    (self._attributes if value is None else self._settings).append((vars(module), name, value))
        configs = {id(each): each for module in modules for each in vars(module).values() if isinstance(each, PretrainedConfig)}
        self._settings += [
            (vars(config), name, copy.deepcopy(value))
            for config in configs.values()
            for name, value in vars(config).items()
            if isinstance(value, bool | int | float | str | list | dict | None)
        ]
        self._columns = tuple(zip(*self._attributes, strict=True))  # compared in every step, without a loop in Python

    def _reach(self, value: Any, *, own: bool, depth: int = 0) -> None:
        """Note what an attribute holds; `own`: of a module that is none of the libraries', whose every list, dict and object matters."""
        if depth > _DEPTH or id(value) in self._seen:
            return
        inner: Iterable[Any] = ()
        if isinstance(value, nn.Module):
            self._modules += [module for module in value.modules() if id(module) not in self._seen]
            self._seen.update(map(id, value.modules()))
            return
        if isinstance(value, list | dict | tuple):
            inner = list(value.values()) if isinstance(value, dict) else list(value)
            if not isinstance(value, tuple) and (own or any(isinstance(each, nn.Module | torch.Tensor | FunctionType) for each in inner)):
                self._containers.append((value, value.copy()))
        elif isinstance(value, FunctionType) and not is_library(value):
            cells = [(cell, _contents(cell)) for cell in value.__closure__ or ()]
            self._cells += cells
            inner, own = [contents for _, contents in cells], True
        elif isinstance(value, MethodType):
            inner = value.__self__, value.__func__
        elif isinstance(value, partial):
            inner = value.func, value.args, value.keywords
        elif own and hasattr(value, "__dict__") and not isinstance(value, type | ModuleType | torch.Tensor) and not is_library(type(value)):
            self._containers.append((vars(value), vars(value).copy()))
            inner = list(vars(value).values())
        else:
            return
        self._seen.add(id(value))
        for each in inner:
            self._reach(each, own=own, depth=depth + 1)

    def rely_on(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notice as well when an attribute of a module that is one of `tensors`, or shares its memory, is replaced."""
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors} - {
            tensor.untyped_storage().data_ptr() for tensor in self._tensors
        }
        for module in self._modules:
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in addresses:
                    self._attributes.append((vars(module), name, value))
        self._columns = tuple(zip(*self._attributes, strict=True))

    def _hooked(self) -> bool:
        hooks = (hook for table in self._hooks if table for hook in table.values())
        return any(getattr(hook, "__module__", "") != _CAPTURING for hook in hooks) or bool(nn.modules.module._has_any_global_hook())

    def changed(self, *, fully: bool) -> bool:
        """Whether a module or a parameter was replaced, or a hook added or removed; `fully`: or an attribute of any module."""
        try:
            same = self._tables == self._copies
        except RuntimeError:  # two tensors were compared, of which one replaced the other
            same = False
        tables, names, values = self._columns
        return (
            not same
            or not all(map(operator.is_, map(dict.get, tables, names), values))
            or (fully and any(table.get(name) != value for table, name, value in self._settings))
            or [tensor.data_ptr() for tensor in self._tensors] != self._addresses
            or [tensor._version for tensor in self._edited] != self._versions
            or not all(_same_items(container, kept) for container, kept in self._containers)
            or any(_contents(cell) is not kept for cell, kept in self._cells)
            or self._hooked() != (self.obstacle is not None)
        )


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _same_items(container: Any, kept: Any) -> bool:
    if isinstance(container, dict):
        return container.keys() == kept.keys() and all(map(operator.is_, container.values(), kept.values()))
    return len(container) == len(kept) and all(map(operator.is_, container, kept))
