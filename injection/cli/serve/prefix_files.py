"""Prefixes of a server's sequences on disk, which it finds again after a restart.

The keys and values of a text are stored in parts of `PART_TOKENS` tokens, one file each, under a digest of the part's tokens and of the
part before it; the first part's has the model, its rules and the scope of the requests. Texts that begin alike so share the files of their
beginning, and a file is found only for the model and the tokens that it was computed with. Prefix caches in memory have the same chain of
blocks (vLLM's automatic prefix caching; a radix tree in SGLang: Zheng et al. 2023, arXiv:2312.07104). What is left at a text's end is a
shorter part, which none follows. A file has its tokens as well, so that another text can use the part of it up to where they differ; not
with recurrent states, for which it ends at a checkpoint of theirs and has them.

One thread writes, so that no answer waits for the disk. Reading is part of a request's prompt, which would otherwise be computed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import re
import shutil
import threading
import time
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save

from moegraft.operators.decode.pages import PAGE_TOKENS

logger = logging.getLogger(__name__)
PART_TOKENS = 4 * PAGE_TOKENS  # a text of fewer tokens is not stored
MOST_COMPARED = 8  # parts after the same text, whose tokens are read to find what another text shares with them
MOST_WAITING = 1 << 30  # bytes that wait to be written; what exceeds them is written when the text is kept again
FORMAT = "moegraft-prefix-1"  # the checksum of what follows, the tokens as int64, and tensors as safetensors
CHECKSUM_BYTES = 8
SUFFIX = ".prefix"
NAME = re.compile(rf"([0-9a-f]{{32}})-([0-9a-f]{{32}})-(\d+)-(\d+)(t?){re.escape(SUFFIX)}")
STALE_S = 3600  # age from which the unfinished file of another process is removed
FLUSH_S = 10  # for what waits when the server ends
Digest = str
IntArray = NDArray[np.int64]
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens `start` to `end` of a text.

    Attributes:
        digest, before: of the text up to `end`, and up to `start`.
        is_tail: whether no part follows this one, which may be shorter, and has the states after `end` tokens if the model has states.
    """

    digest: Digest
    before: Digest
    start: int
    end: int
    is_tail: bool = False

    @property
    def name(self) -> str:
        return f"{self.digest}-{self.before}-{self.start}-{self.end}{'t' * self.is_tail}{SUFFIX}"


