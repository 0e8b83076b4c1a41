"""Replay the decode steps of a model on the CPU as native programs.

The first two steps of a kind run layer by layer and are recorded (recording.py), then fitted to each other (fitting.py) and turned into a
program (lowering.py, native_step.py). A program is compared with the same step layer by layer before its results are used. A kind is a
number of sequences and tokens, the form of the cache, and which windows are full. A step that cannot be replayed runs layer by layer, and
the reason is logged once.

The cache stays transformers' own: a program writes new tokens to buffers with room for more, and the tensors of the cache become views of
them. A cache that something else has changed is copied to buffers again.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
import operator
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils.generic import ModelOutput

from moegraft.cpu_backend import Runtime
from moegraft.operators.draft import DraftSwitch
from moegraft.operators.step_program.fitting import (
    FittedStep,
    RecordedStep,
    StateName,
    cache_counts,
    cache_tensors,
    fit,
    storage_bytes,
)
from moegraft.operators.step_program.lowering import CacheTensor, ForeignCacheError, Lowering
from moegraft.operators.step_program.native_step import ARENA, NativeStep, PythonCall
from moegraft.operators.step_program.recording import NotRecordableError, Recorder

logger = logging.getLogger(__name__)
Forward = Callable[..., Any]
CACHE = "past_key_values"
MAX_TOKENS = 8  # of a step, for each of at most as many sequences; more is a prompt
VERIFIED_STEPS = 2  # of each program, computed both ways
RECORDINGS = 4  # of one kind before it is given up
MAX_KINDS = 16  # of which programs are kept
ROOM = 256  # tokens by which the buffers of a cache grow at least
EXACT_TOLERANCE = 1e-5  # relative, of the logits, where nothing is quantised
ROUNDED_TOLERANCE = 2e-2  # 8-bit activations turn a last bit of a norm into 8e-3 (measured on tiny models)
_PLAIN_ARGUMENTS = {
    "use_cache": (True, None),
    "return_dict": (True, None),
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
}
_LENGTH = re.compile("window|chunk|block|position|context|length|seq|topk|top_k|stride|factor")  # in names of a config
_LIBRARIES = ("torch", "transformers", "moegraft")
# Of a configuration, read in each forward pass.
_SETTINGS = ("output_attentions", "output_hidden_states", "output_router_logits", "use_cache", "_attn_implementation")
# Once other outputs were asked for, transformers leaves hooks on the model, which do nothing while none are.
_CAPTURING = "transformers.utils.output_capturing"
_MOST_INPUT_NUMBERS = 4096  # of a tensor that is copied for each step


class StepPrograms:
    """The native programs of one model's decode steps; the model calls `forward` for every forward pass.

    Args:
        runtime: the runtime of the model's operators, whose kernel calls are recorded.
        draft: the switch that is on while a draft is drawn; drafts run layer by layer.
    """

    def __init__(self, runtime: Runtime, draft: DraftSwitch) -> None:
        self._runtime = runtime
        self._draft = draft
        self._lock = threading.Lock()
        self._kinds: dict[object, _Kind] = {}
        self._caches: weakref.WeakKeyDictionary[Any, _CacheBuffers] = weakref.WeakKeyDictionary()
        self._state: _ModelState | None = None
        self._logged: set[str] = set()
        self._thresholds: list[int] | None = None
        self._after_prompt = True  # or after another pass that was no step
        self.replayed = 0  # steps

    def forward(self, model: PreTrainedModel, plain: Forward, args: Sequence[Any], arguments: Mapping[str, Any], *, drafting: bool) -> Any:
        """Return the result of `plain(*args, **arguments)`, the model's own forward pass, or of its replay."""
        step = None if args else self._described(model, arguments)
        if step is None or self._lock.locked():  # another thread computes a step, which nothing waits for
            self._after_prompt = True
            return plain(*args, **arguments)
        with self._lock:  # an interrupt right after `acquire` would leave it locked
            return self._step(model, step, partial(plain, **arguments), plain)

    def generation(self, model: PreTrainedModel, args: Sequence[Any], arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of `generate`: any cache that grows will do."""
        return arguments

    def fixed_cache(self, model: PreTrainedModel, cache: Any, tokens: int) -> Any:
        """Return `cache`: programs need none of fixed size."""
        return cache

    def grown_cache(self, model: PreTrainedModel, cache: Any) -> Any:
        """Return `cache`, which can grow."""
        return cache

    def release(self) -> None:
        """Free the programs; the model computes no more."""
        self._kinds.clear()
        self._caches.clear()

    def statistics(self) -> dict[str, object]:
        """Return the number of replayed steps and programs, and why other steps are computed as usual."""
        ready = sum(kind.program is not None for kind in self._kinds.values())
        return {"replayed_steps": self.replayed, "programs": ready, "reasons": sorted(self._logged)}

    def _described(self, model: PreTrainedModel, arguments: Mapping[str, Any]) -> _Step | None:
        """Return a step that may be replayed; None for one that is computed as usual."""
        ids, cache = arguments.get("input_ids"), arguments.get(CACHE)
        if (
            type(ids) is not torch.Tensor
            or ids.dim() != 2
            or not 0 < ids.shape[1] <= MAX_TOKENS
            or not 0 < ids.shape[0] <= MAX_TOKENS
            or type(cache) is not DynamicCache
            or not ids.is_cpu
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or self._draft.settings is not None
            or torch._C._len_torch_dispatch_stack()  # something else is watching
            or getattr(cache, "offloading", False)
        ):
            return None
        layers: list[Any] = cache.layers
        position = cache.get_seq_length() if layers else 0
        if position == 0 or any(getattr(layer, "record_past", False) for layer in layers):
            return None
        inputs: dict[str, torch.Tensor] = {"input_ids": ids}
        settings: dict[str, object] = {}
        for name, value in arguments.items():
            if name in ("input_ids", CACHE) or value is None:
                continue
            if name in _PLAIN_ARGUMENTS:
                if value not in _PLAIN_ARGUMENTS[name]:
                    return None
                settings[name] = value
            elif name == "attention_mask":
                if type(value) is not torch.Tensor or value.shape != (ids.shape[0], position + ids.shape[1]):
                    return None
                if not value.all():  # where it shows everything, the model needs none
                    plain = model.config._attn_implementation == "sdpa" and all(type(layer) is DynamicLayer for layer in layers)
                    if ids.shape[1] > 1 or not plain:
                        return None
                    inputs[name] = value.bool()[:, None, None]  # the form in which a model passes it on without reading it
            elif isinstance(value, bool | int | float | str):
                settings[name] = value
            elif type(value) is torch.Tensor and value.is_cpu and value.numel() <= _MOST_INPUT_NUMBERS:  # positions, types of tokens
                inputs[name] = value
            else:
                return None
        windows = [layer for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)]
        full = tuple(layer.cumulative_length >= layer.sliding_window - 1 for layer in windows)
        if any(0 < layer.sliding_window - 1 - layer.cumulative_length < ids.shape[1] for layer in windows):
            return None  # the step fills a window and drops the tokens that are too many
        configs = {id(each): each for each in (model.config, model.config.get_text_config())}.values()
        shapes = tuple((name, value.dtype, None if name == "attention_mask" else value.shape) for name, value in inputs.items())
        modes = torch.is_inference_mode_enabled(), model.training
        read = tuple(getattr(each, name, None) for each in configs for name in _SETTINGS)
        if self._thresholds is None:
            self._thresholds = thresholds(model.config)
        total = position + ids.shape[1]
        passed = bisect.bisect(self._thresholds, total)
        if {total, total + 1} & set(self._thresholds):
            return None  # at the edge itself models differ by a token
        kind = shapes, tuple(settings.items()), full, passed, tuple(map(type, layers)), modes, read
        return _Step(kind, cache, position, inputs, settings)

    def _step(self, model: PreTrainedModel, step: _Step, usual: Callable[[], Any], plain: Forward) -> Any:
        state = self._state
        fully, self._after_prompt = self._after_prompt, False
        if state is None or state.changed(fully=fully):
            self._kinds.clear()
            state = self._state = _ModelState(model)
        if state.obstacle is not None:
            self._log(state.obstacle)
            return usual()
        kind = self._kinds.pop(step.kind, None) or _Kind()
        self._kinds[step.kind] = kind  # the latest last
        if len(self._kinds) > MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        if kind.given_up:
            return usual()
        try:
            if kind.program is None:
                return self._record(kind, step, plain)
            buffers = self._buffers(step.cache)
            if step.position > kind.verified_until or kind.verified < VERIFIED_STEPS:
                return self._verify(kind, kind.program, buffers, step, usual)
            outputs = kind.program.run(buffers, step, advance=True)
        except ForeignCacheError as error:
            self._log(str(error))
            return usual()
        except NotRecordableError as error:
            kind.give_up()
            self._log(str(error))
            return usual()
        self.replayed += 1
        return outputs

    def _record(self, kind: _Kind, step: _Step, plain: Forward) -> Any:
        """Compute a step as usual and record it; two recordings make the program."""
        cache = step.cache
        recorder = Recorder(self._runtime)
        tensors = {name: value.clone(memory_format=torch.contiguous_format) for name, value in step.inputs.items()}
        inputs = {name: recorder.memory(value) for name, value in tensors.items()}
        counts = cache_counts(cache)
        before = {name: recorder.memory(value) for name, value in cache_tensors(cache)}
        with recorder.recorded() as recording:
            outputs = plain(**tensors, **step.settings, **{CACHE: cache})
        after = {name: recorder.memory(value, produced=True) for name, value in cache_tensors(cache)}
        changed = {name: (counts[name], value) for name, value in cache_counts(cache).items() if name in counts}
        first, kind.recorded = kind.recorded, None
        kind.recordings += 1
        try:
            found = RecordedStep(step.position, recording, inputs, before, after, changed, _outputs(outputs, cache, recorder))
            recording.release((*inputs.values(), *before.values()))
            if first is None or first.position == step.position:
                kind.recorded = found
                kind.recordings -= first is not None
                return outputs
            started = time.perf_counter()
            fitted = fit(first, found)
            program = _StepProgram(fitted, self._runtime, type(outputs), step.position)
        except (NotRecordableError, ValueError) as error:  # the latter: an operation that a program refuses
            if kind.recordings >= RECORDINGS:
                kind.give_up()
                self._log(str(error))
            elif first is not None:
                kind.recorded = found  # a window may have become full between the two
            return outputs
        kind.program = program
        assert self._state is not None, "made before any step is recorded"
        self._state.rely_on(fitted.constants.values())
        logger.info("decode steps are native programs: %s, made in %.0f ms", program.describe(), 1e3 * (time.perf_counter() - started))
        return outputs

    def _verify(self, kind: _Kind, program: _StepProgram, buffers: _CacheBuffers, step: _Step, usual: Callable[[], Any]) -> Any:
        """Compute a step both ways, and give the program up where they differ."""
        failure = None
        with torch.inference_mode():  # the states may have been made in it
            states = program.states(step.cache)
            kept = [tensor.clone() for tensor in states]
        try:
            found = program.run(buffers, step, advance=False)["logits"]
        except (ValueError, RuntimeError) as error:
            failure = f"a program cannot run: {error}"
        with torch.inference_mode():
            for tensor, old in zip(states, kept, strict=True):
                tensor.copy_(old)
        expected = usual()
        if failure is None:
            wanted = expected["logits"].float()
            off = float((found.float() - wanted).norm() / wanted.norm())
            logger.debug("a program's logits differ by %.1e", off)
            if not off <= (EXACT_TOLERANCE if program.exact else ROUNDED_TOLERANCE):
                failure = f"a program's logits differ by {off:.1e} from the model's"
        if failure is not None:
            kind.give_up()
            self._log(failure)
        else:
            kind.verified += 1
            kind.verified_until = max(kind.verified_until, 2 * step.position)
        return expected

    def _buffers(self, cache: Any) -> _CacheBuffers:
        found = self._caches.get(cache)
        if found is None:
            found = self._caches[cache] = _CacheBuffers()
            weakref.finalize(cache, _forget, weakref.ref(self), found.serial)
        return found

    def forget(self, serial: int) -> None:
        """Free what programs hold of a cache that is gone."""
        for kind in list(self._kinds.values()):
            if kind.program is not None:
                kind.program.forget(serial)

    def _log(self, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            logger.info("decode steps run layer by layer: %s", reason)


def _forget(steps: weakref.ref[StepPrograms], serial: int) -> None:
    found = steps()
    if found is not None:
        found.forget(serial)


@dataclass(frozen=True, slots=True)
class _Step:
    """The arguments of a forward pass that may be replayed.

    Attributes:
        kind: what its program depends on.
        position: tokens in the cache.
        inputs: the tensors among the arguments.
        settings: the other arguments, but the cache.
    """

    kind: object
    cache: DynamicCache
    position: int
    inputs: Mapping[str, torch.Tensor]
    settings: Mapping[str, Any]


@dataclass(slots=True)
class _Kind:
    """The steps of one kind.

    Attributes:
        verified: steps that were computed both ways.
        verified_until: the position up to which that is enough; numbers that seem linear may not be so for ever.
    """

    recorded: RecordedStep | None = None
    recordings: int = 0
    program: _StepProgram | None = None
    verified: int = 0
    verified_until: int = 0
    given_up: bool = False

    def give_up(self) -> None:
        self.recorded = self.program = None
        self.given_up = True


class _StepProgram:
    """The program of one kind of step, bound to one cache at a time."""

    def __init__(self, fitted: FittedStep, runtime: Runtime, output_type: type, position: int) -> None:
        self._fitted = fitted
        self._runtime = runtime
        self._output_type = output_type
        self._grown = _grown_tensors(fitted)
        self._states = [
            name for name, place in fitted.before.items() if fitted.after[name].storage == place.storage and not self._is_grown(name)
        ]
        for name, place in fitted.after.items():
            if not self._is_grown(name) and place.storage != fitted.before[name].storage:
                raise NotRecordableError(f"a tensor of the cache ({name[1]}) is replaced in each step")
        self._lowering = Lowering(fitted, self._grown)
        self.exact = all(
            weights in ("float32", "float64")
            for node in self._lowering.nodes
            if node.kind in ("linear", "experts")
            for weights in [(node.payload[0] if node.kind == "linear" else node.payload).weight_type]
        )
        self._logits = self._fitted.outputs["logits"]
        self._bound: tuple[int, int] | None = None  # serial and version of the cache's buffers
        self._bound_states: list[torch.Tensor] = []
        self._tensors: dict[int, torch.Tensor] = {}
        self._checked = (0, -1)
        self._last_position = -1
        self._build(max(1024, 2 * position))

    def describe(self) -> str:
        kinds = [node.kind for node in self._lowering.nodes]
        calls = sorted({node.name for node in self._lowering.nodes if node.kind == "call"})
        others = f", {kinds.count('call')} calls of PyTorch ({', '.join(calls)})" if calls else ""
        return f"{len(kinds)} operations{others}, {self._native.arena_bytes / 1e6:.1f} MB"

    def states(self, cache: Any) -> list[torch.Tensor]:
        """Return the tensors of a cache that a step changes in place."""
        found = []
        for number, attribute, *key in self._states:
            value = vars(cache.layers[number])[attribute]
            found.append(value[key[0]] if key else value)
        return found

    def _has_bound(self, states: Sequence[torch.Tensor]) -> bool:
        return len(states) == len(self._bound_states) and all(map(operator.is_, states, self._bound_states))

    def run(self, buffers: _CacheBuffers, step: _Step, *, advance: bool) -> Any:
        """Run the step; `advance`: the cache then holds the new tokens."""
        cache, position = step.cache, step.position
        if position > self._last_position:
            self._build(2 * position)
        tokens = step.inputs["input_ids"].shape[1]
        held = buffers.hold(cache, self._grown, tokens)
        bound = held and self._bound == (buffers.serial, buffers.version) and self._has_bound(self.states(cache))
        if not bound or not self._checked[0] <= position <= self._checked[1]:
            self._bind(cache, buffers, position, tokens)
        for name, value in step.inputs.items():
            self._inputs[name][: value.numel()].copy_(value.reshape(-1))
        native = self._native
        for part in native.parts:
            if isinstance(part, PythonCall):
                native.call(part, self._tensors, position, buffers.room)
            else:
                native.native.run(position, *part)
        if advance:
            buffers.advance(cache, tokens, self._fitted.counts)
        logits = native.view(self._logits, self._tensors, position, buffers.room).clone()
        return self._output_type(
            **{name: cache if name == CACHE else logits if name == "logits" else None for name in self._fitted.outputs}
        )

    def _is_grown(self, name: StateName) -> bool:
        return any(tensor.name == name for tensor in self._grown)

    def _build(self, last_position: int) -> None:
        self._native = NativeStep(self._lowering, self._runtime, [self._logits], last_position)
        self._last_position = last_position
        self._arena = torch.empty(self._native.arena_bytes, dtype=torch.uint8)
        self._inputs = {
            name: torch.empty(math.prod(size.at(last_position) for size in place.sizes), dtype=place.dtype)
            for name, place in self._fitted.inputs.items()
        }
        self._bound = None

    def forget(self, serial: int) -> None:
        """Let go of the buffers of a cache that is gone."""
        if self._bound is not None and self._bound[0] == serial:
            self._bound = None
            self._bound_states = []
            self._tensors = {}

    def _bind(self, cache: Any, buffers: _CacheBuffers, position: int, tokens: int) -> None:
        native, fitted = self._native, self._fitted
        tensors: dict[int, torch.Tensor] = {}
        origins: dict[int, int] = {}
        held = dict(cache_tensors(cache))
        by_storage = {tensor.before: tensor for tensor in self._grown}
        others = {place.storage: self._inputs[name] for name, place in fitted.inputs.items()} | dict(fitted.constants)
        states = {fitted.before[name].storage: (held[name], fitted.before[name]) for name in self._states}
        for storage, buffer in native.buffers.items():
            grown = by_storage.get(storage)
            if grown is not None:
                rows = buffers.tensors[grown.name]
                row_bytes = rows.buffer.stride(grown.dim) * rows.buffer.element_size()
                origins[buffer] = (rows.start - grown.start_slope * position) * row_bytes
                tensors[buffer] = storage_bytes(rows.buffer)
            elif storage in states:
                tensor, recorded = states[storage]
                sizes, strides = (tuple(each.base for each in numbers) for numbers in (recorded.sizes, recorded.strides))
                if (tensor.dtype, tensor.shape, tensor.stride()) != (recorded.dtype, sizes, strides):
                    raise ForeignCacheError("a cache has its states in another form than the cache of the recording")
                origins[buffer] = (int(tensor.storage_offset()) - recorded.offset.base) * tensor.element_size()
                tensors[buffer] = storage_bytes(tensor)
            else:
                tensors[buffer] = storage_bytes(others[storage])
        tensors[ARENA] = self._arena
        native.origins = origins
        for buffer, tensor in tensors.items():
            native.native.bind(buffer, tensor, origins.get(buffer, 0))
        last = min(position + buffers.steps_left(tokens), self._last_position)
        native.native.check(position, max(last, position), buffers.room)
        self._tensors = tensors
        self._checked = position, last
        self._bound_states = self.states(cache)
        self._bound = buffers.serial, buffers.version


@dataclass(slots=True)
class _Rows:
    """A tensor of a cache in a buffer with room; `view` is what the cache holds."""

    buffer: torch.Tensor
    dim: int
    start: int
    length: int
    start_slope: int
    view: torch.Tensor


@dataclass(slots=True)
class _CacheBuffers:
    """The buffers of one cache.

    Attributes:
        serial: that no other cache's buffers have.
        version: changes with every buffer that is new or has moved its contents.
        room: tokens that each buffer has room for.
    """

    serial: int = field(default_factory=itertools.count().__next__)
    tensors: dict[StateName, _Rows] = field(default_factory=dict)
    version: int = 0
    room: int = 0

    def hold(self, cache: Any, grown: Sequence[CacheTensor], tokens: int) -> bool:
        """Make sure that the grown tensors are in buffers with room for `tokens` more; return whether they were."""
        layers = cache.layers
        for each in grown:
            rows = self.tensors.get(each.name)
            if (
                rows is None
                or vars(layers[each.name[0]])[each.name[1]] is not rows.view
                or rows.start + rows.length + tokens > self.room
                or rows.start_slope != each.start_slope
            ):
                break
        else:
            return True
        held = {each.name: vars(layers[each.name[0]])[each.name[1]] for each in grown}
        for each in grown:
            each.require_form(held[each.name])
        self.version += 1  # first: programs bind again even if this is interrupted
        needed = max(held[each.name].shape[each.dim] for each in grown) + tokens
        if needed + 1 > self.room:
            self.room = -(-max(needed + needed // 4, needed + ROOM) // ROOM) * ROOM
        for each in grown:
            content = held[each.name]
            length = content.shape[each.dim]
            sizes = list(content.shape)
            sizes[each.dim] = self.room
            buffer = content.new_empty(sizes)
            view = buffer.narrow(each.dim, 0, length)
            view.copy_(content)
            self.tensors[each.name] = _Rows(buffer, each.dim, 0, length, each.start_slope, view)
            setattr(layers[each.name[0]], str(each.name[1]), view)
        return False

    def steps_left(self, tokens: int) -> int:
        """Return the positions by which a step may still move on before a buffer is full."""
        return min(self.room - rows.start - rows.length - tokens for rows in self.tensors.values())

    def advance(self, cache: Any, tokens: int, counts: Mapping[StateName, int]) -> None:
        """Let the cache show the tokens that a step has written."""
        layers = cache.layers
        for name, rows in self.tensors.items():
            if rows.start_slope:
                rows.start += tokens
            else:
                rows.length += tokens
            rows.view = rows.buffer.narrow(rows.dim, rows.start, rows.length)
            setattr(layers[name[0]], str(name[1]), rows.view)
        for name, step in counts.items():
            if step:
                layer = layers[name[0]]
                held = vars(layer)
                if len(name) == 2:
                    held[str(name[1])] += step
                else:
                    held[str(name[1])][name[2]] += step


def _grown_tensors(fitted: FittedStep) -> list[CacheTensor]:
    """Return the tensors of the cache that a step appends to.

    Raises:
        NotRecordableError: one changes in another way.
    """
    appended = {call.outputs[0].storage: call for call in fitted.calls if call.name == "cat.default" and call.outputs}
    found = []
    for name, after in fitted.after.items():
        before = fitted.before[name]
        call = appended.get(after.storage)
        if after.storage == before.storage or call is None:
            continue
        pieces = call.leaves[:-1] if isinstance(call.leaves[-1], int) else call.leaves
        dim = call.leaves[-1] if isinstance(call.leaves[-1], int) else 0
        out = call.outputs[0]
        dim %= out.dims
        if len(pieces) != 2 or pieces[0].storage != before.storage or len(name) != 2:
            raise NotRecordableError(f"a tensor of the cache ({name[1]}) is not appended to")
        row = out.strides[dim]
        if row.slope or (after.offset.slope and not row.base):
            raise NotRecordableError(f"a tensor of the cache ({name[1]}) grows in another way than by tokens")
        dropped = after.offset
        if dropped.slope or dropped.base % row.base:
            raise NotRecordableError(f"a tensor of the cache ({name[1]}) drops another number of tokens in each step")
        tokens, gone = pieces[1].sizes[dim].base, dropped.base // row.base
        if gone not in (0, tokens):
            raise NotRecordableError("a window is about to be full")
        found.append(CacheTensor(name, before.storage, after.storage, dim, out.sizes, int(gone > 0), before.dtype))
    return found


def thresholds(config: PretrainedConfig) -> list[int]:
    """Return the positions at which a model may begin to compute in another way: its config's windows, chunks, lengths and the like.

    A program is only used between two of them; numbers that are linear on one side need not be so on the other.
    """

    def numbers(values: Mapping[str, Any]) -> Iterator[int]:
        for name, value in values.items():
            if isinstance(value, Mapping):
                yield from numbers(value)
            elif type(value) is int and value > MAX_TOKENS and _LENGTH.search(str(name)):
                yield value

    return sorted(set(numbers(config.get_text_config().to_dict())))


class _ModelState:
    """What the recordings of a model rely on: its modules, their parameters and the absence of hooks."""

    def __init__(self, model: PreTrainedModel) -> None:
        modules = list(model.modules())
        self._tables: list[dict[str, Any]] = [
            table for module in modules for table in (module._modules, module._parameters, module._buffers) if table
        ]
        self._copies = [dict(table) for table in self._tables]
        self._hooks = [table for module in modules for table in (module._forward_hooks, module._forward_pre_hooks)]
        self._tensors = [*model.parameters(), *model.buffers()]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self.obstacle = "its modules have hooks" if self._hooked() else None
        self._settings: list[tuple[dict[str, Any], str, Any]] = []
        # Attributes of modules that steps read: a forward pass put in the place of the class's, tensors that are no buffers.
        self._attributes = [(vars(module), "forward", vars(module).get("forward")) for module in modules]
        for module in modules:
            for name, value in vars(module).items():
                if name.startswith("_") or not isinstance(value, bool | int | float | str | None):
                    continue
                # Those of the libraries' own modules hardly ever change: they are compared once for each prompt.
                rarely = value is not None and type(module).__module__.partition(".")[0] in _LIBRARIES
                (self._settings if rarely else self._attributes).append((vars(module), name, value))
        self._modules = modules

    def rely_on(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notice as well when an attribute of a module that is one of `tensors`, or shares its memory, is replaced."""
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors} - {
            tensor.untyped_storage().data_ptr() for tensor in self._tensors
        }
        for module in self._modules:
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in addresses:
                    self._attributes.append((vars(module), name, value))

    def _hooked(self) -> bool:
        hooks = (hook for table in self._hooks if table for hook in table.values())
        return any(getattr(hook, "__module__", "") != _CAPTURING for hook in hooks) or bool(nn.modules.module._has_any_global_hook())

    def changed(self, *, fully: bool) -> bool:
        """Whether a module or a parameter was replaced, or a hook added or removed; `fully`: or an attribute of any module."""
        try:
            same = self._tables == self._copies
        except RuntimeError:  # two tensors were compared, of which one replaced the other
            same = False
        return (
            not same
            or any(table.get(name) is not value for table, name, value in self._attributes)
            or (fully and any(table.get(name) != value for table, name, value in self._settings))
            or [tensor.data_ptr() for tensor in self._tensors] != self._addresses
            or self._hooked() != (self.obstacle is not None)
        )


def _outputs(outputs: Any, cache: Any, recorder: Recorder) -> dict[str, Any]:
    """Return the outputs of a model with Memory for the logits.

    Raises:
        NotRecordableError: they have other tensors.
    """
    if not isinstance(outputs, ModelOutput) or not isinstance(outputs.get("logits"), torch.Tensor):
        raise NotRecordableError(f"the model returns {type(outputs).__name__}, not logits and a cache")
    found: dict[str, Any] = {}
    for name, value in outputs.items():
        if name == "logits":
            found[name] = recorder.memory(value, produced=True)
        elif value is cache:
            found[name] = None
        else:
            raise NotRecordableError(f"the model returns {name} as well")
    return found
