"""The optimizer Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/) for matrices and for stacks of experts' matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed

COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5  # of the Newton-Schulz iteration
LIKE_ADAM = 0.2  # an update's root mean square with AdamW's learning rates (arXiv:2502.16982, equation 4)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return the nearest matrices, (..., M, N), whose singular values are all about 1."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    found = (matrices.mT if tall else matrices).to(torch.bfloat16)
    found = found / (found.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        square = found @ found.mT
        found = a * found + (b * square + c * square @ square) @ found
    return (found.mT if tall else found).float()


class Muon(torch.optim.Optimizer):
    """With several processes, each computes a part of the updates, and all take them all."""

    def __init__(self, weights: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        world, rank = (distributed.get_world_size(), distributed.get_rank()) if distributed.is_initialized() else (1, 0)
        for group in self.param_groups:
            updates = []
            for number, weight in enumerate(group["params"]):
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                ahead = weight.grad.lerp(state["momentum"], group["momentum"])
                updates.append(orthogonalized(ahead) if number % world == rank else torch.zeros_like(weight))
            if world > 1:
                sum_over_processes(updates)
            for weight, update in zip(group["params"], updates, strict=True):
                rate = group["lr"] * LIKE_ADAM * math.sqrt(max(weight.shape[-2:]))
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=rate)


def sum_over_processes(tensors: list[Tensor]) -> None:
    """Add up the tensors of all processes in place, in one exchange."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    distributed.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
