"""The GGUF files of one model: all parts with their headers, merged, and their tensors, read a matrix at a time as values or as codes.

Every length in a header is checked against the remaining bytes of the file before memory is read or allocated. The block formats are
llama.cpp's (ggml-common.h); the package `gguf` dequantises them to float32.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUFValueType, Keys, dequantize, quant_shape_to_byte_shape
from gguf import GGMLQuantizationType as BlockType
from numpy.typing import NDArray

from moegraft.injection.checkpoint.files import Extent, check_no_pointer
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
        if self.block_type not in (BlockType.Q8_0, BlockType.Q4_0):
            return None
        bits: Literal[4, 8] = 8 if self.block_type is BlockType.Q8_0 else 4
        blocks = self.data[index].reshape(len(self.data[index]), -1, 2 + GROUP * bits // 8)  # (rows, groups, bytes): a float16 scale, codes
        codes = blocks[..., 2:].view(np.int8)
        if bits == 4:  # the low halves of the 16 bytes come first, then the high halves; code 8 is the value 0
            pairs = blocks[..., 2:]
            codes = np.concatenate([pairs & 15, pairs >> 4], axis=-1).view(np.int8)
            codes -= 8
        scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
        return Codes(np.ascontiguousarray(codes.reshape(len(codes), -1)), scales, bits)


PART = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
SUFFIX = ".gguf"
MAX_LISTED = 3
# In the names of image and speech towers, which llama.cpp stores in a file of their own.
TOWER = "mmproj"

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_NAME = 1 << 16
MAX_DIMENSIONS = 4
MAX_DEPTH = 8  # arrays within arrays
# Far more than real files have; these are read one by one. The numbers of an array are skipped together and need no limit.
MAX_FIELDS, MAX_TENSORS, MAX_STRINGS = 1 << 16, 1 << 20, 1 << 24
FIELD_BYTES, TENSOR_BYTES = 13, 24  # the minimum sizes; a string has 8 and an array 12 bytes at least
_FORMATS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
_VALUES: dict[BlockType, type[np.generic]] = {
    BlockType.F64: np.float64,
    BlockType.F32: np.float32,
    BlockType.F16: np.float16,
    BlockType.I8: np.int8,
    BlockType.I16: np.int16,
    BlockType.I32: np.int32,
    BlockType.I64: np.int64,
}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One opened file.

    Attributes:
        fields: numbers and strings by key, and None for an array.
        arrays: where each of these begins in `data`, the whole file.
    """

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, BlockTensor]
    arrays: Mapping[str, int]
    data: NDArray[np.uint8]

    def integer(self, key: str) -> int | None:
        """Return the value of `key`; None if the file does not have it.

        Raises:
            CheckpointError: the value is no integer.
        """
        if key not in self.fields:
            return None
        value = self.fields[key]
        if type(value) is not int:
            found = "an array" if value is None else repr(value)[:100]
            raise CheckpointError(f"{self.path}: '{key}' must be an integer, not {found}; download the file again")
        return value

    def array(self, key: str) -> list[Any]:
        """Return the numbers or strings of an array, which `fields` has a None for.

        Raises:
            CheckpointError: it holds arrays.
            ValueError: a string is not UTF-8.
        """
        return _Reader(self.path, self.data, self.arrays[key]).array(key)


