"""`quantized_kv_cache`: a model whose `generate` keeps keys and values in transformers' quantised cache.

The options of `quantized_kv_cache`.

How a key-value cache is stored: what the operator that quantises it and those that plan memory around it agree on.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicLayer, QuantizedCache

from moegraft.operators.base import ModelOperator
from moegraft.operators.context import InjectionContext
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.kv_cache_size import QuantisedForm

if TYPE_CHECKING:
    from transformers import Cache


class CacheForm:
    """One a model, `context.cache_form`: what its rules make of the cache."""

    def __init__(self) -> None:
        self.quantised: QuantisedForm | None = None


Backend = Literal["hqq", "quanto", "fp8"]
# hqq has 1 bit as well, which leaves little of the text, and 3, of which it brings back ten values at a time, wherever tokens end.
BITS: dict[Backend, tuple[int, ...]] = {"hqq": (2, 4, 8), "quanto": (2, 4), "fp8": (8,)}
DEFAULT_BITS: dict[Backend, int] = {"hqq": 8, "quanto": 4, "fp8": 8}
PACKAGES: dict[Backend, tuple[str, str] | None] = {"hqq": ("hqq", "hqq"), "quanto": ("optimum.quanto", "optimum-quanto"), "fp8": None}
RESIDUAL = 128


@dataclass(frozen=True, slots=True)
class QuantizedKvCacheOptions:
    """Options of `quantized_kv_cache`.

    Attributes:
        backend: who quantises: `hqq` (the package of that name) and `quanto` (optimum-quanto, which compiles a kernel when it is first
            used) have a scale and a zero point for every `group` values; `fp8` is transformers' own, with one scale for a layer's keys
            and one for its values, taken from the first tokens.
        bits: of a stored value: 2, 4 or 8 with `hqq`, 2 or 4 with `quanto`. By default 8, with `quanto` 4.
        group: values of one head of one token that share a scale. By default the largest of 64, 32, 16 and 8 that divides heads.
        residual: tokens that wait in the model's dtype until so many are there, and are quantised together with all before them;
            a prompt is quantised at once. By default 128. `fp8` has none.
    """

    backend: Backend = "hqq"
    bits: int | None = None
    group: int | None = None
    residual: int | None = None

    def __post_init__(self) -> None:
        known = BITS[self.backend]
        if self.bits is not None and self.bits not in known:
            raise ValueError(f"bits with 'backend: {self.backend}' must be {_either(known)}, not {self.bits}")
        if self.backend == "fp8" and (self.group is not None or self.residual is not None):
            name = "group" if self.group is not None else "residual"
            raise ValueError(f"'backend: fp8' has one scale for all tokens and keeps none apart: '{name}' cannot go with it")
        for name, value in (("group", self.group), ("residual", self.residual)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, not {value}")

    @property
    def value_bits(self) -> int:
        return DEFAULT_BITS[self.backend] if self.bits is None else self.bits

    def form(self, group: int) -> QuantisedForm:
        """What a layer's cache becomes, `group` being that of this model."""
        if self.backend == "fp8":
            return QuantisedForm(self.value_bits, None, 0)
        return QuantisedForm(self.value_bits, group, self.residual or RESIDUAL)

    def cache_config(self, group: int) -> dict[str, object]:
        """What transformers' `QuantizedCache` takes; groups lie along a head, which is its axis 1 with hqq and 0 with quanto."""
        if self.backend == "fp8":
            return {"backend": self.backend}
        axis = 1 if self.backend == "hqq" else 0
        sizes = {"nbits": self.value_bits, "q_group_size": group, "residual_length": self.residual or RESIDUAL}
        return {"backend": self.backend, "axis_key": axis, "axis_value": axis, **sizes}

    def why_not_here(self) -> str | None:
        """What this installation lacks."""
        package = PACKAGES[self.backend]
        if self.backend == "fp8" and not hasattr(cache_utils, "Fp8QuantizedLayer"):
            return "this version of transformers has no fp8 cache: install transformers 5.23, or write 'backend: hqq'"
        if package is not None and not _is_installed(package[0]):
            extra = "kv-cache" if self.backend == "hqq" else "kv-quanto"
            return f"{package[1]} is not installed; install it with pip install 'moegraft[{extra}]' (or pip install {package[1]})"
        return None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent is not there
        return False


def _either(values: tuple[int, ...]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


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
    def unsupported_reason(cls, module: nn.Module, options: QuantizedKvCacheOptions) -> str | None:
        if not isinstance(module, PreTrainedModel) or not isinstance(module, GenerationMixin):
            return f"{type(module).__name__} does not generate text"
        if module.config.is_encoder_decoder:
            return "it has an encoder and a decoder"
        return _why_no_cache(module) or _why_no_group(module.config, options) or options.why_not_here()

    @classmethod
    def build(cls, module: nn.Module, options: QuantizedKvCacheOptions, context: InjectionContext) -> Self:
        assert isinstance(module, PreTrainedModel), "refuse lets no other through"
        group = group_of(module.config, options)
        context.cache_form.quantised = options.form(group)
        return cls(options, group)

    @classmethod
    def cache_form(cls, options: QuantizedKvCacheOptions, config: PreTrainedConfig) -> QuantisedForm:
        return options.form(group_of(config, options))

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
