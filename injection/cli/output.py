"""The output and the exit codes of the programs.

Results go to stdout, everything else to stderr. A user's error is one message and exit code 2; a closed pipe or Ctrl-C ends the
program without a traceback.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import typer
from rich.console import Console

from moegraft.injection.progress import ProgressLine
from moegraft.injection.rules import Diagnostic, RuleErrors
from moegraft.operators.errors import MoegraftError, RuleFileError, error_sentence

FINDINGS = 1  # wrong rules, a model that does not fit, a failed verification
USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, what a shell reports
BROKEN_PIPE = 141  # 128 + SIGPIPE

# Control characters, which would control the terminal and which a model may generate. Tab and newline stay.
CONTROLS = dict.fromkeys([*range(0x00, 0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)])


@contextmanager
def user_errors(program: str, *, wrong_rules: int = USER_ERROR, together: bool = False) -> Iterator[None]:
    """End the program without a traceback after a user's error, a closed pipe or Ctrl-C.

    Args:
        wrong_rules: the exit code for mistakes in a rule file; that for a file that cannot be read is USER_ERROR.
        together: whether processes that torchrun starts load one model, so that an error of one has to end the others.

    Raises:
        typer.Exit: with the exit code of the error that the body raised.
    """
    try:
        yield
    except BrokenPipeError:
        # Python flushes stdout again at exit, and would report the closed pipe once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from None
    except (MoegraftError, OSError) as error:
        # The findings of a rule file, or any other error as one sentence after the program's name.
        print(error if isinstance(error, RuleFileError) else f"{program}: error: {error_sentence(error)}", file=sys.stderr)
        if together and os.environ.get("WORLD_SIZE", "1") != "1":
            _report_to_others(error)
        in_rules = isinstance(error, RuleErrors) and Path(error.diagnostics[0].position.file).is_file()
        raise typer.Exit(wrong_rules if in_rules else USER_ERROR) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _report_to_others(error: Exception) -> None:
    """End the other processes where this one fails before it has connected to them to load the model."""
    from torch import distributed

    from moegraft.injection.parallel import process_count, report_to_others
    from moegraft.operators.expert_group import GroupLostError

    if process_count() > 1 and not distributed.is_initialized() and not isinstance(error, GroupLostError):
        report_to_others(error)


@dataclass(frozen=True, slots=True)
class Terminal:
    """The two output streams of a program."""

    out: TextIO
    notices: Console
    quiet: bool = False

    def write(self, text: str) -> None:
        """Write a result to stdout and flush it.

        Raises:
            BrokenPipeError: the reader of stdout is gone.
        """
        self.out.write(text.translate(CONTROLS) if self.out.isatty() else text)
        self.out.flush()

    def notice(self, text: str, style: str = "dim") -> None:
        """Print a line about the run to stderr; nothing with --quiet."""
        if not self.quiet:
            self._print(text, style)

    def reply(self, text: str) -> None:
        """Print the reply to a command to stderr, also with --quiet."""
        self._print(text, "")

    def complain(self, text: str) -> None:
        """Print an error that does not end the program to stderr."""
        self._print(text, "red")

    def stage(self, text: str, total: int = 0, unit: str = "tokens") -> AbstractContextManager[Callable[[int], None]]:
        """Show on stderr what runs in the body, if it takes long; yield `advance(units)`. Nothing is shown with --quiet."""
        return self.progress.stage(text, total, unit)

    @property
    def progress(self) -> ProgressLine:
        return ProgressLine(self.notices, enabled=not self.quiet)

    @contextmanager
    def answering(self, before: str) -> Iterator[Callable[[str], None]]:
        """Yield a function that writes the next piece of an answer to stdout, and end the answer's last line after the body.

        From the first piece on, everything else that this process writes to stdout and stderr, by whatever means, waits for the end of
        the answer, and then goes to stderr: the two streams may be one screen, and one pipe.

        Args:
            before: what to show on stderr until the first piece, if that takes long.

        Raises:
            BrokenPipeError: from the function that is yielded; the reader of stdout is gone.
        """
        with ExitStack() as answer, ExitStack() as waiting:
            waiting.enter_context(self.stage(before))
            last, completed = "", False
            put: Callable[[str], None] | None = None

            def write(piece: str) -> None:
                nonlocal last, put
                if put is None:
                    waiting.close()
                    put = answer.enter_context(self._alone())
                put(piece)
                last = piece[-1:] or last

            try:
                yield write
                completed = True
            finally:
                if last != "\n" and (completed or put is not None):
                    write("\n")

    @contextmanager
    def _alone(self) -> Iterator[Callable[[str], None]]:
        """Yield a function that writes to stdout, and hold back until the end of the body what else is written to stdout and stderr.

        By their descriptors: native code, other programs and handlers that opened a stream earlier write past `sys.stderr`.
        """
        if not _is_descriptor(self.out, 1):
            yield self.write  # a stream of a caller's own
            return
        controls = CONTROLS if self.out.isatty() else {}
        encoding, errors = self.out.encoding, self.out.errors or "strict"
        crashes = not faulthandler.is_enabled()
        with ExitStack() as restored, os.fdopen(os.memfd_create("moegraft-held"), "w+b", buffering=0) as buffer:
            _flush()
            streams = {descriptor: os.dup(descriptor) for descriptor in (1, 2) if _is_open(descriptor)}
            for descriptor, stream in streams.items():
                restored.callback(os.close, stream)
                restored.callback(os.dup2, stream, descriptor)
                os.dup2(buffer.fileno(), descriptor)
            restored.callback(_flush)  # the first of these, into what is held
            if crashes and 2 in streams:
                faulthandler.enable(streams[2])  # what is held is lost if the process crashes
                restored.callback(faulthandler.disable)
            try:
                yield lambda text: _write_all(streams[1], text.translate(controls).encode(encoding, errors))
            finally:
                restored.close()
                buffer.seek(0)
                with suppress(OSError):  # nobody reads stderr, or it is closed
                    _write_all(2, buffer.read())

    def _print(self, text: str, style: str) -> None:
        self.notices.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _is_descriptor(stream: TextIO, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except (OSError, ValueError):  # it has none, or is closed
        return False


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):  # nobody reads it, or it is closed
                stream.flush()


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def open_terminal(*, quiet: bool = False) -> Terminal:
    """Return the terminal of this process, of which a closed stdout shows nothing. NO_COLOR or a dumb terminal: no escape sequences."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals with an encoding such as Latin-1
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return Terminal(sys.stdout or io.StringIO(), Console(stderr=True, color_system=None if plain else "auto"), quiet)


