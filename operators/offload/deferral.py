"""Expert deferral: what the CPU computes of a token's lowest-ranked experts is added one layer later, so that it overlaps the GPU's work.

KTransformers (SOSP 2025). In a decode step the CPU waits for the next layer's attention, and the GPU for the CPU. Experts that are deferred
are computed by the CPU while the GPU is in the next layer, whose experts' output they are added to. The last layer defers nothing, so that
a step's output has all of its experts. The output changes: attention and router of the next layer do not see the deferred experts.

As in kt-kernel, an expert is deferred in a step if the CPU computes it and no token of the step has it among its `K - defer` largest
weights.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moegraft.operators.offload.devices.base import CpuTicket
from moegraft.operators.offload.scheduler import Ids
from moegraft.operators.structure import MTP

if TYPE_CHECKING:
    from moegraft.operators.offload.gpu_layer import GpuLayer

DECODE_TOKENS = 8  # of a call: more are a prompt's, which defer nothing; a server's sequences, or drafts that are verified


@dataclass(slots=True, eq=False)
class DeferredSum:
    """What a layer has deferred: `out` (T, H) in host memory, complete once `ticket` is done; None where it is known to be."""

    receiver: LayerDeferral
    out: torch.Tensor
    ticket: CpuTicket | None

    def wait(self) -> torch.Tensor:
        """Return `out` when it is computed, and raise what its computation raised, once."""
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            ticket.wait()
        return self.out

    def added_to(self, result: torch.Tensor) -> torch.Tensor:
        """Return a layer's result (T, H) with these experts, added in float32 and in its dtype."""
        return (result.float() + self.wait().to(result.device, torch.float32)).to(result.dtype)


class DeferredSums(threading.local):
    """What each thread's pass through a model carries from a layer to the next: one sum at most."""

    pending: DeferredSum | None = None


class LayerDeferral:
    """The part of one layer.

    A sum is only taken by the layer that it is for, in the same thread. Where a pass was interrupted, the next one drops what it finds.

    Args:
        sums: shared by the model's layers.
        count: experts per token that are deferred at most; one is never.
        receiver: the layer that deferred experts are added to; None where none follows.
    """

    def __init__(self, sums: DeferredSums, num_experts: int, count: int, receiver: LayerDeferral | None) -> None:
        self._sums = sums
        self._num_experts = num_experts
        self._count = count
        self._receiver = receiver

    def describe(self) -> str:
        """Return what follows a layer's description for users: `, up to 2 of a token added to the next layer`."""
        return f", up to {self._count} of a token added to the next layer" if self.defers(1) else ""

    def defers(self, tokens: int) -> bool:
        """Return whether a call of the layer over so many tokens may defer experts."""
        return self._count > 0 and self._receiver is not None and tokens <= DECODE_TOKENS

    def lowest_ranked(self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Return which experts of a call may be deferred, (T, K) bool, by its routing (T, K) and (T, K); no padded slot is."""
        kept = max(1, top_k_index.shape[1] - self._count)
        real = (top_k_index >= 0) & (top_k_index < self._num_experts)
        first = top_k_weights.float().where(real, -torch.inf).topk(kept, dim=-1).indices
        protected = top_k_index.gather(-1, first).flatten()
        return real & ~(top_k_index[:, :, None] == protected).any(-1)

    def divide(self, ids: torch.Tensor, later: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> None:
        """Move what may be deferred from `ids` (T, K), of the CPU's experts, to `later` (T, K); -1 is elsewhere."""
        lowest = self.lowest_ranked(top_k_index, top_k_weights)
        later.copy_(ids.where(lowest, -1))
        ids.masked_fill_(lowest, -1)

    def deferrable(self, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Ids:
        """Return the ids of these experts, ascending; the routing is in host memory."""
        ids: Ids = top_k_index[self.lowest_ranked(top_k_index, top_k_weights)].unique().numpy()
        return ids

    def put(self, out: torch.Tensor, ticket: CpuTicket) -> None:
        """Leave a sum (T, H), which `ticket` completes, to the next layer."""
        assert self._receiver is not None, "a layer that defers is followed by another"
        self._sums.pending = DeferredSum(self._receiver, out, ticket)

    def take(self, tokens: int) -> DeferredSum | None:
        """Return what the layer before has deferred in a pass over `tokens` tokens, which is then no longer pending."""
        deferred = self._sums.pending
        if deferred is not None and (deferred.receiver is not self or len(deferred.out) != tokens):
            self.drop()
            return None
        self._sums.pending = None
        return deferred

    def drop(self) -> None:
        """Forget what is pending, as where this layer computes all of its experts now."""
        deferred, self._sums.pending = self._sums.pending, None
        if deferred is not None:
            with suppress(RuntimeError, ValueError):  # the result is not needed
                deferred.wait()  # what it reads and writes is kept until then


def connect(layers: Sequence[tuple[GpuLayer, int]]) -> None:
    """Let layers, in the model's order, each defer so many experts of a token to the next one of its stack, such as `model.layers`.

    Layers for multi-token prediction defer nothing: each has its own output.
    """
    sums = DeferredSums()
    following: GpuLayer | None = None
    for layer, count in reversed(layers):
        receiver = following.deferral if following is not None and _follows(layer.path, following.path) else None
        layer.deferral = LayerDeferral(sums, layer.layers.num_experts, count, receiver)
        following = layer


def _follows(path: str, following: str) -> bool:
    stack, next_stack = (re.split(r"\.\d+(?:\.|$)", each, maxsplit=1)[0] for each in (path, following))
    return stack == next_stack and not path.startswith(f"{MTP}.")
