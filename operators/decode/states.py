"""Recurrent and convolution states of a cache: what a sequence needs to go on from one of its positions, kept and put back.

transformers keeps them in layers of kind `LinearAttentionCacheLayerMixin`, alone or beside keys and values. They have a fixed size and
stand for all tokens so far, so that no earlier token can be removed from them: to return to a position, its states have to be kept.
`SavedStates` is a copy of them; `keep_past` lets a cache keep those after each token of a short pass, which verifies a draft.

The modules that move states on are found by their source, and compute a pass over several tokens token by token (`split_passes`)

- where the cache keeps past states and no kernel writes them (`KeptPass`): each token gets what decoding would compute for it;
- where a module does not go on from its state with several tokens at once, as Jamba's scan, which begins at zero.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from moegraft.operators.decode.cache import StateName, makes_own_cache
from moegraft.operators.structure import source_of

CONVOLUTIONS, RECURRENT = TENSORS = "conv_states", "recurrent_states"  # of a layer, each a dictionary by number of the state
FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size")
_ALIGNMENT = 64  # bytes
_PAST = "past_states"  # attribute of a layer: its past states, by name and number of the state, and token
_KEPT = "_kept_pass"  # attribute of a layer
KEEPS_PAST = "_moegraft_keeps_past"  # attribute of a class of modules whose kernels write the states of a `KeptPass`
_TRAITS = "_moegraft_traits"  # attribute of a module
_PROBED = 4  # tokens
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # relative; rounding of any dtype is far below what a lost state changes
_ROUNDED_TOLERANCE = 5e-2


def has_states(layer: object) -> bool:
    """Return whether a layer of a cache keeps recurrent or convolution states."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def attention_part(layer: object) -> type | None:
    """Return the kind of a layer's keys and values, which it may keep beside states; None where it has none, or of no kind of their own."""
    if not has_states(layer):
        return type(layer)
    return next((base for base in type(layer).__bases__ if not issubclass(base, LinearAttentionCacheLayerMixin) and base is not ABC), None)


def keeps_nothing(layer: object) -> bool:
    """Return whether a layer of a cache stands for one of the model that keeps nothing."""
    return type(layer).__name__ == "DummyLayer"  # by name: transformers 5.17 does not have the class


def state_tensors(cache: Cache) -> dict[StateName, torch.Tensor]:
    """Return the recurrent and convolution states of a cache, by name."""
    return {
        (number, name, index): tensor
        for number, layer in enumerate(cache.layers)
        if has_states(layer)
        for name, index, tensor in _held(layer)
    }


class SavedStates:
    """A copy of the states of a cache, after its last token, in one block of memory on each device.

    Attributes:
        nbytes: of the copy.
    """

    def __init__(self, cache: Cache) -> None:
        tensors = state_tensors(cache)
        self._flags: dict[tuple[int, str], Any] = {}
        layers: list[Any] = cache.layers
        for number, layer in enumerate(layers):
            if not has_states(layer):
                continue
            for name in FLAGS:
                self._flags[number, name] = dict(getattr(layer, name))
            self._flags[number, "device"], self._flags[number, "dtype"] = layer.device, layer.dtype
        starts, sizes = {}, dict.fromkeys({tensor.device for tensor in tensors.values()}, 0)
        for key, tensor in tensors.items():
            starts[key] = sizes[tensor.device]
            sizes[tensor.device] += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        blocks = {device: torch.empty(size, dtype=torch.uint8, device=device) for device, size in sizes.items()}
        self.nbytes = sum(sizes.values())
        self._tensors: dict[StateName, torch.Tensor] = {}
        for key, tensor in tensors.items():
            part = blocks[tensor.device][starts[key] : starts[key] + tensor.nbytes]
            self._tensors[key] = part.view(tensor.dtype).view(tensor.shape)
            self._tensors[key].copy_(tensor)

    def restore(self, cache: Cache) -> None:
        """Put the states into a cache of the same model, which may be new. Tensors that it has already are overwritten in place."""
        for number, layer in enumerate(cache.layers):
            if not has_states(layer):
                continue
            for name in TENSORS:
                states = getattr(layer, name)
                for index, tensor in states.items():
                    saved = self._tensors.get((number, name, index))
                    if saved is None:
                        states[index] = None
                    elif tensor is not None and (tensor.shape, tensor.dtype, tensor.device) == (saved.shape, saved.dtype, saved.device):
                        _overwrite(tensor, saved)
                    else:
                        states[index] = saved.clone()
            for (of, name), value in self._flags.items():
                if of == number:
                    setattr(layer, name, dict(value) if isinstance(value, dict) else value)


