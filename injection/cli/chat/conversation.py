"""A chat's messages, the tokens of its next prompt, and chats saved to files."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import jinja2
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicSlidingWindowLayer

from moegraft.injection.cli.chat.prompt_cache import Checkpoint, why_not_appendable
from moegraft.injection.cli.images import ImageError, ImageInputs, ImageReader, Picture
from moegraft.injection.injected import injection_of
from moegraft.operators.atomic_file import write_file
from moegraft.operators.base import CACHE
from moegraft.operators.decode.cache import new_cache
from moegraft.operators.decode.states import TENSORS
from moegraft.operators.errors import MoegraftError
from moegraft.operators.weights import sampled

Role = Literal["system", "user", "assistant"]


class PromptRefusedError(MoegraftError):
    """The conversation cannot be encoded as a prompt of this model."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message; its pictures are before its text."""

    role: Role
    content: str
    pictures: tuple[Picture, ...] = ()

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        if not self.pictures:
            return self.plain()
        parts = [{"type": "image", "image": picture} for picture in self.pictures]
        return {"role": self.role, "content": [*parts, {"type": "text", "text": self.content}]}

    def plain(self) -> dict[str, str]:
        """Return the role and the text."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a prompt, its images, and how many of the oldest question-answer pairs were left out to make it fit."""

    token_ids: list[int]
    left_out: int = 0
    images: ImageInputs | None = None


class Conversation:
    """The messages so far. They are encoded by the model's chat template, or as plain text if it has none.

    Args:
        reader: of images; a text is the reason why there is none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        context_tokens: int | None = None,
        system: str | None = None,
        reader: ImageReader | str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._reader = reader
        self._context_tokens = context_tokens
        self._head = [Message("system", system)] if system else []
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        return [*self._head, *self._turns]

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def ask(self, text: str, pictures: Sequence[Picture] = ()) -> None:
        self._turns.append(Message("user", text, tuple(pictures)))

    def answered(self, text: str) -> None:
        self._turns.append(Message("assistant", text))

    def withdraw(self) -> None:
        """Remove a question that got no answer: most chat templates refuse two questions in a row."""
        assert self._turns and self._turns[-1].role == "user", "only a question can be withdrawn"
        self._turns.pop()

    def reset(self) -> None:
        self._turns.clear()

    def restore(self, messages: list[Message]) -> None:
        """Replace all messages, the system message included."""
        self._head = [message for message in messages[:1] if message.role == "system"]
        self._turns = messages[len(self._head) :]

    def prompt(self, answer_tokens: int) -> Prompt:
        """Encode the next prompt, with room for an answer of `answer_tokens` or half the context, whichever is less.

        Raises:
            PromptRefusedError: the last question alone leaves no room for an answer, has no tokens, or the chat template refuses it.
        """
        assert self._turns, "there is a question to answer"
        limit, left_out = self._context_tokens, 0
        prompt = self._encode(self.messages)
        if not prompt.token_ids:
            raise PromptRefusedError("the prompt has no tokens in this model's vocabulary; give another one")
        if limit is None:
            return prompt
        while len(prompt.token_ids) + min(answer_tokens, limit // 2) > limit and left_out + 2 < len(self._turns):
            left_out += 2  # a question and its answer
            prompt = self._encode([*self._head, *self._turns[left_out:]])
        if len(prompt.token_ids) >= limit:
            message = f"the prompt has {len(prompt.token_ids)} tokens, and this model's context {limit}, including the answer"
            raise PromptRefusedError(message)
        return replace(prompt, left_out=left_out // 2)

    def as_text(self) -> str:
        """Return the messages as one text, each question on its own line."""
        return _joined(self.messages)

    def _encode(self, messages: list[Message]) -> Prompt:
        if not self.has_template:
            if any(message.pictures for message in messages):
                raise PromptRefusedError("images need a chat template, which this model does not have")
            return Prompt(list(self._tokenizer(_joined(messages))["input_ids"]))
        return TemplatedChat(self._tokenizer, [message.for_template() for message in messages]).prompt(self._reader)


@dataclass(frozen=True, slots=True)
class TemplatedChat:
    """A chat in the form of the model's chat template, whose next message is the assistant's.

    Attributes:
        messages: the content of each is a text, or a list of parts of the types `text` and `image`, which has a `Picture` as `image`.
        variables: of the template, such as `enable_thinking`.
        continued: whether the answer continues the last message instead.
        prompted: whether the template begins the answer, unless it is `continued`.
    """

    tokenizer: PreTrainedTokenizerBase
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False
    prompted: bool = True

    def prompt(self, reader: ImageReader | str = "") -> Prompt:
        """Return the tokens of the chat; `reader` is of images, or the reason why there is none.

        Raises:
            PromptRefusedError: the template refuses the messages, or a variable has the name of an argument of `apply_chat_template`.
            ImageError: the images cannot be used.
        """
        pictures = self._pictures()
        if not pictures:
            return Prompt(list(self._applied(return_dict=True)["input_ids"]))
        if isinstance(reader, str):
            raise ImageError(f"images: {reader}")
        images = reader.inputs(str(self._applied(tokenize=False)), pictures)
        return Prompt(images.token_ids, images=images)

    def opening(self) -> str:
        """Return what the chat template writes after the last message, such as a mark that begins the answer's reasoning.

        It is found behind a mark of this call's own, so that no text of a message can be taken for it. Where the last message is
        `continued`, its own text is part of it.

        Raises:
            PromptRefusedError: as `prompt` does.
        """
        mark = uuid.uuid4().hex
        marked = [dict(message) for message in self.messages]
        last = len(marked) - (2 if self.continued else 1)
        if last >= 0:
            content = marked[last]["content"]
            marked[last]["content"] = content + (mark if isinstance(content, str) else [{"type": "text", "text": mark}])
        _, marker, opening = str(replace(self, messages=marked)._applied(tokenize=False)).rpartition(mark)
        return opening if marker or last < 0 else ""

    def _pictures(self) -> list[Picture]:
        parts = (part for message in self.messages if isinstance(message["content"], list) for part in message["content"])
        return [part["image"] for part in parts if part["type"] == "image"]

    def _applied(self, **form: bool) -> Any:
        given: Any = self.tokenizer
        messages = list(self.messages)
        if self._pictures():  # templates look for the type of a part, and some also for its other names
            messages = [
                {**message, "content": [{"type": "image"} if part["type"] == "image" else part for part in message["content"]]}
                if isinstance(message["content"], list)
                else message
                for message in messages
            ]
        form |= {"add_generation_prompt": self.prompted and not self.continued, "continue_final_message": self.continued}
        names = {"messages", "conversations", *inspect.signature(given.apply_chat_template).parameters}  # set by transformers
        if taken := sorted(self.variables.keys() & names):
            raise PromptRefusedError(f"{', '.join(taken)}: no variable that a request can set")
        try:
            return given.apply_chat_template(messages, tools=self.tools or None, **form, **self.variables)
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
            # Templates raise what Python does for messages and tools of a form that they do not expect.
            raise PromptRefusedError(f"the model's chat template refuses this conversation: {error or type(error).__name__}") from error


def _joined(messages: list[Message]) -> str:
    text = ""
    for message in messages:
        if message.role != "assistant" and text and not text.endswith("\n"):
            text += "\n"
        text += message.content
    return text


SUFFIX = ".safetensors"
FORMAT = "moegraft chat 4"
ROLES = ("system", "user", "assistant")


class SavedChatError(MoegraftError):
    """The file is not a saved chat, or belongs to another model."""


@dataclass(frozen=True, slots=True)
class SavedChat:
    """The messages, and the cache with its tokens and checkpoints; None if the model's cache cannot be saved."""

    messages: list[Message]
    token_ids: list[int]
    cache: DynamicCache | None
    checkpoints: Sequence[Checkpoint] = ()


