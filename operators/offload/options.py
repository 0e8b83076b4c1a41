"""Options for experts on a GPU: the cache and its policy, and how much of a GPU's memory the slots may take.

A policy learns from every token's routing and ranks experts by how much a cache should keep them. The policies are native
(`moegraft.cpu_backend.CachePolicy`): the slots of a GPU and the frames of host memory rank by the same code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.cpu_backend import CachePolicy
from moegraft.operators.base import gpu_margin_bytes
from moegraft.operators.errors import error_sentence
from moegraft.operators.offload.devices.base import DEVICE_KINDS
from moegraft.operators.offload.prefetch import PrefetchOptions
from moegraft.operators.offload.scheduler import ScheduleName
from moegraft.operators.offload.store import SlotPlan, even_plan
from moegraft.operators.routing_trace import Trace, TraceError
from moegraft.operators.structure import MTP

PolicyName = Literal["mrs", "lru", "lfu", "score_frequency", "static"]
TOP_P_FACTOR = 2  # times the experts per token: HybriMoE sets p to twice the number of activated experts
DecodeName = Literal["auto", "eager", "graph"]
UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
STAGING = 4  # slots to load into, in addition to those in use: two chunks are in flight, and a demand may join them
# One per so many slots: for captured steps, during which nothing is evicted and all that lands needs a slot, up to a number of slots; and
# for prompts, whose experts arrive in groups with a launch each, so that the next group is copied meanwhile, up to a size.
STAGING_SHARE, CAPTURED_STAGING, STAGING_BYTES = 16, 16, 128 << 20
MOST_BYTES = 2**63
GPU = re.compile(r"auto|none|[a-z]+(:\d+)?")


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The cache policy. In `benchmarks/results/cache_sweep.csv` only the defaults are best or near the best on every trace.

    Attributes:
        policy: `mrs`, a moving average of router scores (HybriMoE, section IV-D); `lru`, the latest use; `lfu`, the total of uses;
            `score_frequency`, the averages of scores and of uses in equal parts; `static`, the uses in `profile`, fixed.
        alpha: the newest token's weight in the average of scores, eq. (3).
        top_p: how many of a token's largest scores count, eq. (3); by default twice the experts per token.
        frequency_alpha: the newest token's weight in the average of uses.
        profile: a routing trace (`moegraft calibrate --routing`), for `static`.
    """

    policy: PolicyName = "score_frequency"
    alpha: float = 0.1
    top_p: int | None = None
    frequency_alpha: float = 0.01
    profile: Path | None = None

    def __post_init__(self) -> None:
        for name in ("alpha", "frequency_alpha"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, not {getattr(self, name)}")
        if self.top_p is not None and self.top_p < 1:
            raise ValueError(f"top_p must be 1 or more, not {self.top_p}")
        if (self.policy == "static") != (self.profile is not None):
            raise ValueError("policy 'static' needs 'profile', and only it takes one")

    def why_unfit(self, num_experts: int, path: str | None = None) -> str | None:
        """Return why the profile cannot serve a layer of so many experts, or that of `path`; None where it can or none is given."""
        if self.profile is None:
            return None
        try:
            uses = _uses(self.profile)
        except (OSError, TraceError) as error:
            return f"{error_sentence(error)}; moegraft calibrate --routing FILE records a profile"
        found = len(next(iter(uses.values())))
        if found != num_experts:
            return f"{self.profile}: a profile of layers with {found} experts, where this one has {num_experts}"
        if path is None or path in uses or path.startswith(f"{MTP}."):  # MTP layers run in drafts alone, which are not recorded
            return None
        return f"{self.profile}: the profile of another model, which has no {path}"

    @property
    def bypasses(self) -> bool:
        """Whether a miss stays out of the cache unless it ranks above a resident expert."""
        return self.policy == "static"


def make_policy(options: CacheOptions, paths: Sequence[str], num_experts: int, top_k: int) -> CachePolicy:
    """Return the policy that `options` ask for, for the layers of these paths, which route each token to `top_k` of `num_experts` experts.

    Raises:
        OSError, TraceError: the profile cannot be read, or is for another model.
    """
    uses = None
    if options.profile is not None:
        reasons = filter(None, (options.why_unfit(num_experts, path) for path in paths))
        if (reason := next(reasons, None)) is not None:
            raise TraceError(reason)
        uses = np.stack([_uses(options.profile).get(path, np.zeros(num_experts, np.int64)) for path in paths])
    weights = {"alpha": options.alpha, "frequency_alpha": options.frequency_alpha}
    return CachePolicy(options.policy, len(paths), num_experts, **weights, top_p=options.top_p or TOP_P_FACTOR * top_k, profile=uses)


def _uses(profile: Path) -> Mapping[str, NDArray[np.int64]]:
    """Return how often each expert is used in a recorded trace, (E,), by the paths of its layers."""
    status = profile.stat()
    return _uses_of_version(profile, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1)  # each layer of a plan asks for it
def _uses_of_version(profile: Path, changed_ns: int, size: int) -> Mapping[str, NDArray[np.int64]]:
    trace = Trace.load(profile)
    return dict(zip(trace.layers, trace.loads(), strict=True))


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
