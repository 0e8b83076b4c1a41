"""The draft length: fixed, or chosen from measured costs.

A round drafts n tokens and verifies them in one pass; a plain step drafts none. The cost of rounds on this machine and the acceptance rate
are estimated while text is generated. Drafting is at break-even where a token costs as much with drafts as by plain steps.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul
from statistics import median

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Round:
    """One draft with its verification; a plain step is a round that drafts nothing.

    Attributes:
        confidences: q of each draft token.
        compared: number of draft tokens that were compared with the full model's choice: all up to the first rejected one.
        accepted: number of compared tokens that were accepted.
        generated: number of tokens by which the text grew; of several texts, their mean.
        draft_ms, verify_ms: 0 where the round is a part of one of several texts.
        prepared: whether the next such round takes less time, as a program was prepared for a step of this one, or its pass computed
            prompts as well.
    """

    confidences: Sequence[float]
    compared: int
    accepted: int
    generated: float
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    prepared: bool = False


@dataclass(slots=True)
class Statistics:
    """Sums over all rounds of one model."""

    rounds: int = 0  # those with a draft
    drafted: int = 0
    round_tokens: int = 0
    plain_tokens: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    plain_ms: float = 0.0
    compared_at: list[int] = field(default_factory=list)  # by position in the draft
    accepted_at: list[int] = field(default_factory=list)
    agreeing_tokens: float = 0.0  # tokens of lossy rounds that the lossless rule would have accepted, in expectation
    lossy_tokens: int = 0
    negative_log_likelihood: float = 0.0  # of those tokens, under the full model

    def add(self, done: Round) -> None:
        if not done.confidences:
            self.plain_tokens += round(done.generated)
            self.plain_ms += done.draft_ms + done.verify_ms
            return
        self.rounds += 1
        self.drafted += len(done.confidences)
        self.round_tokens += round(done.generated)
        self.draft_ms += done.draft_ms
        self.verify_ms += done.verify_ms
        while len(self.compared_at) < done.compared:
            self.compared_at.append(0)
            self.accepted_at.append(0)
        for position in range(done.compared):
            self.compared_at[position] += 1
            self.accepted_at[position] += position < done.accepted

    def add_lossy(self, log_probability: float, agreement: float) -> None:
        """Count one token of a lossy round: its log probability under the full model, and the chance that lossless rounds accept it."""
        self.lossy_tokens += 1
        self.agreeing_tokens += agreement
        self.negative_log_likelihood -= log_probability

    @property
    def tokens_per_round(self) -> float | None:
        return self.round_tokens / self.rounds if self.rounds else None

    @property
    def acceptance(self) -> tuple[float, ...]:
        """The acceptance rate by position in the draft, of tokens that follow only accepted ones."""
        return tuple(accepted / compared for accepted, compared in zip(self.accepted_at, self.compared_at, strict=True))

    def as_mapping(self) -> Mapping[str, object]:
        """Return every figure by name, for programs that show them.

        `agreement` is the share of tokens of lossy rounds that the lossless rule would have accepted, and `perplexity` the perplexity of
        these tokens under the full model; both are None without lossy rounds.
        """
        tokens = self.lossy_tokens
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
            "agreement": self.agreeing_tokens / tokens if tokens else None,
            "perplexity": math.exp(self.negative_log_likelihood / tokens) if tokens else None,
        }

    def line(self) -> str:
        """Return one line for people: `2.31 tokens per round, accepted by position 0.72 0.64 0.60, ...`."""
        if not self.rounds:
            return "no draft yet"
        shares = " ".join(f"{share:.2f}" for share in self.acceptance)
        text = f"{self.tokens_per_round:.2f} tokens per round, accepted by position {shares}, {self.plain_tokens} tokens without a draft"
        if self.lossy_tokens:
            found = self.as_mapping()
            text += (
                f"; {found['agreement']:.1%} of tokens as in lossless decoding, perplexity {found['perplexity']:.2f} under the full model"
            )
        return text


class DraftSchedule(ABC):
    """The choice of the length of each draft."""

    @abstractmethod
    def plan(self, limit: int) -> int:
        """Return the largest number of tokens to draft now, up to `limit`; 0 for a plain step."""

    def plain_steps(self) -> int:
        """Return how many plain steps follow, at least, where the latest `plan` drafted nothing."""
        return 1

    @abstractmethod
    def state(self) -> str:
        """Describe the schedule in a few words for users."""

    def continues(self, confidences: Sequence[float]) -> bool:
        """Return whether to draft one more token after those with these probabilities q."""
        return True

    def begin(self) -> None:  # noqa: B027 # optional
        """Prepare for a new text."""

    def record(self, done: Round) -> None:  # noqa: B027 # optional
        """Learn from a round."""


class FixedSchedule(DraftSchedule):
    """A schedule that always drafts `max_draft` tokens."""

    def __init__(self, max_draft: int) -> None:
        self._max_draft = max_draft

    def plan(self, limit: int) -> int:
        return min(limit, self._max_draft)

    def state(self) -> str:
        return f"{self._max_draft} tokens per draft"


PLAIN_FIRST = 3  # plain steps that are timed before anything is drafted
PLAIN_ENOUGH = 12  # plain steps after which their time is known well enough to compare drafts with it
PLAIN_SOON, PLAIN_EVERY = 2, 24  # rounds between plain steps, before PLAIN_ENOUGH and after: their time changes as the text grows
MAX_LOST_STEPS = 2.5  # plain steps' worth of time that measuring drafts may lose
WARY_STEPS = 2.0  # plain steps' worth of lost time, above which each token of a draft must pay for itself
# Plain steps' worth of saved time that may be lost again, in the same text and in the next one. With fewer, the drafts that gain most, long
# ones, are soon off, as each is a gain or a loss of several steps; with more, those of passages that do not pay go on for too long.
MAX_SAVED_STEPS, MAX_KEPT_STEPS = 6.0, 3.0
MAX_TIMES_EXPECTED = 2.5  # a longer round counts as this many times the expected time: another process disturbed it
LOSS_ALLOWANCE = 0.01  # share of all steps that may be lost in the long run: with MAX_LOST_STEPS, under 3% of a text of 300 tokens
LONGER_EVERY = 24  # rounds between drafts one token longer than the best length, so that early rejections do not fix the length
PROBE_LENGTH = 3
FIRST_PROBES = 4  # before drafts that seem not to pay are probed less often
PROBE_GAP, MAX_PROBE_GAP = 16, 512  # plain steps between probes
PROBE_SHARE = 0.005  # share of all steps that the later probes may lose
QUIET_TOKENS = 256  # tokens between two log messages on whether drafting pays: at break-even the answer changes often


class MarginalSchedule(DraftSchedule):
    """A schedule that drafts more tokens only while their expected gain exceeds their measured cost.

    A draft of n tokens yields `1 + a_1 + a_1 a_2 + ...` tokens (a: acceptance rates) for `n * draft + verify(n)` ms; the length with the
    fewest ms per token is planned. A draft of n tokens goes on while one more, or several up to the planned length, gain more than they
    cost: `P(accepted) * ms per token`, summed over m tokens, against `m * draft + verify(n + m) - verify(n)`. Several may gain where one
    does not, as the later tokens of a verification need few experts that the earlier ones have not read.

    The schedule counts the time that rounds lose against plain steps at their least likely mean. Rounds that save time, and an allowance
    of a hundredth of each step, reduce the count. At its maximum nothing is drafted, which bounds the cost of wrong estimates: a draft
    that does not pay is switched off except for probes. Rounds that prepared a program count as expected, and are no estimate of the costs.
    """

    def __init__(self, max_draft: int) -> None:
        self._max_draft = max_draft
        self._costs = RoundCosts()
        self._rates = AcceptanceRates()
        self._lost_steps = 0.0  # plain steps' worth of time lost so far, less the allowance; negative for time saved
        self._tokens = 0.0
        self._quiet_until = 0.0
        self._rounds = 0  # those with a draft
        self._rounds_since_plain = 0
        self._plain_due = PLAIN_FIRST
        self._steps_since_probe = PROBE_GAP
        self._probe_gap = PROBE_GAP
        self._probes = 0
        self._probing = False
        self._planned = 0
        self._plain_steps = 0  # left before drafts are considered again
        self._pays: bool | None = None  # None while unknown
        self._logged_pays: bool | None = None

    def begin(self) -> None:
        self._plain_steps = 0
        if self._tokens:
            self._costs.plain.expect_change(CHANGED_TEXT_SAMPLES)
            self._plain_due = max(self._plain_due, CHANGED_TEXT_SAMPLES)
            self._lost_steps = max(-MAX_KEPT_STEPS, self._lost_steps)

    def plan(self, limit: int) -> int:
        self._probing = False
        self._planned = 0
        if self._plain_steps > 0:  # what is waited for comes by plain steps alone
            return 0
        limit = min(limit, self._max_draft)
        plain_every = PLAIN_EVERY if len(self._costs.plain) >= PLAIN_ENOUGH else PLAIN_SOON
        waits = [self._plain_due, int(self._rounds_since_plain >= plain_every), _steps_to_regain(self._lost_steps - MAX_LOST_STEPS)]
        if self._pays is False:
            waits.append(self._probe_gap - self._steps_since_probe)
        self._plain_steps = max(waits)
        if limit < 1 or self._plain_steps > 0:
            return 0
        best = self._best_length(limit)
        probe = min(limit, PROBE_LENGTH)
        if best > 0 and self._costs.measured:
            self._probing = best < limit and self._rounds % LONGER_EVERY == 0
            self._planned = best + self._probing
        elif self._steps_since_probe >= self._probe_gap:
            wait = _steps_to_regain(self._lost_steps + self._expected_loss(probe) - MAX_LOST_STEPS)
            self._plain_steps = min(wait, PROBE_GAP)  # after as many, plain steps may take another time
            if not wait:
                self._probing, self._planned = True, probe
        return self._planned

    def plain_steps(self) -> int:
        return max(self._plain_steps, 1)

    def continues(self, confidences: Sequence[float]) -> bool:
        length = len(confidences)
        if self._probing or length >= self._planned:
            return length < self._planned
        ms_per_token, now_ms = self._ms_per_token(self._planned), self._round_ms(length)
        chance, tokens = self._rates.all_accepted(confidences), 0.0
        for longer in range(length + 1, self._planned + 1):
            chance *= self._rates.at(longer - 1)
            tokens += chance
            if tokens * ms_per_token > self._round_ms(longer) - now_ms:
                return True
            if self._lost_steps > WARY_STEPS:
                return False
        return False

    def record(self, done: Round) -> None:
        length = len(done.confidences)
        max_ms = math.inf
        if length and (done.prepared or self._costs.measured):  # a program is prepared once, for all texts
            max_ms = self._round_ms(length) * (1.0 if done.prepared else MAX_TIMES_EXPECTED)
        if not done.prepared:
            self._costs.add(length, done.draft_ms, done.verify_ms)
        self._rates.add(done)
        if self._lost_steps > 0:
            self._lost_steps = max(0.0, self._lost_steps - LOSS_ALLOWANCE * done.generated)
        self._tokens += done.generated
        if self._pays != self._logged_pays and self._tokens >= self._quiet_until:
            self._logged_pays, self._quiet_until = self._pays, self._tokens + QUIET_TOKENS
            logger.info("speculative_draft: %s", self.state())
        if length == 0:
            self._plain_steps = max(0, self._plain_steps - 1)
            if not done.prepared:
                self._rounds_since_plain = 0
                self._plain_due = max(0, self._plain_due - 1)
            self._steps_since_probe += 1
            return
        self._rounds_since_plain += 1
        self._rounds += 1
        lost = min(done.draft_ms + done.verify_ms, max_ms) / self._costs.plain.least_ms - done.generated
        self._lost_steps = max(-MAX_SAVED_STEPS, self._lost_steps + lost)
        if self._costs.measured:
            self._pays = self._best_length(self._max_draft) > 0
        if self._probing and done.prepared:
            self._steps_since_probe = self._probe_gap = 0  # the next round is timed, as soon as this one's loss allows
        elif self._probing:
            self._probes += 1
            self._steps_since_probe = 0
            self._probe_gap = PROBE_GAP
            if lost < 0:
                self._probe_gap = 0  # the next round may gain as well, so probe at once
            elif not self._pays and self._probes >= FIRST_PROBES:
                loss = self._expected_loss(min(self._max_draft, PROBE_LENGTH))
                self._probe_gap = int(min(max(loss / PROBE_SHARE, PROBE_GAP), MAX_PROBE_GAP))

    def state(self) -> str:
        if self._pays is None:
            return "measuring whether drafting pays"
        plain_ms = self._costs.verify_ms(0)
        best = self._best_length(self._max_draft)
        if not self._pays or best == 0:
            return f"off, as no draft pays (a plain step takes {plain_ms:.2f} ms); probed at intervals"
        return f"{best} tokens per draft, {self._ms_per_token(best):.2f} ms per token expected against {plain_ms:.2f} ms plain"

    def _best_length(self, limit: int) -> int:
        """Return the draft length with the fewest ms per token; 0 where no length is above break-even."""
        best, least_ms, tokens, chance = 0, self._costs.verify_ms(0), 1.0, 1.0
        for length in range(1, limit + 1):
            chance *= self._rates.at(length - 1)
            tokens += chance
            ms = self._round_ms(length) / tokens
            if ms < least_ms:
                best, least_ms = length, ms
        return best

    def _ms_per_token(self, length: int) -> float:
        return self._round_ms(length) / self._rates.expected_tokens(length)

    def _round_ms(self, length: int) -> float:
        return length * self._costs.draft_ms + self._costs.verify_ms(length)

    def _expected_loss(self, length: int) -> float:
        """Return the expected loss of a round, in plain steps."""
        return max(0.0, self._round_ms(length) / self._costs.verify_ms(0) - self._rates.expected_tokens(length))


def _steps_to_regain(lost: float) -> int:
    """Return the steps whose allowance makes up for lost steps."""
    return math.ceil(lost / LOSS_ALLOWANCE) if lost > 0 else 0


SAMPLES = 11  # latest times kept of a draft step and of each length of a verification
FIRST_GUESS_DRAFT = 0.5  # time of a draft step and of each verified token before any measurement, in plain steps
FIRST_GUESS_VERIFY = 0.25


class RoundCosts:
    """Measured times of a draft step and of the verification of n tokens (n = 0 is a plain step)."""

    def __init__(self) -> None:
        self.plain = PlainSteps()
        self._verify: dict[int, deque[float]] = {}
        self._verify_ms: dict[int, float] = {}  # the middle means of `_verify`
        self._draft: deque[float] = deque(maxlen=SAMPLES)
        self._draft_ms = 0.0

    def add(self, length: int, draft_ms: float, verify_ms: float) -> None:
        if not length:
            self.plain.add(verify_ms)
            return
        samples = self._verify.setdefault(length, deque(maxlen=SAMPLES))
        samples.append(verify_ms)
        self._verify_ms[length] = middle_mean(samples)
        self._draft.append(draft_ms / length)
        self._draft_ms = middle_mean(self._draft)

    @property
    def measured(self) -> bool:
        """Whether any draft has been timed."""
        return bool(self._draft)

    @property
    def draft_ms(self) -> float:
        """The ms of one draft step."""
        return self._draft_ms if self._draft else FIRST_GUESS_DRAFT * self.verify_ms(0)

    def verify_ms(self, length: int) -> float:
        """Return the ms to verify `length` tokens: measured, or on the line through the nearest measured lengths."""
        if not length:
            return self.plain.mean_ms
        if length in self._verify_ms:
            return self._verify_ms[length]
        if not self._verify_ms:
            return self.plain.mean_ms * (1 + FIRST_GUESS_VERIFY * length)
        ms = {0: self.plain.mean_ms, **self._verify_ms}
        known = sorted(ms)
        above = next((index for index, other in enumerate(known) if other > length), len(known) - 1)
        low, high = known[max(above, 1) - 1], known[max(above, 1)]
        slope = (ms[high] - ms[low]) / (high - low)
        return ms[low] + max(0.0, slope) * (length - low)


PLAIN_SAMPLES = 48  # latest plain steps that are kept
MAX_TIMES_MEDIAN = 2.5  # a longer plain step counts as this many medians: another process disturbed it
CHANGED_TEXT_SAMPLES = 3  # plain steps at the start of each text after the first
CHANGE_SAMPLES, CHANGE_SHARE = 4, 0.35  # when this many plain steps in a row differ by this share, earlier ones no longer count


class PlainSteps:
    """The time of a plain step."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=PLAIN_SAMPLES)
        self._estimate: tuple[float, float] | None = None  # of the samples; most steps need none
        self._until_decided = 0  # steps until a new text's steps are compared with the earlier ones

    def __len__(self) -> int:
        return len(self._samples)

    def expect_change(self, steps: int) -> None:
        """Expect other times from a new text: the next `steps` steps decide whether earlier ones still count."""
        self._until_decided = steps

    def add(self, ms: float) -> None:
        self._samples.append(ms)
        self._until_decided -= 1
        latest = CHANGED_TEXT_SAMPLES if self._until_decided == 0 else CHANGE_SAMPLES
        if self._until_decided <= 0 and self._changed(latest):
            self._samples = deque(list(self._samples)[-latest:], maxlen=PLAIN_SAMPLES)
        self._estimate = None

    @property
    def mean_ms(self) -> float:
        """The mean, slow steps included."""
        return self._estimated()[0]

    @property
    def least_ms(self) -> float:
        """A likely lower bound of the true mean: the mean less its standard error."""
        return self._estimated()[1]

    def _estimated(self) -> tuple[float, float]:
        if self._estimate is None:
            max_ms = MAX_TIMES_MEDIAN * median(self._samples)
            mean_ms, deviation_ms = _mean_and_deviation([min(ms, max_ms) for ms in self._samples])
            self._estimate = mean_ms, mean_ms - deviation_ms / math.sqrt(len(self._samples))
        return self._estimate

    def _changed(self, latest: int) -> bool:
        samples = list(self._samples)
        before = samples[:-latest]
        if len(before) < CHANGE_SAMPLES - 1:
            return False
        mean_ms = sum(before) / len(before)
        apart_ms = abs(median(samples[-latest:]) - mean_ms)
        # Nearly all steps are near the mean, and the deviation takes most of the time of a comparison.
        return apart_ms > CHANGE_SHARE * mean_ms and apart_ms > 3 * _mean_and_deviation(before)[1] / math.sqrt(latest)


