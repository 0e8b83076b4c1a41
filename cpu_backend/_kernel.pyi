"""Types of the C++ extension. T tokens, K experts per token, E experts, H hidden size, I intermediate size."""

from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

PartName = Literal["gate", "up", "down"]
Array = NDArray[Any]  # float32, float16, or bfloat16 as its bits in uint16
Tensor = torch.Tensor | Array  # read in place; tensors through DLPack's C exchange interface

LAYOUT_VERSION: Final[int]
"""Increased whenever the meaning of packed bytes changes; caches of packed weights are keyed by it."""

class ReadError(RuntimeError, OSError):
    """A file of experts cannot be read; the message names it and what to do."""

class GateSpec:
    """The activation and limits of an expert's gate, immutable and hashable.

    Gated: `min(act(min(gate, gate_limit); alpha), act_limit) * (clamp(up, -up_limit, up_limit) + up_offset)`; ungated: `act(up; alpha)`.
    `alpha` scales silu's sigmoid argument, `x * sigmoid(alpha * x)`.

    Raises:
        ValueError: an unknown activation, a limit that is NaN, a negative `up_limit`.
    """

    def __init__(
        self,
        activation: str = "silu",
        alpha: float = 1.0,
        gate_limit: float = ...,
        act_limit: float = ...,
        up_limit: float = ...,
        up_offset: float = 0.0,
    ) -> None: ...
    @property
    def activation(self) -> str: ...
    @property
    def alpha(self) -> float: ...
    @property
    def gate_limit(self) -> float: ...
    @property
    def act_limit(self) -> float: ...
    @property
    def up_limit(self) -> float: ...
    @property
    def up_offset(self) -> float: ...
    def __hash__(self) -> int: ...

class ExpertsShape:
    """Sizes of a layer's experts, immutable and hashable; `gated` experts have a gate part, `bias` a bias for every part.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, num_experts: int, hidden: int, intermediate: int, gated: bool = True, bias: bool = False) -> None: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def gated(self) -> bool: ...
    @property
    def bias(self) -> bool: ...
    def __hash__(self) -> int: ...

class PackedExperts:
    """All experts of one layer in the order in which the kernel reads them, with `expert_bytes` contiguous bytes per expert.

    int8 and int4 are GGUF's Q8_0 and Q4_0: groups of 32 along the input with one float16 scale. All other formats of
    blocks, such as q4_k and mxfp4, are packed unchanged from a file; the kernel does not quantise to them.

    Args:
        weight_type: one type for all parts, or two joined by a plus sign: `q4_k+q6_k` has gate and up in q4_k and down in q6_k.
        buffer: (E * expert_bytes,) uint8 at an address that is a multiple of 64, such as a mapped cache file; kept alive, not copied. A
            read-only buffer counts as completely packed.
        sparse: use the layout whose `forward` accepts a `threshold` and skips the rows of up and (transposed) down of neurons below it.
            int8 and int4 quantise down along H, one scale for 32 outputs; all parts have one weight type, which cannot be a file's.

    Raises:
        ValueError: an unknown weight type, an input that is no multiple of a file's blocks, a buffer of wrong size or alignment.
        MemoryError: the memory cannot be allocated.
    """

    def __init__(
        self, shape: ExpertsShape, gate_spec: GateSpec, weight_type: str, buffer: NDArray[np.uint8] | None = None, *, sparse: bool = False
    ) -> None: ...
    @staticmethod
    def expert_bytes_for(shape: ExpertsShape, weight_type: str, *, sparse: bool = False) -> int: ...
    @property
    def sparse(self) -> bool: ...
    @property
    def shape(self) -> ExpertsShape: ...
    @property
    def gate_spec(self) -> GateSpec: ...
    @property
    def weight_type(self) -> str: ...
    def weight_type_of(self, part: str) -> str: ...
    @property
    def expert_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def frames(self) -> ExpertFrames | None:
        """What holds the experts that are computed with; None where that is `buffer`."""
    @property
    def layer_in_frames(self) -> int:
        """The number of the layer in `frames`; -1 where there are none."""
    @property
    def buffer(self) -> NDArray[np.uint8]:
        """The packed bytes, (E * expert_bytes,), without a copy."""
    @property
    def writable(self) -> bool: ...
    @property
    def packed_mask(self) -> NDArray[np.uint8]:
        """(E,): bits 0 to 2 for the packed parts gate, up, down; bits 3 to 5 for their biases."""
    @property
    def weights_ready(self) -> bool:
        """Whether every part of every expert is packed."""
    def pack(self, expert: int, part: str, array: Array) -> None:
        """Pack a matrix in `nn.Linear` orientation, C-contiguous: gate and up (I, H), down (H, I). Values are rounded to the weight type.

        Raises:
            TypeError: a dtype other than float32, float16 and uint16.
            ValueError: wrong shape, order, expert or part; read-only buffer.
        """
    def pack_quantized(self, expert: int, part: str, codes: NDArray[np.int8], scales: NDArray[np.float16]) -> None:
        """Pack codes (rows, cols) and scales (rows, cols / 32) unchanged; int4 codes are -8 to 7.

        In a sparse layout, down is dequantised and quantised again, along H.
        """
    def pack_blocks(self, expert: int, part: str, blocks: NDArray[np.uint8]) -> None:
        """Pack rows of a file's format unchanged: (rows, bytes of a row)."""
    def pack_bias(self, expert: int, part: str, array: NDArray[np.float32]) -> None: ...
    def unpack(self, expert: int, part: str) -> NDArray[np.float32]:
        """Return the matrix that the kernel computes with, (rows, cols), dequantised without further rounding."""

