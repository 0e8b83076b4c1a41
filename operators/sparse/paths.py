"""The ways through a layer of sparse experts. All compute the same function; which is fastest depends on the batch: see `choice`.

`pair`, `ordered`: every pair reads its own active rows, as they come or by expert (what several pairs read is then in the L2 cache).
`union`: the pairs of an expert read the union of their rows, on tensor cores. `dense`, `grouped_mm`: all rows are read, by the project's
own kernel or PyTorch's, and neurons below the threshold become zeros.

The dense path over PyTorch's `grouped_mm`: what the project's own kernels have to beat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from moegraft.operators.kernels.epilogue import Epilogue, combine
from moegraft.operators.kernels.packed_product import grouped_columns, packed_product
from moegraft.operators.kernels.plain_product import gate_up_matrix, plain_product, rows_matrix
from moegraft.operators.kernels.routing import PairGroups, group_pairs
from moegraft.operators.kernels.slots import rows_by_pair
from moegraft.operators.kernels.sparse_call import Call, Lists, Order
from moegraft.operators.kernels.sparse_pairs import compact_candidates, down_listed, gate_compact, gate_rows, up_listed
from moegraft.operators.kernels.sparse_rows import neuron_rows
from moegraft.operators.kernels.sparse_union import compact_union, down_union, up_union
from moegraft.operators.kernels.sparse_weights import SparseWeights


def takes(weights: SparseWeights) -> bool:
    """Whether `grouped_mm` has a fast kernel for these weights: bfloat16, rows of whole 16 bytes."""
    return weights.gate_up.dtype == torch.bfloat16 and weights.hidden % 8 == 0 and weights.neurons % 8 == 0


def run_grouped_mm(call: Call) -> None:
    """All rows of the chosen experts; neurons below the threshold become zeros. No step waits for the device, so it can be captured."""
    weights, top_k = call.weights, call.top_k
    ids = call.ids.flatten()
    # padded slots come behind all experts, where no group takes them
    order = torch.where(ids < 0, weights.num_experts, ids).sort(stable=True)
    experts = torch.arange(1, weights.num_experts + 1, dtype=order.values.dtype, device=ids.device)
    ends = torch.searchsorted(order.values, experts).to(torch.int32)
    sums = F.grouped_mm(call.hidden_states[order.indices // top_k], weights.gate_up.transpose(1, 2), offs=ends)
    neurons = sums.new_empty(len(ids), weights.neurons)
    gate_rows(call, sums, order.values, neurons)
    rows = F.grouped_mm(neurons, weights.down_t, offs=ends).float()
    present = order.values < weights.num_experts
    if weights.down_bias is not None:
        rows = rows + weights.down_bias[order.values.clamp(max=weights.num_experts - 1)]
    shares = torch.where(present, call.top_k_weights.flatten()[order.indices].float(), 0.0)
    # what no group wrote may be anything, NaN too
    rows = torch.where(present[:, None], rows, 0.0) * shares[:, None]
    unsorted = torch.empty_like(rows)
    unsorted[order.indices] = rows
    call.out.copy_(unsorted.view(*call.ids.shape, -1).sum(1))


SKETCH_DECODE_TOKENS = 8  # up to here every pair reads its sketch itself; an estimate, no GPU has measured it


def grouped(call: Call, block_pairs: int | None = None) -> PairGroups:
    """The call's pairs by expert."""
    groups = call.buffers.groups(call.hidden_states.dtype, block_pairs)
    group_pairs(call.ids, call.weights.num_experts, groups)
    return groups


def _lists(call: Call, count: int, kind: str) -> Lists:
    buffers, neurons = call.buffers, call.weights.neurons
    if kind == "block":
        listed = buffers.lengths(f"list {count}", count * neurons).view(count, neurons)
        return Lists(listed, listed, buffers.lengths(f"list lengths {count}", count))
    values = buffers.of_pairs("values", neurons, torch.float32)
    return Lists(buffers.of_pairs("list", neurons, torch.int32), values, buffers.lengths("lengths", count))


def run_pair(call: Call, *, ordered: bool = False) -> None:
    buffers, neurons = call.buffers, call.weights.neurons
    act = buffers.of_pairs("act", neurons, torch.float32)
    lists = _lists(call, buffers.pairs, "pair")
    order = grouped(call, 1) if ordered else None
    sketched = call.weights.sketch is not None
    if sketched:
        sketch_activations(call, act)
        compact_candidates(call, lists, act)
    else:
        gate_compact(call, lists, act, buffers.done(), order)
    _finish_pairs(call, lists, lists.values if call.threshold.group == 1 else act, order, candidates=sketched)


