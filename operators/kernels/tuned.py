"""Constants of launches, timed on a GPU by `benchmarks/gpu_day.py` and kept in `tuned.json` by the GPU's name; elsewhere estimates hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

TABLE = Path(__file__).with_name("tuned.json")
Constants = Mapping[str, int]
_trial: Constants | None = None


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
