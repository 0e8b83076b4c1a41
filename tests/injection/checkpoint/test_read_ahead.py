"""The bytes of the next operator are asked for while one is packed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from moegraft.injection.checkpoint import loader
from moegraft.injection.checkpoint.files import Extent
from moegraft.injection.checkpoint.loader import ReadAhead

SIZE = 4096


class Asked:
    """`os.posix_fadvise` that records, and lets a test wait for a number of calls."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, int]] = []
        self._changed = threading.Condition()

    def __call__(self, descriptor: int, begin: int, nbytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        with self._changed:
            self.parts.append((begin, nbytes))
            self._changed.notify_all()

    def wait(self, calls: int) -> list[tuple[int, int]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.parts) >= calls, timeout=60)
            return list(self.parts)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("this system has no posix_fadvise")
    recorder = Asked()
    monkeypatch.setattr(os, "posix_fadvise", recorder)
    return recorder


@pytest.fixture
def extents(tmp_path: Path) -> list[list[Extent]]:
    """Of five operators, each of two tensors, the second one before the first in the file."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(10 * SIZE))
    return [[Extent(file, (2 * n + 1 - part) * SIZE, SIZE, "") for part in range(2)] for n in range(5)]


def test_the_next_operators_bytes_are_asked_for_in_the_order_of_the_file(asked: Asked, extents: list[list[Extent]]) -> None:
    with ReadAhead(extents) as ahead:
        ahead.step()
        assert asked.wait(4) == [(n * SIZE, SIZE) for n in range(4)]
        for _ in range(4):
            ahead.step()
        assert asked.wait(10) == [(n * SIZE, SIZE) for n in range(10)]


def test_no_more_than_the_limit_is_asked_for(asked: Asked, extents: list[list[Extent]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "AHEAD_BYTES", SIZE + 100)
    with ReadAhead(extents[:1]) as ahead:
        ahead.step()
        assert asked.wait(2) == [(0, SIZE), (SIZE, 100)]


def test_a_missing_file_is_left_to_the_reading_of_its_tensors(tmp_path: Path) -> None:
    with ReadAhead([[Extent(tmp_path / "gone", 0, SIZE, "")]] * 3) as ahead:
        ahead.step()


def test_loading_may_end_before_all_operators(asked: Asked, extents: list[list[Extent]]) -> None:
    with pytest.raises(KeyboardInterrupt), ReadAhead(extents) as ahead:
        ahead.step()
        asked.wait(4)
        raise KeyboardInterrupt
    assert len(asked.parts) == 4
