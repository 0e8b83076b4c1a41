"""Decode steps as captured CUDA graphs: how StepReplay (replay.py) captures and runs them, and the key-value caches that they need.

A step runs layer by layer and is captured afterwards. The next ones are computed both ways, with the same experts on the same devices: a
model that counts in Python gives wrong logits in one of them. A step is captured again, and compared, when a sliding window becomes full.
Steps are kept: a new text whose cache has the form of one that is gone gets its memory.
Whatever cannot be captured runs layer by layer, and the reason is logged once:

- drafts and their verification, whose steps differ in the number of tokens and in the experts that may run;
- texts that the server decodes as a batch, whose cache grows and shrinks with each that joins or leaves;
- prompts, and steps of more than `MAX_SEQUENCES` sequences, which gain more from a schedule for each layer;
- caches that grow or are quantised, and windows whose masks and positions the step is not given;
- experts without some of their neurons, several GPUs, and operators on the CPU, which a capture does not see.

Of all GPUs, only an NVIDIA H100 has run this yet.
"""

from __future__ import annotations

import inspect
import logging
import statistics
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer
from transformers.masking_utils import create_chunked_causal_mask
from transformers.utils.generic import ModelOutput

from moegraft.operators.base import CACHE, call_arguments
from moegraft.operators.cache_form import layer_types
from moegraft.operators.decode.cache import adopt, buffers_of, makes_own_cache
from moegraft.operators.decode.loop import effective_config
from moegraft.operators.decode.pages import PagedCache
from moegraft.operators.decode.replay import Forward, FrozenModel, Kind, Step, StepReplay
from moegraft.operators.decode.states import TENSORS, SavedStates, has_states, keeps_nothing
from moegraft.operators.offload.devices.base import DeviceError
from moegraft.operators.offload.step_graph import StepGraph

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from moegraft.operators.draft import DraftSwitch
    from moegraft.operators.offload.model_experts import ModelEngines

logger = logging.getLogger(__name__)
DecodeMode = Literal["eager", "graph"]
MAX_SEQUENCES = 4  # of a step: beyond, deciding layer by layer gains more than it costs (an estimate, no GPU has measured it)
TOLERANCE = 0.05  # of the logits' norm: bfloat16 sums in another order, of the same experts on the same devices
CACHE_TENSORS = ("keys", "values", "cumulative_length")  # of a layer of attention
LENGTH_STEP = 256  # a cache has a multiple of so many tokens, so that the steps of one text serve others
DEFAULT_NEW_TOKENS = 20  # transformers' own, of a call that gives no length
KEPT_STEPS = 4  # of different forms: windows that are full or not, lengths of caches, sequences
TIMED_STEPS = 8  # of each mode; the first one, which warms up, is not counted


