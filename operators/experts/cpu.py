"""The experts of one layer in host memory, packed from a checkpoint and computed by the C++ kernel.

Several processes may hold the experts together, and low-rank adapters may be beside the packed weights.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.cpu_backend import PackedExperts, Runtime
from moegraft.operators.cpu import as_array, describe, rounded
from moegraft.operators.draft import DraftSwitch
from moegraft.operators.errors import CheckpointError, UnsupportedModelError
from moegraft.operators.expert_group import ExpertGroup
from moegraft.operators.experts.packed_cache import PackedCache, key_for
from moegraft.operators.layout import ExpertsLayout
from moegraft.operators.offload.frames import InFile
from moegraft.operators.sparsity import LayerSparsity
from moegraft.operators.weight_formats import FLOAT_TYPES, FORMATS, FloatType
from moegraft.operators.weights import PackedWeights, Part, StoredBlocks, WeightSource, codes_for, sampled

Factors = tuple[torch.Tensor, torch.Tensor]  # of a projection: A (E, R, inputs) and B (E, outputs, R), scaled; B A is added to its weight
PACKERS = 2  # threads; each holds an expert as it was read, and `moegraft plan` counts two


class CpuExperts:
    """Experts of one layer, computed on the CPU.

    Args:
        weights: the weight types that the rule gives, for users.
        sparsity: which neurons are left out; the kernel's layout in memory is then the sparse one.
        warn: logs what holds for many layers once.

    Attributes:
        experts: the experts that this object holds, by their numbers in the layer.
        packed: their weights once loaded.
    """

    def __init__(
        self,
        layout: ExpertsLayout,
        experts: range,
        weights: str,
        runtime: Runtime,
        draft: DraftSwitch,
        sparsity: LayerSparsity | None,
        warn: Callable[[str], None],
    ) -> None:
        self.experts = experts
        self.draft = draft
        self.sparsity = sparsity
        self.packed: PackedExperts | None = None
        self._layout = layout
        self._weights = weights
        self.runtime = runtime
        self._warn = warn

    @property
    def weight_type(self) -> str | None:
        """The type of the packed weights; None before they are loaded."""
        return None if self.packed is None else self.packed.weight_type

    def describe(self) -> str:
        """Return a description for users: `int4 on the CPU (avx2, 2 threads)`."""
        return f"{self.weight_type or self._weights} on the CPU ({describe(self.runtime)})"

    def weight_samples(self) -> Iterator[bytes]:
        """Yield a digest of each expert: other processes hold others."""
        packed = self.packed
        assert packed is not None, "called after load"
        for expert in packed.buffer.reshape(packed.shape.num_experts, 1, -1):
            yield hashlib.sha256(sampled(expert)).digest()

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """(T, H), (T, K), (T, K) -> (T, H) in the dtype and on the device of `hidden_states`.

        Args:
            meanwhile: not called, as nothing is waited for.
        """
        tokens, index, weights = kernel_inputs(self.draft, hidden_states, top_k_index, top_k_weights)
        out = torch.empty_like(tokens)
        if self.packed is not None and self.sparsity is None:  # as `compute` does it
            self.runtime.forward(self.packed, as_array(tokens), index.numpy(), as_array(weights), as_array(out))
        else:
            self.compute(tokens, index, weights, out)
        return out.to(hidden_states.device, hidden_states.dtype)

    def compute(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        """Compute contiguous tensors on the CPU, with ids by place in `experts`: (T, H), (T, K) int64, (T, K) float32 -> `out` (T, H)."""
        packed, sparsity = self.packed, self.sparsity
        assert packed is not None, "forward before load: optimize_and_load loads every operator before it returns"
        arrays = as_array(tokens), index.numpy(), as_array(weights), as_array(out)
        if sparsity is None:
            self.runtime.forward(packed, *arrays)
            return
        observer = sparsity.observer
        sparsity.begin(len(tokens))
        acted = None if observer is None else np.empty((*index.shape, packed.shape.intermediate), np.float32)
        now = sparsity.in_force()
        self.runtime.forward(packed, *arrays, threshold=now.threshold, neuron_counts=now.counts, acted=acted)
        if observer is not None and acted is not None:
            observer(index, torch.from_numpy(acted))

    def gradients(
        self, gradient: torch.Tensor, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of `hidden_states` (T, H) and `top_k_weights` (T, K), from that of the output (T, H)."""
        assert self.packed is not None, "a backward pass follows a forward pass"
        tokens, index, weights = kernel_inputs(self.draft, hidden_states, top_k_index, top_k_weights)
        of_tokens, of_weights = torch.empty_like(tokens), torch.empty_like(weights)
        of_output = gradient.to("cpu", tokens.dtype).contiguous()
        self.runtime.experts_gradient(self.packed, tokens, index, weights, of_output, of_tokens, of_weights)
        device = hidden_states.device
        return of_tokens.to(device, hidden_states.dtype), of_weights.to(device, top_k_weights.dtype)

    def adapted(self, call: tuple[torch.Tensor, torch.Tensor, torch.Tensor], gate_up: Factors | None, down: Factors | None) -> torch.Tensor:
        """Return the output (T, H) of experts with adapters, which is differentiable with respect to all inputs but the packed weights.

        A pass keeps its inputs alone; the backward pass computes the rest again.

        Args:
            call: hidden states (T, H), ids (T, K) and routing weights (T, K); ids of -1 and E are padded slots.
            gate_up: the outputs are the rows of the gate, then those of up; those of up alone without a gate.
            down: the outputs are those of the hidden states.
        """
        none = call[0].new_empty(0)
        factors = [*(gate_up or (none, none)), *(down or (none, none))]
        out: torch.Tensor = _AdaptedExperts.apply(self, *call, *factors)  # type: ignore[no-untyped-call]
        return out

    def load(
        self,
        weight_type: str,
        source: WeightSource,
        advance: Callable[[int], None],
        cache_dir: str | None = None,
        in_frames: Callable[[PackedExperts, InFile], None] | None = None,
    ) -> None:
        """Pack the experts from `source`, or map them from a file in `cache_dir`.

        Args:
            in_frames: called with mapped experts that are to be computed from frames.

        Raises:
            CheckpointError: a piece is missing, of the wrong shape, or cannot be read.
            UnsupportedModelError: experts are to be in frames, and there is no file for them.
        """
        experts = self.experts
        sparse = self.sparsity is not None
        held = replace(self._layout, num_experts=len(experts))
        shape = self._layout.shape
        each = PackedExperts.expert_bytes_for(shape, weight_type, sparse=sparse)
        stored = source.packed(self._form(weight_type), {"experts": shape.num_experts * each})
        if stored is not None:
            here = stored["experts"][experts.start * each : experts.stop * each]
            self.packed = PackedExperts(held.shape, held.gate, weight_type, here, sparse=sparse)
            if in_frames is not None:
                tensor = source.packed_file("experts")
                if tensor is None:
                    raise UnsupportedModelError("memory: the experts in this folder are not at multiples of 64 bytes: pack the model again")
                in_frames(self.packed, InFile(tensor[0], tensor[1] + experts.start * each))
            advance(shape.num_experts * each)
            return
        fingerprint = None if cache_dir is None else source.fingerprint
        if in_frames is not None and fingerprint is None:
            reason = "give cache_dir, a folder on a fast disk" if cache_dir is None else "this model is in memory already; remove memory"
            raise UnsupportedModelError(f"memory holds some of the experts, and the others stay in files: {reason}")
        if cache_dir is None or fingerprint is None:
            if cache_dir is not None:
                warnings.warn("cache_dir is ignored: it keeps experts of checkpoints, and this model is already in memory", stacklevel=2)
            packed = PackedExperts(held.shape, held.gate, weight_type, sparse=sparse)
            self.runtime.divide(packed)
            self._pack(packed, experts, source, advance)
            self.packed = packed
            return
        read = 0

        def count(size: int) -> None:
            nonlocal read
            read += size
            advance(size)

        key = key_for(fingerprint, held, weight_type, sparse=sparse, experts=experts)
        cache = PackedCache(cache_dir, self._warn)
        found = cache.open(key, held, verify=in_frames is None)
        self.packed = found or cache.build(key, held, lambda packed: self._pack(packed, experts, source, count))
        place = cache.in_file(key)
        if in_frames is not None and place is not None and not self.packed.writable:
            in_frames(self.packed, place)
        values = sum(math.prod(self._layout.part_shape(part)) for part in self._layout.parts())
        advance(len(experts) * values * source.dtype.itemsize - read)

    def packed_weights(self) -> PackedWeights | None:
        """Return the packed experts, without a copy; None where other processes hold some of them."""
        assert self.packed is not None, "called after load"
        if len(self.experts) < self._layout.num_experts:
            return None
        return PackedWeights(self._form(self.packed.weight_type), {"experts": self.packed.buffer})

    def _form(self, weight_type: str) -> dict[str, str | int | bool]:
        shape = self._layout.shape
        sizes = {"experts": shape.num_experts, "hidden": shape.hidden, "intermediate": shape.intermediate}
        return {"weights": weight_type, **sizes, "gated": shape.gated, "bias": shape.bias, "sparse": self.sparsity is not None}

    def _pack(self, packed: PackedExperts, experts: Sequence[int], source: WeightSource, advance: Callable[[int], None]) -> None:
        """Read and pack the experts in order, two at the same time."""

        def pack(place: int, expert: int) -> int:
            return sum(pack_piece(packed, place, self._layout, source, part, expert) for part in self._layout.parts())

        threads = min(self.runtime.threads, PACKERS)
        with ThreadPoolExecutor(threads, thread_name_prefix="moegraft-pack") as pool:
            packing: deque[Future[int]] = deque()
            for place, expert in enumerate(experts):
                if len(packing) > threads:  # one waits, so that no thread does
                    advance(packing.popleft().result())
                packing.append(pool.submit(pack, place, expert))
            for done in packing:
                advance(done.result())