class CachePolicy:
    """Ranks the experts of each layer by how much a cache should keep them, from the routing that it has observed.

    Args:
        policy: `mrs`, HybriMoE's Minus Recent Score (section IV-D, eq. 3), applied for each token: `S = alpha * TopP(s) + (1 - alpha) * S`;
            `lru`, the latest use; `lfu`, the uses since the start, of equals the latest; `score_frequency`, the average of `mrs` and a
            slower one of uses, each divided by its mean in the layer; `static`, the uses in `profile`.
        alpha, frequency_alpha: the newest token's weight in the average of scores and in that of uses.
        top_p: how many of a token's largest scores count; 0: all.
        profile: (layers, num_experts) integers, for `static` only.

    Raises:
        ValueError: an unknown policy, or arguments out of their ranges.
    """

    def __init__(
        self,
        policy: str,
        layers: int,
        num_experts: int,
        *,
        alpha: float = 0.1,
        frequency_alpha: float = 0.01,
        top_p: int = 0,
        profile: NDArray[np.int64] | None = None,
    ) -> None: ...
    def update(self, layers: Sequence[int], scores: NDArray[np.float32], chosen: NDArray[np.int64]) -> None:
        """Observe one step of N layers, whose T tokens are in their order.

        The scores of a token that are not all finite do not count.

        Args:
            scores: (N, T, E), the scores of the layers' routers.
            chosen: (N, T, K), the experts that are computed; -1 for a padded slot.
        """
    def priority(self, layer: int) -> NDArray[np.float64]:
        """Return (E,), larger: keep; comparable among layers. Read-only, and valid until the next update."""
    def priorities(self) -> NDArray[np.float64]:
        """Return `priority` of all layers, (L, E)."""

class ExpertFrames:
    """Host memory for the experts of all layers of a model that lie in files: each frame holds one expert.

    The experts that a layer computes with are read first, in several pieces at once and past the page cache; then those that the next
    layer's router chooses for this layer's hidden states, of many tokens for some of them. A cache policy ranks the experts of all layers
    together; its scores are the routing weights of the experts that a token uses.

    Args:
        readers: threads that read, and so requests at once.

    Raises:
        ValueError: `readers` is not 1 to 64.
    """

    def __init__(self, readers: int = 4) -> None: ...
    @staticmethod
    def least_bytes_for(num_experts: int, expert_bytes: int, readers: int = 4) -> int:
        """Return the least memory for layers of so many experts: for one layer, and for what is being read ahead."""
    def add(self, experts: PackedExperts, path: str, offset: int, checksums: Sequence[int] = ()) -> int:
        """Let `experts` compute from frames, which are filled from a file; return the layer's number. Layers are added in their order.

        Args:
            offset: of the first expert in the file, a multiple of 64.
            checksums: CRC-32 of each expert, verified when it is first read.

        Raises:
            ReadError: the file cannot be opened, or is too short.
            ValueError: a wrong offset or number of checksums; the frames are open.
        """
    def set_router(self, layer: int, weight: Tensor, bias: Tensor | None = None, choice_bias: Tensor | None = None) -> None:
        """Set the rows (E, H), of a layer's router or fitted ones, read in place, by which its experts are predicted.

        Args:
            bias: (E,) float32 of the logits.
            choice_bias: (E,) float32, added to the sigmoid of logits for the choice.
        """
    def open(self, nbytes: int, policy: CachePolicy | None = None) -> None:
        """Allocate frames in so much memory and start the readers; called again, nothing happens.

        Args:
            policy: for as many layers, and at least as many experts as each has; it must not be used otherwise from now on. By default
                `score_frequency`.

        Raises:
            ValueError: fewer than `least_frames` fit; the policy is for other layers or fewer experts.
            MemoryError: the memory cannot be allocated.
        """
    @property
    def frames(self) -> int: ...
    @property
    def frame_bytes(self) -> int: ...
    @property
    def least_frames(self) -> int:
        """Of the largest layer, and for what is being read ahead."""
    def residents(self, layer: int) -> list[int]:
        """Return the experts of a layer that are in memory."""
    def in_memory(self, layer: int, expert: int) -> bool: ...
    def ask(self, layer: int, experts: Sequence[int]) -> None:
        """Ask for experts, which are read after what layers demand; those not begun by the next demand are forgotten. Does not wait."""
    def pin(self, layer: int, expert: int) -> None:
        """Wait until an expert is in memory, where it stays until `unpin`. A thread holds one at a time, as frames may be few.

        Raises:
            ReadError: it cannot be read; the message names the file.
        """
    def unpin(self, layer: int, expert: int) -> None: ...
    def copy(self, layer: int, expert: int, start: int, out: NDArray[np.uint8]) -> None:
        """Copy bytes of an expert, which is read if it is not in memory.

        Raises:
            ReadError: it cannot be read; the message names the file.
        """
    def counts(self) -> dict[str, float]:
        """Return what was counted so far.

        `demanded` experts, once a layer and step, of which `resident` were in memory and `arriving` being read ahead; `reads` of experts,
        `read_bytes`, of these reads those `predicted`, and of these `unused`; `waited_ms`, during which some thread waited for an expert,
        and `waited_bytes`, which arrived meanwhile; `precision`, a moving average of how many predicted experts were chosen.
        """