class PrefixFiles:
    """The files of one folder, which other models and servers may share.

    Attributes:
        size: bytes of all its files.
        limit: which they do not exceed; the least recently used are removed first.
        read_tokens: tokens that requests began with from here.

    Args:
        key: of the model and of everything that its keys and values depend on.
        limit: by default a quarter of what is free on the disk, and of what the files take.

    Raises:
        OSError: the folder cannot be made, read or written.
    """

    def __init__(self, folder: Path, key: str, limit: int | None) -> None:
        self._folder = folder
        self._key = key
        self.size = self.read_tokens = 0
        self._lock = threading.Lock()
        self._sizes: OrderedDict[Part, int] = OrderedDict()  # of each file, the least recently used first
        self._known: dict[Digest, Part] = {}
        self._after: dict[Digest, dict[Digest, Part]] = {}  # the parts after a text, the latest one last
        self._waiting: set[Digest] = set()
        self._waiting_bytes = 0
        self._failed = False
        self._queue: queue.SimpleQueue[tuple[Part, bytes, Tensors] | None] = queue.SimpleQueue()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._list_files()
        self.limit = (shutil.disk_usage(folder).free + self.size) // 4 if limit is None else limit
        self._evict()
        with self._unfinished(f"test{SUFFIX}") as (path, _):
            path.unlink()
        self._writer = threading.Thread(target=self._write_all, name="prefix files", daemon=True)
        self._writer.start()

    def find(self, token_ids: IntArray, scope: str, usable: Callable[[int], int], *, states: bool) -> tuple[Sequence[Part], int]:
        """Return the parts, one after the other, of the longest usable beginning of a text, and its tokens; (), 0 if nothing is stored.

        Args:
            usable: returns with how many of its first `n` tokens a sequence can begin.
            states: whether the model has states: the beginning is then up to a tail.
        """
        digest, whole, best, tokens = self._root(scope), list[Part](), list[Part](), 0
        with self._lock:
            while True:
                start, end = len(whole) * PART_TOKENS, (len(whole) + 1) * PART_TOKENS
                for tail in self._tails(digest, token_ids) if states else ():
                    if usable(tail.end) == tail.end > tokens:
                        best, tokens = [*whole, tail], tail.end
                part = self._known.get(_digest(digest, token_ids[start:end]))
                if end > len(token_ids) or part is None:
                    break
                whole.append(part)
                digest = part.digest
            after = [] if states else list(self._after.get(digest, {}).values())[-MOST_COMPARED:]
        if not states:
            shared = {part: shared_tokens(self._tokens(part), token_ids[start:]) for part in after}
            most = max(shared.values(), default=0)
            tokens = usable(start + most)
            best = [*whole, *(part for part in after if shared[part] == most)][: -(-tokens // PART_TOKENS)]
        with self._lock:
            for part in reversed(best):  # so that a part is used no later than the one after it
                if part in self._sizes:
                    self._sizes.move_to_end(part)
        for part in reversed(best):
            with contextlib.suppress(OSError):  # another server has removed it
                os.utime(self._folder / part.name)
        return best, tokens

    def _tails(self, digest: Digest, token_ids: IntArray) -> Iterator[Part]:
        """Yield the tails after a text that are part of another one."""
        for tail in self._after.get(digest, {}).values():
            fits = tail.is_tail and tail.end <= len(token_ids)
            if fits and _digest(digest, token_ids[tail.start : tail.end], tail=True) == tail.digest:
                yield tail

    def _tokens(self, part: Part) -> IntArray:
        """Return the tokens of a part, (T,), as its file states them; none if it cannot be read."""
        try:
            with (self._folder / part.name).open("rb") as file:
                file.seek(CHECKSUM_BYTES)
                stated = file.read(8 * (part.end - part.start))
        except OSError:
            return np.empty(0, np.int64)
        return np.frombuffer(stated[: len(stated) // 8 * 8], "<i8")

    def read(self, part: Part, forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, torch.Tensor] | None:
        """Return the tensors of a part, of the given dtypes and shapes; None if its file is gone, or is damaged, which removes it."""
        path = self._folder / part.name
        try:
            with path.open("rb") as file:
                checksum, tokens, content = file.read(CHECKSUM_BYTES), file.read(8 * (part.end - part.start)), file.read()
            if checksum != _checksum(tokens, content):
                raise ValueError("its checksum is another")
            tensors = load(content)
            if {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} != forms:
                raise ValueError("its tensors have other forms")
            return tensors
        except FileNotFoundError:
            self._forget(part)
        except (OSError, SafetensorError, ValueError) as error:
            logger.warning("serve: %s: the file is damaged and is removed; its tokens are computed again (%s)", path, error)
            self._remove(part)
        return None

    def missing(self, token_ids: IntArray, scope: str, tails: Iterable[int]) -> list[Part]:
        """Return the parts of a text that are not stored yet: those that are whole, and tails that end after so many tokens."""
        digest, found, ends = self._root(scope), list[Part](), sorted(tails)
        with self._lock:
            if self._failed:
                return []
            for start in range(0, len(token_ids) + 1, PART_TOKENS):
                for end in ends:
                    if start <= end < start + PART_TOKENS and end <= len(token_ids):
                        found.append(Part(_digest(digest, token_ids[start:end], tail=True), digest, start, end, is_tail=True))
                end = start + PART_TOKENS
                if end > len(token_ids):
                    break
                before, digest = digest, _digest(digest, token_ids[start:end])
                found.append(Part(digest, before, start, end))
            return [part for part in found if part.digest not in self._known and part.digest not in self._waiting]

    def write(self, part: Part, token_ids: IntArray, tensors: Tensors) -> bool:
        """Let a part of a text be written, with tensors that nothing changes any more; return False if too much waits already."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        with self._lock:
            if self._waiting_bytes + size > MOST_WAITING or size > self.limit:
                return False
            self._waiting.add(part.digest)
            self._waiting_bytes += size
        self._queue.put((part, token_ids[part.start : part.end].astype("<i8").tobytes(), tensors))
        return True

    def flush(self) -> None:
        """Wait until everything is written, or the time is over."""
        deadline = time.monotonic() + FLUSH_S
        while self._waiting and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        self.flush()
        self._queue.put(None)
        self._writer.join(FLUSH_S)

    def _root(self, scope: str) -> Digest:
        return hashlib.sha256(json.dumps([FORMAT, PART_TOKENS, self._key, scope]).encode()).hexdigest()[:32]

    @contextlib.contextmanager
    def _unfinished(self, name: str) -> Iterator[tuple[Path, BinaryIO]]:
        """Yield a file that nothing looks for, and its path; it is removed if the body fails."""
        path = self._folder / f".{uuid.uuid4().hex}-{name}"  # servers in containers may have the same process id
        try:
            with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
                yield path, file
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _list_files(self) -> None:
        found, others = [], 0
        for entry in os.scandir(self._folder):
            match = NAME.fullmatch(entry.name)
            with contextlib.suppress(FileNotFoundError):  # another server has removed it
                about = entry.stat()
                if match:
                    part = Part(match[1], match[2], int(match[3]), int(match[4]), bool(match[5]))
                    found.append((part, about.st_size, about.st_mtime_ns))
                elif not entry.name.startswith(".") or not entry.name.endswith(SUFFIX):
                    others += 1
                elif time.time() - about.st_mtime > STALE_S:
                    Path(entry.path).unlink()
        if others:
            logger.warning("serve: %s: %d files are not of a prefix cache; they are left alone", self._folder, others)
        used: dict[Digest, int] = {}  # no earlier than any part that follows
        for part, _, time_ns in sorted(found, key=lambda each: each[0].end, reverse=True):
            used[part.digest] = max(time_ns, used.get(part.digest, 0))
            used[part.before] = max(used[part.digest], used.get(part.before, 0))
        for part, size, _ in sorted(found, key=lambda each: (used[each[0].digest], -each[0].end)):
            self._add(part, size)

    def _add(self, part: Part, size: int) -> None:
        self.size += size - self._sizes.get(part, 0)
        self._sizes[part] = size
        self._after.setdefault(part.before, {})[part.digest] = self._known[part.digest] = part
        before: Part | None = part
        while before is not None:  # none is removed before one that follows it
            self._sizes.move_to_end(before)
            before = self._known.get(before.before)

    def _forget(self, part: Part) -> None:
        with self._lock:
            self.size -= self._sizes.pop(part, 0)
            self._known.pop(part.digest, None)
            after = self._after.get(part.before, {})
            after.pop(part.digest, None)
            if not after:
                self._after.pop(part.before, None)

    def _remove(self, part: Part) -> None:
        self._forget(part)
        with contextlib.suppress(OSError):
            (self._folder / part.name).unlink()

    def _evict(self) -> None:
        while self.size > self.limit:
            with self._lock:
                oldest = next(iter(self._sizes))
            self._remove(oldest)

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            part, tokens, tensors = item
            try:
                if not self._failed:
                    self._write(part, tokens, tensors)
            except (OSError, SafetensorError, MemoryError) as error:
                self._failed = True  # the answers do not depend on it
                logger.warning("serve: %s: prefixes are not written any more: %s", self._folder, error)
            finally:
                with self._lock:
                    self._waiting.discard(part.digest)
                    self._waiting_bytes -= sum(tensor.nbytes for tensor in tensors.values())

    def _write(self, part: Part, tokens: bytes, tensors: Tensors) -> None:
        content = save(dict(tensors))
        with self._unfinished(part.name) as (path, file):
            file.writelines((_checksum(tokens, content), tokens, content))
            file.flush()
            path.replace(self._folder / part.name)
        with self._lock:
            self._add(part, CHECKSUM_BYTES + len(tokens) + len(content))
        self._evict()


def _digest(before: Digest, token_ids: IntArray, *, tail: bool = False) -> Digest:
    """Return the digest of a text, given that of its beginning and the tokens after it, (T,)."""
    return hashlib.sha256(f"{before}{'t' * tail}".encode() + token_ids.astype("<i8").tobytes()).hexdigest()[:32]


def shared_tokens(one: IntArray, other: IntArray) -> int:
    """Return with how many tokens both begin."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


def _checksum(*content: bytes) -> bytes:
    checksum = 0
    for part in content:
        checksum = zlib.crc32(part, checksum)
    return f"{checksum:08x}".encode()
