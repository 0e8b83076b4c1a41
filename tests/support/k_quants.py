"""Matrices in the formats of GGUF files that are packed as they are: random blocks, and blocks of given values."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moegraft.operators.weight_formats import FORMATS
from support.quantised_files import decoded

gguf = pytest.importorskip("gguf", reason="GGUF files are read by the package gguf")

BlockType = gguf.GGMLQuantizationType
KINDS = {name: BlockType[form.gguf] for name, form in FORMATS.items() if form.stored and form.gguf is not None}
SAFETENSORS = tuple(name for name, form in FORMATS.items() if form.gguf is None)
Blocks = NDArray[np.uint8]


def dequantised(blocks: Blocks, weight_type: str) -> NDArray[np.float32]:
    """Return the values (..., cols) of blocks (..., bytes)."""
    if weight_type not in KINDS:
        return decoded(blocks, weight_type)
    values: NDArray[np.float32] = gguf.dequantize(blocks, KINDS[weight_type])
    return values


def quantise(values: NDArray[np.float32], weight_type: str) -> Blocks:
    """Quantise (..., cols) to blocks (..., bytes); return random blocks for a type that nothing here can quantise to.

    The package gguf has no quantiser to Q4_K and Q6_K; those of moegraft are compared with its decoder where exports are tested. Blocks are
    kept, as each instruction set is tested with the same: not to be changed.
    """
    key = weight_type, values.shape, hashlib.blake2b(np.ascontiguousarray(values)).digest()
    if key not in _quantised:
        _quantised[key] = _quantise(values, weight_type)
    return _quantised[key]


_quantised: dict[tuple[str, tuple[int, ...], bytes], Blocks] = {}


def _quantise(values: NDArray[np.float32], weight_type: str) -> Blocks:
    if weight_type not in KINDS:
        return any_blocks(values.shape, weight_type, seed=0)
    if weight_type not in ("q4_k", "q6_k"):
        try:
            blocks: Blocks = gguf.quantize(values, KINDS[weight_type])
            return blocks
        except NotImplementedError:
            return any_blocks(values.shape, weight_type, seed=0)
    rows = torch.from_numpy(values.reshape(-1, values.shape[-1]))
    return FORMATS[weight_type].encode(rows).reshape(*values.shape[:-1], -1)


def any_blocks(shape: tuple[int, ...], weight_type: str, seed: int) -> Blocks:
    """Return random blocks for (..., cols), whose values have both signs and are about 1 / sqrt(cols) large."""
    return FORMATS[weight_type].random_blocks(shape, np.random.default_rng(seed))
