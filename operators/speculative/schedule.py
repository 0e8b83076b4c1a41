"""How many tokens to draft: always as many, or as many as are measured to pay.

What rounds cost on this machine and how often drafts stand, estimated as the text is written.

What speculation did and what it cost, in numbers that only grow.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import median
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Round:
    """One draft with its verification; a plain step is a round that drafts nothing.

    Attributes:
        confidences: q of each drafted token.
        judged: drafted tokens that were compared with the full model's choice; all up to the first that was not accepted.
        accepted: how many of those stood.
        emitted: tokens the text grew by.
    """

    confidences: Sequence[float]
    judged: int
    accepted: int
    emitted: int
    draft_ms: float
    verify_ms: float


@dataclass(slots=True)
class Statistics:
    """Sums over all rounds of one model."""

    rounds: int = 0  # with a draft
    drafted: int = 0
    round_tokens: int = 0
    plain_tokens: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    plain_ms: float = 0.0
    judged_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    agreeing_tokens: float = 0.0  # tokens of lossy rounds that the lossless rule would have let stand, in expectation
    lossy_tokens: int = 0
    negative_log_likelihood: float = 0.0  # of those tokens, under the full model

    def add(self, done: Round) -> None:
        if not done.confidences:
            self.plain_tokens += done.emitted
            self.plain_ms += done.draft_ms + done.verify_ms
            return
        self.rounds += 1
        self.drafted += len(done.confidences)
        self.round_tokens += done.emitted
        self.draft_ms += done.draft_ms
        self.verify_ms += done.verify_ms
        while len(self.judged_at) < done.judged:
            self.judged_at.append(0)
            self.accepted_at.append(0)
        for position in range(done.judged):
            self.judged_at[position] += 1
            self.accepted_at[position] += position < done.accepted

    def add_lossy(self, log_probability: float, agreement: float) -> None:
        """Counts one token of a lossy round: its log probability under the full model, and whether it would have stood."""
        self.lossy_tokens += 1
        self.agreeing_tokens += agreement
        self.negative_log_likelihood -= log_probability

    @property
    def tokens_per_round(self) -> float | None:
        return self.round_tokens / self.rounds if self.rounds else None

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By position in the draft: the share of tokens that stood where all before them had."""
        return tuple(accepted / judged for accepted, judged in zip(self.accepted_at, self.judged_at, strict=True))

    @property
    def agreement(self) -> float | None:
        """The share of tokens of lossy rounds that the lossless rule would have let stand."""
        return self.agreeing_tokens / self.lossy_tokens if self.lossy_tokens else None

    @property
    def perplexity(self) -> float | None:
        """Of the tokens of lossy rounds, under the full model."""
        return math.exp(self.negative_log_likelihood / self.lossy_tokens) if self.lossy_tokens else None

    def as_mapping(self) -> Mapping[str, object]:
        """Every figure by name, for programs that show them."""
        return {
            "rounds": self.rounds,
            "tokens_per_round": self.tokens_per_round,
            "acceptance_by_position": self.acceptance,
            "drafted_tokens": self.drafted,
            "accepted_tokens": sum(self.accepted_at),
            "round_tokens": self.round_tokens,
            "plain_tokens": self.plain_tokens,
            "draft_ms": self.draft_ms,
            "verify_ms": self.verify_ms,
            "plain_ms": self.plain_ms,
            "agreement": self.agreement,
            "perplexity": self.perplexity,
        }

    def line(self) -> str:
        """`2.31 tokens a round, accepted 0.72 0.64 0.60, ...`; one line for people."""
        if not self.rounds:
            return "no draft yet"
        shares = " ".join(f"{share:.2f}" for share in self.acceptance)
        text = f"{self.tokens_per_round:.2f} tokens a round, accepted by position {shares}, {self.plain_tokens} tokens without a draft"
        if self.agreement is not None and self.perplexity is not None:
            text += f"; {self.agreement:.1%} as lossless decoding has it, perplexity {self.perplexity:.2f} under the full model"
        return text


WINDOW = 11  # samples of a draft step, and of each length of a verification
PLAIN_WINDOW = 48  # of plain steps, which all is compared with
MOST_TIMES_MEDIAN = 2.5  # what a step that took longer counts as: something else ran
PLAIN_AGAIN = 3  # of them before a text after the first
CHANGE_SAMPLES, CHANGE_SHARE = 4, 0.35  # plain steps in a row that are off by this share are of another time: what was before is forgotten
FIRST_GUESS_DRAFT = 0.5  # a draft step and each verified token, in plain steps, before anything is measured
FIRST_GUESS_VERIFY = 0.25
FADE = 0.98  # weight of what is known at each new observation: about 50 of them count
PRIOR_RATE, PRIOR_WEIGHT = 0.6, 4.0  # what is assumed, and how many observations outweigh it
BINS = 10


