"""Several processes for one model: find them, divide the experts among them, and agree on errors before the model runs.

torchrun and `accelerate launch` start the processes and set WORLD_SIZE, RANK and LOCAL_WORLD_SIZE; messages go over gloo.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist

from moegraft.injection.planning import Plan
from moegraft.injection.rules.rule import ShareRule
from moegraft.operators.base import Operator
from moegraft.operators.errors import MoegraftError, NotEnoughMemoryError, UnsupportedModelError, error_sentence, human_bytes
from moegraft.operators.expert_group import TIMEOUT_S, ExpertGroup, GroupLostError, Peer, Shares, threads_of_each
from moegraft.operators.machine import probe_machine

logger = logging.getLogger(__name__)
T = TypeVar("T")
CONNECTING_S = 300.0  # that the last process may start after the first
NOTICE_S = 10.0  # of waiting for a process that does something else, before that is reported
LOADING_S = 3600.0  # that the slowest process may load longer than the fastest
Core = tuple[int, ...]  # the numbers of its CPUs: two with simultaneous multithreading
KEPT_FREE = 0.1  # of a machine's memory, beside the weights
PROBE_BYTES = 64 << 20
# torch.distributed's groups and its store belong to the process as well.
_groups: WeakSet[ExpertGroup] = WeakSet()
_rendezvous: list[_Rendezvous] = []  # one, once this process has connected
TIMEOUT_VARIABLE = "MOEGRAFT_RANK_TIMEOUT"  # seconds


def process_count() -> int:
    """Return the number of processes that were started together; 1 without torchrun and the like."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return _number("WORLD_SIZE", 1)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else default


