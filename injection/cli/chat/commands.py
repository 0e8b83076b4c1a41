"""The lines that start with a slash: what they are called, what they say of themselves, what they do."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moegraft.injection.cli.chat.work_done import work_lines
from moegraft.operators.errors import error_sentence

if TYPE_CHECKING:
    from moegraft.injection.cli.chat.session import Chat


@dataclass(frozen=True, slots=True)
class Command:
    """`run` gets the chat and what follows the name; `argument` names that for the help, empty when there is none."""

    summary: str
    run: Callable[[Chat, str], None]
    argument: str = ""


def run_command(chat: Chat, line: str) -> None:
    """Does what a line such as `/save talk.md` says, or says what is wrong with it."""
    name, _, argument = line.strip().partition(" ")
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "/help lists them"
        chat.terminal.complain(f"no command {name}; {hint} (to send a line that starts with a slash, double it)")
    elif bool(argument.strip()) != bool(command.argument):
        chat.terminal.complain(f"usage: {name} {command.argument}".rstrip())
    else:
        command.run(chat, argument.strip())


def _help(chat: Chat, argument: str) -> None:
    width = max(len(f"{name} {command.argument}") for name, command in COMMANDS.items())
    lines = [f"{f'{name} {command.argument}':{width}}  {command.summary}" for name, command in COMMANDS.items()]
    lines += [
        "Ctrl-C stops an answer; twice: at once. Ctrl-D leaves.",
        'Several lines: end each but the last with \\, or put them between """ and """.',
    ]
    chat.terminal.reply("\n".join(lines))


def _reset(chat: Chat, argument: str) -> None:
    chat.reset()
    chat.terminal.notice("(a new conversation)")


def _stats(chat: Chat, argument: str) -> None:
    lines = [f"last answer: {chat.last.line()}"] if chat.last else []
    lines += [chat.totals.line(), f"model: {chat.loaded.name}; seed: {chat.answerer.seed}"]
    if chat.last and chat.loaded.context_tokens:
        used = chat.last.prompt_tokens + chat.last.generated_tokens
        lines.append(f"context: {used} of {chat.loaded.context_tokens} tokens after the last answer")
    chat.terminal.reply("\n".join([*lines, *chat.loaded.placement(), *work_lines(chat.loaded.model)]))


def _save(chat: Chat, argument: str) -> None:
    path = Path(argument).expanduser()
    messages = chat.conversation.messages
    if not messages:
        chat.terminal.complain("there is nothing to save yet")
        return
    try:
        if path.suffix == ".safetensors":
            chat.save(path)
        else:
            with path.open("x", encoding="utf-8") as file:
                file.write(_as_text(chat, as_json=path.suffix == ".json") + "\n")
    except FileExistsError:
        chat.terminal.complain(f"{path} exists and was left as it is; give another name")
    except OSError as error:
        chat.terminal.complain(f"not saved: {error_sentence(error)}")
    else:
        chat.terminal.reply(f"saved {len(messages)} messages to {path}")


def _as_text(chat: Chat, *, as_json: bool) -> str:
    messages = chat.conversation.messages
    if as_json:
        return json.dumps([asdict(message) for message in messages], ensure_ascii=False, indent=1)
    if chat.conversation.has_template:
        return "\n\n".join(f"{message.role}: {message.content}" for message in messages)
    return chat.conversation.as_text()


def _exit(chat: Chat, argument: str) -> None:
    chat.leaving = True


COMMANDS = {
    "/help": Command("list the commands", _help),
    "/reset": Command("start a new conversation", _reset),
    "/stats": Command("speed, seed, what runs where, and what drafts and devices did", _stats),
    "/save": Command("write the conversation: .json as JSON, .safetensors with its cache for --resume, else text", _save, "FILE"),
    "/exit": Command("leave; also /quit", _exit),
}
ALIASES = {"/quit": "/exit"}
