"""What rounds cost on this machine and how often drafts stand, estimated as the text is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import median

from moegraft.operators.speculative.statistics import Round

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