def _timeout_s() -> float:
    text = os.environ.get(TIMEOUT_VARIABLE, str(TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LOADING_S:
        raise MoegraftError(f"{TIMEOUT_VARIABLE} must be a number of seconds above 0 and at most {LOADING_S:.0f}, not {text!r}")
    return seconds


def check_distributed_config(config: Any, processes: int) -> None:
    """Check transformers' `DistributedConfig`, which may describe these processes; experts are divided by the rule file alone.

    Raises:
        UnsupportedModelError: it describes something else.
    """
    for name, expected in (("tp_size", processes), ("ep_size", processes)):
        value = getattr(config, name, None)
        if value not in (None, expected):
            raise UnsupportedModelError(f"distributed_config.{name} is {value}, and {processes} processes were started")
    for name in ("tp_plan", "fsdp_size", "fsdp_plan", "pp_plan"):
        value = getattr(config, name, None)
        if value not in (None, {}, 1):
            raise UnsupportedModelError(f"distributed_config.{name} is {value!r:.100}: only experts are divided over processes; remove it")


def report_to_others(failure: Exception) -> None:
    """Let the other processes, which connect to load a model, end with an error of this one; wait CONNECTING_S for them."""
    with suppress(type(failure), MoegraftError), Processes() as processes, processes.agreed():
        raise failure


def report_whole_model() -> None:
    """Let other processes, which may wait for this one to load a share of a model, report that it has loaded a whole one."""
    # Without torchrun's store, another process may have to start first, which this one does not need.
    if not _rendezvous and (dist.is_initialized() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"):
        return
    with suppress(RuntimeError, ValueError):
        _join(NOTICE_S).note_absence("it has loaded a whole model ('parallel: {shares: none}' in its rule file)")


@dataclass(frozen=True, slots=True)
class _Offer:
    """The memory and the reading speed that a process offers for experts, and the bytes of all experts and of the rest."""

    free_bytes: int
    read_gbps: float
    experts_bytes: int
    rest_bytes: int


class _Rendezvous:
    """Which ranks have arrived to load a model together, and what the others do instead, in a store that all of them reach.

    A collective would only report that a rank is missing, and that late.
    """

    def __init__(self, store: Any, count: int, rank: int) -> None:  # torch's stubs lack its stores
        self.store = store
        self._count, self._rank = count, rank

    def note_absence(self, reason: str, *, declines: bool = False) -> None:
        """Note why this rank has not arrived; `declines`: it does not unless its program tries again."""
        self.store.set(f"moegraft/word/{self._rank}", f"{int(declines)}{socket.gethostname()}: {reason}" if reason else "")

    def arrive(self) -> int:
        """Wait until all ranks have arrived; return how often they have.

        Raises:
            MoegraftError: a process declines.
            GroupLostError: one has not arrived in CONNECTING_S.
        """
        self.note_absence("")
        number = self.store.add(f"moegraft/came/{self._rank}", 1)
        try:
            began, noticed = time.monotonic(), False
            while missing := [rank for rank in range(self._count) if self.store.add(f"moegraft/came/{rank}", 0) < number]:
                waited_s = time.monotonic() - began
                if waited_s > min(NOTICE_S, CONNECTING_S):
                    words = {rank: self._word(rank) for rank in missing}
                    for rank, word in words.items():
                        if word.startswith("1"):
                            raise MoegraftError(f"rank {rank} on {word[1:]}")
                    named = ", ".join(f"rank {rank} on {word[1:]}" if word else f"rank {rank}" for rank, word in words.items())
                    if waited_s > CONNECTING_S:
                        raise GroupLostError(
                            f"rank {self._rank} cannot reach all of the {self._count} processes (missing after {CONNECTING_S:.0f} s: "
                            f"{named}): start all of them with the same model and rules; one that is missing has logged why"
                        )
                    if not noticed:
                        level = logging.WARNING if any(words.values()) else logging.INFO
                        logger.log(level, "this process, rank %d, waits up to %.0f s for %s", self._rank, CONNECTING_S, named)
                        noticed = True
                time.sleep(0.02)
        except BaseException:
            with suppress(RuntimeError):  # the store's process has ended
                self.store.add(f"moegraft/came/{self._rank}", -1)
            raise
        return int(number)

    def _word(self, rank: int) -> str:
        key = f"moegraft/word/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else ""


def _join(timeout_s: float) -> _Rendezvous:
    """Return this process's side of the rendezvous, which connects at first; rank 0 or torchrun has the store."""
    if not _rendezvous:
        from torch.distributed.rendezvous import rendezvous  # PyTorch may be built without it

        store, rank, count = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        _rendezvous.append(_Rendezvous(store, count, rank))
    return _rendezvous[0]


class Processes:
    """All processes of this program, connected while the body of `with` runs, to load a model together.

    After a failure in the body all connections end, so that no other process waits for this one.

    Raises:
        MoegraftError: they cannot reach each other, one of them fails here, or this one has another model.
    """

    def __init__(self) -> None:
        self.count = process_count()
        self.rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else _number("RANK", 0)  # 0 has the model and its user
        self.peers: list[Peer] = []
        self.timeout_s = TIMEOUT_S
        self._local = 1  # processes on this machine
        self._neighbours: dict[int, tuple[Core, ...]] = {}  # their cores
        self._loading: dist.ProcessGroup | None = None
        self._running: dist.ProcessGroup | None = None  # that of the model, while it runs

    def __enter__(self) -> Self:
        if any(group.in_use for group in _groups):
            gc.collect()  # a deleted model may be part of a cycle
        if any(group.in_use for group in _groups):
            reason = (
                "another model is loaded over these processes, which follow one model at a time: close it in all of them "
                "(model.moegraft.close()) before the next is loaded"
            )
            for rendezvous in _rendezvous:
                with suppress(RuntimeError):  # the store's process has ended
                    rendezvous.note_absence(reason, declines=True)
            raise UnsupportedModelError(reason)
        try:
            self._connect()
        except BaseException:
            self._free(self._loading, self._running)
            raise
        return self

    def __exit__(self, failure: type[BaseException] | None, *rest: object) -> None:
        loading, running = self._loading, self._running
        self._loading = self._running = None
        self._free(loading, None if failure is None else running)

    def _connect(self) -> None:
        try:
            if _rendezvous or not dist.is_initialized():  # else the program has its own store
                rendezvous = _join(CONNECTING_S)
                number = rendezvous.arrive()
                if not dist.is_initialized():
                    store = dist.PrefixStore(f"moegraft/groups/{number}", rendezvous.store)  # type: ignore[attr-defined] # as above
                    timeout = timedelta(seconds=CONNECTING_S)
                    dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.count, timeout=timeout)
            self._loading = dist.new_group(backend="gloo", timeout=timedelta(seconds=CONNECTING_S))
            everywhere = self.exchange(lambda: (_machine_id(), _physical_cores(), _timeout_s()))
            self.timeout_s = everywhere[self.rank][2]
            # All processes are here. From now on, one may be much slower than another.
            connecting, self._loading = self._loading, dist.new_group(backend="gloo", timeout=timedelta(seconds=LOADING_S))
            self._free(connecting)
            self._running = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))
        except (RuntimeError, ValueError) as error:
            if isinstance(error, MoegraftError):
                raise
            raise GroupLostError(
                f"{self.peers[self.rank] if self.peers else f'rank {self.rank}'} cannot reach all of the {self.count} processes "
                f"({_first_line(error)}): start all of them with the same model and rules; one that is missing has logged why"
            ) from error
        self._neighbours = {rank: cores for rank, (machine, cores, _) in enumerate(everywhere) if machine == everywhere[self.rank][0]}
        self._local = _number("LOCAL_WORLD_SIZE", 0) or len(self._neighbours)

    @staticmethod
    def _free(*groups: dist.ProcessGroup | None) -> None:
        for group in groups:
            if group is not None:
                with suppress(ValueError):  # this program has destroyed all groups
                    dist.destroy_process_group(group)

    @property
    def threads(self) -> int:
        """The CPU threads of this process: the processes of a machine divide its cores, unless each has been given its own."""
        cpus = [cpu for cores in self._neighbours.values() for core in cores for cpu in core]
        return threads_of_each(1 if cpus and len(set(cpus)) == len(cpus) else self._local)

    def take_cores(self, threads: int) -> None:
        """Keep the threads of this process on its part of the machine's cores, while processes that were given the same cores share them.

        A message wakes its receiver on the core of the sender, where the two would alternate while another core is idle: a
        scheduler may leave them there for seconds.

        Args:
            threads: that compute; where they are more than the part, they stay where they are.
        """
        count, cores = len(self._neighbours), self._neighbours[self.rank]
        if not 1 < count <= len(cores) or any(other != cores for other in self._neighbours.values()):
            return
        part = part_of(cores, sorted(self._neighbours).index(self.rank), count)
        if threads > len(part):
            return
        cpus = {cpu for core in part for cpu in core}
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread.name), cpus)
        logger.info("%s: CPUs %s", self.peers[self.rank], ", ".join(map(str, sorted(cpus))))

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Run the body in all processes; where it fails in one, it fails in all.

        Raises:
            MoegraftError: of the body here or, with its rank, elsewhere.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 # the others end with any
            self._gather(None, error)
        else:
            self._gather(None)

    def exchange(self, compute: Callable[[], T]) -> list[T]:
        """Return what `compute` returns in each process; where it fails in one, it fails in all, as with `agreed`."""
        try:
            result = compute()
        except Exception as error:  # noqa: BLE001 # the others end with any
            return self._gather(None, error)
        return self._gather(result)

    def _gather(self, result: Any, failure: Exception | None = None) -> list[Any]:
        """Return the object of each process; raise the failure of any."""
        results: list[Any] = [None] * self.count
        try:
            text = None
            if failure is not None:
                known = isinstance(failure, MoegraftError | OSError)
                text = error_sentence(failure) if known else f"{type(failure).__name__}: {failure}"
            dist.all_gather_object(results, (socket.gethostname(), result, text), group=self._loading)
        except RuntimeError as error:
            traceback.clear_frames(error.__traceback__)  # they hold the group, whose threads must end before the interpreter does
            if failure is None:
                reason = f"another process ended while the model was loaded ({_first_line(error)}); start all again"
                raise GroupLostError(reason) from error
        if failure is not None:
            raise failure
        self.peers = [Peer(rank, host) for rank, (host, _, _) in enumerate(results)]
        failed = [(peer, text) for peer, (_, _, text) in zip(self.peers, results, strict=True) if text is not None]
        if failed:
            raise MoegraftError("; ".join(f"{peer}: {text}" for peer, text in failed))
        return [each for _, each, _ in results]

    def divide(self, rule: ShareRule, whole: Plan) -> Shares:
        """Return the shares of the processes, which all of them compute alike from what each of them has.

        Args:
            whole: the plan of one process that holds everything.

        Raises:
            UnsupportedModelError: the rule file has shares for another number of processes, or another process has other rules or another
                model.
            NotEnoughMemoryError: the experts do not fit in the memory of all processes.
        """
        swaps = [swap for swap in whole.swaps if swap.operator_type.kind == "experts"]
        layers = [(swap.module, swap.operator, swap.traits.identity, swap.footprint.total_bytes) for swap in swaps]

        def offer() -> _Offer | None:
            if rule != "auto":
                return None
            experts = sum(swap.footprint.by_device.get("cpu", 0) for swap in swaps)
            rest = whole.bytes_by_device.get("cpu", 0) - experts
            return _Offer(probe_machine().available_bytes // self._local, _read_gbps(), experts, rest)

        everywhere = self.exchange(lambda: ((rule, layers), offer()))
        first = everywhere[0][0]
        for peer, (found, _) in zip(self.peers, everywhere, strict=True):
            if found != first:
                what = "a model or rules with other experts" if found[0] == first[0] else f"shares {found[0]}, not {first[0]}"
                raise UnsupportedModelError(f"{peer} has {what}; give all processes the same files")
        if rule != "auto":
            assert rule != "none", "such rules start no group"
            if len(rule) != self.count:
                raise UnsupportedModelError(
                    f"parallel.shares has {len(rule)} numbers, and {self.count} processes were started; give one for each, or 'auto'"
                )
            return Shares(rule, self.rank)
        offers = [each for _, each in everywhere if each is not None]
        lead = offers[0]
        sizes = divide_by_speed(
            [each.read_gbps for each in offers],
            [int(each.free_bytes * (1 - KEPT_FREE)) - (0 if rank else lead.rest_bytes) for rank, each in enumerate(offers)],
            lead.experts_bytes,
        )
        if self.rank == 0:
            for peer, each, size in zip(self.peers, offers, sizes, strict=True):
                free = human_bytes(each.free_bytes)
                logger.info("%s: %.0f %% of the experts (reads %.0f GB/s, %s free)", peer, 100 * size, each.read_gbps, free)
        return Shares(tuple(sizes), self.rank)

    def group(self, shares: Shares) -> ExpertGroup:
        assert self._running is not None, "called in the body of 'with'"
        group = ExpertGroup(shares, self.peers, self._running, self.timeout_s)
        _groups.add(group)
        return group

    def weight_samples(self, operators: Mapping[str, Operator]) -> dict[str, list[bytes]]:
        """Return the weight samples of the operators of experts, each those of all processes."""
        parts = self.exchange(
            lambda: {path: list(operator.weight_samples()) for path, operator in operators.items() if operator.kind == "experts"}
        )
        return {path: [sample for part in parts for sample in part[path]] for path in parts[self.rank]}


def part_of(cores: Sequence[Core], place: int, count: int) -> Sequence[Core]:
    """Return the part of one of `count` processes; parts do not overlap and are equal up to one core."""
    return cores[place * len(cores) // count : (place + 1) * len(cores) // count]


def _physical_cores() -> tuple[Core, ...]:
    """Return the cores that this process may use, those of a socket together; empty where the system does not report them."""
    try:
        allowed = os.sched_getaffinity(0)
        by_core: dict[tuple[int, int], list[int]] = {}
        for cpu in sorted(allowed):
            topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
            socket_id, first = ((topology / name).read_text() for name in ("physical_package_id", "thread_siblings_list"))
            by_core.setdefault((int(socket_id), int(re.split("[-,]", first)[0])), []).append(cpu)
    except (AttributeError, OSError, ValueError):
        return ()
    return tuple(tuple(by_core[key]) for key in sorted(by_core))


def _machine_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()


def divide_by_speed(speeds: Sequence[float], memory: Sequence[int], needed: int) -> list[float]:
    """Return each process's share of the experts, which sum to 1: in proportion to its speed, and at most what its memory holds.

    Args:
        memory: bytes for experts.
        needed: bytes of all experts.

    Raises:
        NotEnoughMemoryError: the experts do not fit, or a process has no memory for any.
    """
    bounds = [max(0.0, size / max(needed, 1)) for size in memory]
    if sum(bounds) < 1 or min(bounds) == 0:
        sizes = ", ".join(human_bytes(max(size, 0)) for size in memory)
        raise NotEnoughMemoryError(
            f"the experts take {human_bytes(needed)}, and the processes have {sizes} for them (rank 0 also holds the rest of the model); "
            "a smaller weight type (weights: int4 in the rule file) or another machine would help"
        )
    shares = [0.0] * len(speeds)
    while (rest := 1 - sum(shares)) > 1e-9:
        room = [rank for rank, share in enumerate(shares) if share < bounds[rank]]
        speed = sum(speeds[rank] for rank in room)
        for rank in room:
            shares[rank] = min(bounds[rank], shares[rank] + rest * speeds[rank] / speed)
    return shares


def _read_gbps() -> float:
    """Measure how fast the threads of this process read memory, in GB/s; a quick figure to compare machines by."""
    data = torch.from_numpy(np.ones(PROBE_BYTES // 4, np.float32))
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        data.sum()
        best = max(best, PROBE_BYTES / (time.perf_counter() - began) / 1e9)
    return round(best, 1)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
