"""Options for experts on a GPU, and how much of its memory the slots may take."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Literal

import torch

from moegraft.operators.base import gpu_margin_bytes
from moegraft.operators.offload.cache import CacheOptions
from moegraft.operators.offload.devices.base import DEVICE_KINDS
from moegraft.operators.offload.prefetch import PrefetchOptions
from moegraft.operators.offload.scheduler import ScheduleName
from moegraft.operators.offload.store import SlotPlan, even_plan

DecodeName = Literal["auto", "eager", "graph"]
UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
STAGING = 4  # slots to load into, in addition to those in use: two chunks are in flight, and a demand may join them
# One per so many slots: for captured steps, during which nothing is evicted and all that lands needs a slot, up to a number of slots; and
# for prompts, whose experts arrive in groups with a launch each, so that the next group is copied meanwhile, up to a size.
STAGING_SHARE, CAPTURED_STAGING, STAGING_BYTES = 16, 16, 128 << 20
MOST_BYTES = 2**63
GPU = re.compile(r"auto|none|[a-z]+(:\d+)?")


@dataclass(frozen=True, slots=True)
class ExpertCacheOptions(CacheOptions):
    """Which experts have a slot on the GPU, and how many: at most one of `ratio`, `slots` and `gpu_memory`.

    Attributes:
        ratio: share of each layer's experts.
        slots: experts of each layer.
        gpu_memory: for all slots of one GPU, such as `12GiB`. Without any of the three, what is free after the rest of the model,
            the KV cache for `context` tokens and a margin.
        context: tokens of the KV cache to leave memory for.
    """

    ratio: float | None = None
    slots: int | None = None
    gpu_memory: str | None = None
    context: int = 8192

    def __post_init__(self) -> None:
        CacheOptions.__post_init__(self)  # no super(): dataclass(slots=True) creates a new class
        given = [name for name in ("ratio", "slots", "gpu_memory") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"the cache has one size, not {' and '.join(given)}")
        if self.ratio is not None and not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio is a share from 0 to 1, not {self.ratio}")
        if self.slots is not None and self.slots < 0:
            raise ValueError(f"slots must be 0 or more, not {self.slots}")
        if self.gpu_memory is not None:
            parse_bytes(self.gpu_memory)
        if self.context < 1:
            raise ValueError(f"context is a number of tokens, not {self.context}")

    @property
    def of_policy(self) -> CacheOptions:
        """The options of the policy alone."""
        return CacheOptions(**{field.name: getattr(self, field.name) for field in fields(CacheOptions)})

    def per_layer(self, num_experts: int) -> int | None:
        """Return the slots of a layer if the options determine them; None if memory does."""
        if self.slots is not None:
            return min(self.slots, num_experts)
        return None if self.ratio is None else round(self.ratio * num_experts)

    def plan(
        self, layers: int, num_experts: int, expert_bytes: int, free_bytes: int, *, captured: bool = False, share: float = 1.0
    ) -> SlotPlan:
        """Return the slots to allocate on a GPU that has `free_bytes` for them.

        Args:
            captured: for decode steps that may be captured.
            share: of the memory that these layers may take, where layers whose experts have other sizes are on the GPU as well.
        """
        each = self.per_layer(num_experts)
        budget = round(share * (free_bytes if self.gpu_memory is None else parse_bytes(self.gpu_memory)))
        total = budget // expert_bytes if each is None else each * layers
        most = max(CAPTURED_STAGING if captured else STAGING, STAGING_BYTES // expert_bytes)
        staging = max(STAGING, min(most, total // STAGING_SHARE))
        if each is None:
            total = min(layers * num_experts, max(0, total - staging))
        if not 0 < total < layers * num_experts:
            staging = 0
        return even_plan(layers, total, staging)


def parse_bytes(text: str) -> int:
    """Return the bytes of `12GiB` or `800 MB`.

    Raises:
        ValueError: the text is not an amount of memory.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?b)\s*", text, re.IGNORECASE)
    if not found:
        raise ValueError(f"'{text}' is no amount of memory; write a number with KiB, MiB or GiB, such as 12GiB")
    size = float(found[1]) * UNITS[found[2].lower()]
    if size > MOST_BYTES:
        raise ValueError(f"'{found[1][:20]}...{found[2]}' is more memory than there is")
    return int(size)


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """How experts run on GPUs in addition to the CPU; layers with equal options share slots, cache and engine."""

    gpu: str
    cache: ExpertCacheOptions
    schedule: ScheduleName
    prefetch: PrefetchOptions
    decode: DecodeName = "eager"

    @property
    def captures(self) -> bool:
        """Whether decode steps may be captured; not by `auto` for schedules that split otherwise than by residency."""
        return self.decode == "graph" or (self.decode == "auto" and self.schedule not in ("all_cpu", "on_demand"))

    @property
    def effective_prefetch(self) -> PrefetchOptions:
        """The prefetching in effect: none for schedules that never transfer experts, whose map is static."""
        if self.schedule in ("fixed", "layer_map", "all_cpu"):
            return PrefetchOptions(policy="none", promote=False)
        return self.prefetch

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices in `gpu`, each with its number."""
        return tuple(name if ":" in name else f"{name}:0" for name in self.gpu.split(","))

    @property
    def on_cuda(self) -> bool:
        """Whether the devices are GPUs of PyTorch's, not of `DEVICE_KINDS`."""
        return self.gpu.partition(":")[0].partition(",")[0] not in DEVICE_KINDS


def check_gpu(gpu: str) -> None:
    """Raise ValueError where the names of devices are not of one of the valid forms."""
    names = gpu.split(",")
    kinds = {name.partition(":")[0] for name in names}
    valid = all(GPU.fullmatch(name) for name in names) and kinds <= {"auto", "none", "cuda", *DEVICE_KINDS}
    if not valid or len(kinds) > 1 or len(set(names)) < len(names):
        raise ValueError(f"gpu is auto, none, cuda:N or several of them separated by commas, not '{gpu}'")


def free_for_slots(device: torch.device, kv_bytes: int) -> int:
    """Return the bytes left on a CUDA device for slots, once the rest of the model is loaded.

    Args:
        kv_bytes: of the part of the KV cache that this device will hold.
    """
    free, total = torch.cuda.mem_get_info(device)
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, free + reusable - kv_bytes - gpu_margin_bytes(total))
