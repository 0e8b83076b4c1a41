"""The source of classes, by which the kinds of modules are told."""

import inspect

import pytest
import torch
from torch import nn
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3_moe import modeling_qwen3_moe

from moegraft.operators.structure import source_of, weights_read


class Outer(nn.Module):
    class Inner(nn.Module):
        def forward(self) -> str:
            return "inner"


def make() -> type[nn.Module]:
    class Local(nn.Module):
        def forward(self) -> str:
            return "local"

    return Local


@pytest.mark.parametrize(
    "owner",
    [
        Outer,
        Outer.Inner,
        make(),
        modeling_qwen3_moe.Qwen3MoeRMSNorm,  # with a decorator
        modeling_qwen3_moe.Qwen3MoeAttention,
        modeling_gpt_oss.GptOssAttention,
        nn.Linear,
    ],
    ids=lambda owner: owner.__qualname__,
)
def test_it_is_what_python_finds(owner: type[nn.Module]) -> None:
    assert source_of(owner) == inspect.getsource(owner) != ""


def test_a_class_without_source_has_none() -> None:
    assert source_of(type("Made", (nn.Linear,), {})) == ""
    assert source_of(type("Elsewhere", (nn.Linear,), {"__module__": "no.such.module"})) == ""


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and x.dim() == 3:
            return x @ self.in_training.weight
        elif self.training:
            return x + self.in_training.weight
        if x.dim() == 3 or self.training:
            x = x @ self.in_both.weight
        return self.called(x) @ self.always.weight


def test_a_weight_that_is_read_in_training_alone_may_be_packed() -> None:
    assert weights_read(Reads) == {"in_both", "always"}
