"""How much of a GPU's memory the slots may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moegraft.operators.cache_form import WORKED_ON, QuantisedForm

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MARGIN_SHARE = 0.06  # of the GPU: activations of a prompt, PyTorch's own blocks, the display
MARGIN_BYTES = 768 << 20


def kv_cache_bytes(config: PretrainedConfig, context: int, dtype: torch.dtype, form: QuantisedForm | None = None) -> int:
    """Keys and values of `context` tokens by the config's numbers of heads; a latent or windowed cache is smaller.

    Args:
        form: of a quantised cache, of which one layer at a time is in `dtype` as well.
    """
    text = config.get_text_config()
    per_token = [token_bytes(layer, dtype) for layer in getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers]
    if form is None:
        return context * sum(per_token)
    return sum(form.layer_bytes(size, dtype.itemsize, context) for size in per_token) + WORKED_ON * max(per_token) * context


def token_bytes(layer: PretrainedConfig, dtype: torch.dtype) -> int:
    """Keys and values of one token in one layer."""
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    size = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    return int(2 * heads * size * dtype.itemsize)


def free_for_slots(device: torch.device, kv_bytes: int) -> int:
    """What is left on a CUDA device for slots, when the rest of the model is there already.

    Args:
        kv_bytes: of the part of the KV cache that this device will hold.
    """
    free, total = torch.cuda.mem_get_info(device)
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, free + reusable - kv_bytes - max(MARGIN_BYTES, int(MARGIN_SHARE * total)))
