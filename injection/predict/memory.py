"""Host memory that a plan takes: at rest, at the peak of loading, and while it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from moegraft.injection.outline import Outline
from moegraft.injection.plan import Plan
from moegraft.injection.predict.gpu_memory import moved_bytes
from moegraft.injection.predict.kv_cache import KvCache
from moegraft.injection.predict.speed import Load
from moegraft.operators.experts.layout import read_layout
from moegraft.operators.structure import kinds

PROGRAM_BYTES = 1 << 29  # Python, PyTorch and transformers where it cannot be read
WIDTHS = 8  # hidden-size vectors a token that are alive at once: residual, norms, projections, and the operator's own copies


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory in bytes.

    Attributes:
        weights: of operators and of what is not replaced.
        program: of Python and its libraries.
        loading: on top of these at the worst moment of loading; mapped files are not counted, as the system takes them back.
        kv_cache, activations: on top of these while it runs.
    """

    weights: int
    program: int
    loading: int
    kv_cache: int
    activations: int

    @property
    def at_rest(self) -> int:
        return self.weights + self.program

    @property
    def peak_loading(self) -> int:
        return self.at_rest + self.loading

    @property
    def running(self) -> int:
        return self.at_rest + self.kv_cache + self.activations

    @property
    def needed(self) -> int:
        """The most at any time."""
        return max(self.peak_loading, self.running)


def memory_of(outline: Outline, plan: Plan, cache: KvCache, load: Load, *, on_gpu: bool) -> Memory:
    """What loading and running a plan takes of the host, `on_gpu` with all but the experts on a GPU."""
    hidden_size = getattr(outline.source.config.get_text_config(), "hidden_size", 0)
    copied = 2 * load.batch * load.prompt * hidden_size * outline.dtype.itemsize  # tokens on their way to the experts and back
    return Memory(
        weights=plan.bytes_by_device.get("cpu", 0) - (moved_bytes(plan) if on_gpu else 0),
        program=_program_bytes(),
        loading=max(_transient_bytes(outline, plan), default=0),
        kv_cache=0 if on_gpu else cache.nbytes(load.context, load.batch),
        activations=copied if on_gpu else activation_bytes(outline, load),
    )


def activation_bytes(outline: Outline, load: Load) -> int:
    """What is alive at once while a prompt is read, wherever that is."""
    config = outline.source.config.get_text_config()
    tokens = load.batch * max(load.prompt, 1)
    widest = max(getattr(config, "hidden_size", 0), getattr(config, "intermediate_size", 0) or 0)
    vocabulary = getattr(config, "vocab_size", 0) * load.batch * 4  # logits of the last position, in float32
    return tokens * widest * WIDTHS * outline.dtype.itemsize + vocabulary


def _program_bytes() -> int:
    """What this process holds now: it has loaded the same libraries and no weights."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return PROGRAM_BYTES


def _transient_bytes(outline: Outline, plan: Plan) -> Iterator[int]:
    """For every module, what is read of it at once, and the copy that it becomes on its way."""
    replaced = {swap.module for swap in plan.swaps if not swap.in_place}
    for path, module in outline.skeleton.named_modules():
        for parameter in module.parameters(recurse=False):
            read = parameter.numel() * outline.stored.itemsize
            if path in replaced:
                yield 2 * _piece_bytes(path, module, read, outline)
            else:
                yield read if outline.stored == outline.dtype else 2 * read


def _piece_bytes(path: str, module: nn.Module, parameter_bytes: int, outline: Outline) -> int:
    """Experts are read one at a time, but for layouts that only transformers' converter can make, which come as a whole."""
    if "experts" not in kinds(path, module, outline.skeleton):
        return parameter_bytes
    layout = read_layout(module)
    return parameter_bytes if layout.transposed or layout.interleaved else parameter_bytes // layout.num_experts