def stored_type(dtype: torch.dtype, origin: str) -> FloatType:
    """Return the weight type that weights of a dtype are packed to where rules name none.

    Raises:
        CheckpointError: the kernels have none for them.
    """
    if dtype not in FLOAT_TYPES:
        raise CheckpointError(
            f"{origin}: dtype {dtype} cannot be an expert's weight; float32, float16 and bfloat16 checkpoints are supported"
        )
    return FLOAT_TYPES[dtype]


def pack_piece(packed: PackedExperts, place: int, layout: ExpertsLayout, source: WeightSource, part: Part, expert: int) -> int:
    """Read a piece and pack it as a part of the expert at `place`; return its bytes in the checkpoint."""
    weight_type = packed.weight_type_of(part.removesuffix("_bias"))
    codes = None if part.endswith("_bias") else codes_for(source, part, expert, weight_type)
    if codes is not None:
        if isinstance(codes, StoredBlocks):
            packed.pack_blocks(place, part, codes.blocks)
        else:
            packed.pack_quantized(place, part, codes.codes, codes.scales)
        return codes.elements * source.dtype.itemsize
    piece, origin = source.read_shaped(part, layout.part_shape(part), expert), source.origin(part, expert)
    stored_type(piece.dtype, origin)  # all others are refused
    if part.endswith("_bias"):
        packed.pack_bias(place, part.removesuffix("_bias"), as_array(piece.float().contiguous()))
    elif FORMATS[weight_type].stored:
        packed.pack_blocks(place, part, _encoded(piece, weight_type, origin))
    else:
        packed.pack(place, part, as_array(rounded(piece).contiguous()))
    return piece.nbytes


