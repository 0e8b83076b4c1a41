"""FP8 and MXFP4 checkpoints as bfloat16: each tensor or expert is dequantised when it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from moegraft.injection.checkpoint.files import Checkpoint, LazyTensor
from moegraft.operators.errors import CheckpointError

Method = Literal["fp8", "mxfp4"]
FP8_SCALE = "_scale_inv"
MXFP4_CODES, MXFP4_SCALES = "_blocks", "_scales"
# The 16 values of a float of 1 sign, 2 exponent and 1 mantissa bits (OCP Microscaling Formats 1.0, section 5.3.3).
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127


def quantisation_of(config: PretrainedConfig) -> Mapping[str, Any] | None:
    """Return the quantisation settings of a config; None if its weights are not quantised."""
    found: Any = getattr(config, "quantization_config", None) or getattr(config.get_text_config(), "quantization_config", None)
    if not found:
        return None
    settings: Mapping[str, Any] = found if isinstance(found, Mapping) else found.to_dict()
    return settings


def method_of(settings: Mapping[str, Any]) -> Method | None:
    """Return the quantisation method of these settings; None if this module cannot dequantise it."""
    name = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    return "fp8" if name == "fp8" else "mxfp4" if name == "mxfp4" else None


def dequantised(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint with each pair of codes and scales as one bfloat16 tensor.

    Raises:
        CheckpointError: scales are missing, or have the wrong shape.
    """
    method = method_of(settings)
    assert method is not None, "refuse_quantised accepts only these methods"
    tensors = dict(checkpoint.tensors)
    if method == "mxfp4":
        _pair_mxfp4(tensors)
    else:
        block = settings.get("weight_block_size") or (1, 1)
        _pair_fp8(tensors, (int(block[0]), int(block[1])))
    return Checkpoint(checkpoint.folder, tensors)


def _pair_fp8(tensors: dict[str, LazyTensor], block: tuple[int, int]) -> None:
    for key in [key for key, tensor in tensors.items() if tensor.stored_dtype.startswith("F8_")]:
        weight, scales = tensors[key], tensors.pop(key + FP8_SCALE, None)
        if scales is None:
            raise CheckpointError(f"{weight.origin}: the scales of this float8 weight, {key + FP8_SCALE}, are missing; download it again")
        expected = [*weight.shape[:-2], *(-(-size // each) for size, each in zip(weight.shape[-2:], block, strict=True))]
        if len(scales.shape) > 1 and list(scales.shape) != expected:
            raise CheckpointError(f"{scales.origin}: shape {scales.shape}, expected {tuple(expected)} for blocks of {block}")
        tensors[key] = LazyTensor(weight.key, weight.file, _Float8(weight, scales, block))


def _pair_mxfp4(tensors: dict[str, LazyTensor]) -> None:
    for key in [key for key in tensors if key.endswith(MXFP4_CODES)]:
        name = key.removesuffix(MXFP4_CODES)
        codes, scales = tensors.pop(key), tensors.pop(name + MXFP4_SCALES, None)
        if scales is None:
            raise CheckpointError(f"{codes.origin}: the scales of these codes, {name + MXFP4_SCALES}, are missing; download it again")
        if len(codes.shape) != 4 or scales.shape != codes.shape[:3]:
            raise CheckpointError(f"{scales.origin}: shape {scales.shape}, expected {codes.shape[:3]} for codes of shape {codes.shape}")
        tensors[name] = LazyTensor(name, codes.file, _Mxfp4(codes, scales))


@dataclass(frozen=True, slots=True)
class _Float8:
    """Float8 weights (..., rows, cols) with a scale per block of rows and columns (DeepSeek-V3, section 3.3.2), or one for all."""

    weight: LazyTensor
    scales: LazyTensor
    block: tuple[int, int]

    def get_shape(self) -> list[int]:
        return list(self.weight.shape)

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: Any) -> torch.Tensor:
        weight = self.weight[index].float()
        scales = self.scales[...] if len(self.scales.shape) < 2 else self.scales[index]
        return (weight * self._spread(scales.float(), weight.shape)).bfloat16()

    def _spread(self, scales: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        if scales.dim() < 2:
            return scales
        rows, columns = (scales.repeat_interleave(self.block[0], -2)[..., : shape[-2], :], self.block[1])
        return rows.repeat_interleave(columns, -1)[..., : shape[-1]]


@dataclass(frozen=True, slots=True)
class _Mxfp4:
    """GPT-OSS's experts: codes (E, rows, groups, 16) uint8, two per byte, the low half first; scales (E, rows, groups), powers of two.

    The parameter is the transpose, (E, groups * 32, rows). bfloat16 represents every value exactly.
    """

    codes: LazyTensor
    scales: LazyTensor

    def get_shape(self) -> list[int]:
        experts, rows, groups, half = self.codes.shape
        return [experts, groups * half * 2, rows]

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(index, int):
            return self._expert(index)
        # One expert at a time: the intermediate tensors take several times the memory of the values.
        whole = torch.empty(self.get_shape(), dtype=torch.bfloat16)
        for expert, values in enumerate(whole):
            values.copy_(self._expert(expert))
        return whole[index]

    def _expert(self, expert: int) -> torch.Tensor:
        codes, scales = self.codes[expert], self.scales[expert]
        table = torch.tensor(FP4_VALUES)
        values = table[torch.stack([codes & 15, codes >> 4], dim=-1).int()].flatten(-2)  # (rows, groups, 32)
        scaled = torch.ldexp(values, scales.int().unsqueeze(-1) - EXPONENT_BIAS)
        return scaled.flatten(1).bfloat16().T
