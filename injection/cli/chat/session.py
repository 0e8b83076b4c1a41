"""A chat: turns of one conversation with one model, and the loop that reads them."""

from __future__ import annotations

from pathlib import Path

from moegraft.injection.cli.chat.answer import Answer, Answerer
from moegraft.injection.cli.chat.answer_stats import AnswerStats, ChatStats
from moegraft.injection.cli.chat.commands import run_command
from moegraft.injection.cli.chat.conversation import Conversation
from moegraft.injection.cli.chat.reader import prepare_editing, read_typed
from moegraft.injection.cli.chat.saved_chat import SavedChat, read_chat, write_chat
from moegraft.injection.cli.loading import LoadedModel
from moegraft.injection.cli.terminal import Terminal
from moegraft.operators.errors import MoegraftError, error_sentence


class Chat:
    """One model, one conversation, one terminal."""

    def __init__(
        self, loaded: LoadedModel, answerer: Answerer, conversation: Conversation, terminal: Terminal, *, show_stats: bool = True
    ) -> None:
        self.loaded = loaded
        self.answerer = answerer
        self.conversation = conversation
        self.terminal = terminal
        self.totals = ChatStats()
        self.last: AnswerStats | None = None
        self.leaving = False
        self._show_stats = show_stats

    def turn(self, question: str) -> Answer:
        """Asks, streams the answer to stdout and what it cost to stderr; a question without an answer leaves no trace.

        Raises:
            MoegraftError: the question cannot be answered.
        """
        self.conversation.ask(question)
        try:
            answer = self._answer()
        except BaseException:
            self.conversation.withdraw()
            raise
        if answer.stats is None:
            self.conversation.withdraw()
        else:
            self.conversation.answered(answer.text)
            self._account(answer.stats)
        self._explain(answer)
        return answer

    def reset(self) -> None:
        """Starts the conversation anew, random numbers included."""
        self.conversation.reset()
        self.answerer.reset()

    def save(self, path: Path) -> None:
        """Writes what was said and what the model knows of it.

        Raises:
            OSError: the file is there already, or cannot be written.
        """
        token_ids, cache = self.answerer.held
        write_chat(path, self.loaded.model, SavedChat(self.conversation.messages, token_ids, cache))

    def resume(self, path: Path) -> None:
        """Takes up a saved chat in the place of this one.

        Raises:
            SavedChatError: it is damaged or belongs to another model.
            OSError: it cannot be read.
        """
        saved = read_chat(path, self.loaded.model)
        self.conversation.restore(saved.messages)
        self.answerer.resume(saved.token_ids, saved.cache)
        known = f"{len(saved.token_ids)} tokens known" if saved.cache is not None else "to be read anew"
        self.terminal.notice(f"(resumed: {len(saved.messages)} messages, {known})")

    def run(self) -> None:
        """Reads and answers until the user leaves or the input ends."""
        prepare_editing()
        self.terminal.notice("type a message; /help lists the commands")
        while not self.leaving:
            try:
                self._next()
            except EOFError:
                self.terminal.notice("")
                return
            except KeyboardInterrupt:
                self.terminal.notice("\n/exit or Ctrl-D leaves")
            except UnicodeError:
                self.terminal.complain("that line is not UTF-8 text; it was not sent")
            except MoegraftError as error:
                self.terminal.complain(error_sentence(error))

    def _next(self) -> None:
        typed = read_typed()
        if typed.command:
            run_command(self, typed.text)
        elif typed.text.strip():
            self.turn(typed.text)

    def _answer(self) -> Answer:
        prompt = self.conversation.prompt(self.answerer.max_new_tokens)
        if prompt.left_out:
            self.terminal.notice(f"(the context is full: the oldest {prompt.left_out} questions and answers were left out)")
        with self.terminal.waiting("reading the prompt") as stop_waiting:

            def show(text: str) -> None:
                stop_waiting()
                self.terminal.write(text)

            answer = self.answerer.answer(prompt.token_ids, show)
        if not answer.text.endswith("\n"):
            self.terminal.write("\n")
        return answer

    def _account(self, stats: AnswerStats) -> None:
        self.totals.add(stats)
        self.last = stats

    def _explain(self, answer: Answer) -> None:
        limit = self.loaded.context_tokens
        reasons = {
            "length": f"(stopped at {self.answerer.max_new_tokens} tokens; --max-new-tokens allows more)",
            "context": f"(stopped: the model's context of {limit} tokens is full)",
            "interrupted": "(stopped)" if answer.stats else "(stopped before the first token: the question was not kept)",
        }
        if answer.ending in reasons:
            self.terminal.notice(reasons[answer.ending])
        elif not answer.text:
            self.terminal.notice("(the model ended its answer at once)")
        if answer.stats and self._show_stats:
            self.terminal.notice(f"[{answer.stats.line()}]")
            for line in self.loaded.placement():
                self.terminal.notice(f"[{line}]")
