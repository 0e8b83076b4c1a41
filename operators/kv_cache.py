"""`quantized_kv_cache`: keys and values in fewer bits, as codes that attention reads or in transformers' quantised caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, Self

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicLayer, QuantizedCache

from moegraft.operators.base import CACHE, ModelOperator, Operator, Traits, call_arguments
from moegraft.operators.cache_form import QuantisedForm, layer_types, name_layers
from moegraft.operators.context import InjectionContext
from moegraft.operators.decode.coded_cache import CodedCache, codable
from moegraft.operators.decode.pages import SCALE_BYTES
from moegraft.operators.decode.states import attention_part, has_states, keeps_nothing, why_not_split
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.structure import counts_cached_tokens, is_attention

Backend = Literal["hqq", "fp8", "native"]
# hqq also offers 1 bit, too few for readable text, and 3 bits, which it restores in tens of values across tokens.
BITS: dict[Backend, tuple[int, ...]] = {"hqq": (2, 4, 8), "fp8": (8,), "native": (8,)}
GROUPS = (64, 32, 16, 8)  # the largest that fits is used
RESIDUAL = 128
LAYERS: dict[Backend, str] = {"hqq": "HQQQuantizedLayer", "fp8": "Fp8QuantizedLayer"}


@dataclass(frozen=True, slots=True)
class QuantizedKvCacheOptions:
    """Options of `quantized_kv_cache`.

    Attributes:
        backend: what quantises. `hqq` (the package of that name) stores a scale and a zero point for each group of values of one head of
            one token: the largest of 64, 32, 16 and 8 that divides heads. `fp8` is transformers' own; it stores one scale for a layer's
            keys and one for its values, taken from the first tokens. `native`, on the CPU, stores a scale for each row, a token's keys or
            values of one head; `cpu_attention` reads the codes themselves, in `serve` as well.
        bits: bits of a stored value with `hqq`: 2, 4 or 8, by default 8.
        residual: number of recent tokens that stay in the model's dtype before they are quantised together with all earlier ones. A
            prompt is quantised at once. By default 128. Used by `hqq` alone.
    """

    backend: Backend = "hqq"
    bits: int = 8
    residual: int | None = None

    def __post_init__(self) -> None:
        known = BITS[self.backend]
        if self.bits not in known:
            raise ValueError(f"bits with 'backend: {self.backend}' must be {' or '.join(map(str, known))}, not {self.bits}")
        if self.backend != "hqq" and self.residual is not None:
            raise ValueError(f"'backend: {self.backend}' keeps no tokens in the model's dtype: remove 'residual'")
        if self.residual is not None and self.residual < 1:
            raise ValueError(f"residual must be 1 or more, not {self.residual}")

    def form(self, group: int) -> QuantisedForm:
        """Return the form of the cache of a model whose group size is `group`."""
        if self.backend == "native":
            return QuantisedForm(self.bits, group, 0, scale_bytes=SCALE_BYTES, in_place=True)
        if self.backend == "fp8":
            return QuantisedForm(self.bits, None, 0)
        return QuantisedForm(self.bits, group, self.residual or RESIDUAL)

    def cache_config(self, group: int) -> dict[str, object]:
        """Return the arguments of transformers' `QuantizedCache`."""
        if self.backend == "fp8":
            return {"backend": self.backend}
        sizes = {"nbits": self.bits, "q_group_size": group, "residual_length": self.residual or RESIDUAL}
        return {"backend": self.backend, "axis_key": 1, "axis_value": 1, **sizes}

    def missing_reason(self) -> str | None:
        """Return which package the backend lacks and how to install it, or None where the backend can run."""
        if self.backend == "native":
            return None
        if self.backend == "fp8":
            if hasattr(cache_utils, "Fp8QuantizedLayer"):
                return None
            return "this version of transformers has no fp8 cache: install transformers 5.23, or write 'backend: hqq'"
        return None if find_spec("hqq") else "hqq is not installed; install it with pip install 'moegraft[kv-cache]' (or pip install hqq)"


