"""The form in which sparse experts lie in memory: the sketch's bytes are the CPU kernel's, and an order of neurons changes no sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.sparse_cases import sparse_case

from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts
from moegraft.operators.kernels.sparse_weights import pack_int4, sketch_of
from moegraft.operators.kernels.workspace import Buffers, Workspace, bucket_of


@pytest.mark.parametrize("sizes", [(64, 64), (40, 72), (1, 32), (33, 200)], ids=str)
def test_a_sketch_has_the_bytes_that_the_cpu_packs(sizes: tuple[int, int]) -> None:
    rows, columns = sizes
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    matrix[0] = 0.0  # a group without a scale
    packed = PackedExperts(ExpertsShape(1, columns, rows, gated=False), GateSpec("relu"), "int4")
    packed.pack(0, "up", matrix.numpy())
    found = pack_int4(matrix).numpy()
    assert np.array_equal(found, packed.buffer[: len(found)])


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_sketch_is_of_the_gate_alone(interleaved: bool) -> None:
    weights = sparse_case(interleaved=interleaved, bias=True).weights
    sketch = sketch_of(weights)
    packed = torch.stack([pack_int4(rows) for rows in weights.gate_rows()])
    assert torch.equal(sketch.packed.units, packed.view(-1).view(torch.int32))
    assert weights.gate_up_bias is not None
    assert sketch.packed.biases.data_ptr() == weights.gate_up_bias.data_ptr()
    assert (sketch.matrix.expert_words, sketch.matrix.bias_stride) == (80, 2 if interleaved else 1)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_order_of_neurons_is_free(interleaved: bool, gated: bool) -> None:
    case = sparse_case(gated=gated, interleaved=interleaved and gated, bias=True)
    before = case.reference(0.3)
    first = case.weights.gate_rows()[1, 7].clone()
    order = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(e)) for e in range(4)])
    case.weights.permute(order)
    torch.testing.assert_close(case.reference(0.3), before)
    assert torch.equal(case.weights.gate_rows()[1, int((order[1] == 7).nonzero())], first)


def test_hot_neurons_together_make_groups_sparser() -> None:
    """What the order is for: neurons that are often active in one group leave others whole groups to drop."""
    case = sparse_case(64, 1, 1, 64, 64)
    # every fourth neuron sees larger gates
    case.weights.gate_up[:, 0:64:4] *= 30
    threshold = case.threshold(0.9)
    active = case.activations() >= threshold

    def kept(active: torch.Tensor) -> float:
        return float(active.view(-1, 8, 8).any(-1).double().mean())

    order = active.sum(0).argsort(descending=True, stable=True)
    assert kept(active[:, order]) < 0.75 * kept(active)


def test_buffers_of_a_batch_size_are_made_once() -> None:
    assert [bucket_of(tokens) for tokens in (0, 1, 2, 3, 4, 5, 512, 513)] == [1, 1, 2, 4, 4, 8, 512, 1024]
    workspace = Workspace(torch.device("cpu"))
    three, four = (Buffers(workspace, tokens, 2, 4, 16, 32) for tokens in (3, 4))
    assert three.of_pairs("act", 16, torch.float32).shape == (6, 16)
    assert three.of_pairs("act", 16, torch.float32).data_ptr() == four.of_pairs("act", 16, torch.float32).data_ptr()
    assert three.done().data_ptr() != three.lengths("lengths", 8).data_ptr()
    assert not four.done().any()
    groups = four.groups(torch.bfloat16)
    assert (groups.block_pairs, groups.max_blocks, groups.pair_count) == (16, 4, 8)
    assert four.groups(torch.bfloat16).pairs.data_ptr() == groups.pairs.data_ptr()
