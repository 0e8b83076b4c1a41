"""Tokens a second, from what a token passes and the rates of this machine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from moegraft.injection.predict.layers import Work
from moegraft.injection.predict.measure import Measurements, Rate

# What has no rate of its own, and what is read as fast by kernels of about the same arithmetic.
MEASURED_AS = {"float16": "bfloat16", "q4_k": "int4", "q6_k": "int8"}


@dataclass(frozen=True, slots=True)
class Speed:
    """A prediction; `missing` names weight types without a measured rate, and then there is no figure."""

    decode_tokens_s: float | None
    prefill_tokens_s: float | None
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the model: `batch` sequences at once, each with `context` tokens before the next, `prompt` to begin with."""

    context: int
    batch: int
    prompt: int


def predict(works: Iterable[Work], measured: Measurements, *, layers: int, kv_bytes: int, load: Load) -> Speed:
    """Each module takes as long as reading its weights or its arithmetic, whichever is longer; Python's share is by layer.

    Args:
        kv_bytes: of the whole cache at `load.context`, read once a step.

    Arithmetic of attention itself is left out: it counts in prompts of tens of thousands of tokens.
    """
    works = list(works)
    missing = missing_rates(works, measured)
    if missing:
        return Speed(None, None, tuple(sorted(missing)))
    overhead_s = layers * measured.layer_overhead_ms / 1e3
    step_s = overhead_s + kv_bytes / (measured.read_gbps * 1e9) + sum(seconds(work, measured, load.batch) for work in works)
    prompt_s = overhead_s + sum(seconds(work, measured, load.prompt) for work in works)
    return Speed(load.batch / step_s, load.prompt / prompt_s)


def missing_rates(works: Iterable[Work], measured: Measurements) -> set[str]:
    """The kinds and weight types that nothing was measured of."""
    return {f"{work.kind}, {work.weights}" for work in works if rate_of(work.kind, work.weights, measured) is None}


def rate_of(kind: str, weights: str, measured: Measurements) -> Rate | None:
    """That of this machine's CPU."""
    rates = measured.experts if kind == "experts" else measured.linear
    found = [rates.get(MEASURED_AS.get(name, name)) for name in weights.split("+")]
    known = [rate for rate in found if rate is not None]
    if len(known) < len(found):
        return None
    return Rate(min(rate.decode_gbps for rate in known), min(rate.prefill_gflops for rate in known))


def seconds(work: Work, measured: Measurements, tokens: int) -> float:
    """What the CPU takes for a module with so many tokens."""
    rate = rate_of(work.kind, work.weights, measured)
    assert rate is not None, "missing rates are looked for first"
    # Tokens choose experts independently: the expected part of them that at least one token needs.
    touched = 1 - (1 - work.share) ** tokens
    # Nor do tokens share their neurons: the expected part of a touched expert, whose gate is always read, that one of its tokens needs.
    of_expert = (3 - 2 * math.pow(work.left_out, tokens * work.share / touched)) / 3
    reading_s = work.nbytes * touched * of_expert / (rate.decode_gbps * 1e9)
    arithmetic_s = 2 * work.weight_count * work.share * tokens / (rate.prefill_gflops * 1e9)
    return max(reading_s, arithmetic_s)


def tokens_text(tokens_s: float) -> str:
    """A rate for people, three figures of it."""
    return f"{tokens_s:,.0f} tokens/s" if tokens_s >= 100 else f"{tokens_s:.3g} tokens/s"
