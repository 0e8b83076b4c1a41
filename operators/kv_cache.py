"""`quantized_kv_cache`: keys and values in fewer bits, as codes that attention reads or in transformers' quantised caches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicLayer, QuantizedCache

from moegraft.operators.base import CACHE, DecodeLoss, ModelOperator, Traits, call_arguments
from moegraft.operators.cache_form import QuantisedForm, layer_types, name_layers
from moegraft.operators.context import InjectionContext
from moegraft.operators.decode.coded_cache import CODABLE, CodedCache
from moegraft.operators.decode.loop import effective_config
from moegraft.operators.decode.pages import SCALE_BYTES
from moegraft.operators.decode.states import attention_part, has_states, keeps_nothing, why_not_split
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.structure import counts_cached_tokens, is_attention, sees_whole_images

Backend = Literal["hqq", "fp8", "native"]
GROUPS = (64, 32, 16, 8)  # the largest that fits is used
RESIDUAL = 128
_READ_AT_ONCE = 8  # tokens of a pass by which the loss is measured, all of which read the earlier ones from the cache


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
        known = STORAGES[self.backend].bits
        if self.bits not in known:
            raise ValueError(f"bits with 'backend: {self.backend}' must be {' or '.join(map(str, known))}, not {self.bits}")
        if not STORAGES[self.backend].has_residual and self.residual is not None:
            raise ValueError(f"'backend: {self.backend}' keeps no tokens in the model's dtype: remove 'residual'")
        if self.residual is not None and self.residual < 1:
            raise ValueError(f"residual must be 1 or more, not {self.residual}")

    def storage(self, config: PreTrainedConfig) -> Storage:
        """Return how the cache of a model with this config is stored."""
        return STORAGES[self.backend](self, config)


class QuantizedKvCache(ModelOperator):
    """`generate` over codes of 8 bits, or over transformers' `QuantizedCache` (after KIVI: Liu et al. 2024, arXiv:2402.02750).

    Recurrent and convolution states, which do not grow, stay as they are in layers beside those of attention.

    The cache takes fewer bytes and is not exact: the text may change. Each step over one of transformers' caches restores a layer's keys
    and values to the model's dtype before attention, so decoding is slower: these are for contexts that do not fit otherwise. Codes are
    read in place, so that attention takes less time, and the pages of a server hold them as well. A call with a cache of its own uses that
    cache, and a call that must remove tokens from one of transformers' caches is not quantised.
    """

    name = "quantized_kv_cache"
    options_type = QuantizedKvCacheOptions
    summary = "keeps keys and values in fewer bits: less memory, and text that may change"
    uncaptured = "the key-value cache is quantised: it grows and is rewritten"

    def __init__(self, options: QuantizedKvCacheOptions, storage: Storage) -> None:
        super().__init__(options)
        self._storage = storage
        self._caches = 0

    @classmethod
    def unsupported_reason(cls, module: nn.Module, options: QuantizedKvCacheOptions) -> str | None:
        reason = super().unsupported_reason(module, options)
        if reason is not None:
            return reason
        assert isinstance(module, PreTrainedModel), "others do not generate text"
        return options.storage(module.config).unsupported_reason(module)

    @classmethod
    def build(cls, module: nn.Module, options: QuantizedKvCacheOptions, context: InjectionContext) -> Self:
        assert isinstance(module, PreTrainedModel), "unsupported_reason refuses all others"
        return cls(options, options.storage(module.config))

    @classmethod
    def traits(cls, options: QuantizedKvCacheOptions) -> Traits:
        loss = DecodeLoss(f"keys and values are read in {options.bits} bits by {options.backend}", _READ_AT_ONCE)
        return Traits("", cache_form=lambda config: options.storage(config).form(), decode_loss=loss)

    @classmethod
    def conflict(cls, model: nn.Module, options: QuantizedKvCacheOptions, traits: Mapping[str, Sequence[Traits]]) -> str | None:
        assert isinstance(model, PreTrainedModel), "others do not generate text"
        return options.storage(model.config).conflict(model, traits)

    def on_model_loaded(self, model: PreTrainedModel, path: str) -> None:
        if (reason := self._storage.wrong_device(model.device)) is not None:
            raise UnsupportedModelError(reason)

    def new_cache(self, model: PreTrainedModel) -> Cache:
        self._caches += 1
        return self._storage.new_cache()

    def generate(self, model: PreTrainedModel, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = call_arguments(plain, args, kwargs)
        if isinstance(arguments.get(CACHE), QuantizedCache | CodedCache):
            return plain(**arguments)
        reason = _other_cache_reason(model, arguments, self._storage)
        if reason is not None:
            self.warn_once(f"the cache is not quantised: {reason}")
            return plain(**arguments)
        return plain(**{**arguments, CACHE: self.new_cache(model)})

    def statistics(self) -> Mapping[str, object]:
        """Return how many caches were created."""
        return {"quantised_caches": self._caches}

    def placement(self) -> str:
        return f"key-value cache: {self.name}, {self.options.bits} bits by {self.options.backend}, {self._storage.scales}"


Setting = Callable[[str], Any]  # returns an argument of a call of `generate`, else the value of its generation config


class Storage(ABC):
    """How a backend stores the cache of one model.

    Attributes:
        bits: of a stored value, to choose from.
        has_residual: whether the latest tokens stay in the model's dtype.
        is_croppable: whether tokens can be removed from the cache.
        stored: the types of layers of the model's own cache whose keys and values are quantised.
        refusal: why a model is refused that has other layers with keys and values.
    """

    bits: ClassVar[tuple[int, ...]] = (8,)
    has_residual: ClassVar[bool] = False
    is_croppable: ClassVar[bool] = False
    stored: ClassVar[tuple[type, ...]]
    refusal: ClassVar[str]

    def __init__(self, options: QuantizedKvCacheOptions, config: PreTrainedConfig) -> None:
        self.options = options
        self.config = config.get_text_config(decoder=True)

    @property
    @abstractmethod
    def scales(self) -> str:
        """What shares a scale, for people."""

    @abstractmethod
    def form(self) -> QuantisedForm:
        """Return the form of the cache."""

    @abstractmethod
    def new_cache(self) -> Cache:
        """Return an empty cache, in which layers that are not `stored` stay as they are."""

    def unsupported_reason(self, model: PreTrainedModel) -> str | None:
        """Return why the model cannot have such a cache, or None where it can."""
        layers, names = self.stock_layers(), layer_types(self.config)
        stay = [keeps_nothing(layer) or (has_states(layer) and attention_part(layer) is None) for layer in layers]
        others = [index for index, layer in enumerate(layers) if not stay[index] and type(layer) not in self.stored]
        if others:
            return f"{name_layers(layers, others, names)[0]}, {self.refusal}"
        return why_not_split(model, Cache(layers=layers), names)

    def conflict(self, model: nn.Module, traits: Mapping[str, Sequence[Traits]]) -> str | None:
        """Return which operator cannot work with such a cache, as `ModelOperator.conflict` does."""
        if self.is_croppable or not any(each.drafts for each in traits[""]):
            return None
        return (
            f"rejected drafts cannot be removed from the cache of 'backend: {self.options.backend}': write 'backend: native', or draft "
            "without quantized_kv_cache; 'match: {kind: model}' with 'class: default' behind your own rules leaves inherited ones out"
        )

    def wrong_device(self, device: torch.device) -> str | None:
        """Return why the cache of a model on this device cannot be stored so, or None where it can."""
        return None

    def unread_reason(self, model: PreTrainedModel, arguments: Mapping[str, Any], setting: Setting) -> str | None:
        """Return why attention would not read such a cache in a call of `generate`, or None where it does."""
        return None

    def stock_layers(self) -> list[Any]:
        """Return the layers of an empty cache of the model's own."""
        return DynamicCache(config=self.config).layers


