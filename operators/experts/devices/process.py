"""Use in a forked child is refused: threads, streams and page-locked memory stay behind in the parent."""

from __future__ import annotations

import os


class ProcessGuard:
    """Knows the process that made the thing called `name`."""

    __slots__ = ("_name", "_owner")

    def __init__(self, name: str) -> None:
        self._name = name
        self._owner = os.getpid()

    def check(self) -> None:
        """Raises RuntimeError in a child forked from that process."""
        if os.getpid() != self._owner:
            raise RuntimeError(f"{self._name} was made by process {self._owner} and cannot be used after a fork; start processes by spawn")
