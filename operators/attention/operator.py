"""`cpu_attention`: scaled dot-product attention over the KV cache by the C++ kernel."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moegraft.cpu_backend import Runtime
from moegraft.operators.attention.function import IMPLEMENTATION, AttentionState, eager_of, forward, implementation_for, why_different
from moegraft.operators.base import BuildContext, InPlaceOperator
from moegraft.operators.cpu import describe

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CpuAttentionOptions:
    """`cpu_attention` has no options."""


class CpuAttention(InPlaceOperator):
    """Attention of a module that calls transformers' attention interface, computed by the C++ kernel wherever its tensors are on the CPU.

    The module stays, with its projections, norms and cache: it is only told to call another function. Few queries (decoding, verifying a
    draft) read the cache as it lies, once for all query heads that share it; many go through register tiles, chunk by chunk of the keys
    with an online softmax (FlashAttention's order: Dao et al. 2022, arXiv:2205.14135; the softmax: Milakov and Gimelshein 2018,
    arXiv:1805.02867).

    What the kernel does not know is computed as before: tensors on a GPU, gradients, dropout, paged caches, attention weights that are
    asked for, and functions of a family's own that a test on random tensors finds to differ. Graphs of `torch.compile` call the kernel.
    """

    name = "cpu_attention"
    kind = "attention"
    options_type = CpuAttentionOptions
    summary = "attention over the KV cache by the C++ kernel, on the CPU"

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = runtime
        self._state: AttentionState | None = None

    @classmethod
    def refuse(cls, module: nn.Module, options: CpuAttentionOptions) -> str | None:
        if eager_of(module) is None:
            return f"the file of {type(module).__name__} has no eager_attention_forward to fall back to"
        return None

    @classmethod
    def build(cls, module: nn.Module, options: CpuAttentionOptions, context: BuildContext) -> Self:
        return cls(context.shared(Runtime, lambda: Runtime(threads=context.threads)))

    def ready(self, model: PreTrainedModel, path: str) -> None:
        module = model.get_submodule(path)
        config = module.config
        assert isinstance(config, PretrainedConfig), "a module of this kind has its model's config"
        state = AttentionState(self._runtime, config)
        reason = why_different(module, state)
        if reason is not None:
            logger.warning("cpu_attention: %s (%s) keeps its own attention: %s", path, type(module).__name__, reason)
            return
        if IMPLEMENTATION not in ALL_ATTENTION_FUNCTIONS:
            ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, forward)
        self._state = state
        own = copy.copy(config)
        # Past the property, which would tell the configs within this one too, and those are the whole model's.
        own._attn_implementation_internal = implementation_for(module, config)
        own.__dict__["_moegraft_attention"] = state
        module.config = own

    @contextmanager
    def set_aside(self, module: nn.Module) -> Iterator[None]:
        held: Any = module  # torch types every attribute of a module as a tensor
        own = held.config
        if self._state is not None:
            held.config = self._state.config
        try:
            yield
        finally:
            held.config = own

    def placement(self) -> str:
        where = f"the CPU ({describe(self._runtime)})" if self._state is not None else "as before"
        return f"attention: {self.name}, {where}"
