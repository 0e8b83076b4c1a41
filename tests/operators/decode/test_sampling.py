"""The choice of a token: that of transformers' processors and PyTorch's `multinomial`, by the same random numbers."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from moegraft.operators.decode.sampling import Scores, largest, shorten, shortening

SIZES = (1, 7, 64, 1000, 50_257)
TOP_P = (0.0, 1e-30, 0.3, 0.8, 0.95, 1 - 1e-16)


def scores_of(size: int, spread: float, seed: int) -> torch.Tensor:
    return spread * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def whole(scores: torch.Tensor, processors: list[Any]) -> torch.Tensor:
    """What transformers leaves of all scores."""
    row = scores[None].clone()
    for processor in processors:
        row = processor(torch.zeros(1, 1, dtype=torch.int64), row)
    return row[0]


def spread_out(scores: Scores) -> torch.Tensor:
    assert scores.tokens is not None and (np.diff(scores.tokens) > 0).all()
    return torch.full((scores.size,), -torch.inf).index_copy(0, torch.from_numpy(scores.tokens), scores.values)


@pytest.mark.parametrize(("size", "count"), list(product(SIZES, (1, 5, 20, 400))))
def test_the_largest_scores(size: int, count: int) -> None:
    for seed, spread in enumerate((1.0, 8.0)):
        drawn = scores_of(size, spread, seed)
        for scores in (drawn, drawn.round(), torch.zeros(size), drawn.sort().values, drawn.masked_fill(drawn < spread, -torch.inf)):
            warper = TopKLogitsWarper(count)
            assert torch.equal(spread_out(shorten(scores, [warper])), whole(scores, [warper])), "with ties"
            before = scores.clone()
            rest = [TopPLogitsWarper(0.8), MinPLogitsWarper(0.1)]
            found, expected = spread_out(shorten(scores, [warper, *rest])), whole(scores, [warper, *rest])
            assert torch.equal(found.sort().values, expected.sort().values), "of equal scores, others may stay"
            assert torch.equal(scores, before), "the scores are unchanged"


@pytest.mark.parametrize(("size", "top_p"), list(product(SIZES, TOP_P)))
def test_the_nucleus(size: int, top_p: float) -> None:
    for seed, (spread, least) in enumerate(product((0.1, 1.0, 3.0, 30.0), (1, 3))):
        scores, warper = scores_of(size, spread, seed), TopPLogitsWarper(top_p, min_tokens_to_keep=min(least, size))
        found, expected = spread_out(shorten(scores, [warper])), whole(scores, [warper])
        assert (found != expected).sum() <= 1, "its border, by rounding"
        assert found.argmax() == expected.argmax()
        rest = [warper, MinPLogitsWarper(0.01)]
        assert (spread_out(shorten(scores, rest)) != whole(scores, rest)).sum() <= 1
    flat = spread_out(shorten(torch.zeros(size), [TopPLogitsWarper(top_p)])).isfinite().sum()
    wanted = whole(torch.zeros(size), [TopPLogitsWarper(top_p)]).isfinite().sum()
    assert abs(flat - wanted) <= 1 + 1e-3 * size, "float32 sums of equal numbers have an error"


def test_of_equal_tokens_at_the_border_as_many_stay() -> None:
    for seed in range(20):
        scores = (4 * scores_of(3000, 2.0, seed)).round() / 4
        found, expected = spread_out(shorten(scores, [TopPLogitsWarper(0.7)])), whole(scores, [TopPLogitsWarper(0.7)])
        assert torch.equal(found.sort().values, expected.sort().values)


@pytest.mark.parametrize("warper", [TopKLogitsWarper(20), TopPLogitsWarper(0.5)])
def test_scores_that_are_no_numbers(warper: Any) -> None:
    for place, size in product((0, 500), (501, 5000)):
        scores = scores_of(size, 1.0, 0)
        scores[place] = torch.nan
        with pytest.raises(RuntimeError, match="probability tensor"):
            shorten(scores, [warper]).draw()
    with pytest.raises(RuntimeError, match="probability tensor"):
        shorten(torch.full((100,), -torch.inf), [warper]).draw()


def test_a_nucleus_whose_minimum_is_larger() -> None:
    scores = torch.full((9,), -torch.inf)
    scores[4] = 1.0
    warper = TopPLogitsWarper(0.5, min_tokens_to_keep=2)
    assert torch.equal(spread_out(shorten(scores, [warper])), whole(scores, [warper]))


def test_which_processors_shorten() -> None:
    temperature, few, nucleus, likely = TemperatureLogitsWarper(0.7), TopKLogitsWarper(5), TopPLogitsWarper(0.5), MinPLogitsWarper(0.1)
    assert shortening([temperature, few, nucleus, likely]) == 1
    assert shortening([nucleus]) == 0
    assert shortening([few, temperature]) == 2, "what follows may look at all scores"
    assert shortening([temperature, likely]) == 2
    assert shortening([]) == 0
    assert shortening([TopKLogitsWarper(5, filter_value=-1e4)]) == 1, "other tokens can be chosen"


@pytest.mark.parametrize("size", SIZES)
def test_the_draw_of_multinomial(size: int) -> None:
    for seed, (spread, count) in enumerate(product((0.0, 1.0, 8.0), (1, 5, size))):
        values = scores_of(size, spread, seed)
        warper = TopKLogitsWarper(count)
        expected = whole(values, [warper]).softmax(-1)
        for scores in (Scores.of_all(whole(values, [warper])), shorten(values, [warper])):
            tokens, after = [], []
            for draw in (scores.draw, lambda: int(torch.multinomial(expected, 1))):  # noqa: B023  # called at once
                torch.manual_seed(seed)
                tokens.append([draw() for _ in range(5)])
                after.append(torch.rand(()))
            assert tokens[0] == tokens[1]
            assert after[0] == after[1], "what follows has the same random numbers"


@pytest.mark.parametrize("shorter", list(product([False, True], repeat=2)))
def test_what_is_drawn_in_place_of_a_rejected_draft(shorter: tuple[bool, bool]) -> None:
    """By max(0, p - q) over the whole vocabulary, whichever of both has few tokens."""
    size, draws = 50, 20_000
    scores, whole_scores = [], []
    for seed, short in enumerate(shorter):
        values, warper = scores_of(size, 2.0, seed), TopKLogitsWarper(12)
        whole_scores.append(whole(values, [warper]).softmax(-1))
        scores.append(shorten(values, [warper]) if short else Scores.of_all(whole(values, [warper])))
    p, q = whole_scores
    token = int(p.argmax())
    others = p.clone()
    others[token] = 0
    torch.manual_seed(0)
    for expected, draw in (
        ((p - q).clamp(min=0), lambda: scores[0].draw_beyond(scores[1])),
        (others, lambda: scores[0].draw_other(token)),
    ):
        expected = expected / expected.sum()
        drawn = torch.bincount(torch.tensor([draw() for _ in range(draws)]), minlength=size) / draws
        assert not drawn[expected == 0].any()
        assert ((drawn - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt() + 1e-9).all()
    assert scores[0].draw_beyond(scores[0]) in p.nonzero()[:, 0].tolist(), "nothing is left"
    absent = int(p.argmin())
    assert scores[0].probability(absent) == 0 and scores[0].draw_other(absent) in p.nonzero()[:, 0].tolist()


def test_tokens_without_a_probability_are_none_of_the_largest() -> None:
    scores = np.full(9000, -np.inf, np.float32)
    scores[[5, 8999]] = 1.0, 2.0  # as a grammar leaves them
    assert largest(scores, 20).tolist() == [5, 8999]
    assert largest(scores[:100], 20).tolist() == [5]
    assert len(largest(np.full(9000, -np.inf, np.float32), 20)) == 9000


def test_all_of_few_scores_are_the_largest() -> None:
    assert largest(np.array([3.0, 1.0], np.float32), 9).tolist() == [0, 1]
