"""Puts operators where modules were, and makes the class that a grafted model has."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel

from moegraft.injection.plan import Plan
from moegraft.operators.base import InPlaceOperator, ModelOperator, Operator
from moegraft.operators.context import InjectionContext
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.offload.decode_steps import DecodeSteps
from moegraft.operators.registry import OperatorRegistry


@dataclass(frozen=True, slots=True)
class Injection:
    """What was done to a model; `model.moegraft` holds it.

    `operators` are by the path of the module that each replaced; the empty path has the model's own operator, if any.
    """

    plan: Plan
    operators: Mapping[str, Operator]
    context: InjectionContext

    @property
    def model_operator(self) -> ModelOperator | None:
        """The operator of kind `model`, which replaces nothing and answers `generate`."""
        found = self.operators.get("")
        return found if isinstance(found, ModelOperator) else None

    @property
    def decode_steps(self) -> DecodeSteps | None:
        """What captures decode steps; None where no rule lets it."""
        return self.context.decode_steps

    @property
    def drafting(self) -> bool:
        """Whether the calling thread draws a draft."""
        return self.context.draft_switch.settings is not None

    def statistics(self) -> dict[str, object]:
        """What operators did so far: `modules` by path, `sparsity`, what was left out, for each target that rules give, and `devices`,
        what each GPU that experts share did."""
        modules = {path or "(the model)": found for path, operator in self.operators.items() if (found := operator.statistics())}
        return {"modules": modules, **self.context.statistics()}

    def placement(self) -> list[str]:
        """What runs where, a line for each group of equal operators."""
        groups: dict[str, int] = {}
        for operator in self.operators.values():
            groups[operator.placement()] = groups.get(operator.placement(), 0) + 1
        return [f"{count} x {line}" for line, count in groups.items()]


class InjectedModel:
    """What an injected model does otherwise than its stock class."""

    moegraft: Injection

    def save_pretrained(self, *args: object, **kwargs: object) -> NoReturn:
        """
        Raises:
            UnsupportedModelError: always; the experts are packed for a kernel, and a checkpoint without them would be a trap.
        """
        replaced = len(replacing(self.moegraft.operators))
        raise UnsupportedModelError(
            f"an injected model cannot be saved: {replaced} of its modules hold weights packed for their operator, not parameters; "
            "save the stock model (AutoModelForCausalLM.from_pretrained) or copy the checkpoint it was loaded from"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The stock module's, of what is left of it, with a warning once it lacks weights."""
        found: dict[str, Any] = super().state_dict(*args, **kwargs)  # type: ignore[misc] # of the stock class, which comes after this one
        replaced = replacing(self.moegraft.operators) if hasattr(self, "moegraft") else {}
        if replaced:
            warnings.warn(
                f"the state_dict of an injected model lacks what its {len(replaced)} operators hold packed ({next(iter(replaced))}, ...): "
                "it restores no model; take the stock model's, or the checkpoint that this one was loaded from",
                stacklevel=2,
            )
        return found

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """
        Raises:
            UnsupportedModelError: always; `copy.deepcopy` and pickle would have to duplicate packed weights and threads.
        """
        raise UnsupportedModelError("an injected model cannot be copied or pickled; load it again with optimize_and_load")


def build_operators(model: nn.Module, plan: Plan, registry: OperatorRegistry, context: InjectionContext) -> dict[str, Operator]:
    """The plan's operators, still without weights, by the path of the module each will replace. `model` may be on meta.

    Raises:
        UnsupportedModelError: the model's own operator cannot work with the others.
    """
    operators = {swap.module: registry[swap.operator].build(model.get_submodule(swap.module), swap.options, context) for swap in plan.swaps}
    for operator in operators.values():
        if isinstance(operator, ModelOperator):
            operator.check()
    return operators


def make_ready(model: PreTrainedModel, operators: Mapping[str, Operator]) -> None:
    """Tells every operator that the whole model is loaded."""
    for path, operator in operators.items():
        operator.on_model_loaded(model, path)


def replacing(operators: Mapping[str, Operator]) -> dict[str, Operator]:
    """Those that take a module's place and its weights."""
    return {path: operator for path, operator in operators.items() if not isinstance(operator, InPlaceOperator)}


