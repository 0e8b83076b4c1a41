"""The sparse layout equals a dense layer with a threshold of zero, and otherwise the reference, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.kernel_cases import ROUNDING, TOLERANCE, WEIGHT_TYPES, Layer, make_batch, make_layer, relative_error, sqnr_db

from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts, Runtime

SHAPES = [
    # tokens, top_k, experts, hidden, intermediate
    (1, 2, 4, 64, 64),  # decode; most lanes of the one chunk are padding
    (1, 2, 2, 1056, 32),  # three chunks of 512 columns, the last of one group and a half
    (9, 2, 4, 33, 40),  # a group that is partly padding
    (30, 3, 3, 544, 72),  # several tiles; every expert has most tokens
    (0, 1, 2, 32, 32),  # no token
]


def threshold_for(layer, x: torch.Tensor, share: float) -> float:  # type: ignore[no-untyped-def]
    """Return a threshold that about `share` of the neurons do not reach, in a gap between two values, so that rounding has no effect."""
    source = layer.seen["gate"] if "gate" in layer.seen else layer.seen["up"]
    rows = torch.einsum("eih,th->eti", source.double(), x.double())
    acted = (rows * torch.sigmoid(rows)).abs().flatten().sort().values
    middle = int(share * len(acted))
    near = acted[max(0, middle - 200) : middle + 200]
    gap = int((near[1:] - near[:-1]).argmax())
    return float((near[gap] + near[gap + 1]) / 2)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_threshold_zero_is_the_dense_layer(runtime: Runtime, weight_type: str, shape: tuple[int, ...], gated: bool) -> None:
    tokens, top_k, num_experts, hidden, intermediate = shape
    layer = make_layer(weight_type, num_experts, hidden, intermediate, gated=gated, sparse=True)
    batch = make_batch(tokens, top_k, layer)
    assert relative_error(layer.forward(runtime, *batch), layer.reference(*batch)) <= TOLERANCE[weight_type]


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("weight_type", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_inactive_neurons_count_as_zero(runtime: Runtime, weight_type: str, share: float, gated: bool) -> None:
    layer = make_layer(weight_type, 4, 544, 72, gated=gated, sparse=True)
    x, index, weights = make_batch(6, 2, layer)
    threshold = threshold_for(layer, x, share)
    expected = layer.reference(x, index, weights, threshold=threshold)
    assert relative_error(expected, layer.reference(x, index, weights)) > 1e-3  # the threshold changes the result
    assert relative_error(layer.forward(runtime, x, index, weights, threshold), expected) <= 2e-6


@pytest.mark.parametrize("weight_type", ["int8", "int4"])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "hidden", "intermediate", "share"),
    [
        (4, 2, 4, 512, 256, 0.8),
        (41, 2, 2, 544, 136, 0.5),  # most are needed by most tokens: rows become blocks of the dense layout, the last of each part short
        (41, 2, 2, 544, 136, 0.9),
    ],
)
def test_quantised_sparse_stays_close(
    runtime: Runtime, weight_type: str, tokens: int, top_k: int, experts: int, hidden: int, intermediate: int, share: float
) -> None:
    # Quantised activations may move a neuron across the threshold, where its effect is small.
    layer = make_layer(weight_type, experts, hidden, intermediate, sparse=True)
    x, index, weights = make_batch(tokens, top_k, layer)
    threshold = threshold_for(layer, x, share)
    expected = layer.reference(x, index, weights, threshold=threshold)
    assert relative_error(layer.forward(runtime, x, index, weights, threshold), expected) <= 6e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_activations_and_biases(runtime: Runtime, dtype: torch.dtype) -> None:
    spec = GateSpec("silu", alpha=1.702, gate_limit=7.0, act_limit=0.4, up_limit=0.5, up_offset=1.0)
    layer = make_layer("bfloat16", 3, 72, 40, bias=True, spec=spec, sparse=True)
    batch = make_batch(5, 2, layer, dtype)
    assert relative_error(layer.forward(runtime, *batch), layer.reference(*batch)) <= TOLERANCE["bfloat16"] + ROUNDING[dtype]


@pytest.mark.parametrize("weight_type", ["float32", "bfloat16", "int8", "int4"])
def test_a_token_gets_nothing_from_the_neurons_that_only_others_need(runtime: Runtime, weight_type: str) -> None:
    layer = make_layer(weight_type, 1, 544, 136, sparse=True)
    x, index, weights = make_batch(40, 1, layer)
    few = torch.arange(40) % 4 == 1
    x[few] *= 1e-3
    acted = acted_by_hand(layer, x, index).abs()
    threshold = float(acted[few].max() * 2)
    assert (acted[~few] >= threshold).double().mean() > 0.9  # so that all neurons are computed for all tokens
    out = layer.forward(runtime, x, index, weights, threshold)
    assert bool((out[few] == 0).all()) and bool((out[~few] != 0).any(1).all())
    expected = layer.reference(x, index, weights, threshold=threshold)
    assert relative_error(out, expected) <= TOLERANCE[weight_type]


def test_without_active_neurons_the_output_is_the_bias(runtime: Runtime) -> None:
    layer = make_layer("float32", 2, 40, 32, bias=True, sparse=True)
    x, index, weights = make_batch(2, 1, layer)
    out = layer.forward(runtime, x, index, weights, threshold=1e6)
    torch.testing.assert_close(out, weights * layer.biases["down"][index[:, 0]])


def test_values_that_are_not_finite_are_not_skipped(runtime: Runtime) -> None:
    layer = make_layer("float32", 2, 64, 40, sparse=True)
    x, index, weights = make_batch(3, 2, layer)
    x[1, 3] = float("nan")
    out = layer.forward(runtime, x, index, weights, threshold=0.1)
    assert torch.isnan(out[1]).all()
    assert torch.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("tokens", [5, 50])
def test_thread_count_changes_no_bit(tokens: int) -> None:
    layer = make_layer("int8", 4, 1056, 96, sparse=True)
    batch = make_batch(tokens, 2, layer)
    results = [layer.forward(Runtime(threads=threads), *batch, threshold=0.05) for threads in (1, 2, 3, 7)]
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_unpacked_weights_equal_the_packed_ones(weight_type: str) -> None:
    dense, sparse = (make_layer(weight_type, 2, 96, 64, sparse=sparse) for sparse in (False, True))
    for part in ("gate", "up"):  # their groups run along H in both layouts
        assert torch.equal(dense.seen[part], sparse.seen[part])
    if weight_type.startswith("float") or weight_type == "bfloat16":
        assert torch.equal(dense.seen["down"], sparse.seen["down"])
    else:  # quantised along H: the codes of the transposed matrix
        turned = make_layer(weight_type, 2, 96, 64)
        turned.packed.pack(0, "up", sparse.weights["down"][0].T.contiguous().numpy())
        np.testing.assert_array_equal(turned.packed.unpack(0, "up"), sparse.seen["down"][0].T.numpy())


def test_packing_codes_requantises_only_down() -> None:
    rng = np.random.default_rng(0)
    packed = PackedExperts(ExpertsShape(1, 64, 32), GateSpec(), "int8", sparse=True)
    codes = {
        part: rng.integers(-127, 128, size, dtype=np.int8) for part, size in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32)))
    }
    for part, code in codes.items():
        scales = np.full((code.shape[0], code.shape[1] // 32), 0.25, np.float16)
        packed.pack_quantized(0, part, code, scales)
        error = np.abs(packed.unpack(0, part) - code * np.float32(0.25)).max()
        assert error == 0.0 if part != "down" else error <= 0.25


def test_a_dense_layout_refuses_a_threshold(runtime: Runtime) -> None:
    layer = make_layer()
    with pytest.raises(
        ValueError, match=r"need experts in the sparse layout, and these are dense; pack them with PackedExperts\(..., sparse=True\)"
    ):
        layer.forward(runtime, *make_batch(1, 1, layer), threshold=0.5)


def acted_by_hand(layer: Layer, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return activations (T, K, I) in float64; zero for padded slots."""
    source = layer.seen["gate"] if "gate" in layer.seen else layer.seen["up"]
    bias = layer.biases.get("gate" if "gate" in layer.seen else "up")
    out = torch.zeros(*index.shape, source.shape[1], dtype=torch.float64)
    for token, slot in (index >= 0).nonzero().tolist():
        expert = index[token, slot]
        rows = source[expert].double() @ x[token].double() + (0 if bias is None else bias[expert].double())
        out[token, slot] = rows * torch.sigmoid(rows)
    return out


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(1, 2, 4, 64, 64), (30, 3, 3, 544, 72), (300, 2, 3, 33, 40)], ids=str)  # the last in two passes
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
def test_activations_are_exported_and_counted(shape: tuple[int, ...], gated: bool, threads: int) -> None:
    tokens, top_k, num_experts, hidden, intermediate = shape
    layer = make_layer("float32", num_experts, hidden, intermediate, gated=gated, bias=True, sparse=True)
    x, index, weights = make_batch(tokens, top_k, layer)
    index[-1, 0] = -1
    acted = np.full((tokens, top_k, intermediate), 77.0, np.float32)
    counts = np.array([1000, 2000], np.int64)  # the kernel adds to it
    out = torch.empty_like(x)
    arrays = (layer.packed, x.numpy(), index.numpy(), weights.numpy(), out.numpy())
    threshold = 0.3
    Runtime(threads=threads).forward(*arrays, threshold=threshold, neuron_counts=counts, acted=acted)
    expected = acted_by_hand(layer, x, index)
    real = index >= 0
    found = torch.from_numpy(acted)
    torch.testing.assert_close(found[real], expected[real].float(), rtol=1e-5, atol=1e-5)
    assert bool((found[~real] == 77).all())
    assert counts.tolist() == [1000 + int((found[real].abs() >= threshold).sum()), 2000 + int(real.sum()) * intermediate]
    assert 0 < counts[0] - 1000 < counts[1] - 2000


