"""Attention over a KV cache against float64, on every instruction set of this machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.kernel_cases import as_array, relative_error

from moegraft.cpu_backend import Runtime

ROUNDING = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Sizes:
    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    queries: int = 1
    keys: int = 70
    dim: int = 64
    value_dim: int = 64


SIZES = [
    Sizes(),  # decode
    Sizes(batch=2, heads=6, kv_heads=2, queries=3, keys=37, dim=40, value_dim=24),  # multiples of no vector
    Sizes(heads=3, kv_heads=3, queries=1, keys=1, dim=7, value_dim=5),
    Sizes(heads=8, kv_heads=1, keys=600, dim=96),  # three parts of one head
    Sizes(batch=2, heads=10, kv_heads=2, queries=2, keys=77, dim=64, value_dim=32),  # ten rows of a head, pairs of bfloat16
    Sizes(heads=16, kv_heads=2, queries=33, keys=33, dim=72, value_dim=48),  # by tiles
    Sizes(batch=2, heads=4, kv_heads=4, queries=150, keys=300, dim=33, value_dim=130),
]


@dataclass
class Case:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def of(cls, sizes: Sizes, dtype: torch.dtype, seed: int = 0) -> Case:
        generator = torch.Generator().manual_seed(seed)

        def drawn(heads: int, rows: int, columns: int) -> torch.Tensor:
            return torch.randn(sizes.batch, heads, rows, columns, generator=generator).to(dtype)

        key = drawn(sizes.kv_heads, sizes.keys, sizes.dim)
        return cls(drawn(sizes.heads, sizes.queries, sizes.dim), key, drawn(sizes.kv_heads, sizes.keys, sizes.value_dim))

    def expected(
        self,
        scale: float,
        *,
        mask: torch.Tensor | None = None,
        causal: bool = False,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the result (batch, queries, heads, value_dim) in float64."""
        group = self.query.shape[1] // self.key.shape[1]
        key, value = self.key.double().repeat_interleave(group, 1), self.value.double().repeat_interleave(group, 1)
        scores = scale * self.query.double() @ key.mT
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(scores.shape[-1] - scores.shape[-2] + 1)
            scores = scores.masked_fill(hidden, -math.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
            value = torch.cat([value, value.new_zeros(*value.shape[:2], 1, value.shape[3])], 2)
        return (scores.softmax(-1).nan_to_num() @ value).transpose(1, 2)

    def computed(
        self,
        runtime: Runtime,
        scale: float,
        *,
        mask: torch.Tensor | None = None,
        causal: bool = False,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        tail: int = 0,
    ) -> torch.Tensor:
        """`tail`: as many columns of the keys are in a tensor of their own."""
        batch, heads, queries, _ = self.query.shape
        out = torch.full((batch, queries, heads, self.value.shape[3]), float("nan"), dtype=self.query.dtype)
        runtime.attention(
            as_array(self.query),
            as_array(self.key[..., : self.key.shape[3] - tail].contiguous()),
            as_array(self.value),
            as_array(out),
            scale=scale,
            mask=None if mask is None else as_array(mask),
            causal=causal,
            softcap=softcap,
            sinks=None if sinks is None else sinks.numpy(),
            key_tail=as_array(self.key[..., self.key.shape[3] - tail :].contiguous()) if tail else None,
        )
        return out


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matches_float64(runtime: Runtime, sizes: Sizes, dtype: torch.dtype) -> None:
    case = Case.of(sizes, dtype)
    for causal in (False, True):
        expected = case.expected(0.3, causal=causal)
        assert relative_error(case.computed(runtime, 0.3, causal=causal), expected) <= ROUNDING[dtype]


LATENT = [
    (Sizes(batch=2, heads=4, kv_heads=1, keys=70, dim=576, value_dim=512), 64),  # DeepSeek's latents, one token
    (Sizes(heads=3, kv_heads=1, queries=2, keys=300, dim=24, value_dim=16), 8),  # parts of one head
    (Sizes(heads=16, kv_heads=1, queries=5, keys=130, dim=88, value_dim=72), 16),  # by tiles
    (Sizes(batch=2, heads=30, kv_heads=1, queries=2, keys=70, dim=40, value_dim=35), 5),  # by tiles, from an odd column on
    (Sizes(heads=50, kv_heads=1, queries=1, keys=33, dim=9, value_dim=8), 1),
]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("sizes", "tail"), LATENT, ids=str)
def test_keys_in_two_tensors(runtime: Runtime, sizes: Sizes, tail: int, dtype: torch.dtype) -> None:
    case = Case.of(sizes, dtype, seed=4)
    window = torch.ones(sizes.queries, sizes.keys, dtype=torch.bool).tril(sizes.keys - sizes.queries).triu(sizes.keys - sizes.queries - 20)
    for options in ({}, {"causal": True}, {"mask": window[None, None]}, {"softcap": 1.5}):
        found = case.computed(runtime, 0.1, tail=tail, **options)
        assert relative_error(found, case.expected(0.1, **options)) <= ROUNDING[dtype], options


