"""Quantisation of matrices to the block types of GGUF files, weighted by the importance of each input.

For each block, scales and codes minimise the sum of importance * (value - stored value)^2: of several ranges of the codes, the one
whose least-squares scale leaves the smallest error. Super-blocks of 256 then round the scales of their groups to integers, choose the
codes again for the rounded scales, and fit the scales of the whole block to these codes. The layouts are llama.cpp's (ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as BlockType
from numpy.typing import NDArray

Bytes = NDArray[Any]  # uint8, which NumPy's types lose in arithmetic
SUPER_BLOCK = 256
CHUNK = 1 << 18  # weights that are quantised at a time: their intermediate tensors fit a cache of some MB
LARGEST = 65504.0  # float16's
EXPONENT_BIAS = 127


@dataclass(frozen=True, slots=True)
class _Levels:
    """The values of codes, ascending.

    Attributes:
        anchor: the level of the largest magnitude.
        spread: the range of factors of `anchor` that are tried for the value of the largest magnitude.
    """

    values: tuple[float, ...]
    anchor: float
    spread: float
    tries: int

    @classmethod
    def integers(cls, low: int, high: int) -> _Levels:
        anchor = low if -low >= high else high
        return cls(tuple(range(low, high + 1)), anchor, min(0.3, 0.9 / abs(anchor)), 19 if abs(anchor) < 64 else 5)

    @property
    def consecutive(self) -> bool:
        return self.values[-1] - self.values[0] == len(self.values) - 1

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the place of the level that is nearest to each value."""
        if self.consecutive:
            return values.round().clamp_(self.values[0], self.values[-1]).sub_(self.values[0])
        levels = torch.tensor(self.values)
        return torch.bucketize(values, (levels[1:] + levels[:-1]) / 2).to(torch.float32)

    def at(self, places: torch.Tensor) -> torch.Tensor:
        return places + self.values[0] if self.consecutive else torch.tensor(self.values)[places.long()]

    def factors(self) -> Iterable[float]:
        return (torch.linspace(1 - self.spread, 1 + self.spread, self.tries) * self.anchor).tolist()


SIGNED_NIBBLES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4_NL and IQ4_XS
NONLINEAR = _Levels(SIGNED_NIBBLES, -127, 0.15, 19)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TOP_EXPONENT = 2  # of E2M1's largest number


