"""A step captured on a device: recorded without running, and run at each replay on the current values of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.faulty_device import Faults
from support.transfer_harness import EMULATED, make_device
from support.virtual_device import Timed, Work
from torch import nn

from moegraft.operators.offload.devices.base import Device, DeviceError, Graph

WORK = Work(cost_ms=0.1)


def run(device: Device, graph: Graph) -> None:
    graph.replay()
    device.stream("compute").record().wait()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_is_recorded_and_runs_at_each_replay(device: Device, mode: Callable[[], AbstractContextManager[None]]) -> None:
    """Views, copies, in-place writes and composite operations, in inference mode and outside."""
    on = device.torch_device
    linear = nn.Linear(8, 8).to(on)
    found = {}
    with mode():
        x, kept, count = torch.randn(1, 8, device=on), torch.zeros(3, 8, device=on), torch.zeros((), dtype=torch.long, device=on)

        def layer() -> torch.Tensor:
            return F.silu(linear(x)).reshape(1, 2, 4).transpose(1, 2).contiguous().view(1, 8)

        def step() -> None:
            kept.index_copy_(0, torch.arange(1, device=on) + count, layer())
            count.add_(1)
            found["attended"] = F.scaled_dot_product_attention(*[kept.view(1, 1, 3, 8)] * 3)

        if on.type == "cuda":
            step()  # libraries get their handles and workspaces before a capture
            kept.zero_(), count.zero_()
        graph = device.capture(step)
        assert int(count) == 0 and not kept.any(), "nothing happened yet"
        expected = torch.zeros(3, 8, device=on)
        for place in range(3):
            x.copy_(torch.randn(1, 8))
            expected[place] = layer()[0]
            run(device, graph)
        torch.testing.assert_close(kept, expected)
        torch.testing.assert_close(found["attended"], F.scaled_dot_product_attention(*[expected.view(1, 1, 3, 8)] * 3))
        graph.release()


def test_forks_and_joins_are_kept(device: Device) -> None:
    compute, side = device.stream("compute"), device.stream("side")
    x, doubled, total = (torch.zeros(4, device=device.torch_device) for _ in range(3))

    def step() -> None:
        moved = x + 1
        device.order(compute, side)
        device.launch(side, Timed(WORK, lambda: torch.mul(moved, 2, out=doubled)))  # type: ignore[arg-type, return-value]
        device.launch(compute, Timed(WORK, partial(total.copy_, moved)))  # type: ignore[arg-type]
        device.order(side, compute)
        total.add_(doubled)

    graph = device.capture(step)
    for value in range(5):
        x.fill_(value)
        run(device, graph)
        assert total.tolist() == [3.0 * (value + 1)] * 4


@pytest.mark.parametrize(
    "waits",
    [lambda x: x.sum().item(), torch.nonzero, lambda x: bool((x > 0).all()), lambda x: x[x > 0], torch.unique],
    ids=["item", "nonzero", "bool", "mask", "unique"],
)
def test_blocking_operations_are_refused(device: Device, waits: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(DeviceError, match=r"waits for the device|cannot be captured"):
        device.capture(partial(waits, torch.ones(3, device=device.torch_device)))  # type: ignore[arg-type]
    device.launch(device.stream("compute"), Timed(WORK))  # and nothing is captured any more
    device.synchronize()


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x + torch.tensor(2.0, device=x.device),
        lambda x: x[torch.tensor([1, 0], device=x.device)],
        lambda x: torch.as_tensor([1.0] * 3, device=x.device) * x,
        lambda x: x.new_tensor([1.0, 2.0, 3.0]) + x,
    ],
    ids=["number", "index", "as_tensor", "new_tensor"],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_numbers_that_are_copied_to_the_device_are_refused(
    device: Device, mode: Callable[[], AbstractContextManager[None]], make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """On a GPU they come from memory that is not page-locked, and PyTorch refuses to capture the copy: a replay would read freed memory."""
    x = torch.ones(3, device=device.torch_device)
    refused = "the step cannot be captured: Cannot copy between CPU and CUDA tensors" if x.is_cuda else "copies a number from the host"
    with mode(), pytest.raises(DeviceError, match=refused):
        device.capture(partial(make, x))  # type: ignore[arg-type]
    with mode():  # a number that stays on the host, or that a kernel writes, is none of these
        device.capture(lambda: (x * torch.tensor(2.0), torch.full((3,), 2.0, device=x.device), torch.as_tensor(x, device=x.device)))  # type: ignore[arg-type, return-value]


def test_a_failure_in_a_replay_is_reported_by_the_next_event() -> None:
    for kind in EMULATED:
        device = make_device(kind, faults=Faults(launches=(1,)))
        x = torch.zeros(1)
        graph = device.capture(partial(x.add_, 1))  # type: ignore[arg-type]
        run(device, graph)
        with pytest.raises(DeviceError, match="injected: a launch failed"):
            run(device, graph)
        run(device, graph)
        assert x.tolist() == [2.0]
        device.close()
