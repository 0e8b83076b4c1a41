"""The interface of operators: modules with a name, typed options, and weights that they take from a source themselves.

All that planning, loading, predictions and programs need to know of an operator is a method here; those with a default apply to few.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import nn

from moegraft.operators.weights import WeightSource

if TYPE_CHECKING:
    from transformers import Cache, PretrainedConfig, PreTrainedModel

    from moegraft.operators.cache_form import QuantisedForm
    from moegraft.operators.context import InjectionContext
    from moegraft.operators.estimates import ExpertSlots, Saving
    from moegraft.operators.sparsity import LayerSparsity
    from moegraft.operators.thresholds import SparsityOptions
    from moegraft.operators.timeline import Timeline

Kind = Literal["experts", "router", "linear", "attention", "norm", "model"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that an operator will hold once loaded, by device name (`cpu`, `cuda:0`, and `disk` for mapped files)."""

    by_device: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.by_device.values())


@dataclass(frozen=True, slots=True)
class PlannedUse:
    """What one rule replaces: the modules at `paths` by `operator` with `options`."""

    operator: type[Operator]
    options: Any
    paths: Sequence[str]


class Operator(nn.Module, ABC):
    """A module that replaces one of the model's own.

    A subclass names itself and its options class, says whether it can replace a module, what it will hold, how it is
    built (on meta, before any weight is read) and how it takes its weights. It is registered by name in
    `moegraft.operators.registry` or through the entry-point group `moegraft.operators`.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    options_type: ClassVar[type[Any]]  # a frozen dataclass; its fields are the options a rule file may give
    summary: ClassVar[str]  # one line for listings
    sparsity: LayerSparsity | None = None  # the threshold and counts of the neurons that it leaves out
    # What the option `weights` may be, of an operator that packs weights and has that option.
    weight_types: ClassVar[tuple[str, ...]] = ()
    # Why decode steps with this operator cannot be captured in a CUDA graph; None where they can.
    uncaptured: ClassVar[str | None] = None

    @classmethod
    @abstractmethod
    def unsupported_reason(cls, module: nn.Module, options: Any) -> str | None:
        """Return why this operator cannot replace `module` with `options`, or None when it can. Reads structure, never weights."""

    @classmethod
    @abstractmethod
    def footprint(cls, module: nn.Module, options: Any, dtype: torch.dtype) -> Footprint:
        """Return the bytes the operator will hold for `module`; `dtype` is that of the stored weights."""

    @classmethod
    def supports_weight_type(cls, options: Any, weight_type: str) -> bool:
        """Return whether the operator can compute with the super-blocks of a GGUF file in place.

        Args:
            weight_type: of `options` instead of its own: `q4_k`, `q6_k`, or that of gate and up and that of down, as in `q4_k+q6_k`.
        """
        return False

    @classmethod
    @abstractmethod
    def build(cls, module: nn.Module, options: Any, context: InjectionContext) -> Self:
        """Create the operator for `module`, which may be on meta; it holds no weights yet."""

    @abstractmethod
    def placement(self) -> str:
        """Return one line for users: what this operator runs, in which weight type, and where."""

    @abstractmethod
    def load(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        """Take every weight from `source`, piece by piece, calling `advance(bytes_read)` after each.

        Raises:
            CheckpointError: a piece is missing, of the wrong shape, or cannot be read.
        """

    def check(self) -> None:
        """Check what depends on the other operators; called when all of the model are built, before weights are read.

        Raises:
            UnsupportedModelError: it cannot work with what the rules put into the model.
        """

    def on_model_loaded(self, model: PreTrainedModel, path: str) -> None:
        """Prepare for the first forward pass; called once, when the whole model is loaded. Must not keep `model`.

        Args:
            path: of the module that this operator replaced or works in.
        """

    def statistics(self) -> Mapping[str, object]:
        """Return what the operator did so far, by name, for programs that show it."""
        return {}

    # ---- what planning and predictions ask; an operator that none of it applies to overrides nothing ----

    @classmethod
    def plan_errors(cls, use: PlannedUse, uses: Sequence[PlannedUse], model: nn.Module) -> Iterator[tuple[str, str]]:
        """Yield options that the model or other rules contradict, such as `sparsity.target`, each with the reason.

        Args:
            use: what one rule gives to this operator.
            uses: what all rules of the plan give to operators.
            model: with its own modules, which may be on meta; some may have been refused by `unsupported_reason`.
        """
        return iter(())

    @classmethod
    def identity(cls, options: Any) -> str:
        """Return the options that change what the model computes; keys and values are not reused by a model with others."""
        return repr(options)

    @classmethod
    def sparsity_options(cls, options: Any) -> SparsityOptions | None:
        """Return which neurons of experts `options` leave out; None where all are computed."""
        return None

    @classmethod
    def draft_sparsity(cls, options: Any) -> float | None:
        """Return the share of neurons that drafts leave out; None where they leave out no more than other steps."""
        return None

    @classmethod
    def devices_wanted(cls, options: Any) -> frozenset[str]:
        """Return the GPUs that `options` ask for, such as `auto` or `cuda:1`; empty for the CPU and for emulated devices."""
        return frozenset()

    @classmethod
    def weight_type_for(cls, options: Any, dtype: torch.dtype) -> str | None:
        """Return the type that weights stored as `dtype` are packed to; None where the operator has no such choice."""
        return None

    @classmethod
    def savings(cls, module: nn.Module, options: Any | None, dtype: torch.dtype) -> Sequence[Saving]:
        """Return the ways to hold `module` in fewer bytes than with `options`, those that lose least first.

        Args:
            options: None where no rule replaces the module, which is then the stock one.
        """
        return ()

    @classmethod
    def expert_slots(cls, options: Any) -> ExpertSlots | None:
        """Return how experts in host memory share GPUs; None where they do not."""
        return None

    @classmethod
    def cache_form(cls, options: Any, config: PretrainedConfig) -> QuantisedForm | None:
        """Return how `generate` stores keys and values; None: in the model's dtype."""
        return None

    @classmethod
    def measured_options(cls) -> Mapping[str, Any]:
        """Return the options to measure this operator's speed with, by weight type."""
        return {}

    # ---- what verification and calibration ask ----

    @classmethod
    def with_sparsity(cls, options: Any, sparsity: SparsityOptions) -> Any | None:
        """Return `options` with another sparsity; None where the operator cannot leave neurons out."""
        return None

    @property
    def weight_type(self) -> str | None:
        """The type of the weights that it computes with; None where it is not known."""
        return None

    def set_aside(self, module: nn.Module) -> AbstractContextManager[None]:
        """While it lasts, compute as exactly as the weights allow: leave no neuron out.

        An operator that works within a stock module computes what that module does.

        Args:
            module: the one at the operator's path: itself, or the stock module.
        """
        return nullcontext()


class InPlaceOperator(Operator):
    """An operator that replaces no module and holds no weights: its module stays, and other rules may replace the module's parts."""

    @classmethod
    def footprint(cls, module: nn.Module, options: Any, dtype: torch.dtype) -> Footprint:
        return Footprint({})

    @classmethod
    def identity(cls, options: Any) -> str:
        return ""  # it computes what its module does, up to rounding

    def load(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        raise AssertionError(f"{self.name} takes no weights")


class ModelOperator(InPlaceOperator):
    """An operator that does what the whole model does, `generate`, its own way.

    `model` is only lent to it, call by call, so that an operator does not keep its model alive.
    """

    kind = "model"
    uncaptured = "an operator of the model's own decodes"

    def new_cache(self, model: PreTrainedModel) -> Cache | None:
        """Return the key-value cache that `generate` would make, for callers that fill one first; None: transformers' own."""
        return None

    def record_rounds(self, timelines: Sequence[Timeline]) -> bool:
        """Add the spans of its rounds to `timelines` from now on; return False where it decodes without rounds."""
        return False

    @abstractmethod
    def generate(self, model: PreTrainedModel, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute `model.generate(*args, **kwargs)`; `plain` is the stock method, bound to the model."""
