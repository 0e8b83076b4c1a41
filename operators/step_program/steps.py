"""Replay the decode steps of a model on the CPU as native programs.

The first two steps of a kind run layer by layer and are recorded (recording.py), then fitted to each other (fitting.py) and turned into a
program (lowering.py, native_step.py). A program is compared with the same step layer by layer before its results are used. A kind is a
number of sequences and tokens, the form of the cache, and which windows are full. A step that cannot be replayed runs layer by layer, and
the reason is logged once.

The cache stays transformers' own: a program writes new tokens to buffers with room for more, and the tensors of the cache become views of
them. A cache that something else has changed is copied to buffers again. A cache in pages (paged_cache.py) has one pool, which its programs
read and write where it is.
"""

from __future__ import annotations

import bisect
import copy
import itertools
import logging
import math
import operator
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils.generic import ModelOutput

from moegraft.cpu_backend import Runtime
from moegraft.operators.base import MAX_REPLAYED_SEQUENCES, Operator
from moegraft.operators.draft import DraftSwitch
from moegraft.operators.paged_cache import PagedCache
from moegraft.operators.sparsity import SparseLayers
from moegraft.operators.step_program.fitting import (
    FittedStep,
    RecordedStep,
    StateName,
    cache_counts,
    cache_tensors,
    fit,
    holder,
    storage_bytes,
)
from moegraft.operators.step_program.lowering import CacheTensor, ForeignCacheError, Lowering
from moegraft.operators.step_program.native_step import ARENA, NativeStep, PythonCall
from moegraft.operators.step_program.recording import NotRecordableError, Recorder
from moegraft.operators.timeline import Timeline

logger = logging.getLogger(__name__)
Forward = Callable[..., Any]
CACHE = "past_key_values"
MAX_TOKENS = 8  # of each sequence in a step; more is a prompt
VERIFIED_STEPS = 2  # of each program, computed both ways
RECORDINGS = 4  # of one kind before it is given up
MAX_KINDS = 32  # of which programs are kept: a server's batch has two for each number of rows
MAX_CHANGES = 8  # of the model in one text, after which its steps are not recorded
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
_LIBRARIES = ("torch", "transformers", "moegraft", "builtins", "functools")
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
_DEPTH = 4  # of lists in lists, and the like
_COUNTED = 1  # reference that sys.getrefcount itself holds
_LONG = 1 << 20  # positions, for a cache of states alone
# Of a configuration, read in each forward pass.
_SETTINGS = ("output_attentions", "output_hidden_states", "output_router_logits", "use_cache", "_attn_implementation")
# Once other outputs were asked for, transformers leaves hooks on the model, which do nothing while none are.
_CAPTURING = "transformers.utils.output_capturing"
_MOST_INPUT_NUMBERS = 4096  # of a tensor that is copied for each step


