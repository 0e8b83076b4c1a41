"""Ctrl-C and state that changes in several steps."""

from __future__ import annotations

import threading
from _signal import SIGINT, signal  # type: ignore[import-not-found]
from collections.abc import Callable
from types import FrameType


class Uninterrupted:
    """A context that delays Ctrl-C to its end, where KeyboardInterrupt is raised; a second Ctrl-C is raised at once.

    Slots, queues and messages change in several steps, and Python delivers the signal between any two of them. Only the main thread is
    interrupted; in other threads the context does nothing. What runs inside must end by itself.
    """

    __slots__ = ("_frame", "_handler", "_pending")

    def __enter__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._pending = False
        if threading.current_thread() is threading.main_thread():
            # `signal.signal` takes ten times as long, to turn handlers into enumerations and back.
            handler = signal(SIGINT, self._on_signal)
            if callable(handler):
                self._handler = handler
            elif handler is not None:  # the system's own action interrupts no Python code
                signal(SIGINT, handler)

    def __exit__(self, *error: object) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            signal(SIGINT, handler)
            if self._pending:
                handler(SIGINT, self._frame)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first, self._pending = not self._pending, True
        self._frame = frame
        if not first and self._handler is not None:
            self._handler(number, frame)
