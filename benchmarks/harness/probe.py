"""The limits of this machine: the read bandwidth of memory, and matrix products through oneDNN."""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("probe.cpp")
HELD_BYTES = 1 << 30  # much larger than the caches
READ_BYTES = 64 << 20  # bytes per run: as short as a layer, so that interruptions affect both alike
RUNS = 24  # whose median is the bandwidth
GEMM_SIZE = 1024


class ReadProbe:
    """A probe of the read bandwidth with `threads` threads; each `run()` reads another 64 MiB of 1 GiB and returns bytes per second."""

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

    def median(self) -> float:
        return statistics.median(self.run() for _ in range(RUNS))


def gemm_probe(kind: str) -> tuple[Callable[[], object], float]:
    """Return a square matrix product through oneDNN in `bfloat16` or `int8`, and its number of multiplications and additions."""
    size = (GEMM_SIZE, 2 * GEMM_SIZE)
    if kind == "int8":
        left, right = (torch.randint(-127, 127, size, dtype=torch.int8) for _ in range(2))
        turned = right.T.contiguous()
        return (lambda: torch._int_mm(left, turned)), 2.0 * GEMM_SIZE**2 * size[1]
    left, right = (torch.randn(size, dtype=torch.bfloat16) for _ in range(2))
    return (lambda: torch.nn.functional.linear(left, right)), 2.0 * GEMM_SIZE**2 * size[1]
