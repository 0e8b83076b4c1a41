"""Reading a checkpoint: its files, the mapping of keys to parameters, and the weight sources of operators."""

import os
from pathlib import Path

from moegraft.operators.errors import CheckpointError


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return the path with `~` replaced.

    Raises:
        CheckpointError: it names a user that this machine does not have.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise CheckpointError(f"{path}: this machine has no user of that name") from None


def gguf_alone(model: str | os.PathLike[str]) -> Path | None:
    """Return the path of GGUF files that are named instead of a model's folder: of a file, or of a folder without a config; else None.

    Raises:
        CheckpointError: as `expanded`.
    """
    path = expanded(model)
    if path.is_dir():
        return path if not (path / "config.json").exists() and any(path.glob("*.gguf")) else None
    try:
        with path.open("rb") as file:
            return path if path.suffix == ".gguf" or file.read(4) == b"GGUF" else None
    except OSError:
        return None


def local_folder(model: str | os.PathLike[str]) -> Path | None:
    """Return the folder of a model on this machine; None for a hub id.

    Raises:
        CheckpointError: this can only be the path of a folder, and there is none.
    """
    name = os.fspath(model)
    path = expanded(name)
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"{path}: this is a file; name a GGUF file, or the folder that holds config.json and the weights")
    if name.startswith((".", "~", os.sep)) or name.endswith(".gguf") or name.count("/") > 1 or (os.sep != "/" and os.sep in name):
        raise CheckpointError(f"{name}: no such file or folder")
    return None
