"""The formats of weights: bytes, blocks, scales, kernels and encoders. Every other table of formats derives from `FORMATS`.

What the CPU's kernels need of a format is a struct in cpu_backend/csrc/formats/, and what a GPU's need a row of `DECODERS` in
kernels/units.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.operators import block_encoding as encoders

FloatType = Literal["float32", "float16", "bfloat16"]
# The formats that weights in floating point are packed to unrounded; float64, which no kernel has, is rounded once.
FLOAT_TYPES: Mapping[torch.dtype, FloatType] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float32",
}


@dataclass(frozen=True, slots=True)
class GpuFormat:
    """How Triton kernels read packed weights of one format.

    Attributes:
        unit_dtype: the dtype that packed bytes are viewed as; its elements are *units*.
        unit_columns: consecutive input columns in one unit.
        step_columns: input columns per step of a matrix product: 32 or 64 units, enough for one tensor-core instruction per column of a
            unit.
        element_dtype: the dtype that tensor-core kernels view rows of the sparse layout as; None without such a layout.
        element_columns: input columns in one such element.
        high_bits: bits of each code that are packed apart from its unit.
        scales: of 32 columns, 1 or 2.
        minima: whether each scale has a minimum.
        group_words: where codes are no bits of their own, but indexes into a grid or digits: 32-bit words of 32 columns behind the header.
            A unit is then 8 columns, which kernels expand from them. None for other formats.
    """

    unit_dtype: torch.dtype
    unit_columns: int
    step_columns: int
    element_dtype: torch.dtype | None = None
    element_columns: int = 1
    high_bits: int = 0
    scales: int = 1
    minima: bool = False
    group_words: int | None = None


@dataclass(frozen=True, slots=True)
class Encoding:
    """How matrices of floats are rounded to blocks of a format.

    Attributes:
        encoder: of float32 blocks (n, weights of a block) and their importance, to (n, bytes of a block).
        least_db: the least ratio of normally distributed weights to the error, in dB.
        error: the typical relative error of an expert with such weights, the sum of three products; None where `Expected` has it.
        instead: the GGUF type of rows that are no whole number of blocks, as in llama.cpp; None where these have 16 bits.
    """

    encoder: encoders.Encoder
    least_db: float
    error: float | None = None
    instead: str | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """A relative error, `|output - stock| / |stock|` in the Frobenius norm.

    Attributes:
        typical: the error with normally distributed weights.
        limit: a larger error has another cause than rounding.
    """

    typical: float
    limit: float
    reason: str


ScaleForm = Literal["float16", "float32", "exponent", "quarters", "nibbles"]
CodeKind = Literal["int4", "int8", "mxfp4", "nvfp4", "fp8"]


@dataclass(frozen=True, slots=True)
class CheckpointCodes:
    """The codes of safetensors checkpoints that blocks of a format hold without rounding.

    Attributes:
        kind: integers around 0; E2M1 with scales that are powers of two (MXFP4), or E4M3 times a number of the matrix (NVFP4); or E4M3.
        group: consecutive inputs that share a scale.
    """

    kind: CodeKind
    group: int


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One format of weights.

    Attributes:
        name: as rule files and the C++ kernels spell it.
        block_weights: consecutive inputs of a row that are quantised together; 1 for formats without scales.
        block_bytes: bytes of such a block, its scales included.
        gguf: the name of the type in GGUF files; None where they have none.
        stored: whether the kernels take blocks of this format as a file has them, and do not quantise to it; the sparse layout has no such
            formats.
        unit_scales: of stored formats, offsets of a block's scales and minima, and values that give random codes a variance of about 1.
        scale_form: of such a scale: a float16; a float32; a byte, the exponent of a power of two with a bias of 127; a float32 of which
            each of four rows has a byte; or a float16 of which each of four numbers of 16 bits has the upper four.
        zero_points: the offset of a byte of zero points, if a block has one.
        codes: those of safetensors checkpoints that a block holds, behind its scales and the byte of zero points.
        gpu: how Triton kernels read the format.
        encoding: of formats with blocks; None where blocks come from files alone.
        expected: the error of an expert whose weights the kernels round to this format; stored formats round activations alone.
    """

    name: str
    block_weights: int
    block_bytes: int
    gpu: GpuFormat
    gguf: str | None = None
    stored: bool = False
    unit_scales: tuple[tuple[int, float], ...] = ()
    scale_form: ScaleForm = "float16"
    zero_points: int | None = None
    codes: CheckpointCodes | None = None
    encoding: Encoding | None = None
    expected: Expected | None = None

    @property
    def scaled(self) -> bool:
        """Whether blocks have scales."""
        return self.block_weights > 1

    @property
    def floats(self) -> bool:
        """Whether codes are floats, whose products are in float: exact, and slower for prompts than those of integers."""
        return self.codes is not None and self.codes.kind == "fp8"

    def nbytes(self, weights: int) -> int:
        """Return the bytes of `weights` weights, a multiple of `block_weights`, without padding."""
        assert weights % self.block_weights == 0, f"{weights} weights are not a whole number of blocks"
        return weights // self.block_weights * self.block_bytes

    def encode(self, matrix: torch.Tensor, importance: torch.Tensor | None = None) -> NDArray[np.uint8]:
        """Return a matrix in this format's blocks, (rows, bytes of a row).

        Args:
            matrix: (rows, columns), finite, of any floating-point dtype; the columns are a whole number of blocks.
            importance: (columns,) float32, how much an error in each column matters; by default all matter equally.
        """
        if not self.scaled:
            floats: NDArray[np.uint8] = matrix.to(getattr(torch, self.name)).contiguous().view(torch.uint8).reshape(len(matrix), -1).numpy()
            return floats
        assert self.encoding is not None, f"{self.name} is kept where a file has it and not packed otherwise"
        return encoders.encode_blocks(matrix, self.encoding.encoder, self.block_weights, self.block_bytes, importance)

    def random_blocks(self, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.uint8]:
        """Return a random matrix (..., cols) as a file stores it, (..., bytes), with a variance of about 1 / cols, to test kernels."""
        assert self.stored, f"blocks of {self.name} are not packed as they are"
        blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // self.block_weights, self.block_bytes), np.uint8)
        if self.floats:
            blocks[blocks & 127 == 127] -= 1  # no NaN
        if self.zero_points is not None:
            blocks[..., self.zero_points] = 0x79  # 9 and 7: means far from 0 would be all that is left of a product
        for offset, unit in self.unit_scales:
            scale = unit / math.sqrt(shape[-1])
            if self.scale_form == "exponent":
                blocks[..., offset] = 127 + round(math.log2(scale))
            elif self.scale_form == "quarters":
                blocks[..., offset] = np.array([scale], np.float32).view(np.uint8)[3]  # four of which are about as large
            elif self.scale_form == "nibbles":
                bits = int(np.array([scale], np.float16).view(np.uint16)[0])
                for place in range(4):
                    upper = blocks[..., offset + 2 * place + 1]
                    upper[...] = upper & 15 | (bits >> 4 * place & 15) << 4
            else:
                size = 2 if self.scale_form == "float16" else 4
                blocks[..., offset : offset + size] = np.array([scale], self.scale_form).view(np.uint8)
        return blocks.reshape(*shape[:-1], -1)


