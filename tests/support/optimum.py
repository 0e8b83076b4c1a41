"""The shortest makespan of a layer, by exhaustive search in C++, with which tests and benchmarks compare schedules."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from moegraft.operators.offload.scheduler import LayerProblem
from support import ROOT

CSRC = ROOT / "cpu_backend" / "csrc"
PLANNER_SOURCES = tuple(CSRC / "scheduler" / f"{name}.cpp" for name in ("planner", "layer_problem", "greedy", "two_threshold"))
_ERRORS = {1: ValueError, 2: RuntimeError}
needs_optimum = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which compiles the search for the optimum")


class ProblemStruct(ctypes.Structure):
    """`LayerProblem` of scheduler/scheduler.h; valid while the arrays of the problem are alive."""

    _fields_ = (
        ("experts", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("loads", "cpu_ms", "gpu_ms", "arrival_ms")),
        *((name, ctypes.c_double) for name in ("transfer_ms", "first_cpu_ms", "cpu_free_ms", "gpu_free_ms", "link_free_ms")),
        ("max_transfers", ctypes.c_int),
    )

    @classmethod
    def of(cls, problem: LayerProblem) -> ProblemStruct:
        arrays = (array.ctypes.data for array in (problem.loads, problem.cpu_ms, problem.gpu_ms, problem.arrival_ms))
        free = (problem.cpu_free_ms, problem.gpu_free_ms, problem.link_free_ms)
        transfers = min(problem.max_transfers, len(problem.loads))
        return cls(len(problem.loads), *arrays, problem.transfer_ms, problem.first_cpu_ms, *free, transfers)


def compile_library(sources: Sequence[Path], folder: Path) -> ctypes.CDLL:
    """Compile `sources` and the planner with the extension's own optimisation flags, and load the library.

    Raises:
        FileNotFoundError: g++ is not installed.
    """
    library = folder / "planner.so"
    flags = ["-O3", "-fno-math-errno", "-std=c++17", "-shared", "-fPIC", f"-I{CSRC}"]
    subprocess.run(["g++", *flags, *map(str, [*sources, *PLANNER_SOURCES]), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.problem_bytes.restype = ctypes.c_size_t
    assert loaded.problem_bytes() == ctypes.sizeof(ProblemStruct), "LayerProblem has other fields in C++"
    return loaded


@cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:  # a loaded library does not need its file
        return compile_library([Path(__file__).with_name("optimum.cpp")], Path(folder))


def optimum(problem: LayerProblem) -> float:
    """Return the shortest makespan of all splits in ms, exact to rounding; it takes milliseconds to seconds.

    Raises:
        ValueError: more than 16 experts in flight.
        RuntimeError: the search exceeds its memory limit.
    """
    found, message = ctypes.c_double(), ctypes.create_string_buffer(256)
    status = _library().optimum_of(ctypes.byref(ProblemStruct.of(problem)), ctypes.byref(found), message, len(message))
    if status != 0:
        raise _ERRORS[status](message.value.decode())
    return found.value
