"""The bundled demo model: a small trained Qwen3-MoE; README.md beside this file is its card."""

from importlib.resources import files
from pathlib import Path


def demo_path() -> Path:
    """Return the folder of the bundled model, for `from_pretrained`.

    Raises:
        FileNotFoundError: the package is in an archive, or its data is missing.
    """
    folder = files(__name__)
    if not isinstance(folder, Path) or not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{folder}: the files of the bundled model are missing; install moegraft from a wheel or a checkout, not from a zip archive"
        )
    return folder
