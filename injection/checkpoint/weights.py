"""What a model is streamed from: every parameter by name, and each module's weights for the operator that replaces it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from moegraft.injection.checkpoint.experts import CheckpointExperts
from moegraft.injection.checkpoint.files import Checkpoint, LazyTensor
from moegraft.injection.checkpoint.keymap import KeyMap, map_keys
from moegraft.injection.checkpoint.linear import CheckpointLinear
from moegraft.operators.experts.layout import read_layout
from moegraft.operators.weights import WeightSource


@dataclass(frozen=True, slots=True)
class StoredTypes:
    """The kernel's weight types for the weights of a module as a file codes them.

    Attributes:
        whole: the narrowest that holds all of them, of those that the kernel quantises to: super-blocks count as int8.
        gate_up, down: the narrowest of each; `q4_k` and `q6_k` are among them. A linear layer's type stands in both.
    """

    whole: str
    gate_up: str
    down: str


class StoredWeights(Protocol):
    """The stored weights of one model, of which only headers are read until they are asked for."""

    @property
    def tensors(self) -> Mapping[str, LazyTensor]:
        """By the key that `keymap` has for them."""
        ...

    @property
    def keymap(self) -> KeyMap: ...

    def source(self, path: str, kind: str) -> WeightSource:
        """The weights for an operator of `kind` that replaces the module at `path`."""
        ...

    def stored_types(self, path: str, kind: str) -> StoredTypes | None:
        """What codes the module at `path`, of kind `experts` or `linear`, is stored in; None where the dtype says it."""
        ...

    def tell_conversions(self, weight_types: Mapping[str, str], dtype: torch.dtype) -> None:
        """Logs what is not computed with as it is stored.

        Args:
            weight_types: of the modules that are replaced, by path.
            dtype: of what no rule replaces.
        """
        ...


class CheckpointWeights:
    """The weights of a safetensors checkpoint."""

    def __init__(self, checkpoint: Checkpoint, skeleton: PreTrainedModel) -> None:
        self.tensors: Mapping[str, LazyTensor] = checkpoint.tensors
        self.keymap = map_keys(skeleton, checkpoint.tensors)
        self._skeleton = skeleton

    def source(self, path: str, kind: str) -> WeightSource:
        if kind == "experts":
            layout = read_layout(self._skeleton.get_submodule(path))
            return CheckpointExperts(path, layout, self.keymap.under(path), self.tensors, self._skeleton)
        assert kind == "linear", f"operators of kind {kind} take no weights"
        return CheckpointLinear(path, self.keymap, self.tensors, self._skeleton)

    def stored_types(self, path: str, kind: str) -> StoredTypes | None:
        return None

    def tell_conversions(self, weight_types: Mapping[str, str], dtype: torch.dtype) -> None:
        """Floats of one width become floats of another; who asked for it knows."""