class StepPrograms:
    """The native programs of one model's decode steps; the model calls `forward` for every forward pass.

    Args:
        runtime: the runtime of the model's operators, whose kernel calls are recorded.
        draft: the switch that is on while a draft is drawn.
        sparse: the layers that leave neurons out, if there are any.
    """

    def __init__(self, runtime: Runtime, draft: DraftSwitch, sparse: SparseLayers | None) -> None:
        self._runtime = runtime
        self._draft = draft
        self._sparse = sparse
        self._lock = threading.Lock()
        self._kinds: dict[object, _Kind] = {}
        self._caches: weakref.WeakKeyDictionary[Any, _CacheBuffers] = weakref.WeakKeyDictionary()
        self._state: _ModelState | None = None
        self._logged: set[str] = set()
        self._thresholds: list[int] | None = None
        self._after_prompt = True  # or after another pass that was no step
        self._changes = 0  # of the model since a prompt or a replayed step
        self.replayed = 0  # steps
        self._replayed_ns = 0
        self._kernels_ns = 0
        self.timeline: Timeline | None = None  # receives the steps and the kernels of programs while it is set

    def forward(self, model: PreTrainedModel, plain: Forward, args: Sequence[Any], arguments: Mapping[str, Any], *, drafting: bool) -> Any:
        """Return the result of `plain(*args, **arguments)`, the model's own forward pass, or of its replay."""
        started_ns = time.perf_counter_ns()
        step = None if args else self._described(model, arguments)
        if isinstance(step, str):
            self._log(step)
        if not isinstance(step, _Step) or self._lock.locked():  # another thread computes a step, which nothing waits for
            self._after_prompt = True
            return plain(*args, **arguments)
        with self._lock:  # an interrupt right after `acquire` would leave it locked
            replayed = self.replayed
            outputs = self._step(model, step, partial(plain, **arguments), plain)
            if self.timeline is not None:
                how = "program" if self.replayed > replayed else "layer by layer"
                now_ms = self.timeline.now_ms()
                self.timeline.add("step", how, now_ms - (time.perf_counter_ns() - started_ns) / 1e6, now_ms, position=step.position)
            if self.replayed > replayed:
                self._replayed_ns += time.perf_counter_ns() - started_ns
            return outputs

    def release(self) -> None:
        """Free the programs; the model computes no more."""
        self._kinds.clear()
        self._caches.clear()

    def statistics(self) -> dict[str, object]:
        """Return the number of replayed steps and programs, and why other steps are computed as usual.

        `step_us` is the mean time of a replayed step, `outside_kernels_us` the part of it that is not spent in kernels.
        """
        ready = sum(kind.program is not None for kind in self._kinds.values())
        steps = 1e3 * max(self.replayed, 1)
        return {
            "replayed_steps": self.replayed,
            "programs": ready,
            "step_us": round(self._replayed_ns / steps, 1),
            "outside_kernels_us": round((self._replayed_ns - self._kernels_ns) / steps, 1),
            "reasons": sorted(self._logged),
        }

    def _described(self, model: PreTrainedModel, arguments: Mapping[str, Any]) -> _Step | str | None:
        """Return a step that may be replayed, or the reason why it is computed as usual; None for a prompt and other passes."""
        ids, cache = arguments.get("input_ids"), arguments.get(CACHE)
        if (
            type(ids) is not torch.Tensor
            or ids.dim() != 2
            or not 0 < ids.shape[1] <= MAX_TOKENS
            or not ids.is_cpu
            or not isinstance(cache, Cache)
            or torch._C._len_torch_dispatch_stack()  # something else is watching
        ):
            return None
        if not isinstance(cache, DynamicCache | PagedCache) or not _is_library(type(cache)):
            return f"the cache is a {type(cache).__name__}, and programs append to a DynamicCache or to pages"
        if getattr(cache, "offloading", False):
            return "the cache is offloaded"
        if ids.shape[0] > MAX_REPLAYED_SEQUENCES:
            return f"the batch has more than {MAX_REPLAYED_SEQUENCES} sequences"
        if torch.is_grad_enabled():
            return "gradients are enabled"
        if torch.is_autocast_enabled("cpu"):
            return "autocast is enabled"
        form = () if self._sparse is None else self._sparse.form()
        if form is None:
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
        pages = cache.serial if isinstance(cache, PagedCache) else None  # whose pool is a constant of its programs
        kind = shapes, tuple(settings.items()), full, passed, tuple(map(type, layers)), modes, read, self._draft.settings, form, pages
        return _Step(kind, cache, position, inputs, settings)

    def _step(self, model: PreTrainedModel, step: _Step, usual: Callable[[], Any], plain: Forward) -> Any:
        state = self._state
        fully, self._after_prompt = self._after_prompt, False
        if state is None or state.changed(fully=fully):
            self._changes = 0 if fully else self._changes + 1
            self._kinds.clear()
            state = self._state = _ModelState(model)
        if self._changes > MAX_CHANGES:
            self._log("the model's attributes change from step to step")
            return usual()
        if state.obstacle is not None:
            self._log(state.obstacle)
            return usual()
        kind = self._kinds.pop(step.kind, None)
        if kind is None:
            kind = _Kind()
            if isinstance(step.cache, PagedCache):
                weakref.finalize(step.cache, _forget_kind, weakref.ref(self), step.kind)
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
            if self._sparse is not None:
                self._sparse.begin(step.inputs["input_ids"].numel())
            self._kernels_ns += kind.program.kernels_ns
            if self.timeline is not None:
                kind.program.add_spans(self.timeline)
        except ForeignCacheError as error:
            self._log(str(error))
            return usual()
        except NotRecordableError as error:
            kind.give_up()
            self._log(str(error))
            return usual()
        self.replayed += 1
        self._changes = 0
        return outputs

    def _record(self, kind: _Kind, step: _Step, plain: Forward) -> Any:
        """Compute a step as usual and record it; two recordings make the program."""
        cache = step.cache
        recorder = Recorder(self._runtime)
        tensors = {name: value.clone(memory_format=torch.contiguous_format) for name, value in step.inputs.items()}
        inputs = {name: recorder.memory(value) for name, value in tensors.items()}
        counts = cache_counts(cache)
        for name, value in list(cache_tensors(cache)):
            # Tensors in the buffers of another kind's program have strides and sizes of memory that do not follow the position.
            if len(name) == 2 and (not value.is_contiguous() or value.untyped_storage().nbytes() != value.nbytes):
                holder(cache, name)[name[1]] = value.clone(memory_format=torch.contiguous_format)
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
            kept = [tensor.clone() for tensor in program.overwritten(step.cache)]
        counts = [array.copy() for array in program.counters]
        try:
            found = program.run(buffers, step, advance=False)["logits"]
        except (ValueError, RuntimeError) as error:
            failure = f"a program cannot run: {error}"
        finally:  # also after Ctrl-C
            with torch.inference_mode():
                for tensor, old in zip(program.overwritten(step.cache), kept, strict=True):
                    tensor.copy_(old)
            for array, before in zip(program.counters, counts, strict=True):
                array[:] = before
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

    def forget_kind(self, kind: object) -> None:
        """Free a program over the pages of a cache that is gone."""
        self._kinds.pop(kind, None)

    def _log(self, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            logger.info("decode steps run layer by layer: %s", reason)


def _forget(steps: weakref.ref[StepPrograms], serial: int) -> None:
    found = steps()
    if found is not None:
        found.forget(serial)


def _forget_kind(steps: weakref.ref[StepPrograms], kind: object) -> None:
    found = steps()
    if found is not None:
        found.forget_kind(kind)


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
    cache: DynamicCache | PagedCache
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
        others = [name for name in fitted.before if not self._is_grown(name)]
        self._states = [name for name in others if fitted.after[name].storage == fitted.before[name].storage]
        self.replaced = [name for name in others if fitted.after[name].storage != fitted.before[name].storage]
        for name in self.replaced:
            before, after = fitted.before[name], fitted.after[name]
            fixed = not any(number.slope for number in (*before.sizes, *before.strides, before.offset))
            if not fixed or (after.sizes, after.dtype) != (before.sizes, before.dtype) or after.storage not in fitted.produced:
                raise NotRecordableError(f"a tensor of the cache ({name[1]}) is replaced by one of another form in each step")
        self._lowering = Lowering(fitted, self._grown, self.replaced)
        self.exact = all(
            weights in ("float32", "float64")
            for node in self._lowering.nodes
            if node.kind in ("linear", "experts")
            for weights in [node.payload[0].weight_type]
        )
        found = [node.payload[2] for node in self._lowering.nodes if node.kind == "experts"]
        self.counters = [array for array in found if array is not None]  # of neurons
        self._logits = self._fitted.outputs["logits"]
        self._bound: tuple[int, int] | None = None  # serial and version of the cache's buffers
        self._bound_states: list[torch.Tensor] = []
        self._tensors: dict[int, torch.Tensor] = {}
        self._checked = (0, -1)
        self._last_position = -1
        self.kernels_ns = 0  # of the last step
        self._build(max(1024, 2 * position))

    def describe(self) -> str:
        kinds = [node.kind for node in self._lowering.nodes]
        calls = sorted({node.name for node in self._lowering.nodes if node.kind == "call"})
        others = f", {kinds.count('call')} calls of PyTorch ({', '.join(calls)})" if calls else ""
        return f"{len(kinds)} operations{others}, {self._native.arena_bytes / 1e6:.1f} MB"

    def states(self, cache: Any) -> list[torch.Tensor]:
        """Return the tensors of a cache that a step changes in place."""
        return [holder(cache, name)[name[-1]] for name in self._states]

    def overwritten(self, cache: Any) -> list[torch.Tensor]:
        """Return the tensors of a cache that the program changes in place; those it owns may be others after a run."""
        return [*self.states(cache), *(holder(cache, name)[name[-1]] for name in self.replaced)]

    def _has_bound(self, states: Sequence[torch.Tensor]) -> bool:
        return len(states) == len(self._bound_states) and all(map(operator.is_, states, self._bound_states))

    def run(self, buffers: _CacheBuffers, step: _Step, *, advance: bool) -> Any:
        """Run the step; `advance`: the cache then holds the new tokens."""
        cache, position = step.cache, step.position
        if position > self._last_position:
            self._build(2 * position)
        tokens = step.inputs["input_ids"].shape[1]
        buffers.hold(cache, self._grown, tokens, position)
        buffers.own(cache, self.replaced)
        bound = self._bound == (buffers.serial, buffers.version) and self._has_bound(self.states(cache))
        if not bound or not self._checked[0] <= position <= self._checked[1]:
            self._bind(cache, buffers, position, tokens)
        for name, value in step.inputs.items():
            self._inputs[name][: value.numel()].copy_(value.reshape(-1))
        native = self._native
        before_ns = native.native.kernel_ns
        for part in native.parts:
            if isinstance(part, PythonCall):
                native.call(part, self._tensors, position, buffers.room)
            else:
                native.native.run(position, *part)
        self.kernels_ns = native.native.kernel_ns - before_ns
        if advance:
            buffers.advance(cache, tokens, self._fitted.counts, self.replaced)
        logits = native.view(self._logits, self._tensors, position, buffers.room).clone()
        return self._output_type(
            **{name: cache if name == CACHE else logits if name == "logits" else None for name in self._fitted.outputs}
        )

    def add_spans(self, timeline: Timeline) -> None:
        """Add the kernels of the last step to the lane `CPU`."""
        late_ms = timeline.now_ms() - time.perf_counter_ns() / 1e6
        for name, (began_ns, ended_ns) in zip(self._native.kernels, self._native.native.spans(), strict=True):
            if ended_ns:
                timeline.add("CPU", name, began_ns / 1e6 + late_ms, ended_ns / 1e6 + late_ms)

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
        states |= {fitted.before[name].storage: (buffers.owned[name].buffer, fitted.before[name]) for name in self.replaced}
        for storage, buffer in native.buffers.items():
            grown = by_storage.get(storage)
            if grown is not None:
                rows = buffers.tensors[grown.name]
                row_bytes = rows.buffer.stride(grown.dim) * rows.buffer.element_size()
                origins[buffer] = rows.anchor * row_bytes
                tensors[buffer] = rows.bytes
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


class _Rows:
    """A tensor of a cache in a buffer with room for more tokens.

    Attributes:
        bytes: the buffer as (bytes,) uint8.
        view: what the cache holds, `length` tokens from `start`.
        anchor: `start` at position 0, which is constant while the cache only grows: a window that is full moves on by a token in each
            step (`start_slope` of 1).
    """

    def __init__(self, buffer: torch.Tensor, length: int, each: CacheTensor, position: int) -> None:
        self.buffer = buffer
        self.bytes = storage_bytes(buffer)
        self.dim, self.start_slope = each.dim, each.start_slope
        self.start, self.length = 0, length
        self.anchor = -self.start_slope * position
        self.view = buffer.narrow(self.dim, 0, length)
        self._storage = buffer.untyped_storage()
        self._uses = torch._C._storage_Use_Count(self._storage._cdata)

    def adopt(self, held: torch.Tensor) -> bool:
        """Let `held` be the view if it is a part of it, as a crop returns, and if nothing else sees the tokens outside that part."""
        buffer, dim = self.buffer, self.dim
        start, rest = divmod(int(held.storage_offset()), buffer.stride(dim))
        length = held.shape[dim] if held.dim() == buffer.dim() else -1
        if (
            held.untyped_storage()._cdata != self._storage._cdata
            or held.dtype != buffer.dtype
            or held.stride() != buffer.stride()
            or rest
            or length < 0
            or start + length > self.start + self.length
            or (*held.shape[:dim], *held.shape[dim + 1 :]) != (*buffer.shape[:dim], *buffer.shape[dim + 1 :])
            or torch._C._storage_Use_Count(self._storage._cdata) != self._uses + 1  # another view was kept
            or sys.getrefcount(self.view) != 1 + _COUNTED
        ):
            return False
        self.start, self.length = start, length
        self.view = held  # last: until then this is repeated where it was interrupted
        return True


class _Owned:
    """A tensor of a cache that the model replaces in each step, and that a program overwrites instead; `view` is what the cache holds."""

    def __init__(self, content: torch.Tensor) -> None:
        self.buffer = content.clone()
        self.bytes = storage_bytes(self.buffer)
        self._storage = self.buffer.untyped_storage()
        self.renew()
        self._uses = torch._C._storage_Use_Count(self._storage._cdata)

    def renew(self) -> None:
        """Let the cache hold another view: one that someone has kept shows."""
        self.view = self.buffer.detach()

    @property
    def alone(self) -> bool:
        """Whether only this object and the cache hold the view."""
        return torch._C._storage_Use_Count(self._storage._cdata) == self._uses and sys.getrefcount(self.view) == 2 + _COUNTED


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
    owned: dict[StateName, _Owned] = field(default_factory=dict)
    version: int = 0
    room: int = 0

    def hold(self, cache: Any, grown: Sequence[CacheTensor], tokens: int, position: int) -> None:
        """Make sure that the grown tensors are in buffers with room for `tokens` more.

        Raises:
            ForeignCacheError: a tensor has another form than in the recording, or another number of tokens than the cache.
        """
        moved = []
        for each in grown:
            rows = self.tensors.get(each.name)
            held = holder(cache, each.name)[each.name[-1]]
            size = each.shape[each.dim]
            length = size.base + size.slope * position - tokens
            if (
                rows is None
                or rows.start_slope != each.start_slope
                or (held is not rows.view and not rows.adopt(held))
                or rows.start + rows.length + tokens > self.room
                or rows.length != length
                or rows.buffer.shape[each.dim] != self.room
            ):
                each.require_form(held, length)
                moved.append((each, held))
            elif rows.start - each.start_slope * position != rows.anchor:
                rows.anchor = rows.start - each.start_slope * position
                self.version += 1
        if not moved:
            return
        self.version += 1  # first: programs bind again even if this is interrupted
        needed = max(held.shape[each.dim] for each, held in moved) + tokens
        if needed + 1 > self.room:
            self.room = -(-max(needed + needed // 4, needed + ROOM) // ROOM) * ROOM
            moved = [(each, holder(cache, each.name)[each.name[-1]]) for each in grown]
        for each, content in moved:
            length = content.shape[each.dim]
            sizes = list(content.shape)
            sizes[each.dim] = self.room
            rows = _Rows(content.new_empty(sizes), length, each, position)
            rows.view.copy_(content)
            self.tensors[each.name] = rows
            holder(cache, each.name)[each.name[-1]] = rows.view

    def own(self, cache: Any, names: Sequence[StateName]) -> None:
        """Make sure that nothing but the cache sees the tensors that a program overwrites."""
        for name in names:
            owned, held = self.owned.get(name), holder(cache, name)
            if owned is None or held[name[-1]] is not owned.view or not owned.alone:
                self.version += 1
                owned = self.owned[name] = _Owned(held[name[-1]])
                held[name[-1]] = owned.view

    def steps_left(self, tokens: int) -> int:
        """Return the positions by which a step may still move on before a buffer is full."""
        return min((self.room - rows.start - rows.length - tokens for rows in self.tensors.values()), default=_LONG)

    def advance(self, cache: Any, tokens: int, counts: Mapping[StateName, int], replaced: Sequence[StateName]) -> None:
        """Let the cache show the tokens that a step has written."""
        for name in replaced:
            self.owned[name].renew()
            holder(cache, name)[name[-1]] = self.owned[name].view
        for name, rows in self.tensors.items():
            if rows.start_slope:
                rows.start += tokens
            else:
                rows.length += tokens
            rows.view = rows.buffer.narrow(rows.dim, rows.start, rows.length)
            holder(cache, name)[name[-1]] = rows.view
        for name, step in counts.items():
            if step:
                holder(cache, name)[name[-1]] += step


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
    """What the recordings of a model rely on: its modules, their parameters and the absence of hooks.

    Modules count wherever they are reached from an attribute of another: in lists, dicts, closures and objects.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules = list(model.modules())
        self._containers: list[tuple[Any, Any]] = []  # each with a copy
        self._cells: list[tuple[CellType, Any]] = []
        self._seen = set(map(id, self._modules))
        for module in self._modules:  # which grows meanwhile
            own = not _is_library(type(module))
            if own:
                self._containers.append((vars(module), vars(module).copy()))
            for name, value in vars(module).items():
                if name not in _TORCH_ATTRIBUTES:
                    self._reach(value, own=own)
        modules = self._modules
        self._tables: list[dict[str, Any]] = [
            table for module in modules for table in (module._modules, module._parameters, module._buffers) if table
        ]
        self._copies = [dict(table) for table in self._tables]
        self._hooks = [table for module in modules for table in (module._forward_hooks, module._forward_pre_hooks)]
        self._tensors = list(
            {id(each): each for table in self._tables for each in table.values() if isinstance(each, torch.Tensor)}.values()
        )
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        # Operators copy small vectors when they are loaded, and compute otherwise once one is edited.
        self._edited = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._versions = [tensor._version for tensor in self._edited]
        self.obstacle = "its modules have hooks" if self._hooked() else None
        self._settings: list[tuple[dict[str, Any], str, Any]] = []
        # Attributes of modules that steps read: a forward pass put in the place of the class's, tensors that are no buffers.
        self._attributes = [(vars(module), "forward", vars(module).get("forward")) for module in modules]
        for module in modules:
            if not _is_library(type(module)) or isinstance(module, Operator):
                continue
            for name, value in vars(module).items():
                if name not in _TORCH_ATTRIBUTES and isinstance(value, bool | int | float | str | None):
                    # Numbers of the libraries' own modules hardly ever change: they are compared once for each prompt.
                    (self._attributes if value is None else self._settings).append((vars(module), name, value))
        configs = {id(each): each for module in modules for each in vars(module).values() if isinstance(each, PretrainedConfig)}
        self._settings += [
            (vars(config), name, copy.deepcopy(value))
            for config in configs.values()
            for name, value in vars(config).items()
            if isinstance(value, bool | int | float | str | list | dict | None)
        ]

    def _reach(self, value: Any, *, own: bool, depth: int = 0) -> None:
        """Note what an attribute holds; `own`: of a module that is none of the libraries', whose every list, dict and object matters."""
        if depth > _DEPTH or id(value) in self._seen:
            return
        inner: Iterable[Any] = ()
        if isinstance(value, nn.Module):
            self._modules += [module for module in value.modules() if id(module) not in self._seen]
            self._seen.update(map(id, value.modules()))
            return
        if isinstance(value, list | dict | tuple):
            inner = list(value.values()) if isinstance(value, dict) else list(value)
            if not isinstance(value, tuple) and (own or any(isinstance(each, nn.Module | torch.Tensor | FunctionType) for each in inner)):
                self._containers.append((value, value.copy()))
        elif isinstance(value, FunctionType) and not _is_library(value):
            cells = [(cell, _contents(cell)) for cell in value.__closure__ or ()]
            self._cells += cells
            inner, own = [contents for _, contents in cells], True
        elif isinstance(value, MethodType):
            inner = value.__self__, value.__func__
        elif isinstance(value, partial):
            inner = value.func, value.args, value.keywords
        elif (
            own and hasattr(value, "__dict__") and not isinstance(value, type | ModuleType | torch.Tensor) and not _is_library(type(value))
        ):
            self._containers.append((vars(value), vars(value).copy()))
            inner = list(vars(value).values())
        else:
            return
        self._seen.add(id(value))
        for each in inner:
            self._reach(each, own=own, depth=depth + 1)

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
            or [tensor._version for tensor in self._edited] != self._versions
            or not all(_same_items(container, kept) for container, kept in self._containers)
            or any(_contents(cell) is not kept for cell, kept in self._cells)
            or self._hooked() != (self.obstacle is not None)
        )


def _is_library(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "").partition(".")[0] in _LIBRARIES


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _same_items(container: Any, kept: Any) -> bool:
    if isinstance(container, dict):
        return container.keys() == kept.keys() and all(map(operator.is_, container.values(), kept.values()))
    return len(container) == len(kept) and all(map(operator.is_, container, kept))


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
