"""Weights from GGUF files: finding the files of a model, naming its tensors and reading their blocks."""

from moegraft.operators.errors import UnsupportedModelError

try:
    import gguf  # noqa: F401  imported here alone without asking whether it is there
except ModuleNotFoundError as error:
    raise UnsupportedModelError(f"GGUF files need {error.name}, which is not installed: pip install 'gguf>=0.19'") from error
