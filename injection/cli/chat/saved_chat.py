"""A chat in one file: what was said as JSON, and the keys and values that the model made of it, in one safetensors file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from moegraft.injection.cli.chat.conversation import Message
from moegraft.injection.fingerprint import fingerprint
from moegraft.injection.prefill import why_not_appendable
from moegraft.operators.errors import MoegraftError

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
