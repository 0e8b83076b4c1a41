"""What every launch shares."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from moegraft.operators.kernels.packed_layout import UNIT_DTYPES

# Fused multiply-adds are meant, whatever a Triton version's default is.
LAUNCH: dict[str, Any] = {"enable_fp_fusion": True}


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on PyTorch's current device, wherever the tensors are: models over several GPUs do not change it for each layer."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True, slots=True)
class Bytes:
    """Packed bytes as the kernels read them: one storage under three types."""

    units: torch.Tensor
    scales: torch.Tensor  # float16
    biases: torch.Tensor  # float32

    @classmethod
    def of(cls, packed: torch.Tensor, weight_type: str) -> Bytes:
        """Views of contiguous uint8.

        Raises:
            ValueError: bytes that are not contiguous, or do not begin at a multiple of 16.
        """
        if packed.dtype != torch.uint8 or not packed.is_contiguous():
            raise ValueError(f"packed bytes must be contiguous uint8, not {packed.dtype} of strides {packed.stride()}")
        if packed.data_ptr() % 16:
            raise ValueError("packed bytes must begin at a multiple of 16 bytes: the kernels read 16 at a time")
        flat = packed.view(-1)
        return cls(flat.view(UNIT_DTYPES[weight_type]), flat.view(torch.float16), flat.view(torch.float32))
