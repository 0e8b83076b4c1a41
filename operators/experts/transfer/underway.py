"""The transfers of a queue that are under way: who they are, and what becomes of them."""

from __future__ import annotations

import logging

from moegraft.operators.experts.devices.interface import DeviceError
from moegraft.operators.experts.transfer.slots import SlotTable
from moegraft.operators.experts.transfer.store import ExpertStore
from moegraft.operators.experts.transfer.transfers import Transfer, TransferState, TransferStatistics, Unsent, Urgency

logger = logging.getLogger(__name__)


class Underway:
    """Keeps transfers, their slots and the counts in step; the queue's lock guards it.

    Attributes:
        unsent: those with bytes left to send, in the order in which they go.
    """

    def __init__(self, device: str, store: ExpertStore, slots: SlotTable, statistics: TransferStatistics) -> None:
        self.unsent = Unsent()
        self._device = device
        self._expert_bytes = store.expert_bytes
        self._slots = slots
        self._statistics = statistics
        self._live: list[dict[int, Transfer]] = [{} for _ in range(store.layers)]
        self._prefetch_failed = False

    def find(self, layer: int, expert: int) -> Transfer | None:
        """The transfer of an expert, unless its slot was given to another behind it."""
        transfer = self._live[layer].get(expert)
        return None if transfer is None or transfer.overtaken else transfer

    def running(self, layer: int) -> dict[int, Transfer]:
        """Those with bytes on the way, by expert."""
        live = self._live[layer].items()
        return {expert: each for expert, each in live if each.state is TransferState.RUNNING and not each.overtaken}

    def enter(self, transfer: Transfer) -> Transfer:
        self._live[transfer.layer][transfer.expert] = transfer
        self.unsent.add(transfer)
        return transfer

    def upgrade(self, transfer: Transfer, urgency: Urgency) -> None:
        """Makes it more urgent; it never gets less so."""
        if urgency < transfer.urgency:
            self._statistics.upgraded += 1
            self.unsent.upgrade(transfer, urgency)

    def sent(self, transfer: Transfer) -> None:
        """Its last byte was handed over."""
        assert transfer.reservation is not None, "it was sent somewhere"
        self.unsent.remove(transfer)
        self._slots.sent(transfer.reservation)

    def land(self, transfer: Transfer) -> None:
        """Its last byte is there."""
        assert transfer.reservation is not None, "it was loaded somewhere"
        transfer.state = TransferState.LANDED
        self._forget(transfer)
        self._statistics.landed += 1
        self._statistics.landed_bytes += self._expert_bytes
        self._slots.commit(transfer.reservation)

    def fail(self, transfer: Transfer, error: DeviceError) -> None:
        """A chunk of it was refused, or lost."""
        transfer.error = error
        self._statistics.failed += 1
        if not transfer.pins and not self._prefetch_failed:
            self._prefetch_failed = True
            logger.warning("%s: a prefetch has failed, and others that fail will not be mentioned: %s", self._device, error)
        self._drop(transfer, TransferState.FAILED)

    def cancel(self, transfer: Transfer) -> bool:
        """Drops what was not handed over yet. False: all of it was, and it will land; or it is done."""
        if transfer.done or transfer.sent_bytes >= self._expert_bytes:
            return False
        self._drop(transfer, TransferState.CANCELLED)
        self._statistics.cancelled += 1
        self._statistics.cancelled_bytes += transfer.sent_bytes
        return True

    def _drop(self, transfer: Transfer, state: TransferState) -> None:
        transfer.state = state
        self._forget(transfer)
        if transfer.sent_bytes < self._expert_bytes:
            self.unsent.remove(transfer)
        if transfer.reservation is not None:
            self._slots.cancel(transfer.reservation)

    def _forget(self, transfer: Transfer) -> None:
        live = self._live[transfer.layer]
        if live.get(transfer.expert) is transfer:  # else it was overtaken, and asked for again
            del live[transfer.expert]
