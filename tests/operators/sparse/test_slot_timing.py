"""The path of experts in slots is the fastest of timings made before the slots are used; every timed call computes the same result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch
from support.kernel_cases import Layer, make_batch, make_layer, relative_error
from support.triton_cases import DEVICE, ROUNDED

from moegraft.cpu_backend import Runtime
from moegraft.operators.offload.executors import EngineLayers
from moegraft.operators.sparse import slots as slot_timing
from moegraft.operators.sparse.choice import PathChoices
from moegraft.operators.sparse.slots import SLOT_PATHS, SparseSlotExperts, TimedSlotPaths, synthetic_slot_calls
from moegraft.operators.sparsity import SparseLayers
from moegraft.operators.thresholds import SparsityOptions

EXPERTS, RESIDENT, TOP_K = 4, 3, 2
FASTEST = {1: "pair", 2: "dense", 4: "dense"}  # by number of tokens


class Stopwatch:
    """A timer that returns given times and runs each timed function once."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, calls: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
        for call in calls:
            call()
        (call,) = calls[0].args  # type: ignore[attr-defined]
        tokens = len(call.slots)
        self.batches.append(tokens)
        fastest = partial(SLOT_PATHS[FASTEST[tokens]], call)
        is_fastest = (calls[0].func, calls[0].keywords) == (fastest.func, fastest.keywords)  # type: ignore[attr-defined]
        return [1.0 if is_fastest else 2.0, 9.0, 0.5]


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    found = Stopwatch()
    monkeypatch.setattr(slot_timing, "replay_ms", found)
    monkeypatch.setattr(slot_timing, "BATCHES", tuple(FASTEST))
    monkeypatch.setattr(slot_timing, "ROUTINGS", 1)
    return found


def engine_layers(layer: Layer, target: float) -> tuple[EngineLayers, torch.Tensor]:
    sparsity = SparseLayers().join(SparsityOptions(target, "routed"))
    sparsity.set_threshold(0.3, target)
    held = torch.full((EXPERTS, layer.packed.expert_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    slots = SimpleNamespace(tensor=held.flatten())
    return EngineLayers(torch.device(DEVICE), Runtime(1), [layer.packed], [], [sparsity], slots), held  # type: ignore[arg-type]


def test_a_layer_uses_the_fastest_timed_path(tmp_path: Path, stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer("int8", EXPERTS, 32, 32, sparse=True)
    file = tmp_path / "paths.json"
    engine_layers(layer, 0.5)[0].time_paths(RESIDENT, TOP_K, PathChoices(file))
    assert stopwatch.batches == [tokens for tokens in FASTEST for _ in SLOT_PATHS]
    layers, slots = engine_layers(layer, 0.5)
    layers.time_paths(RESIDENT, TOP_K, PathChoices(file))
    assert len(stopwatch.batches) == len(FASTEST) * len(SLOT_PATHS), "a second start reads the file"
    assert (slots == 0xFF).all(), "nothing is put into slots where nothing is timed"
    slots[:RESIDENT].copy_(torch.from_numpy(layer.packed.buffer.copy()).view(EXPERTS, -1)[:RESIDENT])
    taken: list[str] = []
    for name, path in SLOT_PATHS.items():

        def run(call: object, name: str = name, path: Callable[..., None] = path) -> None:
            taken.append(name)
            path(call)

        monkeypatch.setitem(SLOT_PATHS, name, run)  # type: ignore[arg-type]
    for tokens, expected in {**FASTEST, 3: "dense", 7: "pair"}.items():  # 3 is in the bucket of 4, and the bucket of 7 was not timed
        x, index, weights = make_batch(tokens, TOP_K, layer)
        index = index % RESIDENT
        out = torch.empty_like(x).to(DEVICE)
        layers.slot_kernel(0)(x.to(DEVICE), index.int().to(DEVICE), weights.to(DEVICE), out)
        assert taken.pop() == expected
        assert relative_error(out.cpu(), layer.reference(x, index, weights, threshold=0.3)) <= 5 * ROUNDED[torch.float32]


def test_another_share_of_neurons_or_of_slots_is_timed_again(stopwatch: Stopwatch) -> None:
    layer, choices = make_layer("int8", EXPERTS, 32, 32, sparse=True), PathChoices(None)
    for target, resident in ((0.5, 3), (0.5, 3), (0.7, 3), (0.5, 2)):
        engine_layers(layer, target)[0].time_paths(resident, TOP_K, choices)
    assert len(stopwatch.batches) == 3 * len(FASTEST) * len(SLOT_PATHS)
    before = len(stopwatch.batches)
    engine_layers(layer, 0.5)[0].time_paths(0, TOP_K, choices)
    assert len(stopwatch.batches) == before, "without slots there is nothing to choose"


def test_synthetic_calls_leave_out_the_layers_share_of_neurons() -> None:
    layer = make_layer("bfloat16", EXPERTS, 64, 64, sparse=True)
    experts = SparseSlotExperts(layer.shape, layer.spec, "bfloat16", torch.device(DEVICE))
    experts.set_threshold(0.0, 0.8)
    arena = torch.from_numpy(layer.packed.buffer.copy()).view(EXPERTS, -1).to(DEVICE)
    arena[RESIDENT:] = 0xFF  # NaN
    calls = synthetic_slot_calls(experts, arena, 8, TOP_K, EXPERTS, RESIDENT)
    assert len({tuple(call.slots.flatten().tolist()) for call in calls}) == len(calls) == slot_timing.ROUTINGS
    for call in calls:
        assert call.slots.max() < RESIDENT
        SLOT_PATHS["dense"](call)
        assert bool(torch.isfinite(call.out).all())
    active, neurons = calls[0].threshold.counts.tolist()
    assert 0.75 < 1 - active / neurons < 0.85
    assert experts.take_counts() == (0, 0), "the layer's own counts are for its own calls"


def test_buckets_that_were_not_timed_get_a_default() -> None:
    layer = make_layer("int8", EXPERTS, 32, 32, sparse=True)
    paths = TimedSlotPaths(PathChoices(None), EXPERTS, RESIDENT)
    experts = SparseSlotExperts(layer.shape, layer.spec, "int8", torch.device(DEVICE), paths)
    assert [experts.choose(tokens, TOP_K) for tokens in (1, 64, 65)] == ["pair", "pair", "dense"]


def test_a_timed_graph_leaves_other_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a transfer queue waits for its events meanwhile, which a capture in the mode "global" does not survive."""
    modes: list[str] = []

    def graph(captured: object, *, pool: object, stream: object, capture_error_mode: str = "global") -> nullcontext[None]:
        modes.append(capture_error_mode)
        return nullcontext()

    class Nothing:
        def __init__(self, *args: object, **kwargs: object) -> None: ...
        def __getattr__(self, name: str) -> Callable[..., float]:
            return lambda *args, **kwargs: 1.0

    for name, fake in {
        "Stream": Nothing,
        "Event": Nothing,
        "CUDAGraph": Nothing,
        "current_stream": Nothing,
        "stream": lambda stream: nullcontext(),
        "device": lambda device: nullcontext(),
        "graph_pool_handle": lambda: (0, 1),
        "graph": graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    assert slot_timing.replay_ms([lambda: None], torch.device("cuda"), 3) == [1.0] * 3
    assert modes == ["thread_local"]
