"""A chat's messages, the tokens of its next prompt, the key-value cache that its prompts share, and chats saved to files."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, QuantizedCache

from moegraft.injection.injected import injection_of
from moegraft.injection.prefill import why_not_appendable
from moegraft.operators.atomic_file import write_file
from moegraft.operators.decode.cache import new_cache
from moegraft.operators.errors import MoegraftError
from moegraft.operators.weights import sampled

Role = Literal["system", "user", "assistant"]


class PromptRefusedError(MoegraftError):
    """The conversation cannot be encoded as a prompt of this model."""


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a prompt, and how many of the oldest question-answer pairs were left out to make it fit."""

    token_ids: list[int]
    left_out: int = 0


class Conversation:
    """The messages so far. They are encoded by the model's chat template, or as plain text if it has none."""

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
        token_ids = self._encode(self.messages)
        if not token_ids:
            raise PromptRefusedError("the prompt has no tokens in this model's vocabulary; give another one")
        if limit is None:
            return Prompt(token_ids)
        while len(token_ids) + min(answer_tokens, limit // 2) > limit and left_out + 2 < len(self._turns):
            left_out += 2  # a question and its answer
            token_ids = self._encode([*self._head, *self._turns[left_out:]])
        if len(token_ids) >= limit:
            raise PromptRefusedError(f"the prompt has {len(token_ids)} tokens, and this model's context {limit}, including the answer")
        return Prompt(token_ids, left_out // 2)

    def as_text(self) -> str:
        """Return the messages as one text, each question on its own line."""
        return _joined(self.messages)

    def _encode(self, messages: list[Message]) -> list[int]:
        if not self.has_template:
            return list(self._tokenizer(_joined(messages))["input_ids"])
        return encode_chat(self._tokenizer, [{"role": message.role, "content": message.content} for message in messages])


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the tokens of a chat whose next message is the assistant's, by the model's chat template.

    Args:
        variables: of the template, such as `enable_thinking`.

    Raises:
        PromptRefusedError: the template refuses the messages, or a variable has the name of an argument of `apply_chat_template`.
    """
    return list(_templated(tokenizer, messages, tools, variables, return_dict=True)["input_ids"])


def answer_opening(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return what the chat template writes after the last message, such as a mark that begins the answer's reasoning.

    It is found behind a mark of this call's own, so that no text of a message can be taken for it.

    Raises:
        PromptRefusedError: as `encode_chat` does.
    """
    mark = uuid.uuid4().hex
    marked = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{mark}"}]
    _, found, opening = str(_templated(tokenizer, marked, tools, variables, tokenize=False)).rpartition(mark)
    return opening if found else ""


def _templated(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any] | None,
    **form: bool,
) -> Any:
    given: Any = tokenizer
    variables = variables or {}
    if taken := sorted(variables.keys() & inspect.signature(given.apply_chat_template).parameters.keys()):
        raise PromptRefusedError(f"{', '.join(taken)}: no variable of a chat template has this name")
    try:
        return given.apply_chat_template(list(messages), tools=tools or None, add_generation_prompt=True, **form, **variables)
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


logger = logging.getLogger(__name__)
KEPT_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


class PromptCache:
    """A key-value cache and the tokens that it holds, kept between prompts.

    Layers of full attention can be cropped to any earlier token. A sliding window that has dropped tokens, and a quantised cache, can
    only be extended: a prompt that changes earlier tokens is computed from its beginning. Recurrent states are not kept. The log
    reports each case once.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._cache: DynamicCache | None = None
        self._logged: set[str] = set()

    @property
    def held(self) -> tuple[list[int], DynamicCache | None]:
        """The tokens in the cache, and the cache."""
        return self._token_ids, self._cache

    def shared(self, token_ids: list[int]) -> int:
        """Return how many tokens of a prompt the cache holds; its last token is never counted, as it has to be computed."""
        return _shared_tokens(self._token_ids, token_ids[:-1])

    def take(self, token_ids: list[int]) -> tuple[DynamicCache | None, int]:
        """Return the cache cropped to the tokens that it shares with a prompt, and their number.

        The caller owns the cache from then on. `keep` gives it back; after an interrupted answer it is lost.
        """
        cache, held = self._cache, self._token_ids
        self.drop()
        shared = _shared_tokens(held, token_ids[:-1])
        if cache is None or not shared:
            return None, 0
        if shared < len(held):
            if isinstance(cache, QuantizedCache) or any(_moved_on(layer) for layer in cache.layers):
                kind = "a quantised cache" if isinstance(cache, QuantizedCache) else "a sliding window"
                self._log_once(f"an earlier part of the conversation changed, and {kind} cannot be cropped: all of it is computed again")
                return None, 0
            cache.crop(shared - len(held))  # negative: that many tokens are removed; older versions read 0 as "all"
        return cache, shared

    def keep(self, token_ids: list[int], cache: Any) -> None:
        """Keep the cache that `generate` returned; `token_ids` are prompt and answer, whose last token is not in the cache."""
        kinds = {type(layer) for layer in getattr(cache, "layers", ())}
        known = type(cache) is DynamicCache and kinds <= set(KEPT_LAYERS)
        if not known and not isinstance(cache, QuantizedCache):
            names = ", ".join(sorted(kind.__name__ for kind in kinds - set(KEPT_LAYERS))) or type(cache).__name__
            self._log_once(f"each turn computes the whole conversation again: a cache of {names} cannot be kept")
            return
        self._cache, self._token_ids = cache, token_ids[: cache.get_seq_length()]

    def drop(self) -> None:
        self._cache, self._token_ids = None, []

    def _log_once(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.warning("%s", message)


def _moved_on(layer: Any) -> bool:
    """Whether a sliding window has dropped tokens."""
    return type(layer) is DynamicSlidingWindowLayer and layer.cumulative_length >= layer.sliding_window


def _shared_tokens(held: list[int], wanted: list[int]) -> int:
    shared = 0
    for mine, other in zip(held, wanted, strict=False):
        if mine != other:
            break
        shared += 1
    return shared


SUFFIX = ".safetensors"
FORMAT = "moegraft chat 3"
ROLES = ("system", "user", "assistant")


class SavedChatError(MoegraftError):
    """The file is no saved chat, or belongs to another model."""


@dataclass(frozen=True, slots=True)
class SavedChat:
    """The messages, and the cache with its tokens; None if the model's cache cannot be saved."""

    messages: list[Message]
    token_ids: list[int]
    cache: DynamicCache | None


def write_chat(path: Path, model: PreTrainedModel, chat: SavedChat) -> None:
    """
    Raises:
        FileExistsError: the file exists; it is not changed.
        OSError: the file cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    lengths = []
    # Layers have no common type. A quantised cache is not saved: its layout belongs to its backend.
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
    write_file(path, save(tensors, about), replace=False)


def read_chat(path: Path, model: PreTrainedModel) -> SavedChat:
    """
    Raises:
        SavedChatError: the file is no saved chat, is damaged, or belongs to another model or other rules.
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
        return SavedChat(messages, token_ids, _cache(model, tensors, json.loads(about["layer_tokens"]), len(token_ids)))
    except SavedChatError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise SavedChatError(f"{path}: this saved chat is damaged ({error})") from error


def _message(entry: Any) -> Message:
    if entry["role"] not in ROLES or not isinstance(entry["content"], str):
        raise ValueError("a message without role or text")
    entry["content"].encode()  # a lone surrogate could be neither shown nor tokenised
    return Message(entry["role"], entry["content"])


# Of the config; the rest of it decides what a model computes.
NOT_THE_MODEL = ("_name_or_path", "transformers_version", "architectures")


def fingerprint(model: PreTrainedModel) -> str:
    """Return a SHA-256 of what a model's keys and values depend on. It is the same on another machine.

    It covers the config, the operators' options and thresholds, and up to 16 KiB, in 64 stripes, of each parameter and stored buffer, of
    each packed matrix, and of each expert. Training changes almost all values of what it changes; an edit of single values between the
    stripes is not noticed.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in NOT_THE_MODEL}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in nn.Module.state_dict(model).items():  # an injected model's own method warns of what is missing in it
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.numel() and not tensor.is_meta:
            rows = tensor.detach().reshape(len(tensor) if tensor.dim() == 3 else 1, -1)  # one for each expert of a fused parameter
            digest.update(sampled(rows.contiguous().view(torch.uint8)))
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


def _cache(model: PreTrainedModel, tensors: dict[str, torch.Tensor], lengths: list[int], tokens: int) -> DynamicCache | None:
    """
    Raises:
        ValueError, KeyError: the tensors are not those of `tokens` tokens in this model.
    """
    if not lengths:
        return None
    cache = new_cache(model)
    layers: list[Any] = cache.layers
    if why_not_appendable(model) is not None or len(lengths) != len(layers):
        raise ValueError(f"{len(lengths)} layers do not fit this model")
    for index, (layer, own, length) in enumerate(zip(layers, _one_token(model).layers, lengths, strict=True)):
        if not length:
            continue
        sliding = type(layer) is DynamicSlidingWindowLayer
        held = min(tokens, layer.sliding_window - 1) if sliding else tokens
        states = []
        for name, like in (("keys", own.keys), ("values", own.values)):
            found = tensors[f"{index}.{name}"]
            expected = (1, like.shape[1], held, like.shape[3])
            if length != tokens or tuple(found.shape) != expected or found.dtype != like.dtype:
                raise ValueError(
                    f"{name} of layer {index} are {tuple(found.shape)} {found.dtype} for {length} of {tokens} tokens, "
                    f"and the model's are {expected} {like.dtype}"
                )
            states.append(found.to(like.device))
        layer.update(*states)
        if sliding:
            layer.cumulative_length = tokens
    return cache


@torch.no_grad()
def _one_token(model: PreTrainedModel) -> Any:
    """Return the cache of a token, which has the heads, sizes, dtypes and devices of the model's keys and values."""
    call: Any = model
    cache = new_cache(model)
    call(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), past_key_values=cache, use_cache=True)
    return cache
