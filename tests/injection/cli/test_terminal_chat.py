"""`local_chat` at a terminal of its own, as a person uses it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT = ">>> "
STOP = "\x03"  # Ctrl-C
END = "\x04"  # Ctrl-D


def test_a_conversation(person: Callable[..., Any], chat_folder: Path, tmp_path: Path) -> None:
    someone = person("--model", str(chat_folder), "--no-do-sample", "--max-new-tokens", "20")
    start = someone.sees(PROMPT)
    assert "/help lists the commands" in start and "2 x experts: hybrid_experts" in start

    someone.say("hello")
    first = someone.sees(PROMPT)
    assert "answer: 20 tokens" in first and first.count("\n") == 3, "the question, the answer, and one line on it"

    someone.say("and")
    assert " new) at " in someone.sees(PROMPT), "the second turn computes only what is new"

    someone.say("/staats")
    assert "did you mean /stats?" in someone.sees(PROMPT)
    someone.say("/stats")
    assert "answers so far: 2;" in someone.sees(PROMPT)

    record = tmp_path / "talk.md"
    for reply in ("saved 4 messages", "was not changed"):
        someone.say(f"/save {record}")
        assert reply in someone.sees(PROMPT)
    assert record.read_text().startswith("user: hello\n\nassistant: ")

    someone.say("/reset")
    assert "a new conversation" in someone.sees(PROMPT)
    someone.say("hello")
    again = someone.sees(PROMPT)
    assert record.read_text().split("\n\n")[1].removeprefix("assistant: ") in again, "from the start, the same answer"

    someone.say("one\\")
    someone.sees("... ")
    someone.say("two")
    assert "answer: 20 tokens" in someone.sees(PROMPT)

    someone.type("caf\udcff!\n")
    assert "not UTF-8 text" in someone.sees(PROMPT)
    someone.say("")
    someone.sees(PROMPT)
    someone.say("x" * 6000)  # longer than a terminal's own line buffer
    assert "6003 tokens" in someone.sees("including the answer")
    someone.sees(PROMPT)

    someone.type("half a line")
    someone.sees("half a line")
    time.sleep(0.3)  # Python loses a signal that comes between two waits for a key
    someone.type(STOP)
    assert "/exit or Ctrl-D leaves" in someone.sees(PROMPT)
    someone.type(END)
    assert someone.exit_code() == 0


def test_ctrl_c_stops_the_answer_and_not_the_chat(person: Callable[..., Any], chat_folder: Path) -> None:
    someone = person("--model", str(chat_folder), "--no-do-sample", "--max-new-tokens", "3000", environment={"NO_COLOR": "1"})
    someone.sees(PROMPT)
    someone.say("hello")
    someone.sees("hello\r\n")
    someone.sees_more()
    time.sleep(0.3)
    someone.type(STOP)
    stopped = someone.sees(PROMPT)
    assert "; stopped]" in stopped and "answer: " in stopped
    assert "\x1b[2m" not in stopped and "\x1b[3" not in stopped, "NO_COLOR"

    someone.say("go on")
    time.sleep(0.3)
    someone.type(STOP)
    someone.sees("stopped")
    someone.sees(PROMPT)
    someone.say("/stats")
    someone.sees("answers so far")
    someone.sees(PROMPT)
    someone.say("/exit")
    assert someone.exit_code() == 0