def write_chat(path: Path, model: PreTrainedModel, chat: SavedChat) -> None:
    """
    Raises:
        FileExistsError: the file exists; it is not changed.
        OSError: the file cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    # A quantised cache is not saved: its layout belongs to its backend.
    saved = chat.cache if type(chat.cache) is DynamicCache else None
    for checkpoint in chat.checkpoints if saved is not None else ():
        copied = new_cache(model)
        checkpoint.restore(copied)
        tensors |= {f"{checkpoint.tokens}:{name}": tensor for name, tensor in _tensors(copied)}
    if saved is not None:
        tensors |= dict(_tensors(saved))
    about = {
        "format": FORMAT,
        "fingerprint": fingerprint(model),
        "messages": json.dumps([message.plain() for message in chat.messages]),
        "token_ids": json.dumps(chat.token_ids),
        "cached": json.dumps(saved is not None),
        "checkpoints": json.dumps([checkpoint.tokens for checkpoint in chat.checkpoints] if saved is not None else []),
    }
    tensors = {name: tensor.to("cpu").contiguous() for name, tensor in tensors.items()}
    write_file(path, save(tensors, about), replace=False)


def read_chat(path: Path, model: PreTrainedModel) -> SavedChat:
    """
    Raises:
        SavedChatError: the file is not a saved chat, is damaged, or belongs to another model or other rules.
        OSError: the file cannot be read.
    """
    with path.open("rb"):  # raises OSError with the reason, which safetensors does not give
        pass
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise SavedChatError(f"{path}: not a chat of this version; give a file that /save NAME{SUFFIX} wrote")
            if about["fingerprint"] != fingerprint(model):
                raise SavedChatError(f"{path}: saved with another model, other rules or another --dtype; use the same, or start a new chat")
            messages = [_message(entry) for entry in json.loads(about["messages"])]
            token_ids = [int(token) for token in json.loads(about["token_ids"])]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # not a mapping
        if not json.loads(about["cached"]):
            return SavedChat(messages, token_ids, None)
        return SavedChat(messages, token_ids, *_cache(model, tensors, len(token_ids), json.loads(about["checkpoints"])))
    except SavedChatError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise SavedChatError(f"{path}: damaged ({error}), or not a chat; give a file that /save NAME{SUFFIX} wrote") from error


def _message(entry: Any) -> Message:
    if entry["role"] not in ROLES or not isinstance(entry["content"], str):
        raise ValueError("a message without role or text")
    entry["content"].encode()  # a lone surrogate could be neither shown nor tokenised
    return Message(entry["role"], entry["content"])


# Of the config; the rest of it decides what a model computes.
NOT_THE_MODEL = ("_name_or_path", "transformers_version", "architectures")


def fingerprint(model: PreTrainedModel) -> str:
    """Return a SHA-256 of everything that a model's keys and values depend on; it is the same on another machine.

    It covers the config, the operators' options and thresholds, the scales of adapters, and up to 16 KiB, in 64 stripes, of each parameter
    and stored buffer, of each packed matrix, and of each expert. Training changes almost all values of what it changes; an edit of single
    values between the stripes is not noticed.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in NOT_THE_MODEL}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in nn.Module.state_dict(model).items():  # an injected model's own method warns of what is missing in it
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.numel() and not tensor.is_meta:
            rows = tensor.detach().reshape(len(tensor) if tensor.dim() == 3 else 1, -1)  # one for each expert of a fused parameter
            digest.update(sampled(rows.contiguous().view(torch.uint8)))
    for path, module in model.named_modules():
        if isinstance(scaling := getattr(module, "scaling", None), dict):  # of PEFT's adapters, whose weights are parameters
            digest.update(f"{path} {sorted(scaling.items())}".encode())
    injection = injection_of(model)
    for swap in injection.plan.swaps if injection is not None else ():
        digest.update(f"{swap.module} {swap.operator} {swap.traits.identity}".encode())
    group = None if injection is None else injection.context.expert_group
    for path, operator in injection.operators.items() if injection is not None else ():
        threshold = "" if operator.sparsity is None else f"{operator.sparsity.threshold:.3g}"
        digest.update(f"{path} {operator.weight_type} {threshold}".encode())
        divided = None if group is None else group.weight_samples.get(path)
        for sample in operator.weight_samples() if divided is None else divided:
            digest.update(sample)
    return digest.hexdigest()


