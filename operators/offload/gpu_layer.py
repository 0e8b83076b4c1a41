"""One layer's forward pass on the CPU and a GPU: what the host must know is fetched once, then the engine gives both devices their part."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import nn

from moegraft.operators.cpu import rounded
from moegraft.operators.draft import DraftSettings, DraftSwitch
from moegraft.operators.offload.deferral import LayerDeferral
from moegraft.operators.offload.engine import Engine
from moegraft.operators.offload.executors import CallExecutor, EngineLayers, Tokens
from moegraft.operators.offload.scheduler import DraftStep, Ids, LayerStep, Prediction
from moegraft.operators.offload.shared_overlap import Experts
from moegraft.operators.offload.step_graph import CallShape, CapturedLayer
from moegraft.operators.routing import Router
from moegraft.operators.structure import MTP

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
        deferral: what of the layer may be added to the next one, and what comes from the one before; None where no layer defers.
        last_call: the shape of the last call.
        router_calls: the last call of the layer's router.
    """

    def __init__(self, engine: Engine, layers: EngineLayers, index: int, draft: DraftSwitch, on_cpu: Experts) -> None:
        self.engine = engine
        self.layers = layers
        self.captured: tuple[int, CapturedLayer] | None = None
        self.deferral: LayerDeferral | None = None
        self.last_call: CallShape | None = None
        self._index = index
        self._sparsity = layers.sparsity[index]
        self.router_calls = _RouterCalls(layers.routers[index])
        self._look_ahead = layers.look_ahead
        self._draft = draft
        self._on_cpu = on_cpu

    @property
    def path(self) -> str:
        """The path of the layer's experts in the model."""
        return self.layers.routers[self._index].path

    @property
    def sparse(self) -> bool:
        """Whether neurons are left out."""
        return self._sparsity is not None

    def describe(self) -> str:
        """Return what follows the CPU's description for users: ` and 24 of 128 in slots of cuda:0, two_threshold`."""
        slots = self.engine.cache.slots
        capacity = min(slots.capacity_of(self._index), slots.num_experts)
        deferral = "" if self.deferral is None else self.deferral.describe()
        return f" and {capacity} of {slots.num_experts} in slots of {self.engine.device.name}, {self.engine.scheduler.name}{deferral}"

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
        arrived = None if self.deferral is None else self.deferral.take(len(hidden_states))
        # Only the CPU's kernel has the activations that an observer wants.
        if not len(hidden_states) or (self._sparsity is not None and self._sparsity.observer is not None):
            result = self._on_cpu(hidden_states, top_k_index, top_k_weights, None)
            return result if arrived is None else arrived.added_to(result)
        captured = self.captured
        if captured is not None and captured[0] == threading.get_ident():
            call = self.router_calls.take()
            return captured[1].forward(hidden_states, top_k_index, top_k_weights, None if call is None else call[1], meanwhile)
        if self._sparsity is not None:
            self._sparsity.begin(len(hidden_states))
        settings, routed_index = self._draft.settings, top_k_index
        if settings is not None:
            top_k_index, top_k_weights = self._draft.narrow(top_k_index, top_k_weights)
        tokens = rounded(hidden_states.detach()).contiguous()
        on_device = Tokens(tokens, top_k_index.detach().long().contiguous(), top_k_weights.detach().float().contiguous())
        # What is fetched of this call by name, and what later layers would choose by their index.
        tensors: dict[str | int, torch.Tensor]
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
            self.layers.kernels[self._index],
            Tokens(host["tokens"], host["index"], host["weights"]),
            on_device,
            deferral=self.deferral,
            arrived=arrived,
        )
        self.engine.run(self._step(host, settings), executor, meanwhile)
        if meanwhile is not None:
            meanwhile()  # where the device failed before it was called
        return (executor.result if arrived is None else arrived.added_to(executor.result)).to(hidden_states.dtype)

    def expect_verification(self, states: torch.Tensor) -> None:
        """Load what the engine's layers of the model's body would choose for hidden states (T, H) of drafted tokens."""
        body = sum(not router.path.startswith(f"{MTP}.") for router in self.layers.routers)
        if not body or self.engine.prefetcher.options.policy == "none":
            return
        chosen = self._look_ahead.chosen(states.detach().to(self.layers.device), range(body))
        self.engine.expect_verification(self._predictions(self.layers.fetch(dict(enumerate(chosen)))))

    def _predictions(self, host: Mapping[Any, torch.Tensor]) -> list[Prediction]:
        return [Prediction.of(layer, self._ids(index)) for layer, index in host.items() if isinstance(layer, int)]

    def _step(self, host: Mapping[str | int, torch.Tensor], settings: DraftSettings | None) -> LayerStep:
        scores = host["scores"].numpy() if "scores" in host else None
        draft = None
        if settings is not None and settings.budget is None:  # with a budget, a draft is verified
            draft = DraftStep(self._ids(host["routed index"]), settings.top_k)
        step = LayerStep.of(self._index, self._ids(host["index"]), scores, self._predictions(host), draft)
        if draft is None and self.deferral is not None and self.deferral.defers(len(step.chosen)):
            return replace(step, deferrable=self.deferral.deferrable(host["index"], host["weights"]))
        return step

    def _ids(self, top_k_index: torch.Tensor) -> Ids:
        """(T, K) with -1 for every padded slot."""
        index = top_k_index.numpy()
        return np.where((index < 0) | (index >= self.layers.num_experts), -1, index)

    def _predict(self, router_input: torch.Tensor) -> dict[str | int, torch.Tensor]:
        """What the next layers would choose on the current hidden states, (T', K) int64 by their index."""
        last = self._index + self.engine.prefetcher.options.depth(len(router_input))
        tokens = router_input[-PREDICT_TOKENS:]
        later = range(self._index + 1, min(last + 1, len(self.layers.routers)))
        return dict(zip(later, self._look_ahead.chosen(tokens, later, self._index), strict=True))


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
        """Record a call of the router, whether the hook saw it or not."""
        self._last = hidden_states, output

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the router's input (T, H) and its scores (T, E) of the call since the last `take`, if there was one."""
        last, self._last = self._last, None
        if last is None:
            return None
        hidden_states, output = last
        return hidden_states.detach().reshape(-1, hidden_states.shape[-1]), self._router.scores(output)
