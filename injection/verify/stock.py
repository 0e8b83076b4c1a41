"""Single modules of the stock model, made from the checkpoint when they are wanted."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from moegraft.injection.checkpoint import LazyTensor
from moegraft.injection.checkpoint.convert import convert
from moegraft.injection.checkpoint.keymap import Target
from moegraft.injection.model_source import ModelSource, meta_skeleton
from moegraft.injection.stream import open_weights
from moegraft.operators.errors import CheckpointError, NotEnoughMemoryError
from moegraft.operators.machine import probe_machine

GIB = 1 << 30


class StockModules:
    """The modules of a checkpoint's stock model by path, each with its own weights and code; nothing is kept."""

    def __init__(self, source: ModelSource) -> None:
        """
        Raises:
            CheckpointError: the checkpoint cannot be opened.
        """
        self._skeleton = meta_skeleton(source, torch.float32)
        weights = open_weights(source, self._skeleton)
        self._tensors = weights.tensors
        self._keymap = weights.keymap

    def make(self, path: str) -> nn.Module:
        """The module at `path`, in float32 where that fits in memory and as stored where it does not.

        Raises:
            CheckpointError: a parameter is missing or cannot be read.
            NotEnoughMemoryError: there is no memory for this one module.
        """
        module = deepcopy(self._skeleton.get_submodule(path))
        targets = {name: self._target(f"{path}.{name}") for name, _ in module.named_parameters()}
        dtype = self._dtype(path, module, targets)
        # Read by transformers' own conversion, so that a mistake in the operators' way of reading shows as an error.
        state = {name: self._read(target).to(dtype) for name, target in targets.items()}
        module.load_state_dict(state, assign=True)
        return module.requires_grad_(False).eval()

    def _target(self, name: str) -> Target:
        targets = self._keymap.targets
        target = targets.get(name) or targets.get(self._skeleton.all_tied_weights_keys.get(name, ""))
        if target is None:
            folder = next(iter(self._tensors.values())).file.parent
            raise CheckpointError(f"{folder}: nothing in this checkpoint feeds {name}; a shard or keys are missing")
        return target

    def _read(self, target: Target) -> torch.Tensor:
        if target.converter is not None:
            return convert(target, self._tensors, self._skeleton)
        return self._tensors[target.all_keys[0]][...]

    def _dtype(self, path: str, module: nn.Module, targets: dict[str, Target]) -> torch.dtype | None:
        """float32, or None to keep what is stored."""
        stored = [sum(tensor.nbytes for tensor in self._tensors_of(target)) for target in targets.values()]
        whole = 4 * sum(parameter.numel() for parameter in module.parameters())
        free = probe_machine().available_bytes
        if whole + max(stored, default=0) <= free:
            return torch.float32
        if 2 * sum(stored) <= free:  # the parts and what they are joined to
            return None
        raise NotEnoughMemoryError(
            f"the stock {path} needs {2 * sum(stored) / GIB:.1f} GiB beside the injected model and {free / GIB:.1f} GiB are free; "
            "a smaller weight type in the rule file leaves more"
        )

    def _tensors_of(self, target: Target) -> list[LazyTensor]:
        return [self._tensors[key] for key in target.all_keys]
