"""A stock model with neurons left out by any criterion, in plain PyTorch, to compare criteria with the kernels' thresholds.

All neurons are computed and the inactive ones set to zero, which is slow but allows criteria that no fast kernel supports, such as sorting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from moegraft.operators.layout import ExpertsLayout, read_layout, why_unsupported
from moegraft.operators.reference import reference_activation, reference_gate

# Returns the neurons to keep, (n, I) bool, given a module's path, the expert (None for a shared one) and act(gate), (n, I) float32.
Keep = Callable[[str, int | None, torch.Tensor], torch.Tensor]
SHARED_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


@dataclass(frozen=True, slots=True)
class Sites:
    """The modules whose neurons can be left out: experts modules with their layouts, and shared experts, by path."""

    routed: Mapping[str, ExpertsLayout]
    shared: Mapping[str, int]

    @property
    def paths(self) -> tuple[str, ...]:
        return (*self.routed, *self.shared)


def find_sites(model: PreTrainedModel) -> Sites:
    """Find a model's experts and shared experts.

    Raises:
        ValueError: the model has no experts of the shared interface.
    """
    routed = {
        path: read_layout(module) for path, module in model.named_modules() if path.endswith(".experts") and not why_unsupported(module)
    }
    if not routed:
        raise ValueError(f"{type(model).__name__} has no experts module that follows transformers' shared interface")
    shared = {
        path: int(module.down_proj.in_features)  # type: ignore[union-attr, arg-type]
        for path, module in model.named_modules()
        if "shared" in path.rpartition(".")[2] and all(hasattr(module, part) for part in SHARED_PARTS)
    }
    return Sites(routed, shared)


@contextmanager
def masked(model: PreTrainedModel, sites: Sites, keep: Keep) -> Iterator[None]:
    """Keep only the neurons that `keep` returns in all experts of the model within the body; `keep` may also only observe."""
    changed: dict[str, Any] = {}
    for path, layout in sites.routed.items():
        changed[path] = _routed_forward(model.get_submodule(path), layout, path, keep)
    for path in sites.shared:
        changed[path] = _shared_forward(model.get_submodule(path), path, keep)
    for path, forward in changed.items():
        model.get_submodule(path).forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        for path in changed:
            del model.get_submodule(path).forward  # restores the method of the class


def _routed_forward(module: nn.Module, layout: ExpertsLayout, path: str, keep: Keep) -> Callable[..., torch.Tensor]:
    parts = {part: module.get_parameter(layout.parameter(part)).detach() for part in layout.parts()}

    def linear(part: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
        bias = layout.cut(f"{part}_bias", parts[f"{part}_bias"][expert]) if layout.bias else None  # type: ignore[arg-type, index]
        return F.linear(x, layout.cut(part, parts[part][expert]), bias)

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert in top_k_index.unique().tolist():
            if not 0 <= expert < layout.num_experts:
                continue
            token, slot = torch.where(top_k_index == expert)
            x = hidden_states[token]
            gate = linear("gate", expert, x).float() if layout.gated else None
            up = linear("up", expert, x).float()
            neurons = reference_gate(layout.gate, gate, up)
            neurons = neurons.where(keep(path, expert, _acted(layout, gate, up)), 0.0)
            share = top_k_weights[token, slot].float()[:, None]
            out.index_add_(0, token, share * linear("down", expert, neurons.to(x.dtype)).float())
        return out.to(hidden_states.dtype)

    return forward


def _acted(layout: ExpertsLayout, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
    spec = layout.gate
    if gate is None:
        return reference_activation(spec.activation, up, spec.alpha)
    return reference_activation(spec.activation, gate.clamp(max=spec.gate_limit), spec.alpha).clamp(max=spec.act_limit)


def _shared_forward(module: nn.Module, path: str, keep: Keep) -> Callable[..., torch.Tensor]:
    parts: Any = module

    def forward(x: torch.Tensor) -> torch.Tensor:
        acted = parts.act_fn(parts.gate_proj(x))
        kept = keep(path, None, acted.float().flatten(0, -2)).view_as(acted)
        found: torch.Tensor = parts.down_proj((acted * parts.up_proj(x)).where(kept, 0.0))
        return found

    return forward
