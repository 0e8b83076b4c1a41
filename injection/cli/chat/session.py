"""The chat loop: read a line, run it if it is a command that starts with a slash, else answer it."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moegraft.injection.cli.chat.answer import Answer, Answerer, AnswerStats, sums_line, work_lines
from moegraft.injection.cli.chat.conversation import Conversation, SavedChat, read_chat, write_chat
from moegraft.injection.cli.images import MOST_PIXELS, ImageError, Picture, read_picture
from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.output import Terminal
from moegraft.operators.atomic_file import write_file
from moegraft.operators.errors import MoegraftError, error_sentence


@dataclass(frozen=True, slots=True)
class Command:
    """A command; `run` is called with the chat and the text after the name, which the help calls `argument` (empty: none)."""

    summary: str
    run: Callable[[Chat, str], None]
    argument: str = ""


def run_command(chat: Chat, line: str) -> None:
    """Run a command line such as `/save talk.md`, or report a mistake in it."""
    name, _, argument = line.strip().partition(" ")
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "/help lists the commands"
        chat.terminal.complain(f"unknown command {name}; {hint} (to send a line that starts with a slash, double it)")
    elif bool(argument.strip()) != bool(command.argument):
        chat.terminal.complain(f"usage: {name} {command.argument}".rstrip())
    else:
        command.run(chat, argument.strip())


def _help(chat: Chat, argument: str) -> None:
    width = max(len(f"{name} {command.argument}") for name, command in COMMANDS.items())
    lines = [f"{f'{name} {command.argument}':{width}}  {command.summary}" for name, command in COMMANDS.items()]
    lines += [
        "Ctrl-C stops an answer after the current token, a second Ctrl-C at once. Ctrl-D leaves.",
        'For several lines, end each but the last with \\, or put them between """ and """.',
    ]
    chat.terminal.reply("\n".join(lines))


def _reset(chat: Chat, argument: str) -> None:
    chat.reset()
    chat.terminal.notice("(a new conversation)")


def _stats(chat: Chat, argument: str) -> None:
    lines = [f"last answer: {chat.last.line()}; first token after {chat.last.first_token_s:.2f} s"] if chat.last else []
    lines += [sums_line(chat.answers), f"model: {chat.loaded.name}; rules: {chat.loaded.rules}; seed: {chat.answerer.seed}"]
    if chat.last and chat.loaded.context_tokens:
        used = chat.last.prompt_tokens + chat.last.generated_tokens
        lines.append(f"context: {used} of {chat.loaded.context_tokens} tokens after the last answer")
    chat.terminal.reply("\n".join([*lines, *chat.answerer.cache.lines(), *chat.loaded.placement(), *work_lines(chat.loaded.model)]))


def _save(chat: Chat, argument: str) -> None:
    path = Path(os.path.expanduser(argument))  # noqa: PTH111 (Path's own method raises for an unknown user)
    messages = chat.conversation.messages
    if not messages:
        chat.terminal.complain("there is nothing to save yet")
        return
    if any(message.pictures for message in messages) and path.suffix == ".safetensors":
        chat.terminal.complain("a chat with images cannot be continued from a file; save it as .json, or as text")
        return
    try:
        if path.suffix == ".safetensors":
            chat.save(path)
        else:
            write_file(path, _as_text(chat, as_json=path.suffix == ".json") + "\n", replace=False)
    except FileExistsError:
        chat.terminal.complain(f"{path} exists and was not changed; give another name")
    except OSError as error:
        chat.terminal.complain(f"not saved: {error_sentence(error)}")
    else:
        chat.terminal.reply(f"saved {len(messages)} messages to {path}")


def _as_text(chat: Chat, *, as_json: bool) -> str:
    messages = chat.conversation.messages
    if as_json:
        named = [{"images": [each.name for each in message.pictures]} if message.pictures else {} for message in messages]
        return json.dumps([message.plain() | more for message, more in zip(messages, named, strict=True)], ensure_ascii=False, indent=1)
    if chat.conversation.has_template:
        marks = ("".join(f"[{each.name}] " for each in message.pictures) for message in messages)
        return "\n\n".join(f"{message.role}: {mark}{message.content}" for message, mark in zip(messages, marks, strict=True))
    return chat.conversation.as_text()


def _image(chat: Chat, argument: str) -> None:
    try:
        chat.show([Path(os.path.expanduser(argument))])  # noqa: PTH111 (as above)
    except ImageError as error:
        chat.terminal.complain(str(error))


def _exit(chat: Chat, argument: str) -> None:
    chat.leaving = True


COMMANDS = {
    "/help": Command("list the commands", _help),
    "/reset": Command("start a new conversation", _reset),
    "/stats": Command("show speed, seed, placement, and statistics of drafts and devices", _stats),
    "/image": Command("show the model an image with the next message: PNG, JPEG, WebP or GIF", _image, "FILE"),
    "/save": Command("write the conversation: .json as JSON, .safetensors with its cache for --resume, else text", _save, "FILE"),
    "/exit": Command("leave; also /quit", _exit),
}
ALIASES = {"/quit": "/exit"}


FENCE = '"""'
FIRST, NEXT = ">>> ", "... "


