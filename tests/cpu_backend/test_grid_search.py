"""The search of nearest points of grids, against trying every point with every choice of signs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from moegraft.cpu_backend import search_grid

quants = pytest.importorskip("gguf.quants", reason="compares with the grids of the package gguf")

FORMS = {"iq3_s": (32, 4), "iq3_xxs": (32, 4), "iq2_s": (16, 8), "iq2_xs": (16, 8), "iq2_xxs": (32, 8), "iq1_s": (32, 8)}  # group, columns
EVEN = ("iq3_xxs", "iq2_xs", "iq2_xxs")
SHIFT = -7.0  # of iq1_s: 8 times -1, 0 or 1, plus 1
Array = NDArray[np.float64]


def grid_of(name: str) -> Array:
    """Return the points of a grid (points, columns), from the package `gguf`."""
    own = getattr(quants, name.upper())
    own.init_grid()
    grid: Array = own.grid.reshape(-1, FORMS[name][1]).astype(np.float64)
    return 8 * grid + 1 if name == "iq1_s" else grid


def least_error(name: str, grid: Array, x: Array, weight: Array, scale: float) -> float:
    """Return the least error of eight columns."""
    columns = FORMS[name][1]
    turns = np.array(list(itertools.product((1, -1), repeat=8)))
    if name == "iq1_s":
        turns = turns[:1]
    elif name in EVEN:
        turns = turns[(turns < 0).sum(1) % 2 == 0]
    of_parts = 0.0
    for first in range(0, 8, columns):
        part = slice(first, first + columns)
        of_parts += (weight[part] * (x[part] - scale * grid * turns[:, None, part]) ** 2).sum(-1).min(-1)
    return float(np.min(of_parts))


@pytest.mark.parametrize("name", FORMS)
def test_no_other_points_and_signs_are_nearer(name: str) -> None:
    size, grid = FORMS[name][0], grid_of(name)
    random = np.random.default_rng(0)
    x = random.standard_normal((5, size)).astype(np.float32)
    x[0, 3], x[0, 5], x[1, 7], x[2] = 0.0, -0.0, 30.0, 0.0
    weight = random.exponential(1, x.shape).astype(np.float32)
    scales = np.array([[2.0 / grid.max(), 0.5 / grid.max()]] * 5, np.float32)
    scales[3] = 0
    shift = SHIFT if name == "iq1_s" else 0.0
    found = search_grid(name, x, weight, scales, shift=shift)
    for one, other in zip(found, search_grid(name, x, weight, scales, shift=shift, threads=3), strict=True):
        np.testing.assert_array_equal(one, other)
    match, norm, points, signs = found
    negative = np.unpackbits(signs, axis=-1, bitorder="little")
    if name in EVEN:
        assert not (negative.reshape(-1, 8).sum(1) % 2).any()
    for group, candidate in itertools.product(range(5), range(2)):
        values, w, scale = x[group].astype(np.float64), weight[group].astype(np.float64), float(scales[group, candidate])
        chosen = grid[points[group, candidate]].reshape(-1) * np.where(negative[group, candidate], -1, 1)
        np.testing.assert_allclose(match[group, candidate], (w * values * chosen).sum(), rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(norm[group, candidate], (w * chosen**2).sum(), rtol=1e-4)
        least = sum(least_error(name, grid, *(each.reshape(-1, 8)[part] for each in (values, w)), scale) for part in range(size // 8))
        assert (w * (values - scale * chosen) ** 2).sum() <= least * (1 + 1e-4)


def test_wrong_arguments_are_refused() -> None:
    x, scales = np.ones((2, 32), np.float32), np.ones((2, 1), np.float32)
    with pytest.raises(ValueError, match="weight type 'q4_k' has no grid"):
        search_grid("q4_k", x, x, scales)
    with pytest.raises(ValueError, match=r"x: expected shape \(groups, 16\)"):
        search_grid("iq2_s", x, x, scales)
    with pytest.raises(ValueError, match=r"scales: expected shape \(2, candidates\)"):
        search_grid("iq3_s", x, x, scales[:1])
    with pytest.raises(ValueError, match="threads: expected at least 1, found 0"):
        search_grid("iq3_s", x, x, scales, threads=0)
