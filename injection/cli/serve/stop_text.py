"""Stop strings: text is held back while it could be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Passes text on up to the first stop string, which is not passed on itself."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """What is safe to show of the text so far and was not shown yet."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            safe, self._held = self._held[: min(found)], ""
            return safe
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def rest(self) -> str:
        """What was held back, at the end of a text that no stop string ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that are the beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
