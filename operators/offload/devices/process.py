"""What processes and signals must not do to a device: use it after a fork, and break off in the midst of a change."""

from __future__ import annotations

import os
import threading
from _signal import SIGINT, signal  # type: ignore[import-not-found]
from collections.abc import Callable
from types import FrameType

# `signal.signal` takes ten times as long, to turn handlers into enumerations and back.

Handler = Callable[[int, FrameType | None], object]


class ProcessGuard:
    """Use in a forked child is refused: threads, streams and page-locked memory stay behind in the parent."""

    __slots__ = ("_name", "_owner")

    def __init__(self, name: str) -> None:
        self._name = name
        self._owner = os.getpid()

    def check(self) -> None:
        """Raises RuntimeError in a child forked from the process that made this."""
        if os.getpid() != self._owner:
            raise RuntimeError(f"{self._name} was made by process {self._owner} and cannot be used after a fork; start processes by spawn")


class Uninterrupted:
    """A context that Ctrl-C ends but does not tear: KeyboardInterrupt comes as it is left; a second Ctrl-C comes at once.

    Slots and queues change in several steps, and Python delivers the signal between any two of them. For the main thread, which alone
    is interrupted; elsewhere it does nothing. What runs inside must end by itself.
    """

    __slots__ = ("_frame", "_handler", "_pending")

    def __enter__(self) -> None:
        self._handler: Handler | None = None
        self._pending = False
        if threading.current_thread() is threading.main_thread():
            handler = signal(SIGINT, self._note)
            if callable(handler):
                self._handler = handler
            elif handler is not None:  # the system's own action tears no Python code
                signal(SIGINT, handler)

    def __exit__(self, *error: object) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            signal(SIGINT, handler)
            if self._pending:
                handler(SIGINT, self._frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self._pending = not self._pending, True
        self._frame = frame
        if not first and self._handler is not None:
            self._handler(number, frame)