class CudaGraphs(StepReplay):
    """Captures decode steps, and runs them as graphs.

    Args:
        engines: of the model, open by the first forward pass.
    """

    CANNOT_RUN = "the first captured step failed: {}"
    DIFFERS = "a captured step gave logits that are {:.1%} off"

    def __init__(self, engines: ModelEngines, draft: DraftSwitch) -> None:
        forced = any(options.decode == "graph" for options in engines.options)
        super().__init__(draft, logging.WARNING if forced else logging.INFO)
        self._engines = engines
        self._tuner = None if forced else DecodeModeTuner()
        self._obstacle: str | None = None  # why no step will be captured
        self._obstacle_known = False
        self._steps: list[_CapturedStep] = []  # the last one used last

    def describe(self, model: PreTrainedModel, arguments: Mapping[str, Any]) -> Step | str | None:
        ids = arguments.get("input_ids")
        single = isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.shape[1] == 1 and not torch.is_grad_enabled()
        if not single or self._measured_slower:
            if self._tuner is not None:
                self._tuner.pause()
            return None
        reason = self._why_eager(model, arguments)
        if reason is not None:
            return reason
        if self._tuner is not None and self._tuner.next(next(iter(self._engines)).device.now_ms()) == "eager":
            return None
        return Step(_form(arguments), arguments[CACHE], {}, arguments)

    def record(self, kind: Kind, step: Step, plain: Forward, frozen: FrozenModel) -> Any:
        windows = _full_windows(step.cache)
        outputs = plain(**step.settings)  # also the warm-up that a capture needs
        if _full_windows(step.cache) != windows:
            return outputs  # it filled a window: the steps that follow are of another kind
        # A cache that is gone, and whose memory does not fit this one, was the last of its size: `generate` makes none smaller than before.
        for gone in [each for each in self._steps if each.memory.free] + self._steps[: -KEPT_STEPS + 1]:
            if gone in self._steps:
                self._steps.remove(gone)
                gone.release()
        try:
            self._steps.append(self._capture(step, plain))
        except RuntimeError as error:  # DeviceError among them, and lack of memory
            self.give_up(kind, str(error))
        return outputs

    def bind(self, kind: Kind, step: Step) -> _CapturedStep | None:
        for gone in [each for each in self._steps if not each.valid]:
            self._steps.remove(gone)
            gone.release()
        alike = (each for each in reversed(self._steps) if each.form == step.kind)
        found = next((each for each in alike if each.memory.owns(step.cache) or each.memory.adopt(step.cache)), None)
        if found is not None:
            self._steps.remove(found)
            self._steps.append(found)
        return found

    def run(self, kind: Kind, replay: _CapturedStep, step: Step, *, keep: bool) -> Any:
        put_back = None if keep else _saved(step.cache)
        try:
            return replay(step.settings)
        except DeviceError as error:
            self.give_up(kind, f"the device failed in a captured step: {error}")
            raise
        finally:
            if put_back is not None:
                put_back()

    def tolerance(self, replay: _CapturedStep) -> float:
        return TOLERANCE

    def compared(self) -> AbstractContextManager[None]:
        """Compute with the same experts on each device as the captured step of the body, which loads none.

        The CPU quantises activations and a GPU does not, so two splits of the work may differ by more than a mistake.
        """
        return self._engines.layers[0].engine.by_residency()

    def give_up(self, kind: Kind, reason: str) -> None:
        """Capture no more, of any kind: a cache of fixed size is then a loss."""
        super().give_up(kind, reason)
        self._obstacle, self._obstacle_known = reason, True
        self.release()

    def release(self) -> None:
        super().release()
        while self._steps:
            self._steps.pop().release()

    def statistics(self) -> dict[str, object]:
        """Return those of any backend, and the number of graphs."""
        return {**super().statistics(), "graphs": len(self._steps)}

    def generate(self, model: PreTrainedModel, stock: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what `stock(*args, **kwargs)`, the model's `generate`, returns.

        Where steps may be captured, and the caller gives no cache or one of moegraft's own, a cache of fixed size holds the keys and values
        during the call. Its contents are in the given cache, or in the one that is returned, afterwards.
        """
        arguments = call_arguments(stock, args, dict(kwargs))
        given, ids = arguments.get(CACHE), arguments.get("inputs", arguments.get("input_ids"))
        if given is not None and why_not_static(given) is None and self._may_capture(model):
            return stock(**{"disable_compile": True, **arguments})
        growing = given is not None and buffers_of(given) is not None
        if (
            not self.captures(model)
            or not isinstance(ids, torch.Tensor)
            or len(ids) > MAX_SEQUENCES
            or arguments.get("num_beams", 1) > 1
            or arguments.get("assistant_model") is not None
            or (not growing and _names_a_cache(arguments, model.generation_config))
        ):
            return stock(**arguments)
        config = effective_config(model, arguments)
        tokens = config.max_length if config.max_new_tokens is None else ids.shape[1] + config.max_new_tokens
        text_config = model.config.get_text_config(decoder=True)
        tokens = tokens or ids.shape[1] + DEFAULT_NEW_TOKENS
        fixed = to_static(given, text_config, -(-tokens // LENGTH_STEP) * LENGTH_STEP)
        if growing and given is not None:
            given.layers = []  # `fixed` has its contents: both would take twice the memory
        try:
            outputs = stock(**{**arguments, CACHE: fixed, "disable_compile": True})
        finally:
            if growing and given is not None:
                given.layers = to_dynamic(fixed, text_config).layers
        if isinstance(outputs, ModelOutput) and CACHE in outputs:
            outputs[CACHE] = given if growing else adopt(to_dynamic(fixed, text_config))
        return outputs

    @property
    def _measured_slower(self) -> bool:
        return self._tuner is not None and self._tuner.winner == "eager"

    def captures(self, model: PreTrainedModel) -> bool:
        """Return whether the decode steps of `generate` are captured, as far as is known by now."""
        return self._may_capture(model) and _has_static_form(model)

    def _may_capture(self, model: PreTrainedModel) -> bool:
        return self._why_never(model) is None and not self._measured_slower

    def _capture(self, step: Step, plain: Forward) -> _CapturedStep:
        layers = self._engines.layers
        calls, deferrals = [layer.last_call for layer in layers], [layer.deferral for layer in layers]
        graph = StepGraph(layers[0].engine, layers[0].layers, calls, deferrals)
        for layer, captured in zip(layers, graph.layers, strict=True):
            layer.captured = threading.get_ident(), captured
        try:
            memory = next((each.memory for each in self._steps if each.memory.owns(step.cache)), None)
            return _CapturedStep(graph, step, plain, memory or _CacheMemory(step.cache))
        finally:
            for layer in layers:
                layer.captured = None

    def _why_eager(self, model: PreTrainedModel, arguments: Mapping[str, Any]) -> str | None:
        """Why a step is not captured; an empty reason need not be logged."""
        never = self._why_never(model)
        if never is not None:
            return never
        if self.draft.settings is not None:
            return "tokens are drafted with fewer experts, and verified several at once"
        if len(arguments["input_ids"]) > MAX_SEQUENCES:
            return f"a step of {len(arguments['input_ids'])} sequences is scheduled layer by layer; up to {MAX_SEQUENCES} are captured"
        cache: Any = arguments.get(CACHE)
        reason = why_not_static(cache) or why_counted_in_python(arguments, cache)
        if reason is None and not _has_memory(cache):
            reason = ""  # the cache gets its memory with the first tokens
        return reason

    def _why_never(self, model: PreTrainedModel) -> str | None:
        if not self._obstacle_known:  # found once, when the model is complete
            self._obstacle_known = True
            self._obstacle = self._find_obstacle(model)
        return self._obstacle

    def _find_obstacle(self, model: PreTrainedModel) -> str | None:
        engines, layers = list(self._engines), self._engines.layers
        if not engines or (self._tuner is not None and engines[0].device.torch_device.type != "cuda"):
            return ""  # that everything runs on the CPU was logged; and where no GPU is, nothing can be measured
        if len(engines) > 1 or len(self._engines.options) > 1:
            return "the layers are on several GPUs, or their experts differ in size or options"
        own: Any = model  # torch types every attribute of a module as a tensor
        others = own.moegraft.operators  # in-place operators among them
        reason = next((operator.uncaptured for operator in others.values() if operator.uncaptured is not None), None)
        if reason is not None:
            return str(reason)
        if any(layer.sparse for layer in layers):
            return "neurons are left out of experts"
        if engines[0].device.torch_device.type != "cuda" and len(others) > len(layers):
            return "other operators compute on the CPU, where a capture does not see them"
        return None


class DecodeModeTuner:
    """Finds the faster of two ways to decode, layer by layer or captured, by timing a few tokens of each.

    It is asked before every step that could go either way; a step takes from its beginning to that of the next one.

    Attributes:
        winner: None until both modes were timed.
    """

    def __init__(self) -> None:
        self.winner: DecodeMode | None = None
        self._times_ms: dict[DecodeMode, list[float]] = {"eager": [], "graph": []}
        self._running: tuple[DecodeMode, float] | None = None

    def next(self, now_ms: float) -> DecodeMode:
        """Return the mode of the step that begins now."""
        if self.winner is not None:
            return self.winner
        if self._running is not None:
            mode, start_ms = self._running
            self._times_ms[mode].append(now_ms - start_ms)
        untimed = next((mode for mode, times in self._times_ms.items() if len(times) <= TIMED_STEPS), None)
        if untimed is None:
            eager_ms, graph_ms = (statistics.median(times[1:]) for times in self._times_ms.values())
            logger.debug("a token takes %.2f ms layer by layer and %.2f ms as a captured step", eager_ms, graph_ms)
            self.winner = "graph" if graph_ms < eager_ms else "eager"
        mode = untimed or self.winner or "eager"
        self._running = mode, now_ms
        return mode

    def pause(self) -> None:
        """Leave the time until the next step out: it does not belong to the last one."""
        self._running = None


class _CacheMemory:
    """The memory of a cache that captured steps write into: of the cache that it came with, or of one that has taken its place."""

    def __init__(self, cache: Any) -> None:
        self._owner = weakref.ref(cache)
        self._tensors = [held[key] for held, key in _cache_tensors(cache)]

    @property
    def free(self) -> bool:
        """Whether its cache is gone."""
        return self._owner() is None

    def owns(self, cache: Any) -> bool:
        """Return whether it is this cache's."""
        return all(held[key] is kept for (held, key), kept in zip(_cache_tensors(cache), self._tensors, strict=False))

    def adopt(self, cache: Any) -> bool:
        """Move a new cache's contents here, and make this its memory; False where it is still another's, or of another form."""
        places = _cache_tensors(cache)
        if not self.free or [_memory_form(held[key]) for held, key in places] != [*map(_memory_form, self._tensors)]:
            return False
        with torch.inference_mode():
            for (held, key), kept in zip(places, self._tensors, strict=True):
                kept.copy_(held[key])
        for (held, key), kept in zip(places, self._tensors, strict=True):
            held[key] = kept
        self._owner = weakref.ref(cache)
        return True


class _CapturedStep:
    """A captured step of the whole model; its inputs and outputs, and the memory of its cache, stay in place.

    Args:
        given: the arguments of the first step.
        memory: of its cache.
    """

    def __init__(self, graph: StepGraph, given: Step, forward: Forward, memory: _CacheMemory) -> None:
        self.form, cache = given.kind, given.cache
        self._graph = graph
        self.memory = memory
        leaves, tree = _flatten(given.settings)
        with torch.inference_mode(False):  # what inference mode makes cannot be written outside of it
            self._inputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._kind: type | None = None  # of the outputs, where they are a mapping, as transformers' are
        self._outputs: Any = None

        def step() -> None:
            outputs = forward(**tree_unflatten(self._inputs, tree), **{CACHE: cache})
            if isinstance(outputs, dict):  # without the cache, which would live as long as this
                self._kind, outputs = type(outputs), {name: None if name == CACHE else value for name, value in outputs.items()}
            self._outputs = outputs

        with _capturable_windows(cache):
            graph.capture(step)

    @property
    def valid(self) -> bool:
        """Whether the experts that it finds in slots are there."""
        return self._graph.valid

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        for kept, given in zip(self._inputs, _flatten(arguments)[0], strict=True):
            if isinstance(kept, torch.Tensor):
                kept.copy_(given, non_blocking=True)
        self._graph.replay()
        for layer in _windows(arguments[CACHE]):
            layer.cumulative_length_int += 1
        copied = _copied(self._outputs, arguments[CACHE])
        return copied if self._kind is None else self._kind(**copied)

    def release(self) -> None:
        self._outputs = None
        self._graph.release()


def _flatten(arguments: Mapping[str, Any]) -> tuple[list[Any], TreeSpec]:
    """The leaves and the form of all arguments but the cache."""
    return tree_flatten({name: value for name, value in arguments.items() if name != CACHE})


def _form(arguments: Mapping[str, Any]) -> tuple[TreeSpec, tuple[object, ...], tuple[type, ...], tuple[bool, ...]]:
    """What a captured step depends on besides its memory: forms of tensors, values of all else, kinds of layers, which windows are full."""
    leaves, form = _flatten(arguments)
    values = tuple((leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return form, values, tuple(map(type, arguments[CACHE].layers)), _full_windows(arguments[CACHE])


def _cache_tensors(cache: Any) -> list[tuple[dict[Any, torch.Tensor], Any]]:
    """Return the container of each tensor of a cache, and its key there."""
    places = [(vars(layer), name) for layer in cache.layers if isinstance(layer, StaticLayer) for name in CACHE_TENSORS]
    states = [getattr(layer, name) for layer in cache.layers if has_states(layer) for name in TENSORS]
    return places + [(held, key) for held in states for key, tensor in held.items() if tensor is not None]


def _memory_form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_inference()


def _copied(outputs: Any, cache: Any) -> Any:
    """Copy the outputs: the next step overwrites those that were captured."""
    if isinstance(outputs, dict):
        return type(outputs)(**{name: cache if name == CACHE else _copied(value, cache) for name, value in outputs.items()})
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, outputs)


# The cache. A captured step needs one whose memory stays, as that of recurrent states does, and whose counts Python need not keep. A
# sliding window counts its tokens in Python as well, and computes one way until it is full and another way from then on: a step is captured
# for each of the two, and every replay increments the count.


def why_not_static(cache: Any) -> str | None:
    """Return why a step on this cache cannot be replayed; None where it can."""
    if cache is None:
        return "there is no key-value cache"
    layers = getattr(cache, "layers", None) or []
    grows = isinstance(cache, PagedCache)  # whatever its layers hold
    others = sorted({type(layer).__name__ for layer in layers if grows or not _is_static(layer)})
    if others or not layers:
        kinds = f" of {', '.join(others)}" if others else ""
        return (
            f"the key-value cache ({type(cache).__name__}{kinds}) is not of fixed size: full attention, sliding windows and recurrent "
            "states; for a model that has no other layers, generate(..., cache_implementation='static') makes one"
        )
    if getattr(cache, "offloading", False):
        return "the key-value cache is offloaded"
    if not all(isinstance(getattr(layer, "cumulative_length", None), torch.Tensor) for layer in layers if isinstance(layer, StaticLayer)):
        return "this version of transformers does not count the tokens of a static cache in the cache"
    return None


def _is_static(layer: object) -> bool:
    """Whether the tensors of a layer have a fixed size."""
    if has_states(layer):  # beside a static window, transformers' own step fails once that is full
        return not isinstance(layer, DynamicLayer | StaticSlidingWindowLayer) and not getattr(layer, "record_past", False)
    return type(layer) in (StaticLayer, StaticSlidingWindowLayer) or keeps_nothing(layer)


def _has_memory(cache: Any) -> bool:
    """Whether all layers have got their memory, as they do with the first tokens."""
    return all(layer.is_initialized for layer in cache.layers if isinstance(layer, StaticLayer)) and bool(_cache_tensors(cache))


def why_counted_in_python(arguments: Mapping[str, Any], cache: Any) -> str | None:
    """Return why a step over sliding windows would count in Python where its tokens are; None where its arguments have the positions."""
    if not _windows(cache):
        return None
    mask = arguments.get("attention_mask")
    masks = list(mask.values()) if isinstance(mask, dict) else [mask]
    made = all(isinstance(each, torch.Tensor) and each.dim() == 4 for each in masks)
    if made and isinstance(arguments.get("position_ids"), torch.Tensor):
        return None
    return "the step is not given the masks of its sliding windows and its positions, as generate gives them"


def to_static(cache: DynamicCache | None, config: PretrainedConfig, tokens: int) -> StaticCache:
    """Return a static cache of `tokens` with the contents of `cache`, which has full attention, sliding windows and states alone."""
    made: Any = StaticCache(config=config, max_cache_len=tokens)
    layers: list[Any] = [] if cache is None else cache.layers  # of several kinds without a common type
    for number, layer in enumerate(layers):
        if not isinstance(layer, DynamicLayer) or not layer.is_initialized:
            continue
        made.update(layer.keys, layer.values, number)
        held = layer.keys
        gone = layer.cumulative_length - held.shape[2] if isinstance(layer, DynamicSlidingWindowLayer) and held is not None else 0
        if gone:  # the first place of a full window is for the token that leaves with the next, and is not read before
            for tensor in (made.layers[number].keys, made.layers[number].values):
                tensor.copy_(tensor.roll(1, dims=2))
            made.layers[number].cumulative_length_int += gone
    if cache is not None:
        SavedStates(cache).restore(made)
    return made  # type: ignore[no-any-return]


def to_dynamic(cache: StaticCache, config: PretrainedConfig) -> DynamicCache:
    """Return a cache that grows, with the contents of `cache`."""
    made: Any = DynamicCache(config=config)
    layers: list[Any] = cache.layers
    for number, layer in enumerate(layers):
        held: Any = layer if isinstance(layer, StaticLayer) else None  # transformers' members of it are optional
        if held is None or not held.is_initialized:
            continue
        window = isinstance(held, StaticSlidingWindowLayer)
        tokens = int(held.cumulative_length_int if window else held.cumulative_length)
        made.update(held.keys[:, :, :tokens].clone(), held.values[:, :, :tokens].clone(), number)
        if window:
            made.layers[number].cumulative_length = tokens
    SavedStates(cache).restore(made)
    return made  # type: ignore[no-any-return]


def _saved(cache: Any) -> Callable[[], None]:
    """Copy what a cache loses in a step: the number of tokens, windows, whose tokens leave, and states. The result puts it back."""
    counts = [(layer.cumulative_length, layer.cumulative_length.clone()) for layer in cache.layers if isinstance(layer, StaticLayer)]
    states = SavedStates(cache)
    windows = [(layer, layer.cumulative_length_int, layer.keys.clone(), layer.values.clone()) for layer in _windows(cache)]

    @torch.inference_mode()
    def put_back() -> None:
        states.restore(cache)
        for count, value in counts:
            count.copy_(value)
        for layer, number, keys, values in windows:
            layer.cumulative_length_int = number
            layer.keys.copy_(keys)
            layer.values.copy_(values)

    return put_back


@contextmanager
def _capturable_windows(cache: Any) -> Iterator[None]:
    """Move full windows on by copies alone while the body captures a step.

    transformers' own way makes a tensor out of a number, which a GPU that captures would have to wait for. Counts in Python are restored
    afterwards, as nothing is written while a step is captured.
    """
    windows = _windows(cache)
    counts = [layer.cumulative_length_int for layer in windows]
    for layer, full in zip(windows, _full_windows(cache), strict=True):
        if full:
            layer.update = partial(_update_full_window, layer)
    try:
        yield
    finally:
        for layer, count in zip(windows, counts, strict=True):
            vars(layer).pop("update", None)
            layer.cumulative_length_int = count


def _update_full_window(
    layer: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a token, (B, heads, 1, width) of keys and of values, to a full window; its first token leaves."""
    layer.cumulative_length_int += 1
    for held, new in ((layer.keys, keys), (layer.values, values)):
        held.copy_(torch.cat((held[:, :, 1:], new), dim=2))
    return layer.keys, layer.values


def _windows(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if isinstance(layer, StaticSlidingWindowLayer)]


def _full_windows(cache: Any) -> tuple[bool, ...]:
    """Which sliding windows are full."""
    return tuple(layer.cumulative_length_int >= layer.max_cache_len for layer in _windows(cache))


def _has_static_form(model: PreTrainedModel) -> bool:
    """Whether this model takes a static cache, of full attention, sliding windows and states alone."""
    config = model.config
    if makes_own_cache(model):
        return False
    if "chunked_attention" in layer_types(config) and "block_sequence_ids" not in inspect.signature(create_chunked_causal_mask).parameters:
        return False  # transformers 5.17 fails where it makes the masks of chunks for static caches
    try:
        cache = StaticCache(config=config, max_cache_len=1)
    except (KeyError, ValueError, TypeError, NotImplementedError):
        return False  # layers of a kind that has no static form
    return why_not_static(cache) is None


def _names_a_cache(arguments: Mapping[str, Any], default: Any) -> bool:
    """Whether the cache of `generate` is given, by its arguments or by its model's own configuration."""
    own = arguments.get("generation_config") or default
    named = arguments.get("cache_implementation") or getattr(own, "cache_implementation", None)
    return named is not None or arguments.get(CACHE) is not None or arguments.get("use_cache") is False
