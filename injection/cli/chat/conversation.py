"""What was said, and how it becomes the tokens of the next prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jinja2
from transformers import PreTrainedTokenizerBase

from moegraft.operators.errors import MoegraftError

Role = Literal["system", "user", "assistant"]


class PromptRefusedError(MoegraftError):
    """What was asked cannot become a prompt of this model."""


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens to answer, and how many of the oldest question-answer pairs were left out to make them fit."""

    token_ids: list[int]
    left_out: int = 0


class Conversation:
    """The messages so far. A model with a chat template is asked through it, one without continues them as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context_tokens: int | None = None, system: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens
        self._head = [Message("system", system)] if system else []
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        return [*self._head, *self._turns]

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def ask(self, text: str) -> None:
        self._turns.append(Message("user", text))

    def answered(self, text: str) -> None:
        self._turns.append(Message("assistant", text))

    def withdraw(self) -> None:
        """Takes back a question that got no answer: two questions in a row break most chat templates."""
        assert self._turns and self._turns[-1].role == "user", "only a question can be withdrawn"
        self._turns.pop()

    def reset(self) -> None:
        self._turns.clear()

    def restore(self, messages: list[Message]) -> None:
        """Puts what was said, a system message included, in the place of what is here."""
        self._head = [message for message in messages[:1] if message.role == "system"]
        self._turns = messages[len(self._head) :]

    def prompt(self, answer_tokens: int) -> Prompt:
        """The tokens of the next prompt, with room for an answer of `answer_tokens` or half the context, whichever is less.

        Raises:
            PromptRefusedError: the last question alone leaves no room for an answer, has no tokens, or the chat template refuses.
        """
        assert self._turns, "there is a question to answer"
        limit, left_out = self._context_tokens, 0
        token_ids = self._encode(self.messages)
        if not token_ids:
            raise PromptRefusedError("this model's tokenizer makes no token of that prompt")
        if limit is None:
            return Prompt(token_ids)
        while len(token_ids) + min(answer_tokens, limit // 2) > limit and left_out + 2 < len(self._turns):
            left_out += 2  # a question and its answer
            token_ids = self._encode([*self._head, *self._turns[left_out:]])
        if len(token_ids) >= limit:
            raise PromptRefusedError(f"the prompt has {len(token_ids)} tokens and this model's context takes {limit}, its answer included")
        return Prompt(token_ids, left_out // 2)

    def as_text(self) -> str:
        """The messages run together, each question on a line of its own."""
        return _run_together(self.messages)

    def _encode(self, messages: list[Message]) -> list[int]:
        if not self.has_template:
            return list(self._tokenizer(_run_together(messages))["input_ids"])
        asked = [{"role": message.role, "content": message.content} for message in messages]
        try:
            encoded: Any = self._tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)
        except jinja2.TemplateError as error:
            raise PromptRefusedError(f"the model's chat template refuses this conversation: {error}") from error
        return list(encoded["input_ids"])


def _run_together(messages: list[Message]) -> str:
    text = ""
    for message in messages:
        if message.role != "assistant" and text and not text.endswith("\n"):
            text += "\n"
        text += message.content
    return text
