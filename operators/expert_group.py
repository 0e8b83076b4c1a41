"""Experts spread over processes: rank 0 runs the model, and every rank computes its share of each layer's experts.

Rank 0 sends each other rank the rows that chose one of its experts, with their ids and weights, computes its own experts meanwhile, and
adds the partial sums that come back. The others hold their experts and nothing else: they need no cache, no seed and no token, so that
they cannot diverge from rank 0, whatever their CPU. A message and its reply take half as long as an all-reduce (one row of 2048 float32
over loopback with gloo: 0.11 to 0.13 ms against 0.25 ms), and a rank that no row needs is not asked.

Every message is a header of int64 numbers, then the rows. It may be shorter than the buffer that receives it, but not longer: one that
does not fit is preceded by a message that announces a larger buffer.

gloo sends a message only once its receiver waits for it. So that rank 0 can close the model while another rank does something else, the
end has a tag of its own, which every other rank receives in the background from the start.
"""

from __future__ import annotations

import atexit
import io
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn
from weakref import WeakMethod

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from transformers.generation import utils as outputs_of_generate
from transformers.utils.generic import ModelOutput

from moegraft.cpu_backend import default_threads
from moegraft.operators.cpu import ELEMENT_CODES, ELEMENTS
from moegraft.operators.errors import MoegraftError, UnsupportedModelError
from moegraft.operators.interrupts import Uninterrupted

logger = logging.getLogger(__name__)
HEADER_NUMBERS = 6  # kind, layer, rows, experts per row, code of the dtype, numbers of a row or bytes that follow or are needed
HEADER_BYTES = 8 * HEADER_NUMBERS
FIRST_BYTES = 4096
KEPT_PARTS = 64  # of a buffer: lengths of prompts differ
REPORT_BYTES = 4096  # of an error
STATUS_BYTES = 8
LOCK_S = 0.05  # between looks at who has the lock
TIMEOUT_S = 60.0
SLOW_US = 1000.0  # of waiting for a layer; less is the time of messages
WATCHED_CALLS = 512  # of a layer, after which a slow rank is named
WORK, RESIZE, ALIVE, RESULT, STOP = range(5)
DONE, FAILED = range(2)
MESSAGES, END, NOTHING = range(3)  # tags

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class GroupLostError(MoegraftError):
    """Another rank ended or does not answer; the message names it. The experts that it held are gone: all ranks must be started again."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The division of each layer's experts over ranks, in proportion to `sizes`.

    Attributes:
        sizes: one positive number for each rank.
        rank: this process.
    """

    sizes: tuple[float, ...]
    rank: int

    def experts(self, num_experts: int, rank: int | None = None) -> range:
        """Return the experts of a rank, by default of this one: consecutive, and at least one.

        Raises:
            UnsupportedModelError: there are fewer experts than ranks.
        """
        ranks = len(self.sizes)
        if num_experts < ranks:
            raise UnsupportedModelError(f"{num_experts} experts cannot be spread over {ranks} processes; start at most {num_experts}")
        total, ends, cumulative = sum(self.sizes), [0], 0.0
        for place, size in enumerate(self.sizes):
            cumulative += size
            end = round(cumulative / total * num_experts)
            ends.append(min(max(end, ends[-1] + 1), num_experts - (ranks - 1 - place)))
        rank = self.rank if rank is None else rank
        return range(ends[rank], ends[rank + 1])


@dataclass(frozen=True, slots=True)
class Peer:
    """Another rank: where it runs, and what it holds."""

    rank: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


