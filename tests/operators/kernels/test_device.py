"""Kernels are launched on the GPU that holds their tensors, whichever is PyTorch's current one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch
from support.kernel_cases import make_batch, make_layer
from support.triton_cases import DEVICE

from moegraft.cpu_backend import PackedLinear
from moegraft.operators.kernels import launch, linear, sparse_slots
from moegraft.operators.kernels.linear import PackedLinearOnGpu
from moegraft.operators.kernels.sparse_slots import SparseSlotExperts


def test_the_device_of_the_tensors_becomes_the_current_one() -> None:
    assert isinstance(launch.on(torch.device("cpu")), nullcontext)
    found = launch.on(torch.device("cuda:1"))
    assert isinstance(found, torch.cuda.device) and found.idx == 1


@pytest.mark.parametrize(
    ("version", "arch", "avoided"), [((3, 6), 90, True), ((3, 8), 90, True), ((3, 9), 90, False), ((3, 6), 80, False), ((3, 6), 120, False)]
)
@pytest.mark.parametrize("before", [None, "0", "1"])
def test_wrong_products_of_warp_groups_are_avoided(
    version: tuple[int, int], arch: int, avoided: bool, before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(launch.NO_WGMMA, before or "")  # restored afterwards
    if before is None:
        monkeypatch.delenv(launch.NO_WGMMA)
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(launch, "_triton_version", lambda: version)
    target = SimpleNamespace(get_current_target=lambda: SimpleNamespace(backend="cuda", arch=arch))
    monkeypatch.setattr("triton.runtime.driver._active", target)
    launch.avoid_wrong_wgmma()
    assert os.environ.get(launch.NO_WGMMA) == ("1" if avoided else before)


def test_launchers_enter_it(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    monkeypatch.setattr(linear, "on", on)
    monkeypatch.setattr(sparse_slots, "on", on)
    packed = PackedLinear(32, 32, "int8")
    packed.pack(torch.ones(32, 32).numpy())
    PackedLinearOnGpu(32, 32, "int8", torch.from_numpy(packed.buffer.copy()).to(DEVICE)).forward(torch.ones(2, 32, device=DEVICE))
    layer = make_layer("float32", 3, 32, 32, sparse=True)
    x, index, weights = (tensor.to(DEVICE) for tensor in make_batch(2, 2, layer))
    arena = torch.from_numpy(layer.packed.buffer.copy()).view(3, -1).to(DEVICE)
    experts = SparseSlotExperts(layer.shape, layer.spec, "float32", torch.device(DEVICE))
    experts.forward(x, arena, index.int(), weights, torch.empty_like(x), "pair")
    next(experts.activations(x, arena, index.int()))
    assert [device.type for device in entered] == [DEVICE] * 3
