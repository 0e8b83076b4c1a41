"""Layers of sparse experts for the kernel tests and the operator's: random weights, a threshold that no rounding can cross."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moegraft.cpu_backend import GateSpec
from moegraft.operators.kernels.sparse_weights import SparseWeights
from moegraft.operators.reference import reference_activation, reference_experts
from support.triton_cases import DEVICE

BAND = 1e-3  # activations nearer to the threshold than this, relatively, may fall on either side of it


@dataclass(frozen=True)
class SparseCase:
    """One layer on the CPU, with tokens and their routing."""

    weights: SparseWeights
    hidden_states: torch.Tensor
    ids: torch.Tensor
    top_k_weights: torch.Tensor

    @property
    def gate_bias(self) -> torch.Tensor | None:
        return self._bias(first=True) if self.weights.gated else None

    @property
    def up_bias(self) -> torch.Tensor | None:
        return self._bias(first=False)

    def _bias(self, *, first: bool) -> torch.Tensor | None:
        bias, neurons = self.weights.gate_up_bias, self.weights.neurons
        if bias is None or not self.weights.gated:
            return bias
        if self.weights.interleaved:
            return bias[:, 0 if first else 1 :: 2]
        return bias[:, :neurons] if first else bias[:, neurons:]

    def activations(self) -> torch.Tensor:
        """`|act(gate)|` (pairs that are not padded, I) float64."""
        weights = self.weights
        token, slot = torch.where(self.ids >= 0)
        experts = self.ids[token, slot].long()
        rows = torch.einsum("pih,ph->pi", weights.gate_rows().double()[experts], self.hidden_states.double()[token])
        bias = self.gate_bias if weights.gated else self.up_bias
        spec = weights.gate_spec
        rows = rows if bias is None else rows + bias.double()[experts]
        if not weights.gated:
            return reference_activation(spec.activation, rows, spec.alpha).abs()
        return reference_activation(spec.activation, rows.clamp(max=spec.gate_limit), spec.alpha).clamp(max=spec.act_limit).abs()

    def threshold(self, sparsity: float) -> float:
        """One that about that share of the neurons does not reach, and none comes near."""
        magnitudes = self.activations().flatten().sort().values
        middle = int(sparsity * len(magnitudes))
        width = max(4, len(magnitudes) // 50)
        near = magnitudes[max(0, middle - width) : middle + width]
        gap = int((near[1:] - near[:-1]).argmax())
        low, high = float(near[gap]), float(near[gap + 1])
        assert high - low > 2 * BAND * high, "no gap in the activations: the test would judge rounding"
        return (low + high) / 2

    def reference(self, threshold: float, group: int = 1) -> torch.Tensor:
        weights = self.weights
        return reference_experts(
            self.hidden_states,
            self.ids,
            self.top_k_weights,
            weights.gate_rows() if weights.gated else None,
            weights.up_rows() if weights.gated else weights.gate_up,
            weights.down_t.transpose(1, 2),
            weights.gate_spec,
            gate_bias=self.gate_bias,
            up_bias=self.up_bias,
            down_bias=weights.down_bias,
            threshold=threshold,
            group=group,
        )

    def on_device(self) -> SparseCase:
        weights = replace(
            self.weights,
            gate_up=self.weights.gate_up.to(DEVICE),
            down_t=self.weights.down_t.to(DEVICE),
            gate_up_bias=None if self.weights.gate_up_bias is None else self.weights.gate_up_bias.to(DEVICE),
            down_bias=None if self.weights.down_bias is None else self.weights.down_bias.to(DEVICE),
        )
        return SparseCase(weights, self.hidden_states.to(DEVICE), self.ids.to(DEVICE), self.top_k_weights.to(DEVICE))


def sparse_case(
    tokens: int = 4,
    top_k: int = 2,
    num_experts: int = 4,
    hidden: int = 64,
    neurons: int = 40,
    dtype: torch.dtype = torch.float32,
    *,
    gated: bool = True,
    interleaved: bool = False,
    bias: bool = False,
    spec: GateSpec | None = None,
    seed: int = 0,
) -> SparseCase:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    rows = 2 * neurons if gated else neurons
    weights = SparseWeights(
        gate_up=random(num_experts, rows, hidden, scale=hidden**-0.5).to(dtype),
        down_t=random(num_experts, neurons, hidden, scale=neurons**-0.5).to(dtype),
        gate_spec=spec or GateSpec("silu" if gated else "relu2"),
        gated=gated,
        interleaved=interleaved,
        gate_up_bias=random(num_experts, rows, scale=0.5) if bias else None,
        down_bias=random(num_experts, hidden) if bias else None,
    )
    ids = torch.rand(tokens, num_experts, generator=generator).topk(top_k).indices.to(torch.int32)
    shares = torch.rand(tokens, top_k, generator=generator).pow(4) + 1e-3
    return SparseCase(weights, random(tokens, hidden).to(dtype), ids, shares)
