"""Shapes of published models for modelled figures; the times are assumptions, not measurements."""

from __future__ import annotations

from dataclasses import dataclass

from moegraft.operators.experts.forecast import INT4_BITS


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The routed experts of a model, and the time of the rest of a layer.

    Attributes:
        rest_ms: time of one layer's attention, router and shared experts on the GPU for one decoded token; assumed equal on all modelled
            machines.
        shared_share: the shared experts' share of `rest_ms`, by the weights that are read according to the models' configs.
    """

    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    layers: int
    rest_ms: float
    shared_share: float = 0.0

    def expert_bytes(self, bits_per_weight: float = INT4_BITS) -> int:
        """Return the bytes of gate, up and down of one expert."""
        return round(3 * self.hidden * self.intermediate * bits_per_weight / 8)


MODELS = {
    shape.name: shape
    for shape in (
        # shared_share: 3 x 2048 x 2816 of 31 million weights per layer
        ModelShape("deepseek-v2-lite", 64, 6, 2048, 1408, layers=26, rest_ms=0.150, shared_share=0.55),
        ModelShape("moonlight-16b-a3b", 64, 6, 2048, 1408, layers=26, rest_ms=0.150, shared_share=0.55),  # the same experts, another router
        # From the model's own config: HybriMoE's Table I prints the intermediate size of its dense layers, 18944.
        # shared_share: 3 x 3584 x 20480 of 250 million.
        ModelShape("qwen2-57b-a14b", 64, 8, 3584, 2560, layers=28, rest_ms=0.220, shared_share=0.88),
        ModelShape("mixtral-8x7b", 8, 2, 4096, 14336, layers=32, rest_ms=0.260),
    )
}