def open_file(path: Path) -> GgufFile:
    """
    Raises:
        CheckpointError: the file is damaged, truncated or no GGUF file.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
        if magic != MAGIC:
            check_no_pointer(path)
            raise CheckpointError(f"{path}: not a GGUF file (it begins with {magic!r}); download it again")
        # Copy on write: PyTorch requires writable memory, and the file must not change.
        data = np.asarray(np.memmap(path, mode="c"))
    except OSError as error:
        raise CheckpointError(f"{path}: the file cannot be read ({error.strerror or error}); download it again") from error
    return _Reader(path, data).file()


class _Reader:
    """Reads a header from beginning to end; `_where` is the place that errors name."""

    def __init__(self, path: Path, data: NDArray[np.uint8], offset: int = len(MAGIC)) -> None:
        self._path = path
        self._data = data
        self._offset = offset
        self._where = "the header"
        self._strings = 0

    def file(self) -> GgufFile:
        version = self._number("<I")
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{self._path}: this GGUF file is big-endian; convert it to little-endian")
        if version not in VERSIONS:
            self._refuse(f"version {version} is not supported, only {' and '.join(map(str, VERSIONS))}")
        tensors = self._count("tensors", TENSOR_BYTES, MAX_TENSORS)
        entries = self._count("keys", FIELD_BYTES, MAX_FIELDS)
        fields: dict[str, Any] = {}
        arrays: dict[str, int] = {}
        for _ in range(entries):
            self._field(fields, arrays)
        infos = [self._tensor_info() for _ in range(tensors)]
        start = self._aligned(fields)
        found: dict[str, BlockTensor] = {}
        for name, shape, block_type, offset in infos:
            self._where = f"tensor {name!r}"
            if name in found:
                self._refuse("this name occurs twice")
            found[name] = BlockTensor(name, self._path, block_type, shape, self._values(shape, block_type, start + offset), start + offset)
        return GgufFile(self._path, fields, found, arrays, self._data)

    def _refuse(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: damaged or truncated GGUF file ({self._where}: {reason}); download it again")

    def _take(self, size: int, what: str) -> int:
        """Skip `size` bytes, and return the offset of the first."""
        left = len(self._data) - self._offset
        if size > left:
            self._refuse(f"{what} needs {size} bytes, and the file has {left} left")
        begin = self._offset
        self._offset += size
        return begin

    def _number(self, form: str) -> Any:
        begin = self._take(struct.calcsize(form), "a number")
        return struct.unpack_from(form, self._data.data, begin)[0]

    def _count(self, what: str, least_bytes: int, most: int) -> int:
        count: int = self._number("<Q")
        left = len(self._data) - self._offset
        if count * least_bytes > left:
            self._refuse(f"a count of {count} {what}, and the file has {left} bytes left")
        if count > most:
            self._refuse(f"a count of {count} {what}, more than the {most} that are supported")
        return count

    def _text(self) -> str:
        length = self._number("<Q")
        begin = self._take(length, "a string")
        try:
            return self._data[begin : begin + length].tobytes().decode()
        except UnicodeDecodeError as error:
            self._refuse(f"a string is not UTF-8 ({error})")

    def _name(self, what: str) -> str:
        """Read the name of a key or tensor, which later errors include."""
        name = self._text()
        if len(name) > MAX_NAME:
            self._refuse(f"the name of a {what} has {len(name)} characters")
        self._where = f"{what} {name[:100]!r}"
        return name

    def _type(self) -> GGUFValueType:
        number = self._number("<I")
        try:
            return GGUFValueType(number)
        except ValueError:
            self._refuse(f"unknown value type {number}")

    def _field(self, fields: dict[str, Any], arrays: dict[str, int]) -> None:
        name = self._name("key")
        if name in fields:
            self._refuse("this key occurs twice")
        kind = self._type()
        if kind is GGUFValueType.ARRAY:
            arrays[name], fields[name] = self._offset, None
            self._skip_array(1)
        else:
            fields[name] = self._text() if kind is GGUFValueType.STRING else self._number(_FORMATS[kind])

    def array(self, name: str) -> list[Any]:
        """Read the array that begins here, whose lengths have been checked.

        Raises:
            ValueError: a string is not UTF-8.
        """
        self._where = f"key {name[:100]!r}"
        kind, count = self._type(), self._number("<Q")
        if kind is GGUFValueType.STRING:  # of which vocabularies have some hundred thousand
            strings, offset, length_at = [], self._offset, struct.Struct("<Q").unpack_from
            for _ in range(count):
                begin = offset + 8
                offset = begin + length_at(self._data.data, offset)[0]
                strings.append(str(self._data.data[begin:offset], "utf-8"))
            return strings
        if kind not in _FORMATS:
            self._refuse("an array of arrays")
        values: list[Any] = np.frombuffer(self._data.data, _FORMATS[kind], count, self._offset).tolist()
        return values

    def _skip_array(self, depth: int) -> None:
        """Skip an array: most are long, and are not needed where the tokenizer comes from the model's folder."""
        if depth > MAX_DEPTH:
            self._refuse(f"more than {MAX_DEPTH} nested arrays")
        kind = self._type()
        if kind in _FORMATS:
            count, size = self._number("<Q"), struct.calcsize(_FORMATS[kind])
            self._take(count * size, f"an array of {count} values")
            return
        count = self._count("values", 8 if kind is GGUFValueType.STRING else 12, MAX_STRINGS)
        self._strings += count
        if self._strings > MAX_STRINGS:
            self._refuse(f"more than {MAX_STRINGS} strings and arrays in all arrays")
        for _ in range(count):
            if kind is GGUFValueType.STRING:
                self._take(self._number("<Q"), "a string")
            else:
                self._skip_array(depth + 1)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        """Read a tensor's name, its shape, outermost dimension first, its type, and its offset from the end of the header."""
        self._where = "the list of tensors"
        name = self._name("tensor")
        dimensions = self._number("<I")
        if dimensions > MAX_DIMENSIONS:
            self._refuse(f"{dimensions} dimensions, more than the {MAX_DIMENSIONS} that are supported")
        shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
        number, offset = self._number("<I"), self._number("<Q")
        try:
            return name, shape, BlockType(number), offset
        except ValueError:
            self._refuse(f"unknown tensor type {number}")

    def _aligned(self, fields: Mapping[str, Any]) -> int:
        """Return the offset of the first tensor."""
        self._where = f"key {Keys.General.ALIGNMENT!r}"
        alignment = fields.get(Keys.General.ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self._refuse(f"the alignment must be a power of two, not {alignment!r}"[:200])
        return -(-self._offset // alignment) * alignment

    def _values(self, shape: tuple[int, ...], block_type: BlockType, begin: int) -> NDArray[Any]:
        block, block_bytes = GGML_QUANT_SIZES[block_type]
        if 0 in shape:
            self._refuse("a dimension of 0")
        if math.prod(shape[-1:]) % block:
            self._refuse(f"rows of {math.prod(shape[-1:])} values are no multiple of the block size, {block}")
        if not shape:
            self._refuse("no dimensions")
        size = math.prod(shape) // block * block_bytes
        if begin + size > len(self._data):
            self._refuse(f"the tensor ends at byte {begin + size}, and the file has {len(self._data)}")
        values = _VALUES.get(block_type)
        raw = self._data[begin : begin + size]
        if values is not None:
            return raw.view(values).reshape(shape)
        return raw.reshape(quant_shape_to_byte_shape(shape, block_type))


def find_parts(path: Path) -> list[Path]:
    """Return the files of a model.

    Args:
        path: a file, any part of a split one, or a folder with the parts of one model.

    Raises:
        CheckpointError: there is no model, there are several, or a part is missing.
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
        raise CheckpointError(f"{folder}: {len(models)} models in this folder; name one of these files instead: {names}")
    return next(iter(models.values()))


def _parts_of(file: Path) -> list[Path]:
    part = PART.fullmatch(file.name)
    if part is None:
        return [file]
    count, number = int(part["count"]), int(part["number"])
    if not 1 <= number <= count:
        raise CheckpointError(f"{file}: the name means part {number} of {count}; restore the name that the file was downloaded with")
    parts = [file.with_name(f"{part['model']}-{number:05}-of-{part['count']}{SUFFIX}") for number in range(1, count + 1)]
    missing = [path.name for path in parts if not path.is_file()]
    if missing:
        more = f" and {len(missing) - MAX_LISTED} more" if len(missing) > MAX_LISTED else ""
        raise CheckpointError(
            f"{file.parent}: parts of this model, which has {count}, are missing: {', '.join(missing[:MAX_LISTED])}{more}; download them"
        )
    return parts


def merge(files: Sequence[GgufFile]) -> dict[str, BlockTensor]:
    """Return the tensors of all parts by name.

    Raises:
        CheckpointError: the files are not the parts of one model.
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
        raise CheckpointError(f"{first.path}: expected {wanted} tensors in all parts, found {len(tensors)}; download all parts again")
    return tensors


def _check_part(file: GgufFile, position: int, parts: int) -> None:
    count, number = (file.integer(key) or 0 for key in (Keys.Split.LLM_KV_SPLIT_COUNT, Keys.Split.LLM_KV_SPLIT_NO))
    header = f"{file.path}: this is {f'part {number + 1} of {count}' if count else 'a whole model'} by its header"
    if parts > 1 and (count, number) != (parts, position):
        raise CheckpointError(f"{header} and part {position + 1} of {parts} by its name; download it again")
    if parts == 1 and count > 1:
        raise CheckpointError(f"{header}; rename it to NAME-{number + 1:05}-of-{count:05}{SUFFIX}")