MASKED = [Sizes(batch=2, queries=2, keys=75), Sizes(batch=2, heads=6, kv_heads=2, queries=130, keys=200)]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("sizes", MASKED, ids=str)
@pytest.mark.parametrize("kind", ["window", "scattered", "heads", "added", "lowest"])
def test_masks(runtime: Runtime, sizes: Sizes, dtype: torch.dtype, kind: str) -> None:
    case = Case.of(sizes, dtype, seed=1)
    generator = torch.Generator().manual_seed(2)
    rows, columns = torch.arange(sizes.queries)[:, None] + sizes.keys - sizes.queries, torch.arange(sizes.keys)
    mask = ((columns <= rows) & (columns > rows - 20)).expand(sizes.batch, 1, -1, -1).contiguous()
    if kind == "scattered":
        mask = torch.rand(sizes.batch, 1, sizes.queries, sizes.keys, generator=generator) < 0.5
    elif kind == "heads":
        mask = torch.rand(1, sizes.heads, sizes.queries, sizes.keys, generator=generator) < 0.5
    elif kind == "added":
        mask = torch.randn(1, sizes.heads, sizes.queries, sizes.keys, generator=generator).to(dtype)
    elif kind == "lowest":
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    sinks = torch.randn(sizes.heads, generator=generator)
    for options in ({}, {"sinks": sinks}, {"softcap": 1.5}):
        found, expected = case.computed(runtime, 0.3, mask=mask, **options), case.expected(0.3, mask=mask, **options)
        assert relative_error(found, expected) <= ROUNDING[dtype], options


