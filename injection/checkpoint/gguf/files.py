"""The GGUF files of one model: found, and every part accounted for.

The tensors of GGUF files: what their types mean, and one matrix of them at a time as values or as codes.

The block formats are llama.cpp's (ggml-common.h); the package `gguf` turns them into float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as BlockType
from gguf import Keys, dequantize
from numpy.typing import NDArray

from moegraft.injection.checkpoint.gguf.header import GgufFile
from moegraft.operators.errors import CheckpointError
from moegraft.operators.weights import Codes, SuperBlocks

Index = int | slice | tuple[int | slice, ...]
WHOLE: Index = ()

FLOATS = {
    BlockType.F64: torch.float64,
    BlockType.F32: torch.float32,
    BlockType.F16: torch.float16,
    BlockType.BF16: torch.bfloat16,
}
# What the kernel computes with as it is, and its name for it.
WEIGHT_TYPES = {
    BlockType.F64: "float32",
    BlockType.F32: "float32",
    BlockType.F16: "float16",
    BlockType.BF16: "bfloat16",
    BlockType.Q8_0: "int8",
    BlockType.Q4_0: "int4",
}
# What the kernel computes with as it is, on the CPU, and its name for it; anywhere else it is converted.
SUPER_BLOCKS = {BlockType.Q4_K: "q4_k", BlockType.Q6_K: "q6_k"}
# What goes through float32; of these, int8 loses nothing that shows beside what the file has lost already.
CONVERTED = frozenset(
    BlockType[name]
    for name in (
        *("Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
        *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0"),
    )
)
GROUP = 32


@dataclass(frozen=True, slots=True, eq=False)
class BlockTensor:
    """One tensor of a mapped GGUF file.

    Attributes:
        shape: outermost dimension first, as PyTorch has it and GGUF has not.
        data: mapped: values, or, for blocks and bfloat16, bytes along the last dimension.
    """

    name: str
    file: Path
    block_type: BlockType
    shape: tuple[int, ...]
    data: NDArray[Any]

    @property
    def origin(self) -> str:
        return f"{self.file}: {self.name}"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `read`: float32 for blocks."""
        return FLOATS.get(self.block_type, torch.float32)

    @property
    def weight_type(self) -> str:
        """The kernel's type that holds these weights: exactly, or, for blocks that it does not know, int8."""
        return WEIGHT_TYPES.get(self.block_type, "int8")

    @property
    def kept_type(self) -> str:
        """As `weight_type`, of all types that the CPU's kernel has: super-blocks are kept."""
        return SUPER_BLOCKS.get(self.block_type, self.weight_type)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def read(self, index: Index = WHOLE) -> torch.Tensor:
        """The values at `index`, which leaves the last dimension whole; a view of the file where it has them as they are.

        Raises:
            CheckpointError: a type that has no values to compute with.
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
            CheckpointError: a type that has no values to compute with.
        """
        if self.block_type not in WEIGHT_TYPES and self.block_type not in CONVERTED:
            known = ", ".join(sorted({kind.name for kind in (*WEIGHT_TYPES, *CONVERTED)}))
            raise CheckpointError(f"{self.origin}: type {self.block_type.name} cannot be read; supported are {known}")

    def codes(self, index: Index = WHOLE) -> Codes | SuperBlocks | None:
        """The matrix at `index` as the file codes it, where those are codes that the kernel has, else None."""
        if self.block_type in SUPER_BLOCKS:
            return SuperBlocks(np.ascontiguousarray(self.data[index]), SUPER_BLOCKS[self.block_type])
        if self.block_type is BlockType.Q8_0:
            blocks = _blocks(self.data[index], 2 + GROUP)
            return Codes(_matrix(blocks[..., 2:].view(np.int8)), _scales(blocks), bits=8)
        if self.block_type is BlockType.Q4_0:
            blocks = _blocks(self.data[index], 2 + GROUP // 2)
            pairs = blocks[..., 2:]
            # The low halves of the 16 bytes come first, then the high ones; 8 stands for zero.
            both = np.concatenate([pairs & 15, pairs >> 4], axis=-1).view(np.int8)
            both -= 8
            return Codes(_matrix(both), _scales(blocks), bits=4)
        return None


def _blocks(rows: NDArray[Any], block_bytes: int) -> NDArray[Any]:
    """(rows, bytes) as (rows, groups, block_bytes)."""
    return rows.reshape(rows.shape[0], -1, block_bytes)


def _matrix(codes: NDArray[Any]) -> NDArray[np.int8]:
    return np.ascontiguousarray(codes.reshape(codes.shape[0], -1))


def _scales(blocks: NDArray[Any]) -> NDArray[np.float16]:
    """The float16 that each block begins with, (rows, groups)."""
    return np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]


