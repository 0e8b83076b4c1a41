"""What is said of GGUF tensors that are not computed with as they are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from moegraft.injection.gguf.blocks import CONVERTED, SUPER_BLOCKS, BlockTensor

logger = logging.getLogger(__name__)


def tell_converted(path: Path, tensors: Sequence[BlockTensor], dtype: torch.dtype) -> None:
    """Logs, once for what no kernel has and once for what only these rules, or this machine, have no kernel for.

    Args:
        tensors: that are not kept as they are.
        dtype: of what no rule replaces.
    """
    converted = [tensor for tensor in tensors if tensor.block_type in CONVERTED]
    rest = str(dtype).removeprefix("torch.")
    unknown = [tensor for tensor in converted if tensor.block_type not in SUPER_BLOCKS]
    if unknown:
        logger.warning(
            "%s: no kernel computes with %s: experts are converted through float32 to the rule's weight type (int8 for 'stored'), "
            "the rest to %s",
            path,
            _kinds(unknown),
            rest,
        )
    others = [tensor for tensor in converted if tensor.block_type in SUPER_BLOCKS]
    if others:
        logger.warning(
            "%s: %d tensors in %s, the first of them %s, are converted through float32: what a rule replaces to its weight type "
            "(int8 for 'stored'), the rest to %s; experts and linear layers without gpu and sparsity keep them as they are, where their "
            "weights are 'stored' or of no fewer bits, as int8 is",
            path,
            len(others),
            _kinds(others),
            others[0].name,
            rest,
        )


def _kinds(tensors: Sequence[BlockTensor]) -> str:
    return ", ".join(sorted({tensor.block_type.name for tensor in tensors}))
