"""Weights from GGUF files: which files make one model, what their tensors are called and how their blocks are read."""

from moegraft.injection.checkpoint.gguf.model import GgufModel, GgufWeights, open_gguf

__all__ = ["GgufModel", "GgufWeights", "open_gguf"]