def _overwrite(tensor: torch.Tensor, by: torch.Tensor) -> None:
    with torch.inference_mode():  # the states may have been made in it
        tensor.copy_(by)


def _held(layer: Any) -> Iterator[tuple[str, int, torch.Tensor]]:
    for name in TENSORS:
        for index, tensor in getattr(layer, name).items():
            if tensor is not None:
                yield name, index, tensor


def keep_past(cache: Cache, tokens: int) -> None:
    """Let a cache that has states keep those after each token of a pass over 2 to `tokens` tokens, until `drop_past`.

    Such a pass leaves the states of the cache as they are before it: `StateMark.keep` moves them on.
    """
    for layer in filter(has_states, cache.layers):
        past: dict[tuple[str, int, int], torch.Tensor] = vars(layer).setdefault(_PAST, {})
        for token in range(past_tokens(layer), tokens):
            for name, index, tensor in _held(layer):
                with torch.inference_mode(tensor.is_inference()):  # it may become the cache's
                    past[name, index, token] = torch.empty_like(tensor, memory_format=torch.contiguous_format)


def show_past(layer: Any, past: Mapping[tuple[str, int, int], torch.Tensor]) -> None:
    """Let a layer write the states after each token of the next short pass to tensors, by name and number of the state, and token.

    Those of a token are before those of later ones.
    """
    vars(layer)[_PAST] = past


def past_of(layer: Any) -> Mapping[tuple[str, int, int], torch.Tensor]:
    """Return where the states of a layer are after each token of the latest short pass."""
    found: Mapping[tuple[str, int, int], torch.Tensor] = vars(layer)[_PAST]
    return found


def drop_past(cache: Cache) -> None:
    """Free the memory of past states."""
    for layer in cache.layers:
        vars(layer).pop(_PAST, None)


def past_tokens(layer: object) -> int:
    """Return the number of tokens of the longest pass after each of which a layer keeps its states."""
    past = getattr(layer, _PAST, None)
    return next(reversed(past))[2] + 1 if past else 0


def is_past(name: Sequence[Any]) -> bool:
    """Return whether a tensor of this name in a cache is a past state, which passes over one token neither read nor write."""
    return bool(name[1] == _PAST)


class StateMark:
    """The states of a layer at one moment. A later mark of the same layer ends it.

    Nothing is copied when the layer goes back to the mark or on from it: tensors change places.

    Args:
        copies: whether passes over one token may follow before `restore`, which overwrite the states; they are copied.
    """

    def __init__(self, layer: Any, *, copies: bool) -> None:
        self._layer = layer
        self._flags = {name: dict(getattr(layer, name)) for name in FLAGS}
        self._states = {(name, index): tensor for name, index, tensor in _held(layer)}
        if copies:
            for (name, index), tensor in self._states.items():
                _overwrite(copy := vars(layer)[_PAST][name, index, 0], tensor)
                self._states[name, index] = copy

    def restore(self) -> None:
        """Put back the states of the mark. It may be repeated, where it was interrupted and after passes over several tokens."""
        for name, flags in self._flags.items():
            getattr(self._layer, name).update(flags)
        for (name, index), tensor in self._states.items():
            self._exchange(name, index, tensor)

    def keep(self, tokens: int) -> None:
        """Let the layer have the states after the first tokens of the pass over several that went on from the mark."""
        past = vars(self._layer)[_PAST]
        for name, index in self._states:
            self._exchange(name, index, past[name, index, tokens - 1])

    def _exchange(self, name: str, index: int, wanted: torch.Tensor) -> None:
        states, past = getattr(self._layer, name), vars(self._layer)[_PAST]
        now = states[index]
        if now is not wanted:
            for place, tensor in past.items():
                if tensor is wanted:
                    past[place] = now
            states[index] = wanted


class NotKeptError(Exception):
    """A kernel cannot write the states of a pass after each of its tokens."""


