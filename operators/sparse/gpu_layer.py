"""One layer of sparse experts on a GPU: its weights, its threshold in device memory, and the way that is fastest for each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from moegraft.operators.kernels.finish import Threshold
from moegraft.operators.kernels.launch import on
from moegraft.operators.sparse.call import Call
from moegraft.operators.sparse.paths import PATHS, exact_activations, grouped, sketch_activations
from moegraft.operators.sparse.weights import SparseWeights
from moegraft.operators.sparse.workspace import Buffers, Workspace

MOST_TOKENS = 2048  # computed in one go: bounds the buffers, of which the rows of pairs, (T * K, H) float32, are the most

ChoosePath = Callable[["SparseGpuLayer", int, int], str]  # of a layer, for tokens and experts a token


class SparseGpuLayer:
    """Computes a layer, leaving out neurons whose `|act(gate)|` is below the threshold.

    Args:
        weights: on the GPU.
        choose: the way for a batch size.
        group: neurons in a row that are kept when one of them reaches the threshold.
        margin: with a sketch: the share of the threshold that a sketched activation has to reach to be looked at.

    Attributes:
        threshold: on the device, and counted there: a captured graph follows it. Drafts that leave out more have `draft_threshold`.
        sparsity: the share of neurons that the threshold is meant to leave out: which path is fastest depends on it.
    """

    def __init__(self, weights: SparseWeights, workspace: Workspace, choose: ChoosePath, *, group: int = 1, margin: float = 0.8) -> None:
        device = weights.down_t.device
        self.weights = weights
        self.margin = margin
        self.threshold, self.draft_threshold = (
            Threshold(torch.zeros(1, dtype=torch.float32, device=device), torch.zeros(2, dtype=torch.int64, device=device), group)
            for _ in range(2)
        )
        self.sparsity = 0.0
        self._workspace = workspace
        self._choose = choose

    def set_threshold(self, threshold: float, sparsity: float, *, drafting: bool = False) -> None:
        if drafting:
            self.draft_threshold.value.fill_(threshold)
            return
        self.threshold.value.fill_(threshold)
        self.sparsity = sparsity

    def take_counts(self) -> tuple[int, int]:
        """Neurons that reached the threshold, and all, since the last call; waits for the device."""
        active, neurons = self.threshold.counts.tolist()
        self.threshold.counts.zero_()
        return active, neurons

    def forward(
        self,
        hidden_states: torch.Tensor,
        ids: torch.Tensor,
        top_k_weights: torch.Tensor,
        out: torch.Tensor,
        path: str | None = None,
        *,
        drafting: bool = False,
    ) -> None:
        """Queues the work on the current stream.

        Args:
            hidden_states: (T, H), contiguous, of the dtype of the weights.
            ids: (T, K) int32, contiguous, -1: a padded slot.
            top_k_weights: (T, K) floating, contiguous.
            out: (T, H) floating, written in full.
            path: one of `PATHS`; by default the chosen one.
            drafting: leave out what drafts leave out.

        Equal inputs give equal bits on equal paths. Within a CUDA graph after one call of that batch size outside of it.
        """
        if ids.numel() == 0:
            out.zero_()
            return
        threshold = self.draft_threshold if drafting else self.threshold
        for first in range(0, len(hidden_states), MOST_TOKENS):
            part = slice(first, first + MOST_TOKENS)
            call = self.call(hidden_states[part], ids[part], top_k_weights[part], out[part], threshold)
            with on(out.device):
                PATHS[path or self.choose(len(call.ids), call.top_k)](call)

    def call(
        self,
        hidden_states: torch.Tensor,
        ids: torch.Tensor,
        top_k_weights: torch.Tensor,
        out: torch.Tensor,
        threshold: Threshold | None = None,
    ) -> Call:
        """One call as the paths take it, of up to MOST_TOKENS tokens; by default with the layer's own threshold."""
        weights = self.weights
        buffers = Buffers(self._workspace, len(ids), ids.shape[1], weights.num_experts, weights.neurons, weights.hidden)
        return Call(hidden_states, ids, top_k_weights, out, weights, threshold or self.threshold, buffers, self.margin)

    def choose(self, tokens: int, top_k: int) -> str:
        """The path of batches of that size; times it where that was not done before."""
        return self._choose(self, tokens, top_k)

    def activations(
        self, hidden_states: torch.Tensor, ids: torch.Tensor, *, sketched: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of `ids (T, K)` with `act(gate) (T', K, I)` float32, which holds anything for padded slots; valid until the next part.

        Args:
            sketched: by the sketch of the gate.
        """
        for first in range(0, len(ids), MOST_TOKENS):
            x, part = hidden_states[first : first + MOST_TOKENS], ids[first : first + MOST_TOKENS]
            call = self.call(x, part, part, x)
            act = call.buffers.of_pairs("act", self.weights.neurons, torch.float32)
            with on(act.device):
                if sketched:
                    sketch_activations(call, act)
                else:
                    exact_activations(call, act, grouped(call))
            yield part, act.view(*part.shape, -1)
