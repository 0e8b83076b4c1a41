"""Quantisation of matrices to the block types of GGUF files, weighted by the importance of each input.

For each block, scales and codes minimise the sum of importance * (value - stored value)^2: of several ranges of the codes, the one
whose least-squares scale leaves the smallest error. Super-blocks of 256 then round the scales of their groups to integers, choose the
codes again for the rounded scales, and fit the scales of the whole block to these codes. Points of grids are the nearest ones of all. The
layouts are llama.cpp's (ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.cpu_backend import search_grid

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
    halves: Bytes = scales.reshape(-1, 1).half().numpy().view(np.uint8)
    return halves


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
    return _words(_sums(bits.reshape(len(bits), count, -1).swapaxes(1, 2), 1), f"<u{count // 8}")


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


WHOLE = np.empty((0, 0), np.uint8)  # the place of the scale in what a `Pack` returns


def _scaled_super_blocks(x: torch.Tensor, weight: torch.Tensor, size: int, levels: _Levels, scales: _Levels, pack: Pack) -> Bytes:
    """Quantise blocks (n, 256) of groups whose scales are integers times a float16 of the block.

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
    packed = pack(_bytes(coded(whole).flatten(1)), _bytes(places.flatten(1)))
    return np.concatenate([_halves(whole) if part is WHOLE else part for part in packed], axis=1)


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


def mxfp4(x: torch.Tensor, weight: torch.Tensor) -> Bytes:
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


@dataclass(frozen=True, slots=True)
class _Grid:
    """A type whose codes are points of a grid, with signs; numbers of a group are multiplied by scale * unit * (2 * place + 1).

    Attributes:
        size: of a group.
        top: the largest number of a point.
        unit: of a group's scale.
        places: how many there are.
        ratios: the range of top * scale * unit that is tried, as parts of a group's largest magnitude.
        shifts: what is added to the points of a group.
    """

    name: str
    size: int
    top: float
    unit: float
    ratios: tuple[float, float]
    places: int = 16
    shifts: tuple[float, ...] = (0.0,)
    tries: int = 7

    def search(self, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Bytes, Bytes]:
        """Return match, norm, points and signs of the nearest points, as `search_grid`: x (n, size), scales (n, candidates).

        The results are (n, shifts * candidates).
        """
        each = [
            search_grid(self.name, x.numpy(), weight.numpy(), scales.numpy(), shift=shift, threads=torch.get_num_threads())
            for shift in self.shifts
        ]
        match, norm, points, signs = (
            each[0] if len(each) == 1 else tuple(np.concatenate(parts, axis=1) for parts in zip(*each, strict=True))
        )
        return torch.from_numpy(match), torch.from_numpy(norm), points, signs


GridPack = Callable[[Bytes, Bytes, Bytes, Bytes], list[Bytes]]  # points, signs, places of scales, shifts (n, groups, ...): to parts


