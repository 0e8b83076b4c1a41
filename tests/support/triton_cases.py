"""What the tests of Triton kernels share: where they run, buffers that are poisoned before they are handed out, tolerances."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from support import ROOT

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

# Largest relative error (Frobenius norm) of an output against float64, by dtype of the activations, where tensor cores round operands to
# that dtype. Without them everything is float32: see kernel_cases.TOLERANCE.
# The interpreter cuts bfloat16 off instead of rounding it: a bias of 0.3% for each of three roundings.
ROUNDED = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1.5e-2 if INTERPRETED else 8e-3}


def numeric_tests_run() -> bool:
    """Whether this process can run kernels: it interprets them, or has a GPU."""
    return INTERPRETED or torch.cuda.is_available()


def run_interpreted(path: Path) -> None:
    """Runs test files in a process of their own: Triton decides when a kernel is defined whether it is interpreted."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory from `torch.empty` holds NaN, or a number that is far out of range as an index."""
    empty = torch.empty

    def poison(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    torch.empty = poison
    try:
        yield
    finally:
        torch.empty = empty
