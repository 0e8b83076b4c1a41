"""What the library logs, shown where the rest of a command's notices go."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from moegraft.injection.cli.terminal import Terminal


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
