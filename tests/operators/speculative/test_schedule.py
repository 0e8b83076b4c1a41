"""The marginal schedule on simulated machines: it drafts where drafting pays, and loses little where it does not."""

from __future__ import annotations

import logging
import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from moegraft.operators.schedule import AcceptanceRates, DraftSchedule, FixedSchedule, MarginalSchedule, Round, RoundCosts

PLAIN_MS = 10.0
TOKENS = 2000
PREPARED = 4


@dataclass
class FakeMachine:
    """A machine and a model with known times and acceptance rates.

    `sure` is the chance that the draft is sure of a token. The chances of acceptance are `accepted_sure` and `accepted_unsure`.
    """

    draft_ms: float
    token_ms: float  # added to the verification by each drafted token
    accepted_sure: float
    accepted_unsure: float
    sure: float = 0.5
    noise: float = 0.0
    seed: int = 0
    prepared_ms: float = 0.0  # added to the first PREPARED rounds of each length, as programs are made of them
    reading: int = TOKENS  # drafted tokens whose experts are read; later ones need the same

    def run(self, schedule: DraftSchedule, tokens: int = TOKENS) -> float:
        """Generate a text; return ms per token without the noise that the schedule observes."""
        chance = random.Random(self.seed)
        written, spent_ms, plain = 0, 0.0, 0
        rounds: Counter[int] = Counter()
        while written < tokens:
            planned, confidences = 0 if plain else schedule.plan(tokens), []
            plain = 0 if planned else (plain or schedule.plain_steps()) - 1
            while len(confidences) < planned:
                confidences.append(0.95 if chance.random() < self.sure else 0.35)
                if not schedule.continues(confidences):
                    break
            accepted = 0
            for confidence in confidences:
                if chance.random() >= (self.accepted_sure if confidence > 0.5 else self.accepted_unsure):
                    break
                accepted += 1
            draft_ms = len(confidences) * self.draft_ms
            verify_ms = PLAIN_MS + min(len(confidences), self.reading) * self.token_ms
            rounds[len(confidences)] += 1
            prepared = self.prepared_ms > 0 and rounds[len(confidences)] <= PREPARED
            verify_ms += prepared * self.prepared_ms
            compared = min(accepted + 1, len(confidences))
            measured = draft_ms * self._jitter(chance), verify_ms * self._jitter(chance)
            schedule.record(Round(confidences, compared, accepted, accepted + 1, *measured, prepared))
            written += accepted + 1
            spent_ms += draft_ms + verify_ms
        return spent_ms / written

    def _jitter(self, chance: random.Random) -> float:
        slow = 3.0 if chance.random() < 0.02 else 1.0  # another process ran
        return 1.0 if not self.noise else slow * max(0.5, chance.gauss(1.0, self.noise))


HOPELESS = [
    FakeMachine(draft_ms=5.0, token_ms=8.0, accepted_sure=0.7, accepted_unsure=0.3),  # all experts in memory, a small model
    FakeMachine(draft_ms=9.0, token_ms=1.0, accepted_sure=0.9, accepted_unsure=0.1),  # a draft step costs almost a plain one
    FakeMachine(draft_ms=1.0, token_ms=1.0, accepted_sure=0.0, accepted_unsure=0.0),  # cheap drafts that are never accepted
    FakeMachine(draft_ms=5.0, token_ms=5.0, accepted_sure=1.0, accepted_unsure=1.0),  # all are accepted, at break-even
]
PAYING = [
    FakeMachine(draft_ms=1.0, token_ms=1.0, accepted_sure=0.95, accepted_unsure=0.8),  # long drafts
    FakeMachine(draft_ms=2.0, token_ms=2.0, accepted_sure=0.95, accepted_unsure=0.5),  # short drafts
    FakeMachine(draft_ms=0.0, token_ms=2.0, accepted_sure=0.8, accepted_unsure=0.8),  # n-grams
    FakeMachine(draft_ms=0.5, token_ms=9.0, accepted_sure=0.95, accepted_unsure=0.9, reading=2),  # the first tokens need nearly all experts
]


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("machine", HOPELESS, ids=lambda machine: f"draft {machine.draft_ms} token {machine.token_ms}")
@pytest.mark.parametrize("tokens", [400, 2000])
def test_drafting_that_does_not_pay_costs_under_three_percent(machine: FakeMachine, noise: float, tokens: int) -> None:
    for seed in range(5):
        noisy = FakeMachine(**{**vars(machine), "noise": noise, "seed": seed})
        assert noisy.run(MarginalSchedule(max_draft=5), tokens) <= 1.03 * PLAIN_MS


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("machine", PAYING, ids=lambda machine: f"draft {machine.draft_ms} token {machine.token_ms}")
def test_drafting_that_pays_is_nearly_as_fast_as_the_best_length(machine: FakeMachine, noise: float) -> None:
    best = min(machine.run(FixedSchedule(length)) for length in range(6))
    assert best < 0.85 * PLAIN_MS
    for seed in range(3):
        noisy = FakeMachine(**{**vars(machine), "noise": noise, "seed": seed})
        # At least most of the gain of the best fixed length, which ending drafts by confidence may exceed. With noise, more plain
        # steps are needed to know whether drafts pay.
        assert noisy.run(MarginalSchedule(max_draft=5)) <= best + (0.33 if noise else 0.15) * (PLAIN_MS - best)


