"""Multi-head latent attention without expanding its cache (DeepSeek-V2: Liu et al. 2024, arXiv:2405.04434, section 2.1).

The cache of such a module has, for each token, one latent and one rotary key that all heads share. The module expands the whole cache to
keys and values by `kv_b_proj`, whatever the number of queries. For few queries that projection is absorbed (ibid., section 2.1.2): its
first part takes the queries of each head to the latents' space, where one latent is the key and the value of all heads, and its second part
takes each head's sum of latents to its values.

Shapes: query (B, heads, T, nope + rotary), latents (B, 1, S, rank), rotary keys (B, 1, S, rotary); the weight of `kv_b_proj` is read in
place as (heads, nope + V, rank), so that absorbing takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from moegraft.operators.cpu import is_plain
from moegraft.operators.cpu_ops.in_place import NotRecognisedError

FEW_QUERIES = 32  # absorbing takes fewer multiplications up to 171 for DeepSeek-V3, and was measured faster up to 64 for 16 heads of it
EXPAND = "expand_kv"  # the method of a module that expands its latents; transformers' name
States = tuple[torch.Tensor, torch.Tensor]  # keys and values


class Expansion:
    """The keys and values of some latents, computed when they are first asked for."""

    def __init__(self, expand: Callable[[torch.Tensor, torch.Tensor], States], latents: torch.Tensor, rotary: torch.Tensor) -> None:
        self.latents = latents
        self.rotary = rotary
        self._expand = expand
        self._states: States | None = None

    @property
    def done(self) -> bool:
        return self._states is not None

    def states(self) -> States:
        if self._states is None:
            self._states = self._expand(self.latents, self.rotary)
        return self._states


_FORM: Any = (torch.Tensor.size, torch.Tensor.dim, *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device")))


class LatentStates(torch.Tensor):
    """Keys or values that have not been expanded: a tensor of their shape, which expands them when PyTorch computes with it."""

    expansion: Expansion
    _part: int  # 0: keys, 1: values

    @staticmethod
    def of(expansion: Expansion, part: int, heads: int, columns: int) -> LatentStates:
        batch, _, tokens, _ = expansion.latents.shape
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined] # torch declares no type for it
        found: LatentStates = make(LatentStates, (batch, heads, tokens, columns), dtype=expansion.latents.dtype, device="cpu")
        found.expansion, found._part = expansion, part
        return found

    def expanded(self) -> torch.Tensor:
        return self.expansion.states()[self._part]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _FORM:
                return func(*args, **(kwargs or {}))
            args, kwargs = tree_map_only(LatentStates, LatentStates.expanded, (args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    __torch_dispatch__: Any = __torch_function__  # what PyTorch computes without having asked the first


def projection(module: nn.Module) -> torch.Tensor:
    """Return the weight that expands a module's latents: (heads, nope + V, rank).

    Raises:
        NotRecognisedError: it is not a plain matrix that can be read in place.
    """
    layer = module._modules.get("kv_b_proj")
    if type(layer) is not nn.Linear:
        raise NotRecognisedError(f"its kv_b_proj is a {type(layer).__name__}, not an nn.Linear whose weight can be read in place")
    if layer.bias is not None or layer._forward_hooks or layer._forward_pre_hooks:
        raise NotRecognisedError("its kv_b_proj has a bias or hooks")
    weight = layer.weight
    if not is_plain(weight):
        raise NotRecognisedError("the weight of its kv_b_proj is not contiguous on the CPU, or of another dtype than the kernel's")
    try:
        width = int(module.qk_nope_head_dim) + int(module.v_head_dim)  # type: ignore[arg-type] # numbers, for which mypy has no type
    except AttributeError as error:
        raise NotRecognisedError(f"it holds no number of columns ({error})") from error
    if width <= 0 or weight.shape[0] % width:
        raise NotRecognisedError("its kv_b_proj does not divide into heads")
    return weight.detach().view(-1, width, weight.shape[1])
