"""The class names and arguments of KTransformers' rule files, and what to write instead of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EXPERTS = "hybrid_experts does that: write 'match: {kind: experts}' and 'replace: {class: hybrid_experts, kwargs: {weights: int8}}'"
LINEAR = (
    "quantized_linear does that: write 'class: quantized_linear' with 'match: {kind: linear, name: ...}', or delete the rule and they stay"
)
STOCK = "nothing is needed: {} stay transformers' own; delete the rule"
Becomes = Literal["experts", "linear", "router", "stock"]


@dataclass(frozen=True, slots=True)
class TheirClass:
    """A group of KTransformers' classes that are treated alike.

    Attributes:
        words: lower-case parts of class names; a class with one of them belongs to the group.
        shown: the classes as the guide lists them.
        becomes: `experts` and `linear` are computed by an operator; `router` and `stock` stay transformers' own.
        advice: what to write instead.
        what: the modules that stay, in the plural.
    """

    words: tuple[str, ...]
    shown: str
    becomes: Becomes
    advice: str
    what: str = ""

    @property
    def ours(self) -> str:
        """The replacement as the guide's table shows it."""
        if self.becomes == "experts":
            return "`match: {kind: experts}`, `replace: {class: hybrid_experts}`"
        if self.becomes == "linear":
            return "`match: {kind: linear, name: ...}`, `replace: {class: quantized_linear}`; for 16 bits no rule"
        return f"no rule: {self.what} stay transformers' own"


def _stock(words: tuple[str, ...], shown: str, what: str, more: str = "", becomes: Becomes = "stock") -> TheirClass:
    return TheirClass(words, shown, becomes, STOCK.format(what) + more, what)


# The first that fits is taken.
CLASSES = (
    TheirClass(("expert",), "`KTransformersExperts`, `KTransformersExpertsV2`, `KExpertsCPU`, `KExpertsMarlin`", "experts", EXPERTS),
    _stock(("moegate", "gate"), "`KMoEGate`, `KMoEGateDeepSeekV3`", "routers", becomes="router"),
    TheirClass(("linear",), "`KTransformersLinear`, `KLinearMarlin`, `KLinearCPUInfer`", "linear", LINEAR),
    _stock(("rotary", "rope"), "`RotaryEmbedding`, `YarnRotaryEmbedding` and others of `RoPE`", "rotary embeddings"),
    _stock(
        ("attention", "attn", "mla"),
        "`KDeepseekV2Attention`, `flashinfer_attn` and others",
        "attention layers",
        ", and choose an implementation with attn_implementation=",
    ),
    _stock(("norm",), "`RMSNorm`, `KQwen3MoeRMSNorm`", "norms"),
    _stock(("mlp",), "`kDeepseekV3MLP`", "dense MLPs"),
    _stock(("model",), "`KDeepseekV2Model` and other models", "models"),
    # Last: KGlm4MoeAttention, too, has the name of its block in it.
    TheirClass(
        ("sparsemoe", "kdeepseekv2moe", "kdeepseekv3moe", "moeblock", "kglm4moe", "ksmallthinkermoe"),
        "`KDeepseekV2MoE`, `KDeepseekV3MoE`, `KQwen3MoeSparseMoeBlock` and other blocks",
        "experts",
        EXPERTS,
    ),
)
_BARE_PREFIXES = ("KTransformers", "KExperts", "KLinear", "KMoEGate", "KDeepseek", "KQwen", "KMistral", "KGlm", "KSmallThinker", "VLinear")

_DEVICES = "where modules that stay go is for device_map= of optimize_and_load, and where experts run for the options of hybrid_experts"
_ENGINES = "an operator is chosen by 'class' alone"
KWARGS = {
    "generate_device": _DEVICES,
    "prefill_device": _DEVICES,
    "out_device": "results return to the device that the tokens came from",
    "device": _DEVICES,
    "transfer_map": _DEVICES,
    "generate_op": _ENGINES,
    "prefill_op": _ENGINES,
    "backend": _ENGINES + "; the kernel's weight type is its option 'weights'",
    "generate_linear_type": _ENGINES,
    "prefill_linear_type": _ENGINES,
    "absorb_for_prefill": "attention stays transformers' own",
    "per_layer_prefill_intput_threshold": "prompts of every length take one way",  # spelt so in KTransformers
    "cpu_infer": "threads are the argument threads= of optimize_and_load",
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
    """Return what to write instead of KTransformers' class `name`; None for other classes."""
    if not is_theirs(name):
        return None
    known = their_class(name)
    return STOCK.format("such modules") if known is None else known.advice


def class_table() -> str:
    """Return the guide's table of KTransformers' classes and their replacements."""
    rows = [f"| {known.shown} | {known.ours} |" for known in CLASSES]
    return "\n".join(["| KTransformers | here |", "|---|---|", *rows])


def kwarg_advice(name: str) -> str | None:
    """Return what replaces KTransformers' argument `name`; None for other arguments."""
    return KWARGS.get(name)
