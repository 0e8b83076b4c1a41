"""One decode step of a model, captured: replayed for every token, while the slot table changes between steps alone.

What a step chose is learnt while the next one runs, and experts that the CPU had to serve are brought up for later ones.

A layer's experts inside of a captured decode step: no decision and no wait, both devices read one routing and one slot table.

What has a slot is computed out of it, the rest by the CPU: a host function that the GPU calls, on a branch of its own beside the GPU's
experts. Shapes: L layers, T tokens (fixed), E experts, K experts a token, H hidden. No GPU has run this yet.

What a captured step needs of transformers' key-value cache: memory that stays, and counts that Python need not keep.

A sliding window counts its tokens in Python as well, and computes one way until it is full and another way from then on: a step is captured
for each of the two, and a replay counts along (`advance`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from moegraft.operators.cpu import as_array, rounded
from moegraft.operators.offload.devices.base import Device, DeviceError, Graph, Work
from moegraft.operators.offload.transfers import Urgency

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from moegraft.operators.offload.engine import Engine
    from moegraft.operators.offload.model_experts import EngineParts


HOST_STREAM = "experts on the host"


@dataclass(frozen=True, slots=True)
class CallShape:
    """One call of a layer's experts: (T, H) hidden states of `dtype`, (T, K) choices."""

    tokens: int
    top_k: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Routed:
    """What the layers of a step chose: (L, T, K) int64, -1 for padded slots, of whom those `on_cpu` (L, T, K) had no slot; and the scores
    (L, T, E) float32 of the layers whose routers have told them, (L,)."""

    chosen: NDArray[np.int64]
    on_cpu: NDArray[np.bool_]
    scores: NDArray[np.float32]
    scored: NDArray[np.bool_]


class StepBuffers:
    """Memory at fixed addresses that a captured step reads and writes; all layers share what is of use within one alone.

    Attributes:
        table: (L, E + 1) int32 on the device, the slots while a step runs; the last column, of padded places, is -1.
        tokens, ids, weights, out: the CPU's part of a layer, in host memory: (T, H), (T, K) int64, (T, K) float32, (T, H).
        returned: (T, H) on the device, where `out` is copied.
    """

    def __init__(self, device: Device, layers: int, num_experts: int, hidden: int, call: CallShape) -> None:
        on_device, pinned = device.torch_device, device.torch_device.type == "cuda"
        rows, choices = (call.tokens, hidden), (call.tokens, call.top_k)
        self._host_table = torch.full((layers, num_experts + 1), -1, dtype=torch.int32, pin_memory=pinned)
        self.table = self._host_table.to(on_device, copy=True)
        self.tokens = torch.zeros(rows, dtype=call.dtype, pin_memory=pinned)
        self.ids = torch.full(choices, -1, dtype=torch.int64, pin_memory=pinned)
        self.weights = torch.zeros(choices, dtype=torch.float32, pin_memory=pinned)
        self.out = torch.zeros(rows, dtype=call.dtype, pin_memory=pinned)
        self.returned = torch.zeros(rows, dtype=call.dtype, device=on_device)
        self._chosen = torch.full((layers, *choices), -1, dtype=torch.int64, pin_memory=pinned)
        self._slots = torch.full((layers, *choices), -1, dtype=torch.int32, pin_memory=pinned)
        self._scores = torch.zeros(layers, call.tokens, num_experts, dtype=torch.float32, pin_memory=pinned)
        self._scored = np.zeros(layers, bool)
        self._version = -1

    def show(self, table: NDArray[np.int32], version: int) -> None:
        """Queues a new slot table for the next step; the last one is done."""
        if version != self._version:
            self._host_table.numpy()[:, :-1] = table
            self.table.copy_(self._host_table, non_blocking=True)
            self._version = version

    def note(self, layer: int, chosen: torch.Tensor, slots: torch.Tensor, scores: torch.Tensor | None) -> None:
        """Queues copies of a layer's routing, for `routed`."""
        self._chosen[layer].copy_(chosen, non_blocking=True)
        self._slots[layer].copy_(slots, non_blocking=True)
        self._scored[layer] = scores is not None
        if scores is not None:
            self._scores[layer].copy_(scores, non_blocking=True)

    def fetch_out(self) -> None:
        """Queues the copy of the CPU's part to the device."""
        self.returned.copy_(self.out, non_blocking=True)

    def routed(self) -> Routed:
        """A copy of what the last step, which is done, has noted."""
        chosen = self._chosen.numpy().copy()
        on_cpu = (self._slots.numpy() < 0) & (chosen >= 0)
        return Routed(chosen, on_cpu, self._scores.numpy().copy(), self._scored.copy())


