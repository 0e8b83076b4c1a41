"""Packed experts on disk: one file per layer, mapped at the next start, so that loading packs nothing and processes share pages.

The name of a file is a hash of everything that its bytes depend on, including the checkpoint's fingerprint, so a stale file is never found.
Its header holds a checksum per expert, verified at every open, or when an expert is first read into a frame (`offload/frames.py`); a
damaged file is replaced. Experts are packed directly into the mapping of a new file, which needs no anonymous memory, so a model larger
than memory can be packed and run from disk. Of several processes that need a file, one packs and the others wait for it.

A file is complete when it appears, read-only, and never changed: a replaced or removed one stays as it was for the processes that map it.
What changes or truncates a file in place, which only its owner can, is not noticed while it is mapped, and truncation ends the process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import stat
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from moegraft.cpu_backend import LAYOUT_VERSION, PackedExperts, crc32
from moegraft.operators.atomic_file import NotNeededError, new_file, sweep
from moegraft.operators.errors import NotEnoughMemoryError, error_sentence, human_bytes
from moegraft.operators.layout import ExpertsLayout
from moegraft.operators.machine import probe_machine, version_of
from moegraft.operators.offload.frames import InFile

logger = logging.getLogger(__name__)
MAGIC = b"moegraft-experts"
HEADER_BYTES = 1 << 16  # a whole number of pages, so that the mapping behind it is aligned
CHECK_THREADS = 4  # they overlap reads from disk

Fill = Callable[[PackedExperts], None]


@cache
def _converters() -> str:
    """Return the versions of the packages that convert stored weights before they are packed."""
    return ", ".join(f"{name} {version_of(name)}" for name in ("moegraft", "transformers", "gguf"))


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Everything that the packed bytes of a layer depend on."""

    fingerprint: str  # of the source's stored weights and the module's name
    weight_type: str
    layout: str
    sparse: bool
    experts: str  # of the module, in the order of the file
    layout_version: int
    converters: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]


def key_for(fingerprint: str, layout: ExpertsLayout, weight_type: str, *, sparse: bool = False, experts: Sequence[int] = ()) -> CacheKey:
    """Return the key of one layer.

    Args:
        fingerprint: of the layer's `WeightSource`.
        layout: with the number of experts in the file.
        sparse: selects the layout of the layer's `PackedExperts`.
        experts: of the module, in the order of the file; by default all.
    """
    numbers = ",".join(map(str, experts or range(layout.num_experts)))
    return CacheKey(fingerprint, weight_type, repr(layout), sparse, numbers, LAYOUT_VERSION, _converters())


