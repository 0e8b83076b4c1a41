"""The safetensors files of a checkpoint folder: headers are read and the index is checked; tensors are read on access.

Also the identity of stored weights: a hash that differs where they differ, without reading all of their bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moegraft.operators.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MTP_FILE = "mtp.safetensors"  # optional: stock transformers warns of such tensors beside those of a class without MTP layers
STRIPES, STRIPE_BYTES = 16, 1 << 16  # read of each file
_LFS_POINTER = b"version https://git-lfs"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes of one stored tensor.

    Attributes:
        meaning: what the bytes stand for: name, dtype, shape and, where they are converted, how.
    """

    file: Path
    begin: int
    nbytes: int
    meaning: str


def stored_identity(extents: Iterable[Extent]) -> str:
    """Return a hash of stored tensors.

    It covers the meaning and place of each tensor, and of each file the size, the times of the last change of its content and of its
    inode, and 16 stripes of 64 KiB of the tensors' bytes (all of them, if they are no more). A change of other bytes is not noticed on a
    file system that does not keep these times, or where a change comes within their resolution (milliseconds) of the reading.
    """
    digest = hashlib.sha256()
    by_file: dict[Path, list[Extent]] = {}
    for extent in extents:
        by_file.setdefault(extent.file, []).append(extent)
        digest.update(f"{extent.file.name} {extent.begin} {extent.nbytes} {extent.meaning};".encode())
    for path, parts in sorted(by_file.items()):
        with path.open("rb") as file:
            status = path.stat()
            digest.update(f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns};".encode())
            for begin, size in _stripes(parts):
                file.seek(begin)
                digest.update(file.read(size))
    return digest.hexdigest()


def _stripes(extents: list[Extent]) -> Iterator[tuple[int, int]]:
    """Yield the begin and size of the stripes to read of one file, evenly spaced over the bytes of its tensors."""
    total = sum(extent.nbytes for extent in extents)
    if total <= STRIPES * STRIPE_BYTES:
        yield from ((extent.begin, extent.nbytes) for extent in extents)
        return
    wanted = [stripe * (total - STRIPE_BYTES) // (STRIPES - 1) for stripe in range(STRIPES)]
    before = 0
    for extent in extents:
        while wanted and wanted[0] < before + extent.nbytes:
            yield extent.begin + wanted.pop(0) - before, STRIPE_BYTES
        before += extent.nbytes


class Conversion(ABC):
    """Values computed from stored tensors, with the interface of a safetensors slice; what it returns has memory of its own."""

    @property
    @abstractmethod
    def extents(self) -> list[Extent]:
        """The stored bytes that the values depend on."""

    @abstractmethod
    def get_shape(self) -> list[int]: ...

    @abstractmethod
    def get_dtype(self) -> str: ...

    @abstractmethod
    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(slots=True)
class LazyTensor:
    """One tensor of a mapped file, with the interface of a safetensors slice: `[...]` or `[i]` reads it.

    Attributes:
        begin, size: the offset of its bytes in the file, and their number; not of a `Conversion`.
        on_read: called with the number of bytes that were read.
        kept: whether what is read outlives the loading. It is then copied: to use a view of the mapping ends the process once the file
            is truncated.
    """

    key: str
    file: Path
    _slice: Any  # safetensors' PySafeSlice, which has no public type, or a `Conversion`
    begin: int = 0
    size: int = 0
    on_read: Callable[[int], None] | None = None
    kept: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._slice.get_shape())

    @property
    def stored_dtype(self) -> str:
        """The dtype by safetensors' name, such as `BF16`."""
        return str(self._slice.get_dtype())

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype if it is a floating-point one that PyTorch computes with, else None."""
        return DTYPES.get(self.stored_dtype)

    @property
    def conversion(self) -> Conversion | None:
        """How its values are computed; None for a tensor that is stored as it is."""
        return self._slice if isinstance(self._slice, Conversion) else None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.stored_dtype].itemsize if self.conversion is not None else self.size

    @property
    def origin(self) -> str:
        return f"{self.file}: {self.key}"

    @property
    def extents(self) -> list[Extent]:
        """The stored bytes that its values depend on."""
        if self.conversion is not None:
            return self.conversion.extents
        return [Extent(self.file, self.begin, self.nbytes, f"{self.key} {self.stored_dtype} {self.shape}")]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.stored_dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """
        Raises:
            CheckpointError: the tensor cannot be read.
        """
        try:
            tensor: torch.Tensor = self._slice[index]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.origin}: cannot be read ({error}); download the file again") from error
        if self.on_read is not None:
            self.on_read(tensor.nbytes)
        return tensor.clone() if self.kept and not isinstance(self._slice, Conversion) else tensor


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a folder by key."""

    folder: Path
    tensors: Mapping[str, LazyTensor]

    @property
    def files(self) -> list[Path]:
        return sorted({tensor.file for tensor in self.tensors.values()})

    @property
    def float_dtype(self) -> torch.dtype:
        """The floating-point dtype of most of the bytes: norms and router biases are often wider, and small.

        Raises:
            CheckpointError: there are no floating-point weights.
        """
        stored_bytes: Counter[torch.dtype] = Counter()
        for tensor in self.tensors.values():
            if tensor.dtype is not None:
                stored_bytes[tensor.dtype] += tensor.nbytes
        if not stored_bytes:
            dtypes = sorted({tensor.stored_dtype for tensor in self.tensors.values()})
            raise CheckpointError(f"{self.folder}: no floating-point weights, only {', '.join(dtypes)}; {SUPPORTED}")
        return stored_bytes.most_common(1)[0][0]


