"""Quantised checkpoints: the tensors that each format stores for a matrix, and the float32 values that these mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.operators.weight_formats import FORMATS as FORMATS_OF_KERNELS

Tensors = dict[str, torch.Tensor]
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # of the eight numbers in an integer, the lowest bits first


@dataclass(frozen=True)
class Format:
    """One format: `write(name, weight)` returns the stored tensors of a matrix, by key, and its values."""

    write: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
    settings: Mapping[str, Any]


def spread(scales: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Return the number of each weight's block."""
    rows, columns = (torch.arange(size) // step for size, step in zip(shape, block, strict=True))
    return scales[rows][:, columns]


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return unsigned integers (rows, n) as int32, the first in the lowest bits; what is missing of the last one is 0."""
    per_word = 32 // bits
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per_word)).unflatten(1, (-1, per_word))
    words = sum(codes[..., place] << bits * place for place in range(per_word))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


@dataclass(frozen=True)
class Integers:
    """Unsigned codes (rows, columns), scales and unsigned zero points (rows, groups)."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    values: torch.Tensor


def integers(weight: torch.Tensor, bits: int, group: int, *, symmetric: bool, dtype: torch.dtype) -> Integers:
    columns = weight.shape[1]
    group, top = group or columns, (1 << bits) - 1
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(2), groups.amax(2)
    scales = (groups.abs().amax(2) * 2 / top if symmetric else (high - low) / top).to(dtype)
    zeros = torch.full_like(scales, 1 << bits - 1) if symmetric else (-low / scales).round().clamp(0, top)
    block = (1, group)
    wide, points = spread(scales.float(), weight.shape, block), spread(zeros.float(), weight.shape, block)
    codes = (weight / wide + points).round().clamp(0, top)
    return Integers(codes.to(torch.uint8), scales, zeros.to(torch.uint8), (codes - points) * wide)


def compressed(
    bits: int, group: int, *, symmetric: bool = True, form: str = "pack-quantized", dtype: torch.dtype = torch.bfloat16
) -> Format:
    """compressed-tensors' integers; `group` 0 means a scale for each row."""

    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        found = integers(weight, bits, group, symmetric=symmetric, dtype=dtype)
        if form == "int-quantized":
            stored = {f"{name}.weight": (found.codes ^ 128).view(torch.int8)}
            zeros = (found.zeros ^ 128).view(torch.int8)
        else:
            stored = {f"{name}.weight_packed": packed(found.codes, bits), f"{name}.weight_shape": torch.tensor(weight.shape)}
            zeros = packed(found.zeros.T, bits).T.contiguous()
        stored[f"{name}.weight_scale"] = found.scales
        if not symmetric:
            stored[f"{name}.weight_zero_point"] = zeros
        return stored, found.values

    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    return Format(write, compressed_settings(form, type="int", num_bits=bits, symmetric=symmetric, **strategy))


def compressed_settings(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def float8(suffix: str, block: tuple[int, int], settings: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Format:
    """FP8 with a scale for each block, in which 0 means all rows or columns."""

    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        size = block[0] or weight.shape[0], block[1] or weight.shape[1]
        generator = torch.Generator().manual_seed(len(weight))
        scales = 0.001 + 0.01 * torch.rand(-(-weight.shape[0] // size[0]), -(-weight.shape[1] // size[1]), generator=generator)
        scales = scales.to(dtype)
        wide = spread(scales.float(), weight.shape, size)
        codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored_scales = scales.reshape(1) if block == (0, 0) else scales
        return {
            f"{name}.weight": codes,
            f"{name}.weight{suffix}": stored_scales,
            f"{name}.input_scale": torch.ones(1),
        }, codes.float() * wide

    return Format(write, settings)


def nearest_fp4(values: torch.Tensor) -> torch.Tensor:
    return (values.unsqueeze(-1) - FP4).abs().argmin(-1).to(torch.uint8)


def float4(*, form: str) -> Format:
    """Two codes in a byte: compressed-tensors' MXFP4 and NVFP4, and ModelOpt's NVFP4."""
    group = 32 if form == "mxfp4-pack-quantized" else 16

    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        largest = weight.unflatten(1, (-1, group)).abs().amax(2)
        stored: Tensors = {}
        if group == 32:
            exponents = (largest.log2().floor() - 2).clamp(-127, 127)
            stored[f"{name}.weight_scale"] = (exponents + 127).to(torch.uint8)
            scales = torch.exp2(exponents)
        else:
            whole = largest.max() / (6 * 448)
            own = (largest / 6 / whole).to(torch.float8_e4m3fn)
            stored[f"{name}.weight_scale"] = own
            if form == "modelopt":
                stored |= {f"{name}.weight_scale_2": whole, f"{name}.input_scale": torch.ones(())}
                scales = own.float() * whole
            else:
                stored |= {f"{name}.weight_global_scale": 1 / whole.reshape(1), f"{name}.input_global_scale": torch.ones(1)}
                scales = own.float() / (1 / whole)
        wide = spread(scales, weight.shape, (1, group))
        codes = nearest_fp4(weight / wide)
        stored[f"{name}.weight" if form == "modelopt" else f"{name}.weight_packed"] = codes[:, ::2] | codes[:, 1::2] << 4
        return stored, FP4[codes.int()] * wide

    if form == "modelopt":
        return Format(write, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]})
    strategy = "group" if group == 32 else "tensor_group"
    return Format(write, compressed_settings(form, type="float", num_bits=4, symmetric=True, strategy=strategy, group_size=group))


def awq(group: int = 32) -> Format:
    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        found = integers(weight, 4, group, symmetric=False, dtype=torch.float16)

        def columns(codes: torch.Tensor) -> torch.Tensor:
            return packed(codes.T.unflatten(1, (-1, 8))[..., AWQ_COLUMNS].flatten(1), 4)

        return {
            f"{name}.qweight": columns(found.codes),
            f"{name}.qzeros": columns(found.zeros),
            f"{name}.scales": found.scales.T.contiguous(),
        }, found.values

    return Format(write, {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True})


def gptq(bits: int = 4, group: int = 32, *, symmetric: bool = True, version: str = "gptq") -> Format:
    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        found = integers(weight, bits, group, symmetric=symmetric, dtype=torch.float16)
        size = group or weight.shape[1]
        zeros = found.zeros if version == "gptq_v2" else (found.zeros - 1) & ((1 << bits) - 1)
        return {
            f"{name}.qweight": packed(found.codes, bits).T.contiguous(),
            f"{name}.qzeros": packed(zeros.T, bits),
            f"{name}.scales": found.scales.T.contiguous(),
            f"{name}.g_idx": (torch.arange(weight.shape[1]) // size).int(),
        }, found.values

    settings = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": False, "sym": symmetric}
    return Format(write, {**settings, "checkpoint_format": version})


def _e4m3(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the values of FP8 codes; 127 and 255 count as 480."""
    magnitude = np.where(codes & 120, np.exp2((codes >> 3 & 15) - 7.0) * (1 + (codes & 7) / 8), (codes & 7) * 2.0**-9)
    return np.where(codes & 128, -magnitude, magnitude).astype(np.float32)


def _shared_floats(parts: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return (..., rows, blocks, 1) floats of which each of four rows has a byte; those of rows that a matrix lacks are 0."""
    rows = parts.shape[-3]
    parts = np.pad(parts, [(0, 0)] * (parts.ndim - 3) + [(0, -rows % 4), (0, 0), (0, 0)])
    parts = parts.reshape(*parts.shape[:-3], -1, 4, parts.shape[-2]).swapaxes(-1, -2)
    parts = np.repeat(parts[..., None, :, :], 4, axis=-3).reshape(*parts.shape[:-3], -1, *parts.shape[-2:])[..., :rows, :, :]
    return np.ascontiguousarray(parts).view(np.float32)


def decoded(blocks: NDArray[np.uint8], weight_type: str) -> NDArray[np.float32]:
    """Return the values (..., rows, columns) of blocks (..., rows, bytes) as the kernels pack them from a safetensors checkpoint."""
    found = FORMATS_OF_KERNELS[weight_type]
    each = blocks.reshape(*blocks.shape[:-1], -1, found.block_bytes)
    if weight_type.startswith("fp8"):
        size = found.block_bytes - found.block_weights
        header, codes = each[..., :size], each[..., size:]
        scales = _shared_floats(header) if weight_type == "fp8" else np.ascontiguousarray(header).view(np.float32)
        values = _e4m3(codes) * scales
    elif weight_type == "nvfp4":
        own = _e4m3(each[..., 1:9]) * _shared_floats(each[..., :1]) / 2  # (..., 8): of 16 columns, for codes that are doubled
        nibbles = each[..., 9:].reshape(*each.shape[:-1], 4, 16)
        codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).reshape(*each.shape[:-1], 8, 16)
        values = 2 * FP4.numpy()[codes] * own[..., None]
    elif weight_type == "int8_g128":
        values = each[..., 2:].view(np.int8).astype(np.float32) * np.ascontiguousarray(each[..., :2]).view(np.float16)
    elif weight_type == "int4_g256":
        nibbles = each[..., 2:].reshape(*each.shape[:-1], 8, 16)
        codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).astype(np.float32) - 8
        values = codes * np.ascontiguousarray(each[..., :2]).view(np.float16).astype(np.float32)[..., None]
    else:
        groups = 1 if weight_type == "int4_g128" else 2
        scales = np.ascontiguousarray(each[..., : 2 * groups]).view(np.float16).astype(np.float32)[..., None]
        zeros = (each[..., 2 * groups, None] >> 4 * np.arange(groups) & 15).astype(np.float32)[..., None]
        nibbles = each[..., 2 * groups + 1 :].reshape(*each.shape[:-1], -1, 16)
        codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).reshape(*each.shape[:-1], groups, -1).astype(np.float32)
        values = scales * codes - scales * zeros
    return values.astype(np.float32).reshape(*blocks.shape[:-1], -1)


FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
COMPRESSED_FP8 = {"type": "float", "num_bits": 8, "symmetric": True}
FORMATS: Mapping[str, Format] = {
    "fp8": float8("_scale_inv", (32, 32), FP8_BLOCKS),
    "compressed fp8 rows": float8(
        "_scale", (1, 0), compressed_settings("float-quantized", **COMPRESSED_FP8, strategy="channel"), torch.bfloat16
    ),
    "compressed fp8 tensor": float8("_scale", (0, 0), compressed_settings("float-quantized", **COMPRESSED_FP8, strategy="tensor")),
    "compressed fp8 blocks": float8(
        "_scale", (48, 32), compressed_settings("float-quantized", **COMPRESSED_FP8, strategy="block", block_structure=[48, 32])
    ),
    "compressed int4": compressed(4, 32),
    "compressed int4 zeros": compressed(4, 64, symmetric=False),
    "compressed int4 rows": compressed(4, 0),
    "compressed int8 packed": compressed(8, 32, symmetric=False, dtype=torch.float16),
    "compressed int8": compressed(8, 0, form="int-quantized"),
    "compressed int8 zeros": compressed(8, 0, form="int-quantized", symmetric=False),
    "compressed nvfp4": float4(form="nvfp4-pack-quantized"),
    "compressed mxfp4": float4(form="mxfp4-pack-quantized"),
    "awq": awq(),
    "awq rows": awq(group=64),
    "gptq": gptq(),
    "gptq zeros": gptq(symmetric=False),
    "gptq v2": gptq(symmetric=False, version="gptq_v2"),
    "gptq int8 rows": gptq(8, 0, symmetric=False),
    "modelopt fp8": float8("_scale", (0, 0), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt nvfp4": float4(form="modelopt"),
}
