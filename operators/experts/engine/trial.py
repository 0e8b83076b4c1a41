"""Which of two ways to decode is the faster here: a few tokens of each, timed as they are made."""

from __future__ import annotations

import logging
import statistics
from typing import Literal

logger = logging.getLogger(__name__)
Way = Literal["eager", "graph"]
STEPS = 8  # of each way; the first one, which warms up, is not counted


class Trial:
    """Asked before every step that could go either way. A step takes from its beginning to that of the next one.

    Attributes:
        winner: None until both ways were timed.
    """

    def __init__(self) -> None:
        self.winner: Way | None = None
        self._times_ms: dict[Way, list[float]] = {"eager": [], "graph": []}
        self._running: tuple[Way, float] | None = None

    def next(self, now_ms: float) -> Way:
        """How the step that begins now is to be made."""
        if self.winner is not None:
            return self.winner
        if self._running is not None:
            way, began_ms = self._running
            self._times_ms[way].append(now_ms - began_ms)
        way = next((way for way, times in self._times_ms.items() if len(times) <= STEPS), "eager")
        if all(len(times) > STEPS for times in self._times_ms.values()):
            way = self.winner = self._faster()
        self._running = way, now_ms
        return way

    def pause(self) -> None:
        """Something else comes before the next step, whose time is not the last one's."""
        self._running = None

    def _faster(self) -> Way:
        eager_ms, graph_ms = (statistics.median(times[1:]) for times in self._times_ms.values())
        logger.info("a token takes %.2f ms layer by layer and %.2f ms as a captured step", eager_ms, graph_ms)
        return "graph" if graph_ms < eager_ms else "eager"
