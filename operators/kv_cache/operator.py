"""`quantized_kv_cache`: a model whose `generate` keeps keys and values in transformers' quantised cache."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, QuantizedCache

from moegraft.operators.base import BuildContext, ModelOperator
from moegraft.operators.cache_form import CacheForm
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.kv_cache.options import QuantizedKvCacheOptions

if TYPE_CHECKING:
    from transformers import Cache

logger = logging.getLogger(__name__)
CACHE = "past_key_values"
GROUPS = (64, 32, 16, 8)  # default sizes, the largest that fits first
SHOWN_LAYERS = 3


class QuantizedKvCache(ModelOperator):
    """`generate` over transformers' `QuantizedCache` (after KIVI: Liu et al. 2024, arXiv:2402.02750).

    The cache takes fewer bytes and is not exact: what the model says may change. Each step brings a layer's keys and values back to the
    model's dtype before it attends to them, so decoding gets slower, not faster: it is for contexts that do not fit otherwise.
    Calls that name a cache of their own, or need one that tokens can be taken out of, are decoded over that; the log says so, once.
    """

    name = "quantized_kv_cache"
    options_type = QuantizedKvCacheOptions
    summary = "keeps keys and values in transformers' quantised cache: less memory, slower steps, text that may change"
    uncaptured = "the key-value cache is quantised: it grows, and is written anew as it does"

    def __init__(self, options: QuantizedKvCacheOptions, group: int) -> None:
        super().__init__()
        self.options = options
        self._group = group
        self._caches = 0
        self._said: set[str] = set()

    @classmethod
    def refuse(cls, module: nn.Module, options: QuantizedKvCacheOptions) -> str | None:
        if not isinstance(module, PreTrainedModel) or not isinstance(module, GenerationMixin):
            return f"{type(module).__name__} does not generate text"
        if module.config.is_encoder_decoder:
            return "it has an encoder and a decoder"
        return _why_no_cache(module) or _why_no_group(module.config, options) or options.why_not_here()

    @classmethod
    def build(cls, module: nn.Module, options: QuantizedKvCacheOptions, context: BuildContext) -> Self:
        assert isinstance(module, PreTrainedModel), "refuse lets no other through"
        group = group_of(module.config, options)
        context.shared(CacheForm, CacheForm).quantised = options.form(group)
        return cls(options, group)

    def check(self) -> None:
        if self.options.backend != "quanto":
            return
        try:
            _try_quanto()
        except (RuntimeError, OSError, ImportError) as error:
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise UnsupportedModelError(
                f"quantized_kv_cache: optimum-quanto cannot compile its kernel here ({why}); install a C++ compiler and ninja, "
                "or write 'backend: hqq'"
            ) from error

    def new_cache(self, model: PreTrainedModel) -> Cache:
        """An empty one, for a caller that feeds it."""
        self._caches += 1
        return quantised_cache(model, self.options)

    def generate(self, model: PreTrainedModel, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(plain).bind_partial(*args, **kwargs).arguments
        arguments = {**bound, **bound.pop("kwargs", {})}
        reason = _why_plain(model, arguments)
        if reason is not None:
            self._say_once(reason)
            return plain(**arguments)
        self._caches += 1
        # A fresh dictionary: older versions of transformers take entries out of it.
        return plain(**{**arguments, "cache_implementation": "quantized", "cache_config": self.options.cache_config(self._group)})

    def _say_once(self, reason: str) -> None:
        if reason and reason not in self._said:
            self._said.add(reason)
            logger.warning("quantized_kv_cache: the cache is not quantised: %s", reason)

    def statistics(self) -> Mapping[str, object]:
        """How many caches it made."""
        return {"quantised_caches": self._caches}

    def placement(self) -> str:
        grouped = "one scale a layer" if self.options.backend == "fp8" else f"groups of {self._group}"
        return f"key-value cache: {self.name}, {self.options.value_bits} bits by {self.options.backend}, {grouped}"

    def extra_repr(self) -> str:
        return ", ".join(f"{field.name}={getattr(self.options, field.name)}" for field in dataclasses.fields(self.options))


def quantised_cache(model: PreTrainedModel, options: QuantizedKvCacheOptions) -> QuantizedCache:
    """An empty cache, as `generate` makes it."""
    config: Any = options.cache_config(group_of(model.config, options))
    return QuantizedCache(config=model.config.get_text_config(decoder=True), **config)


def group_of(config: PreTrainedConfig, options: QuantizedKvCacheOptions) -> int:
    """Values that share a scale; 1 where nothing fits, which `refuse` says."""
    return options.group or next((size for size in GROUPS if _fits(size, config, options)), 1)


def _fits(group: int, config: PreTrainedConfig, options: QuantizedKvCacheOptions) -> bool:
    """Whether every token's keys and values are whole groups, and those fill whole bytes: hqq packs groups side by side."""
    heads, widths = _heads(config)
    together = 8 // options.value_bits if options.backend == "hqq" else 1
    return all(width % group == 0 and (heads * width // group) % together == 0 for width in widths)


def _heads(config: PreTrainedConfig) -> tuple[int, list[int]]:
    """How many heads a token has at least in the cache, and how wide keys and values are: those of a latent attention may be stored
    whole, or as the latent."""
    text = config.get_text_config(decoder=True)
    latent = [getattr(text, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")]
    if any(latent):
        return 1, [width for width in latent if width]
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return heads, [getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads]


def _why_no_group(config: PreTrainedConfig, options: QuantizedKvCacheOptions) -> str | None:
    if options.backend == "fp8":
        return None
    heads, widths = _heads(config)
    wide = f"{heads} head{'' if heads == 1 else 's'} of {' and '.join(map(str, sorted(set(widths))))} values a token"
    best = group_of(config, replace(options, group=None))
    if best == 1:
        return f"{wide} are no whole number of bytes in any groups of {GROUPS[-1]} or more; write 'backend: fp8'"
    if options.group is not None and not _fits(options.group, config, options):
        return f"{wide} are no whole number of bytes in groups of {options.group}; write 'group: {best}'"
    return None


def _why_no_cache(model: PreTrainedModel) -> str | None:
    text = model.config.get_text_config(decoder=True)
    if getattr(model, "_is_stateful", False):
        return "its layers keep a recurrent state, which no quantised cache can hold"
    layers, names = DynamicCache(config=text).layers, getattr(text, "layer_types", None) or ()
    other = [index for index, layer in enumerate(layers) if type(layer) is not DynamicLayer]
    if not other:
        return None
    found = {names[index] if index < len(names) else type(layers[index]).__name__ for index in other}
    shown = ", ".join(map(str, other[:SHOWN_LAYERS])) + (" ..." if len(other) > SHOWN_LAYERS else "")
    one = len(other) == 1
    return (
        f"layer{'' if one else 's'} {shown} {'is' if one else 'are'} of kind {', '.join(sorted(found))}, "
        "and transformers quantises the cache of models that attend to everything in every layer"
    )


def _why_plain(model: PreTrainedModel, arguments: Mapping[str, Any]) -> str | None:
    """Why a call gets no quantised cache of ours; empty where it has one."""
    given = arguments.get("generation_config")

    def asked(name: str) -> Any:
        own = getattr(given if given is not None else model.generation_config, name, None)
        return arguments[name] if arguments.get(name) is not None else own

    cache = arguments.get(CACHE)
    if cache is not None:
        return "" if isinstance(cache, QuantizedCache) else f"the call brings one of its own ({type(cache).__name__})"
    if asked("use_cache") is False:
        return "the call asks for none"
    if asked("cache_implementation") is not None:
        return f"the call asks for a cache of kind {asked('cache_implementation')}"
    if (asked("num_beams") or 1) > 1:
        return "beams copy it from one another at every token"
    if arguments.get("assistant_model") is not None or asked("prompt_lookup_num_tokens"):
        return "drafted tokens that are rejected cannot be taken out of it again"
    return None


def _try_quanto() -> None:
    """Compiles the package's kernel now, where a failure can be explained, and not in the middle of the first answer.

    Raises:
        RuntimeError, OSError, ImportError: it cannot be compiled.
    """
    from transformers.cache_utils import QuantoQuantizedLayer

    layer = QuantoQuantizedLayer(nbits=4, q_group_size=GROUPS[-1])
    for _ in range(2):  # what is there already is brought back when more comes
        layer.update(torch.ones(1, 1, 1, GROUPS[-1]), torch.ones(1, 1, 1, GROUPS[-1]))
