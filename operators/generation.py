"""What the operators that take over a model's `generate` share."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel

from moegraft.operators.base import ModelOperator

_SHOWN_LAYERS = 3


class GenerateOperator(ModelOperator):
    """Base of operators that serve some calls of `generate` and hand all others to the stock one, with the reason in the log."""

    def __init__(self, options: Any) -> None:
        super().__init__()
        self.options = options
        self._logged: set[str] = set()

    @classmethod
    def unsupported_reason(cls, module: nn.Module, options: Any) -> str | None:
        if not isinstance(module, PreTrainedModel) or not isinstance(module, GenerationMixin):
            return f"{type(module).__name__} does not generate text"
        return "it has an encoder and a decoder" if module.config.is_encoder_decoder else None

    def warn_once(self, message: str) -> None:
        """Log a warning, the first time it is given."""
        if message not in self._logged:
            self._logged.add(message)
            logging.getLogger(type(self).__module__).warning("%s: %s", self.name, message)

    def extra_repr(self) -> str:
        return ", ".join(f"{field.name}={getattr(self.options, field.name)}" for field in dataclasses.fields(self.options))


def call_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    bound = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    return {**bound, **bound.pop("kwargs", {})}


def layer_types(config: PretrainedConfig) -> Sequence[str]:
    """Return the kinds of a model's layers as its config names them; empty where it does not."""
    return getattr(config.get_text_config(decoder=True), "layer_types", None) or ()


def name_layers(layers: Sequence[object], indices: Sequence[int], names: Sequence[str]) -> tuple[str, str]:
    """Return which layers of a cache those at `indices` are, `layers 0, 2 are of kind conv`, and the kind alone."""
    kinds = {names[index] if index < len(names) else type(layers[index]).__name__ for index in indices}
    shown = ", ".join(map(str, indices[:_SHOWN_LAYERS])) + (" ..." if len(indices) > _SHOWN_LAYERS else "")
    kind = ", ".join(sorted(kinds))
    return (f"layer {shown} is of kind {kind}" if len(indices) == 1 else f"layers {shown} are of kind {kind}"), kind