@contextmanager
def importing(terminal: Terminal) -> Iterator[None]:
    """Show that the body imports large libraries, and spend no time on looking for garbage in what they leave for good."""
    first = "torch" not in sys.modules and gc.isenabled()
    if first:
        gc.disable()
    try:
        with terminal.stage("importing PyTorch and transformers"):
            yield
    finally:
        if first:
            gc.freeze()
            atexit.register(gc.unfreeze)  # native libraries complain about objects that are left at the end
            gc.enable()


class _TerminalHandler(logging.Handler):
    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        self._terminal.notice(self.format(record), style="yellow" if record.levelno >= logging.WARNING else "dim")


@contextmanager
def library_log(terminal: Terminal, *, verbose: bool = False) -> Iterator[None]:
    """Print moegraft's log as notices while the body runs: findings of the plan, slower paths and, if `verbose`, details."""
    logger, handler = logging.getLogger("moegraft"), _TerminalHandler(terminal)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


Json = Mapping[str, Any]  # different for each command


def write_json(terminal: Terminal, data: Json) -> None:
    """Write one JSON object. NaN and infinity become null; paths and other objects become text."""
    terminal.write(json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n")


def write_result(
    terminal: Terminal, lines: Iterable[str], data: Json, *, as_json: bool, ok: bool = True, notices: Iterable[str | None] = ()
) -> None:
    """Write a command's result: `data` as JSON where that is asked for, else `lines` of text, and those `notices` that there are.

    Raises:
        typer.Exit: with FINDINGS, unless the result is `ok`.
    """
    if as_json:
        write_json(terminal, data)
    else:
        terminal.write("".join(f"{line}\n" for line in lines))
        for notice in filter(None, notices):
            terminal.notice(notice)
    if not ok:
        raise typer.Exit(FINDINGS)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def diagnostic_json(diagnostic: Diagnostic) -> Json:
    at = diagnostic.position
    return {"file": at.file, "line": at.line, "column": at.column, "severity": diagnostic.severity, "message": diagnostic.message}


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Align rows in columns, those with an index in `right` to the right. Nothing is truncated."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if index in right else cell.ljust(width) for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines


def plural(number: int, noun: str) -> str:
    """Return `1 module` or `2 modules`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
