"""The weight types that experts can be packed to from floats, and which of them fit a matrix."""

from __future__ import annotations

from typing import Literal

from moegraft.operators.block_encoding import fitting_type
from moegraft.operators.weight_formats import FORMATS

# What a matrix of floats can be packed to: by the kernel, or by `block_encoding`.
WEIGHT_TYPES = Literal[
    "stored", "float32", "float16", "bfloat16", "int8",
    "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "iq4_xs", "iq4_nl", "mxfp4", "int4",
    "q3_k", "iq3_s", "iq3_xxs", "q2_k", "iq2_s", "iq2_xs", "tq2_0", "iq2_xxs", "tq1_0", "iq1_s",
]  # fmt: skip


def why_unfit(weight_type: str, columns: int) -> str | None:
    """Return why rows of `columns` weights cannot be packed to a type, or None where they can."""
    form = FORMATS.get(weight_type)
    if form is None or form.gguf is None or not form.stored or columns % form.block_weights == 0:
        return None
    own_names = {each.gguf: other for other, each in FORMATS.items() if each.scaled}
    instead = own_names.get(fitting_type(form.gguf, columns), "int8")
    return f"{weight_type} has blocks of {form.block_weights} weights, of which rows of {columns} are no whole number; use {instead}"
