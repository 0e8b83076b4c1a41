"""Does the measured schedule of `draft: mtp` gain what drafts can, and lose little where they cannot? With forced acceptance.

    python benchmarks/mtp_speed.py --rounds 10

Tokens/s of `draft: mtp` against plain decoding, alternating, on a model of Mellum's shapes with few layers and one MTP layer, without the
time of a text of one token, which is the prompt's. The acceptance of each token is forced, so the text is not plain's; without that, it is
compared with plain decoding's first. `predicted` is the best of `plain_ms * (1 + a + ... + a^n) / (n * draft_ms + verify_ms(n))` over n, 0
included; its costs are measured before, by fixed drafts of n tokens.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness.models import injected, random_model
from harness.record import Recorder, parser
from harness.rounds import alternate, clock, median_ratio, percentiles, seconds
from speculative import NEW_TOKENS, PROMPT_TOKENS, Row, draft_rule, generate
from transformers import MellumConfig, PreTrainedModel

from moegraft.operators.decode.drafts import Drafting
from moegraft.operators.decode.sampling import AcceptanceRule, DraftToken, Greedy
from moegraft.operators.schedule import FixedSchedule, Round

MAX_DRAFT, ACCEPTANCES = 3, (0.7, 0.0)


class ForcedAcceptance(Greedy):
    """Accept each draft token with the same probability, whatever it is."""

    def __init__(self, share: float, seed: int) -> None:
        self._share = share
        self._random = random.Random(seed)

    def accepts(self, draft: DraftToken, scores: torch.Tensor) -> bool:
        return self._random.random() < self._share


@contextmanager
def forced_acceptance(share: float, seed: int) -> Iterator[None]:
    begin = Drafting.begin

    def forced(self: Drafting, *args: Any) -> AcceptanceRule:
        begin(self, *args)
        return ForcedAcceptance(share, seed)

    Drafting.begin = forced  # type: ignore[method-assign]
    try:
        yield
    finally:
        Drafting.begin = begin  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Measured ms of a plain step, of a draft by its tokens, and of their verification."""

    plain_ms: float
    draft_ms: Mapping[int, float]
    verify_ms: Mapping[int, float]

    def best(self, acceptance: float) -> tuple[float, int]:
        """Return the best speed relative to plain decoding that any length gives, and that length."""
        rounds = {
            tokens: self.plain_ms * sum(acceptance**at for at in range(tokens + 1)) / (self.draft_ms[tokens] + self.verify_ms[tokens])
            for tokens in self.draft_ms
        }
        return max((1.0, 0), *((ratio, tokens) for tokens, ratio in rounds.items()))


def round_costs(model: PreTrainedModel, plain_ms: float, ids: torch.Tensor, acceptance: float, new_tokens: int) -> RoundCosts:
    """Measure rounds of each number of drafted tokens, after a text of each that prepares programs."""
    operator: Any = model.moegraft.model_operator
    kept, draft_ms, verify_ms = operator._schedule, {}, {}
    for tokens in range(1, MAX_DRAFT + 1):
        operator._schedule = Recorded(tokens)
        for seed in range(2):
            with forced_acceptance(acceptance, seed):
                operator._schedule.rounds.clear()
                generate(model, ids, new_tokens=new_tokens)
        timed = [done for done in operator._schedule.rounds if len(done.confidences) == tokens and not done.prepared]
        draft_ms[tokens] = statistics.median(done.draft_ms for done in timed)
        verify_ms[tokens] = statistics.median(done.verify_ms for done in timed)
    operator._schedule = kept
    return RoundCosts(plain_ms, draft_ms, verify_ms)


class Recorded(FixedSchedule):
    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        self.rounds: list[Round] = []

    def record(self, done: Round) -> None:
        self.rounds.append(done)


def mtp_model(layers: int) -> tuple[PreTrainedModel, torch.Tensor]:
    """Return a random model of Mellum's shapes that drafts with its MTP layer, and a prompt."""
    config = MellumConfig(num_hidden_layers=layers, num_mtp_layers=1, mtp_layer_types=["full_attention"], dtype=torch.bfloat16)
    draft = draft_rule({"draft": "mtp", "max_draft": MAX_DRAFT, "confidence": 0})
    model = injected(
        random_model(config, mtp=True), f"extends: cpu\nvars: {{weights: int8}}\nrules:\n{draft}", threads=torch.get_num_threads()
    )
    model.moegraft.model_operator.clock = clock
    return model, torch.randint(20, config.vocab_size, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))


def mtp_speed(layers: int, new_tokens: int, rounds: int, rows: Recorder) -> None:
    """Record the speed of MTP drafts for each forced acceptance.

    Raises:
        AssertionError: drafts change the text.
    """
    model, ids = mtp_model(layers)
    operator, stock, replay = model.moegraft.model_operator, type(model).__mro__[2], model.moegraft.context.replay
    wanted = {"attention_mask": torch.ones_like(ids), "do_sample": False}

    def plain(count: int = new_tokens) -> torch.Tensor:
        stock_generate = partial(stock.generate, model)  # type: ignore[attr-defined] # only generating classes have it
        found: torch.Tensor = replay.generate(model, stock_generate, (ids,), wanted | {"min_new_tokens": count, "max_new_tokens": count})
        return found

    def rate(decode: Callable[[int], object]) -> float:
        return (new_tokens - 1) / (seconds(lambda: decode(new_tokens), clock) - seconds(lambda: decode(1), clock))

    assert torch.equal(generate(model, ids, new_tokens=new_tokens), plain()), "drafts change the text"
    for acceptance in ACCEPTANCES:
        costs = round_costs(model, 1e3 / max(rate(plain) for _ in range(3)), ids, acceptance, new_tokens)
        predicted, best = costs.best(acceptance)
        operator._schedule = operator._new_schedule()
        before = operator.statistics()
        seed = itertools.count()

        def drafted() -> float:
            with forced_acceptance(acceptance, next(seed)):  # noqa: B023
                return rate(lambda count: generate(model, ids, new_tokens=count))

        taken = alternate({"plain": lambda: rate(plain), "mtp": drafted}, rounds)
        found = operator.statistics()
        with_drafts, without = (found[name] - before[name] for name in ("round_tokens", "plain_tokens"))
        row: Row = {"layers": layers, "acceptance": acceptance, "new_tokens": new_tokens, "predicted": round(predicted, 3), "best": best}
        row |= {"against_plain": round(median_ratio(taken["mtp"], taken["plain"]), 3), "plain_ms": round(costs.plain_ms, 3)}
        row |= {f"draft_{tokens}_ms": round(each, 3) for tokens, each in costs.draft_ms.items()}
        row |= {f"verify_{tokens}_ms": round(each, 3) for tokens, each in costs.verify_ms.items()}
        row |= {f"{name}_{key}": each for name, rates in taken.items() for key, each in percentiles(rates, "tokens_s", 2).items()}
        row |= {"drafted_share": round(with_drafts / (with_drafts + without), 3)}
        rows.add({**row, "rounds": rounds, "threads": torch.get_num_threads()})


def main() -> None:
    options = parser(__doc__, rounds=3, layers=6)
    given = options.parse_args()
    mtp_speed(given.layers, NEW_TOKENS, given.rounds, Recorder("speculative_mtp_speed", write=given.write))


if __name__ == "__main__":
    main()
