"""The messages of a chat, the tokens of its next prompt, the cache they share, and chats saved to a file."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, QuantizedCache

from moegraft.injection.fingerprint import fingerprint
from moegraft.injection.prefill import why_not_appendable
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


logger = logging.getLogger(__name__)
KEPT_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


class PromptCache:
    """One cache and the tokens it holds.

    Layers that attend to everything can be cut back to any earlier token. A sliding window that has moved on, and a quantised cache, can
    only be continued, so a turn that changes what was said is read anew; recurrent states are not kept at all. The log says so, once.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._cache: DynamicCache | None = None
        self._said: set[str] = set()

    @property
    def held(self) -> tuple[list[int], DynamicCache | None]:
        """The tokens that the cache has read, and the cache."""
        return self._token_ids, self._cache

    def shared(self, token_ids: list[int]) -> int:
        """How many tokens of this prompt need not be read; the last token always is."""
        return _shared_tokens(self._token_ids, token_ids[:-1])

    def take(self, token_ids: list[int]) -> tuple[DynamicCache | None, int]:
        """The cache cut to what it shares with `token_ids`, and that many tokens; the last token is never shared.

        The cache is given away: what `generate` makes of it comes back through `keep`, or is lost with an interrupted answer.
        """
        cache, held = self._cache, self._token_ids
        self.drop()
        shared = _shared_tokens(held, token_ids[:-1])
        if cache is None or not shared:
            return None, 0
        if shared < len(held):
            if isinstance(cache, QuantizedCache) or any(_moved_on(layer) for layer in cache.layers):
                what = "in a quantised cache" if isinstance(cache, QuantizedCache) else "behind a sliding window"
                self._say_once(f"the conversation changed {what}, which cannot go back: it is read anew")
                return None, 0
            cache.crop(shared - len(held))  # negative: that many tokens are removed; older versions read 0 as "all"
        return cache, shared

    def keep(self, token_ids: list[int], cache: Any) -> None:
        """Takes what `generate` returned; `token_ids` are prompt and answer, whose last token it has not read."""
        kinds = {type(layer) for layer in getattr(cache, "layers", ())}
        known = type(cache) is DynamicCache and kinds <= set(KEPT_LAYERS)
        if not known and not isinstance(cache, QuantizedCache):
            names = ", ".join(sorted(kind.__name__ for kind in kinds - set(KEPT_LAYERS))) or type(cache).__name__
            self._say_once(f"each turn reads the whole conversation anew: a cache of {names} cannot be taken up again")
            return
        self._cache, self._token_ids = cache, token_ids[: cache.get_seq_length()]

    def drop(self) -> None:
        self._cache, self._token_ids = None, []

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning("%s", message)


def _moved_on(layer: Any) -> bool:
    """Whether a sliding window has let tokens go."""
    return type(layer) is DynamicSlidingWindowLayer and layer.cumulative_length >= layer.sliding_window


def _shared_tokens(held: list[int], wanted: list[int]) -> int:
    shared = 0
    for mine, other in zip(held, wanted, strict=False):
        if mine != other:
            break
        shared += 1
    return shared


SUFFIX = ".safetensors"
FORMAT = "moegraft chat 1"
ROLES = ("system", "user", "assistant")


class SavedChatError(MoegraftError):
    """A file that is no saved chat, or one of another model."""


@dataclass(frozen=True, slots=True)
class SavedChat:
    """What was said, and a cache with the tokens that it holds; no cache where the model's cannot be kept."""

    messages: list[Message]
    token_ids: list[int]
    cache: DynamicCache | None


def write_chat(path: Path, model: PreTrainedModel, chat: SavedChat) -> None:
    """
    Raises:
        FileExistsError: there is such a file; it is left as it was.
        OSError: it cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    lengths = []
    # Of several kinds without a common type. A quantised cache is not saved: how it lies is its backend's affair.
    layers: list[Any] = chat.cache.layers if type(chat.cache) is DynamicCache else []
    for index, layer in enumerate(layers):
        lengths.append(layer.get_seq_length())
        if lengths[-1]:
            tensors[f"{index}.keys"] = layer.keys.to("cpu").contiguous()
            tensors[f"{index}.values"] = layer.values.to("cpu").contiguous()
    about = {
        "format": FORMAT,
        "fingerprint": fingerprint(model),
        "messages": json.dumps([asdict(message) for message in chat.messages]),
        "token_ids": json.dumps(chat.token_ids),
        "layer_tokens": json.dumps(lengths),
    }
    with path.open("xb") as file:
        file.write(save(tensors, about))


def read_chat(path: Path, model: PreTrainedModel) -> SavedChat:
    """
    Raises:
        SavedChatError: it is not a saved chat, is damaged, or belongs to another model or other rules.
        OSError: it cannot be read.
    """
    with path.open("rb"):  # says what is wrong with the path, as safetensors does not
        pass
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise SavedChatError(f"{path}: not a chat; give a file that /save NAME{SUFFIX} wrote")
            if about["fingerprint"] != fingerprint(model):
                raise SavedChatError(
                    f"{path}: saved with another model, other rules or another --dtype; give those it was saved with, or start a new chat"
                )
            messages = [_message(entry) for entry in json.loads(about["messages"])]
            token_ids = [int(token) for token in json.loads(about["token_ids"])]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # not a mapping
        return SavedChat(messages, token_ids, _cache(model, tensors, json.loads(about["layer_tokens"]), len(token_ids)))
    except (SafetensorError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise SavedChatError(f"{path}: this saved chat is damaged ({error})") from error
    except ValueError as error:
        if isinstance(error, SavedChatError):
            raise
        raise SavedChatError(f"{path}: this saved chat is damaged ({error})") from error


def _message(entry: Any) -> Message:
    if entry["role"] not in ROLES or not isinstance(entry["content"], str):
        raise ValueError("a message without role or text")
    return Message(entry["role"], entry["content"])


def _cache(model: PreTrainedModel, tensors: dict[str, torch.Tensor], lengths: list[int], tokens: int) -> DynamicCache | None:
    """
    Raises:
        ValueError, KeyError: the tensors are not those of `tokens` tokens in this model.
    """
    if not lengths:
        return None
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    layers: list[Any] = cache.layers
    if why_not_appendable(model) is not None or len(lengths) != len(layers):
        raise ValueError(f"{len(lengths)} layers do not fit this model")
    for index, (layer, length) in enumerate(zip(layers, lengths, strict=True)):
        if not length:
            continue
        keys, values = tensors[f"{index}.keys"].to(model.device), tensors[f"{index}.values"].to(model.device)
        sliding = type(layer) is DynamicSlidingWindowLayer
        held = min(tokens, layer.sliding_window - 1) if sliding else tokens
        if length != tokens or any(one.ndim != 4 or one.shape[0] != 1 or one.shape[2] != held for one in (keys, values)):
            raise ValueError(f"layer {index} does not hold {tokens} tokens")
        layer.update(keys, values)
        if sliding:
            layer.cumulative_length = tokens
    return cache
