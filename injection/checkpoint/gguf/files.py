"""The GGUF files of one model: finding all parts, and merging their tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from gguf import Keys

from moegraft.injection.checkpoint.gguf.blocks import BlockTensor
from moegraft.injection.checkpoint.gguf.header import GgufFile
from moegraft.operators.errors import CheckpointError

PART = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
SUFFIX = ".gguf"
MAX_LISTED = 3
# In the names of image and speech towers, which llama.cpp stores in a file of their own.
TOWER = "mmproj"


def find_parts(path: Path) -> list[Path]:
    """Return the files of a model.

    Args:
        path: a file, any part of a split one, or a folder with the parts of one model.

    Raises:
        CheckpointError: there is no model, there are several, or a part is missing.
    """
    if path.is_dir():
        return _parts_of(_only_model(path))
    if not path.is_file():
        raise CheckpointError(f"{path}: no such GGUF file or folder")
    return _parts_of(path)


def _only_model(folder: Path) -> Path:
    models: dict[str, Path] = {}
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        if TOWER not in file.name.lower():
            part = PART.fullmatch(file.name)
            models.setdefault(part["model"] if part else file.name.removesuffix(SUFFIX), file)
    if not models:
        raise CheckpointError(f"{folder}: no {SUFFIX} file in this folder")
    if len(models) > 1:
        names = ", ".join(file.name for file in models.values())
        raise CheckpointError(f"{folder}: {len(models)} models in this folder; name one of these files instead: {names}")
    return next(iter(models.values()))


def _parts_of(file: Path) -> list[Path]:
    part = PART.fullmatch(file.name)
    if part is None:
        return [file]
    count, number = int(part["count"]), int(part["number"])
    if not 1 <= number <= count:
        raise CheckpointError(f"{file}: the name means part {number} of {count}; restore the name that the file was downloaded with")
    parts = [file.with_name(f"{part['model']}-{number:05}-of-{part['count']}{SUFFIX}") for number in range(1, count + 1)]
    missing = [path.name for path in parts if not path.is_file()]
    if missing:
        more = f" and {len(missing) - MAX_LISTED} more" if len(missing) > MAX_LISTED else ""
        raise CheckpointError(
            f"{file.parent}: parts of this model, which has {count}, are missing: {', '.join(missing[:MAX_LISTED])}{more}; download them"
        )
    return parts


def merge(files: Sequence[GgufFile]) -> dict[str, BlockTensor]:
    """Return the tensors of all parts by name.

    Raises:
        CheckpointError: the files are not the parts of one model.
    """
    first = files[0]
    tensors: dict[str, BlockTensor] = {}
    for position, file in enumerate(files):
        _check_part(file, position, len(files))
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{tensor.origin}: also in {tensors[name].file.name}; these are not the parts of one model")
            tensors[name] = tensor
    wanted = first.integer(Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT)
    if len(files) > 1 and wanted is not None and wanted != len(tensors):
        raise CheckpointError(f"{first.path}: expected {wanted} tensors in all parts, found {len(tensors)}; download all parts again")
    return tensors


def _check_part(file: GgufFile, position: int, parts: int) -> None:
    count, number = (file.integer(key) or 0 for key in (Keys.Split.LLM_KV_SPLIT_COUNT, Keys.Split.LLM_KV_SPLIT_NO))
    header = f"{file.path}: this is part {number + 1} of {count} by its header"
    if parts > 1 and (count, number) != (parts, position):
        raise CheckpointError(f"{header} and part {position + 1} of {parts} by its name; download it again")
    if parts == 1 and count > 1:
        raise CheckpointError(f"{header}; rename it to NAME-{number + 1:05}-of-{count:05}{SUFFIX}")
