"""Whether the kernels can run here."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch


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
