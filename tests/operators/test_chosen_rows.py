"""Blocks made to call their experts with a row of each token for each expert compute the same from the rows of chosen experts."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from support.families import build_model, case_of, prompt, served_cases
from torch import nn
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from moegraft.injection import optimize_and_load
from moegraft.operators.errors import MoegraftError, UnsupportedModelError
from moegraft.operators.layout import read_layout
from moegraft.operators.reference import reference_experts
from moegraft.operators.routing import ChosenRows
from moegraft.operators.routing_trace import watch_routing

EXPERTS, HIDDEN, INTERMEDIATE = 6, 20, 7
BUILT = [case.model_type for case in served_cases() if case.family == "llama4"]


class GivenExperts(nn.Module):
    """Experts with the interface of operators, which remember what they were given."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        layout = read_layout(stock)
        gate_up, down = stock.get_parameter("gate_up_proj").detach(), stock.get_parameter("down_proj").detach()
        stored = {"gate": gate_up, "up": gate_up, "down": down}
        self.matrices = [torch.stack([layout.cut(part, expert) for expert in experts]) for part, experts in stored.items()]  # type: ignore[arg-type]
        self.gate = layout.gate
        self.given: tuple[torch.Tensor, ...] = ()

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        self.given = hidden_states, top_k_index, top_k_weights
        gate, up, down = self.matrices
        return reference_experts(hidden_states, top_k_index, top_k_weights, gate, up, down, self.gate)


def stock_block(top_k: int, seed: int = 0) -> Llama4TextMoe:
    config = Llama4TextConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS, num_experts_per_tok=top_k, num_attention_heads=2
    )
    torch.manual_seed(seed)
    block = Llama4TextMoe(config).eval()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    return block


def chosen(top_k: int) -> Llama4TextMoe:
    block = stock_block(top_k)
    block.experts = GivenExperts(block.experts)
    ChosenRows(block, block.experts, EXPERTS)
    return block


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("top_k", [1, 3, EXPERTS])
@torch.no_grad()
def test_outputs_are_those_of_all_rows(top_k: int, tokens: int) -> None:
    x = torch.randn(tokens, HIDDEN)
    stock, block = stock_block(top_k), chosen(top_k)
    expected, logits = stock(x)
    found, own_logits = block(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(own_logits, logits)
    rows, index, weights = block.experts.given
    assert rows.shape == (top_k * tokens, HIDDEN) and index.shape == weights.shape == (top_k * tokens, 1)
    assert weights.eq(1).all()
    assert {*map(tuple, index.view(top_k, tokens).T.sort(-1).values.tolist())} == {
        *map(tuple, logits.topk(top_k).indices.sort(-1).values.tolist())
    }


def test_gradients_are_those_of_all_rows() -> None:
    x = torch.randn(5, HIDDEN)
    found = []
    for block in (stock_block(2), chosen(2)):
        given = x.clone().requires_grad_()
        block(given)[0].square().sum().backward()
        assert given.grad is not None and block.router.weight.grad is not None
        found.append((given.grad, block.router.weight.grad))
    for own, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_threads_keep_their_own_choice() -> None:
    """The second thread's call of the router comes between the first one's calls of router and experts."""
    block = chosen(1)
    inputs = torch.randn(2, 4, HIDDEN)
    expected = [stock_block(1)(x)[0] for x in inputs]
    inner: list[torch.Tensor] = []

    def other_call(*_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: inner.append(block(inputs[1])[0]))
            thread.start()
            thread.join()

    block.router.register_forward_hook(other_call)
    torch.testing.assert_close(block(inputs[0])[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inner[0], expected[1], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_calls_with_the_choice_pass_and_other_rows_are_refused() -> None:
    block = chosen(2)
    x = torch.randn(3, HIDDEN)
    index, weights = torch.tensor([[0], [5], [2]]), torch.full((3, 1), 0.25)
    block.experts(x, index, weights)
    assert all(map(torch.equal, block.experts.given, (x, index, weights)))
    block.router(x)
    with pytest.raises(UnsupportedModelError, match="18 rows where its router chose 6 experts"):
        block.experts(torch.zeros(EXPERTS * 3, HIDDEN))


@pytest.mark.parametrize("injected", [False, True])
@pytest.mark.parametrize("model_type", BUILT)  # one expert per token, and two
@torch.no_grad()
def test_routing_is_watched_as_in_other_families(model_type: str, injected: bool) -> None:
    model = build_model(case_of(model_type))
    if injected:
        model = optimize_and_load(model, "cpu-exact", progress=False, threads=1)
    calls = []
    with watch_routing(model, calls.append) as routers:
        model(input_ids=prompt(9, batch=2))
    assert len(calls) == len(routers) > 0
    top_k = model.config.get_text_config().num_experts_per_tok
    for call in calls:
        assert call.top_k_index.shape == call.top_k_weights.shape == (18, top_k)
        assert torch.equal(call.router.route(call.router_input).sort(-1).values, call.top_k_index.sort(-1).values)
        torch.testing.assert_close(call.scores.sum(-1), torch.ones(18))
        assert torch.equal(call.scores.topk(top_k).indices.sort(-1).values, call.top_k_index.sort(-1).values)


@pytest.mark.parametrize("model_type", BUILT)
def test_drafts_with_fewer_experts_are_refused(model_type: str, tmp_path: Path) -> None:
    reason = {"llama4_text": "each token has one", "llama4": "an input of its own for each"}[model_type]
    with pytest.raises(MoegraftError, match=f"{reason}; write 'draft: ngram'"):
        optimize_and_load(build_model(case_of(model_type)), "speculative", progress=False)
    optimize_and_load(build_model(case_of(model_type)), "speculative", vars={"draft": "ngram"}, progress=False)
