"""What experts, drafts and sparsity did, in counts that only grow: over a model's life, and while one answer was made.

How long something took, often: a histogram as Prometheus has them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from moegraft.injection.graft import injection_of

Counts = Mapping[str, int]
ENGINE = {
    "experts_used": "used",
    "experts_found_on_gpu": "found",
    "experts_computed_on_cpu": "on_cpu",
    "experts_brought_on_demand": "transferred",
}
DRAFTS = {"draft_rounds": "rounds", "tokens_drafted": "drafted_tokens", "tokens_accepted": "accepted_tokens"}


def work_counts(model: PreTrainedModel) -> Counts:
    """Counts since the model was loaded; only of what it has: a model whose experts are all on the CPU counts no experts.

    `experts_used` are active experts, layer by layer; those found had a slot on the GPU when their layer began.
    """
    injection = injection_of(model)
    if injection is None:
        return {}
    counts: Counter[str] = Counter()
    for _, device_counts in injection.device_counts():
        for name, key in ENGINE.items():
            value = device_counts[key]
            counts[name] += value if isinstance(value, int) else 0
    if injection.model_operator is not None:
        drafts = injection.model_operator.statistics()
        for name, key in DRAFTS.items():
            value = drafts.get(key)
            counts[name] += value if isinstance(value, int) else 0
    for module in injection.operators.values():
        found = module.statistics().get("sparsity")
        neurons, share = (found.get("neurons"), found.get("routed_sparsity")) if isinstance(found, Mapping) else (None, None)
        if isinstance(neurons, int) and isinstance(share, float):
            counts["neurons"] += neurons
            counts["neurons_left_out"] += round(neurons * share)
    return counts


def difference(after: Counts, before: Counts) -> dict[str, int]:
    """What was added; nothing of what did not change."""
    return {name: added for name, count in after.items() if (added := count - before.get(name, 0)) > 0}


BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(slots=True)
class Times:
    """Seconds by the first of `BOUNDS_S` that is not below them; the last count is of all above."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds
