"""The class names and arguments of KTransformers' rule files, and the replacement of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EXPERTS = "use hybrid_experts: write 'match: {kind: experts}' and 'replace: {class: hybrid_experts, kwargs: {weights: int8}}'"
LINEAR = (
    "use quantized_linear: write 'class: quantized_linear' with 'match: {kind: linear, name: ...}', or delete the rule to keep these layers"
)
STOCK = "no replacement is needed, {} stay transformers' own; delete the rule"
Becomes = Literal["experts", "linear", "router", "stock"]


@dataclass(frozen=True, slots=True)
class TheirClass:
    """A group of KTransformers' classes with one replacement.

    Attributes:
        words: lower-case parts of class names; a class whose name contains one belongs to the group.
        becomes: `experts` and `linear` are computed by an operator; `router` and `stock` stay transformers' own.
        advice: the replacement, as the end of an error message.
        what: the modules of the group, in the plural.
    """

    words: tuple[str, ...]
    becomes: Becomes
    advice: str
    what: str = ""


def _stock(words: tuple[str, ...], what: str, more: str = "", becomes: Becomes = "stock") -> TheirClass:
    return TheirClass(words, becomes, STOCK.format(what) + more, what)


# The first group that fits applies.
CLASSES = (
    TheirClass(("expert",), "experts", EXPERTS),
    _stock(("moegate", "gate"), "routers", becomes="router"),
    TheirClass(("linear",), "linear", LINEAR),
    _stock(("rotary", "rope"), "rotary embeddings"),
    _stock(("attention", "attn", "mla"), "attention layers", ", and choose an implementation with attn_implementation="),
    _stock(("norm",), "norms"),
    _stock(("mlp",), "dense MLPs"),
    _stock(("model",), "models"),
    # Last, because the names of attention classes such as KGlm4MoeAttention contain those of the blocks.
    TheirClass(("sparsemoe", "kdeepseekv2moe", "kdeepseekv3moe", "moeblock", "kglm4moe", "ksmallthinkermoe"), "experts", EXPERTS),
)
_BARE_PREFIXES = ("KTransformers", "KExperts", "KLinear", "KMoEGate", "KDeepseek", "KQwen", "KMistral", "KGlm", "KSmallThinker", "VLinear")

_DEVICES = "modules that stay are placed by device_map= of optimize_and_load, and experts by the options of hybrid_experts"
_ENGINES = "an operator is chosen by 'class' only"
KWARGS = {  # the replacement of each argument
    "generate_device": _DEVICES,
    "prefill_device": _DEVICES,
    "out_device": "results are returned on the device of the tokens",
    "device": _DEVICES,
    "transfer_map": _DEVICES,
    "generate_op": _ENGINES,
    "prefill_op": _ENGINES,
    "backend": _ENGINES + "; the kernel's weight type is its option 'weights'",
    "generate_linear_type": _ENGINES,
    "prefill_linear_type": _ENGINES,
    "absorb_for_prefill": "attention stays transformers' own",
    "per_layer_prefill_intput_threshold": "prompts of every length are computed the same way",  # spelt so in KTransformers
    "cpu_infer": "the number of threads is the argument threads= of optimize_and_load",
}


def is_theirs(name: str) -> bool:
    """Return whether a class belongs to KTransformers, by its dotted or bare name."""
    return name.startswith("ktransformers.") or name.rpartition(".")[2].startswith(_BARE_PREFIXES)


def their_class(name: str) -> TheirClass | None:
    """Return the group of KTransformers' class `name`; None for other classes and for unknown ones."""
    if not is_theirs(name):
        return None
    lower = name.rpartition(".")[2].lower()
    return next((known for known in CLASSES if any(word in lower for word in known.words)), None)


def class_advice(name: str) -> str | None:
    """Return the advice for a rule with KTransformers' class `name`; None for other classes."""
    if not is_theirs(name):
        return None
    known = their_class(name)
    return STOCK.format("such modules") if known is None else known.advice
