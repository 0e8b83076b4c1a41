"""The devices that tests run on: emulated ones everywhere, and the first GPU where there is one."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from moegraft.operators.offload.devices.cuda import why_no_cuda

EMULATED_GPU, CUDA_GPU = "emulated", "cuda:0"
# `-m gpu` selects these. Without a GPU they are skipped, with PyTorch's reason.
ON_CUDA = (pytest.mark.gpu, pytest.mark.skipif(why_no_cuda() is not None, reason=str(why_no_cuda())))
GPUS = (EMULATED_GPU, pytest.param(CUDA_GPU, id="cuda", marks=ON_CUDA))  # as rules name them
emulated_only = pytest.mark.parametrize("gpu", [EMULATED_GPU])  # in place of the fixture's devices


def placed(model: PreTrainedModel, gpu: str) -> PreTrainedModel:
    """Move all but the experts to a CUDA GPU; operators take those from host memory. Emulated ones have no memory of their own."""
    if not gpu.startswith("cuda"):
        return model
    experts = [module for path, module in model.named_modules() if path.endswith(".experts")]
    kept = {id(tensor) for module in experts for tensor in (*module.parameters(), *module.buffers())}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in kept:
            tensor.data = tensor.data.to(gpu)
    return model


def where(gpu: str) -> dict[str, str]:
    """Return the arguments of `optimize_and_load` that load a checkpoint to a device."""
    return {"device_map": gpu} if gpu.startswith("cuda") else {}


def limit(gpu: str, emulated: float = 1e-5) -> float:
    """Return the largest relative error of float32 logits; a GPU sums in another order, and in three passes of tf32."""
    return emulated if not gpu.startswith("cuda") else max(emulated, 1e-4)


def on(gpu: str) -> torch.device:
    return torch.device(gpu if gpu.startswith("cuda") else "cpu")
