"""Low-rank adapters of routed experts (LoRA, Hu et al. 2021, equation 3) beside packed weights, with own matrices for each expert.

The kernel computes the packed weights' products and the activation. It takes what adapters add to gate and up before the activation, and
returns the activations, from which the adapters of the down projection are computed here; the backward pass exchanges the gradients of
both. Products of adapters are PyTorch's, expert by expert, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from moegraft.operators.cpu import as_array

if TYPE_CHECKING:
    from moegraft.cpu_backend import PackedExperts, Runtime

Factors = tuple[torch.Tensor, torch.Tensor]  # of a projection: A (E, R, inputs) and B (E, outputs, R), scaled; B A is added to its weight
Inputs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def adapted_experts(
    runtime: Runtime,
    packed: PackedExperts,
    inputs: Inputs,
    call: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    gate_up: Factors | None,
    down: Factors | None,
) -> torch.Tensor:
    """Return the output (T, H) of experts with adapters, which is differentiable with respect to all inputs but the packed weights.

    A pass keeps its inputs alone; the backward pass computes the rest again.

    Args:
        inputs: returns the arrays that the kernel reads for `call`.
        call: hidden states (T, H), ids (T, K) and routing weights (T, K); ids of -1 and E are padded slots.
        gate_up: the outputs are the rows of the gate, then those of up; those of up alone without a gate.
        down: the outputs are those of the hidden states.
    """
    none = call[0].new_empty(0)
    factors = [*(gate_up or (none, none)), *(down or (none, none))]
    out: torch.Tensor = _AdaptedExperts.apply(runtime, packed, inputs, *call, *factors)  # type: ignore[no-untyped-call]
    return out


class _AdaptedExperts(torch.autograd.Function):
    """Of `adapted_experts`; factors without elements are those of a projection without adapters. The context is torch's, without a type."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator] # sums are float32
    def forward(ctx: Any, runtime: Runtime, packed: PackedExperts, inputs: Inputs, *tensors: torch.Tensor) -> torch.Tensor:
        hidden, index, weights, gate_up_a, gate_up_b, down_a, down_b = tensors
        ctx.save_for_backward(*tensors)
        ctx.runtime, ctx.packed, ctx.inputs = runtime, packed, inputs
        tokens, ids, shares = inputs(hidden, index, weights)
        pairs = list(_pairs(ids, packed.shape.num_experts))
        terms = _terms(packed, tokens, ids, pairs, gate_up_a, gate_up_b)
        activations = tokens.new_zeros((*ids.shape, packed.shape.intermediate), dtype=torch.float32) if down_a.numel() else None
        out = torch.empty_like(tokens)
        arrays = as_array(tokens), ids.numpy(), as_array(shares), as_array(out)
        runtime.adapted_forward(packed, *arrays, gate_up=terms, activations=activations)
        if activations is not None:
            added = torch.zeros(tokens.shape, dtype=torch.float32)
            acted = activations.flatten(0, 1)
            for expert, slots, places in pairs:
                products = acted[slots] @ down_a[expert].float().T @ down_b[expert].float().T
                added.index_add_(0, places, shares.flatten()[slots, None] * products)
            out = (out.float() + added).to(out.dtype)
        return out.to(hidden.device, hidden.dtype)

    @staticmethod
    @torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, index, weights, gate_up_a, gate_up_b, down_a, down_b = ctx.saved_tensors
        packed = ctx.packed
        tokens, ids, shares = ctx.inputs(hidden, index, weights)
        of_output = gradients[0].to("cpu", tokens.dtype).contiguous()
        pairs = list(_pairs(ids, packed.shape.num_experts))
        given, flat_shares = of_output.float(), shares.flatten()[:, None]
        terms = _terms(packed, tokens, ids, pairs, gate_up_a, gate_up_b)
        neurons = (*ids.shape, packed.shape.intermediate)
        exchanged: dict[str, torch.Tensor] = {}
        if down_a.numel():
            exchanged = {name: torch.zeros(neurons, dtype=torch.float32) for name in ("activation_gradients", "activations")}
            for expert, slots, places in pairs:
                exchanged["activation_gradients"].flatten(0, 1)[slots] = given[places] @ down_b[expert].float() @ down_a[expert].float()
        if terms is not None:
            exchanged["gate_up_gradients"] = torch.zeros_like(terms)
        of_tokens, of_weights = torch.empty_like(tokens), torch.empty_like(shares)
        ctx.runtime.experts_gradient(packed, tokens, ids, shares, of_output, of_tokens, of_weights, gate_up=terms, **exchanged)
        of_factors = [torch.zeros_like(each, dtype=torch.float32) for each in (gate_up_a, gate_up_b, down_a, down_b)]
        added = torch.zeros(tokens.shape, dtype=torch.float32) if terms is not None else None
        x = tokens.float()
        for expert, slots, places in pairs:
            if down_a.numel():
                acted, weighted = exchanged["activations"].flatten(0, 1)[slots], flat_shares[slots] * given[places]
                of_factors[2][expert] = (weighted @ down_b[expert].float()).T @ acted
                of_factors[3][expert] = weighted.T @ (acted @ down_a[expert].float().T)
            if added is not None:
                a, rows = gate_up_a[expert].float(), exchanged["gate_up_gradients"].flatten(0, 1)[slots]
                inner = rows @ gate_up_b[expert].float()
                of_factors[0][expert] = inner.T @ x[places]
                of_factors[1][expert] = rows.T @ (x[places] @ a.T)
                added.index_add_(0, places, inner @ a)
        of_hidden = of_tokens if added is None else of_tokens.float() + added
        typed = [each.to(factor.dtype) for each, factor in zip(of_factors, (gate_up_a, gate_up_b, down_a, down_b), strict=True)]
        found = of_hidden.to(hidden.device, hidden.dtype), None, of_weights.to(weights.device, weights.dtype)
        return None, None, None, *found, *typed


def _terms(
    packed: PackedExperts,
    tokens: torch.Tensor,
    ids: torch.Tensor,
    pairs: list[tuple[int, torch.Tensor, torch.Tensor]],
    a: torch.Tensor,
    b: torch.Tensor,
) -> torch.Tensor | None:
    """Return what adapters add to the gate and up rows of each slot, (T, K, rows) float32; None where there are none."""
    if not a.numel():
        return None
    x, terms = tokens.float(), torch.zeros((*ids.shape, b.shape[1]), dtype=torch.float32)
    for expert, slots, places in pairs:
        terms.flatten(0, 1)[slots] = x[places] @ a[expert].float().T @ b[expert].float().T
    return terms


def _pairs(ids: torch.Tensor, num_experts: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield each expert that has tokens, with its slots and their tokens, (n,) int64 each; padded slots are no expert's."""
    flat = ids.flatten()
    slots = flat.argsort(stable=True)
    # Also tells a recording that Python reads the routing: `bincount` is among its obstacles.
    counts = torch.bincount((flat + 1).clamp(0, num_experts + 1), minlength=num_experts + 2).tolist()
    first = counts[0]
    for expert, count in enumerate(counts[1:-1]):
        if count:
            mine = slots[first : first + count]
            yield expert, mine, mine // ids.shape[1]
        first += count
