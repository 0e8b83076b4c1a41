"""What the kernels of the pair path share: which pair a program has, and the dot products of rows with a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.operators.sparse.call import Order

WARPS = 4


@triton.jit
def pair_of(order_ptr, count_ptr):
    """The pair of this program: its number, or with an order the one at its place; -1 beyond the last."""
    place = tl.program_id(0)
    if order_ptr is None:
        return place
    else:
        return tl.where(place < tl.load(count_ptr), tl.load(order_ptr + place), -1)


@triton.jit
def row_sums(w_ptrs, x_ptr, alive, ALL: tl.constexpr, H: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr):
    """The dot products of BN rows, `w_ptrs` (BN, 1) their beginnings, with x: (BN,) float32; zeros where not `alive`, unless ALL are."""
    columns = tl.arange(0, BH)[None, :]
    total = tl.zeros((BN, BH), tl.float32)
    for first in tl.static_range(0, H, BH):
        if first + BH <= H:
            if ALL:
                w = tl.load(w_ptrs + first + columns, eviction_policy="evict_first")
            else:
                w = tl.load(w_ptrs + first + columns, mask=alive, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + first + columns)
        else:
            inside = first + columns < H
            w = tl.load(w_ptrs + first + columns, mask=alive & inside, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + first + columns, mask=inside, other=0.0)
        total += w.to(tl.float32) * x.to(tl.float32)
    return tl.sum(total, 1)


def order_tensors(order: Order) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if order is None else (order.pairs, order.count)