def place(model: PreTrainedModel, path: str, operator: Operator) -> None:
    """Puts one operator in a module's place."""
    parent, _, leaf = path.rpartition(".")
    block = model.get_submodule(parent)
    setattr(block, leaf, operator)
    # Some families would fill the experts' parameters from the block above them, where there are none any more. What is stored
    # needs no filling, for a checkpoint that lacks a parameter is refused; buffers that are not stored do.
    if not block._non_persistent_buffers_set:
        block._is_hf_initialized = True  # type: ignore[assignment] # transformers' own mark
    # transformers notes ties when it builds a model; one with a replaced layer would put the parameter back, or miss it.
    model.all_tied_weights_keys = _ties_outside(model.all_tied_weights_keys, [path])


def injected_class(
    base: type[PreTrainedModel], operators: Mapping[str, Operator] | None = None, *, captures: bool = False
) -> type[PreTrainedModel]:
    """A subclass of `base` under its name whose instances have `operators` in place before any weight is loaded.

    Args:
        captures: whether decode steps may be captured; the forward pass of others is the stock one.
    """

    def __init__(self: PreTrainedModel, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        for path, operator in (operators or {}).items():
            place(self, path, operator)

    body: dict[str, Any] = {
        "__init__": __init__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "get_expanded_tied_weights_keys": _ties(base),
    }
    if issubclass(base, GenerationMixin):
        body["generate"] = _generate(base)
    if captures:
        body["forward"] = _forward(base)
    # Both names are kept: transformers looks classes up by name and source file, and users read them.
    return type(base.__name__, (InjectedModel, base), body)


def _ties_outside(ties: Mapping[str, str], paths: Iterable[str]) -> dict[str, str]:
    replaced = tuple(f"{path}." for path in paths)
    return {name: tie for name, tie in ties.items() if not name.startswith(replaced)}


def _ties(base: type[PreTrainedModel]) -> Callable[..., dict[str, str]]:
    """What an injected class answers when transformers asks for the ties anew, as `tie_weights` does: those of layers it still has."""

    @functools.wraps(base.get_expanded_tied_weights_keys)
    def get_expanded_tied_weights_keys(self: PreTrainedModel, *args: Any, **kwargs: Any) -> dict[str, str]:
        ties = base.get_expanded_tied_weights_keys(self, *args, **kwargs)
        return _ties_outside(ties, (path for path, module in self.named_modules() if isinstance(module, Operator)))

    return get_expanded_tied_weights_keys


def _generate(base: type[GenerationMixin]) -> Callable[..., Any]:
    """`generate` of an injected class: that of the model's own operator, if it has one."""

    @functools.wraps(base.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = functools.partial(base.generate, self)
        operator = self.moegraft.model_operator
        if operator is not None:
            return operator.generate(self, plain, *args, **kwargs)
        steps = self.moegraft.decode_steps
        return plain(*args, **(kwargs if steps is None else steps.generation(self, args, kwargs)))

    return generate


def decode_steps_of(model: PreTrainedModel) -> DecodeSteps | None:
    """What captures a model's decode steps; None for stock models, and where no rule lets it."""
    injection = getattr(model, "moegraft", None)
    return injection.decode_steps if isinstance(injection, Injection) else None


def new_cache(model: PreTrainedModel) -> Any:
    """An empty key-value cache of the kind that the model's `generate` makes."""
    injection = getattr(model, "moegraft", None)
    operator = injection.model_operator if isinstance(injection, Injection) else None
    made = None if operator is None else operator.new_cache(model)
    return DynamicCache(config=model.config.get_text_config(decoder=True)) if made is None else made


def _forward(base: type[PreTrainedModel]) -> Callable[..., Any]:
    """`forward` of an injected class whose decode steps may be captured ones."""

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps = None if torch.compiler.is_compiling() else self.moegraft.decode_steps
        if steps is None:
            return base.forward(self, *args, **kwargs)
        return steps.forward(self, functools.partial(base.forward, self), args, kwargs, drafting=self.moegraft.drafting)

    return forward


def injected(model: PreTrainedModel, stock_class: type[PreTrainedModel], injection: Injection) -> PreTrainedModel:
    """Marks a model with what was done to it and puts it in eval mode."""
    # A class that placed operators is left behind: it would keep them alive after their model, and place them in another.
    model.__class__ = injected_class(stock_class, captures=injection.decode_steps is not None)
    model.moegraft = injection  # type: ignore[assignment] # nn.Module declares its attributes as modules
    model.eval()
    return model