GROWING = {"keys": 2, "values": 2, "indexer_keys": 1, "indexer_position_ids": 2}  # of a layer, with the dimension of tokens


def _tensors(cache: DynamicCache) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a cache as `3.keys` or `3.conv_states.0`; the number is the layer's."""
    layers: list[Any] = cache.layers  # without a common type
    for number, layer in enumerate(layers):
        for name in GROWING:
            tensor = getattr(layer, name, None)
            if tensor is not None and tensor.numel():
                yield f"{number}.{name}", tensor
        for name in TENSORS:
            for index, state in getattr(layer, name, {}).items():
                if state is not None:
                    yield f"{number}.{name}.{index}", state


def _cache(
    model: PreTrainedModel, tensors: dict[str, torch.Tensor], tokens: int, places: Sequence[Any]
) -> tuple[DynamicCache, list[Checkpoint]]:
    """Return the cache of `tokens` tokens and its checkpoints after `places` tokens.

    Raises:
        ValueError, KeyError: the tensors are not those of so many tokens in this model.
    """
    if why_not_appendable(model) is not None:
        raise ValueError("this model keeps no cache")
    if places != sorted({int(place) for place in places} & set(range(1, tokens + 1))):
        raise ValueError(f"checkpoints after {places} of {tokens} tokens")
    # Of one token, with the heads, sizes, dtypes and devices of the model's keys, values and states.
    cache, call = new_cache(model), cast(Any, model)
    with torch.no_grad():
        call(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=True, **{CACHE: cache})
    checkpoints = []
    for place in places:
        _fill(cache, tensors, place, f"{place}:")
        checkpoints.append(Checkpoint(cache, place))
    _fill(cache, tensors, tokens)
    return cache, checkpoints


def _fill(cache: DynamicCache, tensors: dict[str, torch.Tensor], tokens: int, checkpoint: str = "") -> None:
    """Replace the tensors of a cache by those of `tokens` tokens, or of the checkpoint whose names begin with `checkpoint`."""
    layers: list[Any] = cache.layers
    for name, like in list(_tensors(cache)):
        number, kind, *index = name.split(".")
        layer = layers[int(number)]
        sliding = isinstance(layer, DynamicSlidingWindowLayer)
        if checkpoint and kind in GROWING and not sliding:
            continue
        tensor, expected = tensors[f"{checkpoint}{name}"], list(like.shape)
        if kind in GROWING:
            expected[GROWING[kind]] = min(tokens, layer.sliding_window - 1) if sliding else tokens
        if list(tensor.shape) != expected or tensor.dtype != like.dtype:
            what, whose = kind.replace("_", " "), f" at the checkpoint after {tokens} tokens" if checkpoint else ""
            raise ValueError(
                f"{what} of layer {number}{whose} are {tuple(tensor.shape)} {tensor.dtype}, "
                f"and the model's are {tuple(expected)} {like.dtype} for {tokens} tokens"
            )
        if index:
            getattr(layer, kind)[int(index[0])].copy_(tensor)
        else:
            setattr(layer, kind, tensor.to(like.device))
        if sliding and kind == "keys":
            layer.cumulative_length = tokens
