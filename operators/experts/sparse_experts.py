"""`sparse_experts`: all routed experts of a layer in slots of GPU memory, without the neurons that a token does not need.

It is the special case of `hybrid_experts` in which every expert has a slot: packed bytes and kernels are the same, and host memory is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn, Self

import torch
from torch import nn

from moegraft.cpu_backend import PackedExperts
from moegraft.operators.base import Footprint, Operator, Traits
from moegraft.operators.context import InjectionContext
from moegraft.operators.custom_ops import experts, needs_gradient, register
from moegraft.operators.draft import DraftSwitch
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.experts.cpu import pack_piece, stored_type
from moegraft.operators.kernels.launch import interpreted, why_unavailable
from moegraft.operators.kernels.packed_layout import sparse_layout
from moegraft.operators.layout import ExpertsLayout, read_layout, why_unsupported
from moegraft.operators.sparsity import LayerSparsity, SparsityOptions
from moegraft.operators.weight_formats import FLOAT_TYPES
from moegraft.operators.weights import WeightSource, sampled

if TYPE_CHECKING:
    from moegraft.operators.kernels.sparse_slots import SparseSlotExperts


@dataclass(frozen=True, slots=True)
class SparseExpertsOptions:
    """Options of `sparse_experts`.

    Attributes:
        sparsity: which neurons of each expert are left out; it changes the model's output.
        gpu: the device that holds the experts, such as `cuda:1`; `auto` for the first.
    """

    sparsity: SparsityOptions
    gpu: str = "auto"

    def __post_init__(self) -> None:
        if self.gpu != "auto" and not (self.gpu.startswith("cuda:") and self.gpu[5:].isdigit()):
            raise ValueError(f"gpu is 'auto' or a device such as 'cuda:0', not '{self.gpu}'")

    @property
    def device(self) -> torch.device:
        return torch.device("cuda:0" if self.gpu == "auto" else self.gpu)


class SparseExperts(Operator):
    """The experts of one layer: `forward(hidden_states (T, H), top_k_index (T, K) int64, top_k_weights (T, K)) -> (T, H)`.

    A neuron whose `|act(gate)|` is below the layer's threshold counts as zero, on every path and for every batch size. The forward pass
    computes in the dtype of the weights, accumulates in float32, and returns the dtype of `hidden_states`. It refuses a backward pass.
    """

    sparsity: LayerSparsity
    name = "sparse_experts"
    kind = "experts"
    options_type = SparseExpertsOptions
    summary = "routed experts on a CUDA GPU by Triton kernels that read only the neurons a token needs"

    def __init__(
        self,
        layout: ExpertsLayout,
        options: SparseExpertsOptions,
        draft: DraftSwitch,
        sparsity: LayerSparsity,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.options = options
        self.sparsity = sparsity
        self.num_experts = layout.num_experts
        self._draft = draft
        self._device = device
        self._weight_type = "stored"  # what that means is known when the weights are loaded; activations have this type as well
        self._arena: torch.Tensor | None = None  # (E, expert_bytes) uint8
        self._kernels: SparseSlotExperts | None = None
        self._number = register(self)

    @classmethod
    def unsupported_reason(cls, module: nn.Module, options: SparseExpertsOptions) -> str | None:
        reason = None if interpreted() else why_unavailable()
        if reason is not None:
            return f"sparse_experts computes on a CUDA GPU, and {reason}; hybrid_experts also takes 'sparsity' on the CPU"
        return why_unsupported(module)

    @classmethod
    def traits(cls, options: SparseExpertsOptions) -> Traits:
        untrained = "neurons that sparsity leaves out have no gradients; use hybrid_experts without it"
        return Traits(f"{options.sparsity}", devices=frozenset({options.gpu}), sparsity=options.sparsity, narrows=True, untrained=untrained)

    @classmethod
    def footprint(cls, module: nn.Module, options: SparseExpertsOptions, dtype: torch.dtype) -> Footprint:
        layout = read_layout(module)
        packed = sparse_layout(layout.shape, layout.gate, FLOAT_TYPES[dtype])
        return Footprint({str(options.device): layout.num_experts * packed.expert_bytes})

    @classmethod
    def build(cls, module: nn.Module, options: SparseExpertsOptions, context: InjectionContext) -> Self:
        draft = context.draft_switch
        draft.join()
        sparsity = context.sparse_layers.join(options.sparsity, draft)
        device = torch.device("cpu") if why_unavailable() else options.device  # kernels are interpreted on the CPU
        return cls(read_layout(module), options, draft, sparsity, device)

    def weight_samples(self) -> Iterator[bytes]:
        assert self._arena is not None, "called after load"
        yield sampled(self._arena)

    def placement(self) -> str:
        return f"experts: {self.name}, {self._weight_type} on {self._device}, {self.sparsity.describe()}"

    def statistics(self) -> Mapping[str, object]:
        return {"sparsity": self.sparsity.statistics()}

    def load(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        # Imported here because Triton need not be installed where there is no GPU.
        from moegraft.operators.kernels.sparse_slots import SparseSlotExperts

        layout = self.layout
        weight_type = stored_type(source.dtype, source.origin("down"))
        kernels = SparseSlotExperts(layout.shape, layout.gate, weight_type, self._device)
        arena = torch.empty(layout.num_experts, kernels.expert_bytes, dtype=torch.uint8, device=self._device)
        packed = PackedExperts(replace(layout, num_experts=1).shape, layout.gate, weight_type, sparse=True)  # one after another
        for expert in range(layout.num_experts):
            for part in layout.parts():
                advance(pack_piece(packed, 0, layout, source, part, expert))
            arena[expert].copy_(torch.from_numpy(packed.buffer))
        self._weight_type, self._arena, self._kernels = weight_type, arena, kernels
        self.sparsity.attach(kernels)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or needs_gradient(hidden_states, top_k_weights):
            routed: torch.Tensor = experts(hidden_states, top_k_index, top_k_weights, self._number)
            return routed
        return self.compute(hidden_states, top_k_index, top_k_weights)

    def compute(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Compute the result of `forward` outside any PyTorch graph; a CUDA graph may capture it."""
        kernels, arena, device = self._kernels, self._arena, self._device
        assert kernels is not None and arena is not None, "forward before load: optimize_and_load loads every operator before it returns"
        top_k_index, top_k_weights = self._draft.narrow(top_k_index, top_k_weights)
        if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self.sparsity.begin(len(hidden_states))
        x = hidden_states.detach().to(device, getattr(torch, self._weight_type)).contiguous()
        absent = (top_k_index < 0) | (top_k_index >= self.num_experts)
        slots = top_k_index.masked_fill(absent, -1).to(device, torch.int32).contiguous()
        if (observer := self.sparsity.observer) is not None:
            for part, acted in kernels.activations(x, arena, slots):
                observer(part.long(), acted)
        out = torch.empty_like(x)
        kernels.forward(x, arena, slots, top_k_weights.detach().to(device).contiguous(), out, drafting=self.sparsity.drafting)
        return out.to(hidden_states.device, hidden_states.dtype)

    def gradients(self, *tensors: torch.Tensor) -> NoReturn:
        """Raise UnsupportedModelError."""
        raise UnsupportedModelError(f"{self.name} has no backward pass: {self.traits(self.options).untrained}")

    def extra_repr(self) -> str:
        layout = self.layout
        return f"num_experts={layout.num_experts}, hidden={layout.hidden}, intermediate={layout.intermediate}"