class _Codes(Storage):
    """Codes of 8 bits in pages, each row with a scale, which attention reads in place."""

    scales = "a scale for each token of a head"
    is_croppable = True
    stored = CODABLE
    refusal = "whose keys and values are not stored as codes"

    def form(self) -> QuantisedForm:
        rank: int | None = getattr(self.config, "kv_lora_rank", None)
        # With a latent, a token has a row of latents and one of rotary keys.
        row = min(_heads(self.config)[1]) if rank is None else (rank + self.config.qk_rope_head_dim) // 2
        return QuantisedForm(self.options.bits, row, 0, scale_bytes=SCALE_BYTES, in_place=True)

    def new_cache(self) -> Cache:
        return CodedCache(self.stock_layers())

    def unsupported_reason(self, model: PreTrainedModel) -> str | None:
        counting = next((module for module in model.modules() if counts_cached_tokens(module)), None)
        if counting is not None:
            named = type(counting).__name__
            return f"{named} scales queries by the number of tokens in the cache, of which pages have none for a whole batch"
        return super().unsupported_reason(model)

    def conflict(self, model: nn.Module, traits: Mapping[str, Sequence[Traits]]) -> str | None:
        stock = (path for path, module in model.named_modules() if is_attention(module) and path not in traits)
        path = next(stock, None)
        if path is None:
            return None
        return (
            f"{path}: the codes of 'backend: native' are read by cpu_attention alone; add a rule with 'match: {{kind: attention}}' and "
            "'class: cpu_attention', or write another backend"
        )

    def wrong_device(self, device: torch.device) -> str | None:
        if device.type == "cpu":
            return None
        return (
            f"'backend: native' keeps keys and values in the memory of a CPU, and the model is on {device}: write 'backend: fp8' or "
            "'backend: hqq'"
        )

    def unread_reason(self, model: PreTrainedModel, arguments: Mapping[str, Any], setting: Setting) -> str | None:
        if model.training:
            return "the model is in training mode, in which attention is PyTorch's"
        if setting("output_attentions") or model.config.output_attentions:
            return "the call asks for attention weights"
        if arguments.get("pixel_values") is not None and sees_whole_images(model.config):
            return "tokens of an image attend to later ones, which attention over codes leaves out"
        mask, ids, pad = arguments.get("attention_mask"), arguments.get("input_ids", arguments.get("inputs")), setting("pad_token_id")
        padded = isinstance(mask, torch.Tensor) and not bool((mask != 0).all())
        ends = [] if (end := setting("eos_token_id")) is None else torch.as_tensor(end).flatten().tolist()
        if mask is None and isinstance(ids, torch.Tensor) and pad is not None and pad not in ends:  # of which `generate` makes a mask
            padded = bool(torch.isin(ids, torch.as_tensor(pad)).any())
        return "a batch with padding has other positions than pages of codes" if padded else None


