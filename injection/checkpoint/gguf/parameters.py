"""A model's parameters from GGUF tensors, with the changes of llama.cpp's converter undone, and the weight sources of operators."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.injection.checkpoint.files import DTYPES, Conversion, Extent, LazyTensor, stored_identity
from moegraft.injection.checkpoint.gguf.blocks import FLOATS, WHOLE, BlockTensor, Index
from moegraft.operators.errors import CheckpointError
from moegraft.operators.layout import ExpertsLayout
from moegraft.operators.weights import Codes, Part, Segments, StoredBlocks, WeightSource, reordered, widest

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Stored(Conversion):
    """The storage of one parameter."""

    shape: tuple[int, ...]

    @property
    @abstractmethod
    def tensors(self) -> Sequence[BlockTensor]: ...

    @property
    def extents(self) -> list[Extent]:
        return [tensor.extent for tensor in self.tensors]

    @property
    def dtype(self) -> torch.dtype:
        return widest(tensor.dtype for tensor in self.tensors)

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return DTYPE_NAMES[self.dtype]


@dataclass(frozen=True)
class Plain(Stored):
    """A parameter in one tensor, which may have other dimensions of size 1, or in several that have its rows one after the other.

    Attributes:
        rows: the stored row of each row of the parameter; None if the order is the same.
        columns, kinds: as `Change` has them, for this config.
        load: the values from the stored ones; None if they are the same.
    """

    parts: tuple[BlockTensor, ...]
    shape: tuple[int, ...]
    rows: NDArray[np.int64] | None = None
    columns: tuple[int, int] | None = None
    kinds: tuple[int, tuple[int, ...]] | None = None
    load: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def tensors(self) -> Sequence[BlockTensor]:
        return self.parts

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        first = self.parts[0]
        whole = first.read() if len(self.parts) == 1 else torch.cat([part.read().to(self.dtype) for part in self.parts])
        values = whole.reshape(self.shape)
        if self.rows is not None:
            values = values[torch.from_numpy(self.rows)]
        if self.columns is not None:
            return reordered(values, self.columns[::-1])
        if self.load is not None:
            return self._loaded(values)
        return values.clone() if len(self.parts) == 1 and self.rows is None and first.block_type in FLOATS else values

    def _loaded(self, values: torch.Tensor) -> torch.Tensor:
        assert self.load is not None
        loaded = self.load(values)
        if not bool(loaded.isfinite().all()):
            raise CheckpointError(f"{self.parts[0].origin}: a value is out of the range of this tensor; download the file again")
        return loaded

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2 and all(len(part.shape) == 2 for part in self.parts) and self.load is None

    @property
    def is_of_two_types(self) -> bool:
        """Whether it is in two tensors of different types, which can be multiplied with one after the other."""
        ordered = self.rows is None or self.kinds is not None
        return self.is_matrix and ordered and len(self.parts) == 2 and self.parts[0].kept_type != self.parts[1].kept_type

    def codes(self) -> Codes | StoredBlocks | None:
        """Return the codes; None if there are none, or if parts have blocks of different types."""
        found = [part.codes() for part in self.parts] if self.is_matrix else []
        order = slice(None) if self.rows is None else self.rows
        blocks = [each for each in found if isinstance(each, StoredBlocks)]
        codes = [each for each in found if isinstance(each, Codes)]
        if blocks and len(blocks) == len(found) and len({each.weight_type for each in blocks}) == 1:
            return StoredBlocks(_together([each.blocks for each in blocks])[order], blocks[0].weight_type, self.columns)
        if codes and len(codes) == len(found):
            values, scales = _together([each.codes for each in codes]), _together([each.scales for each in codes])
            return Codes(values[order], scales[order], max(each.bits for each in codes), self.columns)
        return None


def _together(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the rows of all arrays, without copying those of a single one."""
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


@dataclass(frozen=True)
class SplitKeyValue(Stored):
    """`kv_b_proj` of DeepSeek's attention, stored as `attn_k_b (heads, rank, nope)` and `attn_v_b (heads, v_dim, rank)`."""

    key: BlockTensor
    value: BlockTensor
    shape: tuple[int, ...]

    @property
    def tensors(self) -> Sequence[BlockTensor]:
        return (self.key, self.value)

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        key, value = self.key.read().transpose(1, 2), self.value.read()
        return torch.cat([key.to(self.dtype), value.to(self.dtype)], dim=1).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One part of all experts of a layer: one tensor (E, ...), `rows` of a tensor with gate and up, or one tensor per expert."""

    tensors: tuple[BlockTensor, ...]
    rows: slice | None = None

    def at(self, expert: int) -> tuple[BlockTensor, Index]:
        """Return the tensor that holds `expert`, and the expert's index in it."""
        if len(self.tensors) > 1:
            return self.tensors[expert], WHOLE
        return self.tensors[0], expert if self.rows is None else (expert, self.rows)