class PackedLinear:
    """One `nn.Linear` matrix (rows, cols) in the experts' layout, with an optional bias."""

    def __init__(self, rows: int, cols: int, weight_type: str) -> None: ...
    @staticmethod
    def nbytes_for(rows: int, cols: int, weight_type: str) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def weight_type(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def buffer(self) -> NDArray[np.uint8]:
        """The packed bytes of the matrix without the bias, without a copy; read-only."""
    def pack(self, array: Array) -> None: ...
    def pack_quantized(self, codes: NDArray[np.int8], scales: NDArray[np.float16]) -> None: ...
    def pack_blocks(self, blocks: NDArray[np.uint8]) -> None: ...
    def pack_bytes(self, buffer: NDArray[np.uint8]) -> None:
        """Copy the bytes of another object's `buffer`, of the same sizes and weight type."""
    def pack_bias(self, array: NDArray[np.float32]) -> None: ...
    def unpack(self) -> NDArray[np.float32]: ...

class NormSpec:
    """A root-mean-square norm of rows: `x / sqrt(mean(x^2) + epsilon) * (weight_offset + weight)`, sums in float32.

    Args:
        element_type: float32, float16 or bfloat16, of rows, weights and results.
        cols: length of a row.
        rounds_first: whether to round the quotient to `element_type` before the product with the weight.
        gate: the function of a gate, such as `silu`, by which a row is multiplied in float32; empty where there is none.
        group: columns of a gated norm that are normed together.
        gate_first: whether the product with the gate is normed, and rounded before that with the weight; else the norm is multiplied.
        wide: whether the norm is not rounded before the product with the gate.

    Raises:
        ValueError: an unknown type, `cols` below 1, an `epsilon` that is negative or not finite; an unknown function of a gate, or a
            `group` that does not divide `cols`, is above 8192, or not `cols` where the gate is not first.
    """

    def __init__(
        self,
        element_type: str,
        cols: int,
        epsilon: float,
        weight_offset: float = 0.0,
        rounds_first: bool = False,
        *,
        gate: str = "",
        group: int = 0,
        gate_first: bool = False,
        wide: bool = False,
    ) -> None: ...

class RouterSpec:
    """The computation of a router's logits and its choice of experts, in descending order of score, ties by index.

    Args:
        hidden: columns of the weight.
        experts: rows of the weight.
        element_type: float32, float16 or bfloat16, of hidden states and weight; logits are accumulated in float32.
        logits_type, weights_type: types of the results.
        rounds_logits: whether to round the logits to `element_type` before they are scored.
        score: `softmax` or `sigmoid` over all experts, or `chosen_softmax` over the logits of the chosen experts.
        normalise: whether to scale the weights of the chosen experts to a sum of 1, before `scale`.
        groups: number of groups of experts. Only experts of the best `kept_groups` groups can be chosen (DeepSeek-V3, arXiv:2412.19437);
            `group_score` ranks groups by their `largest` score or the sum of their `two_largest`.
        choice_bias: (experts,) float32, added to the scores for the choice alone; copied.
        logit_bias: (experts,) float32, added to the logits; copied.

    Raises:
        TypeError: an unknown or missing keyword.
        ValueError: an unknown name, or sizes that do not fit each other.
    """

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        element_type: str,
        logits_type: str,
        weights_type: str,
        rounds_logits: bool = False,
        score: str = "softmax",
        normalise: bool = False,
        scale: float = 1.0,
        groups: int = 1,
        kept_groups: int = 1,
        group_score: str = "two_largest",
        choice_bias: NDArray[np.float32] | None = None,
        logit_bias: NDArray[np.float32] | None = None,
    ) -> None: ...

