"""Times the paths of a layer on its GPU, as a captured graph replays them. Written without a GPU: nothing here has run on one yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from moegraft.operators.kernels.finish import Threshold
from moegraft.operators.kernels.launch import on
from moegraft.operators.sparse.call import Call
from moegraft.operators.sparse.choice import PathChoices, TimedCase
from moegraft.operators.sparse.gpu_layer import SparseGpuLayer
from moegraft.operators.sparse.grouped_mm import takes
from moegraft.operators.sparse.paths import DENSE_PATHS, PATHS

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