class PackedCache:
    """The cache files in one folder, which is created when the first file is written.

    Args:
        warn: logs why files cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], warn: Callable[[str], None] = logger.warning) -> None:
        self.folder = Path(folder).expanduser()
        self._warn = warn

    def path(self, key: CacheKey) -> Path:
        return self.folder / f"{key.digest}.experts"

    def open(self, key: CacheKey, layout: ExpertsLayout, *, verify: bool = True) -> PackedExperts | None:
        """Return the mapped experts; None if there is no file, or if it cannot be used, which is logged.

        Args:
            verify: whether to read all experts and compare their checksums.
        """
        sweep(self.folder)
        path, start = self.path(key), time.perf_counter()
        try:
            with path.open("rb") as file:
                checksums = _read_header(file, key)
                packed = _map(file, key, layout)
            if verify and _checksums(packed) != checksums:
                raise _DamagedError("checksums do not match")
        except FileNotFoundError:
            return None
        except (_DamagedError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = error_sentence(error) if isinstance(error, OSError) else f"{path}: damaged cache file ({error})"
            logger.warning("%s; packing the experts again", reason)
            return None
        if verify:
            logger.debug("%s: mapped, verified at %.1f GB/s", path, packed.nbytes / (time.perf_counter() - start) / 1e9)
        return packed

    def in_file(self, key: CacheKey) -> InFile | None:
        """Return where the experts are; None where no file has them."""
        try:
            with self.path(key).open("rb") as file:
                return InFile(self.path(key), HEADER_BYTES, _read_header(file, key))
        except (OSError, _DamagedError):
            return None

    def build(self, key: CacheKey, layout: ExpertsLayout, fill: Fill) -> PackedExperts:
        """Pack a layer into a new file and map it. Where another process is packing it, wait for that and map its file.

        Where the file cannot be written, pack the experts in memory, with a warning.

        Raises:
            NotEnoughMemoryError: the file cannot be written, and the experts do not fit in memory.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with new_file(self.path(key)) as file:
                found = self.open(key, layout)
                if found is not None:
                    raise NotNeededError
                os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o444)
                os.posix_fallocate(file.fileno(), 0, _file_bytes(key, layout))  # or a full disk would end the process while it packs
                packed = _map(file, key, layout, writable=True)
                fill(packed)
                file.write(_header(key, _checksums(packed)))
                found = _map(file, key, layout)
            assert found is not None, "mapped by this process or by the one that was waited for"
            return found
        except OSError as error:
            return self._in_memory(key, layout, fill, error)

    def _in_memory(self, key: CacheKey, layout: ExpertsLayout, fill: Fill, error: OSError) -> PackedExperts:
        reason = f"cannot write packed experts to cache_dir {self.folder} ({error.strerror or error})"
        needed, free = _packed_bytes(key, layout), probe_machine().available_bytes
        if needed > free:
            raise NotEnoughMemoryError(
                f"{reason}, and memory has {human_bytes(free)} free for a layer of {human_bytes(needed)}; "
                "free disk space, or name a folder that can be written"
            ) from error
        self._warn(f"{reason}: they are packed in memory, and packed again at the next start")
        packed = PackedExperts(layout.shape, layout.gate, key.weight_type, sparse=key.sparse)
        fill(packed)
        return packed


class _DamagedError(Exception):
    """A cache file cannot be used; the message gives the reason."""


def _file_bytes(key: CacheKey, layout: ExpertsLayout) -> int:
    return HEADER_BYTES + _packed_bytes(key, layout)


def _packed_bytes(key: CacheKey, layout: ExpertsLayout) -> int:
    return layout.num_experts * PackedExperts.expert_bytes_for(layout.shape, key.weight_type, sparse=key.sparse)


def _map(file: BinaryIO, key: CacheKey, layout: ExpertsLayout, *, writable: bool = False) -> PackedExperts:
    expected, actual = _file_bytes(key, layout), os.fstat(file.fileno()).st_size
    if actual != expected:
        raise _DamagedError(f"expected {expected} bytes, found {actual}")
    mapped = mmap.mmap(file.fileno(), expected, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    buffer = np.frombuffer(mapped, np.uint8, offset=HEADER_BYTES)
    return PackedExperts(layout.shape, layout.gate, key.weight_type, buffer, sparse=key.sparse)


def _checksums(packed: PackedExperts) -> list[int]:
    blocks = packed.buffer.reshape(-1, packed.expert_bytes)
    with ThreadPoolExecutor(CHECK_THREADS) as pool:
        return list(pool.map(crc32, blocks))


def _header(key: CacheKey, checksums: list[int]) -> bytes:
    body = json.dumps({"key": asdict(key), "checksums": checksums}).encode()
    header = MAGIC + len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body
    assert len(header) <= HEADER_BYTES, "the header has 10 digits per expert: enough for thousands"
    return header


def _read_header(file: BinaryIO, key: CacheKey) -> list[int]:
    start = len(MAGIC) + 8
    head = file.read(HEADER_BYTES)
    body = head[start : start + int.from_bytes(head[len(MAGIC) : len(MAGIC) + 4], "little")]
    if not head.startswith(MAGIC) or zlib.crc32(body) != int.from_bytes(head[len(MAGIC) + 4 : start], "little"):
        raise _DamagedError("incomplete header")
    header = json.loads(body)
    if header["key"] != asdict(key):
        raise _DamagedError("it belongs to other weights")
    checksums: list[int] = header["checksums"]
    return checksums
