"""FP8 and MXFP4 checkpoints as bfloat16: each tensor or expert is dequantised when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from moegraft.injection.checkpoint.files import Checkpoint, Conversion, LazyTensor
from moegraft.injection.checkpoint.identity import Extent
from moegraft.operators.errors import CheckpointError

Method = Literal["fp8", "mxfp4"]
Block = tuple[int, int]
FP8_SCALE = "_scale_inv"
DEFAULT_BLOCK = (128, 128)  # transformers', for settings without a block size
MXFP4_CODES, MXFP4_SCALES = "_blocks", "_scales"
MXFP4_CODE_BYTES = 16  # that share a scale
# The 16 values of a float of 1 sign, 2 exponent and 1 mantissa bits (OCP Microscaling Formats 1.0, section 5.3.3).
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127


def quantisation_of(config: PretrainedConfig) -> Mapping[str, Any] | None:
    """Return the quantisation settings of a config; None if its weights are not quantised.

    Raises:
        CheckpointError: the settings are no mapping.
    """
    found: Any = getattr(config, "quantization_config", None) or getattr(config.get_text_config(), "quantization_config", None)
    if not found:
        return None
    if not isinstance(found, Mapping) and not hasattr(found, "to_dict"):
        raise CheckpointError(f"{config.name_or_path}/config.json: quantization_config must be a mapping, not {found!r:.100}")
    settings: Mapping[str, Any] = found if isinstance(found, Mapping) else found.to_dict()
    return settings


def method_of(settings: Mapping[str, Any]) -> Method | None:
    """Return the quantisation method of these settings; None if this module cannot dequantise it."""
    name = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    return "fp8" if name == "fp8" else "mxfp4" if name == "mxfp4" else None


def dequantised(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint with each pair of codes and scales as one bfloat16 tensor.

    Raises:
        CheckpointError: the settings are wrong, or scales are missing or of the wrong shape or dtype.
    """
    method = method_of(settings)
    assert method is not None, "refuse_quantised accepts only these methods"
    tensors = dict(checkpoint.tensors)
    if method == "mxfp4":
        _pair_mxfp4(tensors)
    else:
        _pair_fp8(tensors, _block_size(checkpoint, settings))
    return Checkpoint(checkpoint.folder, tensors)


def _block_size(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Block | None:
    """Return the rows and columns that share a scale; None where a matrix has one scale, or one for each row."""
    block: Any = settings.get("weight_block_size", DEFAULT_BLOCK)
    if block is None:
        return None
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'}: weight_block_size must be two positive integers, such as [128, 128], not {block!r:.100}"
        )
    return block[0], block[1]


def _pair_fp8(tensors: dict[str, LazyTensor], block: Block | None) -> None:
    for key in [key for key, tensor in tensors.items() if tensor.stored_dtype in ("F8_E4M3", "F8_E5M2")]:
        weight, scales = tensors[key], tensors.pop(key + FP8_SCALE, None)
        if scales is None:
            raise CheckpointError(f"{weight.origin}: the scales of this float8 weight, {key + FP8_SCALE}, are missing; download it again")
        if len(weight.shape) < 2:
            raise CheckpointError(f"{weight.origin}: shape {weight.shape}, and only matrices can be float8; download it again")
        if scales.dtype is None and scales.stored_dtype != "F8_E8M0":
            raise CheckpointError(f"{scales.origin}: scales of dtype {scales.stored_dtype}, which is no floating-point one")
        tensors[key] = LazyTensor(weight.key, weight.file, _Float8(weight, scales, _block_of(weight, scales, block)))


def _block_of(weight: LazyTensor, scales: LazyTensor, block: Block | None) -> Block:
    """Return the rows and columns of a weight that share a scale.

    Raises:
        CheckpointError: the scales have another shape than the weight and the settings require.
    """
    *lead, rows, columns = weight.shape
    if block is None:
        known = {(*lead, 1, 1): (rows, columns), (*lead, rows, 1): (1, columns)}
        if scales.shape in ((), (1,)):
            return rows, columns
        form = f"{(*lead, 1, 1)} or {(*lead, rows, 1)}"
    else:
        known = {(*lead, -(-rows // block[0]), -(-columns // block[1])): block}
        form = f"{next(iter(known))} for blocks of {block}"
    if scales.shape not in known:
        raise CheckpointError(f"{scales.origin}: shape {scales.shape}, expected {form} for a weight of shape {weight.shape}")
    return known[scales.shape]


def _pair_mxfp4(tensors: dict[str, LazyTensor]) -> None:
    for key in [key for key in tensors if key.endswith(MXFP4_CODES)]:
        name = key.removesuffix(MXFP4_CODES)
        codes, scales = tensors.pop(key), tensors.pop(name + MXFP4_SCALES, None)
        if scales is None:
            raise CheckpointError(f"{codes.origin}: the scales of these codes, {name + MXFP4_SCALES}, are missing; download it again")
        for tensor in (codes, scales):
            if tensor.stored_dtype != "U8":
                raise CheckpointError(f"{tensor.origin}: dtype {tensor.stored_dtype}, expected U8")
        if len(codes.shape) != 4 or codes.shape[3] != MXFP4_CODE_BYTES:
            raise CheckpointError(f"{codes.origin}: shape {codes.shape}, expected (experts, rows, groups, {MXFP4_CODE_BYTES})")
        if scales.shape != codes.shape[:3]:
            raise CheckpointError(f"{scales.origin}: shape {scales.shape}, expected {codes.shape[:3]} for codes of shape {codes.shape}")
        tensors[name] = LazyTensor(name, codes.file, _Mxfp4(codes, scales))


@dataclass(frozen=True, slots=True)
class _Float8(Conversion):
    """Float8 weights (..., rows, columns) with a scale for each block of rows and columns (DeepSeek-V3, section 3.3.2)."""

    weight: LazyTensor
    scales: LazyTensor
    block: Block

    @property
    def extents(self) -> list[Extent]:
        scales = [replace(extent, meaning=f"{extent.meaning} for blocks of {self.block}") for extent in self.scales.extents]
        return [*self.weight.extents, *scales]

    def get_shape(self) -> list[int]:
        return list(self.weight.shape)

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: Any) -> torch.Tensor:
        if index is not ... and not (isinstance(index, int) and len(self.weight.shape) > 2):
            return self[...][index]  # within a matrix, scales have other indices than weights
        weight = self.weight[index].float()
        scales = (self.scales[...].reshape(1, 1) if len(self.scales.shape) < 2 else self.scales[index]).float()
        rows = scales.repeat_interleave(self.block[0], -2)[..., : weight.shape[-2], :]
        return (weight * rows.repeat_interleave(self.block[1], -1)[..., : weight.shape[-1]]).bfloat16()


@dataclass(frozen=True, slots=True)
class _Mxfp4(Conversion):
    """GPT-OSS's experts: codes (E, rows, groups, 16) uint8, two per byte, the low half first; scales (E, rows, groups), powers of two.

    The parameter is the transpose, (E, groups * 32, rows). bfloat16 represents every value exactly.
    """

    codes: LazyTensor
    scales: LazyTensor

    @property
    def extents(self) -> list[Extent]:
        return [*self.codes.extents, *self.scales.extents]

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
