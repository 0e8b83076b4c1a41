"""Checkpoints with a quantisation config: the reading of the settings, and which tensors together are one weight.

Every format is read as `ScaledCodes` (`coded_matrices.py`). The tensors of a weight are found by their names, dtypes and shapes; the
settings decide what these leave open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from moegraft.injection.checkpoint.coded_matrices import EXPONENT_BIAS, MXFP4_BLOCK, NVFP4_BLOCK, Block, ScaledCodes, types_holding
from moegraft.injection.checkpoint.files import Checkpoint, Conversion, Extent, LazyTensor
from moegraft.operators.errors import CheckpointError

DEFAULT_BLOCK = (128, 128)  # transformers', for FP8 settings without a block size
FLOAT8 = ("F8_E4M3", "F8_E5M2")
MXFP4_CODE_BYTES = 16  # that share a scale
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the places of eight columns in an integer of AutoAWQ's `gemm` version
# Of activations and of keys and values, which are not quantised here.
ACTIVATION_SCALES = ("input_scale", "input_zero_point", "input_global_scale", "activation_scale", "output_scale", "output_zero_point")
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point")
# In configs; the second one is that of the first versions of compressed-tensors.
SETTINGS_KEYS = ("quantization_config", "compression_config")
INSTEAD = "load the floating-point checkpoint or a GGUF file instead"


def quantisation_of(config: PretrainedConfig) -> Mapping[str, Any] | None:
    """Return the quantisation settings of a config; None if its weights are not quantised.

    Raises:
        CheckpointError: the settings are no mapping.
    """
    places = [(part, key) for key in SETTINGS_KEYS for part in (config, config.get_text_config())]
    key, found = next(((key, each) for part, key in places if (each := getattr(part, key, None))), ("", None))
    if not found:
        return None
    if not isinstance(found, Mapping) and not hasattr(found, "to_dict"):
        raise CheckpointError(f"{config.name_or_path}/config.json: {key} must be a mapping, not {found!r:.100}")
    settings: Mapping[str, Any] = found if isinstance(found, Mapping) else found.to_dict()
    return settings if key == SETTINGS_KEYS[0] else {"quant_method": "compressed-tensors", **settings}


def why_unreadable(settings: Mapping[str, Any]) -> str | None:
    """Return which format of these settings cannot be read and what can be instead; None if the settings name a readable one."""
    method = _method(settings)
    if method not in _PAIR:
        return (
            f"{method}; supported are float32, float16, bfloat16, FP8, MXFP4, compressed-tensors, AWQ, GPTQ and ModelOpt's FP8 and NVFP4 "
            "safetensors, and GGUF files"
        )
    if method == "compressed-tensors":
        formats = {str(settings.get("format", "dense"))}
        groups = settings.get("config_groups")
        if isinstance(groups, Mapping):
            formats |= {str(group["format"]) for group in groups.values() if isinstance(group, Mapping) and group.get("format")}
        unknown = sorted(formats - set(COMPRESSED_FORMATS))
        if unknown:
            return f"compressed-tensors in the format {unknown[0]}; supported are {', '.join(COMPRESSED_FORMATS)}; {INSTEAD}"
        sparsity = settings.get("sparsity_config")
        if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
            return f"compressed-tensors, sparse in the format {sparsity['format']}; {INSTEAD}"
    if method in ("awq", "gptq"):
        version = str(settings.get("version" if method == "awq" else "checkpoint_format") or settings.get("format") or method).lower()
        bits = str(settings.get("bits", 4))
        if method == "awq" and (version not in ("gemm", "awq") or bits != "4"):
            return f"AWQ of version {version} with {bits} bits; supported is version gemm with 4 bits; {INSTEAD}"
        if method == "gptq" and (version not in ("gptq", "gptq_v2") or bits not in ("4", "8")):
            return f"GPTQ in the format {version} with {bits} bits; supported are gptq and gptq_v2 with 4 or 8 bits; {INSTEAD}"
    if method == "modelopt":
        algorithm = str(settings.get("quant_algo", "unknown")).upper()
        if algorithm not in MODELOPT_ALGORITHMS:
            return f"ModelOpt's {algorithm}; supported are {', '.join(MODELOPT_ALGORITHMS)}; {INSTEAD}"
    return None


def _method(settings: Mapping[str, Any]) -> str:
    method = settings.get("quant_method", "unknown")
    return str(getattr(method, "value", method))


def paired(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint with the tensors of each quantised weight as one tensor, which has the weight's name, shape and values.

    Raises:
        CheckpointError: the settings are wrong; scales or zero points are missing, or of the wrong shape or dtype; or the columns of a
            weight are grouped by activation order.
    """
    pairing = _Pairing(checkpoint, settings)
    _PAIR[_method(settings)](pairing)
    return Checkpoint(checkpoint.folder, pairing.without_unused())