def _mean_and_deviation(samples: Sequence[float]) -> tuple[float, float]:
    mean = sum(samples) / len(samples)
    squares = sum(map(mul, samples, samples)) - mean * sum(samples)  # a quarter of the time of squared differences, at each step
    return mean, math.sqrt(max(0.0, squares) / max(len(samples) - 1, 1))


def middle_mean(samples: Iterable[float]) -> float:
    """Return the mean of the middle half: a single disturbed step does not change it, and two common times both count."""
    ordered = sorted(samples)
    cut = len(ordered) // 4 if len(ordered) > 3 else (len(ordered) - 1) // 2
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / len(middle)


DECAY = 0.98  # factor on earlier observations at each new one, so that about 50 of them count
PRIOR_RATE, PRIOR_WEIGHT = 0.6, 4.0  # the assumed acceptance rate, and how many observations it counts as
BINS = 10  # bins of confidence


class AcceptanceRates:
    """The chance that a draft token is accepted after accepted tokens, by its position and by the draft's confidence in it."""

    def __init__(self) -> None:
        self._positions: list[list[float]] = []  # [accepted, compared], decayed
        self._bins = [[0.0, 0.0] for _ in range(BINS)]

    def add(self, done: Round) -> None:
        while len(self._positions) < done.compared:
            self._positions.append([0.0, 0.0])
        for position in range(done.compared):
            for counts in (self._positions[position], self._bin(done.confidences[position])):
                counts[0] = DECAY * counts[0] + (position < done.accepted)
                counts[1] = DECAY * counts[1] + 1

    def at(self, position: int) -> float:
        """Return the rate of a token not drafted yet, by position alone; a rare position tends to the rate of the one before."""
        rate = PRIOR_RATE
        for accepted, compared in self._positions[: position + 1]:
            rate = (accepted + PRIOR_WEIGHT * rate) / (compared + PRIOR_WEIGHT)
        return rate

    def all_accepted(self, confidences: Sequence[float]) -> float:
        """Return the chance that all tokens with these confidences are accepted."""
        chance = 1.0
        for position, confidence in enumerate(confidences):
            accepted, compared = self._bin(confidence)
            chance *= (accepted + PRIOR_WEIGHT * self.at(position)) / (compared + PRIOR_WEIGHT)
        return chance

    def expected_tokens(self, length: int) -> float:
        """Return the expected tokens of a round with a draft of `length`, the full model's own token included."""
        total = chance = 1.0
        for position in range(length):
            chance *= self.at(position)
            total += chance
        return total

    def _bin(self, confidence: float) -> list[float]:
        return self._bins[min(int(confidence * BINS), BINS - 1)]