class HostCall:
    """One forward call with its arguments, for a CUDA host function whose user data is `address`.

    It keeps its arrays alive. The object must exist as long as the function may be called.
    """

    @property
    def address(self) -> int: ...
    def check(self) -> None:
        """Raise the exception of the last run, once."""

class _HostCallMaker(Protocol):
    def __call__(
        self,
        experts: PackedExperts,
        hidden_states: Array,
        top_k_index: NDArray[np.int64],
        top_k_weights: NDArray[np.float32],
        out: Array,
        *,
        threshold: float = 0.0,
        neuron_counts: NDArray[np.int64] | None = None,
    ) -> HostCall: ...

class Runtime:
    """Kernels for this CPU and a persistent pool of threads.

    Calls run on PyTorch's own OpenMP threads if their number is the same: these spin for milliseconds after each operation, and a second
    pool would compete with them for cores. Submitted work runs on the runtime's pool, whose idle threads sleep. Calls from several Python
    threads are serialised; the GIL is released while the kernel works. After a fork the child must create its own Runtime.

    Args:
        threads: number of threads; 0 for one per physical core, within the process's affinity and its container's CPU quota.
        isa: an instruction set of `available_isas()`; by default that of the environment variable MOEGRAFT_ISA, or else the last one,
            without matrix kernels that fail a self-test.
        share_threads: whether to use PyTorch's threads; False runs all work on the runtime's own threads.
        matrix_tokens: the tokens of an expert, or of a linear layer's input, from which on the matrix kernel computes; by default a
            measured number for each weight type, and 0 for never. What a token gets depends on the kernel (by about 1 % with integer
            weights) but not on the tokens beside it: with 0 or 1 it does not depend on the batch.
        node_groups: the number of groups of cores that count as memory nodes (NUMA) without memory of their own; by default that of the
            environment variable MOEGRAFT_NODES, or else the system's own nodes, and one where a node has fewer cores than its share of the
            threads.

    Raises:
        ValueError: an invalid number of threads, tokens or groups, an unknown or unavailable instruction set.
    """

    def __init__(
        self, threads: int = 0, isa: str | None = None, share_threads: bool = True, matrix_tokens: int | None = None, node_groups: int = 0
    ) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def memory_nodes(self) -> int:
        """The memory nodes, such as sockets, over which threads are shared out. With several, all work runs on the runtime's threads."""
    def divide(self, weights: PackedExperts | PackedLinear) -> None:
        """Divide weights over the memory nodes by rows, before anything is packed, so that the threads of each node read its own part.

        Nothing happens with one node, for experts in the sparse layout, and for those in a buffer of the caller's.
        """
    @property
    def shares_threads(self) -> bool:
        """Whether `forward`, called now on this thread, would run on PyTorch's OpenMP threads."""
    @property
    def isa(self) -> str:
        """The instruction set in use."""
    @property
    def matrix_tokens(self) -> dict[str, int]:
        """The least tokens of the matrix kernel by weight type, for bfloat16 activations; types that it does not serve are missing."""
    @staticmethod
    def available_isas() -> list[str]: ...
    @staticmethod
    def compiled_isas() -> list[str]: ...
    @staticmethod
    def default_isa() -> str:
        """Return the `isa` of a runtime without an explicit choice, by argument or by MOEGRAFT_ISA."""
    def forward(
        self,
        experts: PackedExperts,
        hidden_states: Array,
        top_k_index: NDArray[np.int64],
        top_k_weights: NDArray[np.float32],
        out: Array,
        *,
        threshold: float = 0.0,
        neuron_counts: NDArray[np.int64] | None = None,
        acted: NDArray[np.float32] | None = None,
    ) -> None:
        """Compute the routed experts of a layer into `out`, accumulated in float32 and rounded once.

        Args:
            hidden_states: (T, H) float32, float16, or bfloat16 as uint16.
            top_k_index: (T, K) expert ids; -1 and E are padded slots.
            top_k_weights: (T, K) weights of the experts' outputs.
            out: (T, H), dtype of hidden_states.
            threshold: sparse layouts only: neurons with `|act(gate)|` (ungated: `|act(up)|`) below it count as zero.
            neuron_counts: sparse layouts only: (2,); incremented by the neurons that reached the threshold, and by all neurons.
            acted: sparse layouts only: (T, K, I), receives `act(gate)`; rows of padded slots are not written.

        Raises:
            TypeError: wrong dtype.
            ValueError: wrong shape or order, an id out of range, an expert with a part that was never packed.
            RuntimeError: called in a forked child.
        """
    def adapted_forward(
        self,
        experts: PackedExperts,
        hidden_states: Array,
        top_k_index: NDArray[np.int64],
        top_k_weights: NDArray[np.float32],
        out: Array,
        *,
        gate_up: Tensor | None = None,
        activations: Tensor | None = None,
    ) -> None:
        """Compute `forward` of experts in the dense layout with low-rank adapters, whose own products the caller computes.

        Rows of padded slots are neither read nor written.

        Args:
            gate_up: (T, K, 2I or, without a gate, I) float32, added to gate and up before the activation; the gate's rows come first.
            activations: (T, K, I) float32, receives what the down projection multiplies.

        Raises:
            TypeError, ValueError, RuntimeError: as `forward`.
        """
    def submit(
        self,
        experts: PackedExperts,
        hidden_states: Array,
        top_k_index: NDArray[np.int64],
        top_k_weights: NDArray[np.float32],
        out: Array,
        *,
        threshold: float = 0.0,
        neuron_counts: NDArray[np.int64] | None = None,
        acted: NDArray[np.float32] | None = None,
    ) -> int:
        """Queue `forward` and return a ticket at once; the arrays stay alive and must not change until `wait(ticket)`."""
    def wait(self, ticket: int) -> float:
        """Block until the submitted work is done and raise its exception, if any. Each ticket can be waited for once.

        Returns:
            The ms that it took, from its submission or the end of the work before it.
        """
    def linear(self, linear: PackedLinear, x: Tensor, out: Tensor) -> None:
        """Compute `out (..., rows) = x (..., cols) @ weight.T + bias`, accumulated in float32 and rounded once.

        Args:
            x: float32, float16 or bfloat16, contiguous and on the CPU.
            out: the same leading dimensions and dtype.

        Raises:
            TypeError: a wrong dtype, or neither a tensor nor an array.
            ValueError: a wrong shape, order or device.
        """
    def norm(self, norm: NormSpec, x: Tensor, weight: Tensor | None, out: Tensor, gate: Tensor | None = None) -> None:
        """Normalise every row of `x` (..., cols) into `out`; `weight` is (cols,), `gate` like `x`. All have the norm's element type."""
    def route(self, router: RouterSpec, x: Tensor, weight: Tensor, logits: Tensor, weights: Tensor, index: Tensor) -> None:
        """Choose the experts of `x` (T, H) with the router's `weight` (E, H).

        Args:
            logits: (T, E) of the logits type, written.
            weights: (T, K) of the weights type, written.
            index: (T, K) int64, written.
        """
    def attention(
        self,
        query: Array,
        key: Array,
        value: Array,
        out: Array,
        *,
        scale: float,
        mask: Array | NDArray[np.bool_] | None = None,
        causal: bool = False,
        softcap: float = 0.0,
        sinks: NDArray[np.float32] | None = None,
        key_tail: Array | None = None,
    ) -> None:
        """Attention over a KV cache: `softmax(scale * query @ key.T + mask) @ value`, accumulated in float32 by online softmax.

        Few queries read the cache in place, once for all heads that share it; many queries are computed by register tiles over a packed
        copy. bfloat16 operands are multiplied in bfloat16 if the CPU supports it, and with many queries the softmax's weights are rounded
        to bfloat16.

        Args:
            query: (B, heads, T, D); query, key and value have one dtype and any strides, with the last dimension contiguous.
            key: (B, KV heads, S, D); `heads` is a multiple of KV heads.
            value: (B, KV heads, S, D of values).
            out: (B, T, heads, D of values), C-contiguous, of the same dtype.
            mask: (1 or B, 1 or heads, T, S): bool, True where a query attends to a key; or values that are added
                to the scores, in the dtype of `query`.
            causal: query t of T attends to the keys up to S - T + t.
            softcap: scores become `softcap * tanh(score / softcap)`; 0 disables it.
            sinks: (heads,), a logit for each head that takes part in the softmax without a value (GPT-OSS).
            key_tail: (B, KV heads, S, N), the last N columns of the keys, where `key` has the D - N before them (DeepSeek-V2).

        Raises:
            ValueError: shapes or strides that do not fit.
            TypeError: dtypes that do not fit.
        """
    def paged_attention(
        self,
        query: Array,
        key: Array,
        value: Array,
        out: Array,
        pool: object,
        table: object,
        held: object,
        *,
        page_tokens: int,
        key_start: int,
        value_start: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: NDArray[np.float32] | None = None,
        latent: bool = False,
    ) -> None:
        """Append new tokens to sequences of different lengths whose keys and values are in pages, then attend causally to each.

        Query t of sequence b attends to its keys up to number `held[b] + t`. A result depends on its own sequence only.

        Pages may hold codes: then `pool` and the starts count bytes, and behind the codes of a KV head, (page_tokens, columns) int8, are
        the scales of its rows, (page_tokens,) float32: the largest magnitude / 127. Queries in 16 bits are then rounded to 15 bits beside
        the largest magnitude of a row, where the CPU has products of bytes.

        Args:
            query: (B, heads, T, D); query, key and value have one dtype and any strides, with the last dimension contiguous.
            key: (B, KV heads, T, D), new keys.
            value: (B, KV heads, T, D of values), new values.
            out: (B, T, heads, D of values), C-contiguous, of the same dtype.
            pool: (pages, elements) tensor of the same dtype, or (pages, bytes) int8. Of a page, the keys (KV heads, page_tokens, D) begin
                at element `key_start`, the values at `value_start`.
            table: (B or more, most pages of a sequence) int64 tensor, the pages of each sequence in order.
            held: (B or more,) int64 tensor, the tokens that each sequence has before the call.
            page_tokens: tokens of a page, a power of two.
            window: keys that a query attends to, its own included; 0 for all.
            softcap, sinks: as in `attention`.
            latent: `key` is (B, KV heads, T, D - N), and also the values; `value` is (B, KV heads, T, N), the keys' last columns.

        Raises:
            ValueError: shapes or strides that do not fit, or a page that is not in the pool.
            TypeError: dtypes that do not fit.
        """
    def matmul(self, a: Array, b: Array, out: Array) -> None:
        """Batched product of a few rows, accumulated in float32 and rounded once; strides are free but for the contiguous dimensions.

        Args:
            a: (B, M, K), rows contiguous; of one dtype with the others.
            b: (B, K, N), rows or columns contiguous, read in place.
            out: (B, M, N), rows contiguous.

        Raises:
            ValueError: shapes or strides that do not fit.
            TypeError: dtypes that do not fit.
        """
    def recurrent(self, name: str, operands: Sequence[object | None], numbers: Sequence[float], past: Sequence[object] = ...) -> None:
        """Compute a rule of recurrent layers for T tokens, one after the other, in float32; a result is rounded once.

        Operands are tensors of any float dtypes and strides, with the last dimension contiguous where it is K, V or N, or None. The first
        two are written. States are float32 and contiguous but those of `short_conv`; the state before the first token may be the memory
        of the state after the last one; None: zeros. `past` are empty, or as many tensors in the form of the state as there are tokens
        before the last one, and receive the states after these. Of `short_conv` they may be fewer, for its last tokens.

        - `delta_rule`: the gated delta rule. Operands: out (B, T, H, V), state (B, H, K, V), query and key (B, T, G, K), value
          (B, T, H, V), logarithms of decays (B, T, H) or (B, T, H, K), beta (B, T, H), state before. Numbers: a factor of queries, and
          what is added to the squared norms by whose roots queries and keys are divided (negative: they are not).
        - `short_conv`: a causal convolution of each channel. Operands: out (B, C, T), state (B, C, columns), which precedes x and is
          updated, x (B, C, T), weight (C, taps), bias (C,) or None. Number: whether SiLU follows.
        - `selective_scan`: Mamba's and Mamba-2's rule. Operands: out (B, T, H, C), state (B, H, C, N), x (B, T, H, C), dt (B, T, H),
          A (H,) or (H, N), B and C (B, T, G, N), D (H,) or None, the bias of dt (H,) or None, gate (B, T, H, C) or None, state before.
          Numbers: whether softplus is applied to dt, its least and its largest value.

        Raises:
            ValueError: shapes or strides that do not fit, or another name.
            TypeError: dtypes that do not fit.
        """
    def experts_gradient(
        self,
        experts: PackedExperts,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        gradient: Tensor,
        hidden_gradient: Tensor,
        weight_gradients: Tensor,
        *,
        gate_up: Tensor | None = None,
        activation_gradients: Tensor | None = None,
        activations: Tensor | None = None,
        gate_up_gradients: Tensor | None = None,
    ) -> None:
        """Compute the gradients of the inputs of `forward`, or of `adapted_forward`; activations are computed again, packed weights are
        constants.

        Products with the weights' columns are in bfloat16 for bfloat16 activations and in float32 for others, whatever the weights' type.
        Rows of padded slots are neither read nor written.

        Args:
            experts: in the dense layout.
            hidden_states, top_k_index, top_k_weights: as in `forward`.
            gradient: (T, H), that of the output, in the dtype of `hidden_states`.
            hidden_gradient: (T, H), receives that of `hidden_states`, in its dtype.
            weight_gradients: (T, K) float32, receives those of `top_k_weights`, with zeros for padded slots.
            gate_up: (T, K, 2I or, without a gate, I) float32, as in `adapted_forward`.
            activation_gradients: (T, K, I) float32, added to the gradients of the activations before these are multiplied by the routing
                weight: what adapters of the down projection pass back.
            activations: (T, K, I) float32, receives the activations.
            gate_up_gradients: (T, K, 2I or I) float32, receives the gradients of gate and up, routing weight included.

        Raises:
            TypeError, ValueError, RuntimeError: as `forward`; experts in the sparse layout.
        """
    def linear_gradient(self, linear: PackedLinear, gradient: Tensor, out: Tensor) -> None:
        """Compute `gradient @ weight`, the gradient of a layer's input: (..., rows) -> `out` (..., cols), of one dtype."""
    def _keep_awake(self) -> None: ...
    def _let_sleep(self) -> None: ...
    def host_function(self) -> tuple[int, _HostCallMaker]:
        """Return the address of a C function `void (*)(void*)` that runs a HostCall, and a maker of HostCalls (arguments of `forward`)."""

