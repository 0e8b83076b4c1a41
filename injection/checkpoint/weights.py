"""What a model is streamed from: every parameter by name, and each module's weights for the operator that replaces it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from transformers import PreTrainedModel

from moegraft.injection.checkpoint.experts import CheckpointExperts
from moegraft.injection.checkpoint.files import Checkpoint, LazyTensor
from moegraft.injection.checkpoint.keymap import KeyMap, map_keys
from moegraft.injection.checkpoint.linear import CheckpointLinear
from moegraft.operators.experts.layout import read_layout
from moegraft.operators.weights import WeightSource


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

    def weight_type(self, path: str) -> str | None:
        """What the weight type `stored` means for the experts at `path`; None where the dtype says it."""
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

    def weight_type(self, path: str) -> str | None:
        return None
