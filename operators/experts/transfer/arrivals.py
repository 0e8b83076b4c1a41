"""When transfers will have landed: what goes before them, at the measured speed of the link."""

from __future__ import annotations

from math import inf

from moegraft.operators.experts.transfer.link import LinkClock
from moegraft.operators.experts.transfer.transfers import Transfer, TransferState, Unsent


class Arrivals:
    """Estimates, in ms from now; the queue's lock guards what they look at."""

    def __init__(self, link: LinkClock, unsent: Unsent, expert_bytes: int) -> None:
        self._link = link
        self._unsent = unsent
        self._expert_bytes = expert_bytes

    def of(self, transfer: Transfer, now_ms: float) -> float:
        """Of a transfer if it were demanded now; infinite for one that failed or was dropped."""
        if transfer.done:
            return 0.0 if transfer.state is TransferState.LANDED else inf
        left = self._expert_bytes - transfer.sent_bytes
        ahead = transfer.way_mark - self._link.landed_bytes if left == 0 else self._bytes_before(transfer) + left
        return self._link.until_ms(ahead, now_ms)

    def busy_ms(self, now_ms: float) -> float:
        """Until the first byte of a new demand."""
        return self._link.until_ms(self._bytes_before(None), now_ms)

    def _bytes_before(self, transfer: Transfer | None) -> int:
        """What lands before a demand starts, or goes on: what is under way, and the demands before it; None: a new one."""
        waiting = sum(self._expert_bytes - each.sent_bytes for each in self._unsent.demands_before(transfer))
        return self._link.sent_bytes - self._link.landed_bytes + waiting