@dataclass(frozen=True)
class FusedExperts(Stored):
    """A fused parameter of an experts module that is not replaced: `gate_up_proj` or `down_proj`."""

    layout: ExpertsLayout
    parts: Mapping[Part, ExpertPart]
    shape: tuple[int, ...]

    @property
    def tensors(self) -> Sequence[BlockTensor]:
        return tuple(dict.fromkeys(tensor for part in self.parts.values() for tensor in part.tensors))

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype)
        for expert in range(self.layout.num_experts):
            for name, part in self.parts.items():
                tensor, where = part.at(expert)
                self.layout.cut(name, whole[expert]).copy_(tensor.read(where))
        return whole


def lazy(stored: Stored) -> LazyTensor:
    """Return a parameter as a `LazyTensor`."""
    first = stored.tensors[0]
    return LazyTensor(", ".join(tensor.name for tensor in stored.tensors[:2]), first.file, stored)


def check_shape(tensor: BlockTensor, expected: tuple[int, ...]) -> None:
    """
    Raises:
        CheckpointError: the tensor has another shape, ignoring dimensions of size 1.
    """
    if [size for size in tensor.shape if size != 1] != [size for size in expected if size != 1]:
        raise CheckpointError(f"{tensor.origin}: shape {tensor.shape}, and the model has {expected}")


class GgufExperts(WeightSource):
    """A `WeightSource` over one experts module; pieces are read from the mapped file."""

    def __init__(self, layout: ExpertsLayout, parts: Mapping[Part, ExpertPart]) -> None:
        self._layout = layout
        self._parts = parts

    @property
    def dtype(self) -> torch.dtype:
        return widest(tensor.dtype for name, part in self._parts.items() if not name.endswith("_bias") for tensor in part.tensors)

    @property
    def fingerprint(self) -> str | None:
        parts = [(f"{name} {part.rows}", tensor.extent) for name, part in self._parts.items() for tensor in part.tensors]
        return stored_identity(replace(extent, meaning=f"{part} {extent.meaning}") for part, extent in parts)

    def parts(self) -> Sequence[Part]:
        return self._layout.parts()

    def read(self, part: Part, expert: int = 0) -> torch.Tensor:
        tensor, index = self._parts[part].at(expert)
        return tensor.read(index)

    def read_codes(self, part: Part, expert: int, weight_type: str) -> Codes | StoredBlocks | None:
        tensor, index = self._parts[part].at(expert)
        return tensor.codes(index)

    def origin(self, part: Part, expert: int = 0) -> str:
        tensor, index = self._parts[part].at(expert)
        return tensor.origin if index == () else f"{tensor.origin}[{expert}]"


class GgufLinear(WeightSource):
    """A `WeightSource` over a linear layer."""

    def __init__(self, parts: Mapping[Part, Stored]) -> None:
        self._parts = parts

    @property
    def dtype(self) -> torch.dtype:
        return self._parts["weight"].dtype

    @property
    def fingerprint(self) -> str | None:
        return stored_identity(extent for part in self._parts.values() for extent in part.extents)

    def parts(self) -> Sequence[Part]:
        return tuple(self._parts)

    def read(self, part: Part, expert: int = 0) -> torch.Tensor:
        return self._parts[part][...]

    def read_codes(self, part: Part, expert: int, weight_type: str) -> Codes | StoredBlocks | None:
        stored = self._parts[part]
        return stored.codes() if isinstance(stored, Plain) else None

    def segments(self) -> Segments:
        weight = self._parts["weight"]
        assert isinstance(weight, Plain) and weight.is_of_two_types, "only such layers have the weight types of several tensors"
        sources = [GgufLinear({"weight": Plain((part,), part.shape)}) for part in weight.parts]
        return Segments(sources, *(weight.kinds or (1, tuple(part.shape[0] for part in weight.parts))))

    def origin(self, part: Part, expert: int = 0) -> str:
        return self._parts[part].tensors[0].origin
