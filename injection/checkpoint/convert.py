"""A whole parameter made by transformers' own converter, for storage forms that are not read piece by piece."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial

import torch
from transformers import PreTrainedModel

from moegraft.injection.checkpoint.files import LazyTensor
from moegraft.injection.checkpoint.keymap import Target
from moegraft.operators.errors import CheckpointError


def _read(tensor: LazyTensor) -> torch.Tensor:
    return tensor[...]


def convert(target: Target, tensors: Mapping[str, LazyTensor], skeleton: PreTrainedModel) -> torch.Tensor:
    """Reads every key of `target` and returns the parameter in the skeleton's shape.

    Raises:
        CheckpointError: the result is missing or of another shape.
    """
    converter = deepcopy(target.converter)
    assert converter is not None, f"{target.name} is stored as it is"
    for pattern, keys in target.keys.items():
        for key in keys:
            # transformers calls what is callable, though it names a Future.
            converter.add_tensor(target.name, key, pattern, partial(_read, tensors[key]))  # type: ignore[arg-type]
    made = converter.convert(target.name, model=skeleton, config=skeleton.config).get(target.name)
    whole: torch.Tensor | None = made[0] if isinstance(made, list) else made
    expected = tuple(skeleton.get_parameter(target.name).shape)
    if whole is None or tuple(whole.shape) != expected:
        shape = None if whole is None else tuple(whole.shape)
        raise CheckpointError(f"{tensors[target.all_keys[0]].origin}: converts to shape {shape} where the model has {expected}")
    return whole
