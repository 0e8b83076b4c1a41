"""The weights of a module that is already in memory, and the graft of a model that is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.experts.layout import ExpertsLayout, read_layout
from moegraft.operators.weights import Part, WeightSource, widest


class ModuleExperts:
    """A `WeightSource` over a live experts module; pieces are views, on the CPU."""

    def __init__(self, path: str, module: nn.Module, layout: ExpertsLayout) -> None:
        self._path = path
        self._layout = layout
        self._parameters = {name: module.get_parameter(name).detach() for name in map(layout.parameter, layout.parts())}

    @property
    def dtype(self) -> torch.dtype:
        return widest(parameter.dtype for name, parameter in self._parameters.items() if not name.endswith("_bias"))

    @property
    def fingerprint(self) -> str | None:
        return None

    def parts(self) -> Sequence[Part]:
        return self._layout.parts()

    def read(self, part: Part, expert: int = 0) -> torch.Tensor:
        return self._layout.cut(part, self._parameters[self._layout.parameter(part)][expert]).to("cpu")

    def origin(self, part: Part, expert: int = 0) -> str:
        return f"{self._path}.{self._layout.parameter(part)}[{expert}]"


class ModuleLinear:
    """A `WeightSource` over a live linear layer."""

    def __init__(self, path: str, module: nn.Linear) -> None:
        self._path = path
        self._parameters: dict[Part, torch.Tensor] = {"weight": module.weight.detach()}
        if module.bias is not None:
            self._parameters["bias"] = module.bias.detach()

    @property
    def dtype(self) -> torch.dtype:
        return self._parameters["weight"].dtype

    @property
    def fingerprint(self) -> str | None:
        return None

    def parts(self) -> Sequence[Part]:
        return tuple(self._parameters)

    def read(self, part: Part, expert: int = 0) -> torch.Tensor:
        return self._parameters[part].to("cpu")

    def origin(self, part: Part, expert: int = 0) -> str:
        return f"{self._path}.{part}"


def live_source(path: str, module: nn.Module) -> WeightSource:
    """The source for an operator that replaces `module`."""
    return ModuleLinear(path, module) if isinstance(module, nn.Linear) else ModuleExperts(path, module, read_layout(module))


def refuse_meta(path: str, module: nn.Module) -> None:
    """
    Raises:
        UnsupportedModelError: the module's weights are not in memory.
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        raise UnsupportedModelError(
            f"{path}: its weights are not in memory (on meta, or offloaded by accelerate); pass the model's folder or hub id instead, "
            "or the whole model on meta with checkpoint=FOLDER"
        )