@dataclass(frozen=True, slots=True)
class Quantised(Conversion):
    """A weight that is stored in codes: a matrix, or one for each expert.

    Attributes:
        format: its name, for messages and identities.
        tensors: the stored tensors that it is read from.
        shape: of the parameter.
        block: the rows and columns of a block.
        read: returns the matrix of an expert, or with None the only one.
        lossless_types: of the kernels, which hold the weights without rounding, except as `ScaledCodes.packed_as` states; smallest first.
        converted_type: the type that they are converted to where none of these can be used.
        transposed: whether the parameter is the transpose of the matrix of codes.
        halves: whether the halves of the matrix's rows have a scale each, as fused gate and up projections may.
    """

    format: str
    tensors: tuple[LazyTensor, ...]
    shape: tuple[int, ...]
    block: Block
    read: Callable[[int | None], ScaledCodes]
    lossless_types: tuple[str, ...] = ()
    converted_type: str = "bfloat16"
    transposed: bool = False
    halves: bool = False

    @property
    def extents(self) -> list[Extent]:
        meaning = f"{self.format} in blocks of {self.block}"
        return [replace(extent, meaning=f"{extent.meaning} {meaning}") for tensor in self.tensors for extent in tensor.extents]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> torch.Tensor:
        if len(self.shape) == 2:
            return self._values(None)[index]
        if isinstance(index, int):
            return self._values(index)
        # One expert at a time: the intermediate tensors take several times the memory of the values.
        whole = torch.empty(self.shape)
        for expert, values in enumerate(whole):
            values.copy_(self._values(expert))
        return whole[index]

    def _values(self, expert: int | None) -> torch.Tensor:
        values = self.read(expert).values()
        return values.T if self.transposed else values


