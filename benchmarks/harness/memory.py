"""Anonymous memory of this process. Mapped file pages do not count, since the operating system may drop them at any time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def rss_anon_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextmanager
def sampled_peak() -> Iterator[list[int]]:
    """Sample RssAnon every 2 ms; the first number of the list is the peak."""
    peak, stop = [0], threading.Event()

    def run() -> None:
        while not stop.wait(0.002):
            peak[0] = max(peak[0], rss_anon_bytes())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield peak
    stop.set()
    thread.join()