def search_grid(
    weight_type: str,
    x: NDArray[np.float32],
    weight: NDArray[np.float32],
    scales: NDArray[np.float32],
    *,
    shift: float = 0,
    threads: int = 1,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.uint16], NDArray[np.uint8]]:
    """Return, for groups of columns and candidates of their scales, the nearest points of a type's grid, by weighted squared errors.

    Args:
        weight_type: `iq1_s`, `iq2_xxs`, `iq2_xs`, `iq2_s`, `iq3_xxs` or `iq3_s`.
        x, weight: (groups, columns), where a group has 16 columns for `iq2_xs` and `iq2_s`, and 32 for the others.
        scales: (groups, candidates), not negative.
        shift: is added to the numbers of the grid.

    Returns:
        Sums of weight * x * number and of weight * number^2, (groups, candidates); the points, (groups, candidates, points of a group);
        the signs, (groups, candidates, columns / 8), where bit i of a byte is set if column i is negative.

    Raises:
        ValueError: a type without a grid, or other shapes.
    """

def activations() -> list[str]: ...
def grid_points() -> dict[str, NDArray[np.uint64]]:
    """Return the points of each weight type's grid: the magnitudes of 4 or 8 columns in the bytes of a number, the first in the lowest."""

def default_threads() -> int: ...
def crc32(data: NDArray[np.uint8]) -> int:
    """Return the CRC-32 of contiguous bytes, as `zlib.crc32` does, by the CPU's instructions for it. Threads may run it at once."""

