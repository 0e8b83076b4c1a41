"""Recurrent and convolution states of a cache: what a sequence needs to go on from one of its positions, kept and put back.

transformers keeps them in layers of kind `LinearAttentionCacheLayerMixin`, alone or beside keys and values. They have a fixed size and
stand for all tokens so far, so that no earlier token can be removed from them: to return to a position, its states have to be kept.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

TENSORS = ("conv_states", "recurrent_states")  # of a layer, each a dictionary by number of the state
FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size")
_ALIGNMENT = 64  # bytes


def has_states(layer: object) -> bool:
    """Return whether a layer of a cache keeps recurrent or convolution states."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


class SavedStates:
    """A copy of the states of a cache, after its last token, in one block of memory on each device.

    Attributes:
        nbytes: of the copy.
    """

    def __init__(self, cache: Cache) -> None:
        tensors: dict[tuple[int, str, int], torch.Tensor] = {}
        self._flags: dict[tuple[int, str], Any] = {}
        for number, layer in enumerate(cache.layers):
            if not has_states(layer):
                continue
            for name in FLAGS:
                self._flags[number, name] = dict(getattr(layer, name))
            self._flags[number, "device"], self._flags[number, "dtype"] = layer.device, layer.dtype
            for name in TENSORS:
                for index, tensor in getattr(layer, name).items():
                    if tensor is not None:
                        tensors[number, name, index] = tensor
        self.nbytes = 0
        starts, sizes = {}, dict.fromkeys({tensor.device for tensor in tensors.values()}, 0)
        for key, tensor in tensors.items():
            starts[key] = sizes[tensor.device]
            sizes[tensor.device] += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        blocks = {device: torch.empty(size, dtype=torch.uint8, device=device) for device, size in sizes.items()}
        self.nbytes = sum(sizes.values())
        self._tensors: dict[tuple[int, str, int], torch.Tensor] = {}
        for key, tensor in tensors.items():
            part = blocks[tensor.device][starts[key] : starts[key] + tensor.nbytes]
            self._tensors[key] = part.view(tensor.dtype).view(tensor.shape)
            self._tensors[key].copy_(tensor)

    def restore(self, cache: Cache) -> None:
        """Put the states into a cache of the same model, which may be new. Tensors that it has already are overwritten in place."""
        for number, layer in enumerate(cache.layers):
            if not has_states(layer):
                continue
            for name in TENSORS:
                states = getattr(layer, name)
                for index, tensor in states.items():
                    saved = self._tensors.get((number, name, index))
                    if saved is None:
                        states[index] = None
                    elif tensor is not None and (tensor.shape, tensor.dtype, tensor.device) == (saved.shape, saved.dtype, saved.device):
                        tensor.copy_(saved)
                    else:
                        states[index] = saved.clone()
            for (of, name), value in self._flags.items():
                if of == number:
                    setattr(layer, name, dict(value) if isinstance(value, dict) else value)