def _grid_super_blocks(x: torch.Tensor, weight: torch.Tensor, grid: _Grid, pack: GridPack) -> Bytes:
    """Quantise blocks (n, 256): the best scale of each group alone, then that of the block, then the groups' places around it, twice."""
    blocks, groups = len(x), SUPER_BLOCK // grid.size
    x, weight = x.reshape(-1, grid.size).contiguous(), weight.reshape(-1, grid.size).contiguous()
    largest = x.abs().amax(-1, keepdim=True) / grid.top
    match, norm, *_ = grid.search(x, weight, largest * torch.linspace(*grid.ratios, grid.tries))
    match = match.clamp_min(0)
    best = _ratio(match * match, norm).argmax(-1, keepdim=True)
    influence = norm.gather(-1, best)
    own = _ratio(match.gather(-1, best), influence)
    odd = _Levels(tuple(range(1, 2 * grid.places, 2)), 2 * grid.places - 1, 0.3, 25)
    whole = _half(_fit(own.reshape(blocks, groups), influence.reshape(blocks, groups), odd) / grid.unit)
    least = torch.full((blocks, 1), torch.inf)
    kept: list[torch.Tensor] = []
    for _ in range(2):
        of_groups = whole.expand(blocks, groups).reshape(-1, 1) * grid.unit
        places = (odd.nearest(_ratio(own, of_groups)) + torch.tensor([-1.0, 0.0, 1.0])).clamp_(0, grid.places - 1)
        scales = of_groups * (2 * places + 1)
        match, norm, points, signs = grid.search(x, weight, scales)
        shifts = len(grid.shifts)
        scales, places = scales.repeat(1, shifts), places.repeat(1, shifts)
        errors = scales * (scales * norm - 2 * match)
        error, best = errors.min(-1, keepdim=True)
        chosen = best.numpy()[..., None]
        now = [
            whole,
            torch.from_numpy(np.take_along_axis(points, chosen, 1)[:, 0].astype(np.int32)).reshape(blocks, groups, -1),
            torch.from_numpy(np.take_along_axis(signs, chosen, 1)[:, 0]).reshape(blocks, groups, -1),
            places.gather(-1, best).reshape(blocks, groups),
            (best // 3).reshape(blocks, groups),
        ]
        error = error.reshape(blocks, groups).sum(-1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        kept = [torch.where(better if new.ndim == 2 else better[..., None], new, old) for new, old in zip(now, kept or now, strict=True)]
        factor = (2 * places.gather(-1, best) + 1) * grid.unit
        above = (factor * match.gather(-1, best)).reshape(blocks, groups).sum(-1, keepdim=True)
        below = (factor.square() * norm.gather(-1, best)).reshape(blocks, groups).sum(-1, keepdim=True)
        own = _ratio(match.gather(-1, best).clamp_min(0), norm.gather(-1, best))
        whole = _half(_ratio(above.clamp_min(0), below))
    whole, chosen_points, chosen_signs, places, shift = kept
    packed = pack(chosen_points.numpy().astype(np.uint16), chosen_signs.numpy(), _bytes(places), _bytes(shift))
    return np.concatenate([_halves(whole), *packed], axis=1)


def _words(values: Bytes, dtype: str) -> Bytes:
    """Return the little-endian bytes of numbers, (n, ...) as (n, bytes)."""
    return np.ascontiguousarray(values.astype(dtype)).view(np.uint8).reshape(len(values), -1)


def _sums(fields: Bytes, bits: int) -> Bytes:
    """Return numbers of `bits` bits side by side: (..., k) as (...), the first in the lowest bits."""
    sums: Bytes = (fields.astype(np.uint32) << np.arange(0, bits * fields.shape[-1], bits, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return sums


def _signs_and_places(signs: Bytes, places: Bytes) -> Bytes:
    """Return four times seven signs and a scale of 4 bits in a word; the eighth sign follows from the others."""
    packed: Bytes = _sums(signs & 127, 7) | places.astype(np.uint32) << 28
    return packed


def _iq3_s(points: Bytes, signs: Bytes, places: Bytes, _: Bytes) -> list[Bytes]:
    upper = _sums(points >> 8, 1)
    return [_words(points & 255, "u1"), _words(upper, "u1"), _words(signs, "u1"), _words(_sums(places.reshape(len(places), 4, 2), 4), "u1")]


def _iq2_xxs(points: Bytes, signs: Bytes, places: Bytes, _: Bytes) -> list[Bytes]:
    return [_words(np.stack([_sums(points, 8), _signs_and_places(signs, places)], axis=-1), "<u4")]


def _iq2_xs(points: Bytes, signs: Bytes, places: Bytes, _: Bytes) -> list[Bytes]:
    both = points | (signs & 127).astype(np.uint16) << 9
    return [_words(both, "<u2"), _words(_sums(places.reshape(len(places), 8, 2), 4), "u1")]


def _iq2_s(points: Bytes, signs: Bytes, places: Bytes, _: Bytes) -> list[Bytes]:
    upper = _sums((points >> 8).reshape(len(points), 8, 4), 2)
    scales = _sums(places.reshape(len(places), 8, 2), 4)
    return [_words(points & 255, "u1"), _words(signs, "u1"), _words(upper, "u1"), _words(scales, "u1")]


def _iq1_s(points: Bytes, _: Bytes, places: Bytes, minus: Bytes) -> list[Bytes]:
    upper = _sums(points >> 8, 3) | places.astype(np.uint32) << 12 | minus.astype(np.uint32) << 15
    return [_words(points & 255, "u1"), _words(upper, "<u2")]


def _ternary(x: torch.Tensor, weight: torch.Tensor, pack: Callable[[Bytes], list[Bytes]]) -> Bytes:
    """Quantise blocks (n, 256) to -1, 0 and 1, exactly: the numbers that are not 0 are those of the largest magnitudes."""
    sizes, order = x.abs().sort(-1, descending=True)
    weight = weight.gather(-1, order)
    match, norm = (weight * sizes).cumsum(-1), weight.cumsum(-1)
    best = _ratio(match * match, norm).argmax(-1, keepdim=True)
    scale = _half(_ratio(match.gather(-1, best), norm.gather(-1, best)))
    codes = (x.abs() * 2 > scale) * x.sign() * (scale > 0) + 1
    return np.concatenate([*pack(_bytes(codes)), _halves(scale)], axis=1)


def _tq1_0(codes: Bytes) -> list[Bytes]:
    """Return five numbers in a byte, as the upper byte of 256 / 243 times their value in base 3: 160 columns, 80 and 16."""
    packed = []
    for first, last, size in ((0, 160, 32), (160, 240, 16), (240, 256, 4)):
        digits = codes[:, first:last].reshape(len(codes), -1, size).astype(np.uint32)
        value = sum(digits[:, place] * 3 ** (4 - place) for place in range(digits.shape[1]))
        packed.append(((value * 256 + 242) // 243).astype(np.uint8))
    return packed


def _with_fifth_bits(codes: Bytes) -> list[Bytes]:
    return [_bits(codes >> 4, 32), _nibbles(codes & 15, 16)]


# The encoders of formats: importance-weighted float32 blocks (n, weights) to (n, bytes)

Encoder = Callable[[torch.Tensor, torch.Tensor], Bytes]
# -128 is not used: sums of products of two such codes would be larger than what kernels expect.
q8_0: Encoder = partial(_one_scale, levels=_Levels.integers(-127, 127), pack=lambda codes: [codes - np.uint8(127)])
q5_0: Encoder = partial(_one_scale, levels=_Levels.integers(-16, 15), pack=_with_fifth_bits)
q4_0: Encoder = partial(_one_scale, levels=_Levels.integers(-8, 7), pack=lambda codes: [_nibbles(codes, 16)])
iq4_nl: Encoder = partial(_one_scale, levels=NONLINEAR, pack=lambda codes: [_nibbles(codes, 16)])
q5_1: Encoder = partial(_scale_and_offset, top=31, pack=_with_fifth_bits)
q4_1: Encoder = partial(_scale_and_offset, top=15, pack=lambda codes: [_nibbles(codes, 16)])
q6_k: Encoder = partial(_scaled_super_blocks, size=16, levels=_Levels.integers(-32, 31), scales=_Levels.integers(-128, 127), pack=_q6_k)
iq4_xs: Encoder = partial(_scaled_super_blocks, size=32, levels=NONLINEAR, scales=_Levels.integers(-32, 31), pack=_iq4_xs)
q3_k: Encoder = partial(
    _scaled_super_blocks,
    size=16,
    levels=_Levels.integers(-4, 3),
    scales=_Levels.integers(-32, 31),
    pack=lambda codes, scales: [_bits(codes >> 2, 8), _quarters(codes), _q3_k_scales(scales), WHOLE],
)
q5_k: Encoder = partial(
    _offset_super_blocks,
    size=32,
    top=31,
    scale_top=63,
    pack=lambda codes, scales: [WHOLE, _six_bits(*scales), _bits(codes >> 4, 8), _nibbles(codes & 15, 32)],
)
q4_k: Encoder = partial(
    _offset_super_blocks, size=32, top=15, scale_top=63, pack=lambda codes, scales: [WHOLE, _six_bits(*scales), _nibbles(codes, 32)]
)
q2_k: Encoder = partial(
    _offset_super_blocks,
    size=16,
    top=3,
    scale_top=15,
    pack=lambda codes, scales: [scales[0] | scales[1] << np.uint8(4), _quarters(codes), WHOLE],
)
iq3_s: Encoder = partial(_grid_super_blocks, grid=_Grid("iq3_s", 32, 15, 1, (0.65, 1.25)), pack=_iq3_s)
iq3_xxs: Encoder = partial(
    _grid_super_blocks,
    grid=_Grid("iq3_xxs", 32, 62, 1 / 4, (0.65, 1.25)),
    pack=lambda points, signs, places, _: [_words(points, "u1"), _words(_signs_and_places(signs, places), "<u4")],
)
iq2_s: Encoder = partial(_grid_super_blocks, grid=_Grid("iq2_s", 16, 43, 1 / 8, (0.5, 1.25)), pack=_iq2_s)
iq2_xs: Encoder = partial(_grid_super_blocks, grid=_Grid("iq2_xs", 16, 43, 1 / 8, (0.5, 1.25)), pack=_iq2_xs)
iq2_xxs: Encoder = partial(_grid_super_blocks, grid=_Grid("iq2_xxs", 32, 43, 1 / 8, (0.5, 1.25)), pack=_iq2_xxs)
iq1_s: Encoder = partial(_grid_super_blocks, grid=_Grid("iq1_s", 32, 8, 1 / 8, (0.3, 0.9), 8, (-7.0, -9.0)), pack=_iq1_s)
tq2_0: Encoder = partial(_ternary, pack=lambda codes: [_quarters(codes)])
tq1_0: Encoder = partial(_ternary, pack=_tq1_0)


def encode_blocks(matrix: torch.Tensor, encoder: Encoder, block_weights: int, block_bytes: int, importance: torch.Tensor | None) -> Bytes:
    """Return a matrix (rows, columns) of any floating-point dtype as (rows, bytes of a row), by importance (columns,) or without."""
    rows, columns = matrix.shape
    row_bytes = columns // block_weights * block_bytes
    packed = np.empty((rows, row_bytes), np.uint8)
    of_row = torch.ones(columns) if importance is None else _positive(importance)
    step = max(1, CHUNK // columns)
    for first in range(0, rows, step):
        x = matrix[first : first + step].float().reshape(-1, block_weights)
        weight = of_row.expand(len(x) * block_weights // columns, columns).reshape(-1, block_weights)
        packed[first : first + step] = encoder(x, weight).reshape(-1, row_bytes)
    return packed


LEAST_IMPORTANCE = 1e-4  # of the mean: inputs that the text did not reach are not free to be anything


def _positive(importance: torch.Tensor) -> torch.Tensor:
    """Return the importance of columns with a mean of 1."""
    mean = float(importance.mean())
    return (importance / mean).clamp_min(LEAST_IMPORTANCE) if mean > 0 else torch.ones_like(importance)
