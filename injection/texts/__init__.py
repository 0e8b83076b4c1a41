"""Bundled texts, which commands use if the user gives none."""

from importlib.resources import files


def read_text(name: str) -> str:
    """Return a bundled text: `calibration` or `gettysburg`.

    `calibration` is a mixture: prose, dialogue, instructions, code, figures, several languages. `gettysburg` is Abraham Lincoln's
    address of 1863, in the public domain.
    """
    return (files(__name__) / f"{name}.txt").read_text(encoding="utf-8")
