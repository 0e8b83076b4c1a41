"""Errors that a user can fix: each message has the place, the reason and the remedy; and what messages consist of."""

import os


class MoegraftError(ValueError):
    """Base of every error that the input causes; programs print its message alone and exit with code 2.

    Surrogates of the message, from damaged JSON or a file name that is not UTF-8, are escaped, so that it can always be printed.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.encode("utf-8", "backslashreplace").decode())


class RuleFileError(MoegraftError):
    """A rule file is wrong, or does not fit the model; the message lists every finding as `file:line:column: error: ...`."""


class CheckpointError(MoegraftError):
    """A checkpoint is damaged, incomplete or of an unsupported kind; the message names the file and the key."""


class UnsupportedModelError(MoegraftError):
    """A model, module or combination of options is not supported; the message gives the reason."""


class NotEnoughMemoryError(MoegraftError):
    """A plan needs more memory than the machine has free; the message gives both figures and the ways to save memory."""


class ThresholdsError(MoegraftError):
    """A thresholds file cannot be read or is for another model; the message names the file and the difference."""


def error_sentence(error: Exception) -> str:
    """Return the error's message without the errno and the advice that libraries append."""
    if isinstance(error, MoegraftError):
        return str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def human_bytes(size: int) -> str:
    """Return text such as `17.3 GiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
