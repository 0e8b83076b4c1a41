"""Whether kernels can run on this machine, and what their launches share.

Constants of launches are timed on a GPU by `benchmarks/gpu_day.py` and kept in `tuned.json` by the GPU's name; elsewhere estimates hold.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moegraft.cpu_backend import grid_points
from moegraft.operators.kernels.packed_layout import gpu_format

logger = logging.getLogger(__name__)
# Fused multiply-adds are meant, whatever a Triton version's default is.
LAUNCH: dict[str, Any] = {"enable_fp_fusion": True}
TABLE = Path(__file__).with_name("tuned.json")
Constants = Mapping[str, int]
_trial: Constants | None = None


def interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU: for tests, thousands of times slower than a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_unavailable() -> str | None:
    """Return why no Triton kernel can run on a GPU of this machine, or None. The interpreter does not count."""
    if find_spec("triton") is None:
        return "Triton is not installed (pip install 'moegraft[gpu]')"
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA GPU"
    return None


def compile_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of launches on GPUs or machines that Triton cannot compile for, as those without a C compiler."""
    from triton import TritonError

    return RuntimeError, TritonError


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` PyTorch's current one, which Triton launches on wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


# Before this version Triton's products of Hopper's warp groups (`wgmma`), whose weights come from registers, are wrong: without a fence
# they read activations before the copy that brings them has landed (an H100 with Triton 3.6: zeros instead of results), and the
# assembler reuses registers that are still read (triton-lang/triton pull requests 9514 and 11781).
RIGHT_WGMMA = (3, 9)
NO_WGMMA = "DISABLE_MMA_V3"  # in the environment, which Triton reads when it compiles; its cache on disk distinguishes by it


def avoid_wrong_wgmma() -> None:
    """Before launches of kernels with matrix products: where this Triton's are wrong, compile them for single warps, as for other GPUs.

    It stays so for the whole process, as other threads may read the environment. Its other kernels would be as wrong.
    """
    if os.environ.get(NO_WGMMA) != "1" and wrong_wgmma():
        os.environ[NO_WGMMA] = "1"
        logger.info("Triton before 3.9 computes wrong products with Hopper's warp groups: they are left out (%s=1)", NO_WGMMA)


def wrong_wgmma() -> bool:
    """Return whether this Triton's products of warp groups would be used on the current GPU, and are wrong."""
    if interpreted() or _triton_version() >= RIGHT_WGMMA:
        return False
    from triton.runtime import driver

    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch // 10 == 9)


@cache
def _triton_version() -> tuple[int, ...]:
    import triton

    return tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])


@cache
def grid_on(device: torch.device, weight_type: str) -> torch.Tensor | None:
    """Return the points of a type's grid on a device, at most 16 KiB: int32 of 4 columns or int64 of 8; None for a type without one."""
    points = grid_points().get(weight_type)
    if points is None:
        return None
    narrow = int(points.max()) < 1 << 32
    return torch.from_numpy(points.astype(np.uint32).view(np.int32) if narrow else points.view(np.int64)).to(device)


@dataclass(frozen=True, slots=True)
class PackedBytes:
    """Packed bytes as the kernels read them: one storage under three types, and the points of a grid that they are indexes into."""

    units: torch.Tensor
    scales: torch.Tensor  # float16
    biases: torch.Tensor  # float32
    grid: torch.Tensor | None

    @classmethod
    def of(cls, packed: torch.Tensor, weight_type: str) -> PackedBytes:
        """Return views of contiguous uint8, with units as those of `weight_type`.

        Raises:
            ValueError: the bytes are not contiguous, or do not begin at a multiple of 16.
        """
        if packed.dtype != torch.uint8 or not packed.is_contiguous():
            raise ValueError(f"packed bytes must be contiguous uint8, not {packed.dtype} of strides {packed.stride()}")
        if packed.data_ptr() % 16:
            raise ValueError("packed bytes must begin at a multiple of 16 bytes: the kernels read 16 at a time")
        flat = packed.view(-1)
        units = flat.view(gpu_format(weight_type).unit_dtype)
        return cls(units, flat.view(torch.float16), flat.view(torch.float32), grid_on(packed.device, weight_type))

    def units_as(self, weight_type: str) -> PackedBytes:
        """Return views for matrices of another weight type in the same bytes."""
        return replace(self, units=self.biases.view(gpu_format(weight_type).unit_dtype), grid=grid_on(self.units.device, weight_type))


def constant(name: str, default: int, weight_type: str, device: torch.device) -> int:
    """Return a constant of the kernels for a weight type: the value timed on this GPU, or the default.

    Names with a colon have a part for a size, such as `grouped_rows:64` for blocks of 64 pairs.
    """
    if _trial is not None:
        return _trial.get(name, default)
    return _timed(weight_type, device).get(name, default) if device.type == "cuda" else default


@contextmanager
def trial(constants: Constants) -> Iterator[None]:
    """Launch with these constants within the body, in every thread: for timing them."""
    global _trial
    _trial = constants
    try:
        yield
    finally:
        _trial = None


@cache
def _timed(weight_type: str, device: torch.device) -> Constants:
    return read_table(TABLE).get(torch.cuda.get_device_name(device), {}).get(weight_type, {})


def read_table(path: Path) -> dict[str, dict[str, dict[str, int]]]:
    """Return constants by GPU, weight type and name.

    Raises:
        ValueError: the file is not such a table.
    """
    table = json.loads(path.read_text(encoding="utf-8"))
    for gpu, types in table.items():
        for weight_type, constants in types.items():
            if not all(isinstance(value, int) and value > 0 for value in constants.values()):
                raise ValueError(f"{path}: constants of {gpu}, {weight_type} must be positive integers: {constants}")
    return table  # type: ignore[no-any-return]
