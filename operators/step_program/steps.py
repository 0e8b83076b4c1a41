"""Replay the decode steps of a model on the CPU as native programs.

The first two steps of a kind run layer by layer and are recorded (recording.py), then fitted to each other (fitting.py) and turned into a
program (lowering.py, native_step.py). A program is compared with the same step layer by layer before its results are used. A kind is a
number of sequences and tokens, the form of the cache, which windows are full, and the position within a group of tokens where the model
pools them. A step that cannot be replayed runs layer by layer, and the reason is logged once.

cache_buffers.py has the memory that programs append to, model_state.py what a recording relies on. A cache in pages (paged_cache.py) has
memory of its own, which its programs read and write in place.
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
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils.generic import ModelOutput

from moegraft.cpu_backend import Program, Runtime
from moegraft.operators.base import MAX_REPLAYED_SEQUENCES
from moegraft.operators.draft import DraftSettings, DraftSwitch
from moegraft.operators.paged_cache import PagedCache
from moegraft.operators.sparsity import SparseLayers
from moegraft.operators.step_program.cache_buffers import CacheBuffers, ForeignCacheError, grown_tensors
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
from moegraft.operators.step_program.lowering import Lowering
from moegraft.operators.step_program.model_state import ModelState
from moegraft.operators.step_program.native_step import ARENA, NativeStep, OtherSizeError, PythonCall
from moegraft.operators.step_program.recording import NotRecordableError, Recorder
from moegraft.operators.structure import is_library
from moegraft.operators.timeline import Timeline

logger = logging.getLogger(__name__)
Forward = Callable[..., Any]
CACHE = "past_key_values"
MAX_TOKENS = 8  # of each sequence in a step; more is a prompt
VERIFIED_STEPS = 2  # of each program, computed both ways
RECORDINGS = 4  # of one kind before it is given up
MAX_KINDS = 32  # of which programs are kept, for each position in a group: a server's batch has two for each number of rows
MAX_CONTINUED = 64  # steps, after which a model is looked at again
LONGEST_NS = 50_000_000  # of steps without a look at signals
MAX_GROUP = 16  # tokens, with a program for each position in the group
MAX_CHANGES = 8  # of the model in one text, after which its steps are not recorded
EXACT_TOLERANCE = 1e-5  # relative, of the logits, where nothing is quantised
ROUNDED_TOLERANCE = 2e-2  # 8-bit activations turn a last bit of a norm into 8e-3 (measured on tiny models)
_PLAIN_ARGUMENTS = {
    "use_cache": (True, None),
    "return_dict": (True, None),
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
}
_LENGTH = re.compile("window|chunk|block|position|context|length|seq|topk|top_k|stride|factor|budget")  # in names of a config
_CHOICES = re.compile("topk|top_k|budget")  # in names of a config: how many tokens are looked at
_GROUP = re.compile("compress|pool|block_size")  # in names of a config: how many tokens a model pools
# Of a configuration, read in each forward pass; some are properties, over these members.
_SETTINGS = (
    *("output_attentions", "_output_attentions", "output_hidden_states", "output_router_logits", "use_cache"),
    *("_attn_implementation", "_attn_implementation_internal"),
)
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
        self._caches: weakref.WeakKeyDictionary[Any, CacheBuffers] = weakref.WeakKeyDictionary()
        self._state: ModelState | None = None
        self._logged: set[str] = set()
        self._config: PretrainedConfig | None = None
        self._config_tables: list[dict[str, Any]] = []  # the members of the configuration and of its part about text
        self._borders: Borders | None = None
        self._after_prompt = True  # or after another pass that was no step
        self._changes = 0  # of the model since a prompt or a replayed step
        self._latest: _Latest | None = None
        self.replayed = 0  # steps
        self._replayed_ns = 0
        self._kernels_ns = 0
        self.timeline: Timeline | None = None  # receives the steps and the kernels of programs while it is set

    def forward(self, model: PreTrainedModel, plain: Forward, args: Sequence[Any], arguments: Mapping[str, Any], *, drafting: bool) -> Any:
        """Return the result of `plain(*args, **arguments)`, the model's own forward pass, or of its replay."""
        started_ns = time.perf_counter_ns()
        self._latest = None
        step = None if args else self._described(model, arguments)
        if isinstance(step, str):
            self._log(step)
        if not isinstance(step, _Step) or self._lock.locked():  # another thread computes a step, which nothing waits for
            self._after_prompt = True
            return plain(*args, **arguments)
        with self._lock:  # an interrupt right after `acquire` would leave it locked
            outputs, program = self._step(model, step, partial(plain, **arguments), plain)
            self._count(program, started_ns, step.position)
            return outputs

    def _count(self, program: _StepProgram | None, started_ns: int, position: int, steps: int = 1) -> None:
        """Count steps; `program`: the one that computed them, or None where they were computed layer by layer."""
        took_ns = time.perf_counter_ns() - started_ns
        if program is not None:
            self.replayed += steps
            self._replayed_ns += took_ns
            self._kernels_ns += program.kernels_ns
        if self.timeline is not None:
            now_ms = self.timeline.now_ms()
            how = "layer by layer" if program is None else "program"
            self.timeline.add("step", how, now_ms - took_ns / 1e6, now_ms, position=position)
            if program is not None:
                program.add_spans(self.timeline)

    def continuation(self, model: PreTrainedModel, cache: Cache | None, *, watched: bool) -> Continuation | None:
        """Return the steps that may follow the latest one, if that was replayed over `cache` for a token of each sequence, else None.

        `watched`: code that is no library's runs between the steps, and may change the model.
        """
        if self._lock.locked():  # by another thread, or by a step in which this text is generated
            return None
        with self._lock:
            (latest, self._latest), borders = (self._latest, None), self._borders
            if latest is None or cache is None or latest.cache() is not cache or borders is None:
                return None
            buffers, position = self._caches[cache], latest.position + 1
            passed = borders.passed(latest.position, position)
            following = range(position, min(latest.kind.verified_until + 1, position + MAX_CONTINUED))
            alike = len(list(itertools.takewhile(lambda each: borders.passed(each, each + 1) == passed, following)))
            windows = [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
            left = [layer.sliding_window - layer.cumulative_length for layer in windows]  # until a window is full, and the next token
            count = min(alike, latest.program.steps_left(buffers, position), *(each - 1 for each in left if each > 0))
            return Continuation(self, cache, buffers, latest, count, watched=model if watched else None) if count > 0 else None

    def continue_by(self, continuation: Continuation, compute: Callable[[Program], object]) -> None:
        """Compute the next steps of a continuation as `compute` does it; none where it is over."""
        started_ns = time.perf_counter_ns()
        if continuation.left < 1 or self._lock.locked() or torch._C._len_torch_dispatch_stack():
            return
        with self._lock:
            latest, program, watched = continuation.latest, continuation.latest.program, continuation.watched
            if self._state is not latest.state or not program.is_bound(continuation.buffers) or self._draft.settings != latest.drafts:
                return
            if watched is not None and (latest.state.changed(fully=False) or self._conditions(watched) != latest.conditions):
                return
            before = program.fed
            try:
                program.compute(compute)
            finally:  # Python raises an interrupt as soon as a native call returns
                done = program.fed - before
                continuation.done += done
            self._count(program, started_ns, continuation.position - 1, done)

    def continued(self, steps: int) -> None:
        """Note the steps of a continuation that is over."""
        if self._sparse is not None:
            self._sparse.begin(steps)

    def release(self) -> None:
        """Free the programs; the model computes no more."""
        self._kinds.clear()
        self._caches.clear()
        self._state = self._latest = None

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
        if not isinstance(cache, DynamicCache | PagedCache) or not is_library(type(cache)):
            return f"the cache is a {type(cache).__name__}, and programs append to a DynamicCache or to pages"
        if isinstance(cache, PagedCache) and cache.gathers:
            return "attention does not read keys and values in pages"
        if getattr(cache, "offloading", False):
            return "the cache is offloaded"
        if ids.shape[0] > MAX_REPLAYED_SEQUENCES:
            return f"the batch has more than {MAX_REPLAYED_SEQUENCES} sequences"
        if torch.is_grad_enabled():
            return "gradients are enabled"
        if torch.is_autocast_enabled("cpu"):
            return "autocast is enabled"
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
        shapes = tuple((name, value.dtype, None if name == "attention_mask" else value.shape) for name, value in inputs.items())
        if self._config is not model.config or self._borders is None:
            configs = {id(each): each for each in (model.config, model.config.get_text_config())}
            self._config, self._config_tables = model.config, [vars(each) for each in configs.values()]
            self._borders = borders(model.config)
        conditions = self._conditions(model)
        passed = self._borders.passed(position, position + ids.shape[1])
        if conditions is None or passed is None:
            return None
        pages = cache.serial if isinstance(cache, PagedCache) else None  # whose pool is a constant of its programs
        kind = shapes, tuple(settings.items()), full, passed, tuple(map(type, layers)), conditions, pages
        choices_grow = any(position + ids.shape[1] < limit for limit in self._borders.choices)
        return _Step(kind, conditions, cache, position, self._borders.period, choices_grow, inputs, settings)

    def _conditions(self, model: PreTrainedModel) -> object | None:
        """Return what any step of this thread depends on beside its arguments; None while a layer is observed."""
        form = () if self._sparse is None else self._sparse.form()
        if form is None:
            return None
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), model.training
        read = tuple([table.get(name) for table in self._config_tables for name in _SETTINGS])  # a configuration's own lookups take 2 us
        return modes, read, self._draft.settings, form

    def _step(self, model: PreTrainedModel, step: _Step, usual: Callable[[], Any], plain: Forward) -> tuple[Any, _StepProgram | None]:
        """Return the outputs of a step, and the program that computed them if one did."""
        state = self._state
        fully, self._after_prompt = self._after_prompt, False
        if state is None or state.changed(fully=fully):
            self._changes = 0 if fully else self._changes + 1
            self._kinds.clear()
            state = self._state = ModelState(model)
        if self._changes > MAX_CHANGES:
            self._log("the model's attributes change from step to step")
            return usual(), None
        if state.obstacle is not None:
            self._log(state.obstacle)
            return usual(), None
        kind = self._kinds.pop(step.kind, None)
        if kind is None:
            kind = _Kind()
            if isinstance(step.cache, PagedCache):
                weakref.finalize(step.cache, _forget_kind, weakref.ref(self), step.kind)
        self._kinds[step.kind] = kind  # the latest last
        if len(self._kinds) > MAX_KINDS * step.period:
            del self._kinds[next(iter(self._kinds))]
        if kind.given_up:
            return usual(), None
        try:
            if kind.program is None:
                self._draft.preparations += 1
                return self._record(kind, step, plain), None
            buffers = self._buffers(step.cache)
            if step.position > kind.verified_until or kind.verified < VERIFIED_STEPS:
                self._draft.preparations += 1
                return self._verify(kind, kind.program, buffers, step, usual), None
            put_back = kind.program.saved(step.cache) if kind.program.sized_by_values else None
            try:
                outputs = kind.program.run(buffers, step, advance=True)
            except OtherSizeError:
                assert put_back is not None, "only such programs fail so"
                put_back()
                raise
            if self._sparse is not None:
                self._sparse.begin(step.inputs["input_ids"].numel())
        except (ForeignCacheError, OtherSizeError) as error:
            self._log(str(error))
            if isinstance(error, OtherSizeError) and kind.verified < VERIFIED_STEPS:
                kind.program = None  # its two recordings may have been of sizes that do not belong together
                if kind.recordings >= RECORDINGS:
                    kind.give_up()
            return usual(), None
        except NotRecordableError as error:
            kind.give_up()
            self._log(str(error))
            return usual(), None
        self._changes = 0
        if step.goes_on and kind.program.goes_on:
            self._latest = _Latest(weakref.ref(step.cache), kind, kind.program, state, step.conditions, self._draft.settings, step.position)
        return outputs, kind.program

    def _record(self, kind: _Kind, step: _Step, plain: Forward) -> Any:
        """Compute a step as usual and record it; two recordings make the program."""
        cache = step.cache
        recorder = Recorder(self._runtime)
        tensors = {name: value.clone(memory_format=torch.contiguous_format) for name, value in step.inputs.items()}
        inputs = {name: recorder.memory(value) for name, value in tensors.items()}
        counts = cache_counts(cache)
        held = self._caches.get(cache)
        copies: dict[int, torch.Tensor] = {}  # one for a tensor that the cache holds twice
        for name, value in list(cache_tensors(cache)):
            # Tensors in the buffers of another kind's program have strides and sizes of memory that do not follow the position.
            moved = len(name) == 2 or (held is not None and name in held.tensors)
            if moved and (not value.is_contiguous() or value.untyped_storage().nbytes() != value.nbytes):
                if id(value) not in copies:
                    copies[id(value)] = value.clone(memory_format=torch.contiguous_format)
                holder(cache, name)[name[-1]] = copies[id(value)]
        before = {name: recorder.memory(value) for name, value in cache_tensors(cache)}
        with recorder.recorded() as recording:
            outputs = plain(**tensors, **step.settings, **{CACHE: cache})
        after = {name: recorder.memory(value, produced=True) for name, value in cache_tensors(cache)}
        changed = {name: (counts[name], value) for name, value in cache_counts(cache).items() if name in counts}
        first, kind.recorded = kind.recorded, None
        kind.recordings += 1
        try:
            found = RecordedStep(step.turn, recording, inputs, before, after, changed, _outputs(outputs, cache, recorder))
            recording.release((*inputs.values(), *before.values()))
            if first is None or first.position == step.turn:
                kind.recorded = found
                kind.recordings -= first is not None
                return outputs
            started = time.perf_counter()
            fitted = fit(first, found, choices_grow=step.choices_grow)
            program = _StepProgram(fitted, self._runtime, type(outputs), step)
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
        logger.debug("decode steps are native programs: %s, made in %.0f ms", program.describe(), 1e3 * (time.perf_counter() - started))
        return outputs

    def _verify(self, kind: _Kind, program: _StepProgram, buffers: CacheBuffers, step: _Step, usual: Callable[[], Any]) -> Any:
        """Compute a step both ways, and give the program up where they differ."""
        failure = None
        put_back = program.saved(step.cache)
        try:
            found = program.run(buffers, step, advance=False)["logits"]
        except (ValueError, RuntimeError) as error:
            failure = f"a program cannot run: {error}"
        finally:  # also after Ctrl-C
            put_back()
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

    def _buffers(self, cache: Any) -> CacheBuffers:
        found = self._caches.get(cache)
        if found is None:
            found = self._caches[cache] = CacheBuffers()
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
        conditions: the part of it that is none of the step's arguments.
        position: tokens in the cache.
        period: tokens of a group that the model pools, else 1; programs count groups.
        choices_grow: whether there are fewer tokens than a model with sparse attention looks at.
        inputs: the tensors among the arguments.
        settings: the other arguments, but the cache.
    """

    kind: object
    conditions: object
    cache: DynamicCache | PagedCache
    position: int
    period: int
    choices_grow: bool
    inputs: Mapping[str, torch.Tensor]
    settings: Mapping[str, Any]

    @property
    def turn(self) -> int:
        return self.position // self.period

    @property
    def goes_on(self) -> bool:
        """Whether the step of the next tokens differs by these and their positions alone."""
        return self.inputs.keys() <= {"input_ids", "position_ids"} and self.inputs["input_ids"].shape[1] == self.period == 1


@dataclass(frozen=True, slots=True)
class _Latest:
    """A step that was replayed, and that others may follow."""

    cache: weakref.ref[Cache]
    kind: _Kind
    program: _StepProgram
    state: ModelState
    conditions: object
    drafts: DraftSettings | None
    position: int


class Continuation:
    """Steps of one token of each sequence, each after the other, in the program of the step before them.

    As a decoding loop does nothing else between two of them, neither the arguments nor, unless `watched`, the model are looked at again,
    and the cache is told of the tokens by `close` alone. A forward pass of another thread may end a continuation at any time.
    """

    def __init__(
        self, steps: StepPrograms, cache: Cache, buffers: CacheBuffers, latest: _Latest, count: int, *, watched: PreTrainedModel | None
    ) -> None:
        self._steps = steps
        self._cache = cache
        self._first, self._count = latest.position + 1, count
        self.buffers, self.latest, self.watched = buffers, latest, watched
        self.done = 0  # steps
        self._logits: NDArray[np.float32] = np.empty(latest.program.logits_sizes, np.float32)
        self._logits_tensor = torch.from_numpy(self._logits)

    @property
    def left(self) -> int:
        return self._count - self.done

    @property
    def position(self) -> int:
        """Tokens before the next one."""
        return self._first + self.done

    def step(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """Feed a token of each sequence; return the logits, (B, V) float32 until the next step, or None where a forward pass is needed."""
        before = self.done

        self._steps.continue_by(self, lambda program: program.follow(self.position, tokens, self._logits))
        return None if self.done == before else self._logits_tensor

    def greedy(self, token: int, count: int, ends: Sequence[int]) -> list[int]:
        """Of one sequence: feed a token, the likeliest one after it, and so on; return the likeliest after each.

        At most `count`, none after one of `ends`, and as many as a user who interrupts them does not wait for; none at all where a whole
        forward pass is needed.
        """
        found: list[int] = []

        def extend(program: Program) -> None:
            most = 1 if self._steps.timeline is not None else min(count, self.left)  # a timeline has each step
            found.extend(program.greedy(self.position, token, most, ends, LONGEST_NS))

        self._steps.continue_by(self, extend)
        return found

    def close(self) -> None:
        """Let the cache have the tokens."""
        done, self.done, self._count = self.done, 0, 0
        if done:
            self.latest.program.advance(self._cache, self.buffers, done)
            self._steps.continued(done)


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

    def __init__(self, fitted: FittedStep, runtime: Runtime, output_type: type[ModelOutput], step: _Step) -> None:
        self._fitted = fitted
        self._runtime = runtime
        self._output_type = output_type
        self._no_outputs = {field.name: None for field in fields(output_type)}  # type: ignore[arg-type] # models return its dataclasses
        self._period, self._place = step.period, step.position % step.period
        self._grown = grown_tensors(fitted, step.period)
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
        self.sized_by_values = self._lowering.sized_by_values
        self._logits = self._fitted.outputs["logits"]
        self._bound: tuple[int, int] | None = None  # serial and version of the cache's buffers
        self._bound_states: list[torch.Tensor] = []
        self._tensors: dict[int, torch.Tensor] = {}
        self._bound_logits: torch.Tensor | None = None  # where they are at the same place in each step
        self._checked = (0, -1)
        self._last_position = -1
        self.kernels_ns = 0  # of the last step
        self._build(-(-max(1024, 2 * step.position) // self._period))

    def describe(self) -> str:
        kinds = [node.kind for node in self._lowering.nodes]
        calls = sorted({node.name for node in self._lowering.nodes if node.kind == "call"})
        others = f", {kinds.count('call')} calls of PyTorch ({', '.join(calls)})" if calls else ""
        return f"{len(kinds)} operations{others}, {self._native.arena_bytes / 1e6:.1f} MB"

    def states(self, cache: Any) -> list[torch.Tensor]:
        """Return the tensors of a cache that a step changes in place."""
        return [holder(cache, name)[name[-1]] for name in self._states]

    def saved(self, cache: Any) -> Callable[[], None]:
        """Copy what a run overwrites; the result puts it back."""

        def overwritten() -> list[torch.Tensor]:  # those that the program owns are others after a run
            return [*self.states(cache), *(holder(cache, name)[name[-1]] for name in self.replaced)]

        with torch.inference_mode():  # the states may have been made in it
            kept = [tensor.clone() for tensor in overwritten()]
        counts = [array.copy() for array in self.counters]

        def put_back() -> None:
            with torch.inference_mode():
                for tensor, old in zip(overwritten(), kept, strict=True):
                    tensor.copy_(old)
            for array, before in zip(self.counters, counts, strict=True):
                array[:] = before

        return put_back

    def _has_bound(self, states: Sequence[torch.Tensor]) -> bool:
        return len(states) == len(self._bound_states) and all(map(operator.is_, states, self._bound_states))

    def run(self, buffers: CacheBuffers, step: _Step, *, advance: bool) -> Any:
        """Run the step; `advance`: the cache then holds the new tokens."""
        cache, position = step.cache, step.turn
        if position > self._last_position:
            self._build(2 * position)
        tokens = step.inputs["input_ids"].shape[1]
        buffers.hold(cache, self._grown, tokens, position, step.position)
        buffers.own(cache, self.replaced)
        bound = self.is_bound(buffers) and self._has_bound(self.states(cache))
        if not bound or not self._checked[0] <= position <= self._checked[1]:
            self._bind(cache, buffers, position, tokens)
        for name, value in step.inputs.items():
            into = self._inputs[name]
            (into if into.numel() == value.numel() else into[: value.numel()]).copy_(value.reshape(-1))
        self._execute(position, buffers.room)
        if advance:
            self.advance(cache, buffers, 1)
        logits = self._found(position, buffers.room).clone()
        # As the type's own constructor does it, which takes 15 us to look its fields up again for each of them.
        outputs = self._output_type.__new__(self._output_type)
        vars(outputs).update(self._no_outputs)
        for name in self._fitted.outputs:
            vars(outputs)[name] = logits if name == "logits" else cache
            OrderedDict.__setitem__(outputs, name, vars(outputs)[name])
        return outputs

    def compute(self, steps: Callable[[Program], object]) -> None:
        """Run steps as `steps` does it; `fed` counts them."""
        before_ns = self._native.native.kernel_ns
        steps(self._native.native)
        self.kernels_ns = self._native.native.kernel_ns - before_ns

    @property
    def fed(self) -> int:
        return self._native.native.fed

    def advance(self, cache: Any, buffers: CacheBuffers, steps: int) -> None:
        """Let a cache have the tokens of `steps` steps."""
        buffers.advance(cache, self._grown, self._fitted.counts, self.replaced, steps)

    @property
    def logits_sizes(self) -> tuple[int, int]:
        """B, V."""
        batch, _, vocabulary = self._logits.sizes
        return batch.base, vocabulary.base

    def is_bound(self, buffers: CacheBuffers) -> bool:
        return self._bound == (buffers.serial, buffers.version)

    def steps_left(self, buffers: CacheBuffers, position: int) -> int:
        """Return how many steps of one token from `position` on fit the buffers, and were checked."""
        return min(self._checked[1] - position, buffers.steps_left(1)) + 1

    def _execute(self, position: int, room: int) -> None:
        native = self._native
        before_ns = native.native.kernel_ns
        for part in native.parts:
            if isinstance(part, PythonCall):
                native.call(part, self._tensors, position, room)
            else:
                native.native.run(position, *part)
        self.kernels_ns = native.native.kernel_ns - before_ns

    def _found(self, position: int, room: int) -> torch.Tensor:
        """Return the logits of the last run, over the program's memory."""
        found = self._bound_logits
        return self._native.view(self._logits, self._tensors, position, room) if found is None else found

    def add_spans(self, timeline: Timeline) -> None:
        """Add the kernels of the last step to the lane `CPU`."""
        late_ms = timeline.now_ms() - time.perf_counter_ns() / 1e6
        for name, (began_ns, ended_ns) in zip(self._native.kernels, self._native.native.spans(), strict=True):
            if ended_ns:
                timeline.add("CPU", name, began_ns / 1e6 + late_ms, ended_ns / 1e6 + late_ms)

    def _is_grown(self, name: StateName) -> bool:
        return any(name in tensor.names for tensor in self._grown)

    def _build(self, last_position: int) -> None:
        self._native = NativeStep(self._lowering, self._runtime, [self._logits], last_position)
        self._last_position = last_position
        self._arena = torch.empty(self._native.arena_bytes, dtype=torch.uint8)
        self._inputs = {
            name: torch.empty(math.prod(size.at(last_position) for size in place.sizes), dtype=place.dtype)
            for name, place in self._fitted.inputs.items()
        }
        inputs = dict(self._fitted.inputs)
        token = inputs.pop("input_ids")
        self.goes_on = self._native.set_loop(self._logits, token, list(inputs.values())) and not self.sized_by_values
        self._bound = None

    def forget(self, serial: int) -> None:
        """Let go of the buffers of a cache that is gone."""
        if self._bound is not None and self._bound[0] == serial:
            self._bound = None
            self._bound_states = []
            self._tensors = {}
            self._bound_logits = None

    def _bind(self, cache: Any, buffers: CacheBuffers, position: int, tokens: int) -> None:
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
                origins[buffer] = (rows.anchor + rows.moves * self._place) * row_bytes
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
        last = min(position + buffers.steps_left(tokens) // self._period, self._last_position)
        native.native.check(position, max(last, position), buffers.room)
        self._tensors = tensors
        self._bound_logits = native.view(self._logits, tensors, position, buffers.room) if native.stays(self._logits) else None
        self._checked = position, last
        self._bound_states = self.states(cache)
        self._bound = buffers.serial, buffers.version


@dataclass(frozen=True, slots=True)
class Borders:
    """The positions at which a model may begin to compute in another way.

    A program is only used between two of them; numbers that are linear on one side need not be so on the other.

    Attributes:
        once: the config's windows, chunks, lengths and the like.
        choices: those of them from which on sparse attention leaves tokens out.
        again: groups of tokens that are pooled, with a border after each.
        period: a number of tokens after which steps are alike again; its groups have a program for each position in them.
    """

    once: Sequence[int]
    choices: Sequence[int]
    again: Sequence[int]
    period: int

    def passed(self, position: int, total: int) -> object | None:
        """Return what a step from `position` to `total` tokens depends on; None at a border itself, where models differ by a token."""
        place = bisect.bisect(self.once, total)
        if (place and self.once[place - 1] == total) or (place < len(self.once) and self.once[place] == total + 1):
            return None
        if any((position - 1) // group != (total + 1) // group for group in self.again):
            return None
        return place, *(total // group for group in self.again), position % self.period


def borders(config: PretrainedConfig) -> Borders:
    def numbers(values: Mapping[str, Any], names: re.Pattern[str], inner: bool = False) -> Iterator[int]:
        for name, value in values.items():
            named = inner or names.search(str(name)) is not None
            if isinstance(value, Mapping):
                yield from numbers(value, names, named and names is _GROUP)
            elif type(value) is int and named:
                yield value

    settings = config.get_text_config().to_dict()
    groups = sorted({value for value in numbers(settings, _GROUP) if value > 1})

    def lengths(names: re.Pattern[str]) -> list[int]:
        found = {value for value in numbers(settings, names) if value > 1}
        return sorted(found | {value * group for value in found for group in groups})  # a length may count groups

    period = 1
    for group in groups:
        if math.lcm(period, group) <= MAX_GROUP:
            period = math.lcm(period, group)
    return Borders(lengths(_LENGTH), lengths(_CHOICES), [group for group in groups if period % group], period)


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
