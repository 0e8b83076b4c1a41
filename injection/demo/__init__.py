"""The bundled demo model: a small trained Qwen3-MoE; README.md beside this file is its card."""

from importlib.resources import files
from pathlib import Path


def demo_path() -> Path:
    """The folder of the bundled model, as `from_pretrained` takes it.

    Raises:
        FileNotFoundError: the package is not installed as plain files, or without its data.
    """
    folder = files(__name__)
    if not isinstance(folder, Path) or not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{folder}: the bundled model is not here as files; install moegraft from a wheel or a checkout, not from a zip archive"
        )
    return folder
