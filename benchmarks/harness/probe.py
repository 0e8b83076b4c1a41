"""The read bandwidth of this machine's memory."""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("probe.cpp")
HELD_BYTES = 1 << 30  # much larger than the caches
READ_BYTES = 64 << 20  # bytes per run: as short as a layer, so that interruptions affect both alike
RUNS = 24  # whose median is the bandwidth


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
