"""`local_chat` at a terminal of its own, as a person uses it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers.modeling_layers
from safetensors.torch import load_file, save_file
from support.mtp import write_checkpoint
from transformers import AutoTokenizer

PROMPT = ">>> "
STOP = "\x03"  # Ctrl-C
END = "\x04"  # Ctrl-D
# A tiny model writes some 10,000 tokens a second, and what Ctrl-C is to stop must not end before it comes.
ENDLESS = 200_000


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


def test_ctrl_c_stops_the_answer_and_not_the_chat(person: Callable[..., Any], chat_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "endless"
    shutil.copytree(chat_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2 * ENDLESS}))
    arguments = ("--model", str(folder), "--no-do-sample", "--max-new-tokens", str(ENDLESS))
    someone = person(*arguments, environment={"NO_COLOR": "1"})
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
    someone.sees("go on\r\n")
    time.sleep(0.3)
    someone.type(STOP)
    assert "stopped by" not in someone.sees(PROMPT), "by Ctrl-C"
    someone.say("/stats")
    someone.sees("answers so far")
    someone.sees(PROMPT)
    someone.say("/exit")
    assert someone.exit_code() == 0


@pytest.fixture(scope="module")
def mtp_folder(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with an MTP layer, which answers in lowercase letters as well."""
    if not hasattr(getattr(transformers.modeling_layers, "MtpModel", None), "forward_layer"):
        pytest.skip("this transformers cannot compute MTP layers one by one")
    folder, tokenizer = tmp_path_factory.mktemp("mtp_chat"), AutoTokenizer.from_pretrained(chat_folder)
    tokenizer.save_pretrained(folder)
    write_checkpoint(folder, "glm4_moe", share=0.02, vocab_size=len(tokenizer), max_position_embeddings=2 * ENDLESS, eos_token_id=0)
    tensors = load_file(folder / "model.safetensors")
    letters = tokenizer.convert_tokens_to_ids([chr(letter) for letter in range(ord("a"), ord("z") + 1)])
    others = [token for token in range(len(tokenizer)) if token not in letters]
    tensors["lm_head.weight"][others] = 0.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_mtp_layers_draft_in_a_chat(person: Callable[..., Any], mtp_folder: Path, chat_folder: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "version: 1\nextends: cpu-exact\nrules:\n"
        "- match: {kind: model}\n  replace: {class: speculative_draft, kwargs: {draft: mtp, schedule: fixed, max_draft: 2}}\n"
    )
    options = ("--rules", str(rules), "--no-do-sample", "--prefill-chunk", "16")
    someone = person("--model", str(mtp_folder), *options, "--max-new-tokens", "60")
    assert "MTP layers" in someone.sees(PROMPT)
    someone.say("hello, this prompt has several chunks of sixteen tokens")
    first = someone.sees(PROMPT)
    assert "answer: 60 tokens" in first
    someone.say("and")
    second = someone.sees(PROMPT)
    assert " new) at " in second and "answer: 60 tokens" in second
    someone.say("/stats")
    found = someone.sees(PROMPT)
    assert "tokens per round, accepted by position 0." in found
    saved = tmp_path / "chat.safetensors"
    someone.say(f"/save {saved}")
    assert "saved 4 messages" in someone.sees(PROMPT)
    someone.say("/reset")
    someone.sees(PROMPT)
    someone.say("hello, this prompt has several chunks of sixteen tokens")
    answer = first.split("\x1b[2m[prompt: ")[0].split()[-1][-40:]  # without what a slow machine shows before it
    assert answer in someone.sees(PROMPT), "from the start, the same answer"
    someone.say("/exit")
    assert someone.exit_code() == 0

    someone = person("--model", str(mtp_folder), *options, "--max-new-tokens", str(ENDLESS), "--resume", str(saved))
    someone.sees(PROMPT)
    someone.say("go on")
    someone.sees("go on\r\n")
    someone.sees_more()
    time.sleep(0.3)
    someone.type(STOP)
    assert "; stopped]" in someone.sees(PROMPT)
    someone.say("and now")
    someone.sees("and now\r\n")
    time.sleep(0.3)
    someone.type(STOP)
    assert "stopped by" not in someone.sees(PROMPT), "by Ctrl-C"
    someone.say("/stats")
    assert "accepted by position" in someone.sees(PROMPT)
    someone.say("/exit")
    assert someone.exit_code() == 0

    someone = person("--model", str(chat_folder), *options)
    assert someone.exit_code() == 2
    assert "Traceback" not in someone.screen and "MTP layers" in someone.screen and "draft with 'experts' or 'ngram'" in someone.screen
