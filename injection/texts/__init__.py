"""Bundled texts, which commands use if the user gives none."""

from importlib.resources import files
from pathlib import Path


def text_content(path: Path | None, bundled: str) -> bytes:
    """Return the bytes of a user's text, by default those of the bundled text of this name.

    Raises:
        OSError: the file cannot be read.
    """
    return read_text(bundled).encode() if path is None else path.read_bytes()


def read_text(name: str) -> str:
    """Return a bundled text: `calibration` or `gettysburg`.

    `calibration` is a mixture: prose, dialogue, instructions, code, figures, several languages. `gettysburg` is Abraham Lincoln's
    address of 1863, in the public domain.
    """
    return (files(__name__) / f"{name}.txt").read_text(encoding="utf-8")
