"""The weights of one module in a GGUF file, for the operator that replaces it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from moegraft.injection.checkpoint.files import fingerprint
from moegraft.injection.gguf.parameters import ExpertPart, Plain, Stored, lazy
from moegraft.operators.experts.layout import ExpertsLayout
from moegraft.operators.weights import Codes, Part, SuperBlocks, widest


class GgufExperts:
    """A `WeightSource` and `CodedSource` over one experts module; each piece is read straight from the mapped file."""

    def __init__(self, layout: ExpertsLayout, parts: Mapping[Part, ExpertPart]) -> None:
        self._layout = layout
        self._parts = parts

    @property
    def dtype(self) -> torch.dtype:
        return widest(tensor.dtype for name, part in self._parts.items() if not name.endswith("_bias") for tensor in part.tensors)

    @property
    def fingerprint(self) -> str | None:
        stored = [Plain(tensor, tensor.shape) for part in self._parts.values() for tensor in part.tensors]
        return "gguf " + fingerprint([lazy(one) for one in stored])

    def parts(self) -> Sequence[Part]:
        return self._layout.parts()

    def read(self, part: Part, expert: int = 0) -> torch.Tensor:
        tensor, index = self._parts[part].at(expert)
        return tensor.read(index)

    def read_codes(self, part: Part, expert: int = 0) -> Codes | SuperBlocks | None:
        tensor, index = self._parts[part].at(expert)
        return tensor.codes(index)

    def origin(self, part: Part, expert: int = 0) -> str:
        tensor, index = self._parts[part].at(expert)
        return tensor.origin if index == () else f"{tensor.origin}[{expert}]"


class GgufLinear:
    """A `WeightSource` and `CodedSource` over a linear layer."""

    def __init__(self, parts: Mapping[Part, Stored]) -> None:
        self._parts = parts

    @property
    def dtype(self) -> torch.dtype:
        return widest(tensor.dtype for tensor in self._parts["weight"].tensors)

    @property
    def fingerprint(self) -> str | None:
        return "gguf " + fingerprint([lazy(stored) for stored in self._parts.values()])

    def parts(self) -> Sequence[Part]:
        return tuple(self._parts)

    def read(self, part: Part, expert: int = 0) -> torch.Tensor:
        return self._parts[part][...]

    def read_codes(self, part: Part, expert: int = 0) -> Codes | SuperBlocks | None:
        stored = self._parts[part]
        return stored.codes() if isinstance(stored, Plain) else None

    def origin(self, part: Part, expert: int = 0) -> str:
        return self._parts[part].tensors[0].origin
