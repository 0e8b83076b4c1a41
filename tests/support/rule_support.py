"""Operators, models and helpers for the tests of rule files and plans. The operators are planned but never run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from moegraft.injection.planning import Plan, plan
from moegraft.injection.rules import Diagnostic, RuleErrors, RuleFile, read_rules
from moegraft.operators.base import Footprint, InPlaceOperator, Operator
from moegraft.operators.context import InjectionContext
from moegraft.operators.registry import OperatorRegistry
from moegraft.operators.weights import WeightSource


@dataclass(frozen=True, slots=True)
class CacheOptions:
    policy: Literal["mrs", "lru", "lfu"] = "mrs"
    ratio: float = 0.25
    renamed_options: ClassVar[Mapping[str, str]] = {"share": "ratio"}

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio must be from 0 to 1, not {self.ratio}")


@dataclass(frozen=True, slots=True)
class ExpertsOptions:
    """Options with one field of every supported type."""

    weights: Literal["stored", "int8", "int4"] = "stored"
    cache: CacheOptions = field(default_factory=CacheOptions)
    lookahead: int = 3
    alpha: float = 0.2
    pinned: bool = False
    note: str = ""
    thresholds: Path | None = None
    slots: int | Literal["auto"] = "auto"
    devices: tuple[str, ...] = ()
    window: tuple[int, int] = (0, 0)
    costs: Mapping[str, float] = field(default_factory=dict)
    renamed_options: ClassVar[Mapping[str, str]] = {"ahead": "lookahead"}

    def __post_init__(self) -> None:
        if self.lookahead < 0:
            raise ValueError(f"lookahead must be 0 or more, not {self.lookahead}")
        if self.pinned and self.weights == "stored":
            raise ValueError("pinned memory needs packed weights")


@dataclass(frozen=True, slots=True)
class DraftOptions:
    max_draft: int  # without a default, so that rules must give it


@dataclass(frozen=True, slots=True)
class NoOptions:
    pass


class Idle(Operator):
    """The base of these operators, which are planned but never built."""

    @classmethod
    def unsupported_reason(cls, module: nn.Module, options: Any) -> str | None:
        return None

    @classmethod
    def footprint(cls, module: nn.Module, options: Any, dtype: torch.dtype) -> Footprint:
        return Footprint({"cpu": sum(parameter.numel() for parameter in module.parameters()) * dtype.itemsize})

    @classmethod
    def build(cls, module: nn.Module, options: Any, context: InjectionContext) -> Self:
        raise NotImplementedError

    def placement(self) -> str:
        raise NotImplementedError

    def load(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        raise NotImplementedError


class HybridExperts(Idle):
    name, kind, options_type, summary = "hybrid_experts", "experts", ExpertsOptions, "experts of a layer"

    @classmethod
    def unsupported_reason(cls, module: nn.Module, options: Any) -> str | None:
        return "odd numbers of experts cannot be halved" if module.get_parameter("down_proj").shape[0] % 2 else None


class PackedLinear(Idle):
    name, kind, options_type, summary = "packed_linear", "linear", NoOptions, "a linear layer"


class IdleInPlace(Idle, InPlaceOperator):
    @classmethod
    def footprint(cls, module: nn.Module, options: Any, dtype: torch.dtype) -> Footprint:
        return Footprint({})


class Draft(IdleInPlace):
    name, kind, options_type, summary = "speculative_draft", "model", DraftOptions, "a whole model"


class Attention(IdleInPlace):
    name, kind, options_type, summary = "cpu_attention", "attention", NoOptions, "a function of a layer"


class Norm(IdleInPlace):
    name, kind, options_type, summary = "cpu_norm", "norm", NoOptions, "a norm"


class Router(IdleInPlace):
    name, kind, options_type, summary = "cpu_router", "router", NoOptions, "a choice"


class Recurrent(IdleInPlace):
    name, kind, options_type, summary = "cpu_recurrent", "recurrent", NoOptions, "a rule of a layer"


REGISTRY = OperatorRegistry([HybridExperts, PackedLinear, Draft, Attention, Norm, Router, Recurrent])


class TinyExperts(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.zeros(num_experts, 4, 8))
        self.down_proj = nn.Parameter(torch.zeros(num_experts, 8, 2))
        self.act_fn = nn.SiLU()


class TinyMoe(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(8, num_experts, bias=False)
        self.experts = TinyExperts(num_experts)
        self.shared_expert = nn.Linear(8, 8)


class TinyLayer(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict({"q_proj": nn.Linear(8, 8), "k_proj": nn.Linear(8, 8)})
        self.mlp = mlp


class TinyModel(nn.Module):
    """A model of `layers` layers, the first `dense` of them without experts, with transformers' names."""

    def __init__(self, layers: int = 4, dense: int = 1, num_experts: int = 4) -> None:
        super().__init__()
        mlps = [nn.Linear(8, 8) if layer < dense else TinyMoe(num_experts) for layer in range(layers)]
        self.model = nn.ModuleDict({"layers": nn.ModuleList(TinyLayer(mlp) for mlp in mlps)})
        self.lm_head = nn.Linear(8, 5)


def tiny_model(layers: int = 4, dense: int = 1, num_experts: int = 4) -> TinyModel:
    with torch.device("meta"):
        return TinyModel(layers, dense, num_experts)


def read(path: Path, **given: object) -> RuleFile:
    return read_rules(path, vars=given, registry=REGISTRY)


def plan_for(path: Path, model: nn.Module | None = None, model_type: str | None = "tiny") -> Plan:
    return plan(model or tiny_model(), read(path), registry=REGISTRY, dtype=torch.bfloat16, model_type=model_type)


def findings_of(act: Callable[[], object]) -> tuple[Diagnostic, ...]:
    """Return every diagnostic that `act` raises; none if it succeeds."""
    try:
        act()
    except RuleErrors as error:
        assert str(error) == "\n".join(map(str, error.diagnostics))
        return error.diagnostics
    return ()


def write(folder: Path, text: str | bytes, name: str = "rules.yaml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path
