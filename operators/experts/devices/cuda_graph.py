"""A step captured into a CUDA graph. No GPU has run this yet: tests go through stand-ins for PyTorch's calls."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moegraft.operators.experts.devices.interface import DeviceError


class CudaGraph:
    """A graph of the current device, and the memory that its tensors keep.

    Only this thread's calls are watched while it is captured: experts on their way to the GPU go on landing, for other threads hand them
    over, on a stream that is not captured.

    Raises:
        DeviceError: the step cannot be captured, or the device refused.
    """

    def __init__(self, device: str, step: Callable[[], None]) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                step()
        except RuntimeError as error:  # DeviceError is one, as is what PyTorch raises
            raise DeviceError(f"{device}: the step cannot be captured: {error}") from error

    def replay(self) -> None:
        try:
            self._graph.replay()
        except RuntimeError as error:
            raise DeviceError(f"{self._device}: {error}") from error

    def release(self) -> None:
        self._graph.reset()