PART = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
SUFFIX = ".gguf"
MAX_LISTED = 3
# An image or speech tower, which llama.cpp keeps in a file beside its language model.
TOWER = "mmproj"


def find_parts(path: Path) -> list[Path]:
    """The files of the one model at `path`: a file, any part of a split one, or a folder with one model.

    Raises:
        CheckpointError: there is none, there are two, or a part is missing.
    """
    if path.is_dir():
        return _parts_of(_only_model(path))
    if not path.is_file():
        raise CheckpointError(f"{path}: no such GGUF file or folder")
    return _parts_of(path)


def _only_model(folder: Path) -> Path:
    models: dict[str, Path] = {}
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        if TOWER not in file.name.lower():
            part = PART.fullmatch(file.name)
            models.setdefault(part["model"] if part else file.name.removesuffix(SUFFIX), file)
    if not models:
        raise CheckpointError(f"{folder}: no {SUFFIX} file in this folder")
    if len(models) > 1:
        names = ", ".join(file.name for file in models.values())
        raise CheckpointError(f"{folder}: {len(models)} models in this folder, of which one is to be loaded; name one file of it: {names}")
    return next(iter(models.values()))


def _parts_of(file: Path) -> list[Path]:
    part = PART.fullmatch(file.name)
    if part is None:
        return [file]
    count, number = int(part["count"]), int(part["number"])
    if not 1 <= number <= count:
        raise CheckpointError(f"{file}: by its name this is part {number} of {count}; give it back the name that it was downloaded under")
    parts = [file.with_name(f"{part['model']}-{number:05}-of-{part['count']}{SUFFIX}") for number in range(1, count + 1)]
    missing = [path.name for path in parts if not path.is_file()]
    if missing:
        more = f" and {len(missing) - MAX_LISTED} more" if len(missing) > MAX_LISTED else ""
        raise CheckpointError(f"{file.parent}: {', '.join(missing[:MAX_LISTED])}{more} of a model in {count} parts is missing; download it")
    return parts


def merge(files: Sequence[GgufFile]) -> dict[str, BlockTensor]:
    """The tensors of all parts.

    Raises:
        CheckpointError: the parts are not those of one model.
    """
    first = files[0]
    tensors: dict[str, BlockTensor] = {}
    for position, file in enumerate(files):
        _check_part(file, position, len(files))
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{tensor.origin}: also in {tensors[name].file.name}; these are not the parts of one model")
            tensors[name] = tensor
    wanted = first.integer(Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT)
    if len(files) > 1 and wanted is not None and wanted != len(tensors):
        raise CheckpointError(
            f"{first.path}: {wanted} tensors in all parts are announced, {len(tensors)} are there; download all parts again"
        )
    return tensors


def _check_part(file: GgufFile, position: int, parts: int) -> None:
    count, number = (file.integer(key) or 0 for key in (Keys.Split.LLM_KV_SPLIT_COUNT, Keys.Split.LLM_KV_SPLIT_NO))
    said = f"{file.path}: its header calls it part {number + 1} of {count}"
    if parts > 1 and (count, number) != (parts, position):
        raise CheckpointError(f"{said}, its name part {position + 1} of {parts}; download it again")
    if parts == 1 and count > 1:
        raise CheckpointError(f"{said}; give it back its name, NAME-{number + 1:05}-of-{count:05}{SUFFIX}")
