"""The few calls of the CUDA runtime that PyTorch does not offer, or offers slowly, through ctypes on the library that PyTorch loaded.

HIP has the same calls under its own prefix. Every return code is checked, and an error that was reported is taken out of the runtime's
memory: it would else come up again at PyTorch's next call.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from moegraft.operators.experts.devices.interface import DeviceError

LIBRARIES = {"cuda": ("libcudart", "cudart64"), "hip": ("libamdhip64", "amdhip64")}
HOST_TO_DEVICE = 1
PORTABLE = 1  # page-locked for every device
READ_ONLY = 8  # of bytes that the host cannot write, such as a file mapped for reading


class _Function(Protocol):
    argtypes: list[type]
    restype: type

    def __call__(self, *arguments: object) -> int: ...


class RuntimeLibrary:
    """Checked calls of a CUDA or HIP runtime."""

    def __init__(self, library: ctypes.CDLL, prefix: str) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._prefix = prefix
        self._copy = self._function(library, "MemcpyAsync", [pointer, pointer, size, number, pointer])
        self._launch = self._function(library, "LaunchHostFunc", [pointer, pointer, pointer])
        self._register = self._function(library, "HostRegister", [pointer, size, ctypes.c_uint])
        self._unregister = self._function(library, "HostUnregister", [pointer])
        self._last_error = self._function(library, "GetLastError", [])
        self._error_string = self._function(library, "GetErrorString", [number], ctypes.c_char_p)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Host to device, on a stream. All are addresses or handles; raises DeviceError, as the others do."""
        self._check(self._copy(target, source, nbytes, HOST_TO_DEVICE, stream), "MemcpyAsync")

    def launch_host_function(self, stream: int, function: int, data: int) -> None:
        self._check(self._launch(stream, function, data), "LaunchHostFunc")

    def register(self, address: int, nbytes: int, *, writable: bool) -> None:
        """Page-locks host memory."""
        self._check(self._register(address, nbytes, PORTABLE if writable else PORTABLE | READ_ONLY), "HostRegister")

    def unregister(self, address: int) -> None:
        self._check(self._unregister(address), "HostUnregister")

    def _function(self, library: ctypes.CDLL, name: str, arguments: list[type], result: type = ctypes.c_int) -> _Function:
        try:
            function: _Function = getattr(library, self._prefix + name)
        except AttributeError as error:
            raise DeviceError(f"the runtime library has no {self._prefix}{name}: {error}") from error
        function.argtypes, function.restype = arguments, result
        return function

    def _check(self, code: int, call: str) -> None:
        if code != 0:
            self._last_error()
            text = self._error_string(code)
            reason = text.decode(errors="replace") if isinstance(text, bytes) else "no description"
            raise DeviceError(f"{self._prefix}{call} failed with code {code}: {reason}")


def load_runtime(prefix: str) -> RuntimeLibrary:
    """The runtime that PyTorch has loaded; `prefix` is `cuda` or `hip`.

    Raises:
        DeviceError: it cannot be found.
    """
    tried = []
    for path in _candidates(prefix):
        try:
            return RuntimeLibrary(ctypes.CDLL(path), prefix)
        except (OSError, DeviceError) as error:
            tried.append(str(error))
    raise DeviceError(f"the {prefix} runtime that PyTorch uses was not found: {'; '.join(tried) or 'no such library is loaded'}")


def loaded_paths(maps: str, prefix: str) -> list[str]:
    """Paths of the runtime among the mapped files that `/proc/self/maps` lists, each once."""
    names = LIBRARIES[prefix]
    files = (line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6)
    return list(dict.fromkeys(file for file in files if Path(file).name.startswith(names)))


def _candidates(prefix: str) -> Iterator[str | None]:
    maps = Path("/proc/self/maps")
    if maps.exists():
        yield from loaded_paths(maps.read_text(encoding="utf-8", errors="replace"), prefix)
    if sys.platform == "win32":
        import torch

        folder = Path(torch.__file__).parent / "lib"
        yield from (str(path) for name in LIBRARIES[prefix] for path in folder.glob(f"{name}*.dll"))
    else:
        yield None  # linked into PyTorch, or loaded for all to see
