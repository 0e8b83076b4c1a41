"""One linear layer's weights as its checkpoint holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from moegraft.injection.checkpoint.convert import convert
from moegraft.injection.checkpoint.files import SUPPORTED, LazyTensor, fingerprint
from moegraft.injection.checkpoint.keymap import KeyMap, Target
from moegraft.operators.errors import CheckpointError
from moegraft.operators.weights import Part


class CheckpointLinear:
    """A `WeightSource` over a linear layer's weight and, where it has one, bias; a tied weight is read where it is stored.

    Raises:
        CheckpointError: when made, if a part is missing or of the wrong shape or dtype.
    """

    def __init__(self, module: str, keymap: KeyMap, tensors: Mapping[str, LazyTensor], skeleton: PreTrainedModel) -> None:
        self._tensors = tensors
        self._skeleton = skeleton
        self._targets: dict[Part, Target] = {}
        parts: tuple[Part, ...] = ("weight", "bias")
        for part in parts:
            if getattr(skeleton.get_submodule(module), part) is None:
                continue
            self._targets[part] = _target(f"{module}.{part}", keymap, tensors, skeleton)

    @property
    def dtype(self) -> torch.dtype:
        dtype = self._tensors[self._targets["weight"].all_keys[0]].dtype
        assert dtype is not None, "checked when made"
        return dtype

    @property
    def fingerprint(self) -> str | None:
        return fingerprint([self._tensors[key] for target in self._targets.values() for key in target.all_keys])

    def parts(self) -> Sequence[Part]:
        return tuple(self._targets)

    def read(self, part: Part, expert: int = 0) -> torch.Tensor:
        target = self._targets[part]
        if target.converter is not None:
            return convert(target, self._tensors, self._skeleton)
        return self._tensors[target.all_keys[0]][...]

    def origin(self, part: Part, expert: int = 0) -> str:
        return self._tensors[self._targets[part].all_keys[0]].origin


def _target(name: str, keymap: KeyMap, tensors: Mapping[str, LazyTensor], skeleton: PreTrainedModel) -> Target:
    target = keymap.targets.get(name) or keymap.targets.get(skeleton.all_tied_weights_keys.get(name, ""))
    if target is None:
        raise CheckpointError(
            f"{next(iter(tensors.values())).file.parent}: nothing in this checkpoint feeds {name}; a shard or keys are missing"
        )
    expected = tuple(skeleton.get_parameter(name).shape)
    for tensor in (tensors[key] for key in target.all_keys):
        if tensor.dtype is None:
            raise CheckpointError(f"{tensor.origin}: dtype {tensor.stored_dtype} cannot be a weight; {SUPPORTED}")
        if target.converter is None and tensor.shape != expected:
            raise CheckpointError(f"{tensor.origin}: shape {tensor.shape} where the model has {expected}")
    return target
