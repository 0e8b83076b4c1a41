"""`hybrid_experts`: all routed experts of a layer, packed in host memory and computed by the C++ kernel."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import nn

from moegraft.cpu_backend import PackedExperts, Runtime
from moegraft.operators.base import BuildContext, Footprint, Operator
from moegraft.operators.cpu import as_array, describe, rounded
from moegraft.operators.draft import DraftSwitch
from moegraft.operators.errors import CheckpointError
from moegraft.operators.experts.layout import ExpertsLayout, read_layout, why_unsupported
from moegraft.operators.experts.packed_cache import PackedCache, key_for
from moegraft.operators.experts.sparse_path import forward_packed
from moegraft.operators.sparse.layer import LayerSparsity, SparseLayers
from moegraft.operators.sparse.options import SparsityOptions
from moegraft.operators.traceable import experts, needs_gradient, register_experts
from moegraft.operators.weights import Part, WeightSource

StoredType = Literal["float32", "float16", "bfloat16"]
STORED_TYPES: dict[torch.dtype, StoredType] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float32",  # the kernel's widest type; float64 checkpoints are rounded once
}
WEIGHT_TYPES = Literal["stored", "float32", "float16", "bfloat16", "int8", "int4"]


@dataclass(frozen=True, slots=True)
class HybridExpertsOptions:
    """Options of `hybrid_experts`.

    Attributes:
        weights: the type the experts are packed to; `stored` keeps what the checkpoint has. int8 and int4 have groups of 32
            inputs with one 16-bit scale (GGUF's Q8_0 and Q4_0): about 8.5 and 4.5 bits a weight.
        cache_dir: a folder that keeps the packed experts and is mapped at the next start: loading takes seconds, processes share
            the pages, and a model larger than memory runs from disk. Of use for checkpoints, not for models already in memory.
        sparsity: leave out the neurons of each expert that matter least to a token; their weights are not read. Off by default: it
            changes what the model says.
    """

    weights: WEIGHT_TYPES = "stored"
    cache_dir: str | None = None
    sparsity: SparsityOptions | None = None


def _weight_type(options: HybridExpertsOptions, dtype: torch.dtype) -> str:
    return STORED_TYPES[dtype] if options.weights == "stored" else options.weights


class HybridExperts(Operator):
    """The experts of one layer: `forward(hidden_states (T, H), top_k_index (T, K) int64, top_k_weights (T, K)) -> (T, H)`.

    Accumulates in float32 and returns the dtype of `hidden_states`. Ids of -1 and of `num_experts` are padded slots.
    float32 activations are computed in float32 whatever the weights; bfloat16 activations with bfloat16 weights use
    bfloat16 products; int8 and int4 weights quantise activations in groups of 32. For inference: a backward pass is refused.
    """

    name = "hybrid_experts"
    kind = "experts"
    options_type = HybridExpertsOptions
    summary = "routed experts on the CPU by the C++ kernel, in the stored or a quantised weight type"

    def __init__(
        self,
        layout: ExpertsLayout,
        options: HybridExpertsOptions,
        runtime: Runtime,
        draft: DraftSwitch,
        sparsity: LayerSparsity | None = None,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.options = options
        self.sparsity = sparsity
        self.num_experts = layout.num_experts
        self._runtime = runtime
        self._draft = draft
        self._packed: PackedExperts | None = None
        self._number = register_experts(self)

    @classmethod
    def refuse(cls, module: nn.Module, options: HybridExpertsOptions) -> str | None:
        return why_unsupported(module)

    @classmethod
    def footprint(cls, module: nn.Module, options: HybridExpertsOptions, dtype: torch.dtype) -> Footprint:
        layout = read_layout(module)
        expert_bytes = PackedExperts.expert_bytes_for(layout.shape, _weight_type(options, dtype), sparse=options.sparsity is not None)
        # Pages of a mapped file can be dropped and read again: they are no demand on memory.
        device = "cpu" if options.cache_dir is None else "disk"
        return Footprint({device: layout.num_experts * expert_bytes})

    @classmethod
    def build(cls, module: nn.Module, options: HybridExpertsOptions, context: BuildContext) -> Self:
        runtime = context.shared(Runtime, lambda: Runtime(threads=context.threads))
        draft = context.shared(DraftSwitch, DraftSwitch)
        draft.join()
        sparsity = context.shared(SparseLayers, SparseLayers).join(options.sparsity) if options.sparsity is not None else None
        return cls(read_layout(module), options, runtime, draft, sparsity)

    @property
    def weight_type(self) -> str | None:
        """The type of the packed weights, None before they are loaded."""
        return None if self._packed is None else self._packed.weight_type

    def placement(self) -> str:
        runtime = self._runtime
        skipping = f", {self.sparsity.describe()}" if self.sparsity is not None else ""
        return f"experts: {self.name}, {self.weight_type or self.options.weights} on the CPU ({describe(runtime)}){skipping}"

    def statistics(self) -> Mapping[str, object]:
        return {} if self.sparsity is None else {"sparsity": self.sparsity.statistics()}

    def load(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        weight_type = _weight_type(self.options, source.dtype)
        fingerprint = source.fingerprint
        if self.options.cache_dir is not None and fingerprint is None:
            warnings.warn("cache_dir is not used: it keeps experts of checkpoints, and this model is in memory already", stacklevel=2)
        if self.options.cache_dir is None or fingerprint is None:
            packed = PackedExperts(self.layout.shape, self.layout.gate, weight_type, sparse=self.sparsity is not None)
            self._pack(packed, source, advance)
        else:
            cache = PackedCache(self.options.cache_dir)
            key = key_for(fingerprint, self.layout, weight_type, sparse=self.sparsity is not None)
            found = cache.open(key, self.layout)
            if found is not None:
                advance(self._source_bytes(source))
            packed = found or cache.build(key, self.layout, lambda packed: self._pack(packed, source, advance))
        self._packed = packed

    def _pack(self, packed: PackedExperts, source: WeightSource, advance: Callable[[int], None]) -> None:
        for expert in range(self.num_experts):
            for part in self.layout.parts():
                piece = self._checked(source, part, expert)
                if part.endswith("_bias"):
                    packed.pack_bias(expert, part.removesuffix("_bias"), as_array(piece.float().contiguous()))
                else:
                    packed.pack(expert, part, as_array(rounded(piece).contiguous()))
                advance(piece.nbytes)

    def _source_bytes(self, source: WeightSource) -> int:
        values = sum(math.prod(self.layout.part_shape(part)) for part in self.layout.parts())
        return self.num_experts * values * source.dtype.itemsize

    def _checked(self, source: WeightSource, part: Part, expert: int) -> torch.Tensor:
        piece = source.read(part, expert)
        expected = self.layout.part_shape(part)
        if tuple(piece.shape) != expected:
            raise CheckpointError(f"{source.origin(part, expert)}: shape {tuple(piece.shape)} where the model has {expected}")
        if piece.dtype not in STORED_TYPES:
            raise CheckpointError(
                f"{source.origin(part, expert)}: dtype {piece.dtype} cannot be an expert's weight; "
                "float32, float16 and bfloat16 checkpoints are supported"
            )
        return piece

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or needs_gradient(hidden_states, top_k_weights):
            routed: torch.Tensor = experts(hidden_states, top_k_index, top_k_weights, self._number)
            return routed
        return self.compute(hidden_states, top_k_index, top_k_weights)

    def compute(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """What `forward` does, outside of any graph."""
        assert self._packed is not None, "forward before load: optimize_and_load loads every operator before it returns"
        top_k_index, top_k_weights = self._draft.narrow(top_k_index, top_k_weights)
        tokens = rounded(hidden_states.detach().to("cpu")).contiguous()
        routed = torch.empty_like(tokens)
        index = top_k_index.to("cpu", torch.int64).contiguous()
        weights = top_k_weights.detach().to("cpu", torch.float32).contiguous()
        forward_packed(self._runtime, self._packed, tokens, index, weights, routed, self.sparsity)
        return routed.to(hidden_states.device, hidden_states.dtype)

    def extra_repr(self) -> str:
        layout = self.layout
        sizes = f"num_experts={layout.num_experts}, hidden={layout.hidden}, intermediate={layout.intermediate}"
        return f"{sizes}, weights={self.weight_type or self.options.weights}, threads={self._runtime.threads}"