def select_isa(features: set[str], wanted: str = "") -> tuple[str, dict[str, int]]:
    """Return `Runtime.isa` and `Runtime.matrix_tokens` for a CPU with these features: avx2, avx512, vnni, bf16, amx, tile_permission.

    Raises:
        ValueError: an unknown feature; an instruction set that is unknown or not on such a CPU.
    """

def cores_of_cpu_max(text: str) -> int:
    """Return the number of whole cores that the text of a cgroup's cpu.max allows, at least 1; 0 for no limit."""

class LayerProblem(Protocol):
    """The fields of `operators.offload.scheduler.LayerProblem`, which documents them."""

    @property
    def loads(self) -> NDArray[np.int32]: ...
    @property
    def cpu_ms(self) -> NDArray[np.float64]: ...
    @property
    def gpu_ms(self) -> NDArray[np.float64]: ...
    @property
    def arrival_ms(self) -> NDArray[np.float64]: ...
    @property
    def transfer_ms(self) -> float: ...
    @property
    def first_cpu_ms(self) -> float: ...
    @property
    def cpu_free_ms(self) -> float: ...
    @property
    def gpu_free_ms(self) -> float: ...
    @property
    def link_free_ms(self) -> float: ...
    @property
    def max_transfers(self) -> int: ...

