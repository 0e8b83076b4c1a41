"""A matrix product over packed weights on tensor cores: tiles are unpacked in registers, directly into the operand of the instruction.

The weights are the left operand (their rows fill the 64 that an instruction wants, however few the tokens), the activations the right one.
A unit holds several consecutive columns of a row, and the J-th columns of 32 or 64 units make one instruction's operand. The order in which
a product is summed does not matter, so the activations are stored with the same columns side by side: `grouped_columns`.

An epilogue is applied to the sums before they are stored: biases, activation, gate, threshold. All in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from moegraft.operators.kernels.launch import LAUNCH, PackedBytes, avoid_wrong_wgmma, constant, interpreted
from moegraft.operators.kernels.packed_layout import Gate, PackedMatrix, gpu_format, round_up
from moegraft.operators.kernels.routing import PairGroups, pairs_a_block
from moegraft.operators.kernels.units import column_as, dot, expanded, high_at, high_bits_of, load, number, scales_of, signed, unit_at
from moegraft.operators.weight_formats import FORMATS

# "gate": 16 gate rows and 16 up rows, alternating, become neurons; "act": gate rows become activations; "rows": rows stay as they are.
Epilogue = Literal["gate", "act", "rows"]


@dataclass(frozen=True, slots=True)
class Threshold:
    """Which neurons count as zero, in device memory, so that a captured graph follows it.

    Attributes:
        value: (1,) float32: neurons with a smaller `|act(gate)|`.
        counts: (2,) int64: kernels add the neurons that reached the threshold, and all.
    """

    value: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def zero(cls, device: torch.device) -> Threshold:
        """Return a threshold of 0, which every neuron reaches."""
        return cls(torch.zeros(1, dtype=torch.float32, device=device), torch.zeros(2, dtype=torch.int64, device=device))


@triton.jit
def _tanh(x):
    # exp of a number that is not positive cannot overflow
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -t, t)


@triton.jit
def _activation(x, GATE: tl.constexpr):
    if GATE.activation == "silu":
        return x * tl.sigmoid(GATE.alpha * x)
    elif GATE.activation == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif GATE.activation == "gelu_tanh":
        return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif GATE.activation == "relu":
        return tl.where(x < 0.0, 0.0, x)
    elif GATE.activation == "relu2":
        return tl.where(x < 0.0, 0.0, x * x)
    elif GATE.activation == "sigmoid":
        return tl.sigmoid(x)
    elif GATE.activation == "tanh":
        return _tanh(x)
    else:
        tl.static_assert(GATE.activation == "identity", "unknown activation")
        return x


@triton.jit
def activated(gate, GATE: tl.constexpr):
    """What a threshold is compared with: `min(act(min(gate, gate_limit)), act_limit)`, ungated `act(up)`."""
    # `where`, not `minimum`: a NaN must stay one
    if GATE.gated and GATE.gate_limit < float("inf"):
        gate = tl.where(gate > GATE.gate_limit, GATE.gate_limit, gate)
    value = _activation(gate, GATE)
    if GATE.gated and GATE.act_limit < float("inf"):
        value = tl.where(value > GATE.act_limit, GATE.act_limit, value)
    return value


@triton.jit
def limited_up(up, GATE: tl.constexpr):
    """`clamp(up, +-up_limit) + up_offset`."""
    if GATE.up_limit < float("inf"):
        up = tl.where(up > GATE.up_limit, GATE.up_limit, up)
        up = tl.where(up < -GATE.up_limit, -GATE.up_limit, up)
    return up + GATE.up_offset


@triton.jit
def reaches(activations, threshold):
    """Whether each activation is kept: not smaller than the threshold, so that a NaN is seen."""
    return ~(tl.abs(activations) < threshold)


@triton.jit
def count(counts_ptr, reached, counted):
    """Add to the counts of a `Threshold`; both are boolean tensors."""
    tl.atomic_add(counts_ptr, tl.sum(reached.to(tl.int32)).to(tl.int64), sem="relaxed")
    tl.atomic_add(counts_ptr + 1, tl.sum(counted.to(tl.int32)).to(tl.int64), sem="relaxed")


@triton.jit
def bias_of(biases_ptr, lanes, M: tl.constexpr):
    """Biases of the first matrix's gate rows, or of its only rows; 0 beyond the last output."""
    return tl.load(biases_ptr + M.bias_word + lanes, mask=lanes < M.outputs, other=0.0)


