"""How fast the link is, and how long what is on it will take."""

from __future__ import annotations

SHARE = 0.1  # of a new measurement in the average: a copy that the host disturbed counts little
START_GB_S = 12.0  # PCIe 3.0 x16, until the first copies are measured


class LinkClock:
    """Bytes sent and landed in order, and a moving average of the time they take."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.landed_bytes = 0
        self.measured = 0
        self._ms_per_byte = 1 / START_GB_S / 1e6
        self._since_ms = 0.0  # what is under way began then: at the last landing, or when the idle link was given work

    @property
    def gb_s(self) -> float:
        return 1 / self._ms_per_byte / 1e6

    def ms(self, nbytes: int) -> float:
        """What a transfer of that size takes by itself."""
        return nbytes * self._ms_per_byte

    def send(self, nbytes: int, now_ms: float) -> int:
        """Counts bytes that were handed over; their mark on the way."""
        if self.sent_bytes == self.landed_bytes:
            self._since_ms = now_ms
        self.sent_bytes += nbytes
        return self.sent_bytes

    def land(self, nbytes: int, sent_ms: float, now_ms: float, *, counts: bool) -> float:
        """Counts bytes that landed, as a measurement only if nothing but the link held them up; when they were started."""
        start_ms = max(sent_ms, self._since_ms)
        self.landed_bytes += nbytes
        self._since_ms = now_ms
        if counts and now_ms > start_ms:
            ms_per_byte = (now_ms - start_ms) / nbytes
            share = SHARE if self.measured else 1.0
            self._ms_per_byte += share * (ms_per_byte - self._ms_per_byte)
            self.measured += 1
        return start_ms

    def until_ms(self, bytes_ahead: int, now_ms: float) -> float:
        """How long until so many bytes, those under way first, have landed."""
        if bytes_ahead <= 0:
            return 0.0
        under_way = self.sent_bytes - self.landed_bytes
        spent_ms = now_ms - self._since_ms if under_way > 0 else 0.0
        # What is under way may be all but there; it is not there before it is told.
        return self.ms(bytes_ahead) - min(max(0.0, spent_ms), self.ms(min(bytes_ahead, under_way)))
