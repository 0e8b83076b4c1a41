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
# Of codes, which several rows of a KV head read by products of integers where an instruction set has them.
CODED_SIZES = [
    *SIZES,
    Sizes(held=(600, 15, 16), heads=8, kv_heads=1, dim=96, value_dim=64, window=300),  # 8 rows, and columns that are no multiple of 64
    Sizes(held=(31, 7), queries=3, heads=5, kv_heads=1, dim=32, value_dim=32),  # 15 rows: the last call has 7
    Sizes(held=(70,), heads=2, kv_heads=2, dim=64, value_dim=64),  # one row
    Sizes(held=(40, 3), heads=8, kv_heads=1, dim=640, value_dim=576, tail=64),  # so many columns that 32 bits limit the query's integers
]


class Case:
    """Sequences whose earlier tokens are in random pages of a pool that is otherwise NaN.

    `states` are what the pages have: of codes, a row has 127 steps on each side of zero.
    """

    def __init__(self, sizes: Sizes, dtype: torch.dtype, seed: int = 0, *, coded: bool = False) -> None:
        self.sizes, self.coded = sizes, coded
        generator = torch.Generator().manual_seed(seed)
        kv, columns = sizes.kv_heads, (sizes.dim - sizes.tail, sizes.tail or sizes.value_dim)
        lengths = [held + sizes.queries for held in sizes.held]
        self.states = [[torch.randn(kv, length, width, generator=generator).to(dtype) for width in columns] for length in lengths]
        self.query = torch.randn(len(lengths), sizes.heads, sizes.queries, sizes.dim, generator=generator).to(dtype)
        self.new = [[states[:, held:] for states in row] for row, held in zip(self.states, sizes.held, strict=True)]
        row_bytes = 4 if coded else 0  # of the scale
        self.starts = 24, 24 + kv * PAGE * (columns[0] + row_bytes)
        form = (120, self.starts[1] + kv * PAGE * (columns[1] + row_bytes) + 8)
        self.pool = torch.full(form, -1, dtype=torch.int8) if coded else torch.full(form, float("nan"), dtype=dtype)
        self.sinks = torch.randn(sizes.heads, generator=generator)
        self.scales = [[states.float().abs().amax(-1, keepdim=True) / 127 for states in row] for row in self.states]
        if coded:
            self.codes = [[self.rounded(*each) for each in zip(*row, strict=True)] for row in zip(self.states, self.scales, strict=True)]
            self.states = [[code * scale for code, scale in zip(*row, strict=True)] for row in zip(self.codes, self.scales, strict=True)]
        self.table = torch.full((len(lengths) + 1, 50), -1)
        self.held = torch.tensor([*sizes.held, -1])
        pages = torch.randperm(len(self.pool), generator=generator).tolist()
        for row, (length, held) in enumerate(zip(lengths, sizes.held, strict=True)):
            for place in range(-(-length // PAGE)):
                self.table[row, place] = pages.pop()
            for part, token in product(range(2), range(held)):
                codes, scales = self.page(row, part, token)
                codes[:, token % PAGE] = (self.codes if coded else self.states)[row][part][:, token]
                if coded:
                    scales[:, token % PAGE] = self.scales[row][part][:, token, 0]

    @staticmethod
    def rounded(states: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return (states.float() * (1 / scales)).round().to(torch.int8)

    def page(self, row: int, part: int, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys or values of the page of a token: (KV heads, PAGE, columns), and their scales, (KV heads, PAGE)."""
        kv, columns = self.sizes.kv_heads, self.states[row][part].shape[2]
        width = columns + (4 if self.coded else 0)
        start = self.starts[part]
        heads = self.pool[self.table[row, token // PAGE], start : start + kv * PAGE * width].view(kv, PAGE * width)
        found = heads[:, : PAGE * columns].view(kv, PAGE, columns)
        return found, heads[:, PAGE * columns :].view(torch.float32) if self.coded else found[..., 0]

    def arguments(self, rows: list[int]) -> tuple[list[Any], dict[str, Any]]:
        new = [torch.stack([self.new[row][part] for row in rows]) for part in range(2)]
        out = self.query.new_empty(len(rows), self.sizes.queries, self.sizes.heads, self.sizes.value_dim)
        arrays = [as_array(self.query[rows]), *map(as_array, new), as_array(out)]
        numbers = {"page_tokens": PAGE, "key_start": self.starts[0], "value_start": self.starts[1], "window": self.sizes.window}
        self.out = out
        return [*arrays, self.pool, self.table[rows], self.held[rows]], {**numbers, "scale": 0.2, "latent": self.sizes.tail > 0}

    def expected(self, row: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
        sizes = self.sizes
        key, value = (states.double() for states in self.states[row])
        if sizes.tail:
            key, value = torch.cat([key, value], -1), key
        key, value = (states.repeat_interleave(sizes.heads // sizes.kv_heads, 0) for states in (key, value))
        at = torch.arange(sizes.queries)[:, None] + sizes.held[row]
        ids = torch.arange(key.shape[1])[None]
        shown = (ids <= at) & (ids > at - (sizes.window or 1 << 20))
        scores = (0.2 * self.query[row].double() @ key.transpose(1, 2)).masked_fill(~shown, -torch.inf)
        if sinks is None:
            return (scores.softmax(-1) @ value).transpose(0, 1)
        added = sinks.double()[:, None, None].expand(-1, sizes.queries, 1)
        return (torch.cat([scores, added], -1).softmax(-1)[..., :-1] @ value).transpose(0, 1)


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
                assert torch.equal(case.page(row, part, token)[0][:, token % PAGE], case.states[row][part][:, token])


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("sizes", CODED_SIZES, ids=str)
def test_sequences_in_pages_of_codes(sizes: Sizes, dtype: torch.dtype, runtime: Runtime) -> None:
    case = Case(sizes, dtype, coded=True)
    arguments, numbers = case.arguments(list(range(len(sizes.held))))
    for sinks in (None, case.sinks):
        runtime.paged_attention(*arguments, **numbers, sinks=None if sinks is None else sinks.numpy())
        for row in range(len(sizes.held)):
            assert relative_error(case.out[row], case.expected(row, sinks)) < ROUNDING[dtype]
    for row, held in enumerate(sizes.held):
        for part in range(2):  # the new tokens are in their pages
            for token in (held, held + sizes.queries - 1):
                codes, scales = (each[:, token % PAGE] for each in case.page(row, part, token))
                assert torch.equal(scales, case.scales[row][part][:, token, 0])
                assert torch.equal(codes, case.codes[row][part][:, token])


def test_a_softcap_applies_to_codes(runtime: Runtime) -> None:
    case = Case(CODED_SIZES[-4], torch.bfloat16, coded=True)
    case.query *= 20
    found = []
    for softcap in (0.0, 30.0):
        arguments, numbers = case.arguments([0, 1, 2])
        runtime.paged_attention(*arguments, **numbers, softcap=softcap)
        found.append(case.out)
    plain = Case(CODED_SIZES[-4], torch.float32, coded=False)
    plain.states, plain.new = (
        case.states,
        [[states[:, held:] for states in row] for row, held in zip(case.states, case.sizes.held, strict=True)],
    )
    plain.query = case.query.float()
    for row, part in product(range(3), range(2)):
        for token in range(case.sizes.held[row]):
            plain.page(row, part, token)[0][:, token % PAGE] = case.states[row][part][:, token]
    arguments, numbers = plain.arguments([0, 1, 2])
    runtime.paged_attention(*arguments, **numbers, softcap=30.0)
    assert relative_error(found[1], plain.out.double()) < ROUNDING[torch.bfloat16] < relative_error(found[0], plain.out.double())


@pytest.mark.parametrize("times", [1.0, 300.0, 1e5])
def test_a_large_value_without_a_share_costs_others_nothing(times: float, runtime: Runtime) -> None:
    sizes = Sizes(held=(40,), heads=8, kv_heads=1, dim=64, value_dim=64)
    case = Case(sizes, torch.bfloat16, coded=True)
    token = 3
    case.query[...] = 1.0
    keys, key_scales = case.page(0, 0, token)
    keys[:, token % 16], key_scales[:, token % 16] = -127, 10.0 / 127
    case.states[0][0][:, token] = -10.0
    case.page(0, 1, token)[1][:, token % 16] *= times
    case.states[0][1][:, token] *= times
    arguments, numbers = case.arguments([0])
    runtime.paged_attention(*arguments, **numbers)
    assert relative_error(case.out[0], case.expected(0)) < 4e-3


def test_a_row_of_zeros_and_one_that_is_not_finite(runtime: Runtime) -> None:
    case = Case(CODED_SIZES[-4], torch.bfloat16, coded=True)
    for part, value in ((0, 0.0), (1, 0.0), (0, float("nan")), (1, float("inf"))):
        case.new[0][part][:] = value
        arguments, numbers = case.arguments([0, 1])
        runtime.paged_attention(*arguments, **numbers)
        assert bool(case.out[0].isfinite().all()) == (value == 0.0)
        assert case.out[1].isfinite().all()
        case.new[0][part][:] = 0.0


@pytest.mark.parametrize("coded", [False, True], ids=["floats", "codes"])
@pytest.mark.parametrize("queries", [1, 50], ids=["rows", "tiles"])
def test_a_result_does_not_depend_on_the_other_sequences(queries: int, coded: bool, runtime: Runtime) -> None:
    case = Case(replace(SIZES[1], queries=queries), torch.bfloat16 if coded else torch.float32, coded=coded)
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


def test_scales_that_are_not_aligned_are_refused() -> None:
    case = Case(SIZES[0], torch.float32, coded=True)
    arguments, numbers = case.arguments([0, 1, 2])
    with pytest.raises(ValueError, match="scales of a page of codes are not aligned"):
        Runtime(threads=1).paged_attention(*arguments, **{**numbers, "key_start": 22})