@triton.jit
def finish_tile(
    total,  # (ROWS, BM) float32
    first_row,
    biases_ptr,  # of the expert
    M: tl.constexpr,
    GATE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ROWS: tl.constexpr,
    BM: tl.constexpr,
):
    """The outputs that a tile's rows become, and their numbers; those beyond the last output are zeros."""
    if EPILOGUE == "gate":
        COUNT: tl.constexpr = ROWS // 2
        gate, up = tl.split(tl.permute(tl.reshape(total, (ROWS // 32, 2, 16, BM)), (0, 2, 3, 1)))
        gate = tl.reshape(gate, (COUNT, BM))
        up = tl.reshape(up, (COUNT, BM))
        lanes = first_row // 2 + tl.arange(0, COUNT)
        if M.bias_word >= 0:
            gate += bias_of(biases_ptr, lanes, M)[:, None]
            up += tl.load(biases_ptr + M.up_bias_word + lanes, mask=lanes < M.outputs, other=0.0)[:, None]
        value = activated(gate, GATE) * limited_up(up, GATE)
    else:
        lanes = first_row + tl.arange(0, ROWS)
        value = total
        if M.bias_word >= 0:
            value += bias_of(biases_ptr, lanes, M)[:, None]
        if EPILOGUE == "act":
            value = activated(value, GATE)
    # a gate need not map zero to zero, and neurons beyond the last must not reach the output
    return tl.where((lanes < M.outputs)[:, None], value, 0.0), lanes


# Compute capabilities of GPUs with 164 KiB of shared memory and more in a multiprocessor; others, such as GeForce, have 100 or less.
LARGE_SHARED = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 1), (10, 3))
SMALL_STAGES = 2  # where three do not fit


def _tile(block_pairs: int, x: torch.Tensor, weights: str) -> tuple[int, int, int]:
    """Return a program's rows, warps and stages; the defaults by what they leave of registers and of shared memory.

    tests/compiled_kernels.py records both.
    """
    large = x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) in LARGE_SHARED
    read = gpu_format(weights)
    expanded = read.group_words is not None  # indexes are in shared memory for as many steps as what they are indexes into
    # upper bits and minima are loaded in tiles of their own, and take registers
    stages = 3 if large and not read.high_bits and not read.minima and not expanded else SMALL_STAGES
    if x.dtype == torch.float32:  # three passes over split operands
        return 64, 4, stages
    defaults = {"rows": 64 if expanded else 128, "warps": 8 if block_pairs >= 64 else 4, "stages": stages}
    rows, warps, stages = (constant(f"grouped_{name}:{block_pairs}", value, weights, x.device) for name, value in defaults.items())
    return rows, warps, stages


def _registers(matrix: PackedMatrix, rows: int, warps: int) -> dict[str, int]:
    """Limit registers where a loop without masks just fits.

    Two programs of 8 warps fit a multiprocessor with 128 registers a thread. The assembler keeps to that only where a limit is given, and
    otherwise parks a value in memory; with masks it does better without a limit. Formats of files need more registers.
    """
    form = FORMATS[matrix.weights]
    masked = matrix.columns % matrix.step_columns != 0 or matrix.rows % rows != 0
    return {"maxnreg": 128} if warps == 8 and form.scaled and not form.stored and not masked else {}


def grouped_columns(x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    """`x (T, columns)` -> (T, padded columns) in the product's order: within each step, the first columns of all units, then the second."""
    step, a_unit = matrix.step_columns, matrix.columns_a_unit
    padded = torch.nn.functional.pad(x, (0, round_up(x.shape[1], step) - x.shape[1]))
    if a_unit == 1:
        return padded.contiguous()
    return padded.view(x.shape[0], -1, step // a_unit, a_unit).transpose(2, 3).reshape(x.shape[0], -1)


@triton.jit
def _grouped_column(index, M: tl.constexpr):
    """Where `grouped_columns` puts a column."""
    in_step = index % M.step_columns
    units: tl.constexpr = M.step_columns // M.columns_a_unit
    return index - in_step + (in_step % M.columns_a_unit) * units + in_step // M.columns_a_unit


@triton.jit
def _tile_product(
    units_ptr,
    scales_ptr,
    grid_ptr,
    x_ptr,
    first_row,
    x_rows,
    present,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BM: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """`W[first_row : first_row + ROWS] @ x[x_rows].T`: (ROWS, BM) float32; zeros where `present` is false."""
    rows = first_row + tl.arange(0, ROWS)
    HELD: tl.constexpr = M.columns_a_unit
    UNITS: tl.constexpr = M.step_columns // HELD
    BLOCKS: tl.constexpr = M.step_columns // (32 * M.groups)  # column blocks
    SCALES: tl.constexpr = BLOCKS * M.scales_a_block
    TAIL: tl.constexpr = M.columns % M.step_columns != 0
    MASKED: tl.constexpr = TAIL or M.rows % ROWS != 0
    COUNT: tl.constexpr = (M.columns + 31) // 32 * 32 // HELD
    units = tl.arange(0, UNITS)
    spans, in_span = units[None, :] // M.units_a_span, units[None, :] % M.units_a_span
    block = tl.arange(0, SCALES)[None, :] // M.scales_a_block
    in_block = tl.arange(0, SCALES)[None, :] % M.scales_a_block
    inside = (rows < M.rows)[:, None]
    if not M.expanded:
        w_ptrs = units_ptr + unit_at(rows[:, None], spans, in_span, M)
    x_ptrs = x_ptr + (x_rows[None, :] * WIDTH + units[:, None])  # below 2^31: the launcher asserts it
    total = tl.zeros((ROWS, BM), tl.float32)
    for step in range(0, (M.columns + M.step_columns - 1) // M.step_columns):
        at = step * UNITS + units
        offset = step * BLOCKS * M.column_stride
        filled = inside & (at < COUNT)[None, :]
        if M.expanded:
            w, high = expanded(units_ptr + offset, grid_ptr, rows[:, None], spans, in_span, filled, M, MASKED)
        else:
            w = signed(load(w_ptrs + offset, filled, MASKED), M)
            high = w
            if M.high_bits > 0:
                high = high_bits_of(load(units_ptr + offset + high_at(rows[:, None], spans, M), filled, MASKED), spans, in_span, M)
        if M.header > 0:
            here = inside & ((step * BLOCKS + block) * (M.step_columns // BLOCKS) < M.columns)
            scales, minima = scales_of(units_ptr + offset, scales_ptr + 2 * offset, rows[:, None], block, in_block, here, M, MASKED)
            scales = _by_unit(scales, ROWS, SCALES, UNITS).to(tl.float32)
            if M.minima:
                minima = _by_unit(minima, ROWS, SCALES, UNITS).to(tl.float32)
        for j in tl.static_range(HELD):
            mask = present[None, :]
            if TAIL:
                mask = mask & (at * HELD + j < M.columns)[:, None]
            x = tl.load(x_ptrs + step * M.step_columns + j * UNITS, mask=mask, other=0.0)
            if M.header > 0:
                value = number(w, high, j, M) * scales
                if M.minima:
                    value += minima
                total = dot(value.to(x.dtype), x, total, UPCAST)
            else:
                total = dot(column_as(w, j, x.dtype, M), x, total, UPCAST)
    return total


@triton.jit
def _by_unit(values, ROWS: tl.constexpr, SCALES: tl.constexpr, UNITS: tl.constexpr):
    """(ROWS, SCALES) -> (ROWS, UNITS), in which units of one scale are side by side."""
    return tl.reshape(tl.broadcast_to(values[:, :, None], (ROWS, SCALES, UNITS // SCALES)), (ROWS, UNITS))


@triton.jit
def _packed_product_kernel(
    x_ptr,  # (tokens or pairs, X_WIDTH) floating, in the order of `grouped_columns`
    units_ptr,  # (S, expert_bytes), as units
    scales_ptr,  # the same bytes as float16
    grid_ptr,  # of `PackedBytes`
    biases_ptr,  # float32; of experts: the same bytes
    pairs_ptr,  # of PairGroups, or None: rows of x are taken in order, with the one matrix there is
    block_ids_ptr,
    count_ptr,
    out_ptr,  # (pairs, OUT_WIDTH) floating
    pair_count,
    M: tl.constexpr,
    GATE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr,  # pairs that share a row of x: K for hidden states, 1 for neurons
    X_WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    NEXT: tl.constexpr,  # the matrix that takes the result as its x, or None
    ROWS: tl.constexpr,
    BM: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (blocks, rows / ROWS): blocks of one expert run side by side, so its weights leave memory once."""
    block = tl.program_id(0)
    pair = block * BM + tl.arange(0, BM)
    slot = tl.zeros((), tl.int64)
    if pairs_ptr is not None:
        if block >= tl.load(count_ptr):
            return
        pair = tl.load(pairs_ptr + pair)
        slot = tl.load(block_ids_ptr + block).to(tl.int64)
    present = pair < pair_count
    x_rows = tl.where(present, pair // PAIRS_A_ROW, 0)
    first_row = tl.program_id(1) * ROWS
    start = slot * M.expert_stride + M.first
    total = _tile_product(
        units_ptr + start, scales_ptr + 2 * start, grid_ptr, x_ptr, first_row, x_rows, present, M, X_WIDTH, ROWS, BM, UPCAST
    )
    biases_ptr += slot * M.expert_words
    value, lanes = finish_tile(total, first_row, biases_ptr, M, GATE, EPILOGUE, ROWS, BM)
    columns = lanes if NEXT is None else _grouped_column(lanes, NEXT)
    out_ptrs = out_ptr + (pair[None, :] * OUT_WIDTH + columns[:, None])
    tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=present[None, :] & (lanes < OUT_WIDTH)[:, None])


def packed_product(
    x: torch.Tensor,
    packed: PackedBytes,
    matrix: PackedMatrix,
    out: torch.Tensor,
    *,
    groups: PairGroups | None = None,
    gate: Gate | None = None,
    epilogue: Epilogue = "rows",
    pairs_a_row: int = 1,
    following: PackedMatrix | None = None,
) -> None:
    """`out[pair] = epilogue(W[expert of pair] @ x[pair // pairs_a_row] + bias)`.

    Args:
        x: in the order of `grouped_columns` for `matrix`.
        out: (pairs, width), any floating dtype; columns up to its width are written.
        groups: the pairs by expert; None: one matrix for all rows of x.
        following: the matrix that `out` will be the x of; `out` is then as wide as that matrix's whole steps.
    """
    pair_count = out.shape[0]
    block_pairs = groups.block_pairs if groups else pairs_a_block(pair_count, 1, x.dtype)
    assert max(x.numel(), out.numel()) < 1 << 31, "offsets have 32 bits: callers cut long batches"
    rows, warps, stages = _tile(block_pairs, x, matrix.weights)
    blocks = groups.max_blocks if groups else triton.cdiv(pair_count, block_pairs)
    avoid_wrong_wgmma()
    _packed_product_kernel[blocks, triton.cdiv(matrix.rows, rows)](
        x, packed.units, packed.scales, packed.grid, packed.biases,
        groups and groups.pairs, groups and groups.block_ids, groups and groups.count, out, pair_count,
        M=matrix, GATE=gate, EPILOGUE=epilogue, PAIRS_A_ROW=pairs_a_row, X_WIDTH=x.shape[1], OUT_WIDTH=out.shape[1], NEXT=following,
        ROWS=rows, BM=block_pairs, UPCAST=interpreted(), num_warps=warps, num_stages=stages,
        **_registers(matrix, rows, warps), **LAUNCH,
    )  # fmt: skip
