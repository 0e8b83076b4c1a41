"""Options of drafts: their effect, rejected values, and the reported cost of lossy ones."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from support.families import build_model, case_of, prompt

from moegraft.injection import optimize_and_load, plan
from moegraft.injection.rules import RuleErrors
from moegraft.operators.decode.sampling import Adaptive, DraftToken, Greedy, Sampling, Scores
from moegraft.operators.draft import NGRAM, DraftSettings, DraftSwitch, NgramIndex, keep_largest
from moegraft.operators.errors import RuleFileError
from moegraft.operators.speculative import SpeculativeOptions

IDS = prompt(10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_top_k": 0}, "draft_top_k must be 1 or more"),
        ({"max_draft": 0}, "max_draft must be 1 or more"),
        ({"confidence": 1.0}, "confidence is a probability"),
        ({"tolerance": -0.1}, "tolerance is a share"),
        ({"tolerance": 0.3}, "tolerance changes the generated text; it needs 'mode: adaptive'"),
        ({"mode": "adaptive"}, "needs a tolerance above 0"),
        ({"draft": "ngram", "confidence": 0.5}, "draft ngram has no probabilities"),
        ({"mode": "adaptive", "draft": "ngram", "tolerance": 0.5}, "draft ngram has no probabilities"),
        ({"expert_budget": 8}, "expert_budget changes the generated text; it needs 'mode: adaptive'"),
        ({"expert_budget": 0, "mode": "adaptive"}, "expert_budget must be 1 or more"),
    ],
)
def test_wrong_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeOptions(**options)


def test_a_wrong_option_is_reported_with_its_position(drafting: Any) -> None:
    with pytest.raises(RuleFileError, match=r"rules\.yaml:6:.*tolerance changes"):
        drafting("qwen3_moe", tolerance=0.3)


def test_the_experts_of_the_largest_weights_draft_in_any_order() -> None:
    index = torch.tensor([[7, 3, 5, 1], [0, 2, 4, 6]])
    weights = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.4, 0.1, 0.1, 0.4]])
    kept, shares = keep_largest(index, weights, top_k=2)
    assert kept.tolist() == [[-1, 3, -1, 1], [0, -1, -1, 6]]
    assert torch.equal(shares, torch.tensor([[0, 0.4, 0, 0.3], [0.4, 0, 0, 0.4]]))
    assert keep_largest(index[:0], weights[:0], top_k=2)[0].shape == (0, 4)


def test_the_switch_is_off_after_an_error() -> None:
    switch, index, weights = DraftSwitch(), torch.tensor([[1, 0]]), torch.tensor([[0.3, 0.7]])
    with pytest.raises(KeyboardInterrupt), switch.drafting(DraftSettings(top_k=1)):
        assert switch.narrow(index, weights)[0].tolist() == [[-1, 0]]
        with switch.drafting(DraftSettings(top_k=2)):
            assert switch.narrow(index, weights)[0] is index
        raise KeyboardInterrupt
    assert switch.settings is None and switch.narrow(index, weights)[0] is index


def test_a_draft_of_one_thread_does_not_change_another() -> None:
    switch, seen = DraftSwitch(), []
    with switch.drafting(DraftSettings(top_k=1)):
        other = threading.Thread(target=lambda: seen.append(switch.settings))
        other.start()
        other.join()
        assert switch.settings == DraftSettings(top_k=1)
    assert seen == [None]


def test_a_draft_runs_the_number_of_experts_in_its_options(drafting: Any, stock: Any) -> None:
    """Compared with the stock model with fewer experts per token in its config, of a family that does not scale their weights."""
    model, fewer = drafting("olmoe"), stock("olmoe")
    for layer in fewer.model.layers:
        layer.mlp.gate.top_k = 1
    switch, options = model.moegraft.context.draft_switch, model.moegraft.model_operator.options
    with torch.no_grad(), switch.drafting(options.settings):
        torch.testing.assert_close(model(IDS).logits, fewer(IDS).logits, rtol=1e-4, atol=1e-4)


def test_drafting_needs_experts_that_can_run_fewer(tmp_path: Any) -> None:
    rules = tmp_path / "rules.yaml"
    text = "version: 1\nrules:\n- match: {kind: model}\n  replace: {class: speculative_draft, kwargs: {draft: experts}}\n"
    rules.write_text(text)
    model = build_model(case_of("qwen3_moe"))
    with pytest.raises(RuleErrors, match=r"rules.yaml:4:20: error: .* 'class: hybrid_experts'"):
        plan(model, rules)
    rules.write_text(text.replace("draft: experts", "draft: ngram"))
    expected = model.generate(IDS, max_new_tokens=20, do_sample=False)
    assert torch.equal(optimize_and_load(model, rules, progress=False).generate(IDS, max_new_tokens=20, do_sample=False), expected)


def test_the_shipped_file_drafts(stock: Any) -> None:
    model = optimize_and_load(stock("qwen3_moe"), "speculative", vars={"weights": "stored"}, progress=False)
    found = model.generate(IDS, max_new_tokens=30, do_sample=False)
    assert torch.equal(found, stock("qwen3_moe").generate(IDS, max_new_tokens=30, do_sample=False))
    assert any(line.startswith("1 x draft: speculative_draft, lossless, 1 expert per token") for line in model.moegraft.placement())


def searched(text: list[int], length: int) -> list[int]:
    """Return what followed the last tokens of a text when they last occurred, by comparing all places."""
    for size in range(min(NGRAM, len(text) - 1), 0, -1):
        places = [place for place in range(size, len(text)) if text[place - size : place] == text[-size:]]
        if places:
            return text[places[-1] : places[-1] + length]
    return []


def test_ngrams_are_looked_up_in_the_text() -> None:
    for text, length, expected in (
        ([5, 6, 7, 8, 9, 6, 7, 4, 6, 7], 3, [4, 6, 7]),  # the latest occurrence of two tokens, as three have none
        ([5, 6, 7, 8, 9, 6, 7, 4, 6, 7], 0, []),
        ([1, 2, 3], 2, []),
        ([1], 2, []),
        ([4, 4, 4], 5, [4]),
    ):
        index = NgramIndex()
        index.append(text)
        assert index.continuation(length) == searched(text, length) == expected
    index, generator = NgramIndex(), torch.Generator().manual_seed(0)
    text = torch.randint(3, (200,), generator=generator).tolist()
    text[120:150] = text[20:50]
    for end in (*range(60), 64, *range(90, 200)):  # one token more, and several
        index.append(text[len(index.tokens) : end])
        for length in (0, 1, 4):
            assert index.continuation(length) == searched(text[:end], length)


def shares(*probabilities: float) -> Scores:
    return Scores.of_all(torch.tensor(probabilities).log())


def test_ngram_drafts_are_accepted_without_a_distribution() -> None:
    scores = shares(0.7, 0.2, 0.1)
    torch.manual_seed(0)
    accepted = sum(Sampling().accepts(DraftToken(0), scores) for _ in range(4000)) / 4000
    assert abs(accepted - 0.7) < 0.03  # p(d)
    replacements = [Sampling().replacement(DraftToken(0), scores) for _ in range(4000)]
    assert 0 not in replacements
    assert abs(replacements.count(1) / 4000 - 2 / 3) < 0.03


def test_adaptive_mode_accepts_by_the_rule_of_the_paper() -> None:
    rule = Adaptive(Greedy(), confidence=0.5, tolerance=0.3)
    scores = shares(0.5, 0.45, 0.05)
    sure = DraftToken(1, shares(0.3, 0.6, 0.1))
    assert not Greedy().accepts(sure, scores)
    assert rule.accepts(sure, scores)  # q 0.6 > 0.5 and p/q 0.75 > 0.7
    assert not rule.accepts(DraftToken(1, shares(0.3, 0.65, 0.05)), scores)  # p/q 0.69
    assert not rule.accepts(DraftToken(0, shares(0.4, 0.3, 0.3)), scores)  # q 0.4, though greedy would accept it
    assert rule.replacement(sure, scores) == 0
    assert rule.agreement(sure, scores) == 0.0
    assert rule.agreement(DraftToken(0, shares(0.6, 0.3, 0.1)), scores) == 1.0


def test_the_lossy_mode_reports_agreement_and_perplexity(drafting: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        model = drafting("qwen3_moe", mode="adaptive", tolerance=0.9)
        text = model.generate(IDS, max_new_tokens=40, do_sample=False)
    assert "changes the text that is generated" in caplog.text
    found = model.moegraft.model_operator.statistics()
    assert 0 < found["agreement"] < 1
    assert f"{found['agreement']:.1%} of tokens as in lossless decoding" in caplog.text
    with torch.no_grad():
        logits = model(text).logits[0, :-1].log_softmax(-1)
    nll = -logits.gather(1, text[0, 1:, None])[IDS.shape[1] :].mean()  # the first token is the prompt's, not a round's
    assert found["perplexity"] == pytest.approx(float(nll.exp()), rel=1e-3)


def test_statistics_count_rounds_and_positions(drafting: Any) -> None:
    model = drafting("qwen3_moe", max_draft=3)
    text = model.generate(IDS, max_new_tokens=30, do_sample=False)
    found = model.moegraft.model_operator.statistics()
    assert found["round_tokens"] + found["plain_tokens"] == text.shape[1] - IDS.shape[1] - 1
    assert len(found["acceptance_by_position"]) == 3
    assert found["draft_ms"] > 0 and found["verify_ms"] > 0
    assert "tokens per round" in model.moegraft.model_operator.placement()


def test_bfloat16_differs_only_at_near_ties(drafting: Any, stock: Any) -> None:
    """A verification of several tokens rounds differently than single steps. At the first difference of greedy texts, the two tokens'
    logits are within a few units in the last place; the number of differing texts is bounded to notice an increase."""
    model, plain = drafting("qwen3_moe", dtype=torch.bfloat16), stock("qwen3_moe", dtype=torch.bfloat16)
    plain = optimize_and_load(plain, "cpu-exact", progress=False)
    differing = 0
    for seed in range(12):
        ids = prompt(8, seed=seed)
        found = model.generate(ids, max_new_tokens=24, do_sample=False)
        expected = plain.generate(ids, max_new_tokens=24, do_sample=False)
        if torch.equal(found, expected):
            continue
        differing += 1
        place = int((found != expected)[0].nonzero()[0])
        with torch.no_grad():
            logits = plain(expected[:, :place]).logits[0, -1].float()
        gap = float(logits[expected[0, place]] - logits[found[0, place]])
        step = float(logits.abs().max()) * 2**-8  # a unit in the last place of a bfloat16
        assert abs(gap) <= 4 * step, f"text {seed} differs at token {place} by {gap / step:.1f} units"
    assert differing <= 6, f"{differing} of 12 texts differ"