def _gguf(
    name: str,
    block_weights: int,
    block_bytes: int,
    gpu: GpuFormat,
    encoding: Encoding | None,
    *unit_scales: tuple[int, float],
    form: ScaleForm = "float16",
    codes: CheckpointCodes | None = None,
) -> WeightFormat:
    return WeightFormat(name, block_weights, block_bytes, gpu, name.upper(), True, unit_scales, form, codes=codes, encoding=encoding)


def _checkpoint(
    name: str,
    block_weights: int,
    block_bytes: int,
    gpu: GpuFormat,
    kind: CodeKind,
    group: int,
    *unit_scales: tuple[int, float],
    form: ScaleForm = "float16",
    zero_points: int | None = None,
) -> WeightFormat:
    codes = CheckpointCodes(kind, group)
    return WeightFormat(name, block_weights, block_bytes, gpu, None, True, unit_scales, form, zero_points, codes)


def _codes(bits: int, step_columns: int, high_bits: int = 0, scales: int = 1, *, minima: bool = False) -> GpuFormat:
    """Words of codes of 8, 4 or 2 bits; a step has whole blocks."""
    return GpuFormat(torch.int32, 32 // bits, step_columns, high_bits=high_bits, scales=scales, minima=minima)


def _expanded(group_words: int, scales: int = 1) -> GpuFormat:
    return GpuFormat(torch.int32, 8, 256, scales=scales, group_words=group_words)


# A format is a row here. The ratios in dB are 6 for each bit, less 1 to 2 for scales that are shared by 32 or rounded.
_ROWS = (
    WeightFormat(
        "float32",
        1,
        4,
        GpuFormat(torch.float32, 1, 32, torch.float32),
        "F32",
        expected=Expected(1e-6, 1e-4, "float32 sums in another order"),
    ),
    WeightFormat(
        "float16",
        1,
        2,
        GpuFormat(torch.float16, 1, 64, torch.float16),
        "F16",
        expected=Expected(4e-4, 2e-3, "weights of 11 bits, each off by up to 0.05 %"),
    ),
    WeightFormat(
        "bfloat16",
        1,
        2,
        GpuFormat(torch.int32, 2, 128, torch.bfloat16),
        "BF16",
        expected=Expected(3e-3, 1e-2, "weights and, with bfloat16 activations, products of 8 bits, each off by up to 0.4 %"),
    ),
    # One float16 scale for 32 codes.
    WeightFormat(
        "int8",
        32,
        34,
        GpuFormat(torch.int32, 4, 128, torch.uint8),
        "Q8_0",
        codes=CheckpointCodes("int8", 32),
        encoding=Encoding(encoders.q8_0, 45.0),
        expected=Expected(1.5e-2, 4e-2, "32 weights share a scale of 127 steps, as do 32 activations: about 0.5 % each, in three products"),
    ),
    WeightFormat(
        "int4",
        32,
        18,
        GpuFormat(torch.int32, 8, 256, torch.uint8, element_columns=2),
        "Q4_0",
        codes=CheckpointCodes("int4", 32),
        encoding=Encoding(encoders.q4_0, 21.0),
        expected=Expected(1.5e-1, 3e-1, "32 weights share a scale of 8 steps: about 8 % each, in three products"),
    ),
    # The others are those of files.
    _gguf("q4_k", 256, 144, _codes(4, 256, minima=True), Encoding(encoders.q4_k, 22.5, 1.3e-1, "Q5_0"), (0, 1 / 200), (2, 7.5 / 200)),
    _gguf("q6_k", 256, 210, _codes(4, 256, 2, 2), Encoding(encoders.q6_k, 34.0, 3.0e-2, "Q8_0"), (208, 1 / 1400)),
    _gguf(
        "mxfp4",
        32,
        17,
        _codes(4, 256),
        Encoding(encoders.mxfp4, 18.5, 2.0e-1),
        (0, 1 / 2.9),
        form="exponent",
        codes=CheckpointCodes("mxfp4", 32),
    ),
    _gguf("iq4_nl", 32, 18, _codes(4, 256), Encoding(encoders.iq4_nl, 22.0, 1.3e-1), (0, 1 / 66)),
    _gguf("iq4_xs", 256, 136, _codes(4, 256), Encoding(encoders.iq4_xs, 22.0, 1.3e-1, "IQ4_NL"), (0, 1 / 1200)),
    _gguf("q4_1", 32, 20, _codes(4, 256, minima=True), Encoding(encoders.q4_1, 22.0, 1.2e-1), (0, 1 / 4.6), (2, -7.5 / 4.6)),
    _gguf("q5_0", 32, 22, _codes(4, 256, 1), Encoding(encoders.q5_0, 27.0, 7.0e-2), (0, 1 / 9.2)),
    _gguf("q5_1", 32, 24, _codes(4, 256, 1, minima=True), Encoding(encoders.q5_1, 28.5, 6.0e-2), (0, 1 / 9.2), (2, -15.5 / 9.2)),
    _gguf("q5_k", 256, 176, _codes(4, 256, 1, minima=True), Encoding(encoders.q5_k, 28.5, 6.3e-2, "Q5_1"), (0, 1 / 530), (2, 15.5 / 530)),
    _gguf("q3_k", 256, 110, _codes(2, 256, 1, 2), Encoding(encoders.q3_k, 16.0, 2.5e-1, "Q4_0"), (108, 1 / 43)),
    _gguf("q2_k", 256, 84, _codes(2, 256, 0, 2, minima=True), Encoding(encoders.q2_k, 11.0, 4.6e-1, "Q4_0"), (80, 1 / 14), (82, 1.5 / 14)),
    # Groups of 4-bit codes with float16 scales and zero points: compressed-tensors, AWQ, GPTQ.
    _checkpoint("int4_g32", 64, 37, _codes(4, 256, minima=True), "int4", 32, (0, 1 / 4.7), (2, 1 / 4.7), zero_points=4),
    _checkpoint("int4_g64", 128, 69, _codes(4, 256, minima=True), "int4", 64, (0, 1 / 4.7), (2, 1 / 4.7), zero_points=4),
    _checkpoint("int4_g128", 128, 67, _codes(4, 256, minima=True), "int4", 128, (0, 1 / 4.7), zero_points=2),
    _checkpoint("int4_g256", 256, 130, _codes(4, 256), "int4", 256, (0, 1 / 4.7)),  # without zero points: scales of rows
    _checkpoint("int8_g128", 128, 130, _codes(8, 128), "int8", 128, (0, 1 / 74)),
    # Blocks of 128 by 128, whose scale four rows hold together; and scales of rows.
    _checkpoint("fp8", 128, 129, _codes(8, 128), "fp8", 128, (0, 1 / 110), form="quarters"),
    _checkpoint("fp8_rows", 256, 260, _codes(8, 256), "fp8", 256, (0, 1 / 110), form="float32"),
    # NVFP4 with a float32 scale of the tensor, which four rows hold together for 128 columns.
    _checkpoint("nvfp4", 128, 73, _codes(4, 256, scales=2), "nvfp4", 16, (0, 1 / 317), form="quarters"),
    # Indexes into grids, and numbers of -1 to 1.
    _gguf("iq3_s", 256, 110, _expanded(3), Encoding(encoders.iq3_s, 17.5, 2.3e-1, "IQ4_NL"), (0, 1 / 140)),
    _gguf("iq3_xxs", 256, 98, _expanded(3), Encoding(encoders.iq3_xxs, 14.8, 3.1e-1, "IQ4_NL"), (0, 1 / 140)),
    _gguf("iq2_s", 256, 82, _expanded(2, 2), Encoding(encoders.iq2_s, 12.2, 4.1e-1, "IQ4_NL"), (0, 1 / 56)),
    _gguf("iq2_xs", 256, 74, _expanded(2, 2), Encoding(encoders.iq2_xs, 10.7, 4.8e-1, "IQ4_NL"), (0, 1 / 56)),
    _gguf("iq2_xxs", 256, 66, _expanded(2), Encoding(encoders.iq2_xxs, 9.4, 5.4e-1, "IQ4_NL"), (0, 1 / 53)),
    # Scales fitted to the weights make numbers smaller: the errors of three products no longer add up.
    _gguf("iq1_s", 256, 50, _expanded(1), Encoding(encoders.iq1_s, 6.8, 7.0e-1, "IQ4_NL"), (0, 1 / 7.2)),
    _gguf("iq1_m", 256, 56, _expanded(1, 2), None, (48, 1 / 7.2), form="nibbles"),
    _gguf("tq2_0", 256, 66, _codes(2, 256), Encoding(encoders.tq2_0, 7.0, 6.8e-1, "Q4_0"), (64, 1 / 1.1)),
    _gguf("tq1_0", 256, 54, _expanded(0), Encoding(encoders.tq1_0, 7.0, 6.8e-1, "Q4_0"), (52, 1 / 0.82)),
)
FORMATS: Mapping[str, WeightFormat] = MappingProxyType({form.name: form for form in _ROWS})
GGUF_TYPES: Mapping[str, WeightFormat] = MappingProxyType({form.gguf: form for form in _ROWS if form.gguf is not None})
STORED_FORMATS = frozenset(form.name for form in _ROWS if form.stored)
# What floats can be packed to: by the kernels, or by encoders. The most bits first.
_PACKED = sorted((form for form in _ROWS if form.encoding or not form.stored), key=lambda form: -form.nbytes(256))
PACKED_TYPES = tuple(form.name for form in _PACKED)
# What GGUF files can be written in, by its names there.
ENCODED = tuple(form.gguf for form in _PACKED if form.gguf is not None)


def fitting_type(name: str, columns: int) -> str:
    """Return the GGUF type that rows of `columns` weights are stored in where `name` is wanted."""
    encoding = GGUF_TYPES[name].encoding
    for found in (name, (encoding and encoding.instead) or name):
        if columns % GGUF_TYPES[found].block_weights == 0:
            return found
    return "F16"


# What a matrix of floats can be packed to.
if TYPE_CHECKING:
    WEIGHT_TYPES = str
else:
    WEIGHT_TYPES = Literal[("stored", *PACKED_TYPES)]


def why_not_packed(weight_type: str, columns: int) -> str | None:
    """Return why rows of `columns` weights cannot be packed to a type, or None where they can."""
    form = FORMATS.get(weight_type)
    if form is None or form.gguf is None or not form.stored or columns % form.block_weights == 0:
        return None
    fitting = GGUF_TYPES[fitting_type(form.gguf, columns)]
    instead = fitting.name if fitting.scaled else "int8"
    return f"{weight_type} has blocks of {form.block_weights} weights, of which rows of {columns} are no whole number; use {instead}"
