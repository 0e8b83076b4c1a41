"""Tensors as the kernel takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """A CPU tensor as an array over the same memory: bfloat16, which numpy lacks, crosses as its bits in uint16."""
    tensor = tensor.detach()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
