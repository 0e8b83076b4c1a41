"""Kernels are launched on the GPU that holds their tensors, whichever is PyTorch's current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch
from support.sparse_cases import sparse_case
from support.triton_cases import DEVICE

from moegraft.cpu_backend import PackedLinear
from moegraft.operators.kernels import launch, linear
from moegraft.operators.kernels.linear import PackedLinearOnGpu
from moegraft.operators.kernels.workspace import Workspace
from moegraft.operators.sparse import gpu_layer
from moegraft.operators.sparse.gpu_layer import SparseGpuLayer


def test_the_device_of_the_tensors_becomes_the_current_one() -> None:
    assert isinstance(launch.on(torch.device("cpu")), nullcontext)
    found = launch.on(torch.device("cuda:1"))
    assert isinstance(found, torch.cuda.device) and found.idx == 1


def test_launchers_enter_it(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    monkeypatch.setattr(linear, "on", on)
    monkeypatch.setattr(gpu_layer, "on", on)
    packed = PackedLinear(32, 32, "int8")
    packed.pack(torch.ones(32, 32).numpy())
    PackedLinearOnGpu(32, 32, "int8", torch.from_numpy(packed.buffer.copy()).to(DEVICE)).forward(torch.ones(2, 32, device=DEVICE))
    case = sparse_case(2, 2, 3, 32, 32).on_device()
    layer = SparseGpuLayer(case.weights, Workspace(torch.device(DEVICE)), lambda *_: "pair")
    layer.forward(case.hidden_states, case.ids, case.top_k_weights, torch.empty_like(case.hidden_states))
    next(layer.activations(case.hidden_states, case.ids))
    assert [device.type for device in entered] == [DEVICE] * 3
