"""What a layer's experts give to a GPU, on one that counts: no more than the limits, and nothing that a real one refuses."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from support import ROOT

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_launches
from _counted_gpu import Counts, GpuTensor, counting


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    monkeypatch.setattr(gpu_launches, "LAYERS", 4)
    with torch.inference_mode(), counting() as counts:
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
    model = gpu_launches.Model("two_threshold")
    layer, router, x = model.gpu_layers[0], model.routers[0], model.hidden_states(3)
    _, _, chosen = router.module(x.float())
    wide = GpuTensor(torch.zeros(3, 2 * gpu_launches.TOP_K))
    assert not wide[:, ::2].is_contiguous()
    assert layer.forward(x, chosen, wide[:, ::2]).shape == x.shape
