"""The gradients of the kernels' inputs against autograd through the eager reference, on every instruction set of this machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.kernel_cases import WEIGHT_TYPES, Layer, as_array, make_batch, make_layer, make_stored_layer

from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts, PackedLinear, Runtime, activations
from moegraft.operators.reference import reference_gate
from moegraft.operators.weight_formats import STORED_FORMATS

SHAPES = [
    # tokens, top_k, experts, hidden, intermediate
    (1, 2, 4, 64, 64),  # one token
    (1, 1, 1, 32, 32),  # one block of everything
    (7, 4, 8, 72, 40),  # H and I are multiples of no block
    (3, 2, 4, 33, 17),  # odd sizes
    (2, 2, 2, 5, 3),  # smaller than one group
    (5, 4, 4, 64, 96),  # K = E: every expert has every token
    (70, 3, 5, 128, 64),  # several tiles an expert, and the matrix kernel
    (64, 1, 16, 64, 32),  # some experts with no token
    (9, 2, 2, 40, 1100),  # gate and up rows in two parts
]
# The least cosine with float64 over all elements of a gradient, with float32 activations; those of integers are rounded to 8 bits, and
# expanded to bfloat16 in front of matrix kernels.
COSINE = {"float32": 1 - 1e-9, "float16": 1 - 1e-9, "bfloat16": 1 - 1e-9, "int8": 0.9995, "int4": 0.9995}
HALF_COSINE = 0.9995


def cosine(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(found.double().flatten(), expected.double().flatten(), 0))


def gradients(
    runtime: Runtime, packed: PackedExperts, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor], gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the hidden states (T, H) and of the routing weights (T, K)."""
    x, index, weights = batch
    hidden_gradient, weight_gradients = torch.full_like(x, float("nan")), torch.full_like(weights, float("nan"))
    arrays = as_array(x), index.numpy(), weights.numpy(), as_array(gradient), as_array(hidden_gradient), weight_gradients.numpy()
    runtime.experts_gradient(packed, *arrays)
    return hidden_gradient, weight_gradients


def check(runtime: Runtime, layer: Layer, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor], least: float) -> None:
    x, index, weights = batch
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(x.dtype)
    leaves = x.double().requires_grad_(), weights.double().requires_grad_()
    layer.reference(leaves[0], index, leaves[1]).backward(gradient.double())
    for found, leaf in zip(gradients(runtime, layer.packed, batch, gradient), leaves, strict=True):
        expected = leaf.grad
        assert expected is not None and found.isfinite().all()
        if expected.norm() > 0 or found.norm() > 0:
            assert cosine(found, expected) >= least
            assert abs(float(found.double().norm() / expected.norm()) - 1) <= 2 * (1 - least) ** 0.5  # a cosine knows no length


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_experts(runtime: Runtime, weight_type: str, shape: tuple[int, ...]) -> None:
    tokens, top_k, num_experts, hidden, intermediate = shape
    layer = make_layer(weight_type, num_experts, hidden, intermediate)
    check(runtime, layer, make_batch(tokens, top_k, layer), COSINE[weight_type])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_half_activations(runtime: Runtime, weight_type: str, dtype: torch.dtype) -> None:
    for tokens in (2, 40):  # by tiles, and by the matrix kernel
        layer = make_layer(weight_type, 4, 136, 72)
        check(runtime, layer, make_batch(tokens, 3, layer, dtype), HALF_COSINE)