def test_counts_of_submitted_work_and_of_no_token(runtime: Runtime) -> None:
    layer = make_layer("int8", 4, 64, 40, sparse=True)
    counts = np.zeros(2, np.int64)
    for tokens in (0, 3):
        x, index, weights = make_batch(tokens, 2, layer)
        out = torch.empty_like(x)
        ticket = runtime.submit(layer.packed, x.numpy(), index.numpy(), weights.numpy(), out.numpy(), neuron_counts=counts)
        runtime.wait(ticket)
        assert counts.tolist() == [tokens * 2 * 40] * 2  # a threshold of zero leaves no neuron out


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"neuron_counts": np.zeros(3, np.int64)}, r"neuron_counts: expected shape \(2,\) for the active neurons and all, found \(3,\)"),
        ({"neuron_counts": np.zeros(2, np.int32)}, "neuron_counts: expected dtype int64, found int32"),
        ({"acted": np.zeros((1, 1, 63), np.float32)}, r"acted: expected shape \(1, 1, 64\), found \(1, 1, 63\)"),
        ({"acted": np.zeros((1, 1, 64))}, "acted: expected dtype float32, found float64"),
    ],
)
def test_wrong_arrays_for_counts_are_refused(runtime: Runtime, keywords: dict[str, np.ndarray], message: str) -> None:  # type: ignore[type-arg]
    layer = make_layer(sparse=True)
    x, index, weights = make_batch(1, 1, layer)
    with pytest.raises((ValueError, TypeError), match=message):
        runtime.forward(layer.packed, x.numpy(), index.numpy(), weights.numpy(), torch.empty_like(x).numpy(), **keywords)


