"""What drafts could gain at best on a modelled machine, by arithmetic: rounds whose devices never wait.

Of one layer, with c0 all but the experts, g an expert that is there on the GPU, c one on the CPU and f what its first costs more, t the
link for one; a verification of n drafted tokens has U(n + 1) distinct experts, of which M(n + 1) are missing:

- a draft step takes `c0 + r * g`: all its r experts are there;
- the CPU reads some of what a verification misses, each once for all its tokens, and the link brings the rest, both without a pause:
  `c0 + max(U * g, T)` with T the least for which `(T - f) / c + T / t >= M`.

Plain steps take what they took. M is what the engine found missing when it verified drafts of that length that always stand, with what
its cache kept and what was loaded ahead: better guesses of what a text needs would help plain decoding as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ACCEPTANCES = np.linspace(0, 1, 201)


@dataclass(frozen=True, slots=True)
class Costs:
    """ms of one layer.

    Attributes:
        plain: a step without drafts.
        rest: all but the experts, for 1, 2, ... tokens.
        gpu, cpu, first_cpu, link: of an expert.
    """

    plain: float
    rest: Sequence[float]
    gpu: float
    cpu: float
    first_cpu: float
    link: float


@dataclass(frozen=True, slots=True)
class Verification:
    """Experts of a layer on average: all that were needed, and those that were not there."""

    experts: float
    missing: float


@dataclass(frozen=True, slots=True)
class DraftBound:
    """The most that drafts by `top_k` experts can gain; `verifications` are of 1, 2, ... drafted tokens."""

    costs: Costs
    verifications: Sequence[Verification]
    top_k: float

    @property
    def draft_ms(self) -> float:
        return self.costs.rest[0] + self.top_k * self.costs.gpu

    def verify_ms(self, drafted: int) -> float:
        costs, needed = self.costs, self.verifications[drafted - 1]
        together = (needed.missing + costs.first_cpu / costs.cpu) / (1 / costs.cpu + 1 / costs.link)
        busy = min(needed.missing * costs.link, together)  # a CPU may cost more than it saves
        return costs.rest[drafted] + max(needed.experts * costs.gpu, busy)

    def gain(self, acceptance: float, drafted: int) -> float:
        """Of drafts of so many tokens, each of which stands with that chance after all before it."""
        tokens = float(np.power(acceptance, np.arange(drafted + 1)).sum())
        return tokens * self.costs.plain / (drafted * self.draft_ms + self.verify_ms(drafted))

    def best_gain(self, acceptance: float) -> float:
        """By the best length."""
        return max(self.gain(acceptance, drafted) for drafted in self._lengths)

    def foreseen_gain(self, acceptance: float) -> float:
        """The best of schedules that see of each token whether it stands once it is drafted, and verify only what does."""
        return max(self._foreseen(acceptance, most) for most in self._lengths)

    @property
    def _lengths(self) -> range:
        return range(1, len(self.verifications) + 1)

    def _foreseen(self, acceptance: float, most: int) -> float:
        stand = np.arange(most + 1)
        chances = np.power(acceptance, stand) * np.where(stand < most, 1 - acceptance, 1.0)
        ms = [min(count + 1, most) * self.draft_ms + self._step_ms(count) for count in stand.tolist()]
        return float((chances * (stand + 1)).sum() * self.costs.plain / (chances * np.array(ms)).sum())

    def _step_ms(self, drafted: int) -> float:
        return self.verify_ms(drafted) if drafted else self.costs.plain

    def acceptance_for(self, gain: float) -> float | None:
        """The smallest at which drafts of the best length gain so much; None: at none."""
        return next((float(acceptance) for acceptance in ACCEPTANCES if self.best_gain(float(acceptance)) >= gain), None)
