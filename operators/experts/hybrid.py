"""`hybrid_experts`: all routed experts of a layer, packed in host memory, computed by the C++ kernel or on the CPU and GPUs together."""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from operator import call
from typing import TYPE_CHECKING, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moegraft.cpu_backend import PackedExperts, Runtime
from moegraft.operators.base import Footprint, Operator, PlannedUse
from moegraft.operators.context import InjectionContext
from moegraft.operators.cpu import as_array, describe, rounded
from moegraft.operators.custom_ops import experts, needs_gradient, register
from moegraft.operators.draft import DraftSwitch
from moegraft.operators.errors import CheckpointError, UnsupportedModelError
from moegraft.operators.estimates import Saving
from moegraft.operators.expert_group import ExpertGroup
from moegraft.operators.experts.forecast import SharedSlots
from moegraft.operators.experts.packed_cache import PackedCache, check_folder, key_for
from moegraft.operators.experts_layer import sparsity_errors
from moegraft.operators.layout import ExpertsLayout, read_layout, why_unsupported
from moegraft.operators.offload.options import DecodeName, ExpertCacheOptions, GpuOptions, check_decode, check_gpu
from moegraft.operators.offload.prefetch import PrefetchOptions
from moegraft.operators.offload.scheduler import ScheduleName
from moegraft.operators.offload.shared_overlap import SharedOverlap, shared_experts_of
from moegraft.operators.routing import router_of, sibling_router
from moegraft.operators.sparsity import LayerSparsity, whole
from moegraft.operators.thresholds import SparsityOptions
from moegraft.operators.weight_formats import FORMATS, WEIGHT_TYPES, why_unfit
from moegraft.operators.weights import Part, StoredBlocks, WeightSource, WeightTypes, codes_for, sampled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moegraft.operators.offload.gpu_layer import GpuLayer
    from moegraft.operators.offload.model_experts import ModelEngines


