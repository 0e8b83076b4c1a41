"""`transformers serve` and `transformers chat` over a saved folder: programs that nobody edits, and no import of moegraft in them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.autoload import write_autoload
from transformers import AutoTokenizer

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path

if TYPE_CHECKING:
    from conftest import Person

TRANSFORMERS = "from transformers.cli.transformers import main; main()"
# The tests are offline, and Hugging Face's client then refuses servers on this machine as well.
CHAT = f"import huggingface_hub.constants as c; c.HF_HUB_OFFLINE = False; {TRANSFORMERS}"
QUESTION = "ROMEO:"
TOKENS = 24


@contextmanager
def served(model: Path, hook: Path, log: Path) -> Iterator[str]:
    """Run `transformers serve` over a folder and return its address."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(hook), os.environ.get("PYTHONPATH")]))}
    # `--port 0`: the system chooses a free one, and the log has it.
    command = [sys.executable, "-c", TRANSFORMERS, "serve", str(model), "--port", "0", "--device", "auto"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        while not (found := re.search(r"Uvicorn running on (http://\S+)", log.read_text())):
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            pytest.fail(log.read_text())
        yield found[1].replace("localhost", "127.0.0.1")
    finally:
        process.kill()
        process.wait()


def test_transformers_chat_shows_the_answer_of_an_injected_model(person: Callable[..., Person], tmp_path: Path) -> None:
    for package in ("fastapi", "openai", "rich", "uvicorn"):
        pytest.importorskip(package, reason="`transformers serve` and `transformers chat` need it")
    folder, hook = tmp_path / "mine", tmp_path / "hook"
    model: Any = optimize_and_load(demo_path(), "cpu", progress=False)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    tokenizer.save_pretrained(folder)
    write_autoload(hook, on=True)
    messages = [{"role": "user", "content": QUESTION}]
    given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**given, max_new_tokens=TOKENS, do_sample=False)[0, given["input_ids"].shape[1] :]
    expected = tokenizer.decode(answer, skip_special_tokens=True).split()
    assert len(expected) > 4

    with served(folder, hook, tmp_path / "log") as address:
        chat = ["chat", str(folder), address, f"max_new_tokens={TOKENS}", "do_sample=False", "--user", "person"]
        one = person(*chat, environment={"TERM": "dumb"}, code=CHAT)
        one.sees("<person>:")
        one.say(QUESTION)
        *shown, _, _, _ = one.sees(f"{TOKENS} tokens in").split()
        assert shown[-len(expected) :] == expected  # after the model's name, a path that may be divided into lines
        one.sees("Continue generating?")
        one.say("n")
        one.sees("<person>:")
        one.say("!exit")
        assert one.exit_code() == 0
    log = (tmp_path / "log").read_text()
    assert "POST /v1/chat/completions HTTP/1.1" in log and "Error" not in log
