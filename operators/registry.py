"""Operators by name: moegraft's own, and those of other packages in the entry-point group `moegraft.operators`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from importlib import import_module
from importlib.metadata import entry_points

from moegraft.operators.base import InPlaceOperator, Operator

ENTRY_POINT_GROUP = "moegraft.operators"
# By path, so that this module imports no operator.
BUILT_IN = (
    "moegraft.operators.cpu_ops.attention:CpuAttention",
    "moegraft.operators.cpu_ops.fused_attention:FusedAttention",
    "moegraft.operators.experts.hybrid:HybridExperts",
    "moegraft.operators.experts.sparse_experts:SparseExperts",
    "moegraft.operators.kv_cache:QuantizedKvCache",
    "moegraft.operators.linear:QuantizedLinear",
    "moegraft.operators.cpu_ops.norm:CpuNorm",
    "moegraft.operators.cpu_ops.norm:FusedNorm",
    "moegraft.operators.cpu_ops.recurrent:CpuRecurrent",
    "moegraft.operators.cpu_ops.router:CpuRouter",
    "moegraft.operators.cpu_ops.router:FusedRouter",
    "moegraft.operators.speculative:SpeculativeDraft",
)


class OperatorRegistry:
    """A read-only table of operator classes by short name."""

    def __init__(self, operators: Iterable[type[Operator]]) -> None:
        """Create the table.

        Raises:
            ValueError: two operators have one name, or options are not a frozen dataclass.
        """
        self._by_name: dict[str, type[Operator]] = {}
        for operator in operators:
            other = self._by_name.setdefault(operator.name, operator)
            if other is not operator:  # the same class given twice is no conflict
                raise ValueError(f"two operators are named '{operator.name}': {_path(other)} and {_path(operator)}; rename one")
            if not is_dataclass(operator.options_type) or not operator.options_type.__dataclass_params__.frozen:  # type: ignore[attr-defined]
                raise ValueError(f"the options of operator '{operator.name}' must be a frozen dataclass")

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> type[Operator]:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._by_name))

    @property
    def in_place(self) -> frozenset[str]:
        """The names of operators that work within a stock module."""
        return frozenset(name for name, operator in self._by_name.items() if issubclass(operator, InPlaceOperator))

    def with_operators(self, *operators: type[Operator]) -> OperatorRegistry:
        """Return a new registry with more operators, for a test or a notebook."""
        return OperatorRegistry([*self._by_name.values(), *operators])


def _path(operator: type[Operator]) -> str:
    return f"{operator.__module__}:{operator.__qualname__}"


def _load(path: str) -> type[Operator]:
    module, _, name = path.partition(":")
    operator = getattr(import_module(module), name)
    if not (isinstance(operator, type) and issubclass(operator, Operator)):
        raise ValueError(f"{path} is not an operator: it must be a subclass of {Operator.__module__}:{Operator.__qualname__}")
    return operator


def load_registry() -> OperatorRegistry:
    """Return a registry of all installed operators.

    Raises:
        ValueError: an entry point names an object that is not an operator, or two operators have one name.
    """
    added = [entry.value for entry in entry_points(group=ENTRY_POINT_GROUP)]
    return OperatorRegistry([_load(path) for path in (*BUILT_IN, *added)])