@dataclass(frozen=True, slots=True)
class Typed:
    """A message, or a command: a line that starts with one slash."""

    text: str
    command: bool = False


def read_typed() -> Typed:
    """Read the next message or command.

    Raises:
        EOFError: the input ended.
        KeyboardInterrupt: Ctrl-C.
        UnicodeError: the line is not UTF-8 text.
    """
    line = _line(FIRST)
    if line.lstrip().startswith(FENCE):
        return Typed(_block(line.lstrip().removeprefix(FENCE)))
    if line.startswith("/") and not line.startswith("//") and "\n" not in line:
        return Typed(line, command=True)
    text = _joined(line)
    return Typed(text.removeprefix("/") if text.startswith("//") else text)


def _block(line: str) -> str:
    lines = []
    while not line.rstrip().endswith(FENCE):
        lines.append(line)
        line = _line(NEXT)
    lines.append(line.rstrip().removesuffix(FENCE))
    return "\n".join(lines).strip("\n")


def _joined(line: str) -> str:
    lines = []
    while line.endswith("\\"):
        lines.append(line.removesuffix("\\"))
        line = _line(NEXT)
    return "\n".join([*lines, line])


def _line(mark: str) -> str:
    if sys.stdout.isatty():
        line = input(mark)
    else:
        print(mark, end="", file=sys.stderr, flush=True)  # stdout is a file or pipe, for answers only
        line = input()
    line.encode()  # some locales decode invalid bytes to lone surrogates, which tokenizers refuse
    return line