class CapturedLayer:
    """One layer of a step; must live as long as the graph, which holds the address of its host call."""

    def __init__(self, device: Device, parts: EngineParts, index: int, buffers: StepBuffers) -> None:
        self._device = device
        self._parts = parts
        self._index = index
        self._buffers = buffers
        self._num_experts = parts.packed[index].shape.num_experts
        self._function, make = parts.runtime.host_function()
        arrays = (as_array(buffers.tokens), buffers.ids.numpy(), buffers.weights.numpy(), as_array(buffers.out))
        self._call = make(parts.packed[index], *arrays)

    def check(self) -> None:
        """Raises what the CPU's part of the last step raised, once."""
        self._call.check()

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        scores: torch.Tensor | None,
        between: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """(T, H), (T, K), (T, K), (T, E) or None -> (T, H); hands work over and waits for nothing. `between`: see `Engine.run`."""
        buffers, device = self._buffers, self._device
        compute, host = device.stream("compute"), device.stream(HOST_STREAM)
        tokens = rounded(hidden_states.detach()).contiguous()
        index, weights = top_k_index.detach().long(), top_k_weights.detach().float().contiguous()
        real = (index >= 0) & (index < self._num_experts)
        slots = buffers.table[self._index][index.where(real, self._num_experts)]
        buffers.tokens.copy_(tokens, non_blocking=True)
        buffers.weights.copy_(weights, non_blocking=True)
        buffers.ids.copy_(index.where(real & (slots < 0), -1), non_blocking=True)
        buffers.note(self._index, index.where(real, -1), slots, scores)
        device.order(compute, host)
        device.launch_host(host, self._function, self._call.address, Work("host"))
        device.launch(host, buffers.fetch_out, Work("host"))
        resident = self._resident(tokens, slots, weights)
        if between is not None:
            between()
        device.order(host, compute)
        return (resident + buffers.returned).to(hidden_states.dtype)

    def _resident(self, tokens: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(T, H) float32: the experts that have a slot."""
        arena = self._parts.arena
        if arena is None:
            part = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device)
            self._parts.kernels_for(self._index)(tokens, self._parts.slot_memory, slots, weights, part)
            return part
        ids, part = slots.long(), torch.empty_like(tokens)
        arrays = (as_array(tokens), ids.numpy(), weights.numpy(), as_array(part))
        neurons = self._parts.neurons_of(self._parts.sparsity[self._index])
        work = Work("experts", (len(tokens),), self._parts.packed[0].expert_bytes, neurons=neurons)
        self._device.launch(self._device.stream("compute"), lambda: arena.runtime.forward(arena.experts, *arrays), work)
        return part.float()


MOST_BROUGHT = 32  # experts asked for in a step; more than a link brings in its time, except for the smallest


class StepGraph:
    """The step of one engine's model.

    Args:
        call: what every layer is called with.

    Attributes:
        layers: what computes each layer's experts while the step is captured.
    """

    def __init__(self, engine: Engine, parts: EngineParts, call: CallShape) -> None:
        self._engine = engine
        self._slots, self._queue = engine.loading.slots, engine.loading.queue
        self._compute = engine.device.stream("compute")
        engine.device.stream(HOST_STREAM)  # made before anything is captured
        shape = parts.packed[0].shape
        self._buffers = StepBuffers(engine.device, len(parts.packed), shape.num_experts, shape.hidden, call)
        self.layers: Sequence[CapturedLayer] = [
            CapturedLayer(engine.device, parts, index, self._buffers) for index in range(len(parts.packed))
        ]
        self._graph: Graph | None = None
        self._last: Routed | None = None  # of a step that nothing was learnt from yet

    def capture(self, step: Callable[[], None]) -> None:
        """Notes `step`, which calls `layers`; nothing of it is done.

        Raises:
            DeviceError: it cannot be captured.
        """
        with self._engine.alone():
            self._graph = self._engine.device.capture(step)

    def replay(self) -> None:
        """One step on what its tensors hold now; it is done when this returns.

        Raises:
            DeviceError: the device failed.
            RuntimeError, ValueError: the CPU's part failed. The results are wrong then, and the next step is like any other.
        """
        assert self._graph is not None, "replay after capture"
        with self._engine.alone():
            self._slots.freeze()
            done = None
            try:
                with self._slots.lock:
                    self._buffers.show(self._slots.table, self._slots.version)
                began_ms = self._engine.device.now_ms()
                self._graph.replay()
                done = self._compute.record()
                self._learn()
                done.wait()
                self._engine.observer.replayed(began_ms)
            except DeviceError:
                self._engine.settle()
                raise
            finally:
                self._slots.thaw(done)
            for layer in self.layers:
                layer.check()
            self._last = self._buffers.routed()

    def release(self) -> None:
        """No step comes after this."""
        if self._graph is not None:
            self._graph.release()
            self._graph = None

    def _learn(self) -> None:
        routed, self._last = self._last, None
        if routed is None:
            return
        engine = self._engine
        for layer in np.flatnonzero(routed.scored).tolist():
            engine.policy.update(layer, routed.scores[layer], routed.chosen[layer])
        for layer, (chosen, on_cpu) in enumerate(zip(routed.chosen, routed.on_cpu, strict=True)):
            engine.statistics.count_split(layer, len(np.unique(chosen[chosen >= 0])), len(np.unique(chosen[on_cpu])))
        engine.statistics.replayed += 1
        if engine.prefetcher.options.promote:
            self._bring(routed)

    def _bring(self, routed: Routed) -> None:
        """Asks for what the CPU served and the cache ranks above who would leave for it, the widest gap first."""
        wanted: list[tuple[float, int, int]] = []
        for layer in range(self._slots.layers):
            ranks, there = self._engine.policy.priority(layer), self._slots.slot_of(layer) >= 0
            lowest = float(ranks[there].min()) if self._slots.full(layer) and there.any() else -np.inf
            missed = np.unique(routed.chosen[layer][routed.on_cpu[layer]])
            wanted += [(lowest - float(ranks[expert]), layer, expert) for expert in missed.tolist() if ranks[expert] > lowest]
        best = sorted(wanted)[:MOST_BROUGHT]
        self._queue.replan({(layer, expert) for _, layer, expert in best})
        for _, layer, expert in best:
            self._queue.request(layer, expert, Urgency.PROMOTION)


FIXED = (StaticLayer, StaticSlidingWindowLayer)


def why_not_static(cache: Any) -> str | None:
    """Why a step on this cache cannot be replayed; None where it can."""
    if cache is None:
        return "there is no key-value cache"
    layers = getattr(cache, "layers", None) or []
    others = sorted({type(layer).__name__ for layer in layers if type(layer) not in FIXED})
    if others or not layers:
        kinds = f" of {', '.join(others)}" if others else ""
        return (
            f"the key-value cache ({type(cache).__name__}{kinds}) is not of fixed size, full attention and sliding windows; for a model "
            "that has no other, generate makes such a one with cache_implementation='static'"
        )
    if getattr(cache, "offloading", False):
        return "the key-value cache is offloaded"
    if not all(isinstance(getattr(layer, "cumulative_length", None), torch.Tensor) for layer in layers):
        return "this version of transformers counts the tokens of a static cache elsewhere than in it"
    return None


def why_unseen_positions(arguments: Mapping[str, Any], cache: Any) -> str | None:
    """Why a step over sliding windows would count in Python where its tokens are; None where it is told."""
    if not _windows(cache):
        return None
    mask = arguments.get("attention_mask")
    masks = list(mask.values()) if isinstance(mask, dict) else [mask]
    made = all(isinstance(each, torch.Tensor) and each.dim() == 4 for each in masks)
    if made and isinstance(arguments.get("position_ids"), torch.Tensor):
        return None
    return "the step is not given the masks of its sliding windows and its positions, as generate gives them"


def is_filled(cache: Any) -> bool:
    """Whether its memory is there: it comes with the first tokens."""
    return all(layer.is_initialized for layer in cache.layers)


def places(cache: Any) -> tuple[tuple[int, torch.Size, torch.dtype], ...]:
    """Where its memory is and what form it has, which a captured step reads and writes: of a cache that is gone another may have both."""
    tensors = (tensor for layer in cache.layers for tensor in (layer.keys, layer.values, layer.cumulative_length))
    return tuple((tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors)


def phase(cache: Any) -> tuple[bool, ...]:
    """Which sliding windows are full: they compute another way then."""
    return tuple(layer.cumulative_length_int >= layer.max_cache_len for layer in _windows(cache))


def advance(cache: Any) -> None:
    """Counts a token that a replay has written."""
    for layer in _windows(cache):
        layer.cumulative_length_int += 1


@contextmanager
def being_captured(cache: Any) -> Iterator[None]:
    """While it lasts, full windows move on by copies alone: transformers' own way makes a tensor out of a number, for which a GPU that
    captures would have to wait. Counts in Python are afterwards what they were, as nothing is written while a step is captured."""
    windows = _windows(cache)
    counts = [layer.cumulative_length_int for layer in windows]
    for layer, full in zip(windows, phase(cache), strict=True):
        if full:
            layer.update = partial(_moved_on, layer)
    try:
        yield
    finally:
        for layer, count in zip(windows, counts, strict=True):
            vars(layer).pop("update", None)
            layer.cumulative_length_int = count


def _moved_on(layer: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A full window with one more token, (B, heads, 1, width) of each: the first leaves."""
    layer.cumulative_length_int += 1
    for held, new in ((layer.keys, keys), (layer.values, values)):
        held.copy_(torch.cat((held[:, :, 1:], new), dim=2))
    return layer.keys, layer.values


def _windows(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if type(layer) is StaticSlidingWindowLayer]


class Mark:
    """What a cache held, to go back to: the number of tokens, and of windows, whose tokens leave, all of them."""

    def __init__(self, cache: Any) -> None:
        self._counters = [(layer.cumulative_length, layer.cumulative_length.clone()) for layer in cache.layers]
        self._windows = [(layer, layer.cumulative_length_int, layer.keys.clone(), layer.values.clone()) for layer in _windows(cache)]

    def restore(self) -> None:
        for counter, value in self._counters:
            counter.copy_(value)
        for layer, count, keys, values in self._windows:
            layer.cumulative_length_int = count
            layer.keys.copy_(keys)
            layer.values.copy_(values)


def has_static_form(config: PretrainedConfig) -> bool:
    """Whether a static cache of this model is of full attention and sliding windows alone."""
    try:
        cache = StaticCache(config=config, max_cache_len=1)
    except (KeyError, ValueError, TypeError, NotImplementedError):
        return False  # layers of a kind that has no static form
    return why_not_static(cache) is None


def names_a_cache(arguments: Mapping[str, Any], default: Any) -> bool:
    """Whether `generate` was told which cache to use, by its arguments or by its model's own configuration."""
    own = arguments.get("generation_config") or default
    named = arguments.get("cache_implementation") or getattr(own, "cache_implementation", None)
    return named is not None or "past_key_values" in arguments or arguments.get("use_cache") is False


def fixed(cache: DynamicCache | None, config: PretrainedConfig, tokens: int) -> StaticCache:
    """A cache of room for `tokens` with what `cache` holds, which is of full attention and sliding windows."""
    made: Any = StaticCache(config=config, max_cache_len=tokens)
    layers: list[Any] = [] if cache is None else cache.layers  # of several kinds without a common type
    for number, layer in enumerate(layers):
        if not layer.is_initialized:
            continue
        made.update(layer.keys, layer.values, number)
        held = layer.keys
        gone = layer.cumulative_length - held.shape[2] if isinstance(layer, DynamicSlidingWindowLayer) and held is not None else 0
        if gone:  # the first place of a full window is for the token that leaves with the next, and is not read before
            for tensor in (made.layers[number].keys, made.layers[number].values):
                tensor.copy_(tensor.roll(1, dims=2))
            made.layers[number].cumulative_length_int += gone
    return made  # type: ignore[no-any-return]


def grown(cache: StaticCache, config: PretrainedConfig) -> DynamicCache:
    """A cache that grows, with what `cache` holds."""
    made: Any = DynamicCache(config=config)
    layers: list[Any] = cache.layers
    for number, layer in enumerate(layers):
        if not layer.is_initialized:
            continue
        window = type(layer) is StaticSlidingWindowLayer
        tokens = layer.cumulative_length_int if window else int(layer.cumulative_length)
        made.update(layer.keys[:, :, :tokens].clone(), layer.values[:, :, :tokens].clone(), number)
        if window:
            made.layers[number].cumulative_length = tokens
    return made  # type: ignore[no-any-return]
