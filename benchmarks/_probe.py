"""What this machine can do at most: reading memory, and multiplying matrices through oneDNN."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("_probe.cpp")
HELD_BYTES = 1 << 30  # far beyond the caches
READ_BYTES = 64 << 20  # a time: as short as a layer, so that what interrupts one interrupts the other
GEMM_SIZE = 1024


class ReadProbe:
    """Reads 64 MiB, another part of 1 GiB each time, with `threads` threads; `run()` returns bytes a second."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._folder = tempfile.TemporaryDirectory()
        library = Path(self._folder.name) / "probe.so"
        flags = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread", "-std=c++17"]
        subprocess.run(["g++", *flags, str(SOURCE), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.probe_allocate.restype = ctypes.c_void_p
        self._library.probe_read.restype = ctypes.c_double
        self._library.probe_read.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._data = self._library.probe_allocate(ctypes.c_size_t(HELD_BYTES))
        self._offset = 0
        if self._data is None:
            raise MemoryError(f"read probe: no memory for {HELD_BYTES} bytes")

    def run(self) -> float:
        self._offset = (self._offset + READ_BYTES) % HELD_BYTES
        return READ_BYTES / float(self._library.probe_read(self._data + self._offset, READ_BYTES, self.threads))


def gemm_probe(kind: str) -> tuple[Callable[[], object], float]:
    """A square product through oneDNN in `bfloat16` or `int8`, and its operations (a multiplication and an addition are two)."""
    size = (GEMM_SIZE, 2 * GEMM_SIZE)
    if kind == "int8":
        left, right = (torch.randint(-127, 127, size, dtype=torch.int8) for _ in range(2))
        turned = right.T.contiguous()
        return (lambda: torch._int_mm(left, turned)), 2.0 * GEMM_SIZE**2 * size[1]
    left, right = (torch.randn(size, dtype=torch.bfloat16) for _ in range(2))
    return (lambda: torch.nn.functional.linear(left, right)), 2.0 * GEMM_SIZE**2 * size[1]
