"""`cpu_attention`: scaled dot-product attention over the KV cache by the C++ kernel.

The attention function that modules call in place of transformers' own.

Shapes, as transformers has them: query (B, heads, T, D), key and value (B, KV heads, S, D), mask (B or 1, heads or 1, T, S or more).
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moegraft.cpu_backend import Runtime
from moegraft.operators.base import InPlaceOperator
from moegraft.operators.context import InjectionContext
from moegraft.operators.cpu import as_array, describe
from moegraft.operators.custom_ops import attention, needs_gradient, register_attention
from moegraft.operators.structure import source_of

logger = logging.getLogger(__name__)

IMPLEMENTATION = "moegraft_cpu"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BASES = ("sdpa", "eager")  # whose meaning the kernel has
# Tensors that a module may hand on without meaning them for the attention itself.
_PASSED_ON = frozenset({"position_ids", "cache_position", "position_embeddings", "attention_mask", "input_ids", "inputs_embeds"})
_TOLERANCE = 1e-4  # relative, of the test in float32
Function = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class Implementation(str):
    """The name under which the library finds `forward`, which equals, to who asks, the implementation that it stands for."""

    stands_for: str

    @classmethod
    def of(cls, stands_for: str) -> Self:
        made = cls(IMPLEMENTATION)
        made.stands_for = stands_for
        return made

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or self.stands_for == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__  # a table finds `forward`


def implementation_for(module: nn.Module, config: PretrainedConfig) -> str:
    """The name that a module is to find in its config.

    Some modules compare it themselves, and mean whether their mask is one that sdpa takes. The others get a plain string, which
    `torch.compile` can trace.
    """
    owner: Any = type(module)  # mypy takes a module's __hash__ for that of its class
    compares = source_of(owner).count("_attn_implementation") > 1
    return Implementation.of(config._attn_implementation) if compares else IMPLEMENTATION


@dataclass(slots=True, weakref_slot=True, eq=False)
class AttentionState:
    """What one attention module's calls share.

    Attributes:
        config: the module's own before it was given ours; says which function it would call, even after `set_attn_implementation`.
        said: reasons why a call was left to PyTorch that the log has.
        number: under which graphs of `torch.compile` call it.
    """

    runtime: Runtime
    config: PretrainedConfig
    said: set[str] = field(default_factory=set)
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self.number = register_attention(self)

    def compute(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        scale: float,
        softcap: float,
        causal: bool,
    ) -> torch.Tensor:
        """What graphs call."""
        return compute(self.runtime, tensors, mask, AttentionArguments(scale, softcap, causal, sinks))

    def stock(self, module: nn.Module) -> Function:
        """The function that the module would call."""
        eager = eager_of(module)
        assert eager is not None, "a module without one is refused"
        found: Function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return found


def eager_of(module: nn.Module) -> Function | None:
    """The function that the module's file calls where none of the library's is asked for."""
    found: Function | None = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    return found


def forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As transformers' attention functions: (B, T, heads, D of values) and no weights; the stock function where the kernel cannot."""
    state: AttentionState = module.config._moegraft_attention  # type: ignore[union-attr,assignment] # `ready` put it there
    tensors = query, key, value
    if torch.compiler.is_compiling():
        if _why_stock(state, tensors, attention_mask, kwargs) is None:
            meaning = AttentionArguments.of(module, query, attention_mask, kwargs)
            return attention(*tensors, attention_mask, meaning.sinks, meaning.scale, meaning.softcap, meaning.causal, state.number), None
    elif not _is_left_to_pytorch(state, tensors, attention_mask, kwargs):
        return compute(state.runtime, tensors, attention_mask, AttentionArguments.of(module, query, attention_mask, kwargs)), None
    return state.stock(module)(module, query, key, value, attention_mask, **kwargs)


