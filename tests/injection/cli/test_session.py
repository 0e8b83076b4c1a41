"""A chat on the stock tiny model: history, kept cache, interruption, commands."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moegraft.injection.cli.chat.answer import Answerer
from moegraft.injection.cli.chat.conversation import Conversation, PromptRefusedError
from moegraft.injection.cli.chat.session import Chat, run_command
from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.options import SamplingOptions
from moegraft.injection.cli.output import Terminal

GREEDY = SamplingOptions(do_sample=False, max_new_tokens=12)
DRAWN = SamplingOptions(temperature=1.0, max_new_tokens=12)


def open_chat(loaded: LoadedModel, sampling: SamplingOptions = GREEDY, *, seed: int | None = None, out: io.StringIO | None = None) -> Chat:
    terminal = Terminal(out or io.StringIO(), Console(file=io.StringIO(), width=200, color_system=None))
    return Chat(loaded, Answerer(loaded, sampling, seed), Conversation(loaded.tokenizer, loaded.context_tokens), terminal)


def shown(chat: Chat) -> str:
    assert isinstance(chat.terminal.notices.file, io.StringIO)
    return chat.terminal.notices.file.getvalue()


class Interrupting(io.StringIO):
    """Presses Ctrl-C once a few characters of an answer were shown."""

    def write(self, text: str) -> int:
        before = len(self.getvalue())
        written = super().write(text)
        if before < 4 <= before + written:
            signal.raise_signal(signal.SIGINT)
        return written


def test_answers_alone_go_out_and_what_they_cost_beside_them(loaded: LoadedModel) -> None:
    out = io.StringIO()
    chat = open_chat(loaded, out=out)
    answer = chat.turn("hello")
    assert out.getvalue() == answer.text + "\n"
    assert len(answer.text) == 12 and answer.text.isalpha()
    assert answer.ending == "length"
    assert "[prompt: 8 tokens at " in shown(chat) and "answer: 12 tokens at " in shown(chat)
    assert "2 x experts: hybrid_experts on the CPU" not in shown(chat), "what runs where is no part of each answer"


def test_a_kept_cache_changes_no_answer(loaded: LoadedModel) -> None:
    kept, fresh = open_chat(loaded), open_chat(loaded)
    for question in ["hello", "and then?", "why"]:
        fresh.answerer.cache.drop()
        first, second = kept.turn(question), fresh.turn(question)
        assert first.text == second.text
    assert first.stats and second.stats
    assert second.stats.cached_tokens == 0
    new = 1 + 2 + len("why") + 2  # the answer's last token, <end> and <user>, the question, <end> and <assistant>
    assert first.stats.cached_tokens == first.stats.prompt_tokens - new


def test_a_changed_history_is_cut_where_it_changed(loaded: LoadedModel) -> None:
    chat, fresh = open_chat(loaded), open_chat(loaded)
    chat.turn("hello world")
    chat.conversation.reset()  # the cache still holds the first question
    again, other = chat.turn("hello there"), fresh.turn("hello there")
    assert again.text == other.text
    assert again.stats and again.stats.cached_tokens == 1 + len("hello ")


def test_the_same_seed_gives_the_same_conversation(loaded: LoadedModel) -> None:
    def talk(chat: Chat) -> list[str]:
        return [chat.turn(question).text for question in ("hello", "more")]

    first = open_chat(loaded, DRAWN, seed=5)
    answers = talk(first)
    assert talk(open_chat(loaded, DRAWN, seed=5)) == answers
    assert talk(open_chat(loaded, DRAWN, seed=6)) != answers
    first.reset()
    assert talk(first) == answers


def test_sampling_reaches_generate(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    generate = loaded.model.generate

    def spy(*args: Any, **arguments: Any) -> Any:
        seen.update(arguments)
        return generate(*args, **arguments)

    monkeypatch.setattr(loaded.model, "generate", spy)
    sampling = SamplingOptions(
        max_new_tokens=5, temperature=0.8, top_p=0.9, top_k=7, min_p=0.05, repetition_penalty=1.1, no_repeat_ngram_size=4
    )
    open_chat(loaded, sampling).turn("hello")
    asked = {name: seen[name] for name in ("do_sample", "max_new_tokens", "temperature", "top_p", "top_k", "min_p")}
    assert asked == {"do_sample": True, "max_new_tokens": 5, "temperature": 0.8, "top_p": 0.9, "top_k": 7, "min_p": 0.05}
    assert (seen["repetition_penalty"], seen["no_repeat_ngram_size"]) == (1.1, 4)


def test_ctrl_c_stops_the_answer_and_keeps_its_text(loaded: LoadedModel) -> None:
    handler = signal.getsignal(signal.SIGINT)
    out = Interrupting()
    chat = open_chat(loaded, SamplingOptions(do_sample=False, max_new_tokens=60), out=out)
    answer = chat.turn("hello")
    assert answer.ending == "interrupted"
    assert 4 <= len(answer.text) < 10
    assert chat.conversation.messages[-1].content == answer.text
    assert signal.getsignal(signal.SIGINT) is handler
    after = chat.turn("go on")
    uninterrupted = open_chat(loaded, SamplingOptions(do_sample=False, max_new_tokens=len(answer.text)))
    uninterrupted.turn("hello")
    uninterrupted.answerer.max_new_tokens = 60
    assert uninterrupted.turn("go on").text == after.text


def test_ctrl_c_while_the_prompt_is_read_leaves_no_trace(loaded: LoadedModel) -> None:
    chat = open_chat(loaded)
    chat.turn("hello")
    hook = loaded.model.model.layers[0].register_forward_hook(lambda *args: signal.raise_signal(signal.SIGINT))
    try:
        answer = chat.turn("never answered")
    finally:
        hook.remove()
    assert (answer.text, answer.stats, answer.ending) == ("", None, "interrupted")
    assert "stopped before the first token" in shown(chat)
    fresh = open_chat(loaded)
    fresh.turn("hello")
    assert chat.turn("again").text == fresh.turn("again").text


def test_a_second_ctrl_c_does_not_wait(loaded: LoadedModel) -> None:
    class Impatient(Interrupting):
        def write(self, text: str) -> int:
            before = len(self.getvalue())
            written = super().write(text)
            if before < 4 <= before + written:
                signal.raise_signal(signal.SIGINT)
            return written

    chat = open_chat(loaded, SamplingOptions(do_sample=False, max_new_tokens=60), out=Impatient())
    answer = chat.turn("hello")
    assert answer.ending == "interrupted" and answer.text
    assert chat.turn("go on").text, "the half-written cache was given up, not used"


def test_an_answer_without_text_is_an_answer(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = open_chat(loaded)
    first = loaded.tokenizer(chat.turn("hello").text)["input_ids"][0]
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", first)  # what the model says first now ends its answer
    chat = open_chat(loaded)
    monkeypatch.setattr(loaded.tokenizer, "decode", lambda *args, **options: "")  # as of an ending token
    answer = chat.turn("hello")
    assert (answer.ending, answer.text) == ("finished", "")
    assert "answer: 1 token; the answer is empty]" in shown(chat)
    assert [message.role for message in chat.conversation.messages] == ["user", "assistant"]


def test_a_full_context_ends_the_answer(loaded: LoadedModel) -> None:
    chat = open_chat(loaded, SamplingOptions(do_sample=False, max_new_tokens=60))
    question = "x" * ((loaded.context_tokens or 0) - 3 - 5)
    assert chat.turn(question).ending == "context"
    assert "the model's context of 4096 tokens is full" in shown(chat)
    with pytest.raises(PromptRefusedError):
        chat.turn("x" * 5000)
    assert len(chat.conversation.messages) == 2, "the question that did not fit was taken back"


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("/help", "/save FILE"),
        ("/stats", "no answer yet"),
        ("/sats", "unknown command /sats; did you mean /stats?"),
        ("/frobnicate", "/help lists the commands"),
        ("/save", "usage: /save FILE"),
        ("/reset now", "usage: /reset"),
        ("/save talk.md", "there is nothing to save yet"),
    ],
)
def test_commands_reply(loaded: LoadedModel, line: str, reply: str) -> None:
    chat = open_chat(loaded)
    run_command(chat, line)
    assert reply in shown(chat)
    assert not chat.leaving


@pytest.mark.parametrize("line", ["/exit", "/quit"])
def test_exit_leaves(loaded: LoadedModel, line: str) -> None:
    chat = open_chat(loaded)
    run_command(chat, line)
    assert chat.leaving


def test_stats_sum_up(loaded: LoadedModel) -> None:
    chat = open_chat(loaded, seed=11)
    chat.turn("hello")
    chat.turn("more")
    run_command(chat, "/stats")
    assert "answers so far: 2; " in shown(chat) and "; generated: 24 tokens at " in shown(chat)
    assert "model: tiny; rules: cpu; seed: 11" in shown(chat) and "2 x experts: hybrid_experts on the CPU" in shown(chat)
    assert "of 4096 tokens after the last answer" in shown(chat)


def test_save_writes_once(loaded: LoadedModel, tmp_path: Path) -> None:
    chat = open_chat(loaded)
    answer = chat.turn("hello").text
    for name in ("talk of today.json", "talk.md"):
        run_command(chat, f"/save {tmp_path / name}")
    record = json.loads((tmp_path / "talk of today.json").read_text())
    assert record == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": answer}]
    assert (tmp_path / "talk.md").read_text() == f"user: hello\n\nassistant: {answer}\n"
    run_command(chat, "/save /no/such/folder/file")
    assert "not saved: /no/such/folder/file: No such file or directory" in shown(chat)
    chat.turn("more")
    run_command(chat, f"/save {tmp_path / 'talk.md'}")
    assert "exists and was not changed" in shown(chat)
    assert (tmp_path / "talk.md").read_text() == f"user: hello\n\nassistant: {answer}\n"


def test_a_terminal_gets_no_control_characters() -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen, file = Screen(), io.StringIO()
    text = "a\x1b[2J\x07b\n\tc\x9b"
    for out in (screen, file):
        Terminal(out, Console(file=io.StringIO())).write(text)
    assert screen.getvalue() == "a[2Jb\n\tc"
    assert file.getvalue() == text, "a file gets the answer as it is"