class Chat:
    """One model, one conversation, one terminal."""

    def __init__(
        self,
        loaded: LoadedModel,
        answerer: Answerer,
        conversation: Conversation,
        terminal: Terminal,
        *,
        show_stats: bool = True,
        verbose: bool = False,
    ) -> None:
        self.loaded = loaded
        self.answerer = answerer
        self.conversation = conversation
        self.terminal = terminal
        self.answers: list[AnswerStats] = []
        self.leaving = False
        self._pictures: list[Picture] = []  # of the next question
        self._show_stats = show_stats
        self._verbose = verbose

    @property
    def last(self) -> AnswerStats | None:
        return self.answers[-1] if self.answers else None

    def turn(self, question: str) -> Answer:
        """Answer a question: the text goes to stdout, a line about it to stderr. A question without an answer is not kept.

        Its images are then shown with the next question, unless they are the reason.

        Raises:
            MoegraftError: the question cannot be answered.
        """
        self.conversation.ask(question, self._pictures)
        try:
            answer = self._answer()
        except BaseException as error:
            self.conversation.withdraw()
            if isinstance(error, ImageError):
                self._pictures = []
            raise
        if answer.stats is None:
            self.conversation.withdraw()
        else:
            self._pictures = []
            self.conversation.answered(answer.text)
            self.answers.append(answer.stats)
        self._report(answer)
        return answer

    def show(self, paths: Sequence[Path]) -> None:
        """Add images to the next question.

        Raises:
            ImageError: the model reads none, or a file is no image.
        """
        if isinstance(self.loaded.images, str):
            raise ImageError(f"{paths[0]}: {self.loaded.images}")
        for path in paths:
            self._pictures.append(read_picture(path, most_pixels=MOST_PIXELS - sum(each.pixels for each in self._pictures)))
        self.terminal.notice(f"(with {', '.join(each.name for each in self._pictures)})")

    def reset(self) -> None:
        """Start a new conversation, and reset the random numbers."""
        self._pictures = []
        self.conversation.reset()
        self.answerer.reset()

    def save(self, path: Path) -> None:
        """Write the messages and the cache to a file.

        Raises:
            OSError: the file exists, or cannot be written.
        """
        token_ids, cache = self.answerer.cache.contents
        write_chat(path, self.loaded.model, SavedChat(self.conversation.messages, token_ids, cache, self.answerer.cache.checkpoints))

    def resume(self, path: Path) -> None:
        """Replace this conversation by a saved one.

        Raises:
            SavedChatError: the file is damaged or belongs to another model.
            OSError: the file cannot be read.
        """
        saved = read_chat(path, self.loaded.model)
        self.conversation.restore(saved.messages)
        self.answerer.resume(saved.token_ids, saved.cache, saved.checkpoints)
        cached = f"{len(saved.token_ids)} tokens cached" if saved.cache is not None else "no cache"
        self.terminal.notice(f"(resumed: {len(saved.messages)} messages, {cached})")

    def run(self) -> None:
        """Read and answer until the user leaves or the input ends."""
        with contextlib.suppress(ImportError):  # line editing, a history and lines of any length in `input`
            import readline  # noqa: F401
        self.terminal.notice(f"{self.loaded.name}, rules {self.loaded.rules}:")
        self._print_placement()
        self.terminal.notice("type a message; /help lists the commands")
        while not self.leaving:
            try:
                typed = read_typed()
                if typed.command:
                    run_command(self, typed.text)
                elif typed.text.strip():
                    self.turn(typed.text)
            except EOFError:
                self.terminal.notice("")
                return
            except KeyboardInterrupt:
                self.terminal.notice("\n/exit or Ctrl-D leaves")
            except UnicodeError:
                self.terminal.complain("that line is not UTF-8 text; it was not sent")
            except MoegraftError as error:
                self.terminal.complain(error_sentence(error))

    def _answer(self) -> Answer:
        prompt = self.conversation.prompt(self.answerer.max_new_tokens)
        if prompt.left_out:
            self.terminal.notice(f"(the context is full: the oldest {prompt.left_out} questions and answers were left out)")
        with self.terminal.answering("computing the prompt") as show:
            return self.answerer.answer(prompt.token_ids, show, prompt.images)

    def _report(self, answer: Answer) -> None:
        """Print one line on an answer, and with `verbose` what operators do where."""
        limit = self.loaded.context_tokens
        reasons = {
            "length": f"stopped by --max-new-tokens {self.answerer.max_new_tokens}",
            "context": f"stopped, as the model's context of {limit} tokens is full",
            "interrupted": "stopped" if answer.stats else "stopped before the first token: the question was not kept",
        }
        parts = [answer.stats.line()] if answer.stats and self._show_stats else []
        if answer.ending in reasons:
            parts.append(reasons[answer.ending])
        elif not answer.text:
            parts.append("the answer is empty")
        if parts:
            self.terminal.notice(f"[{'; '.join(parts)}]")
        if self._verbose:
            self._print_placement(work_lines(self.loaded.model))

    def _print_placement(self, more: Sequence[str] = ()) -> None:
        for line in (*self.loaded.placement(), *more):
            self.terminal.notice(f"  {line}")