def _is_left_to_pytorch(
    state: AttentionState, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> bool:
    reason = _why_stock(state, tensors, mask, kwargs)
    if reason is not None and reason not in state.said:
        state.said.add(reason)
        logger.info("cpu_attention: left to PyTorch: %s", reason)
    return reason is not None


def _why_stock(
    state: AttentionState, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> str | None:
    query, key, value = tensors
    base = state.config._attn_implementation
    if base not in _BASES:
        return f"{base} attention"
    if query.device.type != "cpu" or needs_gradient(*tensors):
        return "another device, or gradients"
    if query.dtype not in _DTYPES or key.dtype != query.dtype or value.dtype != query.dtype or not query.dim() == key.dim() == 4:
        return "dtypes or shapes"
    if query.shape[0] != key.shape[0] or (mask is not None and not _fits(mask, query, key)):
        return "a mask or batch of another shape"
    if kwargs.get("dropout") or kwargs.get("output_attentions") or state.config.output_attentions:
        return "dropout or weights"
    if kwargs.get("s_aux") is not None and base == "sdpa":
        return "sinks, which sdpa leaves out"
    unknown = [name for name, given in kwargs.items() if name not in _KNOWN and _matters(name, given, base)]
    return f"its argument '{unknown[0]}'" if unknown else None


_KNOWN = frozenset({"dropout", "scaling", "is_causal", "softcap", "s_aux", "output_attentions"})


def _matters(name: str, given: object, base: str) -> bool:
    """Whether an argument may change what attention is. The library's own function ignores all but two; a family's may read any tensor."""
    if given is None or base == "sdpa":
        return given is not None and name in ("position_bias", "cache")
    return name == "cache" or (isinstance(given, torch.Tensor) and name not in _PASSED_ON)


def _fits(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> bool:
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.dtype not in (torch.bool, query.dtype):
        return False
    batch, heads, queries = query.shape[:3]
    return mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads) and mask.shape[2] == queries and mask.shape[3] >= key.shape[2]


@dataclass(frozen=True, slots=True)
class AttentionArguments:
    """What a call's arguments ask for, beside its tensors and mask; `sinks` is (heads,) or None."""

    scale: float
    softcap: float
    causal: bool
    sinks: torch.Tensor | None

    @classmethod
    def of(cls, module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> Self:
        """By the rules of transformers' own functions."""
        is_causal, scaling = kwargs.get("is_causal"), kwargs.get("scaling")
        causal = query.shape[2] > 1 and mask is None and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
        return cls(scale, float(kwargs.get("softcap") or 0.0), causal, kwargs.get("s_aux"))


def compute(
    runtime: Runtime, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], mask: torch.Tensor | None, meaning: AttentionArguments
) -> torch.Tensor:
    """The kernel's answer: (B, T, heads, D of values)."""
    query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)
    batch, heads, queries, _ = query.shape
    if meaning.causal and key.shape[2] > queries:  # a static cache that is still empty behind the prompt
        key, value = key[:, :, :queries], value[:, :, :queries]
    if mask is not None:
        mask = mask[..., : key.shape[2]]
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    out = query.new_empty(batch, queries, heads, value.shape[3])
    runtime.attention(
        as_array(query),
        as_array(key),
        as_array(value),
        as_array(out),
        scale=meaning.scale,
        mask=None if mask is None else as_array(mask),
        causal=meaning.causal,
        softcap=meaning.softcap,
        sinks=None if meaning.sinks is None else as_array(meaning.sinks.float().contiguous()),
    )
    return out


def why_different(module: nn.Module, state: AttentionState) -> str | None:
    """Why the kernel's answer is not that of the module's own function, found on random tensors; None when it is.

    Functions may read what is not among their arguments: sinks and caps that lie on the module.
    """
    base = state.config._attn_implementation
    if base not in _BASES:
        return f"its attention is {base}"
    generator = torch.Generator().manual_seed(0)
    groups = int(getattr(module, "num_key_value_groups", 1))
    sinks = getattr(module, "sinks", None)
    heads = sinks.numel() if isinstance(sinks, torch.Tensor) else 2 * groups
    query, key, value = (
        torch.randn(1, count, rows, 16, generator=generator) for count, rows in ((heads, 3), (heads // groups, 5), (heads // groups, 5))
    )
    shown = torch.ones(3, 5, dtype=torch.bool).tril(2)[None, None]
    mask = shown if base == "sdpa" else torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)
    kwargs: dict[str, Any] = {"scaling": 0.3, "dropout": 0.0}
    if isinstance(sinks, torch.Tensor):
        kwargs["s_aux"] = sinks.detach().float().cpu()
    try:
        with torch.no_grad():
            expected = state.stock(module)(module, query, key, value, mask, **kwargs)[0]
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        return f"its function cannot be tried ({type(error).__name__}: {error})"
    found = compute(state.runtime, (query, key, value), mask, AttentionArguments.of(module, query, mask, kwargs))
    if expected.shape != found.shape or not float((expected - found).norm()) <= _TOLERANCE * float(expected.norm()):
        return "its function computes something of its own"
    return None


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
    def unsupported_reason(cls, module: nn.Module, options: CpuAttentionOptions) -> str | None:
        if eager_of(module) is None:
            return f"the file of {type(module).__name__} has no eager_attention_forward to fall back to"
        return None

    @classmethod
    def build(cls, module: nn.Module, options: CpuAttentionOptions, context: InjectionContext) -> Self:
        return cls(context.runtime)

    def on_model_loaded(self, model: PreTrainedModel, path: str) -> None:
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
