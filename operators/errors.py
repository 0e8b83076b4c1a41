"""Errors that a user can fix: each message has the place, the reason, and what to do."""

import os


class MoegraftError(ValueError):
    """Base of every error that is the input's fault; programs print its message alone and exit with code 2."""


class RuleFileError(MoegraftError):
    """A rule file, or what it asks of a model, is wrong; the message lists every finding as `file:line:column: error: ...`."""


class CheckpointError(MoegraftError):
    """A checkpoint is damaged, incomplete or of a kind that cannot be read; the message names the file and the key."""


class UnsupportedModelError(MoegraftError):
    """A model, module or option combination that cannot be served; the message names the reason."""


class NotEnoughMemoryError(MoegraftError):
    """A plan needs more memory than the machine has free; the message has both figures and what would make it fit."""


class ThresholdsError(MoegraftError):
    """A thresholds file that cannot be used, or not for this model; the message names the file and what differs."""


def error_sentence(error: Exception) -> str:
    """The error without the errno and the advice pages that libraries add."""
    if isinstance(error, MoegraftError):
        return str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