class QuantizedKvCache(ModelOperator):
    """`generate` over codes of 8 bits, or over transformers' `QuantizedCache` (after KIVI: Liu et al. 2024, arXiv:2402.02750).

    Recurrent and convolution states, which do not grow, stay as they are in layers beside those of attention.

    The cache takes fewer bytes and is not exact: the text may change. Each step over one of transformers' caches restores a layer's keys
    and values to the model's dtype before attention, so decoding is slower: these are for contexts that do not fit otherwise. Codes are
    read in place, so that attention takes less time, and the pages of a server hold them as well. A call with a cache of its own uses that
    cache, and a call that must remove tokens from its cache is not quantised.
    """

    name = "quantized_kv_cache"
    options_type = QuantizedKvCacheOptions
    summary = "keeps keys and values in fewer bits: less memory, and text that may change"
    uncaptured = "the key-value cache is quantised: it grows and is rewritten"

    def __init__(self, options: QuantizedKvCacheOptions, group: int) -> None:
        super().__init__(options)
        self._group = group
        self._caches = 0
        self.codes_pages = options.backend == "native"

    @classmethod
    def unsupported_reason(cls, module: nn.Module, options: QuantizedKvCacheOptions) -> str | None:
        reason = super().unsupported_reason(module, options)
        if reason is not None:
            return reason
        assert isinstance(module, PreTrainedModel), "others do not generate text"
        if options.backend == "native":
            return _unsupported_pages(module)
        return _unsupported_layers(module) or _unsupported_group(module.config, options) or options.missing_reason()

    @classmethod
    def build(cls, module: nn.Module, options: QuantizedKvCacheOptions, context: InjectionContext) -> Self:
        assert isinstance(module, PreTrainedModel), "unsupported_reason refuses all others"
        return cls(options, group_of(module.config, options))

    @classmethod
    def traits(cls, options: QuantizedKvCacheOptions) -> Traits:
        return Traits("", cache_form=lambda config: options.form(group_of(config, options)))

    def check(self, model: nn.Module, operators: Mapping[str, Operator]) -> None:
        if self.options.backend != "native":
            return
        stock = (path for path, module in model.named_modules() if is_attention(module) and path not in operators)
        if (path := next(stock, None)) is not None:
            raise UnsupportedModelError(
                f"{path}: the codes of 'backend: native' are read by cpu_attention alone; add a rule with 'match: {{kind: attention}}' and "
                "'class: cpu_attention', or write another backend"
            )

    def on_model_loaded(self, model: PreTrainedModel, path: str) -> None:
        if self.options.backend == "native" and model.device.type != "cpu":
            raise UnsupportedModelError(
                f"'backend: native' keeps keys and values in the memory of a CPU, and the model is on {model.device}: write 'backend: fp8' "
                "or 'backend: hqq'"
            )

    def new_cache(self, model: PreTrainedModel) -> Cache:
        self._caches += 1
        return quantised_cache(model, self.options)

    def generate(self, model: PreTrainedModel, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = call_arguments(plain, args, kwargs)
        if isinstance(arguments.get(CACHE), QuantizedCache):
            return plain(**arguments)
        reason = _other_cache_reason(model, arguments, native=self.options.backend == "native")
        if reason is not None:
            self.warn_once(f"the cache is not quantised: {reason}")
            return plain(**arguments)
        self._caches += 1
        if self.options.backend == "native" or _other_layers(model):  # `generate` makes caches of full attention alone
            return plain(**{**arguments, CACHE: quantised_cache(model, self.options)})
        # A new dictionary per call: older versions of transformers remove entries from it.
        return plain(**{**arguments, "cache_implementation": "quantized", "cache_config": self.options.cache_config(self._group)})

    def statistics(self) -> Mapping[str, object]:
        """Return how many caches were created."""
        return {"quantised_caches": self._caches}

    def placement(self) -> str:
        rows = "a scale for each token of a head" if self.options.backend == "native" else f"groups of {self._group}"
        scales = "one scale per layer" if self.options.backend == "fp8" else rows
        return f"key-value cache: {self.name}, {self.options.bits} bits by {self.options.backend}, {scales}"


def quantised_cache(model: PreTrainedModel, options: QuantizedKvCacheOptions) -> QuantizedCache:
    """Return an empty cache, as `generate` creates it; layers with recurrent or convolution states keep these as they are."""
    if options.backend == "native":
        return CodedCache(_layers(model))
    config: Any = options.cache_config(group_of(model.config, options))
    if not _other_layers(model):
        return QuantizedCache(config=model.config.get_text_config(decoder=True), **config)
    kind = getattr(cache_utils, LAYERS[config.pop("backend")])
    return _CacheWithStates([kind(**config) if type(layer) is DynamicLayer else layer for layer in _layers(model)])


class _CacheWithStates(QuantizedCache):
    def __init__(self, layers: list[Any]) -> None:
        Cache.__init__(self, layers=layers)  # the class in between makes layers of full attention alone


def _layers(model: PreTrainedModel) -> list[Any]:
    return DynamicCache(config=model.config.get_text_config(decoder=True)).layers


def _other_layers(model: PreTrainedModel) -> list[int]:
    """Return the layers of a model's cache that are not of full attention alone."""
    return [index for index, layer in enumerate(_layers(model)) if type(layer) is not DynamicLayer]


def group_of(config: PreTrainedConfig, options: QuantizedKvCacheOptions) -> int:
    """Return the number of values that share a scale; 1 where no group fits, which `unsupported_reason` reports."""
    if options.backend == "native":
        text = config.get_text_config(decoder=True)
        rank: int | None = getattr(text, "kv_lora_rank", None)
        return _heads(config)[1][0] if rank is None else (rank + text.qk_rope_head_dim) // 2  # a row of latents and one of rotary keys
    return next((size for size in GROUPS if _fits(size, config, options)), 1)


def _fits(group: int, config: PreTrainedConfig, options: QuantizedKvCacheOptions) -> bool:
    """Return whether every token's keys and values form whole groups that fill whole bytes: hqq packs groups side by side."""
    heads, widths = _heads(config)
    groups_per_byte = 8 // options.bits if options.backend == "hqq" else 1
    return all(width % group == 0 and (heads * width // group) % groups_per_byte == 0 for width in widths)


def _heads(config: PreTrainedConfig) -> tuple[int, list[int]]:
    """Return the least number of heads per token in the cache and the widths of keys and values, whole or as a latent."""
    text = config.get_text_config(decoder=True)
    latent = [getattr(text, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")]
    if any(latent):
        return 1, [width for width in latent if width]
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return heads, [getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads]


def _unsupported_group(config: PreTrainedConfig, options: QuantizedKvCacheOptions) -> str | None:
    if options.backend == "fp8" or group_of(config, options) > 1:
        return None
    heads, widths = _heads(config)
    values = f"{heads} head{'' if heads == 1 else 's'} of {' and '.join(map(str, sorted(set(widths))))} values per token"
    return f"{values} do not fill whole bytes in any groups of {GROUPS[-1]} or more; write 'backend: fp8'"


def _unsupported_layers(model: PreTrainedModel) -> str | None:
    layers, names = _layers(model), layer_types(model.config)
    plain = [keeps_nothing(layer) or (has_states(layer) and attention_part(layer) is None) for layer in layers]
    others = [index for index in _other_layers(model) if not plain[index]]
    if others:
        named, _ = name_layers(layers, others, names)
        return f"{named}, and transformers quantises the cache only of layers with full attention, and nothing beside it"
    return why_not_split(model, Cache(layers=layers), names)


def _unsupported_pages(model: PreTrainedModel) -> str | None:
    counting = next((module for module in model.modules() if counts_cached_tokens(module)), None)
    if counting is not None:
        return f"{type(counting).__name__} scales queries by the number of tokens in the cache, of which pages have none for a whole batch"
    layers, names = _layers(model), layer_types(model.config)
    with_states = [has_states(layer) and attention_part(layer) is None for layer in layers]
    others = [index for index, layer in enumerate(layers) if not (codable(layer) or keeps_nothing(layer) or with_states[index])]
    if others:
        named, _ = name_layers(layers, others, names)
        return f"{named}, whose keys and values are not stored as codes"
    return why_not_split(model, Cache(layers=layers), names)


def _other_cache_reason(model: PreTrainedModel, arguments: Mapping[str, Any], *, native: bool) -> str | None:
    """Return why a call cannot use a quantised cache, or None where it can."""
    given = arguments.get("generation_config")
    config = model.generation_config if given is None else given

    def setting(name: str) -> Any:
        return arguments[name] if arguments.get(name) is not None else getattr(config, name, None)

    cache = arguments.get(CACHE)
    if cache is not None:
        return f"the call has a cache of its own ({type(cache).__name__})"
    if setting("use_cache") is False:
        return "the call sets use_cache to False"
    if setting("cache_implementation") is not None:
        return f"the call sets cache_implementation to {setting('cache_implementation')}"
    if (setting("num_beams") or 1) > 1:
        return "beam search reorders the cache at every token"
    if arguments.get("assistant_model") is not None or setting("prompt_lookup_num_tokens"):
        return "rejected draft tokens cannot be removed from a quantised cache"
    return _unread_codes_reason(model, arguments, setting) if native else None


def _unread_codes_reason(model: PreTrainedModel, arguments: Mapping[str, Any], setting: Callable[[str], Any]) -> str | None:
    """Return why attention would not read codes in a call."""
    if model.training:
        return "the model is in training mode, in which attention is PyTorch's"
    if setting("output_attentions") or model.config.output_attentions:
        return "the call asks for attention weights"
    mask, ids, pad = arguments.get("attention_mask"), arguments.get("input_ids", arguments.get("inputs")), setting("pad_token_id")
    padded = isinstance(mask, torch.Tensor) and not bool((mask != 0).all())
    if mask is None and isinstance(ids, torch.Tensor) and pad is not None:  # of which `generate` makes a mask
        padded = bool(torch.isin(ids, torch.as_tensor(pad)).any())
    return "a batch with padding has other positions than pages of codes" if padded else None
