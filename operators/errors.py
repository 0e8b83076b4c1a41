"""Errors that a user can mend: each message says where, what, and what to do."""


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