logger = logging.getLogger(__name__)
PACKERS = 2  # threads; each holds an expert as it was read, and `moegraft plan` counts two
StoredType = Literal["float32", "float16", "bfloat16"]
STORED_TYPES: dict[torch.dtype, StoredType] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float32",  # the kernel's widest type; float64 checkpoints are rounded once
}
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
        sparsity: leave out the neurons of each expert that matter least to a token; their weights are not read. Off by default: it
            changes the model's answers.
        gpu: where experts run in addition to the CPU: `none`; `auto`, the GPUs that the rest of the model is on; `cuda:N`, or several
            separated by commas. Without a GPU everything runs on the CPU, which is logged.
        cache: which experts have a slot on the GPU, and how many.
        schedule: which device computes which expert: `two_threshold`, near-optimal by measured costs; `greedy`, HybriMoE's
            simulation; `on_demand`, all on the GPU; `fixed`, resident experts on the GPU and the rest on the CPU; `layer_map`, whole
            layers on one device; `all_cpu`.
        prefetch: which experts are loaded before they are needed.
        decode: how a decode step runs. On the CPU: `auto`, it is recorded twice and then replayed as one native program wherever the two
            agree; `eager`, layer by layer. On a GPU: `eager`, the schedule decides layer by layer; `graph`, a token's whole step is
            captured once and replayed, resident experts on the GPU and the rest on the CPU; `auto`, the faster of the two, measured on
            the first tokens of a real GPU. A captured step needs a static key-value cache of full attention and sliding windows;
            without one, `eager` runs and the reason is logged.
    """

    weights: WEIGHT_TYPES | ExpertWeights = "stored"
    cache_dir: str | None = None
    sparsity: SparsityOptions | None = None
    gpu: str = "none"
    cache: ExpertCacheOptions = field(default_factory=ExpertCacheOptions)
    schedule: ScheduleName = "two_threshold"
    prefetch: PrefetchOptions = field(default_factory=PrefetchOptions)
    decode: DecodeName = "auto"

    def __post_init__(self) -> None:
        check_gpu(self.gpu)
        check_decode(self.decode, self.schedule)
        mixed = isinstance(self.weights, ExpertWeights) and self.weights.up != self.weights.down
        if mixed and self.gpu != "none":
            raise ValueError("weights of several types need gpu: none, as all slots of a GPU have the size of one expert in one type")
        if mixed and self.sparsity is not None:
            raise ValueError("weights of several types cannot be combined with sparsity, whose layout has one type")
        if self.cache_dir is not None:
            check_folder(self.cache_dir)

    @property
    def on_gpu(self) -> GpuOptions | None:
        """None for experts that the CPU computes alone."""
        return None if self.gpu == "none" else GpuOptions(self.gpu, self.cache, self.schedule, self.prefetch, self.decode)


def _packed_as(weights: str, dtype: torch.dtype) -> str:
    return str(WeightTypes.parse(weights).map(lambda each: STORED_TYPES[dtype] if each == "stored" else each))


class HybridExperts(Operator):
    """The experts of one layer: `forward(hidden_states (T, H), top_k_index (T, K) int64, top_k_weights (T, K)) -> (T, H)`.

    Accumulates in float32 and returns the dtype of `hidden_states`. Ids of -1 and of `num_experts` are padded slots.
    float32 activations are computed in float32 whatever the weights; bfloat16 activations with bfloat16 weights use
    bfloat16 products; int8 and int4 weights quantise activations in groups of 32. For inference: a backward pass raises an error.
    """

    name = "hybrid_experts"
    kind = "experts"
    options_type = HybridExpertsOptions
    weight_types = get_args(WEIGHT_TYPES)
    summary = "routed experts on the CPU by the C++ kernel, or on the CPU and GPUs together, in the stored or a quantised weight type"

    def __init__(
        self,
        layout: ExpertsLayout,
        options: HybridExpertsOptions,
        runtime: Runtime,
        draft: DraftSwitch,
        warn: Callable[[str], None],
        sparsity: LayerSparsity | None = None,
        engines: ModelEngines | None = None,
        group: ExpertGroup | None = None,
    ) -> None:
        super().__init__()
        self.layout = layout
        self._held = range(layout.num_experts) if group is None else group.shares.experts(layout.num_experts)
        self._group = group
        self._shared_overlap: SharedOverlap | None = None  # with what other processes compute
        self.options = options
        self.sparsity = sparsity
        self.num_experts = layout.num_experts
        self._runtime = runtime
        self._draft = draft
        self._warn = warn
        self._packed: PackedExperts | None = None
        self._engines = engines
        self._engine_number = -1 if engines is None or options.on_gpu is None else engines.join(options.on_gpu)
        self.gpu_layer: GpuLayer | None = None
        self._number = register(self)
        if group is not None:
            self._layer = group.join(layout.num_experts, self._compute)

    @classmethod
    def unsupported_reason(cls, module: nn.Module, options: HybridExpertsOptions) -> str | None:
        reason = why_unsupported(module)
        if reason is not None:
            return reason
        layout, types = read_layout(module), WeightTypes.parse(str(options.weights))
        for name, columns in ((types.gate_up, layout.hidden), (types.down, layout.intermediate)):
            if name in FORMATS and FORMATS[name].stored and not cls.supports_weight_type(options, name):
                return f"weights: {name} cannot be combined with sparsity, whose layout has floats, int8 and int4"
            unfit = why_unfit(name, columns)
            if unfit is not None:
                return unfit
        return None

    @classmethod
    def supports_weight_type(cls, options: HybridExpertsOptions, weight_type: str) -> bool:
        return options.sparsity is None  # the sparse layout has none

    @classmethod
    def plan_errors(cls, use: PlannedUse, uses: Sequence[PlannedUse], model: nn.Module) -> Iterator[tuple[str, str]]:
        yield from sparsity_errors(use, uses, model)

    @classmethod
    def identity(cls, options: HybridExpertsOptions) -> str:
        return f"{options.weights} {options.sparsity}"

    @classmethod
    def devices_wanted(cls, options: HybridExpertsOptions) -> frozenset[str]:
        gpu = options.on_gpu
        return frozenset() if gpu is None or not gpu.on_cuda else frozenset(options.gpu.split(","))

    @classmethod
    def sparsity_options(cls, options: HybridExpertsOptions) -> SparsityOptions | None:
        return options.sparsity

    @classmethod
    def footprint(cls, module: nn.Module, options: HybridExpertsOptions, dtype: torch.dtype) -> Footprint:
        layout = read_layout(module)
        weight_type = cls.weight_type_for(options, dtype)
        nbytes = layout.num_experts * PackedExperts.expert_bytes_for(layout.shape, weight_type, sparse=options.sparsity is not None)
        # Pages of a mapped file can be dropped and read again: they need no memory.
        held = {"cpu" if options.cache_dir is None else "disk": nbytes}
        slots = None if options.on_gpu is None else options.cache.per_layer(layout.num_experts)
        if slots:
            held["gpu"] = slots * nbytes // layout.num_experts
        return Footprint(held)

    @classmethod
    def build(cls, module: nn.Module, options: HybridExpertsOptions, context: InjectionContext) -> Self:
        runtime = context.runtime
        draft = context.draft_switch
        draft.join(has_slots=options.on_gpu is not None, sparse=options.sparsity is not None)
        sparsity = context.sparse_layers.join(options.sparsity, draft) if options.sparsity is not None else None
        engines = None if options.on_gpu is None else context.gpu_engines
        warn = partial(context.warn_once, logger)
        return cls(read_layout(module), options, runtime, draft, warn, sparsity, engines, context.expert_group)

    @classmethod
    def why_undivided(cls, options: HybridExpertsOptions) -> str | None:
        if options.gpu != "none":
            return f"gpu: {options.gpu} keeps experts on this machine's GPUs; with several processes, experts run on the CPU (gpu: none)"
        if options.sparsity is not None:
            return "sparsity is not supported where several processes hold the experts: remove it, or start one process"
        return None

    @classmethod
    def weight_type_for(cls, options: HybridExpertsOptions, dtype: torch.dtype) -> str:
        return _packed_as(str(options.weights), dtype)

    @classmethod
    def savings(cls, module: nn.Module, options: HybridExpertsOptions | None, dtype: torch.dtype) -> Sequence[Saving]:
        if options is None:
            return ()
        held = cls.footprint(module, options, dtype)
        smaller = [
            Saving(f"'weights: {weights}' for the experts", cls.footprint(module, replace(options, weights=weights), dtype))
            for weights in SMALLER_TYPES
        ]
        found = [saving for saving in smaller if saving.footprint.total_bytes < held.total_bytes]
        if options.cache_dir is None:
            mapped = Footprint({"disk" if device == "cpu" else device: size for device, size in held.by_device.items()})
            found.append(Saving("'cache_dir: FOLDER' for the experts (what does not fit is then read from disk as it is used)", mapped))
        return found

    @classmethod
    def expert_slots(cls, options: HybridExpertsOptions) -> SharedSlots | None:
        gpu = options.on_gpu
        return None if gpu is None or not gpu.on_cuda else SharedSlots(gpu)

    @classmethod
    def replays_steps(cls, options: HybridExpertsOptions) -> bool:
        return options.decode != "eager"

    @classmethod
    def measured_options(cls) -> Mapping[str, HybridExpertsOptions]:
        return {weights: HybridExpertsOptions(weights=weights) for weights in ("float32", "bfloat16", "int8", "int4")}

    @classmethod
    def with_sparsity(cls, options: HybridExpertsOptions, sparsity: SparsityOptions) -> HybridExpertsOptions:
        try:
            return replace(options, sparsity=sparsity)
        except ValueError as error:
            raise UnsupportedModelError(str(error)) from error

    def set_aside(self, module: nn.Module) -> AbstractContextManager[None]:
        return nullcontext() if self.sparsity is None else whole([self.sparsity])

    @property
    def weight_type(self) -> str | None:
        """The type of the packed weights, None before they are loaded."""
        return None if self._packed is None else self._packed.weight_type

    def weight_samples(self) -> Iterator[bytes]:
        assert self._packed is not None, "called after load"
        packed = self._packed
        for expert in packed.buffer.reshape(packed.shape.num_experts, 1, -1):  # a digest of each: other processes hold others
            yield hashlib.sha256(sampled(expert)).digest()

    def placement(self) -> str:
        runtime = self._runtime
        skipping = f", {self.sparsity.describe()}" if self.sparsity is not None else ""
        where = "" if self.gpu_layer is None else f" and {self.gpu_layer.describe()}"
        share = "" if self._group is None else f", experts {self._held.start} to {self._held[-1]} of {self.num_experts}"
        return f"experts: {self.name}, {self.weight_type or self.options.weights} on the CPU ({describe(runtime)}){where}{skipping}{share}"

    def statistics(self) -> Mapping[str, object]:
        return {} if self.sparsity is None else {"sparsity": self.sparsity.statistics()}

    def load(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        experts, weight_type, sparse = self._held, self.weight_type_for(self.options, source.dtype), self.sparsity is not None
        held = replace(self.layout, num_experts=len(experts))
        cache_dir = self.options.cache_dir
        fingerprint = None if cache_dir is None else source.fingerprint
        if cache_dir is None or fingerprint is None:
            if cache_dir is not None:
                warnings.warn("cache_dir is ignored: it keeps experts of checkpoints, and this model is already in memory", stacklevel=2)
            packed = PackedExperts(held.shape, held.gate, weight_type, sparse=sparse)
            self._pack(packed, experts, source, advance)
            self._packed = packed
            return
        read = 0

        def count(size: int) -> None:
            nonlocal read
            read += size
            advance(size)

        key = key_for(fingerprint, held, weight_type, sparse=sparse, experts=experts)
        cache = PackedCache(cache_dir, self._warn)
        found = cache.open(key, held)
        self._packed = found or cache.build(key, held, lambda packed: self._pack(packed, experts, source, count))
        values = sum(math.prod(self.layout.part_shape(part)) for part in self.layout.parts())
        advance(len(experts) * values * source.dtype.itemsize - read)

    def on_model_loaded(self, model: PreTrainedModel, path: str) -> None:
        if self._engines is None and self._group is None:
            return
        assert self._packed is not None, "weights are loaded before the model is"
        block = model.get_submodule(path.rpartition(".")[0])
        shared = shared_experts_of(block)
        weak_self = weakref.ref(self)  # neither the engines nor the block's other modules keep the operator alive

        def compute(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor | None:
            operator = weak_self()
            return None if operator is None else operator._called(hidden_states, top_k_index, top_k_weights)

        if self._group is not None:
            router = sibling_router(block)
            if shared is not None and router is not None and "forward" not in vars(router):
                self._shared_overlap = SharedOverlap(shared, router, compute, unwatched=True)
            return
        assert self._engines is not None, "an operator of this process alone"

        def attach(layer: GpuLayer) -> None:
            operator = weak_self()
            if operator is None:
                return
            operator.gpu_layer = layer
            if shared is not None:
                layer.overlap(shared, compute)

        from moegraft.operators.offload.model_experts import LoadedLayer  # a model on the CPU starts without the engine

        loaded = LoadedLayer(self._packed, self.sparsity, router_of(model, path), self._draft, attach)
        self._engines.ready(self._engine_number, loaded, model.config, model.dtype)

    def _pack(self, packed: PackedExperts, experts: Sequence[int], source: WeightSource, advance: Callable[[int], None]) -> None:
        """Read the experts one after the other, and pack two at the same time."""
        threads = min(self._runtime.threads, PACKERS)
        with ThreadPoolExecutor(threads, thread_name_prefix="moegraft-pack") as pool:
            packing: deque[Future[int]] = deque()
            for place, expert in enumerate(experts):
                if len(packing) == threads:
                    advance(packing.popleft().result())
                pieces = [self._packing(packed, place, expert, part, source) for part in self.layout.parts()]
                packing.append(pool.submit(sum, map(call, pieces)))
            for done in packing:
                advance(done.result())

    def _packing(self, packed: PackedExperts, place: int, expert: int, part: Part, source: WeightSource) -> Callable[[], int]:
        """Read a piece, and return what packs it and then returns its bytes in the checkpoint."""
        weight_type = packed.weight_type_of(part.removesuffix("_bias"))
        codes = None if part.endswith("_bias") else codes_for(source, part, expert, weight_type)
        piece = self._checked(source, part, expert) if codes is None else None
        origin = source.origin(part, expert)

        def pack() -> int:
            if codes is not None:
                if isinstance(codes, StoredBlocks):
                    packed.pack_blocks(place, part, codes.blocks)
                else:
                    packed.pack_quantized(place, part, codes.codes, codes.scales)
                return codes.elements * source.dtype.itemsize
            assert piece is not None, "a piece has codes or values"
            if part.endswith("_bias"):
                packed.pack_bias(place, part.removesuffix("_bias"), as_array(piece.float().contiguous()))
            elif FORMATS[weight_type].stored:
                packed.pack_blocks(place, part, self._encoded(piece, weight_type, origin))
            else:
                packed.pack(place, part, as_array(rounded(piece).contiguous()))
            return piece.nbytes

        return pack

    def _encoded(self, piece: torch.Tensor, weight_type: str, origin: str) -> NDArray[np.uint8]:
        """Return a matrix in the blocks of a stored format, which the kernels do not quantise to."""
        if not bool(piece.isfinite().all()):
            raise CheckpointError(f"{origin}: a weight is NaN or infinite, which {weight_type} cannot hold; download the checkpoint again")
        return FORMATS[weight_type].encode(piece)

    def _checked(self, source: WeightSource, part: Part, expert: int) -> torch.Tensor:
        piece = source.read_shaped(part, self.layout.part_shape(part), expert)
        if piece.dtype not in STORED_TYPES:
            raise CheckpointError(
                f"{source.origin(part, expert)}: dtype {piece.dtype} cannot be an expert's weight; "
                "float32, float16 and bfloat16 checkpoints are supported"
            )
        return piece

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        # A recorded step sends messages again only if they are part of an operation.
        messages = self._group is not None and torch._C._len_torch_dispatch_stack() > 0
        if messages or torch.compiler.is_compiling() or needs_gradient(hidden_states, top_k_weights):
            routed: torch.Tensor = experts(hidden_states, top_k_index, top_k_weights, self._number)
            return routed
        return self._called(hidden_states, top_k_index, top_k_weights)

    def _called(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """What `forward` does where nothing traces or records it."""
        overlap = self._shared_overlap
        if overlap is None or not len(hidden_states):
            return self.compute(hidden_states, top_k_index, top_k_weights)
        routed = overlap.take_routed(hidden_states, top_k_index, top_k_weights)
        return self.compute(hidden_states, top_k_index, top_k_weights, overlap.begin(hidden_states)) if routed is None else routed

    def compute(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Compute the experts; call `meanwhile` while other processes compute theirs."""
        gpu = self.gpu_layer
        if gpu is not None and gpu.shared_overlap is not None:
            routed = gpu.shared_overlap.take_routed(hidden_states, top_k_index, top_k_weights)
            if routed is not None:
                return routed
        sparsity = self.sparsity
        observer = None if sparsity is None else sparsity.observer  # only the CPU's kernel has the activations
        if gpu is not None and len(hidden_states) and observer is None:
            return gpu.forward(hidden_states, top_k_index, top_k_weights)
        top_k_index, top_k_weights = self._draft.narrow(top_k_index, top_k_weights)
        tokens = rounded(hidden_states.detach().to("cpu")).contiguous()
        index = top_k_index.to("cpu", torch.int64).contiguous()
        weights = top_k_weights.detach().to("cpu", torch.float32).contiguous()
        group = self._group
        if group is None:
            out = torch.empty_like(tokens)
            self._compute(tokens, index, weights, out)
        else:
            out = group.forward(self._layer, tokens, index, weights, meanwhile)
        return out.to(hidden_states.device, hidden_states.dtype)

    def _compute(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        """Compute contiguous tensors on the CPU with the experts that this process holds, whose numbers begin at 0."""
        assert self._packed is not None, "forward before load: optimize_and_load loads every operator before it returns"
        arrays = as_array(tokens), index.numpy(), as_array(weights), as_array(out)
        sparsity = self.sparsity
        if sparsity is None:
            self._runtime.forward(self._packed, *arrays)
            return
        observer = sparsity.observer
        sparsity.begin(len(tokens))
        acted = None if observer is None else np.empty((*index.shape, self._packed.shape.intermediate), np.float32)
        now = sparsity.in_force()
        self._runtime.forward(self._packed, *arrays, threshold=now.threshold, neuron_counts=now.counts, acted=acted)
        if observer is not None and acted is not None:
            observer(index, torch.from_numpy(acted))

    def extra_repr(self) -> str:
        layout = self.layout
        sizes = f"num_experts={layout.num_experts}, hidden={layout.hidden}, intermediate={layout.intermediate}"
        return f"{sizes}, weights={self.weight_type or self.options.weights}, threads={self._runtime.threads}"
