"""Measured time of the messages between the processes that hold a model's experts.

The exchange of the forward pass itself is measured, with experts that return their input. The result is saved in the user's cache folder.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from moegraft.injection.estimate.measure import load_figures, save_figures
from moegraft.injection.parallel import Processes
from moegraft.operators.expert_group import Peer, Shares
from moegraft.operators.machine import version_of

HIDDEN = 2048  # of Qwen3-30B-A3B
MANY_TOKENS = 1024  # 4 MiB of bfloat16 in each direction
FEW_CALLS, MANY_CALLS = 400, 12
FILE_NAME = "network.json"


@dataclass(frozen=True, slots=True)
class Link:
    """The exchange between rank 0 and another rank.

    Attributes:
        layer_us: that a layer takes longer when the other rank is asked for one row, and answers at once.
        gbit: bits of rows and sums in a second, with many rows.
    """

    host: str
    layer_us: float
    gbit: float


@dataclass(frozen=True, slots=True)
class Network:
    """The links of rank 0 to all other ranks.

    Attributes:
        all_us: that a layer takes longer when all are asked for one row.
    """

    links: tuple[Link, ...]
    all_us: float

    @property
    def slowest(self) -> Link:
        return min(self.links, key=lambda link: link.gbit)


class _Echo:
    """Experts that return their input."""

    def compute(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(rows)


def measure_network() -> Network | None:
    """Measure between the processes that torchrun has started; None in all but that of rank 0.

    Raises:
        MoegraftError: they cannot reach each other, or one has ended.
    """
    echo = _Echo()
    with Processes() as processes, processes.agreed():
        count = processes.count
        group = processes.group(Shares((1,) * count, processes.rank))
        layer = group.join(count, echo.compute)
    group.start()
    if processes.rank:
        group.follow()
        return None

    def seconds(tokens: int, ids: list[int], calls: int) -> float:
        """Return the median time of a layer whose rows all choose one expert on each of some ranks."""
        rows = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16)
        index = torch.tensor([ids]).repeat(tokens, 1)
        weights = torch.ones(index.shape)
        times = []
        for number in range(calls + calls // 4):
            began = time.perf_counter()
            group.forward(layer, rows, index, weights)
            if number >= calls // 4:
                times.append(time.perf_counter() - began)
        return statistics.median(times)

    alone_s, many_alone_s = seconds(1, [0], FEW_CALLS), seconds(MANY_TOKENS, [0], MANY_CALLS)

    def link(peer: Peer) -> Link:
        few_s, many_s = seconds(1, [0, peer.rank], FEW_CALLS), seconds(MANY_TOKENS, [0, peer.rank], MANY_CALLS)
        bits = 2 * 8 * MANY_TOKENS * HIDDEN * torch.bfloat16.itemsize
        return Link(peer.host, _longer_us(few_s, alone_s), round(bits / max(many_s - many_alone_s, 1e-9) / 1e9, 2))

    links = tuple(link(peer) for peer in processes.peers if peer.rank)
    all_s = seconds(1, list(range(count)), FEW_CALLS)
    group.close()
    return Network(links, _longer_us(all_s, alone_s))


def _longer_us(measured_s: float, alone_s: float) -> float:
    return max(0.0, round(1e6 * (measured_s - alone_s), 1))  # a busy machine may have disturbed the one more than the other


def save(network: Network) -> Path:
    """Save the measurement; see `save_figures`."""
    return save_figures(FILE_NAME, version_of("moegraft"), network)


def load() -> Network | None:
    """Return the saved measurement; None if there is none of this version."""
    return load_figures(
        FILE_NAME, version_of("moegraft"), lambda found: Network(tuple(Link(**link) for link in found["links"]), float(found["all_us"]))
    )