def test_a_dense_layout_counts_nothing(runtime: Runtime) -> None:
    layer = make_layer()
    x, index, weights = make_batch(1, 1, layer)
    with pytest.raises(ValueError, match="need experts in the sparse layout, and these are dense"):
        counts = np.zeros(2, np.int64)
        runtime.forward(layer.packed, x.numpy(), index.numpy(), weights.numpy(), torch.empty_like(x).numpy(), neuron_counts=counts)


MANY = [
    # tokens, top_k, experts, hidden, intermediate, share left out
    (41, 2, 2, 544, 136, 0.0),  # all tokens on both experts, two chunks, the last run of neurons short
    (41, 2, 2, 544, 136, 0.5),  # about half of the products are needed: rows are multiplied with all tokens
    (41, 2, 2, 544, 136, 0.9),  # few products are needed: tokens select their neurons
    (23, 1, 3, 70, 33, 0.7),  # an odd number of neurons, columns that are mostly padding
    (5, 2, 8, 1056, 40, 0.95),  # one or two tokens per expert, and neurons that no token needs
]


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("weight_type", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", MANY, ids=str)
def test_many_tokens_of_an_expert(runtime: Runtime, weight_type: str, shape: tuple[int, ...], gated: bool) -> None:
    tokens, top_k, num_experts, hidden, intermediate, share = shape
    layer = make_layer(weight_type, num_experts, hidden, intermediate, gated=gated, bias=True, sparse=True)
    x, index, weights = make_batch(tokens, top_k, layer)
    index[::5, 0] = -1
    threshold = biased_threshold(layer, x, index, share)
    expected = layer.reference(x, index, weights, threshold=threshold)
    assert relative_error(layer.forward(runtime, x, index, weights, threshold), expected) <= 2e-6


def biased_threshold(layer: Layer, x: torch.Tensor, index: torch.Tensor, share: float) -> float:
    """Return `threshold_for` the neurons that are computed."""
    if share == 0.0:
        return 0.0
    acted = acted_by_hand(layer, x, index)[index >= 0].abs().flatten().sort().values
    middle = int(share * len(acted))
    near = acted[max(0, middle - 50) : middle + 50]
    gap = int((near[1:] - near[:-1]).argmax())
    return float((near[gap] + near[gap + 1]) / 2)


@pytest.mark.parametrize(("weight_type", "least_db"), [("int8", 37.0), ("int4", 37.0)])
@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_quantised_rows_keep_their_precision(runtime: Runtime, weight_type: str, least_db: float, tokens: int) -> None:
    layer = make_layer(weight_type, 2, 512, 256, sparse=True)
    batch = make_batch(tokens, 2, layer)
    assert sqnr_db(layer.forward(runtime, *batch), layer.reference(*batch)) >= least_db


@pytest.mark.parametrize("weight_type", ["int8", "bfloat16"])
def test_bfloat16_activations_of_many_tokens(runtime: Runtime, weight_type: str) -> None:
    layer = make_layer(weight_type, 2, 512, 256, sparse=True)
    batch = make_batch(40, 2, layer, torch.bfloat16)
    assert relative_error(layer.forward(runtime, *batch), layer.reference(*batch)) <= TOLERANCE[weight_type] + ROUNDING[torch.bfloat16]


def test_a_token_that_is_not_finite_does_not_affect_others(runtime: Runtime) -> None:
    layer = make_layer("int8", 2, 64, 72, sparse=True)
    x, index, weights = make_batch(12, 2, layer)
    x[7, 3] = float("inf")
    out = layer.forward(runtime, x, index, weights, threshold=0.2)
    others = [token for token in range(12) if token != 7]
    assert torch.isnan(out[7]).all()
    assert torch.isfinite(out[others]).all()