def _encoded(piece: torch.Tensor, weight_type: str, origin: str) -> NDArray[np.uint8]:
    """Return a matrix in the blocks of a stored format, which the kernels do not quantise to."""
    if not bool(piece.isfinite().all()):
        raise CheckpointError(f"{origin}: a weight is NaN or infinite, which {weight_type} cannot hold; download the checkpoint again")
    return FORMATS[weight_type].encode(piece)


class RankExperts:
    """Experts of one layer that several processes hold; this one has those of `cpu`.

    A step that a dispatch mode records sends messages again only if they are part of an operation.
    """

    def __init__(self, group: ExpertGroup, cpu: CpuExperts, num_experts: int) -> None:
        self._group = group
        self._cpu = cpu
        self._num_experts = num_experts
        self._layer = group.join(num_experts, cpu.compute)

    def describe(self) -> str:
        """Return what follows the CPU's description for users: `, experts 0 to 63 of 128`."""
        return f", experts {self._cpu.experts.start} to {self._cpu.experts[-1]} of {self._num_experts}"

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """(T, H), (T, K), (T, K) -> (T, H), summed over all processes; `meanwhile` is called while the others compute."""
        tokens, index, weights = kernel_inputs(self._cpu.draft, hidden_states, top_k_index, top_k_weights)
        out = self._group.forward(self._layer, tokens, index, weights, meanwhile)
        return out.to(hidden_states.device, hidden_states.dtype)


