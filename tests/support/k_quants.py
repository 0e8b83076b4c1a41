"""Matrices in the formats of GGUF files that are packed as they are: random blocks, and a simple quantiser to Q4_K and Q6_K."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from moegraft.operators.weight_formats import FORMATS
from support.quantised_files import decoded

gguf = pytest.importorskip("gguf", reason="GGUF files are read by the package gguf")

BlockType = gguf.GGMLQuantizationType
KINDS = {name: BlockType[form.gguf] for name, form in FORMATS.items() if form.stored and form.gguf is not None}
SAFETENSORS = tuple(name for name, form in FORMATS.items() if form.gguf is None)
SUPER_BLOCK = 256
Blocks = NDArray[np.uint8]


def dequantised(blocks: Blocks, weight_type: str) -> NDArray[np.float32]:
    """Return the values (..., cols) of blocks (..., bytes)."""
    if weight_type not in KINDS:
        return decoded(blocks, weight_type)
    values: NDArray[np.float32] = gguf.dequantize(blocks, KINDS[weight_type])
    return values


def quantise(values: NDArray[np.float32], weight_type: str) -> Blocks:
    """Quantise (..., cols) to blocks (..., bytes); return random blocks for a type that nothing here can quantise to.

    In Q4_K and Q6_K each group's range is that of its extremes.
    """
    if weight_type not in KINDS:
        return any_blocks(values.shape, weight_type, seed=0)
    if weight_type not in ("q4_k", "q6_k"):
        try:
            blocks: Blocks = gguf.quantize(values, KINDS[weight_type])
            return blocks
        except NotImplementedError:
            return any_blocks(values.shape, weight_type, seed=0)
    rows = values.reshape(-1, SUPER_BLOCK)
    packed = _q4_k(rows) if weight_type == "q4_k" else _q6_k(rows)
    return packed.reshape(*values.shape[:-1], -1)


def any_blocks(shape: tuple[int, ...], weight_type: str, seed: int) -> Blocks:
    """Return random blocks for (..., cols), whose values have both signs and are about 1 / sqrt(cols) large."""
    return FORMATS[weight_type].random_blocks(shape, np.random.default_rng(seed))


def _half(values: NDArray[np.float32]) -> tuple[NDArray[np.float32], Blocks]:
    """Round to float16; return the values and their bytes (n, 2)."""
    halves = values.astype(np.float16)
    return halves.astype(np.float32), halves[:, None].view(np.uint8)


def _steps(values: NDArray[np.float32], step: NDArray[np.float32], low: int, high: int) -> NDArray[np.int64]:
    """Return the number of steps of size `step`; 0 where `step` is 0."""
    whole = np.divide(values, step, out=np.zeros_like(values), where=step != 0)
    return np.clip(np.rint(whole), low, high).astype(np.int64)


def _q4_k(rows: NDArray[np.float32]) -> Blocks:
    groups = rows.reshape(len(rows), 8, 32)
    lowest = np.minimum(groups.min(-1), 0)
    scale = (groups.max(-1) - lowest) / np.float32(15)
    d, d_bytes = _half(scale.max(-1) / 63)
    dmin, dmin_bytes = _half((-lowest).max(-1) / 63)
    sc, m = _steps(scale, d[:, None], 0, 63), _steps(-lowest, dmin[:, None], 0, 63)
    step = (d[:, None] * sc)[..., None].astype(np.float32)
    codes = _steps(groups + (dmin[:, None] * m)[..., None].astype(np.float32), np.broadcast_to(step, groups.shape), 0, 15)
    first, last = slice(0, 4), slice(4, 8)
    bits = [sc[:, first] | sc[:, last] >> 4 << 6, m[:, first] | m[:, last] >> 4 << 6, sc[:, last] & 15 | (m[:, last] & 15) << 4]
    nibbles = codes[:, 0::2] | codes[:, 1::2] << 4
    return np.concatenate([d_bytes, dmin_bytes, *(part.astype(np.uint8) for part in (*bits, nibbles.reshape(len(rows), -1)))], axis=1)


def _q6_k(rows: NDArray[np.float32]) -> Blocks:
    groups = rows.reshape(len(rows), 16, 16)
    scale = np.abs(groups).max(-1) / np.float32(31)
    d, d_bytes = _half(scale.max(-1) / 127)
    sc = _steps(scale, d[:, None], -128, 127)
    step = (d[:, None] * sc)[..., None].astype(np.float32)
    codes = (_steps(groups, np.broadcast_to(step, groups.shape), -32, 31) + 32).reshape(len(rows), 2, 4, 32)
    low, high = codes & 15, codes >> 4
    nibbles = low[:, :, :2] | low[:, :, 2:] << 4
    upper = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = [
        nibbles.reshape(len(rows), -1).astype(np.uint8),
        upper.reshape(len(rows), -1).astype(np.uint8),
        sc.astype(np.int8).view(np.uint8),
    ]
    return np.concatenate([*parts, d_bytes], axis=1)
