"""Texts to use where the user gives none, read from the files beside this module."""

from importlib.resources import files


def read_text(name: str) -> str:
    """Return a bundled text: `calibration` or `gettysburg`.

    `calibration` is of many kinds: prose, dialogue, instructions, code, figures, several languages. `gettysburg` is real prose:
    Abraham Lincoln's address, 1863, in the public domain.
    """
    return (files(__name__) / f"{name}.txt").read_text(encoding="utf-8")
