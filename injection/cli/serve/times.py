"""How long something took, often: a histogram as Prometheus has them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(slots=True)
class Times:
    """Seconds by the first of `BOUNDS_S` that is not below them; the last count is of all above."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds
