"""An answer in one piece: whatever else is written while it is shown comes after it, however and by whom it is written."""

from __future__ import annotations

import io
import logging
import os
import re
import select
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from support.programs import Program
from transformers import AutoTokenizer, TextStreamer

from moegraft.injection import optimize_and_load

PROMPT = ">>> "
TOKENS = 40
# Runs local_chat, where the tokenizer writes notices of every kind into the middle of each answer, from this thread and from others.
NOISY = textwrap.dedent(
    """
    import logging, os, subprocess, sys, threading, warnings
    import torch
    from rich.console import Console
    from rich.progress import track
    from tqdm import tqdm
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging as transformers_logging
    from moegraft.injection.cli.local_chat import main
    from moegraft.operators.context import InjectionContext

    def log():
        logging.getLogger("moegraft.operators.some").warning("<log of moegraft>")
        logging.getLogger("some.library").warning("<log of a library>")
        transformers_logging.get_logger("transformers.some").error("<log of transformers>")
        InjectionContext(torch.float32).warn_once(logging.getLogger("moegraft.operators.other"), "<warned once>")

    def write():
        print("<printed to stderr>", file=sys.stderr)
        print("<printed to stdout>")
        os.write(1, b"<native, to stdout>\\n")
        os.write(2, b"<native, to stderr>\\n")
        subprocess.run(["sh", "-c", "echo '<of a program>'; echo '<error of a program>' >&2"], check=True)

    def show():
        warnings.warn("<warning of Python>")
        list(track([1, 2], "<bar of rich>", console=Console(stderr=True)))
        list(tqdm([1, 2], "<bar of tqdm>"))
        with Console(stderr=True).status("<status of rich>"):
            pass

    decode, calls = PreTrainedTokenizerFast.decode, [0]

    def noisy(self, *args, **kwargs):
        calls[0] += 1
        if calls[0] % 40 == 20:
            for noise in (log, write, show):
                noise()
                other = threading.Thread(target=noise)
                other.start()
                other.join()
        return decode(self, *args, **kwargs)

    PreTrainedTokenizerFast.decode = noisy
    main()
    """
)
NOTICES = (
    "<log of moegraft>",
    "<log of a library>",
    "<log of transformers>",
    "<warned once>",
    "<printed to stderr>",
    "<printed to stdout>",
    "<native, to stdout>",
    "<native, to stderr>",
    "<of a program>",
    "<error of a program>",
    "<warning of Python>",
    "<bar of rich>",
    "<bar of tqdm>",
)
ANSWER = ["--no-do-sample", "--max-new-tokens", str(TOKENS)]


def whole(shown: str) -> bool:
    """Whether all notices and all of the answer's letters are in a text, with nothing between the letters."""
    missing = [notice for notice in NOTICES if notice not in shown]
    assert not missing, f"{missing} in {shown!r}"
    found = re.search(rf"(?<![a-z])[a-z]{{{TOKENS}}}(?![a-z])", shown)
    assert found, f"no answer in one piece in {shown!r}"
    return all(found.end() < shown.index(notice) for notice in NOTICES)


def noisy(folder: Path, *arguments: str, before: str = "") -> Program:
    """The noisy chat with one question, which executes `before` first."""
    code = f"import os, sys\n{before}\n{NOISY}"
    return Program(["-c", code, "--model", str(folder), "--prompt", "hello", *ANSWER, *arguments], os.environ)


@pytest.mark.parametrize("more", [[], ["--verbose"], ["--trace"]], ids=["plain", "verbose", "trace"])
def test_at_a_terminal(person: Callable[..., Any], chat_folder: Path, tmp_path: Path, more: list[str]) -> None:
    arguments = [*more, str(tmp_path / "trace.json")] if more == ["--trace"] else more
    someone = person("--model", str(chat_folder), *ANSWER, *arguments, code=NOISY)
    someone.sees(PROMPT)
    for question in ("hello", "and"):
        someone.say(question)
        assert whole(someone.sees(PROMPT).partition(question)[2])
    someone.say("/exit")
    assert someone.exit_code() == 0


@pytest.mark.parametrize("more", [[], ["--quiet"], ["--trace"]], ids=["plain", "quiet", "trace"])
def test_in_two_pipes_that_are_one_screen(chat_folder: Path, tmp_path: Path, more: list[str]) -> None:
    arguments = [*more, str(tmp_path / "trace.json")] if more == ["--trace"] else more
    chat = noisy(chat_folder, *arguments)
    screen = _in_order({chat.stdout.fileno(): "answer", chat.stderr.fileno(): "notices"})
    answer = b"".join(piece for name, piece in screen if name == "answer").decode()
    notices = b"".join(piece for name, piece in screen if name == "notices").decode()
    assert re.fullmatch(rf"[a-z]{{{TOKENS}}}\n", answer), "stdout has the answer alone"
    expected = [notice for notice in NOTICES if not (more == ["--quiet"] and notice in ("<log of moegraft>", "<warned once>"))]
    assert not [notice for notice in expected if notice not in notices], notices
    names = [name for name, _ in screen]
    between = names[names.index("answer") : len(names) - names[::-1].index("answer")]
    assert set(between) == {"answer"}, "nothing was written between two pieces of the answer"


def test_in_one_pipe(chat_folder: Path) -> None:
    shown, _ = noisy(chat_folder, before="os.dup2(1, 2)").communicate()
    assert whole(shown)


def test_where_notices_cannot_be_written(chat_folder: Path) -> None:
    shown, _ = noisy(chat_folder, "--quiet", before="os.dup2(os.open('/dev/full', os.O_WRONLY), 2)").communicate()
    assert re.match(rf"[a-z]{{{TOKENS}}}\n", shown)


def test_where_stderr_is_closed(chat_folder: Path) -> None:
    """As Python and its libraries start there."""
    arguments = [sys.executable, "-c", NOISY, "--model", str(chat_folder), "--prompt", "hello", "--quiet", *ANSWER]
    shown = subprocess.run(["sh", "-c", 'exec "$0" "$@" 2>&-', *arguments], stdout=subprocess.PIPE, check=False).stdout.decode()
    assert re.match(rf"[a-z]{{{TOKENS}}}\n", shown)


def test_what_generate_logs_waits_for_a_streamer_that_prints(chat_folder: Path) -> None:
    model, tokenizer = optimize_and_load(chat_folder, "cpu", progress=False), AutoTokenizer.from_pretrained(chat_folder)
    ids = tokenizer("hello", return_tensors="pt").input_ids
    screen = io.StringIO()
    log, handler = logging.getLogger("moegraft"), logging.StreamHandler(screen)
    level, handlers = log.level, list(log.handlers)
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)

    try:
        with redirect_stdout(screen):
            model.generate(ids, streamer=TextStreamer(tokenizer, skip_prompt=True), max_new_tokens=TOKENS, do_sample=False)
            log.debug("after it")
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
    assert re.fullmatch(rf"[a-z]{{{TOKENS}}}\n(decode steps .*\n(a replayed.*\n)*)after it\n", screen.getvalue())
    assert log.handlers == handlers


def _in_order(pipes: dict[int, str]) -> list[tuple[str, bytes]]:
    """Return what is written to pipes, with their names, in the order of writing as far as reads can tell."""
    found: list[tuple[str, bytes]] = []
    while pipes:
        for descriptor in select.select(list(pipes), [], [])[0]:
            piece = os.read(descriptor, 65536)
            if piece:
                found.append((pipes[descriptor], piece))
            else:
                del pipes[descriptor]
    return found
