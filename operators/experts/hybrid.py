"""`hybrid_experts`: all routed experts of a layer, packed in host memory, computed by the C++ kernel or on the CPU and GPUs together.

The operator plans; one backend computes: `CpuExperts`, `RankExperts` or `GpuLayer`. Shared experts overlap with any that waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_args
from weakref import ref

import torch
from torch import nn

from moegraft.cpu_backend import PackedExperts
from moegraft.operators import router_maps
from moegraft.operators.base import DecodeLoss, Footprint, Operator, Packing, Traits
from moegraft.operators.context import InjectionContext
from moegraft.operators.custom_ops import experts, needs_gradient, register
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.expert_group import ExpertGroup
from moegraft.operators.experts.cpu import CpuExperts, Factors, RankExperts
from moegraft.operators.experts.forecast import SharedSlots
from moegraft.operators.layout import ExpertsLayout, read_layout, why_unsupported
from moegraft.operators.offload.frames import budget_bytes
from moegraft.operators.offload.options import DecodeName, ExpertCacheOptions, GpuOptions, check_gpu, parse_bytes
from moegraft.operators.offload.prefetch import PrefetchOptions
from moegraft.operators.offload.scheduler import ScheduleName
from moegraft.operators.offload.shared_overlap import SharedOverlap, overlap_in
from moegraft.operators.routing import Router, router_of, sibling_router
from moegraft.operators.routing_trace import TraceError
from moegraft.operators.sparsity import SparsityOptions
from moegraft.operators.weight_formats import FLOAT_TYPES, FORMATS, WEIGHT_TYPES, why_not_packed
from moegraft.operators.weights import PackedWeights, WeightSource, WeightTypes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moegraft.operators.offload.engine import Engine
    from moegraft.operators.offload.executors import EngineLayers
    from moegraft.operators.offload.frames import FramedLayers
    from moegraft.operators.offload.gpu_layer import GpuLayer
    from moegraft.operators.offload.model_experts import ModelEngines


logger = logging.getLogger(__name__)
SMALLER_TYPES: tuple[WEIGHT_TYPES, ...] = ("bfloat16", "int8", "int4")  # those to save memory with, the most exact first


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The types of an expert's matrices, each as in `weights`.

    Attributes:
        gate: of the gate projection.
        up: of the up projection; it shares blocks in memory with the gate projection, so that both must have one type.
        down: of the down projection.
    """

    gate: WEIGHT_TYPES = "stored"
    up: WEIGHT_TYPES = "stored"
    down: WEIGHT_TYPES = "stored"

    def __post_init__(self) -> None:
        if self.gate != self.up:
            raise ValueError(f"gate and up share blocks in memory and must have one type; they have {self.gate} and {self.up}")

    def __str__(self) -> str:
        return str(WeightTypes(self.up, self.down))