class _Buffer:
    """Memory for messages, which only grows, with the tensors over its parts: creating those again costs as much as a short message."""

    def __init__(self) -> None:
        self._bytes = torch.empty(FIRST_BYTES, dtype=torch.uint8)
        self._parts: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._bytes)

    def grow(self, size: int) -> None:
        if size > len(self._bytes):
            self._parts.clear()
            with torch.inference_mode(False):  # what is written outside of the mode must not be a tensor from inside
                self._bytes = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8)

    def part(self, start: int, sizes: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return the tensor that begins at a byte."""
        key = start, sizes, dtype
        array = self._parts.get(key)
        if array is None:
            if len(self._parts) >= KEPT_PARTS:
                self._parts.clear()
            end = start + math.prod(sizes) * dtype.itemsize
            array = self._parts[key] = self._bytes[start:end].view(dtype).view(sizes)
        return array

    def question(self, rows: int, top_k: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rows (T, H), ids (T, K) int64 and weights (T, K) float32 of a message."""
        weights = HEADER_BYTES + 8 * rows * top_k
        return (
            self.part(weights + 4 * rows * top_k, (rows, hidden), dtype),
            self.part(HEADER_BYTES, (rows, top_k), torch.int64),
            self.part(weights, (rows, top_k), torch.float32),
        )

    def reply(self, rows: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a whole reply and its sums (T, H)."""
        size = STATUS_BYTES + rows * hidden * dtype.itemsize
        self.grow(size)
        return self.part(0, (size,)), self.part(STATUS_BYTES, (rows, hidden), dtype)


class _Wire:
    """One direction between two ranks: a buffer whose size both know."""

    def __init__(self, peer: Peer, group: dist.ProcessGroup) -> None:
        self.peer = peer
        self.buffer = _Buffer()
        self._group = group
        self._sending: Any = None

    def prepare(self, nbytes: int) -> None:
        """Make room for a message with so many bytes behind its header, once the last one has left the buffer."""
        self.flush()
        needed = HEADER_BYTES + nbytes
        if needed > len(self.buffer):
            self.send(RESIZE, (0, 0, 0, 0, needed), 0)
            self.flush()
            self.buffer.grow(needed)

    def send(self, kind: int, numbers: Sequence[int], nbytes: int) -> None:
        """Start to send a message, of which the buffer has the bytes behind the header."""
        self.buffer.part(0, (HEADER_NUMBERS,), torch.int64).numpy()[: 1 + len(numbers)] = kind, *numbers
        self._sending = self._group.send([self.buffer.part(0, (HEADER_BYTES + nbytes,))], self.peer.rank, MESSAGES)

    def flush(self) -> None:
        """Wait until the last message has left the buffer."""
        if self._sending is not None:
            self._sending.wait()
            self._sending = None

    def receive(self) -> list[int]:
        """Wait for a message and return its header; its bytes are in the buffer until the next call."""
        while True:
            self._group.recv([self.buffer.part(0, (len(self.buffer),))], self.peer.rank, MESSAGES).wait()
            header: list[int] = self.buffer.part(0, (HEADER_NUMBERS,), torch.int64).tolist()
            if header[0] != RESIZE:
                return header
            self.buffer.grow(header[5])


class ExpertGroup:
    """The ranks that hold a model's experts. Layers join in the same order on all of them, and rank 0 calls `start` once all are loaded.

    Args:
        shares: the division of the experts, and this process's rank.
        peers: all ranks, this one included.
        group: a gloo group of all ranks, for this object alone; its time-out is that of this object.
        timeout_s: after which a rank that does not answer is lost. Rank 0 sends a sign of life in a quarter of this time, and closes
            the group if its model has been deleted.

    Attributes:
        on_lost: called once on rank 0 when another rank is lost, from any thread.
        weight_samples: those of each operator that is divided, of all ranks, by the path of its module.
    """

    def __init__(self, shares: Shares, peers: Sequence[Peer], group: dist.ProcessGroup, timeout_s: float = TIMEOUT_S) -> None:
        self.shares = shares
        self._group = group
        self._timeout_s = timeout_s
        self._layers: list[tuple[list[range], WeakMethod[Compute]]] = []  # the experts of each rank
        self._lock = threading.Lock()  # of rank 0's messages
        self._others = [_Link(peer, group) for peer in peers if peer.rank] if shares.rank == 0 else []
        self._leader = _Wire(peers[0], group)
        self._answers = _Buffer()
        self._failure: str | None = None
        self._started = False
        self._closed = threading.Event()
        self._ended: NDArray[np.uint8] = np.zeros(1, np.uint8)  # rank 0 has sent the end
        self._receiving_end: Any = None
        self._life: threading.Thread | None = None
        self._showing_life = False  # that thread has the lock
        self._own_s = 0.0
        self._calls = 0
        self._warned = False
        self.on_lost: Callable[[], None] = lambda: None
        self.weight_samples: Mapping[str, Sequence[bytes]] = {}

    @property
    def rank(self) -> int:
        return self.shares.rank

    @property
    def in_use(self) -> bool:
        """Whether this process has a model over this group that is neither closed nor deleted."""
        if not self._started or self._closed.is_set() or self._ended[0]:
            return False
        return any(compute() is not None for _, compute in self._layers)

    def start(self) -> None:
        """Begin the signs of life, on rank 0. A rank that is still loading would not receive them in time."""
        self._started = True
        if self.rank:
            self._receiving_end = self._group.recv([torch.from_numpy(self._ended)], 0, END)
        else:
            self._life = threading.Thread(target=self._sign_of_life, name="moegraft-ranks", daemon=True)
            self._life.start()
            # It may free the connections last, which must not happen in a daemon thread while the interpreter ends: that would abort.
            atexit.register(self._life.join)
            atexit.register(self.close)

    def join(self, num_experts: int, compute: Compute) -> int:
        """Add a layer and return its number.

        Args:
            compute: a method that computes rows (T, H) with ids (T, K) int64 and weights (T, K) float32 on this rank's experts, numbered
                from 0, and writes their sums to its last argument (T, H); -1 is a padded slot. Its object is not kept alive.
        """
        owned = [self.shares.experts(num_experts, rank) for rank in range(len(self.shares.sizes))]
        self._layers.append((owned, WeakMethod(compute)))
        return len(self._layers) - 1

    def _compute(self, layer: int, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        """Compute rows on the experts of this rank; ids are those of the whole layer."""
        owned, method = self._layers[layer]
        compute = method()
        assert compute is not None, "ranks compute for operators that are alive"
        own = owned[self.rank]
        index = ids.numpy()
        local = np.where((index >= own.start) & (index < own.stop), index - own.start, -1)
        compute(rows, torch.from_numpy(local), weights, out)

    # On rank 0

    def forward(
        self,
        layer: int,
        rows: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Return the sums (T, H) over the experts of all ranks, in the dtype of `rows`; partial sums are added in float32.

        Args:
            rows: (T, H), on the CPU and contiguous, as `top_k_index` (T, K) int64 and `top_k_weights` (T, K) float32 are.
            meanwhile: called once this rank has computed its experts, before it waits for the others.

        Raises:
            GroupLostError: a rank is lost, now or before.
        """
        owned = self._layers[layer][0]
        with self._messages():
            asked = [
                link
                for link in self._others
                if self._guarded(link.peer, partial(link.ask, owned[link.peer.rank], layer, rows, top_k_index, top_k_weights))
            ]
            began = time.perf_counter()
            out = torch.empty_like(rows)
            self._compute(layer, rows, top_k_index, top_k_weights, out)
            self._own_s += time.perf_counter() - began
            self._calls += 1
            if meanwhile is not None:
                meanwhile()
            if asked:
                total = out.float()
                for link in asked:
                    self._guarded(link.peer, partial(link.add_to, total))
                out = total.to(rows.dtype)
            if not self._warned and self._calls >= WATCHED_CALLS:
                self._warned = True
                self._name_slow()
            return out

    @contextmanager
    def _messages(self) -> Iterator[None]:
        """Let this thread alone exchange messages. Ctrl-C waits for the end: between a message and its reply it would lose the ranks.

        Raises:
            GroupLostError: a rank is lost, or the model is closed.
        """
        with Uninterrupted(), self._lock:
            self.require_alive()
            try:
                yield
            except BaseException as error:
                if not isinstance(error, Exception):  # a second Ctrl-C, or another signal's
                    self._failure = "rank 0 was interrupted between a message and its reply: start all ranks again"
                raise

    @contextmanager
    def result(self) -> Iterator[Callable[[torch.Tensor | ModelOutput], None]]:
        """Send the other ranks what the body gives to the yielded function, for those that wait for a result, or the body's error.

        The tensors of an output are sent; caches are not, and are None there.
        """
        values: list[torch.Tensor | ModelOutput] = []
        stream = io.BytesIO()
        try:
            yield values.append
            outputs = values[0]
            torch.save([type(outputs).__name__, _on_host(outputs)], stream)
        except BaseException as error:
            if not isinstance(error, GroupLostError):
                self._send_result(FAILED, f"{type(error).__name__}: {error}".encode()[:REPORT_BYTES])
            raise
        self._send_result(DONE, stream.getvalue())

    def _send_result(self, status: int, content: bytes) -> None:
        with self._messages():
            for link in self._others:
                self._guarded(link.peer, partial(link.send, RESULT, (0, status, 0, 0, len(content)), content))

    def _sign_of_life(self) -> None:
        while not self._closed.wait(self._timeout_s / 4):
            if not self.in_use:
                self.close()
                return
            try:
                with self._messages():
                    self._showing_life = True
                    try:
                        for link in self._others:
                            self._guarded(link.peer, partial(link.send, ALIVE))
                    finally:
                        self._showing_life = False
            except GroupLostError:
                break

    def close(self) -> None:
        """Let the other ranks end, without waiting for them to follow. On them, nothing is sent; when called again, nothing happens."""
        atexit.unregister(self.close)
        if self._closed.is_set():
            return
        self._closed.set()
        if self.rank:
            return
        with Uninterrupted():
            sent = False
            while not self._lock.acquire(timeout=LOCK_S):
                if self._showing_life and not sent:  # to a rank that does not follow; no layer can begin any more
                    self._send_end()
                    self._break_off()
                    sent = True
            try:
                if not sent:
                    self._send_end()
                    for link in self._others if self._failure is None else ():
                        with suppress(RuntimeError, ValueError):
                            link.wake()
                self._free()
            finally:
                self._lock.release()
        if self._life is not None and self._life is not threading.current_thread():
            self._life.join()
            atexit.unregister(self._life.join)

    def _break_off(self) -> None:
        """End all waiting in this group: gloo closes the connections of a group when a wait in it runs out of time."""
        never = self._group.recv([torch.empty(1, dtype=torch.uint8)], self._others[0].peer.rank, NOTHING)
        with suppress(RuntimeError):
            never.wait(timedelta(milliseconds=1))

    def _send_end(self) -> None:
        for link in self._others if self._failure is None else ():
            with suppress(RuntimeError, ValueError):  # it has ended already, or this program has destroyed all groups
                self._group.send([torch.ones(1, dtype=torch.uint8)], link.peer.rank, END).wait()

    def _free(self) -> None:
        """Free the connections, which torch.distributed keeps until they are destroyed."""
        with suppress(ValueError):  # the program has done so
            dist.destroy_process_group(self._group)

    def statistics(self) -> list[Mapping[str, object]]:
        """Return a row for each rank: its share, the layers it was asked for, and the mean time that rank 0 computed or waited for it."""
        leading = {"rank": 0, "share": self._share_of(0), "calls": self._calls, "compute_us": _mean_us(self._own_s, self._calls)}
        others = [
            {"rank": link.peer.rank, "host": link.peer.host, "share": self._share_of(link.peer.rank), "calls": link.calls,
             "waited_us": _mean_us(link.waited_s, link.calls)}
            for link in self._others
        ]  # fmt: skip
        return [leading, *others]

    def _share_of(self, rank: int) -> float:
        return round(self.shares.sizes[rank] / sum(self.shares.sizes), 4)

    def _name_slow(self) -> None:
        own_us = _mean_us(self._own_s, self._calls)
        for link in self._others:
            waited_us = _mean_us(link.waited_s, link.calls)
            if waited_us > max(own_us, SLOW_US):
                logger.warning(
                    "%s is slow: each layer waits %.0f us for it after computing for %.0f us; a smaller share (parallel: shares) or a "
                    "faster network would help",
                    link.peer,
                    waited_us,
                    own_us,
                )

    def require_alive(self) -> None:
        """Raise GroupLostError where another rank is lost, or the model is closed."""
        if self._failure is not None:
            raise GroupLostError(self._failure)
        if self._closed.is_set():
            raise GroupLostError("the model is closed: the other ranks have ended; load it again")

    def _guarded(self, peer: Peer, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            self._lose(peer, error)

    def _lose(self, peer: Peer, error: Exception) -> NoReturn:
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:200]
        self._failure = f"{peer} has ended or does not answer ({reason}); its experts are lost: start all ranks again"
        if self.rank == 0 and not self._closed.is_set():
            logger.error("%s", self._failure)
            self.on_lost()
        raise GroupLostError(self._failure) from error

    # On the other ranks

    def follow(self) -> None:
        """Compute for rank 0 until it closes the model.

        Raises:
            GroupLostError: rank 0 is lost.
        """
        while self._served() is not None:
            pass

    def await_result(self) -> torch.Tensor | ModelOutput:
        """Compute for rank 0 until it has a result, and return that: token ids, or an output of the same class with its tensors.

        Raises:
            GroupLostError: rank 0 is lost, has closed the model, or failed; the message has its error.
        """
        served = self._served()
        if served is None:
            raise GroupLostError("rank 0 has closed the model and gives no result")
        if isinstance(served, str):
            raise GroupLostError(f"rank 0 failed: {served}")
        return served

    def _served(self) -> torch.Tensor | ModelOutput | str | None:
        """Compute until rank 0 sends a result or an error, and return it; None when it closes the model."""
        peer, buffer = self._leader.peer, self._leader.buffer
        while not self._closed.is_set() and not self._ended[0]:
            try:
                kind, layer, rows, top_k, code, count = self._leader.receive()
            except RuntimeError as error:
                if self._ended[0]:  # rank 0 ended before it could wake this one
                    break
                self._lose(peer, error)
            if kind == WORK:
                self._work(layer, *buffer.question(rows, top_k, count, ELEMENTS[code]))
            elif kind == RESULT:
                result = buffer.part(HEADER_BYTES, (count,)).numpy().tobytes()
                if rows == FAILED:
                    return result.decode(errors="replace")
                name, value = torch.load(io.BytesIO(result), weights_only=True)
                return getattr(outputs_of_generate, name, ModelOutput)(**value) if isinstance(value, dict) else value
            elif kind == STOP:
                break
        if not self._closed.is_set():
            self._closed.set()
            self._free()
        return None

    def _work(self, layer: int, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Compute rows and send their sums behind a status; after a failure, its text follows."""
        failure = None
        try:
            reply, sums = self._answers.reply(rows.shape[0], rows.shape[1], rows.dtype)
            self._compute(layer, rows, ids, weights, sums)
            reply.numpy()[0] = DONE
        except Exception as error:  # noqa: BLE001 # rank 0 must not wait in vain, whatever it is
            failure = f"{type(error).__name__}: {error}"
            reply = torch.full((STATUS_BYTES,), FAILED, dtype=torch.uint8)
        self._guarded(self._leader.peer, lambda: self._group.send([reply], 0, MESSAGES).wait())
        if failure is not None:
            logger.exception("layer %d failed", layer)
            report = torch.from_numpy(np.frombuffer(failure.encode()[:REPORT_BYTES].ljust(REPORT_BYTES), np.uint8).copy())
            self._guarded(self._leader.peer, lambda: self._group.send([report], 0, MESSAGES).wait())


def _on_host(value: Any) -> Any:
    """Return the tensors of a result in host memory, and nothing that is not data."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {name: _on_host(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return tuple(map(_on_host, value))
    return value if isinstance(value, str | int | float) else None


class _Link:
    """Rank 0's side of the exchange with one other rank."""

    def __init__(self, peer: Peer, group: dist.ProcessGroup) -> None:
        self.peer = peer
        self.waited_s = 0.0
        self.calls = 0
        self._group = group
        self._wire = _Wire(peer, group)
        self._answers = _Buffer()
        self._rows: torch.Tensor | None = None  # of the current call; None for all
        self._reply, self._sums = self._answers.reply(0, 0, torch.float32)
        self._receiving: Any = None  # until the reply is complete, also where an interrupt kept rank 0 from waiting for it

    def send(self, kind: int, numbers: Sequence[int] = (), content: bytes = b"") -> None:
        self._settle()
        self._wire.prepare(len(content))
        if content:
            self._wire.buffer.part(HEADER_BYTES, (len(content),)).numpy()[:] = np.frombuffer(content, np.uint8)
        self._wire.send(kind, numbers, len(content))
        self._wire.flush()

    def wake(self) -> None:
        """Let a rank that waits for a message see that the model is closed; one that does not wait sees it without this."""
        self._settle()
        self._wire.flush()
        self._wire.send(STOP, (), 0)

    def ask(self, owned: range, layer: int, rows: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> bool:
        """Send the rows that chose one of the experts that this rank holds; return False where there are none."""
        index = top_k_index.numpy()
        needed: NDArray[np.bool_] = np.any((index >= owned.start) & (index < owned.stop), axis=-1)
        count = int(np.count_nonzero(needed))
        if count == 0:
            return False
        self._settle()
        hidden, top_k, dtype = rows.shape[1], index.shape[1], rows.dtype
        size = count * (12 * top_k + hidden * dtype.itemsize)
        self._wire.prepare(size)
        to_rows, to_ids, to_weights = self._wire.buffer.question(count, top_k, hidden, dtype)
        self._reply, self._sums = self._answers.reply(count, hidden, dtype)
        if count == len(needed):
            self._rows = None
            to_rows.copy_(rows)
            to_ids.copy_(top_k_index)
            to_weights.copy_(top_k_weights)
        else:
            self._rows = torch.from_numpy(needed.nonzero()[0])
            for source, target in ((rows, to_rows), (top_k_index, to_ids), (top_k_weights, to_weights)):
                torch.index_select(source, 0, self._rows, out=target)
        self._wire.send(WORK, (layer, count, top_k, ELEMENT_CODES[dtype], hidden), size)
        # After the question, so that the other begins the sooner.
        self._receiving = self._group.recv([self._reply], self.peer.rank, MESSAGES)
        self.calls += 1
        return True

    def add_to(self, total: torch.Tensor) -> None:
        """Wait for the sums of `ask` and add them to `total` (T, H) float32.

        Raises:
            MoegraftError: the other rank failed; the message has its error.
        """
        began = time.perf_counter()
        failure = self._settle()
        self.waited_s += time.perf_counter() - began
        if failure is not None:
            raise MoegraftError(f"{self.peer} failed: {failure}")
        if self._rows is None:
            total += self._sums
        else:
            total.index_add_(0, self._rows, self._sums.float())

    def _settle(self) -> str | None:
        """Wait for the reply to the last question, if one is due; return the error that it has, if any."""
        if self._receiving is None:
            return None
        self._receiving.wait()
        failure = None
        if self._reply.numpy()[0] != DONE:
            report = torch.empty(REPORT_BYTES, dtype=torch.uint8)
            self._group.recv([report], self.peer.rank, MESSAGES).wait()
            failure = report.numpy().tobytes().decode(errors="replace").strip()
        self._receiving = None
        return failure


def threads_of_each(processes: int) -> int:
    """Return the CPU threads for each of several processes of this machine, which share its cores."""
    return max(1, default_threads() // processes)


def _mean_us(seconds: float, calls: int) -> float:
    return round(1e6 * seconds / max(calls, 1), 1)
