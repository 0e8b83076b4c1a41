"""How every command ends: a user's error is one message and exit code 2, a closed pipe or Ctrl-C is no traceback.

What the library logs, shown where the rest of a command's notices go.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from moegraft.injection.cli.output import Terminal
from moegraft.injection.rules import RuleErrors
from moegraft.operators.errors import MoegraftError, RuleFileError, error_sentence

FINDINGS = 1  # the answer is no: wrong rules, a model that does not fit, a failed verification
USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, what a shell reports
BROKEN_PIPE = 141  # 128 + SIGPIPE


@contextmanager
def user_errors(program: str, *, wrong_rules: int = USER_ERROR) -> Iterator[None]:
    """Ends the program, without a traceback, on what is not a bug of ours.

    Args:
        wrong_rules: the exit code for mistakes in a rule file; one that cannot be read at all is a USER_ERROR.

    Raises:
        typer.Exit: with the exit code of the error that the body raised.
    """
    try:
        yield
    except BrokenPipeError:
        _discard_output()
        raise typer.Exit(BROKEN_PIPE) from None
    except (MoegraftError, OSError) as error:
        print(error_message(error, program), file=sys.stderr)
        raise typer.Exit(wrong_rules if _is_in_rules(error) else USER_ERROR) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _is_in_rules(error: Exception) -> bool:
    return isinstance(error, RuleErrors) and Path(error.diagnostics[0].position.file).is_file()


def error_message(error: Exception, program: str) -> str:
    """What to print for an error: a rule file's findings as they are, anything else as one sentence after the program's name."""
    if isinstance(error, RuleFileError):
        return str(error)
    return f"{program}: error: {error_sentence(error)}"


def _discard_output() -> None:
    # Python flushes stdout once more when it exits, and would complain about the same closed pipe again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _TerminalHandler(logging.Handler):
    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        self._terminal.notice(record.getMessage(), style="yellow" if record.levelno >= logging.WARNING else "dim")


@contextmanager
def library_log(terminal: Terminal) -> Iterator[None]:
    """While the body runs, what moegraft logs (which rules it chose, what a plan noticed, a slower path taken) is a notice."""
    logger, handler = logging.getLogger("moegraft"), _TerminalHandler(terminal)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
