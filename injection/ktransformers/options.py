"""What KTransformers' keyword arguments say, in our options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from moegraft.injection.ktransformers.reading import TheirRule
from moegraft.injection.rulefile.diagnostics import nearest, shown
from moegraft.injection.rulefile.migration import KWARGS, kwarg_advice

DEVICES = ("generate_device", "prefill_device", "out_device", "device")
OPERATIONS = ("generate_op", "prefill_op", "backend")
# Experts as their CPU backends hold them; the others take the type that the GGUF file has.
BACKENDS = {"AMXInt4": "int4", "AMXInt8": "int8", "AMXBF16": "bfloat16"}
CUDA = re.compile(r"cuda(:\d+)?")


def devices_of(rule: TheirRule) -> tuple[str, ...]:
    """A note on where and by what the rule computed; empty where it does not say."""
    said = [f"{key} {value}" for key in (*OPERATIONS, *DEVICES) if (value := rule.text(key)) is not None]
    return (", ".join(said),) if said else ()


def gpu_of(rules: Iterable[TheirRule]) -> str:
    """Our `gpu` for experts that these rules compute: the GPUs that any of them names, `auto` for one without a number, else `none`.

    One value for all of them: layers of one value share a GPU's slots, and which experts have one is the cache's choice.
    """
    named = {value for rule in rules for key in DEVICES if (value := rule.text(key)) is not None and CUDA.fullmatch(value)}
    numbered = sorted(named - {"cuda"})
    return "none" if not named else ",".join(numbered) if numbered else "auto"


def linear_gpu(rule: TheirRule) -> str:
    """Our `gpu` for a linear layer: where it decodes."""
    device = rule.text("generate_device") or rule.text("device") or rule.text("prefill_device") or "cuda"
    if not CUDA.fullmatch(device) or rule.text("generate_op") == "KLinearCPUInfer":
        return "none"
    return "auto" if device == "cuda" else device


def is_sixteen_bit(rule: TheirRule) -> bool:
    """Whether a linear layer decodes with the weights as they are."""
    return rule.text("generate_op") == "KLinearTorch"


def expert_weights(rule: TheirRule) -> tuple[str, Sequence[str]]:
    """Our `weights`, the file's variable where the rule does not say it; and a note where experts decode on the GPU."""
    on_gpu = CUDA.fullmatch(rule.text("generate_device") or "")
    note = "which experts decode on the GPU is decided by its slots here: all of them where there is room"
    return BACKENDS.get(rule.text("backend") or "", "${weights}"), (note,) if on_gpu else ()


def unknown_arguments(rule: TheirRule) -> tuple[str, ...]:
    """Arguments that KTransformers does not have, as far as is known; it says nothing of them and does not use them."""
    found = []
    for key in rule.kwargs:
        if kwarg_advice(key) is None:
            near = nearest(key, KWARGS)
            meant = f"; did you mean '{near}'?" if near else "; nothing here stands for it"
            found.append(f"argument {shown(key)} is not known{meant}")
    return tuple(found)
