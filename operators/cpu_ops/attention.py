"""`cpu_attention`: scaled dot-product attention over the KV cache by the C++ kernel.

Attention modules of transformers look up their attention function by the name in their config. A module that this operator replaces gets a
config of its own with the name of `forward` here, which calls the kernel, or the function that the module would have called.

Multi-head latent attention is computed without expanding its cache (DeepSeek-V2: Liu et al. 2024, arXiv:2405.04434, section 2.1). The
cache of such a module has, for each token, one latent and one rotary key that all heads share. The module expands the whole cache to keys
and values by `kv_b_proj`, whatever the number of queries. For few queries that projection is absorbed (ibid., section 2.1.2): its first
part takes the queries of each head to the latents' space, where one latent is the key and the value of all heads, and its second part
takes each head's sum of latents to its values.

Shapes, as in transformers: query (B, heads, T, D), key and value (B, KV heads, S, D), mask (B or 1, heads or 1, T, S or more). Latent
attention: query (B, heads, T, nope + rotary), latents (B, 1, S, rank), rotary keys (B, 1, S, rotary); the weight of `kv_b_proj` is read in
place as (heads, nope + V, rank), so that absorbing takes no memory.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from moegraft.cpu_backend import Runtime
from moegraft.operators.cpu import ELEMENT_CODES, as_array, is_plain
from moegraft.operators.cpu_ops.in_place import CpuOperator, NoOptions, NotRecognisedError, let_answer, probe
from moegraft.operators.custom_ops import attention, needs_gradient, register
from moegraft.operators.decode.last_layer import LastLayer
from moegraft.operators.decode.pages import PAGE_TOKENS, LayerInPages, UnreadPagesError
from moegraft.operators.structure import source_of

logger = logging.getLogger(__name__)

IMPLEMENTATION = "moegraft_cpu"
SUPPORTED = ("sdpa", "eager")  # the implementations that compute what the kernel computes
_ELSEWHERE = "its tensors are on another device"  # the reason to fall back that is none to report
_ARGUMENTS = frozenset({"dropout", "scaling", "is_causal", "softcap", "s_aux", "output_attentions"})
# Tensors that a module may pass on and attention does not read.
UNREAD_TENSORS = frozenset({"position_ids", "cache_position", "position_embeddings", "attention_mask", "input_ids", "inputs_embeds"})
_TOLERANCE = 1e-4  # relative, of the self-test in float32
_HALF_TOLERANCE = 3e-2  # in 16 bits, where absorbed queries are rounded instead of expanded keys
FEW_QUERIES = 32  # absorbing takes fewer multiplications up to 171 for DeepSeek-V3, and was measured faster up to 64 for 16 heads of it
EXPAND = "expand_kv"  # the method of a module that expands its latents; transformers' name
States = tuple[torch.Tensor, torch.Tensor]  # keys and values
AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
Numbers = tuple[torch.Tensor | None, float, float, bool]  # sinks, scale, softcap, causal
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key, value


class CpuAttention(CpuOperator):
    """Attention of a module that calls transformers' attention interface, computed by the C++ kernel where its tensors are on the CPU.

    Few queries (decoding, verifying a draft) read the cache in place, once for all query heads that share it; many go through register
    tiles, chunk by chunk of the keys with an online softmax (FlashAttention's order: Dao et al. 2022, arXiv:2205.14135; the softmax:
    Milakov and Gimelshein 2018, arXiv:1805.02867). Graphs of `torch.compile` call the kernel.

    A module with a latent cache (DeepSeek, Kimi, GLM) expands all of it for many queries; few are answered from the latents themselves, as
    long as `kv_b_proj` is a plain linear layer. Its weight is read where it is, so that changes of it count at once.

    PyTorch computes what the kernel does not know: tensors on a GPU, gradients, dropout, paged caches, attention weights that are asked
    for, and functions of a family's own that differ from the kernel on random tensors.
    """

    name = "cpu_attention"
    kind = "attention"
    summary = "attention over the KV cache by the C++ kernel, on the CPU"
    fallback_level = logging.WARNING

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.number = register(self)  # under which graphs of `torch.compile` call it
        self._logged: set[str] = set()  # reasons for falling back to PyTorch
        self._latents = ""  # how the module's latent cache is read, if it has one
        self.last_layer: LastLayer | None = None  # of the model, if the module is in its last layer

    @classmethod
    def unsupported_reason(cls, module: nn.Module, options: NoOptions) -> str | None:
        if eager_function(module) is None:
            return f"the file of {type(module).__name__} has no eager_attention_forward to fall back to"
        return None

    def install(self, module: nn.Module) -> dict[str, object]:
        config = module.config
        assert isinstance(config, PretrainedConfig), "a module of this kind has its model's config"
        self._config = config  # names the module's own function, even after a later `set_attn_implementation`
        self._self_test(module)
        if IMPLEMENTATION not in ALL_ATTENTION_FUNCTIONS:
            ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, forward)
        own = copy.copy(config)
        # Not by the property, which would set the configs within this one too, and those are the whole model's.
        own._attn_implementation_internal = implementation_name(module, config)
        own.__dict__["_moegraft_attention"] = self
        module.config = own
        if not hasattr(type(module), EXPAND) or not all(parameter.is_cpu for parameter in module.parameters()):
            return {"config": config}
        try:
            self._test_latents(module)
        except NotRecognisedError as error:
            logger.warning("cpu_attention: %s expands its whole cache for every token: %s", type(module).__name__, error)
            self._latents = "latents expanded"
            return {"config": config}
        self._latents = "latents absorbed"
        return {"config": config, **let_answer(self, module, EXPAND)}

    def on_model_loaded(self, model: PreTrainedModel, path: str) -> None:
        super().on_model_loaded(model, path)
        found = LastLayer.of(model, model.get_submodule(path)) if self._stock_attributes else None
        if found is not None:
            layer, self.last_layer = found
            let_answer(self.last_layer, layer)

    def _self_test(self, module: nn.Module) -> None:
        """Compare the kernel with the module's own function on random tensors: the function may read sinks or caps of the module itself.

        Raises:
            NotRecognisedError: they differ.
        """
        base = self._config._attn_implementation
        if base not in SUPPORTED:
            raise NotRecognisedError(f"its attention is {base}")
        generator = torch.Generator().manual_seed(0)
        groups = int(getattr(module, "num_key_value_groups", 1))
        sinks = getattr(module, "sinks", None)
        heads = sinks.numel() if isinstance(sinks, torch.Tensor) else 2 * groups
        sizes = (heads, 3), (heads // groups, 5), (heads // groups, 5)
        query, key, value = (torch.randn(1, *size, 16, generator=generator) for size in sizes)
        tensors = query, key, value
        if not self._agrees(module, tensors, 0.3, lambda mask, numbers: self.compute(tensors, mask, *numbers)):
            raise NotRecognisedError("its function computes something else than scaled dot-product attention")

    def _test_latents(self, module: nn.Module) -> None:
        """Compare attention from the latents with the module's own expansion and function on random tensors, in the dtype of its weights.

        Raises:
            NotRecognisedError: they differ, or the module is of another form.
        """
        weight = projection(module)
        heads, _, rank = weight.shape
        nope, rotary = int(module.qk_nope_head_dim), int(module.qk_rope_head_dim)  # type: ignore[arg-type] # `projection` read the first
        generator = torch.Generator().manual_seed(0)
        sizes = ((1, heads, 3, nope + rotary), (1, 1, 5, rank), (1, 1, 5, rotary))
        query, latents, keys = (torch.randn(size, generator=generator).to(weight.dtype) for size in sizes)
        key, value = probe(getattr(type(module), EXPAND), module, latents, keys)
        spread = float(key.float().std()) * (nope + rotary) ** 0.5
        scaling = 1 / spread if spread > 0 else 1.0
        compute = partial(self.compute_latent, module, query, latents, keys)
        if not self._agrees(module, (query, key, value), scaling, compute):
            raise NotRecognisedError("it computes something else from its latents than their projection by kv_b_proj")

    def _agrees(
        self, module: nn.Module, tensors: Tensors, scaling: float, compute: Callable[[torch.Tensor, Numbers], torch.Tensor]
    ) -> bool:
        """Return whether `compute(mask, numbers)` answers as the module's own function does, for the last three of five tokens."""
        query, key, value = tensors
        dtype, sinks = query.dtype, getattr(module, "sinks", None)
        shown = torch.ones(3, 5, dtype=torch.bool).tril(2)[None, None]
        is_sdpa = self._config._attn_implementation == "sdpa"
        mask = shown if is_sdpa else torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, torch.finfo(dtype).min)
        kwargs: dict[str, Any] = {"scaling": scaling, "dropout": 0.0}
        if isinstance(sinks, torch.Tensor):
            kwargs["s_aux"] = sinks.detach().to("cpu", dtype)
        expected = probe(self.stock_function(module), module, query, key, value, mask, **kwargs)[0]
        computed = compute(mask, kernel_arguments(module, query, mask, kwargs))
        tolerance = _TOLERANCE if dtype == torch.float32 else _HALF_TOLERANCE
        same_shape = expected.shape == computed.shape
        return same_shape and float((expected.float() - computed.float()).norm()) <= tolerance * float(expected.float().norm())

    def answer(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return keys and values that are expanded when something asks for them, or None to leave `expand_kv` to the module."""
        if kwargs or len(args) != 2 or any(type(tensor) is not torch.Tensor or not tensor.is_cpu or tensor.dim() != 4 for tensor in args):
            return None
        try:
            weight = projection(module)
        except NotRecognisedError as error:
            self.log_fallback(str(error))
            return None
        latents, rotary = args
        rows = latents.shape[:3] == rotary.shape[:3] and latents.shape[1] == 1 and latents.shape[3] == weight.shape[2]
        if not rows or not latents.dtype == rotary.dtype == weight.dtype:
            return None
        if needs_gradient(latents, rotary, module.kv_b_proj.weight):  # type: ignore[union-attr,arg-type] # `projection` found it
            return None
        nope = int(module.qk_nope_head_dim)  # type: ignore[arg-type] # `projection` read it
        expand = getattr(type(module), EXPAND).__wrapped__  # the family's own, of which `install` made a subclass
        expansion = Expansion(partial(expand, module), latents, rotary)
        columns = nope + rotary.shape[3], weight.shape[1] - nope
        keys, values = (LatentStates.of(expansion, part, weight.shape[0], width) for part, width in enumerate(columns))
        return keys, values

    def stock_function(self, module: nn.Module) -> AttentionFunction:
        """Return the function that the module would call."""
        eager = eager_function(module)
        assert eager is not None, "unsupported_reason refuses a module without one"
        function: AttentionFunction = ALL_ATTENTION_FUNCTIONS.get_interface(self._config._attn_implementation, eager)
        return function

    def compute_latent(
        self,
        module: nn.Module,
        query: torch.Tensor,
        latents: torch.Tensor,
        rotary: torch.Tensor,
        mask: torch.Tensor | None,
        numbers: Numbers,
    ) -> torch.Tensor:
        """Return the kernel's answer from latents (B, 1, S, rank) and rotary keys (B, 1, S, rotary): (B, T, heads, D of values).

        The T new ones of a cache in pages are appended first.
        """
        weight = projection(module)
        nope = int(module.qk_nope_head_dim)  # type: ignore[arg-type] # `projection` read it
        batch, heads, queries, _ = query.shape
        rank, rows = weight.shape[2], batch * queries
        by_head = query.transpose(0, 1)
        absorbed = query.new_empty(heads, batch, queries, rank + rotary.shape[3])
        self._matmul(by_head[..., :nope].reshape(heads, rows, nope), weight[:, :nope], absorbed.view(heads, rows, -1)[..., :rank])
        tail = None
        if rotary.shape[3]:
            absorbed[..., rank:].copy_(by_head[..., nope:])
            tail = rotary
        layer = pages_of_latents(latents, rotary)
        if layer is not None:
            sums = query.new_empty(batch, queries, heads, rank)
            sinks, scale, softcap, _ = numbers
            states = absorbed.transpose(0, 1), *layer.take()
            self._attend_in_pages(layer, states, sums, sinks=sinks, latent=True, scale=scale, softcap=softcap)
        else:
            sums = self.compute((absorbed.transpose(0, 1), latents, latents), mask, *numbers, key_tail=tail)
        out = query.new_empty(batch, queries, heads, weight.shape[1] - nope)
        by_head = sums.view(rows, heads, rank).transpose(0, 1)
        self._matmul(by_head, weight[:, nope:].transpose(1, 2), out.view(rows, heads, -1).transpose(0, 1))
        return out

    def _matmul(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        self.runtime.matmul(as_array(a), as_array(b), as_array(out))

    def compute_paged(self, module: nn.Module, query: torch.Tensor, layer: LayerInPages, kwargs: dict[str, Any]) -> torch.Tensor:
        """Append the new keys and values (B, KV heads, T, D) of a layer to their pages; return the answer (B, T, heads, D of values).

        Query t of a sequence attends to its keys up to that of new token t, and in a layer with a window to the last of them.
        """
        sinks, scale, softcap, _ = kernel_arguments(module, query, None, kwargs)
        key, value = layer.take()
        out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        self._attend_in_pages(layer, (query, key, value), out, scale=scale, softcap=softcap, sinks=sinks)
        return out

    def _attend_in_pages(
        self,
        layer: LayerInPages,
        tensors: Tensors,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None,
        latent: bool = False,
        **numbers: float,
    ) -> None:
        if layer.ragged:
            tensors, out = (tensors[0].transpose(0, 2), tensors[1].transpose(0, 2), tensors[2].transpose(0, 2)), out.transpose(0, 1)
        query, key, value = (as_array(tensor if tensor.stride(-1) == 1 else tensor.contiguous()) for tensor in tensors)
        self.runtime.paged_attention(
            query,
            key,
            value,
            as_array(out),
            layer.data,
            layer.table,
            layer.held,
            page_tokens=PAGE_TOKENS,
            key_start=0,
            value_start=layer.value_start,
            window=layer.window,
            sinks=None if sinks is None else as_array(sinks.float().contiguous()),
            latent=latent,
            **numbers,
        )

    def compute(
        self,
        tensors: Tensors,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        scale: float,
        softcap: float,
        causal: bool,
        key_tail: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the kernel's answer: (B, T, heads, D of values). `key_tail`: further columns of the keys."""
        query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)
        batch, heads, queries, _ = query.shape
        if causal and key.shape[2] > queries:  # a static cache that is still empty behind the prompt
            key, value = key[:, :, :queries], value[:, :, :queries]
            key_tail = None if key_tail is None else key_tail[:, :, :queries]
        if mask is not None:
            mask = mask[..., : key.shape[2]]
            mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        out = query.new_empty(batch, queries, heads, value.shape[3])
        self.runtime.attention(
            as_array(query),
            as_array(key),
            as_array(value),
            as_array(out),
            scale=scale,
            mask=None if mask is None else as_array(mask),
            causal=causal,
            softcap=softcap,
            sinks=None if sinks is None else as_array(sinks.float().contiguous()),
            key_tail=None if key_tail is None else as_array(key_tail if key_tail.stride(-1) == 1 else key_tail.contiguous()),
        )
        return out

    def fallback_reason(self, tensors: Tensors, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> str | None:
        """Return why the kernel cannot answer a call, or None if it can."""
        query, key, value = tensors
        base = self._config._attn_implementation
        if not query.is_cpu:
            return _ELSEWHERE
        if base not in SUPPORTED:
            return f"{base} attention"
        if needs_gradient(*tensors):
            return "gradients"
        if query.dtype not in ELEMENT_CODES or not query.dtype == key.dtype == value.dtype or not query.dim() == key.dim() == 4:
            return "dtypes or shapes"
        if query.shape[0] != key.shape[0] or (mask is not None and not _fits(mask, query, key)):
            return "a mask or batch of another shape"
        if kwargs.get("dropout") or asks_for_weights(self._config, kwargs):
            return "dropout or attention weights"
        if kwargs.get("s_aux") is not None and base == "sdpa":
            return "sinks, which sdpa leaves out"
        unknown = [name for name, given in kwargs.items() if name not in _ARGUMENTS and _is_read(name, given, base)]
        return f"its argument '{unknown[0]}'" if unknown else None

    def placement(self) -> str:
        if _ELSEWHERE in self._logged:
            return f"{self.kind}: {self.name}, left to PyTorch"
        return ", ".join(filter(None, (super().placement(), self._latents)))

    def log_fallback(self, reason: str) -> None:
        """Log why a call is left to PyTorch, once for each reason; on a GPU that is what the rules mean."""
        if reason not in self._logged:
            self._logged.add(reason)
            logger.log(logging.DEBUG if reason == _ELSEWHERE else logging.INFO, "cpu_attention: falling back to PyTorch: %s", reason)


class ImplementationName(str):
    """The name under which transformers finds `forward`, which also equals that of the implementation in the model's config."""

    config: PretrainedConfig

    def __eq__(self, other: object) -> bool:
        return other == IMPLEMENTATION or self.config._attn_implementation == other  # traceable, unlike str.__eq__

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(IMPLEMENTATION)  # dictionaries find `forward`


def implementation_name(module: nn.Module, config: PretrainedConfig) -> str:
    """Return the implementation's name for the config of a module.

    Some modules compare it themselves, to learn whether their mask is one that sdpa takes. The others get a plain string, which
    `torch.compile` can trace.
    """
    owner: Any = type(module)  # mypy takes a module's __hash__ for that of its class
    if source_of(owner).count("_attn_implementation") <= 1:
        return IMPLEMENTATION
    name = ImplementationName(IMPLEMENTATION)
    name.config = config
    return name


def eager_function(module: nn.Module) -> AttentionFunction | None:
    """Return the function that a family's file calls where its config names none of the library's."""
    function: AttentionFunction | None = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    return function


def forward(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention as transformers' functions do: (B, T, heads, D of values) and no attention weights."""
    operator: CpuAttention = module.config._moegraft_attention  # type: ignore[union-attr,assignment] # `install` put it there
    function = partial(_attend, operator, module)
    if operator.last_layer is None or torch.compiler.is_compiling():
        return function(query, key, value, attention_mask, **kwargs)
    # As many new keys are appended to pages as there are queries, and what else a family passes on may have a row for each.
    in_pages = hasattr(key.expansion.latents if type(key) is LatentStates else key, "pages")
    whole = in_pages or any(isinstance(given, torch.Tensor) and name not in {*UNREAD_TENSORS, "s_aux"} for name, given in kwargs.items())
    return operator.last_layer.attend(function, query, key, value, attention_mask, whole=whole, **kwargs)


def _attend(
    operator: CpuAttention,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if type(key) is LatentStates:
        expansion = key.expansion
        latents, rotary = expansion.latents, expansion.rotary
        # In pages, many queries are absorbed as well: expanding needs all latents in one tensor.
        layer = pages_of_latents(latents, rotary)
        require_causal(layer, attention_mask, query.shape[2])
        paged = layer is not None
        mask = None if paged else attention_mask
        fits = (paged or query.shape[2] <= FEW_QUERIES) and query.shape[1] == key.shape[1] and query.shape[3] == key.shape[3]
        untouched = not expansion.done and type(value) is LatentStates and value.expansion is expansion
        if fits and untouched and not module.training and operator.fallback_reason((query, latents, latents), mask, kwargs) is None:
            return operator.compute_latent(module, query, latents, rotary, mask, kernel_arguments(module, query, mask, kwargs)), None
        key, value = (states.expanded() if type(states) is LatentStates else states for states in (key, value))
    tensors = query, key, value
    layer = getattr(key, "pages", None)
    require_causal(layer, attention_mask, query.shape[2])
    reason = "training" if module.training else operator.fallback_reason(tensors, attention_mask if layer is None else None, kwargs)
    if reason is None and layer is not None:
        return operator.compute_paged(module, query, layer, kwargs), None
    if layer is not None and not layer.gathers:
        raise UnreadPagesError(f"attention is left to PyTorch: {reason}")
    if reason is None:
        arguments = kernel_arguments(module, query, attention_mask, kwargs)
        if torch.compiler.is_compiling():
            return attention(*tensors, attention_mask, *arguments, operator.number), None
        return operator.compute(tensors, attention_mask, *arguments), None
    if not torch.compiler.is_compiling():
        operator.log_fallback(reason)
    return operator.stock_function(module)(module, query, key, value, attention_mask, **kwargs)


def kernel_arguments(module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> Numbers:
    """Return sinks (heads,), scale, softcap and whether attention is causal, by the defaults of transformers' own functions."""
    is_causal, scaling = kwargs.get("is_causal"), kwargs.get("scaling")
    causal = query.shape[2] > 1 and mask is None and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    return kwargs.get("s_aux"), scale, float(kwargs.get("softcap") or 0.0), causal


def require_causal(layer: LayerInPages | None, mask: torch.Tensor | None, queries: int) -> None:
    """
    Raises:
        UnreadPagesError: a mask shows something else than the pages of a layer, from which the kernel reads all earlier tokens.
    """
    if layer is not None and mask is not None and not layer.shows(mask, queries):
        raise UnreadPagesError("keys and values that are stored as codes have no padding, and only tokens that follow see them")


def pages_of_latents(latents: torch.Tensor, rotary: torch.Tensor) -> LayerInPages | None:
    """Return the layer whose pages a latent cache is in; None for one that is read as tensors, as all without rotary keys are."""
    return getattr(latents, "pages", None) if rotary.shape[3] else None


def _fits(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> bool:
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.dtype not in (torch.bool, query.dtype):
        return False
    batch, heads, queries = query.shape[:3]
    return mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads) and mask.shape[2] == queries and mask.shape[3] >= key.shape[2]


def asks_for_weights(config: PretrainedConfig, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of a module with this config wants its attention weights, by its arguments or for the whole pass."""
    return bool(
        kwargs.get("output_attentions") or config.output_attentions or (config._attn_implementation == "eager" and _collects_weights())
    )


def _collects_weights() -> bool:
    """Whether transformers collects the attention weights of this pass: an encoder need not pass `output_attentions` on to its layers."""
    collector = output_capturing._active_collector
    collected = collector.global_var if torch.compiler.is_compiling() else collector.get()
    return collected is not None and any("attentions" in name for name in collected)


def _is_read(name: str, given: object, base: str) -> bool:
    """Whether an argument may change the result. The library's own function ignores all but two; a family's may read any tensor."""
    if given is None or base == "sdpa":
        return given is not None and name in ("position_bias", "cache")
    return name == "cache" or (isinstance(given, torch.Tensor) and name not in UNREAD_TENSORS)


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
