"""Weight files with modules as the kernels read them, and stock weights of the others: what `save_pretrained(packed=True)` writes.

The tensor `{module}.packed.{name}` has the bytes of an operator's `PackedWeights`, at an offset that is a multiple of 64 in the file, so
that experts are computed from the mapped file. The metadata of a file state the version of the kernels' layout and, for each module in it,
the form of its bytes, the dtype of the weights that they were packed from, and checksums.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from moegraft.injection.checkpoint.files import DTYPES, INDEX, MTP_FILE, LazyTensor
from moegraft.operators.atomic_file import new_file, write_file
from moegraft.operators.cpu import LAYOUT_VERSION, crc32
from moegraft.operators.errors import CheckpointError
from moegraft.operators.weights import PackedWeights, Part, WeightSource

MARK = ".packed."
METADATA = "moegraft"
ALIGNMENT = 64
SHARD_BYTES = 5 * 10**9  # as in transformers' own files
CHUNK_BYTES = 1 << 24  # of a checksum; several threads compute them
CHECK_THREADS = 4


@dataclass(frozen=True, slots=True)
class PackedModule:
    """A module to write.

    Attributes:
        dtype: of the weights that were packed.
        packed_from: the `weights_hash` of these weights, by which files of thresholds name them; empty where there is no sparsity.
    """

    path: str
    weights: PackedWeights
    dtype: torch.dtype
    packed_from: str = ""


@dataclass(frozen=True, slots=True)
class _Entry:
    key: str
    dtype: str  # by safetensors' name
    shape: Sequence[int]
    nbytes: int
    chunks: Callable[[], Iterable[bytes | memoryview]]


def write_packed(folder: Path, stock: Iterable[LazyTensor], modules: Iterable[PackedModule]) -> None:
    """Write the weight files of a model and their index.

    Args:
        stock: tensors to write as they are stored.

    Raises:
        OSError: a file cannot be written.
    """
    tensors = list(stock)
    units: list[tuple[list[_Entry], PackedModule | None]] = []
    for packed in modules:
        held = {f"{packed.path}{MARK}{name}": array for name, array in packed.weights.tensors.items()}
        units.append(([_Entry(key, "U8", array.shape, array.nbytes, partial(list, [array.data])) for key, array in held.items()], packed))
    units += [([_copied(tensor)], None) for tensor in tensors if tensor.file.name != MTP_FILE]
    shards: list[list[tuple[list[_Entry], PackedModule | None]]] = [[]]
    free = SHARD_BYTES
    for entries, module in units:
        size = sum(entry.nbytes for entry in entries)
        if shards[-1] and size > free:
            shards.append([])
            free = SHARD_BYTES
        shards[-1].append((entries, module))
        free -= size
    listed: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        entries = [entry for entries, _ in shard for entry in entries]
        _write(folder / name, entries, [module for _, module in shard if module is not None])
        listed |= {entry.key: name for entry in entries}
    mtp = [_copied(tensor) for tensor in tensors if tensor.file.name == MTP_FILE]
    if mtp:
        _write(folder / MTP_FILE, mtp, [])
    index = {"metadata": {"total_size": sum(entry.nbytes for entries, _ in units for entry in entries)}, "weight_map": listed}
    write_file(folder / INDEX, json.dumps(index, indent=2))


def _copied(tensor: LazyTensor) -> _Entry:
    def chunks() -> Iterator[bytes]:
        with tensor.file.open("rb") as file:
            file.seek(tensor.begin)
            for left in range(tensor.nbytes, 0, -CHUNK_BYTES):
                yield file.read(min(left, CHUNK_BYTES))

    return _Entry(tensor.key, tensor.stored_dtype, tensor.shape, tensor.nbytes, chunks)


def _write(path: Path, entries: Sequence[_Entry], modules: Sequence[PackedModule]) -> None:
    header: dict[str, Any] = {}
    begin = 0
    for entry in entries:
        header[entry.key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, begin + entry.nbytes]}
        begin += entry.nbytes
    stated = {
        module.path: {
            "form": dict(module.weights.form),
            "dtype": str(module.dtype).removeprefix("torch."),
            "packed_from": module.packed_from,
            "checksums": {name: _checksums(array) for name, array in module.weights.tensors.items()},
        }
        for module in modules
    }
    about = {METADATA: json.dumps({"layout_version": LAYOUT_VERSION, "modules": stated})} if stated else {}
    body = json.dumps(header | {"__metadata__": {"format": "pt", **about}}).encode()
    body += b" " * (-(8 + len(body)) % ALIGNMENT)  # which the format allows
    with new_file(path) as file:
        file.write(len(body).to_bytes(8, "little") + body)
        for entry in entries:
            for chunk in entry.chunks():
                file.write(chunk)


def _checksums(array: NDArray[np.uint8]) -> list[int]:
    with ThreadPoolExecutor(CHECK_THREADS) as pool:
        return list(pool.map(crc32, (array[begin : begin + CHUNK_BYTES] for begin in range(0, len(array), CHUNK_BYTES))))


class StoredPacked(WeightSource):
    """The packed bytes of one module."""

    def __init__(self, path: str, tensors: Mapping[str, LazyTensor], stated: Mapping[str, Any]) -> None:
        self._path = path
        self._tensors = tensors
        self._form = dict(stated["form"])
        self._checksums = {str(name): list(map(int, numbers)) for name, numbers in stated["checksums"].items()}
        self._dtype: torch.dtype = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}[stated["dtype"]]
        self.packed_from = str(stated["packed_from"])

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def parts(self) -> Sequence[Part]:
        return ()

    def read(self, part: Part, expert: int = 0) -> NoReturn:
        raise CheckpointError(
            f"{self.origin(part)}: packed in {self._form.get('weights')}, from which no weights are read; use the stock model"
        )

    def packed(self, form: Mapping[str, Any], sizes: Mapping[str, int]) -> Mapping[str, NDArray[np.uint8]]:
        if self._form != form:
            names = [name for name in {**form, **self._form} if form.get(name) != self._form.get(name)]
            here, asked = (", ".join(f"{name} {each.get(name)}" for name in names) for each in (self._form, form))
            raise CheckpointError(
                f"{self.origin()}: packed with {here}, and the rules ask for {asked}: load the folder with the rules in its config.json, "
                "or pack the stock model by these"
            )
        return {name: self._checked(name, size) for name, size in sizes.items()}

    def packed_file(self, name: str) -> tuple[Path, int] | None:
        tensor = self._tensors[name]
        return None if tensor.begin % ALIGNMENT else (tensor.file, tensor.begin)

    def _checked(self, name: str, size: int) -> NDArray[np.uint8]:
        tensor = self._tensors.get(name)
        if tensor is None or tensor.nbytes != size or tensor.stored_dtype != "U8":
            found = "nothing" if tensor is None else f"{tensor.nbytes} bytes of {tensor.stored_dtype}"
            raise CheckpointError(f"{self.origin()}: '{name}' has {found} where the kernels read {size} of U8; pack the stock model again")
        array: NDArray[np.uint8] = tensor[...].reshape(-1).numpy()
        if _checksums(array) != self._checksums.get(name):
            raise CheckpointError(
                f"{tensor.origin}: damaged (checksums do not match); download the file again, or pack the stock model again"
            )
        if array.ctypes.data % ALIGNMENT:
            room = np.empty(size + ALIGNMENT, np.uint8)
            begin = -room.ctypes.data % ALIGNMENT
            room[begin : begin + size] = array
            array = room[begin : begin + size]
        array.flags.writeable = False
        return array

    def origin(self, part: Part = "weight", expert: int = 0) -> str:
        return f"{next(iter(self._tensors.values())).file}: {self._path}"


def packed_modules(tensors: Mapping[str, LazyTensor]) -> dict[str, StoredPacked]:
    """Return the packed modules among a checkpoint's tensors, by path.

    Raises:
        CheckpointError: a file's metadata are damaged, or of another layout than that of the kernels.
    """
    parts: dict[str, dict[str, LazyTensor]] = {}
    for key, tensor in tensors.items():
        path, mark, name = key.rpartition(MARK)
        if mark:
            parts.setdefault(path, {})[name] = tensor
    stated = {file: _stated(file) for file in {tensor.file for module in parts.values() for tensor in module.values()}}
    found = {}
    for path, module in parts.items():
        [file, *others] = {tensor.file for tensor in module.values()}
        try:
            assert not others
            found[path] = StoredPacked(path, module, stated[file][path])
        except (AssertionError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{file}: {path}: damaged metadata ({error!r}); download the file again") from error
    return found


def _stated(file: Path) -> Mapping[str, Any]:
    """Return what the metadata of a file state of each module."""
    try:
        with safe_open(file, framework="np") as handle:
            about = json.loads(handle.metadata()[METADATA])
        version, modules = about["layout_version"], dict(about["modules"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: packed weights without readable metadata ({error!r}); download the file again") from error
    if version != LAYOUT_VERSION:
        raise CheckpointError(
            f"{file}: packed in version {version} of the kernels' layout, and this moegraft reads version {LAYOUT_VERSION}: pack the stock "
            "model again with save_pretrained(folder, packed=True)"
        )
    return modules
