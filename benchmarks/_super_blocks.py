"""Random matrices in GGUF's Q4_K and Q6_K, which `gguf` reads but does not write: how fast they are does not depend on values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = {"q4_k": 144, "q6_k": 210}


def random_blocks(weight_type: str, shape: tuple[int, ...], seed: int = 0) -> NDArray[np.uint8]:
    """(..., cols) as blocks (..., bytes); values of both signs, about 1 / sqrt(cols) large."""
    cols = shape[-1]
    blocks = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], cols // 256, BLOCK_BYTES[weight_type]), np.uint8)
    if weight_type == "q4_k":  # half of the 63 steps of scale times half of a code's 15 steps, less minima as large
        blocks[..., :2] = _half(1 / (200 * cols**0.5))
        blocks[..., 2:4] = _half(7.5 / (200 * cols**0.5))
    else:
        blocks[..., 208:] = _half(1 / (1400 * cols**0.5))
    return blocks.reshape(*shape[:-1], -1)


def _half(value: float) -> NDArray[np.uint8]:
    return np.array([value], np.float16).view(np.uint8)


def dequantised(blocks: NDArray[np.uint8], weight_type: str) -> Any:
    import gguf

    return gguf.dequantize(blocks, gguf.GGMLQuantizationType[weight_type.upper()])
