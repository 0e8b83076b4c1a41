"""Shared cases of the kernel tests: a layer of random experts, its reference result, and one tolerance table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts, Runtime
from moegraft.operators.reference import reference_experts
from moegraft.operators.weight_formats import STORED_FORMATS

WEIGHT_TYPES = ("float32", "float16", "bfloat16", "int8", "int4")
PARTS = ("gate", "up", "down")

# Largest relative error (Frobenius norm) against float64 on the same dequantised weights, by weight type with float32 activations.
# Sequential sums of a thousand float32 products have errors of up to 1e-6.
# int8 and int4 quantise activations to 8 bits; these are the errors of sums of a few dozen products, while test_quantised_precision
# requires 37 dB.
TOLERANCE = {"float32": 2e-6, "float16": 2e-6, "bfloat16": 2e-6, "int8": 2e-2, "int4": 2e-2}
# The additional error of rounding the output and, for bfloat16, the activations between the projections.
ROUNDING = {torch.float32: 0.0, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def as_array(tensor: torch.Tensor) -> NDArray[np.generic]:
    """Return a tensor as an array, with bfloat16 as its bits."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def sqnr_db(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(20 * torch.log10(expected.norm() / (found.double() - expected).norm()))


def expected_choice(logits: torch.Tensor, top_k: int, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids, best first, and weights by the definitions, in float64."""
    score = options.get("score", "softmax")
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "chosen_softmax": logits}[score]
    bias = options.get("choice_bias")
    choice = scores if bias is None else scores + torch.from_numpy(bias).double()
    groups, kept = options.get("groups", 1), options.get("kept_groups", 1)
    in_groups = choice.reshape(len(choice), groups, choice.shape[-1] // groups)
    best = in_groups.sort(-1, descending=True).values
    of_group = best[..., 0] if options.get("group_score") == "largest" else best[..., :2].sum(-1)
    seen = torch.zeros_like(of_group).scatter(1, of_group.topk(kept).indices, 1.0).bool()
    choice = in_groups.masked_fill(~seen[..., None], -torch.inf).reshape(choice.shape)
    index = choice.topk(top_k).indices
    weights = scores.gather(-1, index)
    if score == "chosen_softmax":
        weights = weights.softmax(-1)
    elif options.get("normalise"):
        weights = weights / weights.sum(-1, keepdim=True)
    return index, weights * options.get("scale", 1.0)


@dataclass
class Layer:
    """Random experts: their original weights, and their packed form in a weight type."""

    shape: ExpertsShape
    spec: GateSpec
    weights: dict[str, torch.Tensor]
    biases: dict[str, torch.Tensor]
    packed: PackedExperts
    seen: dict[str, torch.Tensor] = field(default_factory=dict)  # the weights as the kernel sees them, dequantised

    def reference(
        self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, original: bool = False, threshold: float = 0.0
    ) -> torch.Tensor:
        source = self.weights if original else self.seen
        parts = (source.get("gate"), source["up"], source["down"])
        biases = {f"{part}_bias": self.biases.get(part) for part in PARTS}
        return reference_experts(x, index, weights, *parts, self.spec, **biases, threshold=threshold)

    def forward(
        self, runtime: Runtime, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, threshold: float = 0.0
    ) -> torch.Tensor:
        out = torch.full_like(x, float("nan"))
        runtime.forward(self.packed, as_array(x), index.numpy(), weights.numpy(), as_array(out), threshold=threshold)
        return out


def make_layer(
    weight_type: str = "float32",
    num_experts: int = 4,
    hidden: int = 64,
    intermediate: int = 64,
    *,
    gated: bool = True,
    bias: bool = False,
    spec: GateSpec | None = None,
    sparse: bool = False,
    seed: int = 0,
) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    shape = ExpertsShape(num_experts, hidden, intermediate, gated, bias)
    spec = spec or GateSpec("silu")
    packed = PackedExperts(shape, spec, weight_type, sparse=sparse)
    parts = PARTS if gated else PARTS[1:]
    size = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    weights = {part: torch.randn(num_experts, *size[part], generator=generator) / size[part][1] ** 0.5 for part in parts}
    biases = {part: torch.randn(num_experts, size[part][0], generator=generator) for part in parts} if bias else {}
    for expert in range(num_experts):
        for part in parts:
            packed.pack(expert, part, weights[part][expert].numpy())
            if bias:
                packed.pack_bias(expert, part, biases[part][expert].numpy())
    layer = Layer(shape, spec, weights, biases, packed)
    layer.seen = {part: torch.stack([torch.from_numpy(packed.unpack(e, part)) for e in range(num_experts)]) for part in parts}
    return layer


def make_stored_layer(
    weight_type: str, num_experts: int, hidden: int, intermediate: int, *, gated: bool = True, bias: bool = False, random: bool = False
) -> Layer:
    """Pack blocks of files, and parts of other types from floats. Skips the test without the package gguf."""
    from support.k_quants import any_blocks, dequantised, quantise

    rng = np.random.default_rng(0)
    packed = PackedExperts(ExpertsShape(num_experts, hidden, intermediate, gated, bias), GateSpec(), weight_type)
    sizes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    parts = PARTS if gated else PARTS[1:]
    weights, biases = {}, {}
    for part in parts:
        kind, size = packed.weight_type_of(part), (num_experts, *sizes[part])
        values = rng.standard_normal(size, dtype=np.float32) / np.float32(size[-1] ** 0.5)
        if kind in STORED_FORMATS:
            blocks = any_blocks(size, kind, seed=len(weights)) if random else quantise(values, kind)
            values = dequantised(blocks, kind)
        for expert in range(num_experts):
            if kind in STORED_FORMATS:
                packed.pack_blocks(expert, part, blocks[expert])
            else:
                packed.pack(expert, part, values[expert])
        if bias:
            biases[part] = torch.from_numpy(rng.standard_normal(size[:2], dtype=np.float32))
            for expert in range(num_experts):
                packed.pack_bias(expert, part, biases[part][expert].numpy())
        weights[part] = torch.from_numpy(values)
    layer = Layer(packed.shape, packed.gate_spec, weights, biases, packed)
    layer.seen = {part: torch.stack([torch.from_numpy(packed.unpack(e, part)) for e in range(num_experts)]) for part in parts}
    return layer


def make_batch(
    tokens: int, top_k: int, layer: Layer, dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states (T, H), distinct experts of each token (T, K), and strongly non-uniform routing weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, layer.shape.hidden, generator=generator).to(dtype)
    scores = torch.rand(tokens, layer.shape.num_experts, generator=generator)
    index = scores.topk(top_k, dim=-1).indices.contiguous()
    weights = torch.rand(tokens, top_k, generator=generator).pow(4) + 1e-3
    return x, index, weights
