"""The conversation: templates, plain text, and what happens when the context is full."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from moegraft.injection.cli.chat.conversation import Conversation, PromptRefusedError
from moegraft.injection.cli.models import LoadedModel


def test_history_goes_through_the_chat_template(loaded: LoadedModel) -> None:
    conversation = Conversation(loaded.tokenizer, system="be brief")
    conversation.ask("one")
    conversation.answered("two")
    conversation.ask("three")
    text = loaded.tokenizer.decode(conversation.prompt(10).token_ids)
    assert text == "<system>be brief<end><user>one<end><assistant>two<end><user>three<end><assistant>"
    conversation.reset()
    assert [message.role for message in conversation.messages] == ["system"]


def test_without_a_template_the_text_goes_on(text_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(text_folder)
    conversation = Conversation(tokenizer)
    assert not conversation.has_template
    conversation.ask("Once upon")
    conversation.answered(" a time")
    conversation.ask("there was")
    assert tokenizer.decode(conversation.prompt(10).token_ids) == "Once upon a time\nthere was"


def test_the_oldest_turns_make_room(loaded: LoadedModel) -> None:
    conversation = Conversation(loaded.tokenizer, context_tokens=64, system="short")
    for question, answer in [("first" * 4, "1"), ("second" * 4, "2")]:
        conversation.ask(question)
        conversation.answered(answer)
    conversation.ask("third")
    prompt = conversation.prompt(22)
    assert prompt.left_out == 2
    assert loaded.tokenizer.decode(prompt.token_ids) == "<system>short<end><user>third<end><assistant>"
    assert len(conversation.messages) == 6, "what does not fit the prompt stays in the record"


def test_a_question_may_take_the_room_of_its_answer_but_not_all(loaded: LoadedModel) -> None:
    conversation = Conversation(loaded.tokenizer, context_tokens=64)
    conversation.ask("x" * 60)  # 63 tokens with <user>, <end> and <assistant>
    assert len(conversation.prompt(50).token_ids) == 63
    conversation.withdraw()
    conversation.ask("x" * 61)
    with pytest.raises(PromptRefusedError, match="the prompt has 64 tokens, and this model's context 64"):
        conversation.prompt(50)


def test_a_refusal_of_the_template_has_its_reason(text_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(text_folder)
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    conversation = Conversation(tokenizer, system="be brief")
    conversation.ask("one")
    with pytest.raises(PromptRefusedError, match="no system role"):
        conversation.prompt(10)