def test_saved_time_lets_long_drafts_go_on_and_is_soon_spent() -> None:
    schedule, long = MarginalSchedule(max_draft=5), PAYING[3]
    best = min(long.run(FixedSchedule(length)) for length in range(6))
    ms = []
    for seed in range(20):  # short texts
        schedule.begin()
        ms.append(replace(long, seed=seed).run(schedule, tokens=80))
    assert sum(ms[4:]) / len(ms[4:]) <= best + 0.4 * (PLAIN_MS - best)
    schedule.begin()
    assert HOPELESS[2].run(schedule, tokens=400) <= 1.04 * PLAIN_MS


def test_rounds_that_prepare_programs_are_no_estimate() -> None:
    schedule = MarginalSchedule(max_draft=5)
    paying = replace(PAYING[2], prepared_ms=3 * PLAIN_MS)
    assert paying.run(schedule) < 0.9 * PLAIN_MS
    assert schedule._costs.plain.mean_ms == PLAIN_MS
    assert schedule._costs.verify_ms(3) == PLAIN_MS + 3 * paying.token_ms
    # A long preparation is made once, and does not put measuring off for thousands of tokens.
    schedule = MarginalSchedule(max_draft=5)
    replace(PAYING[0], prepared_ms=100 * PLAIN_MS).run(schedule, tokens=1000)
    assert "tokens per draft" in schedule.state()
    hopeless = replace(HOPELESS[1], prepared_ms=3 * PLAIN_MS)
    assert hopeless.run(MarginalSchedule(max_draft=5)) <= 1.03 * PLAIN_MS


def test_it_drafts_when_drafting_begins_to_pay() -> None:
    schedule = MarginalSchedule(max_draft=5)
    HOPELESS[2].run(schedule)
    assert "off" in schedule.state()
    late = PAYING[0].run(schedule, tokens=4000)
    assert late < 0.8 * PLAIN_MS
    assert "tokens per draft" in schedule.state()


def test_it_logs_when_it_stops_drafting(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        HOPELESS[3].run(MarginalSchedule(max_draft=5))  # at break-even, where the decision changes often
    messages = [record.message for record in caplog.records]
    assert 1 <= len(messages) <= TOKENS // 256 + 1
    caplog.clear()
    with caplog.at_level(logging.INFO):
        HOPELESS[1].run(MarginalSchedule(max_draft=5))
    assert "off, as no draft pays (a plain step takes 10.00 ms)" in caplog.text


def test_a_draft_continues_only_after_confident_tokens() -> None:
    schedule, machine = MarginalSchedule(max_draft=5), FakeMachine(1.5, 1.5, accepted_sure=0.98, accepted_unsure=0.2, sure=0.7)
    machine.run(schedule)
    while schedule.plan(5) < 2 or schedule._probing:
        schedule.record(Round((), 0, 0, 1, 0.0, PLAIN_MS))
    assert schedule.continues([0.95])
    assert not schedule.continues([0.35])


def test_nothing_is_drafted_at_the_maximum_length() -> None:
    schedule = MarginalSchedule(max_draft=5)
    PAYING[0].run(schedule, tokens=200)
    assert schedule.plan(0) == 0
    assert schedule.plan(1) <= 1
    assert FixedSchedule(4).plan(2) == 2


def test_unmeasured_costs_are_interpolated() -> None:
    costs = RoundCosts()
    costs.add(0, 0.0, 10.0)
    assert costs.verify_ms(2) > 10.0  # a first guess
    costs.add(3, 6.0, 16.0)
    assert (costs.verify_ms(1), costs.verify_ms(5), costs.draft_ms) == (12.0, 20.0, 2.0)
    for ms in (16.0, 16.0, 90.0):  # one disturbed step
        costs.add(3, 6.0, ms)
    assert costs.verify_ms(3) == 16.0


def test_rates_follow_position_and_confidence() -> None:
    rates = AcceptanceRates()
    for _ in range(200):
        rates.add(Round((0.9, 0.3), 2, 1, 2, 1.0, 1.0))
    assert rates.at(0) > 0.95 and rates.at(1) < 0.1
    assert rates.all_accepted([0.9]) > 0.9 > 0.1 > rates.all_accepted([0.9, 0.3])
    assert 1.9 < rates.expected_tokens(2) < 2.1