def check_problem(problem: LayerProblem) -> None:
    """Check a problem as every method of `Planner` does.

    Raises:
        TypeError: an array of another type, or not C-contiguous.
        ValueError: arrays of different lengths; a value that is negative or not a number.
    """

Linear = tuple[int, int, int]  # base, for each position, for each token that a buffer of the cache has room for
ProgramOperand = (
    tuple[int, str, Linear, tuple[Linear, ...], tuple[Linear, ...]]  # buffer, dtype, offset, sizes and strides, in elements
    | tuple[float, float]  # a number: base, for each position
)

class Pace:
    """How the runs of a program are computed: `alone`, by the calling thread, while all `workers` wait for cores that others use."""

    def __init__(self, workers: int) -> None: ...
    @property
    def alone(self) -> bool: ...
    def took(self, ns: int) -> None:
        """Take note of the time of the run for which `alone` was read."""

class Program:
    """A decode step of a whole model: operations in order, over buffers that are bound to memory of the caller.

    The methods that begin with `add_` append an operation; its operands are the results, then what it reads. Small operations run on one
    thread, the others on all threads of the runtime. A program keeps alive what its operations use, but no bound memory.

    Raises:
        ValueError: operands that do not fit an operation, from the `add_` methods, `check` or `run`.
    """

    def __init__(self, runtime: Runtime) -> None: ...
    def add_small(self, name: str, operands: Sequence[Any], numbers: Sequence[float] = ...) -> None: ...
    def add_norm(self, norm: NormSpec, operands: Sequence[Any]) -> None:
        """out, x and, if there is one, weight."""
    def add_linears(self, linears: Sequence[PackedLinear], operands: Sequence[Any]) -> None:
        """x, then the result of each layer; the layers have one weight type."""
    def add_experts(
        self,
        experts: PackedExperts,
        operands: Sequence[Any],
        threshold: float = 0.0,
        neuron_counts: NDArray[np.int64] | None = None,
    ) -> None:
        """out (T, H), hidden states (T, H), ids (T, K) int64, weights (T, K) float32; `threshold` and `neuron_counts` as in `forward`."""
    def add_router(self, router: RouterSpec, operands: Sequence[Any]) -> None:
        """logits (T, E), weights (T, K), ids (T, K) int64, hidden states (T, H), weight (E, H); at most 8 tokens."""
    def add_attention(self, operands: Sequence[Any], scale: float, softcap: float, causal: bool, mask: bool, sinks: bool) -> None:
        """out (B, T, heads, D), query (B, heads, T, D), key, value and, by the flags, mask and sinks, as in `Runtime.attention`."""
    def add_paged_attention(
        self,
        operands: Sequence[Any],
        scale: float,
        softcap: float,
        page_tokens: int,
        window: int,
        latent: bool,
        sinks: bool,
        key_start: int,
        value_start: int,
    ) -> None:
        """out, query, new keys, new values, pool, table, held and, by the flag, sinks, as in `Runtime.paged_attention`."""
    def add_matmul(self, operands: Sequence[Any]) -> None:
        """out (B, M, N), a (B, M, K), b (B, K, N) and perhaps bias (N), of one floating-point dtype."""
    def add_recurrent(self, name: str, operands: Sequence[Any], numbers: Sequence[float]) -> None:
        """The operands of `Runtime.recurrent`, with past states after the first of them; absent ones are numbers."""
    def end_stage(self) -> int:
        """End a part that `run` may end with; return the number of stages so far."""
    def bind(self, buffer: int, bytes: object, origin: int = ...) -> None:
        """Let a buffer be the memory of `bytes`, a contiguous one-dimensional tensor of bytes; offset 0 is `origin` bytes into it."""
    def check(self, first: int, last: int, room: int) -> None:
        """Check that every operand is within its buffer at the positions from `first` to `last`; to be called after `bind`."""
    def run(self, position: int, first: int, end: int) -> None:
        """Run the stages from `first` to `end` for a checked position."""
    def set_loop(self, operands: Sequence[Any], hidden: Any = None) -> None:
        """Set what `follow` and `greedy` read and write.

        Args:
            operands: logits (R, V) of some of the tokens, the T tokens that a step feeds, int64, and what counts positions, int64.
            hidden: the tokens' states.
        """
    def follow(self, position: int, tokens: Sequence[int], logits: NDArray[np.float32]) -> None:
        """Run all stages for T tokens at a checked position; `logits` (R, V) float32 receives theirs.

        What counts positions moves on by as many as this one is after that of the last run.
        """
    def greedy(self, position: int, token: int, count: int, ends: Sequence[int], longest_ns: int, hidden: object = None) -> list[int]:
        """Run all stages for `token`, for the likeliest token after it, and so on, of one sequence; return the likeliest after each.

        `hidden`, a contiguous one-dimensional tensor of bytes, receives the states of each step.
        At most `count` steps are run, none after a token of `ends`, and none begins `longest_ns` after the first.
        """
    @property
    def step_ns(self) -> list[int]:
        """The ns that each step of the latest call of `greedy` took."""
    @property
    def fed(self) -> int:
        """The steps that `follow` and `greedy` have run."""
    def spans(self) -> list[tuple[int, int]]:
        """Return when the kernel of each stage last began and ended, in ns of `time.perf_counter_ns`; 0 for a stage without one."""
    @property
    def kernel_ns(self) -> int:
        """The time that kernels have taken so far."""

class Planner:
    """One schedule, `all_cpu`, `fixed`, `on_demand`, `greedy` or `two_threshold`, with the memory it reuses.

    Holds the GIL: a plan takes microseconds.

    Raises:
        ValueError: an unknown schedule.
    """

    def __init__(self, schedule: str) -> None: ...
    def plan(self, problem: LayerProblem) -> tuple[NDArray[np.bool_], NDArray[np.int32], float]:
        """Return whether each expert is on the CPU (A,), the positions of experts to transfer (m,) in order, and the makespan in ms."""
    def makespan(self, problem: LayerProblem, on_cpu: NDArray[np.bool_]) -> float:
        """Return the makespan of any split in ms.

        Raises:
            ValueError: the split needs more than `max_transfers`.
        """
    def gains(self, problem: LayerProblem) -> NDArray[np.float64]:
        """Return the ms that each missing expert would save if it were resident (A,), evaluated one by one in descending load."""