class PlainSteps:
    """What a plain step takes.

    Attributes:
        mean_ms: a text pays the slow ones as well.
        least_ms: what the mean may truly be: less its standard error.
    """

    def __init__(self) -> None:
        self.mean_ms = 0.0
        self.least_ms = 0.0
        self._taken: deque[float] = deque(maxlen=PLAIN_WINDOW)
        self._doubted = 0  # steps until it shows whether a new text's are like those before

    def __len__(self) -> int:
        return len(self._taken)

    def doubt(self, steps: int) -> None:
        """A new text begins, which may be of another length: the next `steps` decide whether what is known still holds."""
        self._doubted = steps

    def add(self, ms: float) -> None:
        self._taken.append(ms)
        self._doubted -= 1
        kept = PLAIN_AGAIN if self._doubted == 0 else CHANGE_SAMPLES
        if self._doubted <= 0 and self._changed(kept):
            self._taken = deque(list(self._taken)[-kept:], maxlen=PLAIN_WINDOW)
        most = MOST_TIMES_MEDIAN * median(self._taken)
        self.mean_ms, spread_ms = _mean_and_spread([min(ms, most) for ms in self._taken])
        self.least_ms = self.mean_ms - spread_ms / sqrt(len(self._taken))

    def _changed(self, latest: int) -> bool:
        samples = list(self._taken)
        before = samples[:-latest]
        if len(before) < CHANGE_SAMPLES - 1:
            return False
        mean_ms, spread_ms = _mean_and_spread(before)
        return abs(median(samples[-latest:]) - mean_ms) > max(CHANGE_SHARE * mean_ms, 3 * spread_ms / sqrt(latest))


def _mean_and_spread(samples: Sequence[float]) -> tuple[float, float]:
    """And the standard deviation."""
    mean = sum(samples) / len(samples)
    return mean, sqrt(sum((sample - mean) ** 2 for sample in samples) / max(len(samples) - 1, 1))


def middle_mean(samples: Iterable[float]) -> float:
    """The mean of the middle half: one disturbed step moves nothing, and of two usual times both count."""
    ordered = sorted(samples)
    cut = len(ordered) // 4 if len(ordered) > 3 else (len(ordered) - 1) // 2
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / len(middle)


class RoundCosts:
    """Measured times of a draft step, and of verifying n tokens (0: a plain step)."""

    def __init__(self) -> None:
        self.plain = PlainSteps()
        self._verify: dict[int, deque[float]] = {}
        self._verify_ms: dict[int, float] = {}  # the middles of those
        self._draft: deque[float] = deque(maxlen=WINDOW)
        self._draft_ms = 0.0

    def add(self, length: int, draft_ms: float, verify_ms: float) -> None:
        if not length:
            self.plain.add(verify_ms)
            self._verify_ms[0] = self.plain.mean_ms
            return
        taken = self._verify.setdefault(length, deque(maxlen=WINDOW))
        taken.append(verify_ms)
        self._verify_ms[length] = middle_mean(taken)
        self._draft.append(draft_ms / length)
        self._draft_ms = middle_mean(self._draft)

    @property
    def measured(self) -> bool:
        """Whether any draft has been timed."""
        return bool(self._draft)

    @property
    def draft_ms(self) -> float:
        """One draft step."""
        return self._draft_ms if self._draft else FIRST_GUESS_DRAFT * self.verify_ms(0)

    def verify_ms(self, length: int) -> float:
        """Verifying `length` tokens; what was not measured lies on the line through the nearest lengths that were."""
        if length in self._verify_ms:
            return self._verify_ms[length]
        known = sorted(self._verify_ms)
        if len(known) == 1:
            return self._verify_ms[known[0]] * (1 + FIRST_GUESS_VERIFY * length)
        above = next((index for index, other in enumerate(known) if other > length), len(known) - 1)
        low, high = known[max(above, 1) - 1], known[max(above, 1)]
        slope = (self.verify_ms(high) - self.verify_ms(low)) / (high - low)
        return self.verify_ms(low) + max(0.0, slope) * (length - low)


class AcceptanceRates:
    """The chance that a drafted token stands when all before it do: by position, and by the draft's confidence in it."""

    def __init__(self) -> None:
        self._positions: list[list[float]] = []  # [accepted, judged], faded
        self._bins = [[0.0, 0.0] for _ in range(BINS)]

    def add(self, done: Round) -> None:
        while len(self._positions) < done.judged:
            self._positions.append([0.0, 0.0])
        for position in range(done.judged):
            stood = position < done.accepted
            for counts in (self._positions[position], self._bins[_bin(done.confidences[position])]):
                counts[0] = FADE * counts[0] + stood
                counts[1] = FADE * counts[1] + 1

    def at(self, position: int) -> float:
        """By position alone, for a token that is not drafted yet; a position seen seldom is taken to be like the one before."""
        rate = PRIOR_RATE
        for accepted, judged in self._positions[: position + 1]:
            rate = (accepted + PRIOR_WEIGHT * rate) / (judged + PRIOR_WEIGHT)
        return rate

    def after(self, confidences: Sequence[float]) -> float:
        """The chance that all of these tokens stand."""
        chance = 1.0
        for position, confidence in enumerate(confidences):
            accepted, judged = self._bins[_bin(confidence)]
            chance *= (accepted + PRIOR_WEIGHT * self.at(position)) / (judged + PRIOR_WEIGHT)
        return chance

    def expected_tokens(self, length: int) -> float:
        """Tokens that a round with a draft of `length` brings, its own token included."""
        total = chance = 1.0
        for position in range(length):
            chance *= self.at(position)
            total += chance
        return total


def _bin(confidence: float) -> int:
    return min(int(confidence * BINS), BINS - 1)


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
