"""What rounds cost on this machine and how often drafts stand, estimated as the text is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from moegraft.operators.speculative.statistics import Round

WINDOW = 11  # samples a median is taken of: one disturbed step moves nothing
FIRST_GUESS_DRAFT = 0.5  # a draft step and each verified token, in plain steps, before anything is measured
FIRST_GUESS_VERIFY = 0.25
FADE = 0.98  # weight of what is known at each new observation: about 50 of them count
PRIOR_RATE, PRIOR_WEIGHT = 0.6, 4.0  # what is assumed, and how many observations outweigh it
BINS = 10


class RoundCosts:
    """Medians of measured times: of a draft step, and of verifying n tokens (0: a plain step)."""

    def __init__(self) -> None:
        self._verify: dict[int, deque[float]] = {}
        self._verify_ms: dict[int, float] = {}  # the medians of those
        self._draft: deque[float] = deque(maxlen=WINDOW)

    def add(self, length: int, draft_ms: float, verify_ms: float) -> None:
        taken = self._verify.setdefault(length, deque(maxlen=WINDOW))
        taken.append(verify_ms)
        self._verify_ms[length] = median(taken)
        if length:
            self._draft.append(draft_ms / length)

    @property
    def plain_samples(self) -> int:
        return len(self._verify.get(0, ()))

    @property
    def measured(self) -> bool:
        """Whether any draft has been timed."""
        return bool(self._draft)

    @property
    def draft_ms(self) -> float:
        """One draft step."""
        return median(self._draft) if self._draft else FIRST_GUESS_DRAFT * self.verify_ms(0)

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
