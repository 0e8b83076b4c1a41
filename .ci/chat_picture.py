"""Record a chat with the bundled model as a picture: a real run of `local_chat` in a terminal, written to benchmarks/results/chat.svg."""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH, LINES = 100, 40
PROMPT = re.compile(rb"> (\x1b\[[0-9;?]*[a-zA-Z])*$")
ERASED = re.compile(r"[^\n]*\r?\n(\x1b\[\?25h)?\r?\x1b\[1A\x1b\[2K")  # a line of progress
OVERWRITTEN = re.compile(r"[^\n\r]*\r(?!\n)")
CONTROL = re.compile(r"\x1b\[\?[0-9]+[hl]|\x1b\[[0-9]*[GK]|\r")


def record(command: list[str], lines: list[str], limit_s: float) -> str:
    """Return what a terminal shows of `command` while `lines` are typed, each when the program waits for input."""
    parent, child = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(WIDTH), "LINES": str(LINES), "PYTHON_BASIC_REPL": "1"}
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment, close_fds=True)
    os.close(child)
    shown, waiting, deadline = b"", list(lines), time.monotonic() + limit_s
    while time.monotonic() < deadline:
        ready, _, _ = select.select([parent], [], [], 0.5)
        if ready:
            try:
                data = os.read(parent, 65536)
            except OSError:  # the program has ended
                break
            shown += data
        elif PROMPT.search(shown) and waiting:
            os.write(parent, waiting.pop(0).encode() + b"\n")
    process.terminate()
    process.wait()
    os.close(parent)
    return shown.decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "benchmarks" / "results" / "chat.svg")
    options = parser.parse_args()
    program = str(Path(sys.executable).with_name("local_chat"))
    shown = record([program, "--seed", "7", "--max-new-tokens", "60"], ["Speak to me of the king.", "/exit"], 120)
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text.from_ansi("$ local_chat\n" + CONTROL.sub("", OVERWRITTEN.sub("", ERASED.sub("", shown))).rstrip()))
    options.out.write_text(console.export_svg(title="local_chat"), encoding="utf-8")


if __name__ == "__main__":
    main()
