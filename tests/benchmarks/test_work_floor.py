"""The work of a layer of experts: each weight that is needed counts once, and shares of all neurons count the shared expert's."""

from __future__ import annotations

import pytest
import torch
from support import import_benchmark

floor = import_benchmark("harness.work_floor")


def test_work_counts_each_weight_once() -> None:
    shape = floor.Shape(hidden=64, intermediate=8, num_experts=4, top_k=2, shared_intermediate=8)
    ids = torch.tensor([[0, 1], [1, 2], [0, 2]])
    row_bytes = 64 * 2
    assert floor.dense_work(ids, shape).read_bytes == 3 * 3 * 8 * row_bytes
    assert floor.dense_work(ids, shape).flops == 2 * 3 * 6 * 8 * 64
    active = torch.zeros(3, 2, 8, dtype=torch.bool)
    active[0, 1, 5] = active[1, 0, 5] = True  # two tokens share a neuron of expert 1
    active[2, 1, 0] = True
    work = floor.sparse_work(ids, active, shape)
    assert work.read_bytes == 3 * 8 * row_bytes + 2 * 2 * row_bytes
    assert work.flops == 2 * 6 * 8 * 64 + 4 * 3 * 64


def test_total_shares_count_the_shared_expert() -> None:
    assert floor.SHAPES["qwen3.5-35b-a3b"].routed(0.85) == pytest.approx(0.85 * 9 / 8)
