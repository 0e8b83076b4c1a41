"""A recorded trace matches what the model routes when it decodes; its predictions match the later layers' routers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.families import build_model, case_of, prompt
from support.routing_traces import recall_share
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.routing_trace import RoutedCall, Trace, TraceError, record_trace, watch_routing


def model_of(model_type: str) -> PreTrainedModel:
    return build_model(case_of(model_type))


def texts(*lengths: int) -> list[torch.Tensor]:
    return [prompt(length, seed=length)[0] for length in lengths]


@torch.no_grad()
def decoded(model: PreTrainedModel, ids: torch.Tensor) -> list[RoutedCall]:
    """Return every call of experts when the tokens are decoded one at a time."""
    calls: list[RoutedCall] = []
    past = None
    with watch_routing(model, calls.append):
        for token in ids:
            past = model(input_ids=token[None, None], past_key_values=past, use_cache=True).past_key_values
    return calls


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_one_pass_over_a_text_routes_like_decoding(model_type: str) -> None:
    model, (ids,) = model_of(model_type), texts(12)
    trace = record_trace(model, [ids], "tiny")
    calls = decoded(model, ids)
    assert len(calls) == trace.num_tokens * trace.num_layers
    for place, call in enumerate(calls):
        token, layer = divmod(place, trace.num_layers)
        assert call.router.path == trace.layers[layer]
        assert set(trace.chosen[token, layer].tolist()) == set(call.top_k_index[0].tolist())
        np.testing.assert_allclose(trace.scores[token, layer], call.scores[0], rtol=1e-3, atol=1e-5)
        order = np.argsort(trace.chosen[token, layer]), np.argsort(call.top_k_index[0].numpy())
        np.testing.assert_allclose(trace.weights[token, layer][order[0]], call.top_k_weights[0].numpy()[order[1]], rtol=1e-3, atol=1e-5)


def test_predictions_apply_later_routers_to_earlier_hidden_states() -> None:
    model, (ids,) = model_of("mixtral"), texts(9)
    calls: list[RoutedCall] = []
    with torch.no_grad(), watch_routing(model, calls.append):
        model(input_ids=ids[None])
    trace = record_trace(model, [ids], "tiny")
    assert trace.depths == 3
    for depth in range(3):
        for layer in range(3):
            found = trace.predicted[depth, :, layer]
            if layer <= depth:
                assert (found == -1).all()
            else:
                expected = calls[layer].router.route(calls[layer - 1 - depth].router_input)
                np.testing.assert_array_equal(found, expected)
    used = trace.used()
    right = sum(
        int(used[token, layer, expert]) for token in range(9) for layer in (1, 2) for expert in trace.predicted[0, token, layer].tolist()
    )
    assert recall_share(trace, 1) == pytest.approx(right / used[:, 1:].sum())


def test_several_texts_are_concatenated() -> None:
    model = model_of("qwen3_moe")
    trace = record_trace(model, texts(4, 6), "tiny", depths=1)
    assert trace.depths == 1
    np.testing.assert_array_equal(trace.starts, [place in (0, 4) for place in range(10)])
    alone = record_trace(model, texts(6), "tiny", depths=1)
    np.testing.assert_array_equal(trace.part(4, 10).chosen, alone.chosen)
    assert trace.layers == ("model.layers.1.mlp.experts", "model.layers.2.mlp.experts")  # the first is dense
    assert trace.source == "tiny"


def test_an_injected_model_gives_the_same_trace() -> None:
    stock = record_trace(model_of("gpt_oss"), texts(8), "tiny")
    injected = record_trace(optimize_and_load(model_of("gpt_oss"), "cpu-exact", progress=False, threads=1), texts(8), "tiny")
    np.testing.assert_array_equal(injected.chosen, stock.chosen)
    np.testing.assert_allclose(injected.scores, stock.scores, rtol=1e-4, atol=1e-6)


class Blocks(nn.Module):
    """Two layers with routers, one of which has more experts."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, 8)
        self.layers = nn.ModuleList(nn.ModuleDict({"gate": nn.Linear(8, size), "experts": Nothing(size)}) for size in sizes)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
        hidden_states: torch.Tensor = self.embed(input_ids)[0]
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            logits = layer["gate"](hidden_states)
            index = logits.topk(2, dim=-1).indices
            index[0, 0], index[1, 0] = -1, logits.shape[-1]  # both forms of a padded slot
            hidden_states = layer["experts"](hidden_states, index, torch.ones_like(index).bfloat16())
        return hidden_states


class Nothing(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return hidden_states


def test_both_forms_of_padded_slots_become_minus_one() -> None:
    trace = record_trace(Blocks(6), texts(5), "blocks", depths=0)
    assert trace.chosen[0, 0, 0] == trace.chosen[1, 0, 0] == -1
    assert (trace.chosen[2:] >= 0).all()
    assert trace.weights.dtype == np.float32


def test_models_without_one_routing_shape_are_refused() -> None:
    with pytest.raises(TraceError, match=r"layers differ in \(experts, experts per token\): \[\(6, 2\), \(7, 2\)\]"):
        record_trace(Blocks(6, 7), texts(5), "blocks", depths=0)
    with pytest.raises(UnsupportedModelError, match="Blocks ran no experts module that has a router"):
        record_trace(Blocks(), texts(5), "blocks")
    with pytest.raises(ValueError, match="no traces to join"):
        record_trace(Blocks(6), [], "blocks")


@pytest.fixture(scope="module")
def trained() -> Trace:
    """Record the bundled model on a few hundred random ids; tests on it must hold for any input."""
    model = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32).eval()
    ids = torch.randint(3, 1000, (400,), generator=torch.Generator().manual_seed(0))
    return record_trace(model, [ids], "demo")


def test_predictions_of_a_trained_model_beat_chance(trained: Trace) -> None:
    """Predictions are better than chance, and better for nearer layers."""
    chance = trained.top_k / trained.num_experts
    recalls = [recall_share(trained, depth) for depth in (1, 2, 3)]
    assert recalls == sorted(recalls, reverse=True)
    assert recalls[-1] > 1.5 * chance