@dataclass(slots=True)
class KeptPass:
    """A pass that a module computes at once, while its kernels write the states after each token. All by name of the state.

    Attributes:
        before: before the pass, to be left as they are.
        after: where those after each token go. Meanwhile the last one is the state of the layer: with what was before if it is that of a
            convolution, which the layer itself moves on.
        written: what kernels have written.
    """

    before: Mapping[str, torch.Tensor]
    after: Mapping[str, Sequence[torch.Tensor]]
    written: set[str]


def kept_pass(layer: object) -> KeptPass | None:
    """Return what a layer keeps of the pass that is computed at the moment, where kernels are to write it."""
    found: KeptPass | None = getattr(layer, _KEPT, None)
    return found


def moves_states(module: nn.Module) -> bool:
    """Return whether a module moves states of a cache on itself."""
    owner: Any = type(module)  # mypy takes a module's __hash__ for that of its class
    source = source_of(owner)
    return "update_conv_state(" in source or "update_recurrent_state(" in source


def why_not_split(model: PreTrainedModel, cache: Cache, names: Sequence[str]) -> str | None:
    """Return why a model's passes over `cache`, an empty one of its own, cannot be split; `names` are the kinds of layers, where known."""
    if makes_own_cache(model):
        return f"{type(model).__name__} makes a cache of its own in its first forward pass"
    moved = {getattr(module, "layer_idx", None) for module in model.modules() if moves_states(module)}
    for number, layer in enumerate(cache.layers):
        # transformers 5.17 gives a layer of this kind to layers of experts alone as well, which keep no state.
        if has_states(layer) and number not in moved and (names[number] if number < len(names) else "") not in ("moe", "mlp"):
            return f"layer {number} keeps a state that none of its modules moves on in a known way"
    return None


def split_passes(model: PreTrainedModel) -> None:
    """Let the modules that move states on compute a pass token by token, where it has to be."""
    for module in model.modules():
        if moves_states(module) and not passes_are_split(module):
            cls: Any = type(module)
            module.__class__ = _split(cls)


def passes_are_split(module: nn.Module) -> bool:
    return hasattr(type(module), _TRAITS)


@dataclass(frozen=True, slots=True)
class _Traits:
    """What a module does with states.

    Attributes:
        states: that it moves on, by name and number.
        goes_on: whether a pass over several tokens goes on from them.
    """

    states: Sequence[tuple[str, int]]
    goes_on: bool


@functools.lru_cache(maxsize=512)
def _split(cls: Any) -> type[nn.Module]:
    own = cls.forward

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = next((each for each in (*args, *kwargs.values()) if isinstance(each, Cache)), None)
        if cache is None or torch.compiler.is_compiling():
            return own(self, *args, **kwargs)
        tokens = next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)).shape[1]
        if tokens == 1:
            return own(self, *args, **kwargs)
        traits: _Traits | None = vars(self).get(_TRAITS)
        if traits is None:
            traits = vars(self)[_TRAITS] = _traits(functools.partial(own, self), self.layer_idx, cache, tokens, args, kwargs)
        layer = cache.layers[self.layer_idx]
        if not all(layer.has_previous_state[index] for _, index in traits.states):
            return own(self, *args, **kwargs)
        run = functools.partial(own, self)
        if not 1 < tokens <= past_tokens(layer):
            return run(*args, **kwargs) if traits.goes_on else _one_by_one(run, tokens, args, kwargs)
        past = vars(layer)[_PAST]
        after = {state: [past[(*state, token)] for token in range(tokens)] for state in traits.states}
        if getattr(cls, KEEPS_PAST, False) and len({name for name, _ in after}) == len(after):
            with _states_of(layer, {state: places[-1] for state, places in after.items()}) as before:
                found = _at_once(run, layer, before, after, args, kwargs)
            if found is not None:
                return found
        with _states_of(layer, {}):
            return _one_by_one(run, tokens, args, kwargs, functools.partial(_moved_on, layer, after))

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {"forward": forward, _TRAITS: None, **names})


@contextmanager
def _states_of(layer: Any, states: Mapping[tuple[str, int], torch.Tensor]) -> Iterator[dict[tuple[str, int], torch.Tensor]]:
    """Let a layer have other states while the body runs; yield its own, which it has again afterwards."""
    own = {(name, index): tensor for name, index, tensor in _held(layer)}
    try:
        for (name, index), tensor in states.items():
            getattr(layer, name)[index] = tensor
        yield own
    finally:
        for (name, index), tensor in own.items():
            getattr(layer, name)[index] = tensor


