"""How many tokens to draft: always as many, or as many as are measured to pay."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from moegraft.operators.speculative.costs import AcceptanceRates, RoundCosts
from moegraft.operators.speculative.statistics import Round

logger = logging.getLogger(__name__)

PLAIN_FIRST = 3  # plain steps that are timed before anything is drafted
PLAIN_EVERY = 48  # rounds between plain steps while drafting pays, so that the comparison stays true as the text grows
START_CREDIT = 3.0  # plain steps that may be lost to finding out whether drafting pays
CREDIT_SHARE = 0.01  # and this share of all steps since: with the credit, under 3% of a text of 300 tokens and more
LONGER_EVERY = 24  # rounds between drafts of one token more than seems best, lest an early mishap settles the length
PROBE_LENGTH = 3
SILENT_TOKENS = 256  # between two remarks that drafting pays, or no longer does: at break-even it changes often
FIRST_PROBES = 4  # before a draft that seems not to pay is probed less and less often
PROBE_GAP, LONGEST_PROBE_GAP = 16, 512  # plain steps between probes; doubled after each that did not pay


class Schedule(Protocol):
    """Decides the length of each draft."""

    def plan(self, limit: int) -> int:
        """The most tokens to draft now, up to `limit`; 0: a plain step."""
        ...

    def goes_on(self, confidences: Sequence[float]) -> bool:
        """Whether to draft one token more after these, each given by its q."""
        ...

    def record(self, done: Round) -> None: ...

    def state(self) -> str:
        """A few words for users."""
        ...


class FixedSchedule:
    """Always `max_draft` tokens."""

    def __init__(self, max_draft: int) -> None:
        self._max_draft = max_draft

    def plan(self, limit: int) -> int:
        return min(limit, self._max_draft)

    def goes_on(self, confidences: Sequence[float]) -> bool:
        return True

    def record(self, done: Round) -> None:
        return

    def state(self) -> str:
        return f"{self._max_draft} tokens a draft"


class MarginalSchedule:
    """Drafts one token more only while what it is expected to bring exceeds what it is measured to cost.

    A draft of n tokens brings `1 + a_1 + a_1 a_2 + ...` tokens for `n * draft + verify(n)` ms, and the length with the best ratio
    is planned. Within a draft, a token more must promise `P(all stand) * ms a token` above `draft + verify(n + 1) - verify(n)`.
    Rounds slower than plain steps are debts, paid from a credit that grows with the text: so wrong estimates cannot cost more
    than that credit either, and a draft that does not pay is switched off but for probes within the credit.
    """

    def __init__(self, max_draft: int) -> None:
        self._max_draft = max_draft
        self._costs = RoundCosts()
        self._rates = AcceptanceRates()
        self._credit = START_CREDIT
        self._debt = 0.0  # plain steps lost so far; what is won pays it back, down to 0
        self._tokens = 0
        self._silent_until = 0
        self._rounds = 0  # with a draft
        self._rounds_since_plain = 0
        self._steps_since_probe = PROBE_GAP
        self._probe_gap = PROBE_GAP
        self._probes = 0
        self._probing = False
        self._planned = 0
        self._pays: bool | None = None  # None: not known yet

    def plan(self, limit: int) -> int:
        self._probing = False
        self._planned = 0
        limit = min(limit, self._max_draft)
        if limit < 1 or self._costs.plain_samples < PLAIN_FIRST or self._rounds_since_plain >= PLAIN_EVERY:
            return 0
        if self._pays is False and self._steps_since_probe < self._probe_gap:
            return 0
        best = self._best_length(limit)
        probe = min(limit, PROBE_LENGTH)
        if best > 0 and self._costs.measured and self._debt < self._credit:
            self._probing = best < limit and self._rounds % LONGER_EVERY == 0
            self._planned = best + self._probing
        elif self._steps_since_probe >= self._probe_gap and self._debt + self._expected_loss(probe) <= self._credit:
            self._probing, self._planned = True, probe
        return self._planned

    def goes_on(self, confidences: Sequence[float]) -> bool:
        length = len(confidences)
        if self._probing or length >= self._planned:
            return length < self._planned
        stands = self._rates.after(confidences) * self._rates.at(length)
        cost_ms = self._costs.draft_ms + self._costs.verify_ms(length + 1) - self._costs.verify_ms(length)
        return stands * self._ms_per_token(self._planned) > cost_ms

    def record(self, done: Round) -> None:
        length = len(done.confidences)
        self._costs.add(length, done.draft_ms, done.verify_ms)
        self._rates.add(done)
        self._credit += CREDIT_SHARE * done.emitted
        self._tokens += done.emitted
        if length == 0:
            self._rounds_since_plain = 0
            self._steps_since_probe += 1
            return
        self._rounds_since_plain += 1
        self._rounds += 1
        plain_ms = self._costs.verify_ms(0)
        self._debt = max(0.0, self._debt + (done.draft_ms + done.verify_ms) / plain_ms - done.emitted)
        self._learn()

    def state(self) -> str:
        if self._pays is None:
            return "measuring whether drafting pays"
        plain_ms = self._costs.verify_ms(0)
        best = self._best_length(self._max_draft)
        if not self._pays or best == 0:
            return f"off, as no draft pays (a plain step is {plain_ms:.2f} ms); probed now and then"
        return f"{best} tokens a draft, {self._ms_per_token(best):.2f} ms a token expected against {plain_ms:.2f} ms plain"

    def _learn(self) -> None:
        pays = self._best_length(self._max_draft) > 0
        if self._probing:
            self._probes += 1
            self._steps_since_probe = 0
            settled = self._probes >= FIRST_PROBES
            self._probe_gap = min(2 * self._probe_gap, LONGEST_PROBE_GAP) if settled and not pays else PROBE_GAP
        changed, self._pays = pays != self._pays, pays
        if changed and self._tokens >= self._silent_until:
            self._silent_until = self._tokens + SILENT_TOKENS
            logger.info("speculative_draft: %s", self.state())

    def _best_length(self, limit: int) -> int:
        return min(range(limit + 1), key=self._ms_per_token)

    def _ms_per_token(self, length: int) -> float:
        return (length * self._costs.draft_ms + self._costs.verify_ms(length)) / self._rates.expected_tokens(length)

    def _expected_loss(self, length: int) -> float:
        cost_ms = length * self._costs.draft_ms + self._costs.verify_ms(length)
        return max(0.0, cost_ms / self._costs.verify_ms(0) - self._rates.expected_tokens(length))
