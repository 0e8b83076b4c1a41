"""The identity of stored weights: a hash that differs where they differ, without reading all of their bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

STRIPES, STRIPE_BYTES = 16, 1 << 16  # read of each file


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
