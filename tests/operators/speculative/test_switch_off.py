"""Long texts on machines and models where measurements hardly show whether drafting pays: if it does not, it costs under three percent."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from moegraft.operators.schedule import MarginalSchedule, PlainSteps, Round

PLAIN_MS = 10.0
TOKENS = 1500
SEEDS = range(6)
Noise = Callable[[random.Random], float]


def steady(_: random.Random) -> float:
    return 1.0


def scattered(chance: random.Random) -> float:
    return math.exp(chance.gauss(-0.045, 0.3))


def disturbed(chance: random.Random) -> float:
    """Noise of other processes that run occasionally."""
    return 4.0 if chance.random() < 0.05 else 1.0


def two_modes(slow_share: float, fast: float, slow: float) -> Noise:
    return lambda chance: slow if chance.random() < slow_share else fast


def changing(every: int, slow: float) -> Callable[[int], float]:
    """Noise that slows about every other stretch of tokens by the factor `slow`."""
    return lambda token: slow if random.Random(token // every).random() < 0.5 else 1.0


@dataclass(frozen=True)
class Case:
    """A machine and a model.

    Attributes:
        draft_ms, token_ms: of a drafted token, and what it adds to verification; `any_ms`: what a verification adds to a plain step.
        accepted: chance that a drafted token accepted, by the tokens written.
        pace: how long everything takes at a token.
        text: tokens of each text; None: all are one.
    """

    draft_ms: float
    token_ms: float
    accepted: Callable[[int], float]
    any_ms: float = 0.0
    plain_noise: Noise = steady
    draft_noise: Noise = steady
    verify_noise: Noise = steady
    pace: Callable[[int], float] = lambda token: 1.0
    text: int | None = None

    def noisy(self, noise: Noise) -> Case:
        return replace(self, plain_noise=noise, draft_noise=noise, verify_noise=noise)

    def over_plain(self, schedule: MarginalSchedule, seed: int, tokens: int = TOKENS) -> float:
        """Return the time of a text over that of plain decoding; noise counts by its mean, which excludes chance."""
        chance, usual = random.Random(seed), {noise: _mean(noise) for noise in (self.plain_noise, self.draft_noise, self.verify_noise)}
        written, spent, plain = 0, 0.0, 0.0
        texts, ahead = -1, 0
        while written < tokens:
            if self.text is not None and written // self.text != texts:
                texts, ahead = written // self.text, 0
                schedule.begin()
            confidences = [] if ahead else self._draft(schedule, chance)
            ahead = 0 if confidences else (ahead or schedule.plain_steps()) - 1
            length, pace = len(confidences), self.pace(written)
            accepted_tokens = 0
            while accepted_tokens < length and chance.random() < min(
                1.0, self.accepted(written) * (1.2 if confidences[accepted_tokens] > 0.5 else 0.8)
            ):
                accepted_tokens += 1
            noise = self.verify_noise if length else self.plain_noise
            verify_ms = pace * (PLAIN_MS + (self.any_ms + length * self.token_ms if length else 0.0))
            draft_ms = pace * length * self.draft_ms
            compared = min(accepted_tokens + 1, length)
            schedule.record(
                Round(
                    confidences,
                    compared,
                    accepted_tokens,
                    accepted_tokens + 1,
                    draft_ms * self.draft_noise(chance),
                    verify_ms * noise(chance),
                )
            )
            spent += draft_ms * usual[self.draft_noise] + verify_ms * usual[noise]
            plain += sum(PLAIN_MS * self.pace(token) for token in range(written, written + accepted_tokens + 1)) * usual[self.plain_noise]
            written += accepted_tokens + 1
        return spent / plain

    @staticmethod
    def _draft(schedule: MarginalSchedule, chance: random.Random) -> list[float]:
        planned, confidences = schedule.plan(TOKENS), []
        while len(confidences) < planned:
            confidences.append(0.95 if chance.random() < 0.5 else 0.35)
            if not schedule.continues(confidences):
                break
        return confidences


def _mean(noise: Noise) -> float:
    chance = random.Random(0)
    return 1.0 if noise is steady else sum(noise(chance) for _ in range(5000)) / 5000


def always(share: float) -> Callable[[int], float]:
    return lambda token: share


LOSING = Case(4, 4, always(0.6))  # at best 12% slower than plain decoding
HOPELESS = Case(5, 8, always(0.5))
CANNOT_PAY = {
    "hopeless": HOPELESS,
    "hopeless, scattered": HOPELESS.noisy(scattered),
    "break-even": Case(5, 5, always(0.83)),
    "break-even, scattered": Case(5, 5, always(0.83)).noisy(scattered),
    "losing, scattered": LOSING.noisy(scattered),
    "losing, disturbed": LOSING.noisy(disturbed),
    "plain steps of two kinds, mostly slow": replace(Case(6, 6, always(0.75)), plain_noise=two_modes(0.6, 0.7, 1.6)),
    "plain steps of two kinds, mostly fast": replace(Case(6, 6, always(0.75)), plain_noise=two_modes(0.45, 0.7, 1.6)),
    "verifications of two kinds": replace(Case(1, 1, always(0.6)), verify_noise=two_modes(0.4, 1.0, 3.0)),
    "draft steps of two kinds": replace(Case(1, 1, always(0.6)), draft_noise=two_modes(0.4, 1.0, 20.0)),
    "slow first steps": replace(LOSING, pace=lambda token: 3.0 if token < 4 else 1.0),
    "a slow beginning": replace(LOSING, pace=lambda token: 3.0 if token < 20 else 1.0),
    "steps that grow with the text": replace(LOSING, pace=lambda token: 1 + token / 1000),
    "long and short texts alternating": replace(LOSING, pace=lambda token: 3.0 if token // 100 % 2 else 1.0, text=100),
    "a machine that others use, briefly": replace(LOSING, pace=changing(30, 2.0)),
    "a machine that others use, for long": replace(LOSING, pace=changing(100, 2.0)),
    "drafts that stand in some passages": Case(2, 3, lambda token: 0.9 if token // 50 % 2 == 0 else 0.1),
    "drafts that stand in few passages": Case(2, 3, lambda token: 0.9 if token // 30 % 6 == 0 else 0.1),
    "drafts that stop standing": Case(2, 3, lambda token: 0.9 if token < 700 else 0.15),
    "cheap drafts that never stand": Case(1, 1, always(0.0)),
    "verifications that bring experts": Case(1, 1, always(0.45), any_ms=8),
}


@pytest.mark.parametrize("name", CANNOT_PAY)
def test_texts_are_at_most_three_percent_slower_than_plain_decoding(name: str) -> None:
    for seed in SEEDS:
        assert CANNOT_PAY[name].over_plain(MarginalSchedule(max_draft=5), seed) <= 1.03


@pytest.mark.parametrize(
    ("case", "most"),
    [
        (Case(1, 1, always(0.85)), 0.55),
        (Case(1.5, 1.5, always(0.85)).noisy(scattered), 0.72),
        (replace(Case(1.5, 1.5, always(0.85)), pace=changing(100, 2.0)), 0.85),
        (replace(Case(1.5, 1.5, always(0.8)), text=100), 0.75),  # short texts, each of which is compared again
        (Case(2, 3, lambda token: 0.9 if token // 200 % 2 == 0 else 0.1), 0.95),
    ],
    ids=["steady", "scattered", "a changing machine", "short texts", "long passages"],
)
def test_drafts_that_pay_are_used(case: Case, most: float) -> None:
    for seed in SEEDS:
        assert case.over_plain(MarginalSchedule(max_draft=5), seed) <= most


def test_drafting_is_switched_on_when_it_begins_to_pay(caplog: pytest.LogCaptureFixture) -> None:
    turning = Case(2, 2, lambda token: 0.1 if token < 1000 else 0.9)
    for seed in SEEDS:
        schedule = MarginalSchedule(max_draft=5)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert turning.over_plain(schedule, seed, tokens=1000) <= 1.03
            assert "off, as no draft pays" in schedule.state() and "off, as no draft pays" in caplog.text
            before = caplog.text
            late = replace(turning, accepted=always(0.9)).over_plain(schedule, seed, tokens=2500)
        assert late < 0.85
        assert "tokens per draft" in schedule.state() and "tokens per draft" in caplog.text.removeprefix(before)


def test_a_new_text_is_compared_with_its_own_plain_steps() -> None:
    schedule = MarginalSchedule(max_draft=5)
    Case(1, 1, always(0.9)).over_plain(schedule, 0, tokens=300)
    assert any(schedule.plan(5) for _ in range(2))
    schedule.begin()
    for _ in range(3):
        assert schedule.plan(5) == 0
        schedule.record(Round((), 0, 0, 1, 0.0, 2 * PLAIN_MS))
    assert schedule.plan(5) > 0


def test_the_mean_of_plain_steps_has_a_standard_error() -> None:
    steps = PlainSteps()
    for ms in (90.0, 10.0, 12.0, 10.0, 12.0, 10.0, 12.0, 10.0, 12.0):
        steps.add(ms)
    assert steps.mean_ms == pytest.approx((4 * 10 + 4 * 12 + 30) / 9)  # the disturbed step counts as 2.5 medians
    assert steps.least_ms == pytest.approx(steps.mean_ms - 6.4 / 3, abs=0.05)


def test_plain_steps_of_an_earlier_speed_are_dropped() -> None:
    steps = PlainSteps()
    for ms in (10.0, 12.0, 10.0, 12.0, 30.0, 30.0):
        steps.add(ms)
    assert len(steps) == 6
    steps.add(30.0)
    assert (len(steps), steps.mean_ms) == (4, 25.5), "three of the last four are of another machine, or of a longer text"
