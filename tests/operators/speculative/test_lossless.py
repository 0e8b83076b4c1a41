"""Drafts do not change generated text: greedy text is equal token by token, and sampled text has the same distribution."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from support import combinations
from support.families import case_of, greedy, prompt, served_cases
from transformers import DynamicCache, LogitsProcessorList, MaxLengthCriteria, PreTrainedModel, StoppingCriteriaList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper

from moegraft.operators.base import CACHE
from moegraft.operators.decode import loop
from moegraft.operators.decode.drafts import Drafting, ExpertsDrafter
from moegraft.operators.decode.loop import DecodedSequence, Decoding
from moegraft.operators.draft import DraftSettings
from moegraft.operators.schedule import FixedSchedule, Statistics

FAMILIES = [
    "deepseek_v3",  # its router does not sort the chosen experts; one shared expert
    "qwen3_moe",
    "mixtral",  # every layer has a sliding window
    "gpt_oss",  # alternating sliding and full layers, experts with biases
    "olmoe",
]
MORE_FAMILIES = [
    "gemma4_text",  # layers that share keys and values
    "qwen3_vl_moe",  # positions in three dimensions
    "glm4_moe_lite",  # latent attention
    "granitemoe",
]
RECURRENT = [
    "qwen3_next",  # gated delta rule
    "kimi_linear",  # the same with a decay for each channel, and latent attention
    "granitemoehybrid",  # Mamba-2
    "nemotron_h",  # the same, with time steps that are limited in prompts alone
    "jamba",  # Mamba
    "lfm2_moe",  # short convolutions alone
    "inkling_text",  # four short convolutions in each layer of attention, some with windows
]
STEPS = 40  # more than the tiny models' window of 16


def statistics(model: PreTrainedModel) -> Any:
    return model.moegraft.model_operator.statistics()


@pytest.mark.parametrize("model_type", [*FAMILIES, *MORE_FAMILIES, *RECURRENT])
def test_greedy_text_is_that_of_plain_decoding(model_type: str, drafting: Any, stock: Any) -> None:
    if model_type not in {each.model_type for each in served_cases()}:
        pytest.skip(f"this transformers has no {model_type}")
    model = drafting(model_type)
    assert torch.equal(greedy(model, prompt(20)), greedy(stock(model_type), prompt(20)))
    assert 0 < statistics(model)["rounds"] < STEPS - 1  # some drafts were accepted, some rejected
    assert any(share < 1 for share in statistics(model)["acceptance_by_position"])


OPTIONS: list[tuple[dict[str, Any], int]] = [
    ({"draft_top_k": 1, "max_draft": 1}, STEPS),
    ({"draft_top_k": 1, "max_draft": 30}, STEPS),  # longer than the windows, and than what is left
    ({"draft_top_k": 1, "max_draft": 8}, 2),  # one token remains: nothing can be drafted
    ({"draft_top_k": 1, "max_draft": 4, "confidence": 0.5}, STEPS),
    ({"draft": "ngram", "max_draft": 6}, STEPS),
    ({"schedule": "marginal", "max_draft": 5}, STEPS),
]


@pytest.mark.parametrize(("model_type", "given"), combinations(["qwen3_moe", "gpt_oss", "qwen3_next"], OPTIONS), ids=str)
def test_greedy_text_is_the_same_for_every_option(model_type: str, given: tuple[dict[str, Any], int], drafting: Any, stock: Any) -> None:
    options, steps = given
    found = greedy(drafting(model_type, **options), prompt(12), max_new_tokens=steps)
    assert torch.equal(found, greedy(stock(model_type), prompt(12), max_new_tokens=steps))


LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [2.0 + at for at in range(8)], "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("model_type", "rope", "most", "drafts"),
    [
        ("qwen3_moe", {"rope_type": "dynamic", "factor": 2.0}, 64, False),
        ("hunyuan_v1_moe", {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}, 64, True),
        ("qwen3_moe", {"rope_type": "longrope", "factor": 4.0, **LONGROPE}, 256, True),
    ],
    ids=["dynamic", "alpha", "longrope"],
)
def test_greedy_text_is_the_same_where_rotary_embeddings_depend_on_the_length_of_a_text(
    model_type: str, rope: dict[str, Any], most: int, drafts: bool, drafting: Any, stock: Any
) -> None:
    case = case_of(model_type)
    case = dataclasses.replace(case, text={**case.text, "max_position_embeddings": most, "rope_parameters": {"rope_theta": 1e4, **rope}})
    model = drafting(case, max_draft=3)
    assert torch.equal(greedy(model, prompt(30), max_new_tokens=120), greedy(stock(case), prompt(30), max_new_tokens=120))
    assert bool(statistics(model)["rounds"]) == drafts


def test_a_model_that_replaces_its_cache_computes_its_text_once_again(drafting: Any, stock: Any) -> None:
    """Phi-MoE does, at the length where its rotary embedding changes."""
    case = case_of("phimoe")
    rope = {**LONGROPE, "rope_type": "longrope", "rope_theta": 1e4, "short_mscale": 1.0, "long_mscale": 1.2, "factor": 4.0}
    limits = {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
    case = dataclasses.replace(case, text={**case.text, **limits, "rope_parameters": {**rope, "original_max_position_embeddings": 16}})
    model, whole = drafting(case, max_draft=3), stock(case)
    fed: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: fed.append(given[0].shape[1]))
    found = model.generate(prompt(7), max_new_tokens=40, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(found.sequences, greedy(whole, prompt(7), max_new_tokens=40))
    assert sum(tokens > 16 for tokens in fed) == 1
    assert any(tokens > 1 for tokens in fed[fed.index(17) + 1 :]), "drafts go on"
    assert found.past_key_values.get_seq_length() == 7 + 40 - 1
    assert statistics(model)["rounds"]


@pytest.mark.parametrize("samples", [False, True], ids=["greedy", "sampled"])
def test_a_draft_with_all_experts_is_always_accepted(samples: bool, drafting: Any) -> None:
    model = drafting(draft_top_k=2, max_draft=3)
    torch.manual_seed(0)
    model.generate(prompt(10), max_new_tokens=4 * 8 + 1, do_sample=samples)
    assert statistics(model)["acceptance_by_position"] == (1.0, 1.0, 1.0)
    assert statistics(model)["tokens_per_round"] == 4.0  # three drafts and the bonus token


class CachedSequence(DecodedSequence):
    """A sequence that caches the forward pass of each context, so that thousands of texts can be drawn."""

    seen: dict[tuple[Any, ...], torch.Tensor]

    def prefill(self) -> torch.Tensor:
        return self.forward((), feed=1)[0]

    def forward(self, tokens: Any, feed: int) -> torch.Tensor:
        switch = self._model.moegraft.context.draft_switch
        ids, known = self.followed_by(tokens), self.length - 1
        key = (tuple(ids[0].tolist()), known, feed, switch.settings)
        if key not in self.seen:
            with switch.drafting(ALL_EXPERTS):
                cache = self._model(ids[:, :known], use_cache=True).past_key_values
            self.seen[key] = self._model(ids[:, known:], past_key_values=cache, use_cache=True).logits[0, -feed:]
        return self.seen[key]


ALL_EXPERTS = DraftSettings(top_k=1000)
WORDS = 4  # candidate tokens of each step under top_k
LENGTH = 3
DRAWS = 5000
LEAST_CHANCE = 1e-6  # of the draws of a right rule, in a test of which the seed is fixed


def processors() -> LogitsProcessorList:
    return LogitsProcessorList([TemperatureLogitsWarper(1.5), TopKLogitsWarper(WORDS)])


def exact_distribution(logits_after: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, steps: int) -> dict[tuple[int, ...], float]:
    """Return the probability of every text of `steps` tokens after `ids`, by the chain rule."""
    if steps == 0:
        return {(): 1.0}
    p = processors()(ids, logits_after(ids))[0].softmax(-1)
    found = {}
    for token in p.nonzero().flatten().tolist():
        rest = exact_distribution(logits_after, torch.cat([ids, torch.tensor([[token]])], -1), steps - 1)
        found |= {(token, *text): float(p[token]) * share for text, share in rest.items()}
    return found


def total_variation(one: Mapping[tuple[int, ...], float], other: Mapping[tuple[int, ...], float]) -> float:
    return sum(abs(one.get(text, 0) - other.get(text, 0)) for text in {*one, *other}) / 2


def chi_square(found: Mapping[tuple[int, ...], int], exact: Mapping[tuple[int, ...], float]) -> float:
    """Return how likely draws from a distribution are as far from it as these counts (Pearson), with rare texts counted together."""
    draws = sum(found.values())
    groups: dict[tuple[int, ...], list[float]] = {}
    for text in {*exact, *found}:
        group = groups.setdefault(text if exact.get(text, 0) * draws >= 5 else (), [0, 0])
        group[0] += found.get(text, 0)
        group[1] += exact.get(text, 0) * draws
    statistic = sum((seen - expected) ** 2 / expected if expected else math.inf for seen, expected in groups.values())
    return float(torch.special.gammaincc(torch.tensor((len(groups) - 1) / 2).double(), torch.tensor(statistic / 2).double()))


@pytest.mark.parametrize(
    "model_type", ["gpt_oss", "demo", *(pytest.param(name, marks=pytest.mark.long) for name in FAMILIES if name != "gpt_oss")]
)
@torch.no_grad()
def test_sampled_texts_have_the_distribution_of_plain_sampling(model_type: str, drafting: Any, stock: Any, monkeypatch: Any) -> None:
    model, plain, ids = drafting(model_type), stock(model_type), prompt(8)
    exact = exact_distribution(lambda text: plain(text).logits[:, -1], ids, LENGTH)
    operator = model.moegraft.model_operator

    def drafted(text: torch.Tensor) -> torch.Tensor:
        with model.moegraft.context.draft_switch.drafting(operator.options.settings):
            return model(text).logits[:, -1]

    wrong = exact_distribution(drafted, ids, LENGTH)
    assert (far := total_variation(exact, wrong)) > 0.25, f"the draft is too close to the target ({far:.2f}) for a wrong rule to show"
    found = Counter(draw_texts(model, ids, monkeypatch))
    assert found.keys() <= exact.keys()
    assert chi_square(found, exact) > LEAST_CHANCE > chi_square(found, wrong)


@torch.no_grad()
def test_sampled_texts_over_recurrent_states_have_the_distribution_of_plain_sampling(drafting: Any, stock: Any) -> None:
    """Over a real cache, whose states each round leaves and goes back to."""
    model, plain, ids, draws = drafting("qwen3_next", max_draft=2), stock("qwen3_next"), prompt(8), 600
    exact = exact_distribution(lambda text: plain(text).logits[:, -1], ids, LENGTH)
    switch, drafts = model.moegraft.context.draft_switch, model.moegraft.model_operator.options.settings

    def drafted(text: torch.Tensor) -> torch.Tensor:
        with switch.drafting(drafts):
            return model(text).logits[:, -1]

    settings = {"do_sample": True, "temperature": 1.5, "top_k": WORDS, "max_new_tokens": LENGTH + 1, "min_new_tokens": LENGTH + 1}
    torch.manual_seed(0)
    model.generate(ids, do_sample=True, max_new_tokens=60)  # makes the programs, which compute the texts that follow
    found = Counter(tuple(model.generate(ids, **settings)[0, ids.shape[1] : ids.shape[1] + LENGTH].tolist()) for _ in range(draws))
    assert found.keys() <= exact.keys()
    assert chi_square(found, exact) > LEAST_CHANCE > chi_square(found, exact_distribution(drafted, ids, LENGTH))
    assert 0 < statistics(model)["acceptance_by_position"][0] < 1
    assert model.moegraft.statistics()["decode_steps"]["replayed_steps"] > draws


def draw_texts(model: PreTrainedModel, ids: torch.Tensor, monkeypatch: Any) -> list[tuple[int, ...]]:
    CachedSequence.seen = {}
    monkeypatch.setattr(loop, "DecodedSequence", CachedSequence)
    operator, switch = model.moegraft.model_operator, model.moegraft.context.draft_switch
    drafting = Drafting(
        max_draft=LENGTH - 1,
        drafter=ExpertsDrafter(switch, operator.options.settings),
        schedule=FixedSchedule(LENGTH - 1),
        statistics=Statistics(),
        switch=switch,
        warn_once=pytest.fail,
    )
    decoding = Decoding(None, drafting)
    config = model.generation_config
    config.update(do_sample=True, max_length=ids.shape[1] + LENGTH, return_dict_in_generate=False)
    criteria = StoppingCriteriaList([MaxLengthCriteria(ids.shape[1] + LENGTH)])
    torch.manual_seed(0)
    texts = []
    for _ in range(DRAWS):
        result = decoding(model, ids, processors(), criteria, config, use_cache=True, **{CACHE: DynamicCache()})
        texts.append(tuple(result[0, ids.shape[1] :].tolist()))
    return texts
