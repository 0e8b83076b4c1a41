"""Every cache policy matches a plain loop over tokens, and all of them satisfy the policy interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("hypothesis", reason="an extra for tests: pip install 'moegraft[test]'")

from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.routing_traces import random_trace

from moegraft.cpu_backend import CachePolicy
from moegraft.operators.offload.options import CacheOptions, make_policy
from moegraft.operators.routing_trace import Trace, TraceError

LAYERS, EXPERTS, TOP_K = 2, 7, 3
PATHS = [f"layers.{layer}" for layer in range(LAYERS)]
Make = Callable[[], CachePolicy]
MADE: dict[str, Make] = {
    "lru": lambda: CachePolicy("lru", LAYERS, EXPERTS),
    "lfu": lambda: CachePolicy("lfu", LAYERS, EXPERTS),
    "mrs": lambda: CachePolicy("mrs", LAYERS, EXPERTS, alpha=0.3, top_p=4),
    "mrs of all scores": lambda: CachePolicy("mrs", LAYERS, EXPERTS, alpha=0.3),
    "mrs of the last token": lambda: CachePolicy("mrs", LAYERS, EXPERTS, alpha=1.0, top_p=4),
    "score_frequency": lambda: CachePolicy("score_frequency", LAYERS, EXPERTS, alpha=0.3, top_p=4, frequency_alpha=0.1),
}


def trace_of(tokens: int, seed: int = 0, padded: float = 0.2) -> Trace:
    return random_trace(tokens, LAYERS, EXPERTS, TOP_K, seed=seed, padded=padded)


def play(policy: CachePolicy, trace: Trace, steps: list[int]) -> None:
    """Update the policy with every layer of the trace, in steps of so many tokens."""
    first = 0
    for tokens in steps:
        for layer in range(LAYERS):
            update(policy, layer, trace.scores[first : first + tokens, layer], trace.chosen[first : first + tokens, layer])
        first += tokens


def update(policy: CachePolicy, layer: int, scores: NDArray[np.float32], chosen: NDArray[np.int64]) -> None:
    policy.update([layer], scores[None], chosen[None])


def loop_mrs(trace: Trace, layer: int, alpha: float, top_p: int) -> list[float]:
    average = [0.0] * EXPERTS
    for scores in trace.scores[:, layer].tolist():
        top = sorted(scores, reverse=True)[:top_p]
        average = [alpha * (score if score in top else 0.0) + (1 - alpha) * old for score, old in zip(scores, average, strict=True)]
    return average


def loop_uses(trace: Trace, layer: int, alpha: float) -> list[float]:
    average = [0.0] * EXPERTS
    for chosen in trace.chosen[:, layer].tolist():
        average = [alpha * (expert in chosen) + (1 - alpha) * old for expert, old in enumerate(average)]
    return average


def loop_last(trace: Trace, layer: int) -> list[int]:
    """The token that used each expert last; 0: none, the first token is 1."""
    last = [0] * EXPERTS
    for token, chosen in enumerate(trace.chosen[:, layer].tolist(), start=1):
        for expert in chosen:
            if expert >= 0:
                last[expert] = token
    return last


@pytest.mark.parametrize("steps", [[1] * 40, [7, 1, 1, 31], [40]], ids=["decoding", "mixed", "a prompt"])
@pytest.mark.parametrize("layer", range(LAYERS))
class TestAgainstLoops:
    def played(self, name: str, layer: int, steps: list[int]) -> tuple[Trace, NDArray[np.float64]]:
        trace = trace_of(40)
        policy = MADE[name]()
        play(policy, trace, steps)
        return trace, policy.priority(layer)

    def test_mrs(self, layer: int, steps: list[int]) -> None:
        for name, alpha, top_p in (("mrs", 0.3, 4), ("mrs of all scores", 0.3, EXPERTS), ("mrs of the last token", 1.0, 4)):
            trace, found = self.played(name, layer, steps)
            np.testing.assert_allclose(found, loop_mrs(trace, layer, alpha, top_p), rtol=1e-6)

    def test_score_frequency(self, layer: int, steps: list[int]) -> None:
        trace, found = self.played("score_frequency", layer, steps)
        scores, uses = np.array(loop_mrs(trace, layer, 0.3, 4)), np.array(loop_uses(trace, layer, 0.1))
        np.testing.assert_allclose(found, scores / scores.mean() + uses / uses.mean(), rtol=1e-6)

    def test_lru(self, layer: int, steps: list[int]) -> None:
        trace, found = self.played("lru", layer, steps)
        last = loop_last(trace, layer)
        for one in range(EXPERTS):
            for other in range(EXPERTS):
                assert (found[one] < found[other]) == (last[one] < last[other])

    def test_lfu(self, layer: int, steps: list[int]) -> None:
        trace, found = self.played("lfu", layer, steps)
        uses, last = (trace.chosen[:, layer, :, None] == np.arange(EXPERTS)).sum((0, 1)), loop_last(trace, layer)
        keys = list(zip(uses.tolist(), last, strict=True))
        for one in range(EXPERTS):
            for other in range(EXPERTS):
                assert (found[one] < found[other]) == (keys[one] < keys[other])


def test_the_papers_equation_by_hand() -> None:
    policy = CachePolicy("mrs", 1, 4, alpha=0.5, top_p=2)
    no_experts = np.full((1, 1), -1)
    update(policy, 0, np.array([[0.5, 0.3, 0.15, 0.05]], np.float32), no_experts)
    update(policy, 0, np.array([[0.1, 0.2, 0.3, 0.4]], np.float32), no_experts)
    np.testing.assert_allclose(policy.priority(0), [0.125, 0.075, 0.15, 0.2], rtol=1e-6)


@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=8))
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("name", MADE)
def test_batched_tokens_equal_sequential_ones(name: str, seed: int, cuts: list[int]) -> None:
    trace = trace_of(sum(cuts), seed)
    together, apart = MADE[name](), MADE[name]()
    play(together, trace, cuts)
    play(apart, trace, [1] * sum(cuts))
    for layer in range(LAYERS):
        # The clocks of interleaved layers differ; the order within a layer does not.
        found, expected = together.priority(layer), apart.priority(layer)
        if name in ("lru", "lfu"):
            found, expected = (np.sign(rank[:, None] - rank[None, :]) for rank in (found, expected))
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-12)


def test_a_long_prompt_equals_its_tokens() -> None:
    """Tokens of negligible weight are skipped: with alpha 0.1, 3,000 tokens are more than count."""
    trace = trace_of(3000)
    together, apart = (CachePolicy("mrs", LAYERS, EXPERTS, alpha=0.1, top_p=4) for _ in range(2))
    play(together, trace, [3000])
    play(apart, trace, [1] * 3000)
    np.testing.assert_allclose(together.priority(1), apart.priority(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MADE)
class TestWhatAllOwe:
    def test_layers_are_independent(self, name: str) -> None:
        trace, policy = trace_of(5), MADE[name]()
        update(policy, 0, trace.scores[:, 0], trace.chosen[:, 0])
        assert not policy.priority(1).any()
        assert policy.priority(0).any()

    def test_steps_without_tokens_change_nothing(self, name: str) -> None:
        trace, policy = trace_of(5), MADE[name]()
        play(policy, trace, [5])
        before = policy.priority(0).copy()
        update(policy, 0, trace.scores[:0, 0], trace.chosen[:0, 0])
        np.testing.assert_array_equal(policy.priority(0), before)

    def test_inputs_are_not_modified(self, name: str) -> None:
        trace = trace_of(5)
        scores, chosen = trace.scores.copy(), trace.chosen.copy()
        play(MADE[name](), trace, [1, 4])
        np.testing.assert_array_equal(trace.scores, scores)
        np.testing.assert_array_equal(trace.chosen, chosen)

    def test_nan_scores_do_not_stay(self, name: str) -> None:
        trace, policy = trace_of(6), MADE[name]()
        play(policy, trace, [5])
        broken = np.full((1, EXPERTS), np.nan, np.float32)
        update(policy, 0, broken, trace.chosen[5:6, 0])
        assert np.isfinite(policy.priority(0)).all()
        update(policy, 0, trace.scores[5:6, 0], trace.chosen[5:6, 0])
        assert np.isfinite(policy.priority(0)).all()

    def test_the_ranking_is_read_only(self, name: str) -> None:
        trace, policy = trace_of(5), MADE[name]()
        play(policy, trace, [5])
        for shown in (policy.priority(0), policy.priorities()):
            with pytest.raises(ValueError, match="read-only"):
                shown[:] = 0


def test_lru_compares_layers() -> None:
    policy = CachePolicy("lru", 2, 4)
    scores = np.zeros((1, 4), np.float32)
    update(policy, 0, scores, np.array([[3]]))
    update(policy, 1, scores, np.array([[0]]))
    assert policy.priority(1)[0] > policy.priority(0)[3] > policy.priority(1)[1]
    update(policy, 0, scores, np.array([[2]]))
    assert policy.priority(0)[2] > policy.priority(1)[0]


def test_calls_that_are_wrong() -> None:
    policy = CachePolicy("mrs", 2, 4)
    scores, chosen = np.zeros((1, 3, 4), np.float32), np.zeros((1, 3, 2), np.int64)
    for layers, wrong in (([2], scores), ([-1], scores), ([0, 1], scores), ([0], scores[:, :, :3]), ([0], scores[:, :2]), ([0], scores[0])):
        with pytest.raises(ValueError, match="CachePolicy"):
            policy.update(layers, wrong, chosen)
    with pytest.raises(ValueError, match="there is no layer 2"):
        policy.priority(2)
    profile = np.zeros((2, 4), np.int64)
    for arguments in ({"policy": "mru"}, {"policy": "static"}, {"profile": profile}, {"alpha": 0.0}, {"frequency_alpha": float("nan")},
                      {"policy": "static", "profile": profile[:1]}, {"layers": 0}):  # fmt: skip
        with pytest.raises(ValueError, match=r"policy|CachePolicy"):
            CachePolicy(**{"policy": "mrs", "layers": 2, "num_experts": 4, **arguments})  # type: ignore[arg-type]


def test_ids_of_no_expert_are_padding() -> None:
    policy, other = (CachePolicy("lfu", 1, 4) for _ in range(2))
    scores = np.zeros((2, 4), np.float32)
    update(policy, 0, scores, np.array([[1, -1], [2, 4]]))
    update(other, 0, scores, np.array([[1], [2]]))
    np.testing.assert_array_equal(policy.priority(0), other.priority(0))


class TestOptions:
    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"alpha": 0.0}, "alpha must be above 0 and at most 1, not 0.0"),
            ({"alpha": 1.5}, "alpha must be above 0"),
            ({"frequency_alpha": -0.1}, "frequency_alpha must be above 0"),
            ({"top_p": 0}, "top_p must be 1 or more, not 0"),
            ({"policy": "static"}, "policy 'static' needs 'profile'"),
            ({"profile": Path("trace.npz")}, "policy 'static' needs 'profile'"),
        ],
    )
    def test_invalid_options_are_rejected(self, wrong: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            CacheOptions(**wrong)  # type: ignore[arg-type]

    def test_which_options_bypass(self) -> None:
        assert not CacheOptions(policy="lru").bypasses
        assert CacheOptions(policy="static", profile=Path("trace.npz")).bypasses

    @pytest.mark.parametrize("policy", ["mrs", "lru", "lfu", "score_frequency"])
    def test_each_name_makes_its_policy(self, policy: str) -> None:
        trace = trace_of(30)
        made = make_policy(
            CacheOptions(policy=policy, alpha=0.3, top_p=4, frequency_alpha=0.1),  # type: ignore[arg-type]
            PATHS,
            EXPERTS,
            TOP_K,
        )
        expected = MADE[policy]()
        play(made, trace, [1] * 30)
        play(expected, trace, [1] * 30)
        np.testing.assert_array_equal(made.priority(1), expected.priority(1))

    def test_top_p_is_twice_top_k_unless_given(self) -> None:
        trace = trace_of(30)
        for options, top_p in ((CacheOptions(policy="mrs"), 2 * TOP_K), (CacheOptions(policy="mrs", top_p=1), 1)):
            made = make_policy(options, PATHS, EXPERTS, TOP_K)
            expected = CachePolicy("mrs", LAYERS, EXPERTS, alpha=options.alpha, top_p=top_p)
            play(made, trace, [30])
            play(expected, trace, [30])
            np.testing.assert_array_equal(made.priority(0), expected.priority(0))

    def test_top_p_is_capped_at_all_experts(self) -> None:
        trace = trace_of(30)
        made = make_policy(CacheOptions(policy="mrs", alpha=0.3, top_p=100), PATHS, EXPERTS, TOP_K)
        play(made, trace, [30])
        np.testing.assert_allclose(made.priority(0), loop_mrs(trace, 0, 0.3, EXPERTS), rtol=1e-6)

    def test_static_ranks_by_a_recorded_trace(self, tmp_path: Path) -> None:
        trace = trace_of(30)
        trace.save(tmp_path / "profile.npz")
        options = CacheOptions(policy="static", profile=tmp_path / "profile.npz")
        policy = make_policy(options, trace.layers, EXPERTS, TOP_K)
        play(policy, trace_of(30, seed=1), [30])
        np.testing.assert_array_equal(policy.priority(1), trace.loads()[1])
        np.testing.assert_array_equal(make_policy(options, trace.layers[1:], EXPERTS, TOP_K).priority(0), trace.loads()[1])
        with pytest.raises(TraceError, match=r"profile\.npz: the profile of another model, which has no layers\.9"):
            make_policy(options, [trace.layers[0], "layers.9"], EXPERTS, TOP_K)
        with pytest.raises(TraceError, match=r"profile\.npz: a profile of layers with 7 experts, where this one has 8"):
            make_policy(options, trace.layers, EXPERTS + 1, TOP_K)


@pytest.mark.parametrize("policy", ["mrs", "lru", "lfu", "score_frequency"])
@pytest.mark.parametrize("tokens", [1, 4, 300])  # 300: more than the average remembers
@pytest.mark.parametrize("top_p", [None, 3, 100])
def test_layers_updated_together_rank_as_one_by_one(policy: str, tokens: int, top_p: int | None) -> None:
    rng = np.random.default_rng(0)
    options = CacheOptions(policy=policy, top_p=top_p, alpha=0.2)  # type: ignore[arg-type]
    together, one_by_one = (make_policy(options, list("abcde"), 12, 2) for _ in range(2))
    for _ in range(3):
        layers = np.array([0, 2, 3])
        scores = rng.random((3, tokens, 12), np.float32)
        scores[1, 0, 0] = np.nan if policy == "mrs" and tokens == 4 else 0.5  # is not learnt
        chosen = np.argsort(-scores, axis=2)[..., :2]
        chosen[0, 0, 1] = -1  # padded
        together.update(layers.tolist(), scores, chosen)
        for number, layer in enumerate(layers.tolist()):
            update(one_by_one, layer, scores[number], chosen[number])
    for layer in range(5):
        np.testing.assert_allclose(together.priority(layer), one_by_one.priority(layer), rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(together.priorities()[layer], together.priority(layer), rtol=1e-12)