def _at_once(run: Callable[..., Any], layer: Any, before: Any, after: Any, args: Any, kwargs: Any) -> Any:
    """Return the outputs of a pass whose states kernels write after each token; None where they do not."""
    for (name, index), places in after.items():
        if name == CONVOLUTIONS:
            places[-1].copy_(before[name, index])
    kept = KeptPass({name: before[name, index] for name, index in after}, {name: places for (name, _), places in after.items()}, set())
    setattr(layer, _KEPT, kept)
    try:
        with _LinearsByRow():
            found = run(*args, **kwargs)
    except NotKeptError:
        return None
    finally:
        delattr(layer, _KEPT)
    return found if kept.written == kept.after.keys() else None


class _LinearsByRow(TorchFunctionMode):
    """Lets PyTorch compute linear layers in float32 token by token: its products of one row and of several differ in rounding."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and len(args) > 1 and args[0].dim() == 3 and args[0].dtype == args[1].dtype == torch.float32:
            return torch.cat([func(row, *args[1:], **(kwargs or {})) for row in args[0].split(1, dim=1)], dim=1)
        return func(*args, **(kwargs or {}))


def _moved_on(layer: Any, after: Mapping[tuple[str, int], Sequence[torch.Tensor]], token: int) -> None:
    """Let the states after a token go elsewhere than those before it, where the layer now begins."""
    for (name, index), places in after.items():
        places[token].copy_(getattr(layer, name)[index])
        getattr(layer, name)[index] = places[token]


def _one_by_one(run: Callable[..., Any], tokens: int, args: Any, kwargs: Any, before_each: Callable[[int], None] | None = None) -> Any:
    outputs = []
    for token in range(tokens):
        if before_each is not None:
            before_each(token)
        place = slice(token, token + 1)
        outputs.append(run(*_taken(args, tokens, place), **_taken(kwargs, tokens, place)))
    return _joined(outputs)


@torch.no_grad()
def _traits(forward: Callable[..., Any], number: int, cache: Cache, tokens: int, args: Any, kwargs: Any) -> _Traits:
    """Find out what a module does with states, by a few of the tokens that it is given, in a layer of their own."""

    real: Any = cache.layers[number]

    def run(*parts: Sequence[int]) -> tuple[list[Any], Any]:
        scratch = copy.copy(cache)
        scratch.layers = list(cache.layers)
        scratch.layers[number] = layer = LinearAttentionLayer(number_of_states=real.number_of_states)
        own = [tuple(scratch if each is cache else each for each in args), {k: scratch if v is cache else v for k, v in kwargs.items()}]
        places = [torch.tensor([token % tokens for token in part]) for part in parts]
        return [forward(*_taken(own[0], tokens, place), **_taken(own[1], tokens, place)) for place in places], layer

    half = _PROBED // 2
    (whole,), layer = run(range(_PROBED))
    (_, second), _ = run(range(half), range(half, _PROBED))
    states = tuple((name, index) for name, index, _ in _held(layer))
    return _Traits(states, all(_agree(x[:, half:], y) for x, y in zip(_tensors(whole), _tensors(second), strict=True)))


def _taken(arguments: Any, tokens: int, place: Any) -> Any:
    """Return arguments with some of the tokens of each tensor that has them in its second dimension."""
    if isinstance(arguments, torch.Tensor):
        return arguments[:, place] if arguments.dim() > 1 and arguments.shape[1] == tokens else arguments
    if isinstance(arguments, tuple):
        return tuple(_taken(each, tokens, place) for each in arguments)
    return {name: _taken(each, tokens, place) for name, each in arguments.items()} if isinstance(arguments, dict) else arguments


def _joined(outputs: Sequence[Any]) -> Any:
    if isinstance(outputs[0], torch.Tensor):
        return torch.cat(list(outputs), dim=1)
    return tuple(None if each[0] is None else _joined(each) for each in zip(*outputs, strict=True))


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else [each for each in outputs if each is not None]


def _agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    difference = (found.double() - expected.double()).norm()
    return bool(difference <= _TOLERANCE.get(expected.dtype, _ROUNDED_TOLERANCE) * expected.double().norm())
