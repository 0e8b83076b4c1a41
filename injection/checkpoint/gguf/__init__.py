"""Weights from GGUF files: finding the files of a model, naming its tensors and reading their blocks."""