@pytest.mark.parametrize("name", sorted(STORED_FORMATS))
def test_formats_of_files(runtime: Runtime, name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer = make_stored_layer(name, 2, 256, 256, random=True)
        check(runtime, layer, make_batch(20, 2, layer, dtype), 0.999)


@pytest.mark.parametrize(
    ("weights", "hidden", "intermediate"),
    [
        ("q4_k+int8", 256, 288),
        ("int4+q6_k", 96, 512),
        ("fp8+nvfp4", 384, 128),  # odd numbers of blocks of 128 columns
    ],
    ids=str,
)
def test_gate_and_down_of_different_types(runtime: Runtime, weights: str, hidden: int, intermediate: int) -> None:
    layer = make_stored_layer(weights, 2, hidden, intermediate)
    check(runtime, layer, make_batch(20, 2, layer, torch.bfloat16), HALF_COSINE)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("activation", activations())
def test_activations_and_biases(runtime: Runtime, activation: str, gated: bool) -> None:
    for spec in (GateSpec(activation), GateSpec(activation, alpha=1.702)):
        layer = make_layer("float32", 3, 48, 40, gated=gated, bias=True, spec=spec)
        check(runtime, layer, make_batch(6, 2, layer), COSINE["float32"])


@pytest.mark.parametrize(
    "spec",
    [
        GateSpec("silu", alpha=1.702, gate_limit=7.0, up_limit=7.0, up_offset=1.0),  # GPT-OSS
        GateSpec("silu", gate_limit=0.3, act_limit=0.2, up_limit=0.1, up_offset=0.5),  # every limit is met
        GateSpec("gelu_tanh", act_limit=0.0),  # act is at most zero
    ],
    ids=str,
)
def test_gate_limits(runtime: Runtime, spec: GateSpec) -> None:
    layer = make_layer("float32", 3, 48, 40, bias=True, spec=spec)
    check(runtime, layer, make_batch(6, 2, layer), COSINE["float32"])


def test_padded_slots_have_no_gradient(runtime: Runtime) -> None:
    layer = make_layer()
    x, index, weights = make_batch(6, 3, layer)
    index[:, 1] = -1
    index[2, 0] = layer.shape.num_experts
    index[4] = -1  # a token with no expert at all
    check(runtime, layer, (x, index, weights), COSINE["float32"])
    weights[:, 1] = float("nan")  # the weight of a padded slot is not read
    hidden, routing = gradients(runtime, layer.packed, (x, index, weights), torch.ones_like(x))
    assert hidden.isfinite().all() and not hidden[4].any()
    assert not routing[:, 1].any() and routing[2, 0] == 0 and not routing[4].any()


def check_adapters(runtime: Runtime, layer: Layer, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor], least: float) -> None:
    """Compare a pass with what adapters add to gate and up, and to the activations' gradients, with autograd through the formula."""
    x, index, weights = batch
    shape, generator = layer.shape, torch.Generator().manual_seed(6)
    parts = ("gate", "up") if shape.gated else ("up",)
    gate_up = torch.randn(*index.shape, shape.intermediate * len(parts), generator=generator)
    added = torch.randn(*index.shape, shape.intermediate, generator=generator)
    gradient = torch.randn(x.shape, generator=generator).to(x.dtype)
    leaves = [each.double().requires_grad_() for each in (x, gate_up, weights)]
    rows = dict(zip(parts, leaves[1].chunk(len(parts), dim=-1), strict=True))
    expected, objective = torch.zeros(x.shape, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    activations = torch.zeros(added.shape, dtype=torch.float64)
    for expert in range(shape.num_experts):
        tokens, places = (index == expert).nonzero(as_tuple=True)
        biases = {part: each[expert].double() for part, each in layer.biases.items()}
        seen = {part: each[expert].double() for part, each in layer.seen.items()}
        found = {part: leaves[0][tokens] @ seen[part].T + rows[part][tokens, places] + biases.get(part, 0) for part in parts}
        neurons = reference_gate(layer.spec, found.get("gate"), found["up"])
        share, down = leaves[2][tokens, places], neurons @ seen["down"].T + biases.get("down", 0)
        expected.index_add_(0, tokens, (share[:, None] * down).detach())
        objectives = (down * gradient[tokens].double()).sum(-1) + (neurons * added[tokens, places].double()).sum(-1)
        objective = objective + share @ objectives
        activations[tokens, places] = neurons.detach()
    objective.backward()
    out, given = torch.full_like(x, float("nan")), torch.zeros_like(added)
    runtime.adapted_forward(layer.packed, as_array(x), index.numpy(), weights.numpy(), as_array(out), gate_up=gate_up, activations=given)
    pairs = [(out, expected), (given, activations)]
    results = torch.full_like(x, float("nan")), torch.full_like(weights, float("nan")), torch.zeros_like(added), torch.zeros_like(gate_up)
    exchanged = {"gate_up": gate_up, "activation_gradients": added, "activations": results[2], "gate_up_gradients": results[3]}
    runtime.experts_gradient(layer.packed, x, index, weights, gradient, *results[:2], **exchanged)
    pairs += zip(results, (leaves[0].grad, leaves[2].grad, activations, leaves[1].grad), strict=True)
    for mine, wanted in pairs:
        assert wanted is not None and mine.isfinite().all()
        assert cosine(mine, wanted) >= least
        assert abs(float(mine.double().norm() / wanted.norm()) - 1) <= 2 * (1 - least) ** 0.5


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize("shape", [(7, 4, 8, 72, 40), (3, 2, 4, 33, 17), (70, 3, 5, 128, 64)], ids=str)
def test_what_adapters_add(runtime: Runtime, weight_type: str, shape: tuple[int, ...]) -> None:
    tokens, top_k, num_experts, hidden, intermediate = shape
    layer = make_layer(weight_type, num_experts, hidden, intermediate)
    batch = make_batch(tokens, top_k, layer)
    batch[1][0, 1] = -1  # a padded slot
    check_adapters(runtime, layer, batch, 0.999 if weight_type.startswith("int") else COSINE[weight_type])


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
def test_what_adapters_add_to_other_gates(runtime: Runtime, gated: bool) -> None:
    specs = [GateSpec("silu", alpha=1.702, gate_limit=1.0, up_limit=1.5, up_offset=1.0)] if gated else [GateSpec("relu2"), GateSpec("silu")]
    for spec in specs:
        layer = make_layer("float32", 3, 48, 40, gated=gated, bias=True, spec=spec)
        check_adapters(runtime, layer, make_batch(6, 2, layer), COSINE["float32"])


def test_adapters_of_several_passes_and_of_half_activations(runtime: Runtime) -> None:
    layer = make_layer("float32", 3, 32, 32)
    check_adapters(runtime, layer, make_batch(2050, 1, layer), COSINE["float32"])
    for dtype in (torch.float16, torch.bfloat16):
        layer = make_layer("int8", 4, 136, 72)
        check_adapters(runtime, layer, make_batch(40, 3, layer, dtype), 0.999)


def test_no_tokens_and_more_than_a_pass_has(runtime: Runtime) -> None:
    layer = make_layer("float32", 3, 32, 32)
    check(runtime, layer, make_batch(2049, 2, layer), COSINE["float32"])
    hidden, routing = gradients(runtime, layer.packed, make_batch(0, 2, layer), torch.ones(0, 32))
    assert (hidden.shape, routing.shape) == ((0, 32), (0, 2))


def test_threads_do_not_change_a_bit() -> None:
    for weight_type in ("int8", "bfloat16"):
        layer = make_layer(weight_type, 4, 96, 160)
        batch = make_batch(60, 2, layer, torch.bfloat16)
        one, three = (gradients(Runtime(threads=threads), layer.packed, batch, batch[0]) for threads in (1, 3))
        assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize(
    ("tokens", "rows", "cols"),
    [
        (1, 32, 32),
        (3, 33, 17),  # odd sizes
        (40, 96, 72),
        (5, 2100, 40),  # rows in two parts
        (300, 64, 300),  # two segments of tokens
        (0, 8, 8),
    ],
    ids=str,
)
def test_linear(runtime: Runtime, weight_type: str, tokens: int, rows: int, cols: int) -> None:
    generator = torch.Generator().manual_seed(0)
    packed = PackedLinear(rows, cols, weight_type)
    packed.pack(torch.randn(rows, cols, generator=generator).numpy())
    packed.pack_bias(np.ones(rows, np.float32))  # has no part in it
    for dtype in (torch.float32, torch.bfloat16):
        gradient = torch.randn(tokens, rows, generator=generator).to(dtype)
        found = gradient.new_full((tokens, cols), float("nan"))
        runtime.linear_gradient(packed, gradient, found)
        expected = gradient.double() @ torch.from_numpy(packed.unpack()).double()
        assert tokens == 0 or cosine(found, expected) >= (COSINE[weight_type] if dtype == torch.float32 else HALF_COSINE)


def test_arguments_are_checked(runtime: Runtime) -> None:
    sparse = PackedExperts(ExpertsShape(2, 32, 32), GateSpec(), "float32", sparse=True)
    layer = make_layer()
    batch = make_batch(4, 2, layer)
    with pytest.raises(ValueError, match="dense layout, found the sparse one"):
        gradients(runtime, sparse, make_batch(4, 2, make_layer(hidden=32)), torch.ones(4, 32))
    with pytest.raises(ValueError, match=r"gradient: expected shape \(4, 64\)"):
        gradients(runtime, layer.packed, batch, torch.ones(3, 64))
    with pytest.raises(TypeError, match="gradient"):
        gradients(runtime, layer.packed, batch, torch.ones(4, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="is used before its"):
        gradients(runtime, PackedExperts(layer.shape, GateSpec(), "float32"), batch, torch.ones(4, 64))
    with pytest.raises(ValueError, match=r"gate_up: expected shape \(4, 2, 128\)"):
        arrays = as_array(batch[0]), batch[1].numpy(), batch[2].numpy(), as_array(torch.empty_like(batch[0]))
        runtime.adapted_forward(layer.packed, *arrays, gate_up=torch.zeros(4, 2, 64))
    with pytest.raises(ValueError, match="adapted_forward: expected experts in the dense layout"):
        few = make_batch(4, 2, make_layer(hidden=32))
        runtime.adapted_forward(sparse, as_array(few[0]), few[1].numpy(), few[2].numpy(), as_array(torch.empty_like(few[0])))
    with pytest.raises(ValueError, match="before the weights were packed"):
        runtime.linear_gradient(PackedLinear(32, 32, "int8"), torch.ones(2, 32), torch.ones(2, 32))
