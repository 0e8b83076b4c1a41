"""Packed experts on disk: one file per layer, mapped at the next start, so that loading packs nothing and processes share pages.

The name of a file is a hash of everything that its bytes depend on, including the checkpoint's fingerprint, so a stale file is never found.
Its header holds a checksum per expert, verified at every open; a damaged file is rebuilt. Experts are packed directly into the mapping of a
new file, which needs no anonymous memory, so a model larger than memory can be packed and run from disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from moegraft.cpu_backend import LAYOUT_VERSION, PackedExperts
from moegraft.operators.errors import CheckpointError
from moegraft.operators.layout import ExpertsLayout

logger = logging.getLogger(__name__)
MAGIC = b"moegraft-experts"
HEADER_BYTES = 1 << 16  # a whole number of pages, so that the mapping behind it is aligned
CHECK_THREADS = 4  # crc32 runs at 1-3 GB/s per thread; several threads also overlap reads from disk

Fill = Callable[[PackedExperts], None]


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Everything that the packed bytes of a layer depend on."""

    fingerprint: str  # of the source's stored weights and the module's name
    weight_type: str
    layout: str
    sparse: bool = False
    layout_version: int = LAYOUT_VERSION

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]


def key_for(fingerprint: str, layout: ExpertsLayout, weight_type: str, *, sparse: bool = False) -> CacheKey:
    """Return the key of one layer; `fingerprint` is its `WeightSource`'s, `sparse` selects the layout of its `PackedExperts`."""
    return CacheKey(fingerprint, weight_type, repr(layout), sparse)


def _packed_bytes(key: CacheKey, layout: ExpertsLayout) -> int:
    return layout.num_experts * PackedExperts.expert_bytes_for(layout.shape, key.weight_type, sparse=key.sparse)


def check_folder(cache_dir: str) -> None:
    """Check the name of a cache folder.

    Raises:
        ValueError: the folder is in the home of a user that does not exist here.
    """
    try:
        Path(cache_dir).expanduser()
    except RuntimeError:
        raise ValueError(f"cache_dir '{cache_dir}': this machine has no user of that name") from None


class PackedCache:
    """The cache files in one folder, which is created when the first file is written."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser()

    def path(self, key: CacheKey) -> Path:
        return self.folder / f"{key.digest}.experts"

    def open(self, key: CacheKey, layout: ExpertsLayout) -> PackedExperts | None:
        """Return the mapped experts; None if there is no file, or if it is damaged, which is logged."""
        path = self.path(key)
        if not path.is_file():
            return None
        start = time.perf_counter()
        try:
            checksums = _read_header(path, key)
            packed = _map(path, key, layout, mode="r")
            if _checksums(packed) != checksums:
                raise _DamagedError("checksums do not match")
        except (_DamagedError, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            logger.warning("%s: damaged cache file (%s); rebuilding it from the checkpoint", path, error)
            return None
        seconds = time.perf_counter() - start
        logger.info("%s: mapped, verified at %.1f GB/s", path, packed.nbytes / seconds / 1e9)
        return packed

    def build(self, key: CacheKey, layout: ExpertsLayout, fill: Fill) -> PackedExperts:
        """Pack a layer into a new file and map it; the file appears under its name only when it is complete.

        Raises:
            CheckpointError: the folder cannot be written, or the disk is full.
        """
        path = self.path(key)
        # A random name, because threads share a process id, and so may containers that share a folder.
        scratch = path.with_suffix(f".{uuid4().hex}.part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with scratch.open("wb") as file:
                _reserve(file.fileno(), HEADER_BYTES + _packed_bytes(key, layout))
            packed = _map(scratch, key, layout, mode="r+")
            fill(packed)
            _write_header(scratch, key, _checksums(packed))
            scratch.replace(path)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: cannot write the packed experts ({error}); free disk space or remove cache_dir from the rule"
            ) from error
        finally:
            with suppress(FileNotFoundError, NotADirectoryError):
                scratch.unlink()
        return _map(path, key, layout, mode="r")


def _reserve(descriptor: int, size: int) -> None:
    """Allocate the file where the system can: a full disk must raise an error here, not crash while packing into the mapping."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.truncate(descriptor, size)


class _DamagedError(Exception):
    """A cache file cannot be used; the message gives the reason."""


def _map(path: Path, key: CacheKey, layout: ExpertsLayout, *, mode: Any) -> PackedExperts:
    size = _packed_bytes(key, layout)
    if path.stat().st_size != HEADER_BYTES + size:
        raise _DamagedError(f"expected {HEADER_BYTES + size} bytes, found {path.stat().st_size}")
    buffer = np.memmap(path, dtype=np.uint8, mode=mode, offset=HEADER_BYTES, shape=(size,))
    return PackedExperts(layout.shape, layout.gate, key.weight_type, np.asarray(buffer), sparse=key.sparse)


def _checksums(packed: PackedExperts) -> list[int]:
    blocks = packed.buffer.reshape(-1, packed.expert_bytes)
    with ThreadPoolExecutor(CHECK_THREADS) as pool:
        return list(pool.map(zlib.crc32, blocks))


def _write_header(path: Path, key: CacheKey, checksums: list[int]) -> None:
    body = json.dumps({"key": asdict(key), "checksums": checksums}).encode()
    header = MAGIC + len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body
    assert len(header) <= HEADER_BYTES, "the header has 10 digits per expert: enough for thousands"
    with path.open("r+b") as file:
        file.write(header)
        os.fsync(file.fileno())


def _read_header(path: Path, key: CacheKey) -> list[int]:
    start = len(MAGIC) + 8
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    body = head[start : start + int.from_bytes(head[len(MAGIC) : len(MAGIC) + 4], "little")]
    if not head.startswith(MAGIC) or zlib.crc32(body) != int.from_bytes(head[len(MAGIC) + 4 : start], "little"):
        raise _DamagedError("incomplete header")
    found = json.loads(body)
    if found["key"] != asdict(key):
        raise _DamagedError("it belongs to other weights")
    checksums: list[int] = found["checksums"]
    return checksums
