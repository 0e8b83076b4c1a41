"""The layout and the gate of an experts module are recognised for every form in transformers, and other forms are refused."""

import math

import pytest
import torch
from torch import nn

from moegraft.operators.layout import read_layout, recognise_gate, why_unsupported
from moegraft.operators.reference import reference_gate
from moegraft.operators.structure import calls_all_rows

GATE, UP = torch.linspace(-30, 30, 61), torch.linspace(-30, 30, 61)


class Experts(nn.Module):
    """An experts module with the flags that transformers' decorator sets."""

    def __init__(self, *, transposed: bool = False, concatenated: bool = True, bias: bool = False, gated: bool = True) -> None:
        super().__init__()
        experts, hidden, intermediate = 3, 6, 4
        self.num_experts = experts
        self.has_gate, self.has_bias, self.is_transposed, self.is_concatenated = gated, bias, transposed, concatenated
        rows = 2 * intermediate if gated else intermediate
        first, down = (experts, rows, hidden), (experts, hidden, intermediate)
        if transposed:
            first, down = (experts, hidden, rows), (experts, intermediate, hidden)
        name = "gate_up_proj" if gated else "up_proj"
        self.register_parameter(name, nn.Parameter(torch.randn(first)))
        self.down_proj = nn.Parameter(torch.randn(down))
        if bias:
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(experts, rows)))
            self.down_proj_bias = nn.Parameter(torch.randn(experts, hidden))
        self.act_fn = nn.SiLU()

    def split(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gate_up.chunk(2, dim=-1) if self.is_concatenated else (gate_up[..., ::2], gate_up[..., 1::2])  # type: ignore[return-value]

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = self.split(gate_up)
        return self.act_fn(gate) * up


class Oai(Experts):
    limit, alpha = 7.0, 1.702

    def __init__(self) -> None:
        super().__init__(transposed=True, concatenated=False, bias=True)
        self.limit, self.alpha = 7.0, 1.702

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = self.split(gate_up)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


class ClampedAfter(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.limit = 5.0

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = self.split(gate_up)
        return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


class Unknown(Experts):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = self.split(gate_up)
        return torch.sin(gate) * up


class Swapped(Experts):
    """A module whose flag is for concatenated storage, but which splits interleaved rows."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self.act_fn(gate_up[..., ::2]) * gate_up[..., 1::2]


@pytest.mark.parametrize("build", [Experts, Oai, ClampedAfter], ids=lambda build: build.__name__)
def test_recognised_gate_is_the_modules_own(build: type[Experts]) -> None:
    module = build()
    spec = recognise_gate(module)
    assert spec is not None
    pairs = torch.stack([GATE, UP.flip(0)], dim=-1)
    torch.testing.assert_close(reference_gate(spec, GATE[:, None], UP.flip(0)[:, None]), module._apply_gate(pairs))


def test_limits_before_and_after_the_activation_are_distinguished() -> None:
    oai, after = recognise_gate(Oai()), recognise_gate(ClampedAfter())
    assert oai is not None and after is not None
    assert (oai.gate_limit, oai.up_limit, oai.up_offset, oai.alpha) == (7.0, 7.0, 1.0, 1.702)
    assert (after.act_limit, after.up_limit, after.gate_limit) == (5.0, 5.0, math.inf)


def test_a_changed_module_is_recognised_anew() -> None:
    module = Oai()
    found = [recognise_gate(module), recognise_gate(module)]
    module.limit = 5.0
    found.append(recognise_gate(module))
    module._apply_gate = Experts(concatenated=False)._apply_gate  # type: ignore[method-assign]
    found.append(recognise_gate(module))
    module._apply_gate = Unknown()._apply_gate  # type: ignore[method-assign]
    assert recognise_gate(module) is None
    assert [spec and spec.gate_limit for spec in found] == [7.0, 7.0, 5.0, math.inf]


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "relu", "relu2", "silu"])
def test_every_activation_is_found(name: str) -> None:
    from transformers.activations import ACT2FN

    module = Experts()
    module.act_fn = ACT2FN[{"gelu_tanh": "gelu_pytorch_tanh"}.get(name, name)]
    spec = recognise_gate(module)
    assert spec is not None and spec.activation == name
    ungated = Experts(gated=False)
    ungated.act_fn = module.act_fn
    spec = recognise_gate(ungated)
    assert spec is not None and spec.activation == name


@pytest.mark.parametrize("build", [Unknown, Swapped], ids=lambda build: build.__name__)
def test_unknown_gates_are_refused(build: type[Experts]) -> None:
    assert "gate function" in (why_unsupported(build()) or "")


def test_other_forms_are_refused() -> None:
    assert "shared experts interface" in (why_unsupported(nn.Linear(2, 2)) or "")
    module = Experts()
    module.has_post_expert_norm = True
    assert "normalises" in (why_unsupported(module) or "")
    module = Experts()
    module.register_parameter("scale", nn.Parameter(torch.ones(3)))
    assert "scale" in (why_unsupported(module) or "")
    with pytest.raises(ValueError, match="scale"):
        read_layout(module)


class Undeclared(nn.Module):
    """Experts without flags, whose forward pass shows how they store matrices."""

    def __init__(self, transposed: bool, concatenated: bool) -> None:
        super().__init__()
        module = Experts(transposed=transposed, concatenated=concatenated)
        self.stored_as = transposed, concatenated
        self.num_experts, self.hidden, self.limit, self.act_fn = module.num_experts, 6, 4.5, module.act_fn
        self.gate_up_proj, self.down_proj = module.gate_up_proj, module.down_proj

    def gate_of(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1) if self.stored_as[1] else (gate_up[..., ::2], gate_up[..., 1::2])
        return self.act_fn(gate) * up.clamp(-self.limit, self.limit)

    def expert(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        gate_up, down = self.gate_up_proj[number], self.down_proj[number]
        if not self.stored_as[0]:
            gate_up, down = gate_up.T, down.T
        return self.gate_of(rows @ gate_up) @ down


class Routed(Undeclared):
    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for token, slot in torch.ones_like(top_k_index).nonzero().tolist():
            out[token] += self.expert(hidden_states[token], int(top_k_index[token, slot])) * top_k_weights[token, slot]
        return out


class AllRows(Undeclared):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.view(len(self.gate_up_proj), -1, self.hidden)
        return torch.cat([self.expert(each, number) for number, each in enumerate(rows)])


class Residual(AllRows):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + hidden_states


class SquaredWeights(Routed):
    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights**2)


class ScaledInputs(Routed):
    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states * top_k_weights, top_k_index, torch.ones_like(top_k_weights))


class Sine(AllRows):
    def gate_of(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gate_up.chunk(2, dim=-1)[0].sin()


class MoreArguments(Routed):
    def forward(self, hidden_states: torch.Tensor, batches: list[int]) -> torch.Tensor:  # type: ignore[override]
        return hidden_states.split(batches)[0]


@pytest.mark.parametrize("build", [Routed, AllRows])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("concatenated", [True, False])
def test_a_form_that_is_not_declared_is_found(concatenated: bool, transposed: bool, build: type[Undeclared]) -> None:
    module = build(transposed, concatenated)
    given = dict(module.named_parameters())
    layout = read_layout(module.to("meta"))
    assert (layout.num_experts, layout.hidden, layout.intermediate) == (3, 6, 4)
    assert (layout.gated, layout.bias, layout.transposed, layout.interleaved) == (True, False, transposed, not concatenated)
    assert (layout.gate.activation, layout.gate.up_limit, layout.gate.gate_limit) == ("silu", 4.5, math.inf)
    assert list(given) == ["gate_up_proj", "down_proj"] and calls_all_rows(module) == (build is AllRows)


@pytest.mark.parametrize("build", [Residual, SquaredWeights, ScaledInputs, Sine, MoreArguments])
def test_other_forward_passes_are_refused(build: type[Undeclared]) -> None:
    assert why_unsupported(build(True, True)) is not None


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("concatenated", [True, False])
def test_cut_gives_linear_orientation(transposed: bool, concatenated: bool) -> None:
    module = Experts(transposed=transposed, concatenated=concatenated, bias=True)
    layout = read_layout(module)
    x = torch.randn(5, layout.hidden)
    stored, bias = module.gate_up_proj[1].detach(), module.gate_up_proj_bias[1].detach()
    gate, up = module.split((x @ stored if transposed else x @ stored.T) + bias)
    for part, expected in (("gate", gate), ("up", up)):
        piece = layout.cut(part, stored)  # type: ignore[arg-type]
        assert tuple(piece.shape) == layout.part_shape(part)  # type: ignore[arg-type]
        torch.testing.assert_close(x @ piece.T + layout.cut(f"{part}_bias", bias), expected)  # type: ignore[arg-type]
    assert tuple(layout.cut("down", module.down_proj[1]).shape) == layout.part_shape("down") == (layout.hidden, layout.intermediate)


def test_layout_of_a_meta_module() -> None:
    with torch.device("meta"):
        module = Experts()
    assert read_layout(module) == read_layout(Experts())