class _RestoredLayers(Storage):
    """Layers of transformers' quantised caches, which restore their keys and values for each pass."""

    stored = (DynamicLayer,)
    refusal = "and transformers quantises the cache only of layers with full attention, and nothing beside it"

    @abstractmethod
    def missing_reason(self) -> str | None:
        """Return why such layers cannot be created for this model, and what to install or write; None where they can."""

    @abstractmethod
    def new_layer(self) -> object:
        """Return an empty layer of the cache."""

    def new_cache(self) -> QuantizedCache:
        return _MixedCache([self.new_layer() if type(layer) in self.stored else layer for layer in self.stock_layers()])

    def unsupported_reason(self, model: PreTrainedModel) -> str | None:
        return super().unsupported_reason(model) or self.missing_reason()


class _MixedCache(QuantizedCache):
    def __init__(self, layers: list[Any]) -> None:
        Cache.__init__(self, layers=layers)  # the class in between makes layers of full attention alone


class _Hqq(_RestoredLayers):
    bits = (2, 4, 8)  # hqq also has 1 bit, too few for readable text, and 3 bits, which it restores in tens of values across tokens
    has_residual = True

    @property
    def group(self) -> int:
        """The number of values that share a scale; 1 where no group fits.

        Every token's keys and values have to form whole groups that fill whole bytes: groups are packed side by side.
        """
        heads, widths = _heads(self.config)
        groups_per_byte = 8 // self.options.bits
        fitting = (size for size in GROUPS if all(width % size == 0 and (heads * width // size) % groups_per_byte == 0 for width in widths))
        return next(fitting, 1)

    @property
    def scales(self) -> str:
        return f"groups of {self.group}"

    @property
    def residual(self) -> int:
        return self.options.residual or RESIDUAL

    def form(self) -> QuantisedForm:
        return QuantisedForm(self.options.bits, self.group, self.residual)

    def missing_reason(self) -> str | None:
        if self.group == 1:
            heads, widths = _heads(self.config)
            values = f"{heads} head{'' if heads == 1 else 's'} of {' and '.join(map(str, sorted(set(widths))))} values per token"
            return f"{values} do not fill whole bytes in any groups of {GROUPS[-1]} or more; write 'backend: fp8'"
        return None if find_spec("hqq") else "hqq is not installed; install it with pip install 'moegraft[kv-cache]' (or pip install hqq)"

    def new_layer(self) -> object:
        sizes = {"nbits": self.options.bits, "q_group_size": self.group, "residual_length": self.residual}
        return cache_utils.HQQQuantizedLayer(axis_key=1, axis_value=1, **sizes)


class _Fp8(_RestoredLayers):
    scales = "one scale per layer"

    def form(self) -> QuantisedForm:
        return QuantisedForm(self.options.bits, None, 0)

    def missing_reason(self) -> str | None:
        if hasattr(cache_utils, "Fp8QuantizedLayer"):
            return None
        return "this version of transformers has no fp8 cache: install transformers 5.23, or write 'backend: hqq'"

    def new_layer(self) -> object:
        return cache_utils.Fp8QuantizedLayer()


STORAGES: dict[Backend, type[Storage]] = {"hqq": _Hqq, "fp8": _Fp8, "native": _Codes}


def _heads(config: PreTrainedConfig) -> tuple[int, list[int]]:
    """Return the least number of heads per token in the cache and the widths of keys and values, whole or as a latent."""
    latent = [getattr(config, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")]
    if any(latent):
        return 1, [width for width in latent if width]
    layers = getattr(config, "per_layer_config", None) or [config]
    heads = min(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads for layer in layers)
    return heads, [getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads for layer in layers]


def _other_cache_reason(model: PreTrainedModel, arguments: Mapping[str, Any], storage: Storage) -> str | None:
    """Return why a call cannot use a quantised cache, or None where it can."""
    config = effective_config(model, arguments)

    def setting(name: str) -> Any:
        return getattr(config, name, None)

    cache = arguments.get(CACHE)
    if cache is not None:
        return f"the call has a cache of its own ({type(cache).__name__})"
    if setting("use_cache") is False:
        return "the call sets use_cache to False"
    if setting("cache_implementation") is not None:
        return f"the call sets cache_implementation to {setting('cache_implementation')}"
    if (setting("num_beams") or 1) > 1:
        return "beam search reorders the cache at every token"
    if not storage.is_croppable and (arguments.get("assistant_model") is not None or setting("prompt_lookup_num_tokens")):
        return "rejected draft tokens cannot be removed from a quantised cache"
    return storage.unread_reason(model, arguments, setting)
