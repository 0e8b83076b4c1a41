"""Blocks that call their experts with a row of each token for each expert, made to compute those of the chosen experts alone.

Shapes: T tokens, K experts per token, E experts, H hidden.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.routing import Router, sibling_router


class ChosenRows:
    """Lets a block that is made to call its experts with a row of each token for each expert call them with rows of chosen ones alone.

    Such a block (Llama 4) multiplies hidden states by the scores of all experts, which its router returns as (T, E) with zeros for those
    that are not chosen, and adds up what the experts return for E * T rows. It computes the same from the scores of K experts, (T, K), for
    K * T rows. The router is made to return these, and the experts are called with the choice as those of other families are: `(K * T, H),
    ids (K * T, 1) int64, weights (K * T, 1)`, all 1 since the rows are multiplied already.
    """

    def __init__(self, block: nn.Module, experts: nn.Module, num_experts: int) -> None:
        router = sibling_router(block)
        assert router is not None, "a block with experts has a router"
        self._router = Router("", router, block, num_experts)
        self._chosen = threading.local()  # of the thread's last call of the router: (T, K) int64
        router.register_forward_hook(self._routed)
        experts.register_forward_pre_hook(self._called)

    def _routed(self, _module: nn.Module, _args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        scores, *others = output
        top_k_scores, self._chosen.index = scores.topk(self._router.top_k(), dim=-1)
        return (top_k_scores, *others)

    def _called(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if len(args) != 1:
            return args
        (rows,) = args
        index = self._chosen.index.T.reshape(-1, 1)
        if len(index) != len(rows):
            raise UnsupportedModelError(
                f"{type(module).__name__} was called with {len(rows)} rows where its router chose {len(index)} experts for all tokens"
            )
        return rows, index, rows.new_ones(index.shape)
