"""How an experts module stores its weights, read off the module itself, and how one expert's piece is cut from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from moegraft.cpu_backend import ExpertsShape, GateSpec
from moegraft.operators.experts.gates import recognise_gate
from moegraft.operators.weights import Part


@dataclass(frozen=True, slots=True)
class ExpertsLayout:
    """Sizes, gate and storage order of one experts module.

    Stored forms (transformers 5, `use_experts_implementation`): `gate_up_proj (E, 2I, H)` or, transposed, `(E, H, 2I)`;
    `down_proj (E, H, I)` or `(E, I, H)`; gate rows first, or interleaved with the up rows; `up_proj` where there is no gate.
    """

    num_experts: int
    hidden: int
    intermediate: int
    gated: bool
    bias: bool
    transposed: bool
    interleaved: bool
    gate: GateSpec

    @property
    def shape(self) -> ExpertsShape:
        return ExpertsShape(
            num_experts=self.num_experts, hidden=self.hidden, intermediate=self.intermediate, gated=self.gated, bias=self.bias
        )

    def parts(self) -> tuple[Part, ...]:
        matrices: tuple[Part, ...] = ("gate", "up", "down") if self.gated else ("up", "down")
        biases: tuple[Part, ...] = ("gate_bias", "up_bias", "down_bias") if self.gated else ("up_bias", "down_bias")
        return matrices + biases if self.bias else matrices

    def part_shape(self, part: Part) -> tuple[int, ...]:
        """The shape of one expert's piece in `nn.Linear` orientation."""
        rows = self.hidden if part.startswith("down") else self.intermediate
        if part.endswith("_bias"):
            return (rows,)
        return (rows, self.intermediate if part == "down" else self.hidden)

    def parameter(self, part: Part) -> str:
        """The name of the module's parameter that holds `part`."""
        matrix, _, bias = part.partition("_")
        name = "down_proj" if matrix == "down" else "gate_up_proj" if self.gated else "up_proj"
        return f"{name}_bias" if bias else name

    def cut(self, part: Part, stored: torch.Tensor) -> torch.Tensor:
        """One expert's piece as a view of that expert's slice of the stored parameter, `stored[expert]`."""
        piece = stored if part.endswith("_bias") or not self.transposed else stored.T
        if part.startswith("down") or not self.gated:
            return piece
        index = 0 if part.startswith("gate") else 1
        if self.interleaved:
            return piece[index::2]
        return piece[index * self.intermediate : (index + 1) * self.intermediate]


def why_unsupported(module: nn.Module) -> str | None:
    """The reason why a module does not follow the shared experts interface of transformers 5, or None when it does."""
    if not hasattr(module, "is_transposed") or not hasattr(module, "has_bias"):
        return f"{type(module).__name__} does not follow transformers' shared experts interface (use_experts_implementation)"
    if getattr(module, "has_post_expert_norm", False):
        return f"{type(module).__name__} normalises each expert's output, which the kernel cannot do"
    needed = {"down_proj", "gate_up_proj" if module.has_gate else "up_proj"}
    if module.has_bias:
        needed |= {f"{name}_bias" for name in needed}
    held = {name for name, _ in module.named_parameters(recurse=False)}
    if held != needed:
        return f"{type(module).__name__} holds {_names(held)} where {_names(needed)} is expected"
    if recognise_gate(module) is None:
        return f"{type(module).__name__} has a gate function of a form that the kernel does not know"
    return None


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "no parameter"


def read_layout(module: nn.Module) -> ExpertsLayout:
    """The layout of a module that `why_unsupported` lets pass; it may be on meta.

    Raises:
        ValueError: the module is unsupported.
    """
    reason = why_unsupported(module)
    if reason is not None:
        raise ValueError(reason)
    down = module.get_parameter("down_proj")
    num_experts, hidden, intermediate = down.shape
    if module.is_transposed:
        hidden, intermediate = intermediate, hidden
    gate = recognise_gate(module)
    assert gate is not None, "why_unsupported checks the gate"
    return ExpertsLayout(
        num_experts=num_experts,
        hidden=hidden,
        intermediate=intermediate,
        gated=bool(module.has_gate),
        bias=bool(module.has_bias),
        transposed=bool(module.is_transposed),
        interleaved=bool(module.has_gate) and not module.is_concatenated,
        gate=gate,
    )