def _ratio(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    return torch.where(below != 0, above / below, 0)


def _half(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-LARGEST, LARGEST).half().float()


def _fit(x: torch.Tensor, weight: torch.Tensor, levels: _Levels) -> torch.Tensor:
    """Return the scale of each group: (..., n) as (..., 1)."""
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    best = torch.zeros_like(extreme)
    most = torch.zeros_like(extreme)
    for factor in levels.factors():
        codes = levels.at(levels.nearest(x * _ratio(torch.tensor(factor), extreme)))
        weighted = weight * codes
        match, norm = (weighted * x).sum(-1, keepdim=True), (weighted * codes).sum(-1, keepdim=True)
        gain = _ratio(match * match, norm)  # what the codes take off the error
        best = torch.where(gain > most, _ratio(match, norm), best)
        most = torch.maximum(gain, most)
    return best


def _fit_range(x: torch.Tensor, weight: torch.Tensor, top: int, *, free: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the step and the offset of each group, value = step * code + offset with codes from 0 to `top`: (..., n) as (..., 1).

    Args:
        free: whether the offset may be positive.
    """
    low, high = (bound.unsqueeze(-1) for bound in torch.aminmax(x, dim=-1))
    low = low if free else low.clamp(max=0)
    span = high - low
    step, offset = torch.zeros_like(low), low.clone()
    least = (weight * (x - low).square()).sum(-1, keepdim=True)
    total, of_x = weight.sum(-1, keepdim=True), (weight * x).sum(-1, keepdim=True)
    for more in torch.linspace(-0.9, 0.9, 19).tolist():
        codes = ((x - low) * _ratio(torch.tensor(top + more), span)).round_().clamp_(0, top)
        weighted = weight * codes
        of_codes, squares = weighted.sum(-1, keepdim=True), (weighted * codes).sum(-1, keepdim=True)
        products = (weighted * x).sum(-1, keepdim=True)
        determinant = total * squares - of_codes.square()
        new_step = _ratio(total * products - of_codes * of_x, determinant)
        new_offset = _ratio(squares * of_x - of_codes * products, determinant)
        if not free:
            above = new_offset > 0
            new_step = torch.where(above, _ratio(products, squares), new_step)
            new_offset = new_offset.clamp(max=0)
        error = (weight * (codes * new_step + new_offset - x).square()).sum(-1, keepdim=True)
        better = (error < least) & (determinant > 0) & (new_step > 0)
        step, offset = torch.where(better, new_step, step), torch.where(better, new_offset, offset)
        least = torch.where(better, error, least)
    return step, offset


def _error(x: torch.Tensor, weight: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Return the weighted error of each block (n, groups, size) as (n, 1, 1)."""
    return (weight * (x - stored).square()).sum((-1, -2), keepdim=True)


# Packing: codes and scales are small integers in float32, blocks are (n, bytes)


def _bytes(numbers: torch.Tensor) -> Bytes:
    return numbers.to(torch.uint8).numpy()


def _halves(scales: torch.Tensor) -> Bytes:
    """Return a float16 for each block."""
    found: Bytes = scales.reshape(-1, 1).half().numpy().view(np.uint8)
    return found


def _nibbles(codes: Bytes, size: int) -> Bytes:
    """Return pairs of codes `size` apart in a byte: of each 2 * size codes, the first half is in the low bits."""
    pairs = codes.reshape(len(codes), -1, 2, size)
    packed: Bytes = pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)
    return packed.reshape(len(codes), -1)


def _quarters(codes: Bytes) -> Bytes:
    """Return the low 2 bits of four codes 32 apart in a byte."""
    four = codes.reshape(len(codes), -1, 4, 32) & 3
    return (four[:, :, 0] | four[:, :, 1] << 2 | four[:, :, 2] << 4 | four[:, :, 3] << 6).reshape(len(codes), -1).astype(np.uint8)


def _bits(bits: Bytes, count: int) -> Bytes:
    """Return (n, count * size) bits as (n, size) bytes: bit i of a byte is `size` places behind bit i - 1."""
    rows = bits.reshape(len(bits), count, -1)
    shifted = rows.astype(np.uint32) << np.arange(count, dtype=np.uint32)[:, None]
    packed = shifted.sum(axis=1, dtype=np.uint32).astype("<u4")
    return np.ascontiguousarray(packed[..., None].view(np.uint8)[..., : -(-count // 8)]).reshape(len(bits), -1)


def _six_bits(scales: Bytes, minima: Bytes) -> Bytes:
    """Return eight scales and minima of 6 bits in the 12 bytes of Q4_K and Q5_K."""
    first, last = slice(0, 4), slice(4, 8)
    high = [each[:, first] | each[:, last] >> 4 << 6 for each in (scales, minima)]
    return np.concatenate([*high, scales[:, last] & 15 | (minima[:, last] & 15) << 4], axis=1)


Pack = Callable[[Bytes, Bytes], list[Bytes]]  # codes (n, 256) and scales (n, groups) from 0: to parts of blocks


def _one_scale(x: torch.Tensor, weight: torch.Tensor, levels: _Levels, pack: Callable[[Bytes], list[Bytes]]) -> Bytes:
    """Quantise blocks (n, 32) with a float16 scale."""
    scale = _half(_fit(x, weight, levels))
    codes = _bytes(levels.nearest(_ratio(x, scale)))
    return np.concatenate([_halves(scale), *pack(codes)], axis=1)


def _scale_and_offset(x: torch.Tensor, weight: torch.Tensor, top: int, pack: Callable[[Bytes], list[Bytes]]) -> Bytes:
    """Quantise blocks (n, 32) with a float16 step and a float16 offset."""
    step, offset = map(_half, _fit_range(x, weight, top, free=True))
    codes = _bytes(_ratio(x - offset, step).round_().clamp_(0, top))
    return np.concatenate([_halves(step), _halves(offset), *pack(codes)], axis=1)


def _groups(each: torch.Tensor, size: int) -> torch.Tensor:
    return each.reshape(-1, SUPER_BLOCK // size, size)


def _super_scales(
    x: torch.Tensor, weight: torch.Tensor, size: int, levels: _Levels, scales: _Levels
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the scale of blocks (n, 256), and the places of codes and of group scales.

    Args:
        size: of a group.
        scales: the integers that scales of groups may be.
    """
    x, weight = _groups(x, size), _groups(weight, size)
    own = _fit(x, weight, levels)
    codes = levels.at(levels.nearest(_ratio(x, own)))
    influence = (weight * codes.square()).sum(-1)
    whole = _half(_fit(own.squeeze(-1), influence, scales)).unsqueeze(-1)
    places = scales.nearest(_ratio(own, whole))
    factors = scales.at(places)

    def coded(whole: torch.Tensor) -> torch.Tensor:
        return levels.nearest(_ratio(x, whole * factors))

    values = factors * levels.at(coded(whole))
    fitted = _half(_ratio((weight * values * x).sum((-1, -2), keepdim=True), (weight * values.square()).sum((-1, -2), keepdim=True)))
    before, after = (_error(x, weight, each * factors * levels.at(coded(each))) for each in (whole, fitted))
    whole = torch.where(after < before, fitted, whole)
    return whole, coded(whole).flatten(1), places.flatten(1)


def _scaled_super_blocks(x: torch.Tensor, weight: torch.Tensor, size: int, levels: _Levels, scales: _Levels, pack: Pack) -> Bytes:
    whole, codes, places = _super_scales(x, weight, size, levels, scales)
    before_and_after = pack(_bytes(codes), _bytes(places))
    return np.concatenate([_halves(whole) if part is WHOLE else part for part in before_and_after], axis=1)


WHOLE = np.empty((0, 0), np.uint8)  # the place of the scale in what a `Pack` returns


def _offset_super_blocks(x: torch.Tensor, weight: torch.Tensor, size: int, top: int, scale_top: int, pack: Pack) -> Bytes:
    """Quantise blocks (n, 256) of groups whose steps and offsets are integers times a float16 of the block."""
    x, weight = _groups(x, size), _groups(weight, size)
    step, offset = _fit_range(x, weight, top, free=False)
    codes = _ratio(x - offset, step).round_().clamp_(0, top)
    integers = _Levels.integers(0, scale_top)
    influence = (weight * codes.square()).sum(-1)
    whole = _half(_fit(step.squeeze(-1), influence, integers)).unsqueeze(-1)
    whole_offset = _half(_fit(-offset.squeeze(-1), weight.sum(-1), integers)).unsqueeze(-1)
    steps, offsets = integers.nearest(_ratio(step, whole)), integers.nearest(_ratio(-offset, whole_offset))

    def coded(whole: torch.Tensor, whole_offset: torch.Tensor) -> torch.Tensor:
        return _ratio(x + whole_offset * offsets, whole * steps).round_().clamp_(0, top)

    def error(whole: torch.Tensor, whole_offset: torch.Tensor) -> torch.Tensor:
        return _error(x, weight, whole * steps * coded(whole, whole_offset) - whole_offset * offsets)

    first, second = steps * coded(whole, whole_offset), -offsets.expand_as(x)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (weight * a * b).sum((-1, -2), keepdim=True)

    aa, ab, bb, ax, bx = (product(*pair) for pair in ((first, first), (first, second), (second, second), (first, x), (second, x)))
    determinant = aa * bb - ab.square()
    fitted = _half(torch.where(determinant > 0, _ratio(ax * bb - bx * ab, determinant), _ratio(ax, aa)))
    fitted_offset = _half(torch.where(determinant > 0, _ratio(bx * aa - ax * ab, determinant), whole_offset))
    better = (error(fitted, fitted_offset) < error(whole, whole_offset)) & (fitted > 0) & (fitted_offset >= 0)
    whole, whole_offset = torch.where(better, fitted, whole), torch.where(better, fitted_offset, whole_offset)
    scales = torch.stack([steps, offsets]).flatten(2)
    both = np.concatenate([_halves(whole), _halves(whole_offset)], axis=1)
    packed = pack(_bytes(coded(whole, whole_offset)).reshape(len(x), -1), _bytes(scales))
    return np.concatenate([both if part is WHOLE else part for part in packed], axis=1)


def _q3_k_scales(scales: Bytes) -> Bytes:
    """Return 16 scales of 6 bits: nibbles of scales i and i + 8, then the upper bits of scales i, i + 4, i + 8 and i + 12."""
    upper = (scales >> 4).reshape(len(scales), 4, 4)
    high = upper[:, 0] | upper[:, 1] << 2 | upper[:, 2] << 4 | upper[:, 3] << 6
    return np.concatenate([(scales[:, :8] & 15) | (scales[:, 8:] & 15) << 4, high.astype(np.uint8)], axis=1)


def _q6_k(codes: Bytes, scales: Bytes) -> list[Bytes]:
    halves = codes.reshape(len(codes), 2, -1)
    nibbles = [_nibbles(halves[:, half] & 15, 64) for half in range(2)]
    signed = (scales.astype(np.int16) - 128).astype(np.int8).view(np.uint8)
    return [*nibbles, _quarters(codes >> 4), signed, WHOLE]


def _iq4_xs(codes: Bytes, scales: Bytes) -> list[Bytes]:
    upper = (scales.astype(np.uint16) >> 4 << 2 * np.arange(8, dtype=np.uint16)).sum(axis=1, dtype=np.uint16).astype("<u2")
    lower = scales.reshape(len(scales), -1, 2) & 15
    return [WHOLE, upper[:, None].view(np.uint8), lower[..., 0] | lower[..., 1] << np.uint8(4), _nibbles(codes, 16)]


def _mxfp4(x: torch.Tensor, weight: torch.Tensor) -> Bytes:
    """Quantise blocks (n, 32) with a power of two as their scale."""
    levels = torch.tensor(E2M1)
    middles = (levels[1:] + levels[:-1]) / 2
    highest = torch.frexp(x.abs().amax(-1, keepdim=True))[1] - 1 - TOP_EXPONENT
    least = torch.full(highest.shape, torch.inf)
    best, codes = torch.zeros_like(highest), torch.zeros(x.shape, dtype=torch.int64)
    for more in (0, 1, -1):
        exponent = (highest + more).clamp(-EXPONENT_BIAS, EXPONENT_BIAS)
        scale = torch.ldexp(torch.ones(exponent.shape), exponent)
        found = torch.bucketize((x / scale).abs(), middles)
        error = (weight * (levels[found] * scale - x.abs()).square()).sum(-1, keepdim=True)
        better = error < least
        best, codes, least = torch.where(better, exponent, best), torch.where(better, found, codes), torch.where(better, error, least)
    codes += 8 * (x.signbit() & (codes > 0))
    return np.concatenate([_bytes(best + EXPONENT_BIAS), _nibbles(_bytes(codes), 16)], axis=1)


def _with_fifth_bits(codes: Bytes) -> list[Bytes]:
    return [_bits(codes >> 4, 32), _nibbles(codes & 15, 16)]


_ENCODERS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], Bytes]] = {
    # -128 is not used: sums of products of two such codes would be larger than what kernels expect.
    "Q8_0": partial(_one_scale, levels=_Levels.integers(-127, 127), pack=lambda codes: [codes - np.uint8(127)]),
    "Q5_0": partial(_one_scale, levels=_Levels.integers(-16, 15), pack=_with_fifth_bits),
    "Q4_0": partial(_one_scale, levels=_Levels.integers(-8, 7), pack=lambda codes: [_nibbles(codes, 16)]),
    "IQ4_NL": partial(_one_scale, levels=NONLINEAR, pack=lambda codes: [_nibbles(codes, 16)]),
    "Q5_1": partial(_scale_and_offset, top=31, pack=_with_fifth_bits),
    "Q4_1": partial(_scale_and_offset, top=15, pack=lambda codes: [_nibbles(codes, 16)]),
    "MXFP4": _mxfp4,
    "Q6_K": partial(_scaled_super_blocks, size=16, levels=_Levels.integers(-32, 31), scales=_Levels.integers(-128, 127), pack=_q6_k),
    "IQ4_XS": partial(_scaled_super_blocks, size=32, levels=NONLINEAR, scales=_Levels.integers(-32, 31), pack=_iq4_xs),
    "Q3_K": partial(
        _scaled_super_blocks,
        size=16,
        levels=_Levels.integers(-4, 3),
        scales=_Levels.integers(-32, 31),
        pack=lambda codes, scales: [_bits(codes >> 2, 8), _quarters(codes), _q3_k_scales(scales), WHOLE],
    ),
    "Q5_K": partial(
        _offset_super_blocks,
        size=32,
        top=31,
        scale_top=63,
        pack=lambda codes, scales: [WHOLE, _six_bits(*scales), _bits(codes >> 4, 8), _nibbles(codes & 15, 32)],
    ),
    "Q4_K": partial(
        _offset_super_blocks, size=32, top=15, scale_top=63, pack=lambda codes, scales: [WHOLE, _six_bits(*scales), _nibbles(codes, 32)]
    ),
    "Q2_K": partial(
        _offset_super_blocks,
        size=16,
        top=3,
        scale_top=15,
        pack=lambda codes, scales: [scales[0] | scales[1] << np.uint8(4), _quarters(codes), WHOLE],
    ),
}
FLOATS = ("F32", "F16", "BF16")
ENCODED = (*FLOATS, *_ENCODERS)
# What rows that are no whole number of super-blocks are stored in, as by llama.cpp; then F16.
INSTEAD = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def fitting_type(name: str, columns: int) -> str:
    """Return the type that rows of `columns` weights are stored in where `name` is wanted."""
    for found in (name, INSTEAD.get(name, name)):
        if columns % GGML_QUANT_SIZES[BlockType[found]][0] == 0:
            return found
    return "F16"


def row_bytes(name: str, columns: int) -> int:
    """Return the bytes of a row, which is a whole number of blocks."""
    block, size = GGML_QUANT_SIZES[BlockType[name]]
    assert columns % block == 0, f"{columns} columns are no whole number of blocks of {name}"
    return columns // block * size


def encode(matrix: torch.Tensor, name: str, importance: torch.Tensor | None = None) -> Bytes:
    """Quantise a matrix.

    Args:
        matrix: (rows, columns), finite, of any floating-point dtype.
        name: one of `ENCODED`; the columns are a whole number of its blocks.
        importance: (columns,) float32, how much an error in each column matters; by default all matter equally.

    Returns:
        (rows, bytes of a row).
    """
    rows, columns = matrix.shape
    if name in FLOATS:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
        floats: Bytes = matrix.to(dtype).contiguous().view(torch.uint8).reshape(rows, -1).numpy()
        return floats
    block, size = GGML_QUANT_SIZES[BlockType[name]]
    packed = np.empty((rows, row_bytes(name, columns)), np.uint8)
    of_row = torch.ones(columns) if importance is None else _positive(importance)
    step = max(1, CHUNK // columns)
    for first in range(0, rows, step):
        x = matrix[first : first + step].float().reshape(-1, block)
        weight = of_row.expand(len(x) * block // columns, columns).reshape(-1, block)
        packed[first : first + step] = _ENCODERS[name](x, weight).reshape(-1, columns // block * size)
    return packed


LEAST_IMPORTANCE = 1e-4  # of the mean: inputs that the text did not reach are not free to be anything


def _positive(importance: torch.Tensor) -> torch.Tensor:
    """Return the importance of columns with a mean of 1."""
    mean = float(importance.mean())
    return (importance / mean).clamp_min(LEAST_IMPORTANCE) if mean > 0 else torch.ones_like(importance)
