"""`sparse_experts`: all routed experts of a layer in GPU memory, without the neurons that a token does not need."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import nn

from moegraft.operators.base import Footprint, Operator, PlannedUse
from moegraft.operators.context import InjectionContext
from moegraft.operators.custom_ops import experts, needs_gradient, register
from moegraft.operators.draft import DraftSwitch
from moegraft.operators.errors import CheckpointError
from moegraft.operators.experts_layer import sparsity_errors
from moegraft.operators.kernels.availability import interpreted, why_unavailable
from moegraft.operators.kernels.packed_layout import block_bytes, round_up
from moegraft.operators.kernels.sparse_weights import SparseWeights, sketch_of
from moegraft.operators.kernels.workspace import Workspace
from moegraft.operators.layout import ExpertsLayout, read_layout, why_unsupported
from moegraft.operators.reference import reference_experts
from moegraft.operators.sparse.choice import PathChoices
from moegraft.operators.sparsity import LayerSparsity, whole
from moegraft.operators.thresholds import DEFAULT_MARGIN, SketchSamples, SparsityOptions, sample
from moegraft.operators.weights import Part, WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moegraft.operators.sparse.gpu_layer import SparseGpuLayer

logger = logging.getLogger(__name__)
DTYPES = {torch.float32: torch.float32, torch.float16: torch.float16, torch.bfloat16: torch.bfloat16, torch.float64: torch.float32}
START_UP_TOKENS = tuple(1 << power for power in range(10))  # batch sizes whose path is timed when the model is loaded
HOT = 0.9  # share of a layer's activations that count as not large when neurons are put in order


@dataclass(frozen=True, slots=True)
class SparseExpertsOptions:
    """Options of `sparse_experts`.

    Attributes:
        sparsity: which neurons of each expert are left out; it changes what the model says.
        gate: `exact` computes every gate; `sketch` looks a 4-bit copy of the gates up first (9% more memory) and computes exactly only
            those that come near the threshold: now and then it misses a neuron.
        margin: with `sketch`: the share of the threshold that a sketched activation has to reach to be computed. By default one at which
            a calibration at load misses one active neuron of a thousand; where thresholds come from a file, 0.8.
        group: this many neurons in a row are kept when one of them reaches the threshold.
        permute: put each expert's neurons in the order of how often a calibration at load finds them active.
        gpu: the device that holds the experts, such as `cuda:1`; `auto`: the first.
    """

    sparsity: SparsityOptions
    gate: Literal["exact", "sketch"] = "exact"
    margin: float | None = None
    group: Literal[1, 4, 8, 16, 32] = 1
    permute: bool = False
    gpu: str = "auto"

    def __post_init__(self) -> None:
        if self.margin is not None and not 0 < self.margin <= 1:
            raise ValueError(f"margin is a share of the threshold, above 0 and up to 1, not {self.margin:g}")
        if self.gate == "sketch" and self.group != 1:
            raise ValueError("a sketch predicts single neurons: group must be 1 with gate 'sketch'")
        if self.permute and self.sparsity.thresholds is not None:
            raise ValueError("permute needs a calibration at load, which a file of thresholds makes needless; leave one of the two out")
        if self.gpu != "auto" and not (self.gpu.startswith("cuda:") and self.gpu[5:].isdigit()):
            raise ValueError(f"gpu is 'auto' or a device such as 'cuda:0', not '{self.gpu}'")

    @property
    def device(self) -> torch.device:
        return torch.device("cuda:0" if self.gpu == "auto" else self.gpu)


class SparseExperts(Operator):
    """The experts of one layer: `forward(hidden_states (T, H), top_k_index (T, K) int64, top_k_weights (T, K)) -> (T, H)`.

    A neuron whose `|act(gate)|` is below the layer's threshold counts as zero, on every path and for every batch. Accumulates in float32
    and returns the dtype of `hidden_states`, which are computed in the dtype of the weights. For inference: a backward pass is refused.
    No GPU has run it yet.
    """

    sparsity: LayerSparsity
    name = "sparse_experts"
    kind = "experts"
    options_type = SparseExpertsOptions
    summary = "routed experts on a CUDA GPU by Triton kernels that read only the neurons a token needs; not yet run on a GPU"

    def __init__(
        self,
        layout: ExpertsLayout,
        options: SparseExpertsOptions,
        draft: DraftSwitch,
        sparsity: LayerSparsity,
        workspace: Workspace,
        choices: PathChoices,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.options = options
        self.sparsity = sparsity
        self.num_experts = layout.num_experts
        self._draft = draft
        self._workspace = workspace
        self._choices = choices
        self._weights: SparseWeights | None = None
        self._layer: SparseGpuLayer | None = None
        self._activity: torch.Tensor | None = None  # (E, I): how often each neuron was large while the layer was observed
        self._samples = SketchSamples()
        self._number = register(self)

    @classmethod
    def unsupported_reason(cls, module: nn.Module, options: SparseExpertsOptions) -> str | None:
        reason = None if interpreted() else why_unavailable()
        if reason is not None:
            return f"sparse_experts computes on a CUDA GPU, and {reason}; hybrid_experts takes 'sparsity' on the CPU, too"
        return why_unsupported(module)

    @classmethod
    def plan_errors(cls, use: PlannedUse, uses: Sequence[PlannedUse], model: nn.Module) -> Iterator[tuple[str, str]]:
        return sparsity_errors(use, uses, model)

    @classmethod
    def identity(cls, options: SparseExpertsOptions) -> str:
        return f"{options.sparsity}"

    @classmethod
    def devices_wanted(cls, options: SparseExpertsOptions) -> frozenset[str]:
        return frozenset({options.gpu})

    @classmethod
    def sparsity_options(cls, options: SparseExpertsOptions) -> SparsityOptions:
        return options.sparsity

    @classmethod
    def footprint(cls, module: nn.Module, options: SparseExpertsOptions, dtype: torch.dtype) -> Footprint:
        layout = read_layout(module)
        each = layout.intermediate * layout.hidden * (3 if layout.gated else 2) * DTYPES[dtype].itemsize
        if layout.bias:
            each += 4 * (layout.intermediate * (2 if layout.gated else 1) + layout.hidden)
        if options.gate == "sketch":
            each += block_bytes("int4", layout.hidden) * (round_up(layout.intermediate, 32) // 32)
        return Footprint({str(options.device): layout.num_experts * each})

    @classmethod
    def build(cls, module: nn.Module, options: SparseExpertsOptions, context: InjectionContext) -> Self:
        draft = context.draft_switch
        draft.join(sparse=True)
        sparsity = context.sparse_layers.join(options.sparsity, draft)
        device = torch.device("cpu") if why_unavailable() else options.device
        workspace = context.workspace(device)
        choices = context.path_choices
        return cls(read_layout(module), options, draft, sparsity, workspace, choices)

    @classmethod
    def with_sparsity(cls, options: SparseExpertsOptions, sparsity: SparsityOptions) -> SparseExpertsOptions:
        return replace(options, sparsity=sparsity)

    def set_aside(self, module: nn.Module) -> AbstractContextManager[None]:
        return whole([self.sparsity])

    def placement(self) -> str:
        dtype = "stored" if self._weights is None else str(self._weights.gate_up.dtype).removeprefix("torch.")
        gate = ", gate by sketch" if self.options.gate == "sketch" else ""
        return f"experts: {self.name}, {dtype} on {self._workspace.device}{gate}, {self.sparsity.describe()}"

    def statistics(self) -> Mapping[str, object]:
        times = [{"case": case, "tokens": tokens, "ms": dict(ms)} for case, tokens, ms in self._choices.times()]
        sketch = {"margin": self._layer.margin} if self._layer is not None and self.options.gate == "sketch" else {}
        return {"sparsity": self.sparsity.statistics(), "paths": times, **sketch}

    def load(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        layout, device = self.layout, self._workspace.device
        count, neurons, hidden = layout.num_experts, layout.intermediate, layout.hidden
        dtype = DTYPES.get(source.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{source.origin('down')}: dtype {source.dtype} cannot be an expert's weight; float32, float16 and bfloat16 are supported"
            )
        rows = neurons * (2 if layout.gated else 1)
        weights = SparseWeights(
            gate_up=torch.empty(count, rows, hidden, dtype=dtype, device=device),
            down_t=torch.empty(count, neurons, hidden, dtype=dtype, device=device),
            gate_spec=layout.gate,
            gated=layout.gated,
            gate_up_bias=torch.empty(count, rows, dtype=torch.float32, device=device) if layout.bias else None,
            down_bias=torch.empty(count, hidden, dtype=torch.float32, device=device) if layout.bias else None,
        )
        for expert in range(count):
            for part in layout.parts():
                piece = source.read(part, expert)
                expected = layout.part_shape(part)
                if tuple(piece.shape) != expected:
                    raise CheckpointError(f"{source.origin(part, expert)}: shape {tuple(piece.shape)} where the model has {expected}")
                _place(weights, part, expert).copy_(piece)
                advance(piece.nbytes)
        self._use(weights)

    def _use(self, weights: SparseWeights) -> None:
        """Computes with `weights` from now on; on a CPU, which only tests have here, through the eager reference."""
        self._weights = weights
        if weights.down_t.device.type == "cpu" and not interpreted():
            return
        # Triton need not be installed where no GPU is
        from moegraft.operators.sparse.gpu_layer import SparseGpuLayer, TimedPaths

        choose = TimedPaths(self._choices)
        margin = self.options.margin or self._samples.margin(self.sparsity.threshold) or DEFAULT_MARGIN
        self._layer = SparseGpuLayer(weights, self._workspace, choose, group=self.options.group, margin=margin)
        self.sparsity.attach(self._layer)

    def on_model_loaded(self, model: PreTrainedModel, path: str) -> None:
        assert self._weights is not None, "ready after load"
        if self.options.permute:
            if self._activity is None:
                logger.warning("%s: permute is not done: it needs a calibration at load, and thresholds were found in a file", path)
            else:
                self._weights.permute(self._activity.argsort(dim=-1, descending=True, stable=True))
        if self.options.gate == "sketch" and self._weights.sketch is None:
            self._use(replace(self._weights, sketch=sketch_of(self._weights)))
            self._samples = SketchSamples()
        if self._layer is not None and self._workspace.device.type == "cuda":
            top_k = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
            if top_k is not None:
                for tokens in START_UP_TOKENS:
                    self._layer.choose(tokens, top_k)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or needs_gradient(hidden_states, top_k_weights):
            routed: torch.Tensor = experts(hidden_states, top_k_index, top_k_weights, self._number)
            return routed
        return self.compute(hidden_states, top_k_index, top_k_weights)

    def compute(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """What `forward` does, outside of any graph of PyTorch; a CUDA graph may capture it."""
        weights = self._weights
        assert weights is not None, "forward before load: optimize_and_load loads every operator before it returns"
        top_k_index, top_k_weights = self._draft.narrow(top_k_index, top_k_weights)
        device = weights.down_t.device
        if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self.sparsity.begin(len(hidden_states))
        x = hidden_states.detach().to(device, weights.gate_up.dtype).contiguous()
        absent = (top_k_index < 0) | (top_k_index >= self.num_experts)
        ids = top_k_index.masked_fill(absent, -1).to(device, torch.int32).contiguous()
        shares = top_k_weights.detach().to(device).contiguous()
        if self._layer is None:
            return self._eager(weights, x, ids, shares).to(hidden_states.device, hidden_states.dtype)
        out = torch.empty_like(x)
        if self.sparsity.observer is not None:
            self._observe(self._layer, x, ids)
        self._layer.forward(x, ids, shares, out, drafting=self.sparsity.drafting)
        return out.to(hidden_states.device, hidden_states.dtype)

    def _observe(self, layer: SparseGpuLayer, x: torch.Tensor, ids: torch.Tensor) -> None:
        assert self.sparsity.observer is not None, "who observes is asked first"
        exact = []
        for part, acted in layer.activations(x, ids):
            if self.options.permute:
                self._count_activity(part, acted)
            exact.append(sample(part, acted))
            self.sparsity.observer(part.long(), acted)
        if self.options.gate == "sketch" and self.options.margin is None and layer.weights.sketch is None:
            # made anew for each call of the calibration at load, which are few: neurons may still change their places
            sketching = replace(layer.weights, sketch=sketch_of(layer.weights))
            other = type(layer)(sketching, self._workspace, lambda *_: "pair")
            for mine, (part, acted) in zip(exact, other.activations(x, ids, sketched=True), strict=True):
                self._samples.add(mine, sample(part, acted))

    def _count_activity(self, ids: torch.Tensor, acted: torch.Tensor) -> None:
        magnitudes = acted[ids >= 0].abs()
        if self._activity is None:
            self._activity = torch.zeros(self.num_experts, self.layout.intermediate, dtype=torch.int64, device=ids.device)
        if magnitudes.numel():
            large = magnitudes > magnitudes.flatten()[: 1 << 24].quantile(HOT)
            self._activity.index_add_(0, ids[ids >= 0].long(), large.to(torch.int64))

    def _eager(self, weights: SparseWeights, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        gate_up_bias, neurons = weights.gate_up_bias, weights.neurons
        up_bias = gate_up_bias[:, -neurons:] if gate_up_bias is not None else None
        return reference_experts(
            x,
            ids,
            shares,
            weights.gate_rows() if weights.gated else None,
            weights.up_rows() if weights.gated else weights.gate_up,
            weights.down_t.transpose(1, 2),
            weights.gate_spec,
            gate_bias=gate_up_bias[:, :neurons] if gate_up_bias is not None and weights.gated else None,
            up_bias=up_bias,
            down_bias=weights.down_bias,
            threshold=self.sparsity.in_force().threshold,
            group=self.options.group,
        )

    def extra_repr(self) -> str:
        layout = self.layout
        return f"num_experts={layout.num_experts}, hidden={layout.hidden}, intermediate={layout.intermediate}, gate={self.options.gate}"


def _place(weights: SparseWeights, part: Part, expert: int) -> torch.Tensor:
    """Where one piece, in `nn.Linear` orientation, belongs."""
    neurons = weights.neurons
    if part == "down":
        return weights.down_t[expert].T
    if part == "down_bias":
        assert weights.down_bias is not None, "experts with biases have room for them"
        return weights.down_bias[expert]
    target = weights.gate_up_bias if part.endswith("_bias") else weights.gate_up
    assert target is not None, "experts with biases have room for them"
    return target[expert, -neurons:] if part.startswith("up") else target[expert, :neurons]