def kernel_inputs(
    draft: DraftSwitch, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a call's tokens (T, H), ids (T, K) int64 and weights (T, K) float32 as the CPU's kernel reads them, narrowed for a draft."""
    top_k_index, top_k_weights = draft.narrow(top_k_index, top_k_weights)
    tokens = rounded(hidden_states.detach().to("cpu")).contiguous()
    index = top_k_index.to("cpu", torch.int64).contiguous()
    return tokens, index, top_k_weights.detach().to("cpu", torch.float32).contiguous()


class _AdaptedExperts(torch.autograd.Function):
    """Experts with low-rank adapters (LoRA, Hu et al. 2021, equation 3), with own matrices for each expert.

    The kernel computes the packed weights' products and the activation. It takes what adapters add to gate and up before the activation,
    and returns the activations, from which the adapters of the down projection are computed here; the backward pass exchanges the gradients
    of both. Products of adapters are PyTorch's, expert by expert, in float32.

    Factors without elements are those of a projection without adapters. The context is torch's, without a type.
    """

    @staticmethod
    @torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator] # sums are float32
    def forward(ctx: Any, cpu: CpuExperts, *tensors: torch.Tensor) -> torch.Tensor:
        hidden, index, weights, gate_up_a, gate_up_b, down_a, down_b = tensors
        ctx.save_for_backward(*tensors)
        ctx.cpu, packed = cpu, cpu.packed
        assert packed is not None, "weights are loaded before adapters are"
        tokens, ids, shares = kernel_inputs(cpu.draft, hidden, index, weights)
        pairs = list(_pairs(ids, packed.shape.num_experts))
        terms = _terms(tokens, ids, pairs, gate_up_a, gate_up_b)
        activations = tokens.new_zeros((*ids.shape, packed.shape.intermediate), dtype=torch.float32) if down_a.numel() else None
        out = torch.empty_like(tokens)
        arrays = as_array(tokens), ids.numpy(), as_array(shares), as_array(out)
        cpu.runtime.adapted_forward(packed, *arrays, gate_up=terms, activations=activations)
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
        cpu, packed = ctx.cpu, ctx.cpu.packed
        tokens, ids, shares = kernel_inputs(cpu.draft, hidden, index, weights)
        of_output = gradients[0].to("cpu", tokens.dtype).contiguous()
        pairs = list(_pairs(ids, packed.shape.num_experts))
        given, flat_shares = of_output.float(), shares.flatten()[:, None]
        terms = _terms(tokens, ids, pairs, gate_up_a, gate_up_b)
        neurons = (*ids.shape, packed.shape.intermediate)
        exchanged: dict[str, torch.Tensor] = {}
        if down_a.numel():
            exchanged = {name: torch.zeros(neurons, dtype=torch.float32) for name in ("activation_gradients", "activations")}
            for expert, slots, places in pairs:
                exchanged["activation_gradients"].flatten(0, 1)[slots] = given[places] @ down_b[expert].float() @ down_a[expert].float()
        if terms is not None:
            exchanged["gate_up_gradients"] = torch.zeros_like(terms)
        of_tokens, of_weights = torch.empty_like(tokens), torch.empty_like(shares)
        cpu.runtime.experts_gradient(packed, tokens, ids, shares, of_output, of_tokens, of_weights, gate_up=terms, **exchanged)
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
        return None, *found, *typed


def _terms(
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