class _Pairing:
    """The tensors of a checkpoint, in which those of each quantised weight are replaced by one."""

    def __init__(self, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
        self.config = checkpoint.folder / "config.json"
        self.settings = settings
        self.tensors = dict(checkpoint.tensors)
        self._modules: set[str] = set()

    def stored_as(self, *dtypes: str) -> list[LazyTensor]:
        """Return the tensors of these dtypes, by safetensors' names."""
        return [tensor for tensor in self.tensors.values() if tensor.stored_dtype in dtypes]

    def take(self, weight: LazyTensor, key: str, meaning: str = "scales", dtypes: Sequence[str] = ()) -> LazyTensor:
        """Remove and return another tensor of a weight.

        Args:
            dtypes: those it may have; by default the floating-point ones.
        """
        tensor = self.tensors.pop(key, None)
        if tensor is None:
            raise CheckpointError(f"{weight.origin}: the {meaning} of this weight, {key}, are missing; download it again")
        if dtypes and tensor.stored_dtype not in dtypes:
            raise CheckpointError(f"{tensor.origin}: {meaning} of dtype {tensor.stored_dtype}, expected {' or '.join(dtypes)}")
        if not dtypes and tensor.dtype is None and tensor.stored_dtype != "F8_E8M0":
            raise CheckpointError(f"{tensor.origin}: {meaning} of dtype {tensor.stored_dtype}, which is no floating-point one")
        return tensor

    def add(self, key: str, weight: Quantised) -> None:
        """Put a weight in the place of its tensors."""
        first = weight.tensors[0]
        self.tensors.pop(first.key, None)
        self.tensors[key] = LazyTensor(key, first.file, weight)
        self._modules.add(key.rpartition(".")[0])

    def without_unused(self) -> dict[str, LazyTensor]:
        """Return the tensors without the scales of activations and caches."""
        return {
            key: tensor
            for key, tensor in self.tensors.items()
            if not key.endswith(CACHE_SCALES) and not (key.endswith(ACTIVATION_SCALES) and key.rpartition(".")[0] in self._modules)
        }

    def wrong(self, name: str, expected: str) -> CheckpointError:
        """Return the error for a setting that is not what was expected."""
        return CheckpointError(f"{self.config}: {name} must be {expected}, not {self.settings.get(name)!r:.100}")

    def group_size(self) -> int:
        """Return the columns that share a scale in AWQ and GPTQ checkpoints; 0 for all of them."""
        size = self.settings.get("group_size", 128)
        if type(size) is not int or (size != -1 and size < 1):
            raise self.wrong("group_size", "a positive integer, or -1 for whole rows")
        return max(size, 0)


def _matrices(weight: LazyTensor) -> tuple[int, ...]:
    """Return the shape of a tensor of codes, one matrix or one for each expert."""
    if len(weight.shape) not in (2, 3):
        raise CheckpointError(f"{weight.origin}: shape {weight.shape}, and only matrices can be quantised; download it again")
    return weight.shape


def _fitting(weight: LazyTensor, shape: tuple[int, ...], scales: LazyTensor, blocks: Sequence[Block]) -> Block:
    """Return the rows and columns of a weight that share a scale, of all that the settings allow."""
    *lead, rows, columns = shape
    expected: dict[tuple[int, ...], list[Block]] = {}
    for block in blocks:
        size = min(block[0] or rows, rows), min(block[1] or columns, columns)
        expected.setdefault((*lead, -(-rows // size[0]), -(-columns // size[1])), []).append(size)
    sizes = expected.get(scales.shape, [])
    if scales.shape in ((), (1,)) and (0, 0) in blocks:
        sizes = [(rows, columns)]
    if len(set(sizes)) != 1:
        named = [f" for blocks of {block}" for block in blocks if 0 not in block]
        form = " or ".join(map(str, expected)) + (named[0] if len(named) == 1 == len(blocks) else "")
        raise CheckpointError(f"{scales.origin}: shape {scales.shape}, expected {form} for a weight of shape {shape}")
    return sizes[0]


def _same_shape(tensor: LazyTensor, expected: tuple[int, ...], weight: LazyTensor) -> None:
    if tensor.shape != expected:
        raise CheckpointError(f"{tensor.origin}: shape {tensor.shape}, expected {expected} beside {weight.key} of shape {weight.shape}")


def _at(tensor: LazyTensor, expert: int | None) -> torch.Tensor:
    """Return an expert's part of a tensor, or the whole tensor if it is a single number."""
    if len(tensor.shape) < 2:
        return tensor[...].reshape(1, 1)
    return tensor[...] if expert is None else tensor[expert]


def _whole_scales(scales: LazyTensor, shape: tuple[int, ...]) -> int:
    """Return how many parts of a matrix's rows have a scale each: 1 for whole matrices, 2 for fused gate and up; 0 for other scales."""
    *lead, rows, _ = shape
    sizes = [*scales.shape]
    while sizes and sizes[-1] == 1 and len(sizes) > len(lead):
        sizes.pop()
    if sizes == lead or scales.shape in ((), (1,)):
        return 1
    return 2 if sizes == [*lead, 2] and rows % 2 == 0 else 0


def _whole_scales_at(scales: LazyTensor, shape: tuple[int, ...], expert: int | None) -> torch.Tensor:
    """Return the scales of the parts of a matrix's rows, (parts, 1)."""
    numbers = scales[...].reshape(-1, 1)
    return numbers if len(numbers) == 1 or expert is None else numbers.reshape(shape[0], -1, 1)[expert]


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers of `bits` bits in int32, the lowest bits first: (..., words) as (..., words, 32 / bits) uint8."""
    packed = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2) if bits == 4 else packed


def _signed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes from 0 as int8 codes around 0, (rows, columns) contiguous."""
    return (codes.contiguous().view(torch.int8) - 8) if bits == 4 else (codes.contiguous() ^ 128).view(torch.int8)


def _integer_types(bits: int, scales: LazyTensor, shape: Sequence[int], block: Block, *, symmetric: bool) -> tuple[str, ...]:
    """Return the kernels' types that hold integers without rounding, the smallest first; their scales are float16."""
    if scales.stored_dtype not in ("F16", "BF16"):
        return ()
    return types_holding("int4" if bits == 4 else "int8", shape, block, symmetric=symmetric)


# FP8: transformers' finegrained_fp8, and weights of compressed-tensors and ModelOpt


def _pair_fp8(pairing: _Pairing) -> None:
    block: Any = pairing.settings.get("weight_block_size", DEFAULT_BLOCK)
    if block is not None and not _is_block(block):
        raise pairing.wrong("weight_block_size", "two positive integers, such as [128, 128]")
    blocks = [(0, 0), (1, 0)] if block is None else [(block[0], block[1])]
    for weight in pairing.stored_as(*FLOAT8):
        _add_float8(pairing, weight, pairing.take(weight, f"{weight.key}_scale_inv"), blocks)


def _is_block(block: object) -> bool:
    return isinstance(block, list | tuple) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)


def _add_float8(pairing: _Pairing, weight: LazyTensor, scales: LazyTensor, blocks: Sequence[Block]) -> None:
    shape = _matrices(weight)
    parts = _whole_scales(scales, shape) if (0, 0) in blocks else 0
    block = (shape[-2] // parts, shape[-1]) if parts else _fitting(weight, shape, scales, blocks)

    def read(expert: int | None) -> ScaledCodes:
        return ScaledCodes(_at(weight, expert), _whole_scales_at(scales, shape, expert) if parts else _at(scales, expert), None, block)

    lossless_types = types_holding("fp8", shape, block) if weight.stored_dtype == "F8_E4M3" else ()
    pairing.add(weight.key, Quantised("FP8", (weight, scales), shape, block, read, lossless_types, halves=parts == 2))


# MXFP4 and NVFP4


def _pair_mxfp4(pairing: _Pairing) -> None:
    """Pair GPT-OSS's experts: codes (E, rows, groups, 16) uint8 and scales (E, rows, groups); the parameter is (E, groups * 32, rows)."""
    for key in [key for key in pairing.tensors if key.endswith("_blocks")]:
        name = key.removesuffix("_blocks")
        codes = pairing.tensors[key]
        scales = pairing.take(codes, f"{name}_scales", dtypes=("U8",))
        if codes.stored_dtype != "U8":
            raise CheckpointError(f"{codes.origin}: dtype {codes.stored_dtype}, expected U8")
        if len(codes.shape) != 4 or codes.shape[3] != MXFP4_CODE_BYTES:
            raise CheckpointError(f"{codes.origin}: shape {codes.shape}, expected (experts, rows, groups, {MXFP4_CODE_BYTES})")
        _same_shape(scales, codes.shape[:3], codes)
        experts, rows, groups, half = codes.shape
        read = partial(_read_fp4, codes, partial(_powers, scales), MXFP4_BLOCK)
        shape, lossless_types = (experts, groups * half * 2, rows), types_holding("mxfp4", (rows, groups * half * 2), MXFP4_BLOCK)
        weight = Quantised("MXFP4", (codes, scales), shape, MXFP4_BLOCK, read, lossless_types, transposed=True)
        pairing.add(name, weight)


def _powers(exponents: LazyTensor, expert: int | None) -> torch.Tensor:
    codes = _at(exponents, expert).int()
    return torch.ldexp(torch.ones(codes.shape), codes - EXPONENT_BIAS)


def _read_fp4(codes: LazyTensor, scales: Callable[[int | None], torch.Tensor], block: Block, expert: int | None) -> ScaledCodes:
    pairs = _at(codes, expert).flatten(1)  # the low half of a byte first
    places = torch.empty((*pairs.shape, 2), dtype=torch.uint8)
    torch.bitwise_and(pairs, 15, out=places[..., 0])
    torch.bitwise_right_shift(pairs, 4, out=places[..., 1])
    return ScaledCodes(places.flatten(1), scales(expert), None, block)


def _add_fp4(pairing: _Pairing, name: str, codes: LazyTensor, scales: LazyTensor, two_level: LazyTensor | None, *, divides: bool) -> None:
    """Add a weight of two codes per byte: MXFP4, or NVFP4 if it has a scale of all its blocks.

    Args:
        divides: whether the scale of all blocks divides theirs, as in compressed-tensors; else it multiplies them, as ModelOpt's.
    """
    *lead, rows, half = _matrices(codes)
    shape, block = (*lead, rows, half * 2), MXFP4_BLOCK if two_level is None else NVFP4_BLOCK
    _fitting(codes, shape, scales, [block])

    if two_level is None:
        read = partial(_read_fp4, codes, partial(_powers, scales), block)
        pairing.add(name, Quantised("MXFP4", (codes, scales), shape, block, read, types_holding("mxfp4", shape, block)))
        return
    parts = _whole_scales(two_level, shape)
    if not parts:
        expected = "one number for each matrix, or two for fused gate and up projections"
        raise CheckpointError(f"{two_level.origin}: shape {two_level.shape}, expected {expected}")

    def read_two_level(expert: int | None) -> ScaledCodes:
        numbers = _whole_scales_at(two_level, shape, expert).float()
        of_matrix = numbers if len(numbers) == 1 else numbers.repeat_interleave(rows // parts, 0)
        matrix = _read_fp4(codes, partial(_at, scales), block, expert)
        return replace(matrix, of_matrix=of_matrix, divides=divides)

    lossless_types = types_holding("nvfp4", shape, block)
    kind = f"NVFP4{' of compressed-tensors' if divides else ''}"
    pairing.add(name, Quantised(kind, (codes, scales, two_level), shape, block, read_two_level, lossless_types, halves=parts == 2))


# compressed-tensors


COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How the weights of one group of modules are quantised."""

    kind: Literal["int", "float"]
    bits: int
    block: Block


def _schemes(pairing: _Pairing) -> list[_Scheme]:
    """Return the weight schemes of compressed-tensors' `config_groups`."""
    groups = pairing.settings.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise pairing.wrong("config_groups", "a mapping of groups to their schemes")
    schemes = []
    for name, group in groups.items():
        weights = group.get("weights")
        if weights is None:
            continue
        at = f"{pairing.config}: config_groups.{name}.weights"
        if not isinstance(weights, Mapping):
            raise CheckpointError(f"{at} must be a mapping, not {weights!r:.100}")
        kind, bits, size = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("group_size")
        if kind not in ("int", "float") or type(bits) is not int:
            raise CheckpointError(f"{at}: type must be int or float and num_bits an integer, not {kind!r:.50} and {bits!r:.50}")
        if size is not None and (type(size) is not int or size < -1 or size == 0):
            raise CheckpointError(f"{at}: group_size must be a positive integer, or -1 for whole rows, not {size!r:.100}")
        strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
        structure = weights.get("block_structure")
        if strategy in ("group", "tensor_group") and (size is None or size < 1):
            raise CheckpointError(f"{at}: group_size must be a positive integer for the strategy {strategy}, not {size!r:.100}")
        if strategy == "block" and not _is_block(structure):
            raise CheckpointError(f"{at}: block_structure must be two positive integers, such as [128, 128], not {structure!r:.100}")
        blocks: dict[str, Any] = {"tensor": (0, 0), "channel": (1, 0), "group": (1, size), "tensor_group": (1, size), "block": structure}
        if strategy not in blocks:
            raise CheckpointError(f"{at}: strategy must be {', '.join(blocks)}, not {strategy!r:.100}")
        block = blocks[strategy]
        schemes.append(_Scheme(kind, bits, (block[0], block[1])))
    return schemes


def _pair_compressed(pairing: _Pairing) -> None:
    schemes = _schemes(pairing)
    for key in [key for key in pairing.tensors if key.endswith("_packed")]:
        name, codes = key.removesuffix("_packed"), pairing.tensors[key]
        pairing.tensors.pop(f"{name}_shape", None)
        if codes.stored_dtype == "I32":
            _add_packed_integers(pairing, name, codes, schemes)
        elif codes.stored_dtype == "U8":
            two_level = pairing.tensors.get(f"{name}_global_scale")
            if two_level is not None:
                pairing.take(codes, two_level.key)
            scales = pairing.take(codes, f"{name}_scale", dtypes=("U8",) if two_level is None else ("F8_E4M3",))
            _add_fp4(pairing, name, codes, scales, two_level, divides=True)
        else:
            raise CheckpointError(f"{codes.origin}: dtype {codes.stored_dtype}, expected I32 or U8")
    for weight in pairing.stored_as("I8", *FLOAT8):
        if weight.key.endswith("_zero_point"):
            continue
        scales, kind = pairing.take(weight, f"{weight.key}_scale"), "int" if weight.stored_dtype == "I8" else "float"
        blocks = [scheme.block for scheme in schemes if scheme.kind == kind and scheme.bits == 8]
        (_add_float8 if kind == "float" else _add_bytes)(pairing, weight, scales, blocks)


def _add_bytes(pairing: _Pairing, weight: LazyTensor, scales: LazyTensor, blocks: Sequence[Block]) -> None:
    """Add a weight of int8 codes that are not packed."""
    shape = _matrices(weight)
    block = _fitting(weight, shape, scales, blocks)
    zeros = None
    if f"{weight.key}_zero_point" in pairing.tensors:
        zeros = pairing.take(weight, f"{weight.key}_zero_point", "zero points", ("I8",))
        _same_shape(zeros, scales.shape, weight)

    def read(expert: int | None) -> ScaledCodes:
        return ScaledCodes(_at(weight, expert), _at(scales, expert), None if zeros is None else _at(zeros, expert), block)

    tensors = (weight, scales) if zeros is None else (weight, scales, zeros)
    lossless_types = _integer_types(8, scales, shape, block, symmetric=zeros is None)
    pairing.add(weight.key, Quantised("compressed-tensors int8", tensors, shape, block, read, lossless_types))


def _add_packed_integers(pairing: _Pairing, name: str, codes: LazyTensor, schemes: Sequence[_Scheme]) -> None:
    """Add a weight of compressed-tensors' `pack-quantized`: int32 with consecutive columns, zero points with consecutive rows."""
    *lead, rows, words = _matrices(codes)
    scales = pairing.take(codes, f"{name}_scale")
    integers = [scheme for scheme in schemes if scheme.kind == "int"]
    if not any(scheme.bits in (4, 8) for scheme in integers):
        known = ", ".join(str(scheme.bits) for scheme in integers) or "no"
        raise CheckpointError(f"{codes.origin}: integers of {known} bits cannot be read, only of 4 and 8 bits; {INSTEAD}")
    groups = scales.shape[-1] if scales.shape else 1
    fitting = set()
    for scheme in integers:
        columns = groups * scheme.block[1] if scheme.block[1] else words * 32 // scheme.bits
        if scheme.bits in (4, 8) and -(-columns * scheme.bits // 32) == words:
            fitting.add((scheme.bits, columns, scheme.block))
    if len(fitting) != 1:
        known = ", ".join(f"{scheme.bits} bits in blocks of {scheme.block}" for scheme in integers)
        raise CheckpointError(f"{scales.origin}: shape {scales.shape} beside codes of shape {codes.shape}, expected {known}")
    bits, columns, allowed = fitting.pop()
    shape = (*lead, rows, columns)
    block = _fitting(codes, shape, scales, [allowed])
    zeros = None
    if f"{name}_zero_point" in pairing.tensors:
        zeros = pairing.take(codes, f"{name}_zero_point", "zero points", ("I32", "I8"))
        packed = (*scales.shape[:-2], -(-rows * bits // 32), groups)
        _same_shape(zeros, packed if zeros.stored_dtype == "I32" else scales.shape, codes)
    if f"{name}_g_idx" in pairing.tensors:
        order = pairing.take(codes, f"{name}_g_idx", "groups", ("I32", "I64"))
        _same_shape(order, (columns,), codes)
        _refuse_act_order(order, block[1])

    def read(expert: int | None) -> ScaledCodes:
        values = _signed(_unpacked(_at(codes, expert), bits).flatten(1)[:, :columns], bits)
        points = None if zeros is None else _at(zeros, expert)
        if points is not None and points.dtype == torch.int32:
            points = _signed(_unpacked(points.T, bits).flatten(1)[:, :rows].T, bits)
        return ScaledCodes(values, _at(scales, expert), points, block)

    tensors = (codes, scales) if zeros is None else (codes, scales, zeros)
    lossless_types = _integer_types(bits, scales, shape, block, symmetric=zeros is None)
    pairing.add(
        name, Quantised(f"compressed-tensors int{bits}", tensors, shape, block, read, lossless_types, "int8" if bits == 4 else "bfloat16")
    )


def _refuse_act_order(order: LazyTensor, group: int) -> None:
    """Refuse groups whose columns are not consecutive."""
    groups = order[...]
    if not torch.equal(groups.long(), torch.arange(len(groups)) // group):
        raise CheckpointError(
            f"{order.origin}: the columns are grouped by activation order (act-order, desc_act), so that consecutive columns have unlike "
            "scales; quantise the model again without it (desc_act: false), or " + INSTEAD
        )


# AWQ and GPTQ: the inputs are the rows of the stored tensors


def _pair_columns(pairing: _Pairing, *, order: tuple[int, ...] | None) -> None:
    for codes in pairing.stored_as("I32"):
        if codes.key.endswith(".qweight"):
            _add_columns(pairing, codes, int(pairing.settings.get("bits", 4)), order=order)


def _add_columns(pairing: _Pairing, codes: LazyTensor, bits: int, *, order: tuple[int, ...] | None) -> None:
    """Add a weight of AWQ, which has 4 bits, or GPTQ: `qweight`, `qzeros` and `scales`, each the transpose of what `ScaledCodes` has.

    An int32 of `qweight` has eight outputs of an input in AWQ, and 32 / bits inputs of an output in GPTQ; one of `qzeros` has outputs
    of a group in both.

    Args:
        order: the places of the outputs in an int32; None for GPTQ.
    """
    module, per_word, settings = codes.key.removesuffix(".qweight"), 32 // bits, pairing.settings
    if len(codes.shape) != 2:
        raise CheckpointError(f"{codes.origin}: shape {codes.shape}, expected (inputs, outputs), one of them packed")
    inputs, outputs = codes.shape if order is None else (codes.shape[0], codes.shape[1] * per_word)
    inputs = inputs * per_word if order is None else inputs
    group = min(pairing.group_size() or inputs, inputs)
    scales = pairing.take(codes, f"{module}.scales")
    groups = -(-inputs // group)
    _same_shape(scales, (groups, outputs), codes)
    zeros = None
    if order is None or settings.get("zero_point", True) or f"{module}.qzeros" in pairing.tensors:
        zeros = pairing.take(codes, f"{module}.qzeros", "zero points", ("I32",))
        _same_shape(zeros, (groups, -(-outputs // per_word)), codes)
    columns = pairing.tensors.get(f"{module}.g_idx")
    if columns is not None:
        pairing.take(codes, columns.key, "groups", ("I32", "I64"))
        _same_shape(columns, (inputs,), codes)
        if settings.get("desc_act"):
            _refuse_act_order(columns, group)
    # GPTQ's first format stores the zero points less 1.
    less_one = order is None and str(settings.get("checkpoint_format") or settings.get("format")).lower() != "gptq_v2"
    symmetric = zeros is None or (order is None and settings.get("sym") is True)

    def read(expert: int | None) -> ScaledCodes:
        if columns is not None:
            _refuse_act_order(columns, group)
        whole = _unpacked(codes[...], bits)
        values = whole.permute(1, 0, 2).flatten(1) if order is None else whole[..., list(order)].flatten(1).T
        points = None
        if zeros is not None:
            points = _unpacked(zeros[...], bits)
            points = (points if order is None else points[..., list(order)]).flatten(1)[:, :outputs].T
            points = _signed((points + 1) & ((1 << bits) - 1) if less_one else points, bits)
            if symmetric:
                if points.any():
                    raise CheckpointError(f"{zeros.origin}: zero points, and the settings say that there are none (sym: true)")
                points = None
        return ScaledCodes(_signed(values, bits), scales[...].T, points, (1, group))

    tensors = tuple(tensor for tensor in (codes, scales, zeros, columns) if tensor is not None)
    shape, block = (outputs, inputs), (1, group)
    lossless_types = _integer_types(bits, scales, shape, block, symmetric=symmetric)
    name = f"{'AWQ' if order is not None else 'GPTQ' if less_one else 'GPTQ v2'} int{bits}"
    pairing.add(f"{module}.weight", Quantised(name, tensors, shape, block, read, lossless_types, "int8" if bits == 4 else "bfloat16"))


# ModelOpt


MODELOPT_ALGORITHMS = ("FP8", "NVFP4")


def _pair_modelopt(pairing: _Pairing) -> None:
    for weight in pairing.stored_as("U8", *FLOAT8):
        if weight.key.endswith("_scale"):
            continue
        if weight.stored_dtype == "U8":
            scales = pairing.take(weight, f"{weight.key}_scale", dtypes=("F8_E4M3",))
            two_level = pairing.take(weight, f"{weight.key}_scale_2")
            _add_fp4(pairing, weight.key, weight, scales, two_level, divides=False)
        else:
            _add_float8(pairing, weight, pairing.take(weight, f"{weight.key}_scale"), [(0, 0), (1, 0)])


_PAIR: Mapping[str, Callable[[_Pairing], None]] = {
    "fp8": _pair_fp8,
    "mxfp4": _pair_mxfp4,
    "compressed-tensors": _pair_compressed,
    "awq": partial(_pair_columns, order=AWQ_ORDER),
    "gptq": partial(_pair_columns, order=None),
    "modelopt": _pair_modelopt,
}