@dataclass(frozen=True, slots=True)
class HybridExpertsOptions:
    """Options of `hybrid_experts`.

    Attributes:
        weights: the type the experts are packed to. On the CPU without sparsity also a mapping by projection, such as
            `{gate: int4, up: int4, down: int8}`. `stored` keeps that of the checkpoint. int8 and int4 have groups of 32
            inputs with one 16-bit scale (GGUF's Q8_0 and Q4_0): about 8.5 and 4.5 bits per weight. The other types are those of GGUF files,
            without sparsity. Blocks of GGUF files and of quantised
            checkpoints are kept with `stored`, and those of integers with int8 and int4 where these do not have fewer bits, without
            sparsity.
        cache_dir: a folder that keeps the packed experts and is mapped at the next start: loading takes seconds, processes share
            the pages, and a model larger than memory runs from disk. For checkpoints only, not for models already in memory. Where the
            folder cannot be written, experts are packed in memory, which is logged.
        memory: for the experts of the whole model, such as `24GiB`, or `auto`, most of what is free; the others stay in their files, those
            of `cache_dir` or of a packed model folder, and are read past the page cache as they are needed or expected. For models
            larger than memory, on a fast disk. By default all experts are in memory or mapped.
        sparsity: leave out the neurons of each expert that matter least to a token; their weights are not read. Off by default: it
            changes the model's answers.
        gpu: where experts run in addition to the CPU: `none`; `auto`, the GPUs that the rest of the model is on; `cuda:N`, or several
            separated by commas. Without a GPU everything runs on the CPU, which is logged.
        cache: which experts have a slot on the GPU, and how many; its policy also chooses those that stay in `memory`.
        schedule: which device computes which expert: `two_threshold`, near-optimal by measured costs; `greedy`, HybriMoE's
            simulation; `on_demand`, all on the GPU; `fixed`, resident experts on the GPU and the rest on the CPU; `layer_map`, whole
            layers on one device; `all_cpu`.
        prefetch: which experts are loaded before they are needed.
        decode: how a decode step runs. On the CPU: `auto`, it is recorded twice and then replayed as one native program wherever the two
            agree; `eager`, layer by layer. On a GPU: `eager`, the schedule decides layer by layer; `graph`, a token's whole step is
            captured once and replayed, resident experts on the GPU and the rest on the CPU; `auto`, the faster of the two, measured on
            the first tokens of a real GPU. A captured step needs a static cache of full attention, sliding windows and
            recurrent states; without one, `eager` runs and the reason is logged.
        defer: how many of a token's experts, those with the smallest weights, the CPU may compute while the GPU goes on to the next layer,
            whose output they are added to (expert deferral, KTransformers); in steps of up to 8 tokens. 0 by default: it changes the
            model's answers, and `moegraft verify` measures by how much.
    """

    weights: WEIGHT_TYPES | ExpertWeights = "stored"
    cache_dir: str | None = None
    memory: str | None = None
    sparsity: SparsityOptions | None = None
    gpu: str = "none"
    cache: ExpertCacheOptions = field(default_factory=ExpertCacheOptions)
    schedule: ScheduleName = "two_threshold"
    prefetch: PrefetchOptions = field(default_factory=PrefetchOptions)
    decode: DecodeName = "auto"
    defer: int = 0

    def __post_init__(self) -> None:
        check_gpu(self.gpu)
        if self.defer < 0:
            raise ValueError(f"defer is a number of experts per token, 0 or more, not {self.defer}")
        if self.defer and self.gpu == "none":
            raise ValueError("defer lets the CPU compute experts while a GPU computes the next layer: it needs gpu, such as gpu: auto")
        if self.decode == "graph" and self.schedule in ("all_cpu", "on_demand"):
            raise ValueError(
                f"decode: graph computes resident experts on the GPU and the rest on the CPU, which schedule: {self.schedule} does not; "
                "use another schedule, or decode: eager"
            )
        mixed = isinstance(self.weights, ExpertWeights) and self.weights.up != self.weights.down
        if mixed and self.gpu != "none":
            raise ValueError("weights of several types need gpu: none, as all slots of a GPU have the size of one expert in one type")
        if mixed and self.sparsity is not None:
            raise ValueError("weights of several types cannot be combined with sparsity, whose layout has one type")
        if self.cache_dir is not None:
            try:
                Path(self.cache_dir).expanduser()
            except RuntimeError:
                raise ValueError(f"cache_dir '{self.cache_dir}': this machine has no user of that name") from None
        if self.memory not in (None, "auto"):
            parse_bytes(str(self.memory))

    @property
    def on_gpu(self) -> GpuOptions | None:
        """None for experts that the CPU computes alone."""
        return None if self.gpu == "none" else GpuOptions(self.gpu, self.cache, self.schedule, self.prefetch, self.decode)


def _packed_as(weights: str, dtype: torch.dtype) -> str:
    return str(WeightTypes.parse(weights).map(lambda each: FLOAT_TYPES[dtype] if each == "stored" else each))


class ExpertsPacking(Packing):
    """The weight types of `hybrid_experts`."""

    types = get_args(WEIGHT_TYPES)
    measured: Mapping[str, Any] = {weights: HybridExpertsOptions(weights=weights) for weights in ("float32", "bfloat16", "int8", "int4")}

    def options_for(
        self, path: str, module: nn.Module, options: HybridExpertsOptions, resolve: Callable[[str], str] | None
    ) -> HybridExpertsOptions:
        layout = read_layout(module)
        if (reason := options.cache.why_unfit(layout.num_experts, path)) is not None:
            raise TraceError(reason)
        if (reason := router_maps.why_unfit(options.prefetch.maps, (layout.num_experts, layout.hidden), path)) is not None:
            raise router_maps.RouterMapsError(reason)
        chosen: HybridExpertsOptions = super().options_for(path, module, options, resolve)
        return chosen

    def supports(self, options: HybridExpertsOptions, weight_type: str) -> bool:
        return options.sparsity is None  # the sparse layout has none

    def type_for(self, options: HybridExpertsOptions, dtype: torch.dtype) -> str:
        return _packed_as(str(options.weights), dtype)

    def smaller(self, options: HybridExpertsOptions | None) -> Mapping[str, HybridExpertsOptions]:
        if options is None:
            return {}
        changes = {f"'weights: {weights}' for the experts": replace(options, weights=weights) for weights in SMALLER_TYPES}
        if options.memory is None:
            advice = (
                "'cache_dir: FOLDER, memory: auto' for the experts (those that do not fit are read from a fast disk as they are needed)"
            )
            changes[advice] = replace(options, cache_dir=".", memory="auto")
        return changes


