"""`experts_implementation="moegraft"` of plain transformers: the kernels on the parameters of stock experts, which stay.

Importing this module registers it, which `moegraft.operators.autoload` does in time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from moegraft.operators.autoload import METHOD
from moegraft.operators.errors import UnsupportedModelError

if TYPE_CHECKING:
    from moegraft.operators.base import Operator


def experts_forward(self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Compute stock experts by our kernel: (T, H), (T, K), (T, K) -> (T, H); transformers' `experts_implementation="moegraft"`.

    The parameters stay, and are packed at the first call and again when one of them has changed, so that the experts are in memory twice.
    With gradients, and with adapters that PEFT adds to a parameter in each call, transformers' grouped products compute them.
    """
    from moegraft.injection.checkpoint.sources import ModuleSource

    parameters = list(self.parameters(recurse=False))
    trains = torch.is_grad_enabled() and (hidden_states.requires_grad or any(each.requires_grad for each in parameters))
    if trains or is_parametrized(self):
        trained: torch.Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return trained
    state = tuple((each.data_ptr(), 0 if each.is_inference() else each._version) for each in parameters)
    samples = [_sample(each) for each in parameters]
    packed = _PACKED.get(self)
    if packed is None or packed[0] != state or not all(map(torch.equal, packed[1], samples)):
        operator = _stock_experts(self, hidden_states.dtype)
        operator.load(ModuleSource("experts", self), lambda size: None)
        packed = _PACKED[self] = state, [each.clone() for each in samples], operator
    result: torch.Tensor = packed[2](hidden_states, top_k_index, top_k_weights)
    return result


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    """Return some 256 values of all experts, to notice most writes that PyTorch does not count, through `.data`, as in PEFT's merges."""
    step = max(1, parameter.shape[0] * parameter.shape[1] // 256)
    rows = parameter.detach()[:, ::step]
    return rows[..., -1] if rows.dim() > 2 else rows


def _stock_experts(module: nn.Module, dtype: torch.dtype) -> Operator:
    """Build the operator for stock experts, with the weights as they are stored."""
    from moegraft.operators.context import InjectionContext
    from moegraft.operators.registry import load_registry

    operator = load_registry()["hybrid_experts"]
    options = operator.options_type(weights="stored")
    reason = operator.unsupported_reason(module, options)
    if reason is not None:
        raise UnsupportedModelError(f"experts_implementation='{METHOD}': {type(module).__name__}: {reason}")
    return operator.build(module, options, _CONTEXTS.setdefault(dtype, InjectionContext(dtype)))


# By module, outside of it, so that it can be copied: the state and samples of its parameters, and the operator that has them packed.
_PACKED: WeakKeyDictionary[nn.Module, tuple[Any, list[torch.Tensor], Operator]] = WeakKeyDictionary()
_CONTEXTS: dict[torch.dtype, Any] = {}  # the threads of all models that have the experts of one dtype
ALL_EXPERTS_FUNCTIONS.register(METHOD, experts_forward)