SUPPORTED = "float32, float16 and bfloat16 safetensors are supported"


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        weight_map = index["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a safetensors index with a 'weight_map' ({error}); download it again") from error
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path}: 'weight_map' must map each key to a file name; download the index again")
    for key, name in weight_map.items():
        inside = PurePath(name)  # links in the folder may lead elsewhere, as in the hub's cache
        if not inside.parts or inside.is_absolute() or ".." in inside.parts or not name.isprintable():
            raise CheckpointError(
                f"{path}: the index lists '{key}' in {name!r}, which is outside of this folder and is not read; "
                "download the checkpoint again"
            )
    return weight_map


def check_no_pointer(path: Path) -> None:
    """
    Raises:
        CheckpointError: the file stands for one that Git LFS has not downloaded.
    """
    try:
        with path.open("rb") as file:
            found = file.read(len(_LFS_POINTER))
    except OSError:
        return
    if found == _LFS_POINTER:
        raise CheckpointError(f"{path}: a pointer of Git LFS, which has not downloaded the file; run 'git lfs pull' in its repository")


def _open_file(path: Path) -> dict[str, LazyTensor]:
    try:
        if not path.is_file():  # an OSError for a name that is too long
            if path.is_symlink():
                raise CheckpointError(f"{path}: a link to {path.readlink()}, where no file is; bring the file back, or download it again")
            raise CheckpointError(f"{path}: the file is missing; download it again")
        handle = safe_open(path, framework="pt")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))  # checked by safe_open, which does not give the offsets
        tensors = {}
        for key in handle.keys():  # noqa: SIM118 (no mapping)
            begin, end = header[key]["data_offsets"]
            tensors[key] = LazyTensor(key, path, handle.get_slice(key), 8 + length + begin, end - begin)
        return tensors
    except CheckpointError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        check_no_pointer(path)
        raise CheckpointError(f"{path}: damaged or truncated safetensors file ({error}); download it again") from error


def _open_shards(index: Path) -> dict[str, LazyTensor]:
    weight_map = _read_index(index)
    shards = {name: _open_file(index.parent / name) for name in sorted(set(weight_map.values()))}
    tensors = {key: tensor for shard in shards.values() for key, tensor in shard.items()}
    if not tensors:
        raise CheckpointError(f"{index}: the index lists no weights; download the checkpoint again")
    for key, name in weight_map.items():
        if key not in shards[name]:
            raise CheckpointError(f"{index}: the index lists '{key}' in {name}, which does not contain it; download both again")
        tensors[key] = shards[name][key]  # the index decides between several shards that contain a key
    return tensors


def weight_files(folder: Path) -> list[str]:
    """Return the names of a folder's weight files, downloaded or not, from its index; the last need not exist.

    Raises:
        CheckpointError: the index is damaged.
    """
    index = folder / INDEX
    return [SINGLE, *(sorted(set(_read_index(index).values())) if index.is_file() else []), MTP_FILE]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open every weight file of a checkpoint folder, and `mtp.safetensors` where it lies beside them.

    Raises:
        CheckpointError: there are no weights, the index is wrong, or a file is missing, truncated or damaged, or repeats another's tensors.
    """
    more = _open_file(folder / MTP_FILE) if (folder / MTP_FILE).is_file() else {}
    # The single file first, as in transformers: its `save_pretrained` leaves the index of earlier shards in the folder.
    if (folder / SINGLE).is_file() or (folder / SINGLE).is_symlink():  # a link to a file that was moved is named as such
        return Checkpoint(folder, _joined(_open_file(folder / SINGLE), more))
    if (folder / INDEX).is_file():
        return Checkpoint(folder, _joined(_open_shards(folder / INDEX), more))
    others = sorted(path.name for pattern in ("*.bin", "*.gguf", "*.safetensors", "*.pt") for path in folder.glob(pattern))
    hint = f"found {', '.join(others[:3])}; " if others else ""
    raise CheckpointError(f"{folder}: no {SINGLE} and no {INDEX} in this folder; {hint}{SUPPORTED}")


def _joined(tensors: dict[str, LazyTensor], more: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    for key in more.keys() & tensors.keys():
        raise CheckpointError(f"{more[key].file}: '{key}' is in {tensors[key].file.name} too; delete the file that is out of date")
    return tensors | more
