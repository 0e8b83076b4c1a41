"""Which tokens the server draws from logits: as transformers' own sampling does, and for each request alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.byte_tokenizer import byte_tokenizer
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moegraft.injection.cli.serve.job import Ask, Job
from moegraft.injection.cli.serve.sampling import adjusted, choose

TOKENIZER = byte_tokenizer()


def sampled(seed: int, **options: Any) -> Job:
    return Job(Ask([1], 1, **{"temperature": 1.0, **options}, seed=seed, end_tokens=[0]), TOKENIZER)


def test_a_top_p_below_the_first_probability_leaves_the_likeliest() -> None:
    logits, least = torch.tensor([[0.0, 3.0, 1.0]]).repeat(20, 1), 2e-38  # the first value that is not greedy
    assert set(choose(logits, [sampled(seed, top_p=least) for seed in range(20)])) == {1}


OPTIONS = (
    {"temperature": 0.7},
    {"top_k": 7},
    {"top_p": 0.6},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.8},
    {"top_k": 500},
    {"min_p": 0.2},
    {"temperature": 1.5, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 0.0},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_are_drawn_from_the_distribution_of_transformers(options: dict[str, Any]) -> None:
    size, draws = 50, 20000
    logits = 2 * torch.randn(1, size, generator=torch.Generator().manual_seed(0))
    given = {"temperature": 1.0, **options}
    expected = logits[0].softmax(-1)
    if given["temperature"]:
        warpers: list[Any] = [TemperatureLogitsWarper(given["temperature"])]
        warpers += [TopKLogitsWarper(given["top_k"])] if "top_k" in given else []
        warpers += [TopPLogitsWarper(given["top_p"])] if "top_p" in given else []
        warpers += [MinPLogitsWarper(given["min_p"])] if "min_p" in given else []
        expected = LogitsProcessorList(warpers)(torch.zeros(1, 1), logits)[0].softmax(-1)
    else:
        expected = torch.nn.functional.one_hot(logits[0].argmax(), size).float()
    job = sampled(1, **options)
    drawn = torch.bincount(torch.tensor(choose(logits.expand(draws, size), [job] * draws)), minlength=size)
    assert not drawn[expected == 0].any()
    scatter = (expected * (1 - expected) / draws).sqrt()
    assert ((drawn / draws - expected).abs() <= 5 * scatter + 1e-9).all()


@pytest.mark.parametrize("size", [64, 1000, 1024, 9001])
def test_a_large_vocabulary_is_drawn_from_as_by_its_cumulative_sums(size: int) -> None:
    seeds = range(200)
    logits = 3 * torch.randn(len(seeds), size, generator=torch.Generator().manual_seed(0))
    logits[::3, size // 2 :] = -torch.inf
    for options in ({"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 2.0, "top_k": 30}):
        expected = []
        for row, seed in zip(logits, seeds, strict=True):
            values, index = (row / options["temperature"]).sort(descending=True, stable=True)
            shares = values.double().softmax(-1)
            if "top_k" in options:
                shares[int(options["top_k"]) :] = 0
            if "top_p" in options:
                shares[shares.cumsum(-1) - shares >= options["top_p"]] = 0
            if len(options) == 1:  # in the order of the tokens, as nothing is sorted
                shares, index = shares[index.argsort()], torch.arange(size)
            number = sampled(seed).random.random() * shares.sum()
            expected.append(int(index[torch.searchsorted(shares.cumsum(-1), number, right=True)]))
        found = choose(logits, [sampled(seed, **options) for seed in seeds])
        assert sum(one != other for one, other in zip(found, expected, strict=True)) <= 1, "by rounding of sums"


def test_a_drawn_token_does_not_depend_on_the_others() -> None:
    logits = torch.randn(len(OPTIONS), 4000, generator=torch.Generator().manual_seed(0)).bfloat16().float()  # with ties
    together = choose(logits, [sampled(seed, **options) for seed, options in enumerate(OPTIONS)])
    alone = [choose(logits[row : row + 1], [sampled(row, **options)])[0] for row, options in enumerate(OPTIONS)]
    assert together == alone


def test_a_row_that_cannot_be_chosen_from_does_not_end_the_choice() -> None:
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf], [-torch.inf, 5.0, 5.0]]).repeat(50, 1)
    tokens = choose(logits, [sampled(seed, top_p=0.99) for seed in range(100)])
    assert set(tokens[::2]) == {0} and set(tokens[1::2]) == {1, 2}


def test_a_model_without_end_tokens_takes_a_minimum_of_tokens() -> None:
    logits = torch.arange(3.0)
    assert torch.equal(adjusted(logits, Ask([1], 3, min_tokens=2), [1]), logits)


def test_penalties_and_biases_change_the_logits_of_their_tokens() -> None:
    prompt, answer = [1, 2], [3, 3, 4]
    logits = torch.tensor([0.5, 1.0, -1.0, 2.0, 3.0, 2.5])
    ask = Ask(prompt, 9, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={5: -1.0, 0: 4.0})
    found = adjusted(logits, ask, [*prompt, *answer])
    expected = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([[*prompt, *answer]]), logits[None].clone())[0]
    expected[3] -= 0.5 + 2 * 0.25
    expected[4] -= 0.5 + 0.25
    expected[5] -= 1.0
    expected[0] += 4.0
    torch.testing.assert_close(found, expected)
    assert adjusted(logits, Ask(prompt, 9), [*prompt, *answer]) is logits
    assert logits[0] == 0.5, "the model's logits are unchanged"