class HybridExperts(Operator):
    """The experts of one layer: `forward(hidden_states (T, H), top_k_index (T, K) int64, top_k_weights (T, K)) -> (T, H)`.

    Accumulates in float32 and returns the dtype of `hidden_states`. Ids of -1 and of `num_experts` are padded slots.
    float32 activations are computed in float32 whatever the weights; bfloat16 activations with bfloat16 weights use
    bfloat16 products; int8 and int4 weights quantise activations in groups of 32. Weights have no gradients; hidden states and routing
    weights do, on the CPU.
    """

    name = "hybrid_experts"
    kind = "experts"
    options_type = HybridExpertsOptions
    packing = ExpertsPacking()
    summary = "routed experts on the CPU by the C++ kernel, or on the CPU and GPUs together, in the stored or a quantised weight type"

    def __init__(
        self,
        layout: ExpertsLayout,
        options: HybridExpertsOptions,
        cpu: CpuExperts,
        engines: ModelEngines | None = None,
        group: ExpertGroup | None = None,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.options = options
        self.on_cpu = cpu
        self.sparsity = cpu.sparsity
        self.num_experts = layout.num_experts
        self.backend: CpuExperts | RankExperts | GpuLayer = cpu if group is None else RankExperts(group, cpu, layout.num_experts)
        self.overlap: SharedOverlap | None = None
        self._engines = engines
        self._engine_number = -1 if engines is None or options.on_gpu is None else engines.join(options.on_gpu)
        self._divided = group is not None
        self._framed: tuple[FramedLayers, int] | None = None
        self._number = register(self)

    @classmethod
    def unsupported_reason(cls, module: nn.Module, options: HybridExpertsOptions) -> str | None:
        reason = why_unsupported(module)
        if reason is not None:
            return reason
        layout, types = read_layout(module), WeightTypes.parse(str(options.weights))
        for name, columns in ((types.gate_up, layout.hidden), (types.down, layout.intermediate)):
            if name in FORMATS and FORMATS[name].stored and not cls.packing.supports(options, name):
                return f"weights: {name} cannot be combined with sparsity, whose layout has floats, int8 and int4"
            if (reason := why_not_packed(name, columns)) is not None:
                return reason
        return options.cache.why_unfit(layout.num_experts) or router_maps.why_unfit(
            options.prefetch.maps, (layout.num_experts, layout.hidden)
        )

    @classmethod
    def traits(cls, options: HybridExpertsOptions) -> Traits:
        gpu, undivided = options.on_gpu, None
        if gpu is not None:
            undivided = (
                f"gpu: {options.gpu} keeps experts on this machine's GPUs; with several processes, experts run on the CPU (gpu: none)"
            )
        elif options.memory is not None and options.cache.policy == "static":
            undivided = "cache: {policy: static} of experts in memory is not supported where several processes hold the experts: remove it"
        elif options.sparsity is not None:
            undivided = "sparsity is not supported where several processes hold the experts: remove it, or start one process"
        untrained = "experts on GPUs have no gradients; set gpu: none" if gpu is not None else None
        if options.sparsity is not None:
            untrained = "neurons that sparsity leaves out have no gradients; remove it"
        on_gpu = gpu is not None and gpu.on_cuda
        return Traits(
            f"{options.weights} {options.sparsity}{f' {options.defer}' if options.defer else ''}",
            devices=frozenset(options.gpu.split(",")) if on_gpu else frozenset(),
            slots=SharedSlots(gpu) if on_gpu and gpu is not None else None,
            sparsity=options.sparsity,
            narrows=True,
            replays_steps=options.decode != "eager",
            undivided=undivided,
            untrained=untrained,
            decode_loss=DecodeLoss(f"decode steps add up to {options.defer} experts of a token to the next layer")
            if options.defer
            else None,
            host_budget=None if options.memory is None else partial(budget_bytes, options.memory),
        )

    @classmethod
    def footprint(cls, module: nn.Module, options: HybridExpertsOptions, dtype: torch.dtype) -> Footprint:
        layout = read_layout(module)
        weight_type = _packed_as(str(options.weights), dtype)
        nbytes = layout.num_experts * PackedExperts.expert_bytes_for(layout.shape, weight_type, sparse=options.sparsity is not None)
        # Pages of a mapped file can be dropped and read again: they need no memory.
        by_device = {"cpu" if options.cache_dir is None and options.memory is None else "disk": nbytes}
        slots = None if options.on_gpu is None else options.cache.per_layer(layout.num_experts)
        if slots:
            by_device["gpu"] = slots * nbytes // layout.num_experts
        return Footprint(by_device)

    @classmethod
    def build(cls, module: nn.Module, options: HybridExpertsOptions, context: InjectionContext) -> Self:
        layout, draft, group = read_layout(module), context.draft_switch, context.expert_group
        draft.join()
        sparsity = context.sparse_layers.join(options.sparsity, draft) if options.sparsity is not None else None
        experts = range(layout.num_experts) if group is None else group.shares.experts(layout.num_experts)
        warn = partial(context.warn_once, logger)
        cpu = CpuExperts(layout, experts, str(options.weights), context.runtime, draft, sparsity, warn)
        operator = cls(layout, options, cpu, None if options.on_gpu is None else context.gpu_engines, group)
        if options.memory is not None:
            weight_type = _packed_as(str(options.weights), context.dtype)
            each = PackedExperts.expert_bytes_for(layout.shape, weight_type, sparse=sparsity is not None)
            layers = context.framed_layers
            operator._framed = layers, layers.join(options.memory, options.cache.of_policy, len(experts), each)
        return operator

    @property
    def weight_type(self) -> str | None:
        return self.on_cpu.weight_type

    def weight_samples(self) -> Iterator[bytes]:
        return self.on_cpu.weight_samples()

    def packed_weights(self) -> PackedWeights | None:
        return self.on_cpu.packed_weights()

    def placement(self) -> str:
        skipping = "" if self.sparsity is None else f", {self.sparsity.describe()}"
        elsewhere = "" if self.backend is self.on_cpu else self.backend.describe()
        return f"experts: {self.name}, {self.on_cpu.describe()}{elsewhere}{skipping}"

    def statistics(self) -> Mapping[str, object]:
        return {} if self.sparsity is None else {"sparsity": self.sparsity.statistics()}

    def load(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        in_frames = None if self._framed is None else partial(self._framed[0].loaded, self._framed[1])
        self.on_cpu.load(_packed_as(str(self.options.weights), source.dtype), source, advance, self.options.cache_dir, in_frames)

    def on_model_loaded(self, model: PreTrainedModel, path: str) -> None:
        block = model.get_submodule(path.rpartition(".")[0])
        if self._divided:
            self.overlap = overlap_in(block, sibling_router(block), self.backend.forward, unwatched=True)
        if self._framed is not None:
            self._framed[0].open(partial(_framed_places, model))
        if self._engines is None:
            return
        router, weak_self = router_of(model, path), ref(self)  # engines do not keep the operator alive

        def attach(engine: Engine, layers: EngineLayers, index: int) -> GpuLayer | None:
            from moegraft.operators.offload.gpu_layer import GpuLayer  # a model on the CPU starts without the engine

            operator = weak_self()
            if operator is None:
                return None
            layer = GpuLayer(engine, layers, index, operator.on_cpu.draft, operator.on_cpu.forward)
            operator.backend = layer
            operator.overlap = overlap_in(block, router.module, layer.forward, layer.router_calls.record)
            return layer

        from moegraft.operators.offload.model_experts import LoadedLayer  # as above

        assert self.on_cpu.packed is not None, "weights are loaded before the model is"
        loaded = LoadedLayer(self._engine_number, self.on_cpu.packed, self.sparsity, router, self.options.defer, attach)
        self._engines.ready(loaded)

    @property
    def qweight(self) -> torch.Tensor:
        """An empty tensor on the CPU: PEFT places adapters by this name, which quantised layers of others have."""
        return torch.empty(0, dtype=torch.uint8)

    @property
    def is_transposed(self) -> bool:
        """Whether the stock module stores its matrices with inputs first, as its own attribute of this name."""
        return self.layout.transposed

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters, of which packed experts have none.

        Without `recurse`, which is how PEFT looks for `target_parameters`, yield the stock module's matrices as parameters without memory,
        if they can have adapters.
        """
        if recurse:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)
            return
        for name in self.layout.matrices if self._untrained() is None else ():
            yield name, nn.Parameter(torch.zeros(()).expand(self.layout.stored_shape(name)), requires_grad=False)

    def __getattr__(self, name: str) -> Any:
        layout = self.__dict__.get("layout")
        if layout is not None and name in layout.matrices:  # PEFT's own configuration, whose layers read the parameter
            raise AttributeError(f"packed experts have no parameter {name}: make the adapter's configuration by moegraft.injection.lora")
        return super().__getattr__(name)

    def _untrained(self) -> str | None:
        """Return why experts have neither gradients nor adapters; None where they do."""
        return "experts in several processes have no gradients" if self._divided else self.traits(self.options).untrained

    def _require_trained(self, what: str) -> None:
        if (untrained := self._untrained()) is not None:
            raise UnsupportedModelError(f"{self.name} has no {what}: {untrained}")

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        adapters: Mapping[str, Factors] | None = None,
    ) -> torch.Tensor:
        """Compute the experts.

        Args:
            adapters: the factors of low-rank adapters by the name of the stock module's matrix, such as `down_proj`: A (E, R, inputs) and
                B (E, outputs, R), scaled.

        Raises:
            UnsupportedModelError: adapters of experts that the CPU does not compute alone, or with sparsity.
        """
        if adapters:
            adapted: torch.Tensor = self._adapted(hidden_states, top_k_index, top_k_weights, adapters)
            return adapted
        # A recorded step sends messages again only if they are part of an operation.
        messages = self._divided and torch._C._len_torch_dispatch_stack() > 0
        if messages or torch.compiler.is_compiling() or needs_gradient(hidden_states, top_k_weights):
            routed: torch.Tensor = experts(hidden_states, top_k_index, top_k_weights, self._number)
            return routed
        overlap = self.overlap
        return (self.backend if overlap is None else overlap).forward(hidden_states, top_k_index, top_k_weights)

    def compute(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Compute the result of `forward` outside any PyTorch graph."""
        return self.backend.forward(hidden_states, top_k_index, top_k_weights)

    def gradients(
        self, gradient: torch.Tensor, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of `hidden_states` (T, H) and `top_k_weights` (T, K), from that of the output (T, H).

        Raises:
            UnsupportedModelError: sparsity, GPUs or other processes take part in the forward pass.
        """
        self._require_trained("backward pass")
        return self.on_cpu.gradients(gradient, hidden_states, top_k_index, top_k_weights)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _adapted(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, adapters: Mapping[str, Factors]
    ) -> torch.Tensor:
        self._require_trained("adapters of experts")
        layout = self.layout
        gate_up, down = adapters.get(layout.parameter("up")), adapters.get("down_proj")
        if gate_up is not None and layout.gated:  # the kernel has the gate's rows first
            gate_up = gate_up[0], torch.cat([gate_up[1][:, layout.rows(part)] for part in ("gate", "up")], dim=1)
        return self.on_cpu.adapted((hidden_states, top_k_index, top_k_weights), gate_up, down)

    def extra_repr(self) -> str:
        layout = self.layout
        sizes = f"num_experts={layout.num_experts}, hidden={layout.hidden}, intermediate={layout.intermediate}"
        return f"{sizes}, weights={self.weight_type or self.options.weights}, threads={self.on_cpu.runtime.threads}"


def _framed_places(model: PreTrainedModel) -> dict[int, tuple[str, Router | None, Path | None]]:
    """Return the path, the router and the file of maps of each layer whose experts share frames, by number."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, HybridExperts) and module._framed is not None:
            block = model.get_submodule(path.rpartition(".")[0])
            router = None if sibling_router(block) is None else router_of(model, path)
            found[module._framed[1]] = path, router, module.options.prefetch.maps
    return found
