"""One layer of sparse experts on a GPU: its weights, its threshold in device memory, and the way that is fastest for each batch.

Times the paths of a layer on its GPU, as a captured graph replays them. Written without a GPU: nothing here has run on one yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from moegraft.operators.kernels.epilogue import Threshold
from moegraft.operators.kernels.launch import on
from moegraft.operators.kernels.sparse_call import Call
from moegraft.operators.kernels.sparse_weights import SparseWeights
from moegraft.operators.kernels.workspace import Buffers, Workspace
from moegraft.operators.sparse.choice import PathChoices, TimedCase
from moegraft.operators.sparse.paths import DENSE_PATHS, PATHS, exact_activations, grouped, sketch_activations, takes

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


ROUTINGS = 4  # different experts from one replayed call to the next, so that the L2 cache does not hold them all
REPLAYS = 11


class TimedPaths:
    """Chooses the path of each call of a model's layers; the first call of a batch size times them, unless a graph is being captured."""

    def __init__(self, choices: PathChoices) -> None:
        self.choices = choices

    def __call__(self, layer: SparseGpuLayer, tokens: int, top_k: int) -> str:
        device = layer.weights.down_t.device
        on_gpu = device.type == "cuda"
        case = case_of(layer, top_k, torch.cuda.get_device_name(device) if on_gpu else device.type)
        measure: Callable[[int], Mapping[str, float]] | None = None
        if on_gpu and not torch.cuda.is_current_stream_capturing():
            measure = partial(time_paths, layer, top_k=top_k, sparsity=layer.sparsity)
        return self.choices.path(case, tokens, DENSE_PATHS, measure)


def case_of(layer: SparseGpuLayer, top_k: int, gpu: str) -> TimedCase:
    weights = layer.weights
    return TimedCase(
        hidden=weights.hidden,
        intermediate=weights.neurons,
        num_experts=weights.num_experts,
        top_k=top_k,
        dtype=str(weights.gate_up.dtype).removeprefix("torch."),
        gated=weights.gated,
        group=layer.threshold.group,
        gate="exact" if weights.sketch is None else "sketch",
        sparsity=round(layer.sparsity, 2),
        gpu=gpu,
    )


def replay_ms(calls: Sequence[Callable[[], None]], device: torch.device, replays: int = REPLAYS) -> list[float]:
    """Milliseconds of one of `calls`, for each replay of a graph that runs them all once."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls:  # compiles, and makes buffers
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        graph.replay()
        for event in events[:-1]:
            event.record(stream)
            graph.replay()
        events[-1].record(stream)
        stream.synchronize()
    torch.cuda.current_stream(device).wait_stream(stream)
    return [start.elapsed_time(end) / len(calls) for start, end in pairwise(events)]


def synthetic_calls(layer: SparseGpuLayer, tokens: int, top_k: int, sparsity: float, seed: int = 0) -> list[Call]:
    """Calls over random tokens and experts, with a threshold of their own that leaves out the share `sparsity` of them."""
    weights = layer.weights
    device = weights.down_t.device
    generator = torch.Generator(device).manual_seed(seed)
    threshold = Threshold(torch.zeros_like(layer.threshold.value), torch.zeros_like(layer.threshold.counts), layer.threshold.group)
    calls = []
    for _ in range(ROUTINGS):
        x = torch.randn(tokens, weights.hidden, generator=generator, device=device).to(weights.gate_up.dtype)
        scores = torch.rand(tokens, weights.num_experts, generator=generator, device=device)
        shares, ids = scores.topk(top_k, dim=-1)
        call = layer.call(x, ids.to(torch.int32), shares, torch.empty_like(x), threshold)
        calls.append(call)
    _, act = next(layer.activations(calls[0].hidden_states, calls[0].ids))
    threshold.value.fill_(act.abs().flatten()[: 1 << 24].quantile(sparsity) if sparsity else 0.0)
    return calls


def time_paths(layer: SparseGpuLayer, tokens: int, top_k: int, sparsity: float) -> Mapping[str, float]:
    """Median milliseconds of each path that can take this layer."""
    calls = synthetic_calls(layer, tokens, top_k, sparsity)
    names = [name for name in PATHS if name != "grouped_mm" or takes(layer.weights)]
    device = layer.weights.down_t.device
    with on(device):
        return {name: median(replay_ms([_run(PATHS[name], call) for call in calls], device)) for name in names}


def _run(path: Callable[[Call], None], call: Call) -> Callable[[], None]:
    return lambda: path(call)
