"""A tiny Qwen3-MoE checkpoint that answers in lowercase letters, and a person at a terminal."""

from __future__ import annotations

import os
import pty
import select
import string
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.programs import Program
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moegraft.injection import optimize_and_load
from moegraft.injection.cli.models import LoadedModel

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant>"
PROGRAM = [sys.executable, "-c", "from moegraft.injection.cli.local_chat import main; main()"]
PATIENCE_S = 120  # a busy machine is no failure; a hang is


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<end>", "<user>", "<assistant>", "<system>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<user>", "<assistant>", "<system>"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", additional_special_tokens=special)


def _tiny_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
        eos_token_id=0,
        dtype=torch.float32,
    )
    model = Qwen3MoeForCausalLM(config)
    spoken = tokenizer.convert_tokens_to_ids(list(string.ascii_lowercase))
    scale = torch.zeros(len(tokenizer), 1)
    scale[spoken] = 50.0  # every other token has logit 0 and is never the likeliest
    model.lm_head.weight.data *= scale
    return model


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a chat template."""
    folder = tmp_path_factory.mktemp("tiny_moe_chat")
    tokenizer = _byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    _tiny_model(tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_folder(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint without a chat template."""
    folder = tmp_path_factory.mktemp("tiny_moe_text")
    for file in chat_folder.iterdir():
        if file.suffix != ".jinja":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="session")
def stock(chat_folder: Path) -> LoadedModel:
    """The stock model, ready to chat: what is tested with it needs no kernel."""
    model = Qwen3MoeForCausalLM.from_pretrained(chat_folder).eval()
    return LoadedModel("tiny", model, AutoTokenizer.from_pretrained(chat_folder), lambda: ["2 x stock experts on the CPU"])


@pytest.fixture(scope="session")
def loaded(chat_folder: Path, stock: LoadedModel) -> LoadedModel:
    """The model as a server has it: its steps are native programs, a tenth of the time of the stock model's."""
    model = optimize_and_load(chat_folder, "cpu-exact", dtype=torch.float32, progress=False, threads=1)
    return LoadedModel("tiny", model, stock.tokenizer, lambda: ["2 x experts: hybrid_experts on the CPU"])


@pytest.fixture
def program() -> list[str]:
    """The command that runs local_chat with this Python."""
    return PROGRAM


class Person:
    """Types into local_chat at a terminal of its own and reads what it shows."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None, code: str = PROGRAM[2]) -> None:
        self.screen = ""
        self._read_to = 0
        self._terminal, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 100))
        self._program = Program(["-c", code, *arguments], {**os.environ, "TERM": "xterm", **(environment or {})}, terminal=theirs)
        os.close(theirs)

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode(errors="surrogateescape"))

    def say(self, line: str) -> None:
        self.type(line + "\n")

    def sees(self, text: str) -> str:
        """Waits for `text` after what was seen before; gives what was shown up to its end."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.screen.find(text, self._read_to)) < 0:
            more = self._read(deadline)
            assert more, f"waited for {text!r}; the screen shows\n{self.screen[self._read_to :]!r}"
        shown = self.screen[self._read_to : found + len(text)]
        self._read_to = found + len(text)
        return shown

    def sees_more(self) -> None:
        """Waits for any text after what was seen before."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.screen) == self._read_to:
            assert self._read(deadline), "waited for any text"

    def exit_code(self) -> int:
        """Waits for the program to end."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read(deadline):
            pass
        return self._program.wait()

    def leave(self) -> None:
        """Ends a program that is still there."""
        self._program.kill()
        self._program.wait()
        os.close(self._terminal)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            piece = os.read(self._terminal, 65536)
        except OSError:  # Linux reports the end of a terminal so
            return False
        self.screen += piece.decode(errors="replace")
        return bool(piece)


@pytest.fixture
def person() -> Iterator[Callable[..., Person]]:
    """Starts a Person with the given arguments of local_chat."""
    people: list[Person] = []

    def start(*arguments: str, **options: Any) -> Person:
        people.append(Person(*arguments, **options))
        return people[-1]

    yield start
    for one in people:
        one.leave()
