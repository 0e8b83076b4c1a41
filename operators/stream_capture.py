"""Capturing a CUDA graph so that PyTorch is as it was where the capture fails."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress

import torch

# Graphs whose capture could not be ended. PyTorch's allocator of page-locked memory goes on asking them which streams they capture, and
# offers no call that ends it.
_never_ended: list[torch.cuda.CUDAGraph] = []


def capture_graph(device: torch.device, stream: torch.cuda.Stream, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture what `step` launches, on a stream of its own. Only this thread is captured: others go on copying, on other streams.

    Garbage is not collected meanwhile: page-locked memory that is freed has an event recorded on each stream that copied it, and one that
    is recorded on a captured stream can never be waited for.

    Raises:
        Exception: what `step` raised, or else PyTorch's reason.
    """
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    current = torch.cuda.current_stream(device)
    failure: BaseException | None = None
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.device(device), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            try:
                step()
            except BaseException as error:
                failure = error
                raise
    except BaseException as error:
        torch.cuda.set_stream(current)
        if not _release_ended(graph):
            _release_by_hand(device, pool)
            _never_ended.append(graph)
        if failure is None or failure is error:
            raise
        raise failure from None  # ending a capture that failed fails as well, and for no reason of its own
    finally:
        failure = None  # whose traceback has this frame, and so what `step` holds
        if collecting:
            gc.enable()
    return graph


def _release_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Release a graph's memory, and return whether its capture has ended: otherwise it has none that it knows of."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    finally:
        graph.reset()
    return True


def _release_by_hand(device: torch.device, pool: tuple[int, int]) -> None:
    """Restore what PyTorch leaves changed when the end of a capture fails: memory pool and random numbers."""
    for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with suppress(RuntimeError):  # where PyTorch has done it, or the capture did not come so far
            end(device.index, pool)
    # The generator's state still counts as being captured, and a copy of it does not.
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
