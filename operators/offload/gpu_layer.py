"""One layer's forward pass on the CPU and a GPU: what the host must know is fetched once, then the engine gives both devices their part."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moegraft.operators.cpu import rounded
from moegraft.operators.draft import DraftSettings, DraftSwitch
from moegraft.operators.offload.drafts import ResidentDraft
from moegraft.operators.offload.engine import Engine
from moegraft.operators.offload.executors import CallExecutor, EngineLayers, Tokens
from moegraft.operators.offload.shared_overlap import Experts
from moegraft.operators.offload.step import DraftStep, Ids, LayerStep, Prediction
from moegraft.operators.offload.step_graph import CallShape, CapturedLayer
from moegraft.operators.routing import Router, Scoring

LEARN_TOKENS = 512  # of a prompt: the cache's averages have forgotten what came before
PREDICT_TOKENS = 256  # of a prompt: as many show what all will need


class GpuLayer:
    """A layer whose experts run on the CPU and a GPU.

    Args:
        index: of the layer within its engine.
        draft: whether, and how, the calling thread drafts.
        on_cpu: the layer's forward pass on the CPU alone.

    Attributes:
        captured: while a decode step is captured, the capturing thread and what computes the layer there.
        last_call: the shape of the last call.
        router_calls: the last call of the layer's router.
    """

    def __init__(self, engine: Engine, layers: EngineLayers, index: int, draft: DraftSwitch, on_cpu: Experts) -> None:
        self.engine = engine
        self.layers = layers
        self.captured: tuple[int, CapturedLayer] | None = None
        self.last_call: CallShape | None = None
        self._index = index
        self._sparsity = layers.sparsity[index]
        self.router_calls = _RouterCalls(layers.routers[index])
        self._look_ahead = layers.look_ahead
        self._draft = draft
        self._on_cpu = on_cpu
        self._resident_draft = ResidentDraft(layers.routers[index])

    @property
    def sparse(self) -> bool:
        """Whether neurons are left out."""
        return self._sparsity is not None

    def describe(self) -> str:
        """Return what follows the CPU's description for users: ` and 24 of 128 in slots of cuda:0, two_threshold`."""
        slots = self.engine.cache.slots
        capacity = min(slots.capacity_of(self._index), slots.num_experts)
        return f" and {capacity} of {slots.num_experts} in slots of {self.engine.device.name}, {self.engine.scheduler.name}"

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """(T, H), (T, K) int64, (T, K) -> (T, H) in the dtype and on the device of `hidden_states`.

        Args:
            meanwhile: see `Engine.run`; it takes effect once, however often it is called.
        """
        # Only the CPU's kernel has the activations that an observer wants.
        if not len(hidden_states) or (self._sparsity is not None and self._sparsity.observer is not None):
            return self._on_cpu(hidden_states, top_k_index, top_k_weights, None)
        captured = self.captured
        if captured is not None and captured[0] == threading.get_ident():
            call = self.router_calls.take()
            return captured[1].forward(hidden_states, top_k_index, top_k_weights, None if call is None else call[1], meanwhile)
        if self._sparsity is not None:
            self._sparsity.begin(len(hidden_states))
        settings, routed_index = self._draft.settings, top_k_index
        if settings is not None:
            top_k_index, top_k_weights = self._narrow(top_k_index, top_k_weights, settings)
        tokens = rounded(hidden_states.detach()).contiguous()
        on_device = Tokens(tokens, top_k_index.detach().long().contiguous(), top_k_weights.detach().float().contiguous())
        tensors = {"tokens": tokens, "index": on_device.top_k_index, "weights": on_device.top_k_weights}
        call = self.router_calls.take()
        routing = routed_index.dtype, top_k_weights.dtype, None if call is None else call[1].dtype
        self.last_call = CallShape(len(tokens), top_k_index.shape[1], tokens.dtype, routing)
        if call is not None and len(call[1]) == len(top_k_index):
            tensors["scores"] = call[1][-LEARN_TOKENS:]
            tensors |= self._predict(call[0])
        if settings is not None:
            tensors["routed index"] = routed_index.detach().long()
        host = self.layers.fetch(tensors)
        executor = CallExecutor(
            self.layers,
            self.layers.packed[self._index],
            self._sparsity,
            self.layers.slot_kernel(self._index),
            Tokens(host["tokens"], host["index"], host["weights"]),
            on_device,
            self.layers.layer_kernel(self._index),
        )
        self.engine.run(self._step(host, settings), executor, meanwhile)
        if meanwhile is not None:
            meanwhile()  # where the device failed before it was called
        return executor.result.to(hidden_states.dtype)

    def _step(self, host: dict[str, torch.Tensor], settings: DraftSettings | None) -> LayerStep:
        predictions = [Prediction.of(int(name[6:]), self._ids(host[name])) for name in host if name.startswith("layer ")]
        scores = host["scores"].numpy() if "scores" in host else None
        draft = None
        if settings is not None:
            draft = DraftStep(self._ids(host["routed index"]), settings.top_k, settings.resident)
        return LayerStep.of(self._index, self._ids(host["index"]), scores, predictions, draft, self.layers.neurons(self._sparsity))

    def _ids(self, top_k_index: torch.Tensor) -> Ids:
        """(T, K) with -1 for every padded slot."""
        index = top_k_index.numpy()
        return np.where((index < 0) | (index >= self.layers.num_experts), -1, index)

    def _predict(self, router_input: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the next layers would choose on the current hidden states, as `layer N`: (T', K) int64."""
        last = self._index + self.engine.prefetcher.options.depth
        tokens = router_input[-PREDICT_TOKENS:]
        later = range(self._index + 1, min(last + 1, len(self.layers.routers)))
        return {f"layer {layer}": chosen for layer, chosen in zip(later, self._look_ahead.chosen(tokens, later), strict=True)}

    def _narrow(self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, settings: DraftSettings) -> tuple[torch.Tensor, torch.Tensor]:
        """The routing of a draft, (T, K) and (T, K) padded."""
        if not settings.resident:
            return self._draft.narrow(top_k_index, top_k_weights)
        scoring = self.router_calls.scoring()
        resident: NDArray[np.bool_] = np.asarray(self.engine.cache.slots.slot_of(self._index) >= 0)
        return self._resident_draft.narrow(top_k_index, top_k_weights, scoring, resident, settings.top_k, self._draft.say_once)


class _RouterCalls:
    """The last call of a layer's router, for the experts that are called next."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._last: tuple[torch.Tensor, Any] | None = None
        weak_self = ref(self)

        def routed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls = weak_self()
            if calls is not None:
                calls.record(args[0] if args else next(iter(kwargs.values())), output)

        router.module.register_forward_hook(routed, with_kwargs=True)

    def record(self, hidden_states: torch.Tensor, output: Any) -> None:
        """Take a call; also one that no hook has seen."""
        self._last = hidden_states, output

    def scoring(self) -> Scoring | None:
        """Return the router's scores of all experts in the call since the last `take`, if there was one."""
        return None if self._last is None else self._router.scoring(self._last[1])

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the router's input (T, H) and its scores (T, E) of the call since the last `take`, if there was one."""
        last, self._last = self._last, None
        if last is None:
            return None
        hidden_states, output = last
        return hidden_states.detach().reshape(-1, hidden_states.shape[-1]), self._router.scores(output)
