"""What KTransformers' operators and arguments are called here, for whoever brings a rule file along."""

from __future__ import annotations

EXPERTS = "hybrid_experts does that: write 'match: {kind: experts}' and 'replace: {class: hybrid_experts, kwargs: {weights: int8}}'"
LINEAR = (
    "quantized_linear does that: write 'class: quantized_linear' with 'match: {kind: linear, name: ...}', or delete the rule and they stay"
)
STOCK = "nothing is needed: {} stay transformers' own; delete the rule"

# By what the class name contains, in lower case; the first that fits is taken.
_CLASSES = (
    (("expert",), EXPERTS),
    (("moegate", "kmoegate", "gate"), STOCK.format("routers")),
    (("sparsemoe", "kdeepseekv2moe", "kdeepseekv3moe", "moeblock", "kglm4moe", "ksmallthinkermoe"), EXPERTS),
    (("linear",), LINEAR),
    (("rotary", "rope"), STOCK.format("rotary embeddings")),
    (("attention", "attn", "mla"), STOCK.format("attention layers") + ", and choose an implementation with attn_implementation="),
    (("norm",), STOCK.format("norms")),
    (("mlp",), STOCK.format("dense MLPs")),
    (("model",), STOCK.format("models")),
)
_BARE_PREFIXES = ("KTransformers", "KExperts", "KLinear", "KMoEGate", "KDeepseek", "KQwen", "KMistral", "KGlm", "KSmallThinker", "VLinear")

_DEVICES = "where modules that stay go is for device_map= of optimize_and_load, and where experts run for the options of hybrid_experts"
_ENGINES = "an operator is chosen by 'class' alone"
_KWARGS = {
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
    """Whether a class, by its dotted or bare name, is KTransformers'."""
    return name.startswith("ktransformers.") or name.rpartition(".")[2].startswith(_BARE_PREFIXES)


def class_advice(name: str) -> str | None:
    """What to write instead of KTransformers' class `name`, or None where it is none of theirs."""
    if not is_theirs(name):
        return None
    lower = name.rpartition(".")[2].lower()
    return next((advice for parts, advice in _CLASSES if any(part in lower for part in parts)), STOCK.format("such modules"))


def kwarg_advice(name: str) -> str | None:
    """What stands for KTransformers' argument `name` here, or None where it is none of theirs."""
    return _KWARGS.get(name)