@pytest.mark.parametrize("queries", [1, 40])
def test_a_query_without_visible_keys_gives_zero(runtime: Runtime, queries: int) -> None:
    case = Case.of(Sizes(queries=queries), torch.float32)
    mask = torch.ones(1, 1, queries, 70, dtype=torch.bool)
    mask[0, 0, queries // 2] = False
    found = case.computed(runtime, 0.3, mask=mask)
    assert not found[0, queries // 2].any()
    torch.testing.assert_close(found.double(), case.expected(0.3, mask=mask), rtol=1e-4, atol=1e-5)


def test_rows_without_visible_keys_read_no_value(runtime: Runtime) -> None:
    """Here whole tiles of them."""
    case = Case.of(Sizes(queries=100, keys=130), torch.float32)
    case.value[:, :, -1] = math.inf
    mask = torch.zeros(1, 1, 100, 130, dtype=torch.bool)
    mask[:, :, 70:, :129] = True
    found = case.computed(runtime, 0.3, mask=mask)
    assert not found[:, :66].any()


@pytest.mark.parametrize("queries", [1, 60])
def test_large_scores_do_not_overflow_and_nan_stays_in_its_row(runtime: Runtime, queries: int) -> None:
    case = Case.of(Sizes(queries=queries), torch.float32)
    case.query *= 300.0
    found = case.computed(runtime, 1.0)
    assert relative_error(found, case.expected(1.0)) <= 1e-4
    case.query[0, 1, queries - 1, 3] = float("nan")
    spoiled = case.computed(runtime, 1.0)
    assert spoiled[0, queries - 1, 1].isnan().all()
    spoiled[0, queries - 1, 1] = found[0, queries - 1, 1]
    assert torch.equal(spoiled, found)


@pytest.mark.parametrize("queries", [1, 4, 50])
def test_a_cache_that_is_not_contiguous_is_read_in_place(runtime: Runtime, queries: int) -> None:
    case = Case.of(Sizes(batch=2, queries=queries, keys=90), torch.bfloat16)
    expected = case.computed(runtime, 0.3)
    tokens_first = Case(*(part.transpose(1, 2).contiguous().transpose(1, 2) for part in (case.query, case.key, case.value)))
    assert torch.equal(tokens_first.computed(runtime, 0.3), expected)
    longer = Case(case.query, *(torch.cat([part, torch.full_like(part, float("nan"))], 2)[:, :, :90] for part in (case.key, case.value)))
    assert torch.equal(longer.computed(runtime, 0.3), expected)


@pytest.mark.parametrize("queries", [1, 50])
def test_the_number_of_threads_changes_no_bit(queries: int) -> None:
    case = Case.of(Sizes(heads=8, queries=queries, keys=700), torch.bfloat16)
    alone = case.computed(Runtime(threads=1), 0.3)
    assert torch.equal(case.computed(Runtime(threads=3, share_threads=False), 0.3), alone)


def test_empty_inputs_are_accepted(runtime: Runtime) -> None:
    for sizes in (Sizes(batch=0), Sizes(queries=0)):
        assert Case.of(sizes, torch.float32).computed(runtime, 1.0).numel() == 0
    assert not Case.of(Sizes(keys=0), torch.float32).computed(runtime, 1.0).any()


def test_wrong_arguments_are_refused(runtime: Runtime) -> None:
    def refused(message: str, error: type[Exception] = ValueError, **changes: object) -> None:
        q, k = np.zeros((1, 4, 2, 8), np.float32), np.zeros((1, 2, 6, 8), np.float32)
        given = {"query": q, "key": k, "value": k, "out": np.zeros((1, 2, 4, 8), np.float32), "scale": 1.0, **changes}
        with pytest.raises(error, match=message):
            runtime.attention(**given)

    refused("not a multiple of 3 key heads", key=np.zeros((1, 3, 6, 8), np.float32))
    refused(r"value: expected shape .*, found \(1, 2, 5, 8\)", value=np.zeros((1, 2, 5, 8), np.float32))
    refused("differ in columns", key=np.zeros((1, 2, 6, 4), np.float32), value=np.zeros((1, 2, 6, 4), np.float32))
    refused("out: expected shape", out=np.zeros((1, 4, 2, 8), np.float32))
    refused("differ in dtype", TypeError, key=np.zeros((1, 2, 6, 8), np.float16))
    refused("last dimension is not contiguous", key=np.zeros((1, 2, 8, 6), np.float32).transpose(0, 1, 3, 2))
    refused("differ in columns", key_tail=np.zeros((1, 2, 6, 1), np.float32))
    refused("key_tail: expected shape", key_tail=np.zeros((1, 2, 5, 1), np.float32), key=np.zeros((1, 2, 6, 7), np.float32))
    refused("key_tail differ in dtype", TypeError, key_tail=np.zeros((1, 2, 6, 1), np.float16), key=np.zeros((1, 2, 6, 7), np.float32))
    refused("mask: expected shape", mask=np.zeros((1, 1, 2, 5), np.bool_))
    refused("mask: expected dtype bool or that of query", TypeError, mask=np.zeros((1, 1, 2, 6), np.float16))
    refused("found both", mask=np.zeros((1, 1, 2, 6), np.bool_), causal=True)
    refused(
        "at least as many keys as queries", query=np.zeros((1, 4, 9, 8), np.float32), out=np.zeros((1, 9, 4, 8), np.float32), causal=True
    )
    refused("scale must be positive", scale=0.0)
    refused("softcap must be at least 0", softcap=-1.0)
    refused("sinks must be contiguous float32", sinks=np.zeros(3, np.float32))
    refused("4 dimensions", query=np.zeros((4, 2, 8), np.float32))
