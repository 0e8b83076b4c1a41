"""The last layer of a model in the pass of a prompt, computed for the one token whose logits are asked for.

Later passes need the keys and values that all tokens have in this layer, and nothing else of it: what follows the attention of all tokens
but the last is left out, and their attention too where keys and values are not in pages. A model of L layers saves almost 1/L of a prompt's
time. llama.cpp does the same.

The layer runs twice. First with all tokens up to its attention function: by then the cache has the keys and values, and the last token's
answer is kept. Then with the last token alone and without a cache, where the attention function returns that answer.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from moegraft.operators.base import CACHE
from moegraft.operators.structure import hooked, is_library, source_of

# Up to 8 tokens may be a step, in which experts of the layer before are added late (`offload/deferral.py`). Of less than 4, attention's
# weights, read twice, take as long as the experts that are not read.
LEAST_TOKENS = 9
_SETTINGS = (bool, int, float, str, type(None))  # types of arguments that are the same for any tokens
_READ_OUTPUTS = tuple(f"output_{name}" for name in ("hidden_states", "attentions", "router_logits"))

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
_asking: ContextVar[nn.Module | None] = ContextVar("asking", default=None)  # the model whose pass needs the outputs of one token


class _AttendedError(Exception):
    """The attention function has answered, and what follows it is not to be computed."""


@contextmanager
def last_token_alone(model: nn.Module, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Let a pass of the model with these arguments, the body, leave out what nobody reads if it returns the logits of one token alone."""
    kept, config = arguments.get("logits_to_keep"), model.config
    configs: tuple[Any, ...] = config, config.get_text_config(decoder=True)  # type: ignore[union-attr,operator] # of a PreTrainedModel
    all_read = (
        arguments.get("labels") is not None
        or any(value for name, value in arguments.items() if name.startswith("output_"))
        or any(getattr(each, name, False) for each in configs for name in _READ_OUTPUTS)
    )
    alone = type(kept) is int and kept == 1 and not all_read and not torch.is_grad_enabled()
    before = _asking.get()
    try:
        _asking.set(model if alone else None)
        yield
    finally:
        _asking.set(before)


