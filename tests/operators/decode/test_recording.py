"""What a program must not pretend to know, in a module of the caller's own: each is refused by name, and computed as before."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.decoding import assert_equal_steps, assert_replays, fed, new_model, reasons
from support.families import prompt
from torch import nn

from moegraft.cpu_backend import NormSpec
from moegraft.operators.base import CACHE

Compute = Callable[[torch.Tensor, int], torch.Tensor]
NORM = NormSpec("float32", 8, 1e-6)
WEIGHT = torch.linspace(-1, 1, 8)


class Computes(nn.Module):
    """A decoder layer that, in steps, adds the mean of what `compute` makes of eight numbers and of the position."""

    def __init__(self, layer: nn.Module, compute: Compute) -> None:
        super().__init__()
        self.layer = layer
        self.compute = compute

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        position = kwargs[CACHE].get_seq_length(1)
        found: torch.Tensor = self.layer(x, *args, **kwargs)
        if x.shape[1] > 1:
            return found
        return found + self.compute(torch.arange(8.0) + position, position).float().reshape(1, -1).mean(-1) / (position + 1)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)


def computing(compute: Compute) -> Any:
    model: Any = new_model("qwen3_moe")
    model.model.layers[0] = Computes(model.model.layers[0], compute)
    return model


def branched(x: torch.Tensor, position: int) -> torch.Tensor:
    return x + 1 if bool((x > 6).any()) else x - 1


def python_made(x: torch.Tensor, position: int) -> torch.Tensor:
    return x + torch.tensor([position, 2 * position])[1]


def other_calls(x: torch.Tensor, position: int) -> torch.Tensor:
    return x.cos() if position % 2 else x.sin()


def other_argument(x: torch.Tensor, position: int) -> torch.Tensor:
    return x * (1.5 if position % 2 else 2.5)


def other_type(x: torch.Tensor, position: int) -> torch.Tensor:
    return x.to(torch.float16 if position % 2 else torch.bfloat16).float()


def other_weight(x: torch.Tensor, position: int) -> torch.Tensor:
    return x + (WEIGHT.clone() if position % 2 else -WEIGHT)


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda x, position: x * x.sum().item(), "_local_scalar_dense"),
        (branched, "_local_scalar_dense|is_nonzero"),
        (lambda x, position: x + 0 * torch.rand(8), "rand"),
        (lambda x, position: 0 * torch.multinomial(x + 1, 1), "multinomial"),
        (lambda x, position: x.masked_select(x > 7), "masked_select"),
        (python_made, "Python makes"),
        (other_calls, r"differ in what they compute \(aten.(cos|sin).default\)"),
        (other_argument, "an argument of .*mul.* differs"),
        (other_type, "differ"),
        (other_weight, "differ"),
        (lambda x, position: torch.ones(600)[: position + 1].topk(min(position + 1, 50)).values, "topk"),
    ],
    ids=["read", "branched", "drawn", "sampled", "masked", "python_made", "calls", "argument", "type", "weight", "chosen"],
)
def test_what_cannot_be_replayed(compute: Compute, reason: str) -> None:
    model = computing(compute)
    assert_equal_steps(model, prompt(20), [7, *[1] * 7], least=0)
    (found,) = reasons(model)
    assert re.search(reason, found)


def numbers_of_the_position(x: torch.Tensor, position: int) -> torch.Tensor:
    return torch.arange(3, position + 5).float() + 2 * position


def rows_of_a_table(x: torch.Tensor, position: int) -> torch.Tensor:
    table = torch.arange(3 * position + 12).float().view(-1, 3).T.contiguous().T + x[:3]  # the columns are contiguous, the rows are not
    return table.index_select(0, torch.arange(0, 2 * (position + 2)).view(-1, 2)[:, 0] // 2)


def rows_of_integers(x: torch.Tensor, position: int) -> torch.Tensor:
    return torch.arange(3 * position).view(-1, 3).index_select(0, x[:5].long() - position)


def numbers_by_index(x: torch.Tensor, position: int) -> torch.Tensor:
    index = torch.arange(3 * position + 2)[::3].view(1, -1) - 2  # the first one counts from the end
    return torch.arange(3 * position).float()[index].sum(-1) + x[(x[:4].view(2, 2) - position).long()]


def repeated(x: torch.Tensor, position: int) -> torch.Tensor:
    return x[:6].view(2, 3).repeat(2, 1, 3) + x[:2].view(2, 1).repeat(1, 9)


def padded(x: torch.Tensor, position: int) -> torch.Tensor:
    return torch.nn.functional.pad((x[0] + torch.arange(2 * position + 2)).view(2, -1), (1, 2, 3, 0), value=-1.5)


def scattered(x: torch.Tensor, position: int) -> torch.Tensor:
    index = (x[:3].view(1, 3) - position).to(torch.int32)
    marks = torch.zeros(1, position + 2, dtype=torch.bool).scatter(-1, index, True)
    return marks.float() + torch.arange(position + 2).view(1, -1)


@pytest.mark.parametrize(
    "compute",
    [numbers_of_the_position, rows_of_a_table, rows_of_integers, numbers_by_index, repeated, padded, scattered],
    ids=lambda compute: compute.__name__,
)
def test_calls_that_become_operations(compute: Compute, caplog: pytest.LogCaptureFixture) -> None:
    """None of them is left to PyTorch."""
    caplog.set_level("DEBUG", logger="moegraft.operators.decode")
    model = computing(compute)
    assert_equal_steps(model, prompt(20), [7, *[1] * 10], least=5)
    (made,) = (message for message in caplog.messages if "decode steps are native programs" in message)
    assert "calls of PyTorch" not in made and not reasons(model)


def test_steps_with_a_call_more_or_less() -> None:
    turns = itertools.count()

    class More(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner(x)
            return found + 1 if next(turns) % 2 else found

    model: Any = new_model("qwen3_moe")
    model.lm_head = More(model.lm_head)
    assert_equal_steps(model, prompt(20), [7, *[1] * 13], least=0)
    assert any(re.search(r"\d+ calls after \d+", reason) for reason in reasons(model))


def test_numbers_that_follow_the_position_otherwise() -> None:
    """From one recording to the next there are two positions more, and one number."""
    model = computing(lambda x, position: torch.ones(position // 2).cumsum(0))
    assert_replays(model, lambda: torch.cat([fed(model, prompt(20), [start, 1]) for start in (7, 9, 11, 13, 15, 17)], 1))
    assert any("does not follow the position" in reason for reason in reasons(model))


def test_a_size_that_depends_on_the_data() -> None:
    """Steps are replayed as long as it is the recorded one."""

    def above(x: torch.Tensor, position: int) -> torch.Tensor:
        return torch.nonzero(x > 20.0)[:, 0] + x[x > 20.0].long()  # eight of them from position 21 on, fewer before

    model = computing(above)
    assert_equal_steps(model, prompt(50), [24, *[1] * 20], least=10)
    assert not reasons(model)
    assert_equal_steps(model, prompt(50), [16, *[1] * 20], least=5)
    assert any(re.search(r"nonzero.*returns \(\d+, 1\), expected \(8, 1\)", reason) for reason in reasons(model))


def test_a_kernel_over_memory_that_no_tensor_of_the_step_holds() -> None:
    foreign = np.ones((1, 8), np.float32)

    def normed(x: torch.Tensor, position: int) -> torch.Tensor:
        out = torch.empty(1, 8)
        model.moegraft.context.runtime.norm(NORM, foreign, None, out)
        return out

    model = computing(normed)
    assert_equal_steps(model, prompt(20), [7, *[1] * 8], least=0)
    assert any("reads memory that no tensor of the step holds" in reason for reason in reasons(model))
