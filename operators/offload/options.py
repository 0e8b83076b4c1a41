"""What a rule says about where experts run: the GPU, the slots on it, who is scheduled how, what is loaded ahead.

How much of a GPU's memory the slots may take.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from moegraft.operators.cache_form import QuantisedForm
from moegraft.operators.offload.cache import CacheOptions
from moegraft.operators.offload.prefetch import PrefetchOptions
from moegraft.operators.offload.scheduler import ScheduleName
from moegraft.operators.offload.store import SlotPlan, even_plan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


DecodeName = Literal["auto", "eager", "graph"]
UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
STAGING = 4  # slots to load into beside those in use: two chunks are on the way, and a demand may join them
# Of captured steps, where nobody leaves before a step ends and all that has landed stays on top: one for so many slots, up to a number.
CAPTURED_SHARE, CAPTURED_STAGING = 16, 16
MOST_BYTES = 2**63
GPU = re.compile(r"auto|none|(cuda|emulated)(:\d+)?")


@dataclass(frozen=True, slots=True)
class ExpertCacheOptions(CacheOptions):
    """Which experts have a slot on the GPU, and how many: at most one of `ratio`, `slots` and `gpu_memory`.

    Attributes:
        ratio: share of each layer's experts.
        slots: experts of each layer.
        gpu_memory: for all slots of one GPU, such as `12GiB`. Where no size is given it is what is free after the rest of the
            model, the KV cache for `context` tokens and a margin.
        context: tokens of the KV cache that room is left for.
    """

    ratio: float | None = None
    slots: int | None = None
    gpu_memory: str | None = None
    context: int = 8192

    def __post_init__(self) -> None:
        CacheOptions.__post_init__(self)  # no super(): a class with slots is made anew
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

    def per_layer(self, num_experts: int) -> int | None:
        """Slots of a layer where the rule says so; None where memory decides."""
        if self.slots is not None:
            return min(self.slots, num_experts)
        return None if self.ratio is None else round(self.ratio * num_experts)

    def plan(self, layers: int, num_experts: int, expert_bytes: int, free_bytes: int, *, captured: bool = False) -> SlotPlan:
        """The slots to ask a GPU for that has `free_bytes` for them; `captured`: for decode steps that may be captured."""
        each = self.per_layer(num_experts)
        room = free_bytes if self.gpu_memory is None else parse_bytes(self.gpu_memory)
        total = room // expert_bytes if each is None else each * layers
        staging = max(STAGING, min(CAPTURED_STAGING, total // CAPTURED_SHARE)) if captured else STAGING
        if each is None:
            total = min(layers * num_experts, max(0, total - staging))
        if not 0 < total < layers * num_experts:
            staging = 0
        if self.scope == "global":
            return SlotPlan(total, staging)
        return even_plan(layers, total, staging)


def parse_bytes(text: str) -> int:
    """`12GiB`, `800 MB` as bytes.

    Raises:
        ValueError: it is none.
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
    """Where the experts of a model run beside the CPU; layers with equal options share slots, cache and engine."""

    gpu: str
    cache: ExpertCacheOptions
    schedule: ScheduleName
    prefetch: PrefetchOptions
    decode: DecodeName = "eager"

    @property
    def captures(self) -> bool:
        """Whether decode steps may be captured; `auto` leaves those alone that divide the work otherwise than by what has a slot."""
        return self.decode == "graph" or (self.decode == "auto" and self.schedule not in ("all_cpu", "on_demand"))

    @property
    def effective_prefetch(self) -> PrefetchOptions:
        """`prefetch`, which is none for the schedules that bring nothing: theirs is a map made once."""
        if self.schedule in ("fixed", "layer_map", "all_cpu"):
            return PrefetchOptions(policy="none", promote=False)
        return self.prefetch

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that `gpu` names, numbered."""
        return tuple(name if ":" in name else f"{name}:0" for name in self.gpu.split(","))

    @property
    def emulated(self) -> bool:
        return self.gpu.startswith("emulated")


def check_decode(decode: DecodeName, schedule: ScheduleName) -> None:
    """
    Raises:
        ValueError: captured steps cannot do what the schedule says.
    """
    if decode == "graph" and schedule in ("all_cpu", "on_demand"):
        raise ValueError(
            f"decode: graph computes on the GPU what has a slot and the rest on the CPU, which schedule: {schedule} does not; "
            "take another schedule, or decode: eager"
        )


def check_gpu(gpu: str) -> None:
    """
    Raises:
        ValueError: `gpu` names no device.
    """
    names = gpu.split(",")
    kinds = {name.partition(":")[0] for name in names}
    if not all(GPU.fullmatch(name) for name in names) or len(kinds) > 1 or len(set(names)) < len(names):
        raise ValueError(f"gpu is auto, none, cuda:N or several of them with commas between, not '{gpu}'")


MARGIN_SHARE = 0.06  # of the GPU: activations of a prompt, PyTorch's own blocks, the display
MARGIN_BYTES = 768 << 20


def kv_cache_bytes(config: PretrainedConfig, context: int, dtype: torch.dtype, form: QuantisedForm | None = None) -> int:
    """Keys and values of `context` tokens by the config's numbers of heads; a latent or windowed cache is smaller.

    Args:
        form: of a quantised cache, of which one layer at a time is in `dtype` as well.
    """
    text = config.get_text_config()
    per_token = [token_bytes(layer, dtype) for layer in getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers]
    if form is None:
        return context * sum(per_token)
    return form.cache_bytes(per_token, dtype.itemsize, context)


def token_bytes(layer: PretrainedConfig, dtype: torch.dtype) -> int:
    """Keys and values of one token in one layer."""
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    size = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    return int(2 * heads * size * dtype.itemsize)


def free_for_slots(device: torch.device, kv_bytes: int) -> int:
    """What is left on a CUDA device for slots, when the rest of the model is there already.

    Args:
        kv_bytes: of the part of the KV cache that this device will hold.
    """
    free, total = torch.cuda.mem_get_info(device)
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, free + reusable - kv_bytes - max(MARGIN_BYTES, int(MARGIN_SHARE * total)))
