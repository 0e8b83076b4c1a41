"""How many tokens to draft: always as many, or as many as are measured to pay."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Protocol

from moegraft.operators.speculative.costs import PLAIN_AGAIN, AcceptanceRates, RoundCosts
from moegraft.operators.speculative.statistics import Round

logger = logging.getLogger(__name__)

PLAIN_FIRST = 3  # plain steps that are timed before anything is drafted
PLAIN_ENOUGH = 12  # of them are known well: drafts may be compared with them for a while
PLAIN_SOON, PLAIN_EVERY = 2, 24  # rounds between plain steps before that and after, so that the comparison stays true as the text grows
CREDIT = 2.5  # plain steps that may be lost to finding out whether drafting pays
SAVED = 3.0  # and of what was won before in the same text
MOST_TIMES_EXPECTED = 2.5  # what a round that took longer counts as: something else ran
FORGIVEN = 0.01  # share of all steps that a loss may go on at: with the credit, under 3% of a text of 300 tokens and more
LONGER_EVERY = 24  # rounds between drafts of one token more than seems best, lest an early mishap settles the length
PROBE_LENGTH = 3
SILENT_TOKENS = 256  # between two remarks that drafting pays, or no longer does: at break-even it changes often
FIRST_PROBES = 4  # before a draft that seems not to pay is probed more seldom
PROBE_GAP, LONGEST_PROBE_GAP = 16, 512  # plain steps between probes
PROBE_SHARE = 0.005  # of all steps is what those probes may lose


class Schedule(Protocol):
    """Decides the length of each draft."""

    def begin(self) -> None:
        """A text begins."""
        ...

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

    def begin(self) -> None:
        return

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
    Rounds slower than plain steps, as fast as these may truly be, are debts; what is won pays them back, and a hundredth of each step
    does. With a credit full of debts nothing is drafted: so estimates that are wrong cannot cost more than that either, and a draft
    that does not pay is switched off but for probes within the credit.
    """

    def __init__(self, max_draft: int) -> None:
        self._max_draft = max_draft
        self._costs = RoundCosts()
        self._rates = AcceptanceRates()
        self._debt = 0.0  # plain steps lost so far and not forgiven
        self._tokens = 0
        self._silent_until = 0
        self._rounds = 0  # with a draft
        self._rounds_since_plain = 0
        self._plain_due = PLAIN_FIRST
        self._steps_since_probe = PROBE_GAP
        self._probe_gap = PROBE_GAP
        self._probes = 0
        self._probing = False
        self._planned = 0
        self._pays: bool | None = None  # None: not known yet
        self._said: bool | None = None  # that it pays

    def begin(self) -> None:
        if self._tokens:
            self._costs.plain.doubt(PLAIN_AGAIN)
            self._plain_due = max(self._plain_due, PLAIN_AGAIN)
            self._debt = max(0.0, self._debt)

    def plan(self, limit: int) -> int:
        self._probing = False
        self._planned = 0
        limit = min(limit, self._max_draft)
        plain_every = PLAIN_EVERY if len(self._costs.plain) >= PLAIN_ENOUGH else PLAIN_SOON
        if limit < 1 or self._plain_due > 0 or self._rounds_since_plain >= plain_every:
            return 0
        if self._pays is False and self._steps_since_probe < self._probe_gap:
            return 0
        best = self._best_length(limit)
        probe = min(limit, PROBE_LENGTH)
        if best > 0 and self._costs.measured and self._debt < CREDIT:
            self._probing = best < limit and self._rounds % LONGER_EVERY == 0
            self._planned = best + self._probing
        elif self._steps_since_probe >= self._probe_gap and self._debt + self._expected_loss(probe) <= CREDIT:
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
        most_ms = MOST_TIMES_EXPECTED * self._cost_ms(length) if self._costs.measured else math.inf
        self._costs.add(length, done.draft_ms, done.verify_ms)
        self._rates.add(done)
        if self._debt > 0:
            self._debt = max(0.0, self._debt - FORGIVEN * done.emitted)
        self._tokens += done.emitted
        self._say()
        if length == 0:
            self._rounds_since_plain = 0
            self._plain_due = max(0, self._plain_due - 1)
            self._steps_since_probe += 1
            return
        self._rounds_since_plain += 1
        self._rounds += 1
        lost = min(done.draft_ms + done.verify_ms, most_ms) / self._costs.plain.least_ms - done.emitted
        self._debt = max(-SAVED, self._debt + lost)
        self._learn(won=lost < 0)

    def state(self) -> str:
        if self._pays is None:
            return "measuring whether drafting pays"
        plain_ms = self._costs.verify_ms(0)
        best = self._best_length(self._max_draft)
        if not self._pays or best == 0:
            return f"off, as no draft pays (a plain step is {plain_ms:.2f} ms); probed now and then"
        return f"{best} tokens a draft, {self._ms_per_token(best):.2f} ms a token expected against {plain_ms:.2f} ms plain"

    def _learn(self, *, won: bool) -> None:
        pays = self._best_length(self._max_draft) > 0
        if self._probing:
            self._probes += 1
            self._steps_since_probe = 0
            self._probe_gap = self._next_gap(won=won, pays=pays)
        self._pays = pays

    def _say(self) -> None:
        """That drafting pays, or no longer does; of changes in quick succession the last."""
        if self._pays != self._said and self._tokens >= self._silent_until:
            self._said, self._silent_until = self._pays, self._tokens + SILENT_TOKENS
            logger.info("speculative_draft: %s", self.state())

    def _next_gap(self, *, won: bool, pays: bool) -> int:
        if won:
            return 0  # the next may win as well: so a change is found out in a few rounds, not in as many gaps
        if pays or self._probes < FIRST_PROBES:
            return PROBE_GAP
        loss = self._expected_loss(min(self._max_draft, PROBE_LENGTH))
        return int(min(max(loss / PROBE_SHARE, PROBE_GAP), LONGEST_PROBE_GAP))

    def _best_length(self, limit: int) -> int:
        best, least_ms, tokens, chance = 0, self._costs.verify_ms(0), 1.0, 1.0
        for length in range(1, limit + 1):
            chance *= self._rates.at(length - 1)
            tokens += chance
            ms = self._cost_ms(length) / tokens
            if ms < least_ms:
                best, least_ms = length, ms
        return best

    def _ms_per_token(self, length: int) -> float:
        return self._cost_ms(length) / self._rates.expected_tokens(length)

    def _cost_ms(self, length: int) -> float:
        return length * self._costs.draft_ms + self._costs.verify_ms(length)

    def _expected_loss(self, length: int) -> float:
        return max(0.0, self._cost_ms(length) / self._costs.verify_ms(0) - self._rates.expected_tokens(length))