def _finish_pairs(call: Call, lists: Lists, values: torch.Tensor, order: Order, *, candidates: bool) -> None:
    buffers, weights = call.buffers, call.weights
    gated = buffers.of_pairs("neurons", neuron_rows(weights).places, torch.float32)
    rows = buffers.of_pairs("rows", weights.hidden, torch.float32)
    up_listed(call, lists, values, gated, order, candidates=candidates)
    down_listed(call, lists, gated, rows, order)
    combine(rows, call.ids, call.top_k_weights, call.out)


def sketch_activations(call: Call, act: torch.Tensor) -> None:
    """Fills `act (P, I)` float32 with the activations of sketched gates."""
    weights, sketch = call.weights, call.weights.sketch
    assert sketch is not None, "a path asked for a sketch that was not made"
    if len(call.hidden_states) <= SKETCH_DECODE_TOKENS:
        rows_by_pair(call.hidden_states, sketch.packed, sketch.matrix, call.ids, act, weights.gate, "act")
        return
    packed_product(
        grouped_columns(call.hidden_states, sketch.matrix),
        sketch.packed,
        sketch.matrix,
        act,
        groups=grouped(call),
        gate=weights.gate,
        finish="act",
        pairs_a_row=call.top_k,
    )


def exact_activations(call: Call, act: torch.Tensor, groups: PairGroups) -> None:
    """Fills `act (P, I)` float32 with `act(gate)` of every present pair; ungated `act(up)`."""
    weights = call.weights
    bias = weights.gate_up_bias is not None
    if weights.gated:
        matrix = gate_up_matrix(weights.gate_up, interleaved=weights.interleaved, finish="act", bias=bias)
    else:
        matrix = rows_matrix(weights.gate_up, bias=bias)
    plain_product(
        call.hidden_states,
        weights.gate_up,
        matrix,
        act,
        groups,
        biases=weights.gate_up_bias,
        gate=weights.gate,
        finish="act",
        pairs_a_row=call.top_k,
    )


def run_union(call: Call) -> None:
    buffers, weights = call.buffers, call.weights
    groups = grouped(call)
    act = buffers.of_pairs("act", weights.neurons, torch.float32)
    gated = buffers.of_pairs("union neurons", weights.neurons, call.hidden_states.dtype)
    rows = buffers.of_pairs("rows", weights.hidden, torch.float32)
    lists = _lists(call, groups.max_blocks, "block")
    exact_activations(call, act, groups)
    compact_union(call.threshold, lists, act, groups, neuron_rows(weights))
    up_union(call, lists, act, gated, groups)
    down_union(call, lists, gated, rows, groups)
    combine(rows, call.ids, call.top_k_weights, call.out)


def run_dense(call: Call) -> None:
    buffers, weights = call.buffers, call.weights
    bias = weights.gate_up_bias is not None
    groups = grouped(call)
    neurons = buffers.of_pairs("union neurons", weights.neurons, call.hidden_states.dtype)
    rows = buffers.of_pairs("rows", weights.hidden, torch.float32)
    finish: Epilogue = "gate" if weights.gated else "act"
    if weights.gated:
        matrix = gate_up_matrix(weights.gate_up, interleaved=weights.interleaved, finish="gate", bias=bias)
    else:
        matrix = rows_matrix(weights.gate_up, bias=bias)
    plain_product(
        call.hidden_states,
        weights.gate_up,
        matrix,
        neurons,
        groups,
        biases=weights.gate_up_bias,
        gate=weights.gate,
        finish=finish,
        pairs_a_row=call.top_k,
        threshold=call.threshold,
    )
    plain_product(neurons, weights.down_t, rows_matrix(weights.down_t, transposed=True, bias=bias), rows, groups, biases=weights.down_bias)
    combine(rows, call.ids, call.top_k_weights, call.out)


PATHS: Mapping[str, Callable[[Call], None]] = {
    "pair": run_pair,
    "ordered": lambda call: run_pair(call, ordered=True),
    "union": run_union,
    "dense": run_dense,
    "grouped_mm": run_grouped_mm,
}
DENSE_PATHS = ("dense", "grouped_mm")
