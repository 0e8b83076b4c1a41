"""What later layers would choose: as their routers do, by one product where that is the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moegraft.operators.offload.executors import LookAhead
from moegraft.operators.routing import Router

LAYERS, EXPERTS, HIDDEN, TOP_K = 4, 8, 16, 3


class Plain(nn.Module):
    """Chooses the largest products."""

    top_k = TOP_K

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN), requires_grad=False)
        self.calls = 0

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ self.weight.T

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.calls += 1
        logits = self.logits(hidden_states)
        weights, index = logits.softmax(-1).topk(TOP_K, dim=-1)
        return logits, weights, index


class Corrected(Plain):
    """Chooses by a correction as well."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", 10 * torch.randn(EXPERTS))

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden_states) + self.bias


class Reversed(Plain):
    """Chooses otherwise, by its code."""

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return -super().logits(hidden_states)


def look_ahead(*kinds: type[Plain]) -> tuple[LookAhead, list[Router]]:
    torch.manual_seed(0)
    routers = [Router(f"layers.{index}.mlp.experts", kind(), nn.Module(), EXPERTS) for index, kind in enumerate(kinds)]
    return LookAhead(routers), routers


@pytest.mark.parametrize("kinds", [(Plain,) * LAYERS, (Plain, Plain, Reversed, Plain), (Plain, Corrected, Plain, Plain)], ids=str)
@torch.no_grad()
def test_choices_are_those_of_the_routers(kinds: tuple[type[Plain], ...]) -> None:
    ahead, routers = look_ahead(*kinds)
    for tokens in (5, 1, 0, 7):
        x = torch.randn(tokens, HIDDEN)
        for layer in range(LAYERS):
            later = range(layer + 1, LAYERS)
            found = ahead.chosen(x, later)
            assert len(found) == len(later)
            for index, chosen in zip(later, found, strict=True):
                assert torch.equal(chosen, routers[index].route(x))


@torch.no_grad()
def test_routers_that_choose_by_their_products_are_not_called() -> None:
    ahead, routers = look_ahead(*(Plain,) * LAYERS)
    x = torch.randn(5, HIDDEN)
    ahead.chosen(x, range(1, LAYERS))
    calls = [router.module.calls for router in routers]
    ahead.chosen(x, range(1, LAYERS))
    ahead.chosen(x, range(2, LAYERS))
    assert [router.module.calls for router in routers] == calls
