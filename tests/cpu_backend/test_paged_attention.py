"""Attention over sequences of different lengths in pages, against float64, on every instruction set of this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from support.kernel_cases import as_array, relative_error

from moegraft.cpu_backend import Runtime

ROUNDING = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
PAGE = 16


@dataclass(frozen=True)
class Sizes:
    held: tuple[int, ...] = (5, 0, 100)  # a part of a page, none, and several parts of a head's keys
    queries: int = 1
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    value_dim: int = 48
    window: int = 0
    tail: int = 0  # columns of a latent cache's rotary keys


SIZES = [
    Sizes(),
    Sizes(held=(600, 15, 16), window=20),
    Sizes(held=(31, 7), queries=3, heads=3, kv_heads=3, dim=7, value_dim=5),  # pages that end among the new tokens
    Sizes(queries=50),  # by tiles
    Sizes(held=(300, 0, 129), queries=40, heads=2, kv_heads=1, dim=33, value_dim=130, window=70),
    Sizes(kv_heads=1, dim=40, value_dim=32, tail=8),
    Sizes(queries=50, kv_heads=1, dim=40, value_dim=32, tail=8, window=9),
]


class Case:
    """Sequences whose earlier tokens are in random pages of a pool that is otherwise NaN."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, seed: int = 0) -> None:
        self.sizes = sizes
        generator = torch.Generator().manual_seed(seed)
        kv, columns = sizes.kv_heads, (sizes.dim - sizes.tail, sizes.tail or sizes.value_dim)
        lengths = [held + sizes.queries for held in sizes.held]
        self.states = [[torch.randn(kv, length, width, generator=generator).to(dtype) for width in columns] for length in lengths]
        self.query = torch.randn(len(lengths), sizes.heads, sizes.queries, sizes.dim, generator=generator).to(dtype)
        self.starts = 24, 24 + kv * PAGE * columns[0]
        self.pool = torch.full((120, self.starts[1] + kv * PAGE * columns[1] + 8), float("nan"), dtype=dtype)
        self.table = torch.full((len(lengths) + 1, 50), -1)
        self.held = torch.tensor([*sizes.held, -1])
        pages = torch.randperm(len(self.pool), generator=generator).tolist()
        for row, (length, held) in enumerate(zip(lengths, sizes.held, strict=True)):
            for place in range(-(-length // PAGE)):
                self.table[row, place] = pages.pop()
            for part, token in product(range(2), range(held)):
                self.page(row, part, token)[:, token % PAGE] = self.states[row][part][:, token]

    def page(self, row: int, part: int, token: int) -> torch.Tensor:
        """The keys or values of the page of a token: (KV heads, PAGE, columns)."""
        kv, columns = self.sizes.kv_heads, self.states[row][part].shape[2]
        start = self.starts[part]
        return self.pool[self.table[row, token // PAGE], start : start + kv * PAGE * columns].view(kv, PAGE, columns)

    def arguments(self, rows: list[int]) -> tuple[list[Any], dict[str, Any]]:
        new = [torch.stack([self.states[row][part][:, self.sizes.held[row] :] for row in rows]) for part in range(2)]
        out = self.query.new_empty(len(rows), self.sizes.queries, self.sizes.heads, self.sizes.value_dim)
        arrays = [as_array(self.query[rows]), *map(as_array, new), as_array(out)]
        numbers = {"page_tokens": PAGE, "key_start": self.starts[0], "value_start": self.starts[1], "window": self.sizes.window}
        self.out = out
        return [*arrays, self.pool, self.table[rows], self.held[rows]], {**numbers, "scale": 0.2, "latent": self.sizes.tail > 0}

    def expected(self, row: int) -> torch.Tensor:
        sizes = self.sizes
        key, value = (states.double() for states in self.states[row])
        if sizes.tail:
            key, value = torch.cat([key, value], -1), key
        key, value = (states.repeat_interleave(sizes.heads // sizes.kv_heads, 0) for states in (key, value))
        at = torch.arange(sizes.queries)[:, None] + sizes.held[row]
        ids = torch.arange(key.shape[1])[None]
        shown = (ids <= at) & (ids > at - (sizes.window or 1 << 20))
        scores = (0.2 * self.query[row].double() @ key.transpose(1, 2)).masked_fill(~shown, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(0, 1)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sequences_in_pages(sizes: Sizes, dtype: torch.dtype, runtime: Runtime) -> None:
    case = Case(sizes, dtype)
    arguments, numbers = case.arguments(list(range(len(sizes.held))))
    runtime.paged_attention(*arguments, **numbers)
    for row, held in enumerate(sizes.held):
        assert relative_error(case.out[row], case.expected(row)) < ROUNDING[dtype]
        for part in range(2):  # the new tokens are in their pages
            for token in (held, held + sizes.queries - 1):
                assert torch.equal(case.page(row, part, token)[:, token % PAGE], case.states[row][part][:, token])


@pytest.mark.parametrize("queries", [1, 50], ids=["rows", "tiles"])
def test_a_result_does_not_depend_on_the_other_sequences(queries: int, runtime: Runtime) -> None:
    case = Case(replace(SIZES[1], queries=queries), torch.float32)
    together, numbers = case.arguments([0, 1, 2])
    runtime.paged_attention(*together, **numbers)
    found = case.out
    for row in range(3):
        alone, numbers = case.arguments([row])
        runtime.paged_attention(*alone, **numbers)
        assert torch.equal(case.out[0], found[row])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: case.table.fill_(120), "not in the pool"),
        (lambda case: case.table.fill_(-1), "not in the pool"),
        (lambda case: case.held.fill_(50 * PAGE), "more tokens than its table"),
        (lambda case: case.held.fill_(-1), "more tokens than its table"),
    ],
)
def test_pages_outside_of_the_pool_are_refused(change: Any, message: str) -> None:
    case = Case(SIZES[0], torch.float32)
    change(case)
    arguments, numbers = case.arguments([0, 1, 2])
    with pytest.raises(ValueError, match=message):
        Runtime(threads=1).paged_attention(*arguments, **numbers)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"value_start": 10**6}, "leave their page"), ({"page_tokens": 12}, "no power of two"), ({"window": -1}, "window is negative")],
)
def test_pages_of_no_form_are_refused(change: dict[str, int], message: str) -> None:
    case = Case(SIZES[0], torch.float32)
    arguments, numbers = case.arguments([0, 1, 2])
    with pytest.raises(ValueError, match=message):
        Runtime(threads=1).paged_attention(*arguments, **{**numbers, **change})
