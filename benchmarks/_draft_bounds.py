"""Upper bounds of the gain of drafts on a modelled machine: rounds in which no device ever waits.

For one layer, c0 is the time of everything except experts, g of a resident expert on the GPU, c of an expert on the CPU, f the extra time
of the CPU's first expert, and t the transfer of one expert. A verification of n drafted tokens needs U(n + 1) distinct experts, of which
M(n + 1) are missing:

- a draft step takes `c0 + r * g`, since all its r experts are resident;
- in a verification, the CPU computes some missing experts and the link transfers the others, both without a pause: `c0 + max(U * g, T)`
  with the least T for which `(T - f) / c + T / t >= M`.

Plain steps take their simulated time. M comes from the simulated verification of drafts of that length that are always accepted, with the
engine's cache and prefetches: better prefetches would help plain decoding as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ACCEPTANCES = np.linspace(0, 1, 201)


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of one layer in ms.

    Attributes:
        plain: a step without drafts.
        rest: everything except experts, for 1, 2, ... tokens.
        gpu, cpu, first_cpu, link: one expert on the GPU, on the CPU, as the CPU's first, and its transfer.
    """

    plain: float
    rest: Sequence[float]
    gpu: float
    cpu: float
    first_cpu: float
    link: float


@dataclass(frozen=True, slots=True)
class Verification:
    """The mean numbers of needed and of missing experts of a layer."""

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
        """Return the gain of drafts of `tokens` tokens that are each accepted with chance `acceptance` after accepted ones."""
        tokens = float(np.power(acceptance, np.arange(drafted + 1)).sum())
        return tokens * self.costs.plain / (drafted * self.draft_ms + self.verify_ms(drafted))

    def best_gain(self, acceptance: float) -> float:
        """Return the gain of the best draft length."""
        return max(self.gain(acceptance, drafted) for drafted in self._lengths)

    def foreseen_gain(self, acceptance: float) -> float:
        """Return the gain of the best schedule that knows whether each drafted token will be accepted and verifies only those."""
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
        """Return the least acceptance at which drafts of the best length reach the gain; None where none does."""
        return next((float(acceptance) for acceptance in ACCEPTANCES if self.best_gain(float(acceptance)) >= gain), None)
