"""Progress of what takes longer than two seconds, as one line on stderr."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

QUICK_S = 2.0  # what ends sooner shows nothing
LIVE_S = 0.25  # between changes of the line on a terminal
PLAIN_S = (10.0, 60.0)  # least and most time between two lines elsewhere
SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


class ProgressLine:
    """Shows one stage of work at a time: on a terminal as a line that is replaced and at last erased, elsewhere as plain lines.

    Args:
        console: where to show it; by default on stderr.
        enabled: whether to show anything.
    """

    def __init__(self, console: Console | None = None, *, enabled: bool = True) -> None:
        self._console = console
        self._enabled = enabled

    @contextmanager
    def stage(self, text: str, total: int = 0, unit: str = "B") -> Iterator[Callable[[int], None]]:
        """Show `text` while the body runs, and of `total` units how many are done; yield `advance(units)`."""
        done = 0

        def advance(units: int) -> None:
            nonlocal done
            done += units

        if not self._enabled:
            yield advance
            return
        started, ended = time.monotonic(), threading.Event()

        def line() -> str:
            return f"{text}{_share(done, total, unit, time.monotonic() - started)}"

        # A thread, because a stage may be one long call.
        shown = threading.Thread(target=self._show, args=(line, ended), name="moegraft-progress", daemon=True)
        shown.start()
        try:
            yield advance
        finally:
            ended.set()
            shown.join()

    def _show(self, line: Callable[[], str], ended: threading.Event) -> None:
        if ended.wait(QUICK_S):
            return
        from rich.console import Console
        from rich.markup import escape

        console = self._console or Console(stderr=True)
        with contextlib.suppress(OSError):  # nobody reads stderr any more
            if console.is_terminal and not console.is_dumb_terminal:
                with console.status(escape(line()), spinner_style="dim", refresh_per_second=1 / LIVE_S) as status:
                    while not ended.wait(LIVE_S):
                        status.update(escape(line()))
                return
            least, most = PLAIN_S
            waited = QUICK_S
            while True:
                console.print(line(), style="dim", markup=False, highlight=False, soft_wrap=True)
                pause = min(max(least, waited), most)
                if ended.wait(pause):
                    return
                waited += pause


def progress_line(progress: bool | ProgressLine) -> ProgressLine:
    """Return the line that an argument `progress` means: a line itself, or whether to show one on stderr."""
    return progress if isinstance(progress, ProgressLine) else ProgressLine(enabled=progress)


def _share(done: int, total: int, unit: str, elapsed_s: float) -> str:
    """Return how much of `total` is done after some time, and how long the rest will take at that rate."""
    if not total:
        return ""
    if unit == "B":
        power = min((max(total, 1).bit_length() - 1) // 10, len(SIZES) - 1)
        counted = f"{done / 1024**power:.1f} of {total / 1024**power:.1f} {SIZES[power]}"
    else:
        counted = f"{done:,} of {total:,} {unit}"
    if not 0 < done < total:
        return f": {counted}"
    left_s = elapsed_s * (total - done) / done
    return f": {counted}, {f'{left_s / 60:.0f} min' if left_s > 100 else f'{left_s:.0f} s'} left"
