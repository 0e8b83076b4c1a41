"""One packed linear layer on a GPU, from the bytes that `PackedLinear` holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Self

import torch
import triton
import triton.language as tl

from moegraft.operators.kernels.launch import LAUNCH, PackedBytes, on
from moegraft.operators.kernels.packed_layout import BLOCK_ROWS, PackedMatrix, block_bytes, packed_matrix, round_up
from moegraft.operators.kernels.packed_product import grouped_columns, packed_product
from moegraft.operators.kernels.slots import UNITS, WARPS, row_products, tile_spans

# Up to here every token streams the weights itself; an estimate, no GPU has measured it.
DECODE_TOKENS = 4
# A program's rows: half a block where whole ones would be too few programs to keep a GPU reading.
MANY_BLOCKS = 512
# Tokens computed in one go: bounds the copy of x in the order of the units.
MOST_TOKENS = 4096


@triton.jit
def _linear_decode_kernel(
    x_ptr,  # (T, columns) floating
    units_ptr,  # the packed bytes, as units
    scales_ptr,  # the same bytes as float16
    grid_ptr,  # of `PackedBytes`
    biases_ptr,  # (rows,) float32, or anything
    out_ptr,  # (T, outputs) floating
    M: tl.constexpr,
    ROWS: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Grid (rows / ROWS, T)."""
    first_row = tl.program_id(0) * ROWS
    token = tl.program_id(1).to(tl.int64)
    sums = tl.sum(row_products(units_ptr, scales_ptr, grid_ptr, x_ptr + token * M.columns, first_row, 1.0, M, ROWS, SPANS), 0)
    lanes = first_row + tl.arange(0, ROWS)
    if M.bias_word >= 0:
        sums += tl.load(biases_ptr + lanes, mask=lanes < M.outputs, other=0.0)
    tl.store(out_ptr + token * M.outputs + lanes, sums.to(out_ptr.dtype.element_ty), mask=lanes < M.outputs)


class PackedLinearOnGpu:
    """Computes `x @ weight.T + bias` from packed bytes on the device.

    Args:
        packed: uint8, `PackedLinear.buffer` on the device.
        bias: (rows,) float32 there.
    """

    def __init__(self, rows: int, columns: int, weight_type: str, packed: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        padded = round_up(rows, BLOCK_ROWS)
        expected = block_bytes(weight_type, columns) * (padded // BLOCK_ROWS)
        if packed.numel() != expected:
            raise ValueError(f"{packed.numel()} packed bytes where {weight_type} ({rows}, {columns}) has {expected}")
        self.matrix: PackedMatrix = packed_matrix(weight_type, padded, columns, outputs=rows)
        if bias is not None:
            self.matrix = self.matrix._replace(bias_word=0)
        self.weight_type, self.packed, self.bias = weight_type, packed, bias
        views = PackedBytes.of(packed, weight_type)
        self._bytes = views if bias is None else replace(views, biases=bias)

    @classmethod
    def joined(cls, layers: Sequence[Self]) -> Self | None:
        """Return a layer with the rows of all, whose weights become parts of its memory; None where they differ in form."""
        first = layers[0]
        form = first.weight_type, first.matrix.columns, first.bias is None
        whole = all(each.matrix.outputs % BLOCK_ROWS == 0 and each.packed.numel() % 16 == 0 for each in layers[:-1])
        if not whole or any((each.weight_type, each.matrix.columns, each.bias is None) != form for each in layers):
            return None
        packed = torch.cat([each.packed.view(-1) for each in layers])
        biases = [each.bias for each in layers if each.bias is not None]
        bias = torch.cat(biases) if biases else None
        rows = [each.matrix.outputs for each in layers]
        for layer, part, own in zip(
            layers,
            packed.split([each.packed.numel() for each in layers]),
            [None] * len(layers) if bias is None else bias.split(rows),
            strict=True,
        ):
            layer.__init__(layer.matrix.outputs, layer.matrix.columns, layer.weight_type, part, own)  # type: ignore[misc]
        return cls(sum(rows), first.matrix.columns, first.weight_type, packed, bias)

    def forward(self, x: torch.Tensor, path: Literal["decode", "grouped"] | None = None) -> torch.Tensor:
        """`x (..., columns)` floating -> `(..., rows)` of its dtype, on the current stream; accumulates in float32.

        Args:
            path: by default `decode` for few tokens, else `grouped`, on tensor cores, which rounds unpacked weights to the dtype of x.
        """
        tokens = x.reshape(-1, self.matrix.columns).contiguous()
        out = torch.empty(len(tokens), self.matrix.outputs, dtype=x.dtype, device=x.device)
        with on(x.device):
            if len(tokens) and (path or ("decode" if len(tokens) <= DECODE_TOKENS else "grouped")) == "decode":
                self._decode(tokens, out)
            else:
                for first in range(0, len(tokens), MOST_TOKENS):
                    part = slice(first, first + MOST_TOKENS)
                    packed_product(grouped_columns(tokens[part], self.matrix), self._bytes, self.matrix, out[part])
        return out.view(*x.shape[:-1], self.matrix.outputs)

    def _decode(self, tokens: torch.Tensor, out: torch.Tensor) -> None:
        rows = 32 if self.matrix.rows >= 32 * MANY_BLOCKS else 16
        _linear_decode_kernel[self.matrix.rows // rows, len(tokens)](
            tokens, self._bytes.units, self._bytes.scales, self._bytes.grid, self._bytes.biases, out,
            M=self.matrix, ROWS=rows, SPANS=tile_spans(self.matrix, rows, UNITS), num_warps=WARPS, **LAUNCH,
        )  # fmt: skip
