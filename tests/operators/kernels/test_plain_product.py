"""Grouped products over experts as checkpoints store them: the dense layer of the sparse operator, and its parts."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch
from support.kernel_cases import relative_error
from support.sparse_cases import sparse_case
from support.triton_cases import DEVICE, ROUNDED

from moegraft.operators.kernels.epilogue import Threshold, combine
from moegraft.operators.kernels.plain_product import gate_up_matrix, plain_product, rows_matrix
from moegraft.operators.kernels.routing import PairGroups, group_pairs


@pytest.mark.parametrize("transposed", [False, True], ids=["down (E, H, I)", "down (E, I, H)"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["gate first", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_pairs", [16, 32])
def test_a_dense_layer(block_pairs: int, dtype: torch.dtype, interleaved: bool, transposed: bool) -> None:
    if dtype == torch.float32 and block_pairs > 16:
        pytest.skip("float32 has blocks of 16")
    case = sparse_case(9, 2, 3, 72, 40, dtype, interleaved=interleaved, bias=True).on_device()
    weights, pairs = case.weights, case.ids.numel()
    groups = PairGroups.allocate(pairs, weights.num_experts, block_pairs, torch.device(DEVICE))
    group_pairs(case.ids, weights.num_experts, groups)
    neurons = torch.empty(pairs, weights.neurons, dtype=dtype, device=DEVICE)
    gate_up = gate_up_matrix(weights.gate_up, interleaved=interleaved, finish="gate", bias=True)
    counts = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    threshold = Threshold(torch.zeros(1, device=DEVICE), counts)
    plain_product(
        case.hidden_states,
        weights.gate_up,
        gate_up,
        neurons,
        groups,
        biases=weights.gate_up_bias,
        gate=weights.gate,
        finish="gate",
        pairs_a_row=2,
        threshold=threshold,
    )
    down = weights.down_t if transposed else weights.down_t.transpose(1, 2).contiguous()
    rows = torch.empty(pairs, weights.hidden, device=DEVICE)
    plain_product(neurons, down, rows_matrix(down, transposed=transposed, bias=True), rows, groups, biases=weights.down_bias)
    out = torch.empty_like(case.hidden_states, dtype=torch.float32)
    combine(rows, case.ids, case.top_k_weights, out)
    assert relative_error(out.cpu(), case.reference(0.0).cpu()) <= ROUNDED[dtype]
    assert counts.tolist() == [pairs * weights.neurons] * 2
