"""Every injected module against the stock one on the same inputs, in one forward pass that is the stock model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from moegraft.injection.graft import Injection
from moegraft.injection.verify.stock import StockModules
from moegraft.injection.verify.tolerances import Expected, expected_error
from moegraft.operators.base import InPlaceOperator, Operator


@dataclass(frozen=True, slots=True)
class LayerError:
    """One injected module beside the stock one.

    Attributes:
        relative_error: `|output - stock| / |stock|` over all tokens.
        cosine: of the two outputs as one long vector each.
        expected: None where nothing is known of the weight type.
    """

    module: str
    operator: str
    weight_type: str | None
    relative_error: float
    cosine: float
    expected: Expected | None

    @property
    def ok(self) -> bool:
        """Finite, and within the limit where there is one."""
        return self.relative_error <= (self.expected.limit if self.expected is not None else torch.finfo(torch.float64).max)


def injection_of(model: PreTrainedModel) -> Injection:
    """What `optimize_and_load` did to a model."""
    injection = model.moegraft
    assert isinstance(injection, Injection), "an injected model says what was done to it"
    return injection


@contextmanager
def stock_in_place(model: PreTrainedModel, stock: StockModules, found: list[LayerError]) -> Iterator[None]:
    """While it lasts, every injected module gives the stock module's output, and its own is compared with that.

    The model so computes what the stock model does with one stock module in memory at a time, and each comparison is on
    the activations of the stock model: an early layer's error does not blur those after it. Operators that work within a stock module
    are set aside meanwhile; what they change shows in the logits alone.
    """
    with ExitStack() as undone:
        for path, operator in injection_of(model).operators.items():
            if isinstance(operator, InPlaceOperator):  # works within a stock module, or drives the model
                undone.enter_context(operator.set_aside(model.get_submodule(path)))
            else:
                hook = operator.register_forward_hook(_comparing(path, operator, stock, found), with_kwargs=True)
                undone.callback(hook.remove)
        yield


def _comparing(path: str, operator: Operator, stock: StockModules, found: list[LayerError]) -> Callable[..., torch.Tensor]:
    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
        reference_module = stock.make(path)
        dtype = next(reference_module.parameters()).dtype
        given = [_cast(value, dtype) for value in args]
        reference: torch.Tensor = reference_module(*given, **{name: _cast(value, dtype) for name, value in kwargs.items()})
        found.append(layer_error(path, operator, output, reference))
        return reference.to(output.dtype).to(output.device)

    return compare


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to("cpu", dtype) if value.is_floating_point() else value.to("cpu")


def layer_error(path: str, operator: Operator, output: torch.Tensor, reference: torch.Tensor) -> LayerError:
    """Compares two outputs of one module, of any dtypes."""
    ours, theirs = output.detach().double().flatten().to("cpu"), reference.detach().double().flatten()
    difference, size = float((ours - theirs).norm()), float(theirs.norm())
    relative = difference / size if size else (0.0 if difference == 0 else float("inf"))
    weight_type = getattr(operator, "weight_type", None) or getattr(getattr(operator, "options", None), "weights", None)
    expected = expected_error(weight_type, output.dtype)
    cosine = float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0))
    return LayerError(path, operator.name, weight_type, relative, cosine, expected)