class LastLayer:
    """Answers the calls of a decoder's last layer, which `of` has found to be of a form for which that is possible."""

    def __init__(self, model: nn.Module, decoder: nn.Module, layers: str) -> None:
        self._model, self._decoder = weakref.ref(model), weakref.ref(decoder)
        self._layers = layers
        layer = getattr(decoder, layers)[-1]
        self._forward = type(layer).forward  # the family's own
        self._local = threading.local()  # `pending`: whether attention has to answer; `answer`: the one that it repeats
        self._above = [weakref.ref(module) for module in model.modules() if any(child is decoder for child in module.children())]

    @staticmethod
    def of(model: nn.Module, attention: nn.Module) -> tuple[nn.Module, LastLayer] | None:
        """Return the last layer of a model, and what answers for it; None if `attention` is in another or if all tokens may be needed."""
        owner: Any = type(model)  # mypy takes a module's __hash__ for that of its class
        decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None  # type: ignore[operator]
        # Classes of others may do more with the decoder's outputs than choose the tokens that the head gets.
        if not all(map(is_library, owner.__mro__)) or "logits_to_keep" not in inspect.signature(owner.forward).parameters:
            return None
        lists = [(name, child) for name, child in decoder.named_children() if isinstance(child, nn.ModuleList) and len(child)]
        name, layer = next(((name, child[-1]) for name, child in lists if attention in set(child[-1].modules())), ("", None))
        if layer is None:
            return None
        inside = [module for module in layer.modules() if module is not layer]
        cached = [module for module in inside if _reads_cache(module)]
        if len(cached) != 1 or cached[0] is not attention or not _only_appends(type(attention)) or not _reads_one(type(decoder)):
            return None
        if any(getattr(module, "sparsity", None) is not None for module in inside):  # whose statistics compare the layers
            return None
        return layer, LastLayer(model, decoder, name)

    def _is_watched(self, layer: nn.Module) -> bool:
        """Return whether the layer is not the last one any more, or something sees more than its call and the model's."""
        model, decoder = self._model(), self._decoder()
        layers = list(getattr(decoder, self._layers, ()))
        if decoder is None or [each for each in layers if each is layer] != layers[-1:]:
            return True
        children = list(decoder.children())
        after = children[next(number for number, child in enumerate(children) if layer in set(child.children())) + 1 :]
        modules = [*after, *(module for module in layer.modules() if module is not layer)]
        above = [module for found in self._above if (module := found()) is not None and module is not model]
        replaced = any("forward" in vars(module) for module in (decoder, layer, *above, *modules))  # as by accelerate
        tables = [module._forward_pre_hooks for module in modules]  # those in front of the layer see what they always do
        tables += [module._forward_hooks for module in (*modules, *above, decoder, layer)]
        return replaced or hooked(tables)

    def answer(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer returns for the last token of each sequence, (B, 1, H); None for a call that the layer answers itself."""
        x, asking = args[0] if len(args) == 1 else None, _asking.get()
        if type(x) is not torch.Tensor or not x.is_cpu or x.dim() != 3 or x.shape[1] < LEAST_TOKENS:
            return None
        if asking is None or asking is not self._model():
            return None
        last = _of_last_token(kwargs, x.shape[1])
        if last is None or self._is_watched(layer):
            return None
        local = self._local
        try:
            try:
                local.pending = True
                return self._forward(layer, x, **kwargs)  # of all tokens: the attention function is not the operator's at the moment
            except _AttendedError as attended:
                local.pending, local.answer = False, attended.args[0]
            return self._forward(layer, x[:, -1:].contiguous(), **last)
        finally:
            vars(local).clear()

    def attend(
        self,
        function: Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        whole: bool,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what an attention function returns for these arguments, where it is to be computed for all tokens.

        Args:
            whole: whether the function has to be called with all queries.

        Raises:
            _AttendedError: the layer goes on with the last token alone.
        """
        answer: torch.Tensor | None = getattr(self._local, "answer", None)
        if answer is not None:
            return answer, None
        if not getattr(self._local, "pending", False):
            return function(query, key, value, mask, **kwargs)
        # Without a mask, keys behind those of the queries are memory that is still to be filled.
        if not whole and (mask is not None or key.shape[2] == query.shape[2]):
            query, mask = query[:, :, -1:], None if mask is None else mask[:, :, -1:]
        raise _AttendedError(function(query, key, value, mask, **kwargs)[0][:, -1:])


def _of_last_token(kwargs: Mapping[str, Any], tokens: int) -> dict[str, Any] | None:
    """Return the arguments of a layer for the last of its tokens, without the cache; None if one is of an unknown form."""
    found: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name == CACHE:
            found[name] = None
        elif isinstance(value, _SETTINGS):
            found[name] = value
        elif name == "attention_mask" and isinstance(value, torch.Tensor) and value.dim() == 4 and value.shape[2] == tokens:
            found[name] = value[:, :, -1:, -1:]
        elif name == "position_ids" and isinstance(value, torch.Tensor) and value.shape[-1] == tokens:
            found[name] = value[..., -1:]
        elif name == "position_embeddings":
            parts = value if isinstance(value, tuple) else (value,)
            if not all(isinstance(part, torch.Tensor) and part.dim() > 1 and part.shape[-2] == tokens for part in parts):
                return None
            cut = tuple(part[..., -1:, :] for part in parts)
            found[name] = cut if isinstance(value, tuple) else cut[0]
        else:
            return None
    return found


def _reads_cache(module: nn.Module) -> bool:
    return any(CACHE in name or "cache" in name for name in inspect.signature(type(module).forward).parameters)


def _only_appends(attention: Any) -> bool:
    """Return whether attention of a class uses its cache, if it has one, to append keys and values once, and for the number of tokens."""
    text = source_of(attention)
    uses = re.findall(rf"\b{CACHE}\.(\w+)", text)
    passed = re.search(rf"=\s*{CACHE}\b(?!\.)|[(,]\s*{CACHE}\s*[,)]", text)  # to a function, which may use it in any way
    return uses.count("update") == 1 and {*uses} <= {"update", "get_seq_length"} and f"if {CACHE} is not None" in text and not passed


def _reads_one(decoder: Any) -> bool:
    """Return whether a decoder of a class only normalises and returns what its last layer returns, and uses it in no other way."""
    classes = [node for node in ast.parse(textwrap.dedent(source_of(decoder))).body if isinstance(node, ast.ClassDef)]
    functions = [node for each in classes for node in each.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    body = functions[0].body if functions else []
    loops = [number for number, node in enumerate(body) if isinstance(node, ast.For)]
    if not loops:
        return False
    loop, *norms, returned = body[loops[-1] :]
    match loop:
        case ast.For(body=[*before, called, ast.Assign(targets=[ast.Name(id=states)], value=ast.Name(id=renamed))], orelse=[]):
            pass
        case ast.For(body=[*before, ast.Assign(targets=[ast.Name(id=states)]) as called], orelse=[]):
            renamed = states
        case _:
            return False
    match called:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[ast.Name(id=given)])):
            if name != renamed or given != states or any(states in _names(node) for node in before):
                return False
        case _:
            return False
    for node in norms:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == states and _names(value) == {states, "self"}:
                continue
            case _:
                return False
    match returned:
        case ast.Return(value=ast.Call(func=ast.Name(), args=[], keywords=keywords)):
            read = {keyword.arg: _names(keyword.value) for keyword in keywords}
            return read.pop("last_hidden_state", None) == {states} and set().union(*read.values()) <= {CACHE, "use_cache"}
        case _:
            return False


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
