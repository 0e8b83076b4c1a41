"""The tensors of GGUF files: their block types, and the reading of one matrix at a time as values or as codes.

The block formats are llama.cpp's (ggml-common.h); the package `gguf` dequantises them to float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as BlockType
from gguf import dequantize
from numpy.typing import NDArray

from moegraft.injection.checkpoint.files import Extent
from moegraft.operators.errors import CheckpointError
from moegraft.operators.weight_formats import FORMATS, GGUF_TYPES
from moegraft.operators.weights import Codes, StoredBlocks

Index = int | slice | tuple[int | slice, ...]
WHOLE: Index = ()

FLOATS = {
    BlockType.F64: torch.float64,
    BlockType.F32: torch.float32,
    BlockType.F16: torch.float16,
    BlockType.BF16: torch.bfloat16,
}
# The kernels' formats by block type. F64 is rounded once.
FORMAT_OF = {BlockType[name]: form for name, form in GGUF_TYPES.items()} | {BlockType.F64: FORMATS["float32"]}
GROUP = 32


@dataclass(frozen=True, slots=True, eq=False)
class BlockTensor:
    """One tensor of a mapped GGUF file.

    Attributes:
        shape: outermost dimension first, as in PyTorch; GGUF files have the reverse.
        data: the mapped values; for blocks and bfloat16, the bytes along the last dimension.
        begin: the offset of their bytes in the file.
    """

    name: str
    file: Path
    block_type: BlockType
    shape: tuple[int, ...]
    data: NDArray[Any]
    begin: int

    @property
    def extent(self) -> Extent:
        return Extent(self.file, self.begin, self.data.nbytes, f"{self.name} {self.block_type.name} {self.shape}")

    @property
    def origin(self) -> str:
        return f"{self.file}: {self.name}"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that `read` returns: float32 for blocks."""
        return FLOATS.get(self.block_type, torch.float32)

    @property
    def weight_type(self) -> str:
        """The type that the kernels quantise to and that holds these weights; int8 for other blocks, to whose error it hardly adds."""
        return "int8" if self.is_stored else self.kept_type

    @property
    def kept_type(self) -> str:
        """The weight type that holds these weights as they are."""
        return FORMAT_OF[self.block_type].name

    @property
    def is_stored(self) -> bool:
        """Whether the kernels take the blocks as they are, and do not quantise to their type."""
        return FORMAT_OF[self.block_type].stored

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def read(self, index: Index = WHOLE) -> torch.Tensor:
        """Return the values at `index`, which does not cut the last dimension; a view of the file if its type is not converted.

        Raises:
            CheckpointError: the type cannot be read.
        """
        data = self.data[index]
        if self.block_type is BlockType.BF16:
            return torch.from_numpy(np.ascontiguousarray(data).view(np.uint16)).view(torch.bfloat16)
        if self.block_type in FLOATS:
            return torch.from_numpy(data)
        self.check_type()
        return torch.from_numpy(dequantize(data, self.block_type))

    def check_type(self) -> None:
        """
        Raises:
            CheckpointError: the type cannot be read.
        """
        if self.block_type not in FORMAT_OF:
            known = ", ".join(sorted(kind.name for kind in FORMAT_OF))
            raise CheckpointError(f"{self.origin}: type {self.block_type.name} cannot be read; supported are {known}")

    def codes(self, index: Index = WHOLE) -> Codes | StoredBlocks | None:
        """Return the codes of the matrix at `index`; None if it is in floating point."""
        if self.is_stored:
            return StoredBlocks(np.ascontiguousarray(self.data[index]), self.kept_type)
        if self.block_type is BlockType.Q8_0:
            blocks = _blocks(self.data[index], 2 + GROUP)
            return Codes(_matrix(blocks[..., 2:].view(np.int8)), _scales(blocks), bits=8)
        if self.block_type is BlockType.Q4_0:
            blocks = _blocks(self.data[index], 2 + GROUP // 2)
            pairs = blocks[..., 2:]
            # The low halves of the 16 bytes come first, then the high halves; code 8 is the value 0.
            both = np.concatenate([pairs & 15, pairs >> 4], axis=-1).view(np.int8)
            both -= 8
            return Codes(_matrix(both), _scales(blocks), bits=4)
        return None


def _blocks(rows: NDArray[Any], block_bytes: int) -> NDArray[Any]:
    """Return (rows, bytes) as (rows, groups, block_bytes)."""
    return rows.reshape(rows.shape[0], -1, block_bytes)


def _matrix(codes: NDArray[Any]) -> NDArray[np.int8]:
    return np.ascontiguousarray(codes.reshape(codes.shape[0], -1))


def _scales(blocks: NDArray[Any]) -> NDArray[np.float16]:
    """Return the float16 at the start of each block, (rows, groups)."""
    return np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
