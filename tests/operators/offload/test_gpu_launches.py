"""What a layer's experts give to a GPU, on one that counts: no more than the limits, and nothing that a real one refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch
from support import counted_layers
from support.counted_gpu import Counts, GpuTensor, counting


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    monkeypatch.setattr(counted_layers, "LAYERS", 4)
    with torch.no_grad(), counting() as counts:
        yield counts


def test_a_counted_gpu_refuses_what_a_gpu_refuses(counts: Counts) -> None:
    x = GpuTensor(torch.ones(3))
    with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
        torch.add(x, torch.ones(3))
    with pytest.raises((RuntimeError, TypeError)):
        x.numpy()
    counts.clear()
    assert (x + 1).view(1, 3).cpu().tolist() == [[2.0] * 3]
    assert (counts.kernels, counts.to_host, counts.to_device) == (1, 1, 0)


def test_weights_that_are_a_part_of_a_larger_tensor(counts: Counts) -> None:
    """Kernels read weights in order; a router may return a view."""
    model = counted_layers.Model("two_threshold")
    layer, router, x = model.gpu_layers[0], model.routers[0], model.hidden_states(3)
    _, _, chosen = router.module(x.float())
    wide = GpuTensor(torch.zeros(3, 2 * counted_layers.TOP_K))
    assert not wide[:, ::2].is_contiguous()
    assert layer.forward(x, chosen, wide[:, ::2]).shape == x.shape


def test_a_layer_gives_a_gpu_no_more_than_this(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the experts that arrive, which are launched one by one where few are in flight."""
    monkeypatch.setattr(counted_layers, "STEPS", 2)
    monkeypatch.setattr(counted_layers, "PROMPT", 64)
    prefill, (captured, token) = counted_layers.prefill(), counted_layers.captured()

    for schedule in ("two_threshold", "on_demand"):
        eager = counted_layers.eager(schedule)
        assert eager["kernels"] + eager["copies"] <= 25 and eager["syncs"] == 1
    assert captured["kernels"] <= 8 and captured["copies"] <= 2 and captured["host_nodes"] == 1
    assert captured["syncs"] == 0 and token["syncs"] == 1
    assert prefill["arrivals"] > 100 and prefill["syncs"] == 1
    groups = prefill["copies"] - 1  # one copy for each, that of its slots, and one that fetches the routing
    assert groups < 20 and prefill["kernels"] <= 3 * groups + 12


def test_several_tensors_are_fetched_by_one_copy(counts: Counts) -> None:
    layers = counted_layers.Model("fixed").layers
    given = {
        "a": torch.arange(6, dtype=torch.int64).view(3, 2),
        "b": torch.randn(3, 5).bfloat16(),
        "c": torch.randn(4, 3).T,
        "d": torch.zeros(0, 4),
    }
    counts.clear()
    found = layers.fetch({name: GpuTensor(tensor) for name, tensor in given.items()})
    assert (counts.to_host, counts.syncs) == (1, 1)
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
