"""Replay the decode steps of a model on the CPU as native programs.

The first two steps of a kind run layer by layer and are recorded (native/record.py), then fitted to each other (native/fit.py) and turned
into a program (native/lower.py, native/program.py). A program is compared with the same step layer by layer before its results are used. A
kind is a number of sequences and tokens, the form of the cache, which windows are full, and the position within a group of tokens where the
model pools them. A step that cannot be replayed runs layer by layer, and the reason is logged once.

A model is frozen once it is loaded. What programs notice all the same is stated in one list, `FrozenModel`; whoever changes anything else
of a model in use calls `model.moegraft.forget_steps()`.
"""

from __future__ import annotations

import itertools
import logging
import operator
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils.generic import ModelOutput

from moegraft.cpu_backend import Runtime
from moegraft.operators.base import MAX_REPLAYED_SEQUENCES, Operator
from moegraft.operators.decode.cache import CacheBuffers, ForeignCacheError, buffers_of, cache_counts, cache_tensors, holder, own
from moegraft.operators.decode.native.fit import Boundaries, RecordedStep, fit
from moegraft.operators.decode.native.program import OtherSizeError, StepProgram
from moegraft.operators.decode.native.record import NotRecordableError, Recorder
from moegraft.operators.decode.pages import PagedCache
from moegraft.operators.decode.states import past_positions
from moegraft.operators.draft import DraftSettings, DraftSwitch
from moegraft.operators.sparsity import SparseLayers
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
MAX_CHANGES = 8  # of the model in one text, after which its steps are not recorded
EXACT_TOLERANCE = 1e-5  # relative, of the logits, where nothing is quantised
ROUNDED_TOLERANCE = 2e-2  # 8-bit activations turn a last bit of a norm into 8e-3 (measured on tiny models)
_PLAIN_ARGUMENTS = {
    "use_cache": (True, None),
    "return_dict": (True, None),
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
}
# Of a configuration, read in each forward pass; some are properties, over these members.
_SETTINGS = (
    *("output_attentions", "_output_attentions", "output_hidden_states", "output_router_logits", "use_cache"),
    *("_attn_implementation", "_attn_implementation_internal"),
)
_MOST_INPUT_NUMBERS = 4096  # of a tensor that is copied for each step
# Once other outputs were asked for, transformers leaves hooks on the model, which do nothing while none are.
_OUTPUT_HOOKS = "transformers.utils.output_capturing"


class FrozenModel:
    """What steps rely on of a model, beside their arguments and the modes of PyTorch. A change is noticed at the next step.

    1. Each module has the same submodules, parameters and buffers, and runs the `forward` of its class.
    2. Their memory is at the same addresses, and nothing has written to it since.
    3. No module has forward hooks.
    4. An attribute of a module that is None, or a tensor which a step reads as a constant, is still that.
    5. A module of another library, such as an adapter, has the same attributes.

    `StepReplay` compares the training flag, what a step reads of the configuration, and the thresholds of sparse experts by itself. Not
    noticed: attributes of the modules of PyTorch and transformers, and changes within lists, functions and objects that modules refer to.
    The steps of one `Continuation` are not looked at: a change between two tokens of one `generate` call may be noticed later.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        modules = list(model.modules())
        self._tables = [table for module in modules for table in (module._modules, module._parameters, module._buffers) if table]
        self._copies = [dict(table) for table in self._tables]
        tensors = {id(each): each for table in self._tables for each in table.values() if isinstance(each, torch.Tensor)}
        self._tensors = list(tensors.values())
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        # Operators copy small vectors when they are loaded, and compute otherwise once one is edited.
        self._editable = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._versions = [tensor._version for tensor in self._editable]
        self._hooks = [table for module in modules for table in (module._forward_hooks, module._forward_pre_hooks)]
        self._modules = modules
        self._attributes: list[tuple[dict[str, Any], str, Any]]
        self._attributes = [(vars(module), "forward", vars(module).get("forward")) for module in modules]
        of_others = [vars(module) for module in modules if not isinstance(module, Operator)]
        self._attributes += [(table, name, None) for table in of_others for name, value in table.items() if value is None]
        self._columns = tuple(zip(*self._attributes, strict=True))  # compared in every step, without a loop in Python
        self._others = [(vars(module), dict(vars(module))) for module in modules if not is_library(type(module))]
        self.obstacle = "its modules have hooks" if self._hooked() else None

    def rely_on(self, constants: Iterable[torch.Tensor]) -> None:
        """Notice as well when an attribute of a module that is one of `constants`, or shares its memory, is replaced."""
        addresses = {tensor.untyped_storage().data_ptr() for tensor in constants}
        for tensor in self._tensors:
            addresses.discard(tensor.untyped_storage().data_ptr())
        for table in map(vars, self._modules):
            self._attributes += [
                (table, name, value)
                for name, value in table.items()
                if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in addresses
            ]
        self._columns = tuple(zip(*self._attributes, strict=True))

    def _hooked(self) -> bool:
        hooks = (hook for table in self._hooks if table for hook in table.values())
        return any(getattr(hook, "__module__", "") != _OUTPUT_HOOKS for hook in hooks) or bool(nn.modules.module._has_any_global_hook())

    def changed(self) -> bool:
        try:
            same = self._tables == self._copies
        except RuntimeError:  # two tensors were compared, of which one replaced the other
            same = False
        tables, names, values = self._columns
        return (
            not same
            or not all(map(operator.is_, map(dict.get, tables, names), values))
            or [tensor.data_ptr() for tensor in self._tensors] != self._addresses
            or [tensor._version for tensor in self._editable] != self._versions
            or any(now.keys() != old.keys() or not all(map(operator.is_, now.values(), old.values())) for now, old in self._others)
            or self._hooked() != (self.obstacle is not None)
        )


class StepReplay:
    """Computes the decode steps of one model, by native programs where it can; the model calls `forward` for every forward pass.

    Args:
        runtime: the runtime of the model's operators, whose kernel calls are recorded.
        draft: the switch that is on while a draft is drawn.
        sparse: the layers that leave neurons out, if there are any.
    """

    def __init__(self, runtime: Runtime, draft: DraftSwitch, sparse: SparseLayers | None) -> None:
        self._runtime = runtime
        self._draft = draft
        self._sparse = sparse
        self.lock = threading.Lock()
        self._kinds: dict[object, _Kind] = {}
        self._state: FrozenModel | None = None
        self._logged: set[str] = set()
        self._config: PretrainedConfig | None = None
        self._config_tables: list[dict[str, Any]] = []  # the members of the configuration and of its part about text
        self._boundaries: Boundaries | None = None
        self._changes = 0  # of the model since a prompt or a replayed step
        self._latest: tuple[weakref.ref[Cache], _Kind, StepProgram, int] | None = None  # a step that others may follow, and its position
        self.replayed = 0  # steps
        self._replayed_ns = 0
        self._kernels_ns = 0
        self.timeline: Timeline | None = None  # receives the steps and the kernels of programs while it is set

    def forward(self, model: PreTrainedModel, plain: Forward, args: Sequence[Any], arguments: Mapping[str, Any]) -> Any:
        """Return the result of `plain(*args, **arguments)`, the model's own forward pass, or of its replay."""
        started_ns = time.perf_counter_ns()
        self._latest = None
        step = None if args else self._described(model, arguments)
        if isinstance(step, str):
            self._log(step)
        if not isinstance(step, _Step) or self.lock.locked():  # another thread computes a step, which nothing waits for
            self._changes = 0
            outputs = plain(*args, **arguments)
            if arguments.get(CACHE) is None and not args:
                _own_new(outputs)
            return outputs
        with self.lock:  # an interrupt right after `acquire` would leave it locked
            outputs, program = self._step(model, step, partial(plain, **arguments), plain)
            self._count(program, started_ns, step.position)
            return outputs

    def _count(self, program: StepProgram | None, started_ns: int, position: int, steps: int = 1) -> None:
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

    def continuation(self, cache: Cache | None) -> Continuation | None:
        """Return the steps that may follow the latest one, if that was replayed over `cache` for a token of each sequence, else None."""
        if self.lock.locked():  # by another thread, or by a step in which this text is generated
            return None
        with self.lock:
            (latest, self._latest), boundaries = (self._latest, None), self._boundaries
            if latest is None or cache is None or latest[0]() is not cache or boundaries is None:
                return None
            _, kind, program, before = latest
            buffers, position = _memory(cache), before + 1
            assert buffers is not None, "a step over this cache was replayed"
            regime = boundaries.regime(before, position)
            following = range(position, min(kind.verified_until + 1, position + MAX_CONTINUED))
            alike = len(list(itertools.takewhile(lambda each: boundaries.regime(each, each + 1) == regime, following)))
            windows = [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
            left = [layer.sliding_window - layer.cumulative_length for layer in windows]  # until a window is full, and the next token
            count = min(alike, program.steps_left(buffers, position), *(each - 1 for each in left if each > 0))
            return Continuation(self, program, cache, buffers, position, count) if count > 0 else None

    def fed(self, continuation: Continuation, before: tuple[int, int], started_ns: int) -> None:
        """Count the tokens that a program has fed by itself since `before`, and the time that it took."""
        program = continuation.program
        tokens, kernel_ns = program.fed
        program.kernels_ns, done = kernel_ns - before[1], tokens - before[0]
        continuation.done += done
        self._count(program, started_ns, continuation.position - 1, done)

    @property
    def draft_settings(self) -> DraftSettings | None:
        """The settings of the draft that the calling thread draws, if it does."""
        return self._draft.settings

    def continued(self, tokens: int) -> None:
        """Note tokens that continuations have fed."""
        if self._sparse is not None:
            self._sparse.begin(tokens)

    def release(self) -> None:
        """Free the programs, which are recorded again where steps follow."""
        self._kinds.clear()
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
        layers: list[Any] = cache.layers
        position = cache.get_seq_length() if layers else 0
        if position == 0 or any(getattr(layer, "record_past", False) for layer in layers):
            return None
        buffers = _memory(cache)
        if buffers is None:
            named = f"an offloaded {type(cache).__name__}" if getattr(cache, "offloading", False) else f"a {type(cache).__name__}"
            reason = f"the cache is {named} that moegraft has not made: pass none to generate, or moegraft.injection.new_cache(model)"
            self._log(reason, logging.WARNING if named == "a DynamicCache" else logging.INFO)
            return None
        if isinstance(cache, PagedCache) and cache.gathers:
            return "attention does not read keys and values in pages"
        if ids.shape[0] > MAX_REPLAYED_SEQUENCES:
            return f"the batch has more than {MAX_REPLAYED_SEQUENCES} sequences"
        if torch.is_grad_enabled():
            return "gradients are enabled"
        if torch.is_autocast_enabled("cpu"):
            return "autocast is enabled"
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
        if self._config is not model.config or self._boundaries is None:
            configs = {id(each): each for each in (model.config, model.config.get_text_config())}
            self._config, self._config_tables = model.config, [vars(each) for each in configs.values()]
            self._boundaries = Boundaries.of(model.config)
        conditions = self._conditions(model)
        regime = self._boundaries.regime(position, position + ids.shape[1])
        if conditions is None or regime is None:
            return None
        pages = cache.serial if isinstance(cache, PagedCache) else None  # whose pool is a constant of its programs
        held = tuple((type(layer), past_positions(layer)) for layer in layers)
        kind = shapes, tuple(settings.items()), full, regime, held, conditions, pages
        choices_grow = any(position + ids.shape[1] < limit for limit in self._boundaries.choices)
        return _Step(kind, cache, buffers, position, self._boundaries.period, choices_grow, inputs, settings)

    def _conditions(self, model: PreTrainedModel) -> object | None:
        """Return what any step of this thread depends on beside its arguments; None while a layer is observed."""
        form = () if self._sparse is None else self._sparse.form()
        if form is None:
            return None
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), model.training
        read = tuple([table.get(name) for table in self._config_tables for name in _SETTINGS])  # a configuration's own lookups take 2 us
        return modes, read, self._draft.settings, form

    def _step(self, model: PreTrainedModel, step: _Step, usual: Callable[[], Any], plain: Forward) -> tuple[Any, StepProgram | None]:
        """Return the outputs of a step, and the program that computed them if one did."""
        state = self._state
        if state is None or state.changed():
            self._changes += state is not None
            self._kinds.clear()
            state = self._state = FrozenModel(model)
        if self._changes > MAX_CHANGES:
            self._log("the model changes from step to step")
            return usual(), None
        if state.obstacle is not None:
            self._log(state.obstacle)
            return usual(), None
        kind = self._kinds.pop(step.kind, None)
        if kind is None:
            kind = _Kind()
            if isinstance(step.cache, PagedCache):
                weakref.finalize(step.cache, self._kinds.pop, step.kind, None)
        self._kinds[step.kind] = kind  # the latest last
        if len(self._kinds) > MAX_KINDS * step.period:
            del self._kinds[next(iter(self._kinds))]
        if kind.given_up:
            return usual(), None
        program, buffers = kind.program, step.buffers
        try:
            if program is None:
                self._draft.preparations += 1
                return self._record(kind, step, plain), None
            if step.position > kind.verified_until or kind.verified < VERIFIED_STEPS:
                self._draft.preparations += 1
                return self._verify(kind, program, step, usual), None
            put_back = program.saved(step.cache) if program.sized_by_values else None
            try:
                outputs = program.run(step.cache, buffers, step.inputs, step.position, advance=True)
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
        if step.goes_on and program.goes_on:
            self._latest = weakref.ref(step.cache), kind, program, step.position
        return outputs, program

    def _record(self, kind: _Kind, step: _Step, plain: Forward) -> Any:
        """Compute a step as usual and record it; two recordings make the program."""
        cache = step.cache
        recorder = Recorder(self._runtime)
        tensors = {name: value.clone(memory_format=torch.contiguous_format) for name, value in step.inputs.items()}
        inputs = {name: recorder.memory(value) for name, value in tensors.items()}
        counts = cache_counts(cache)
        copies: dict[int, torch.Tensor] = {}  # one for a tensor that the cache holds twice
        for name, value in list(cache_tensors(cache)):
            # Tensors in the buffers of another kind's program have strides and sizes of memory that do not follow the position.
            moved = len(name) == 2 or name in step.buffers.tensors
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
        position = step.position // step.period
        try:
            recorded = RecordedStep(position, recording, inputs, before, after, changed, _outputs(outputs, cache, recorder))
            recording.release((*inputs.values(), *before.values()))
            if first is None or first.position == position:
                kind.recorded = recorded
                kind.recordings -= first is not None
                return outputs
            started = time.perf_counter()
            fitted = fit(first, recorded, choices_grow=step.choices_grow)
            program = StepProgram(fitted, self._runtime, type(outputs), step.position, step.period)
        except (NotRecordableError, ValueError) as error:  # the latter: an operation that a program refuses
            if kind.recordings >= RECORDINGS:
                kind.give_up()
                self._log(str(error))
            elif first is not None:
                kind.recorded = recorded  # a window may have become full between the two
            return outputs
        kind.program = program
        assert self._state is not None, "made before any step is recorded"
        self._state.rely_on(fitted.constants.values())
        logger.debug("decode steps are native programs: %s, made in %.0f ms", program.describe(), 1e3 * (time.perf_counter() - started))
        return outputs

    def _verify(self, kind: _Kind, program: StepProgram, step: _Step, usual: Callable[[], Any]) -> Any:
        """Compute a step both ways, and give the program up where they differ."""
        failure = None
        put_back = program.saved(step.cache)
        try:
            replayed = program.run(step.cache, step.buffers, step.inputs, step.position, advance=False)["logits"]
        except (ValueError, RuntimeError) as error:
            failure = f"a program cannot run: {error}"
        finally:  # also after Ctrl-C
            put_back()
        expected = usual()
        if failure is None:
            wanted = expected["logits"].float()
            off = float((replayed.float() - wanted).norm() / wanted.norm())
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

    def _log(self, reason: str, level: int = logging.INFO) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            logger.log(level, "decode steps run layer by layer: %s", reason)


@dataclass(frozen=True, slots=True)
class _Step:
    """The arguments of a forward pass that may be replayed.

    Attributes:
        kind: what its program depends on.
        position: tokens in the cache.
        period: tokens of a group that the model pools, else 1; programs count groups.
        choices_grow: whether there are fewer tokens than a model with sparse attention looks at.
        inputs: the tensors among the arguments.
        settings: the other arguments, but the cache.
    """

    kind: object
    cache: Cache
    buffers: CacheBuffers
    position: int
    period: int
    choices_grow: bool
    inputs: Mapping[str, torch.Tensor]
    settings: Mapping[str, Any]

    @property
    def goes_on(self) -> bool:
        """Whether the step of the next tokens differs by these and their positions alone."""
        return self.inputs.keys() <= {"input_ids", "position_ids"} and self.inputs["input_ids"].shape[1] == self.period == 1


@dataclass(slots=True)
class _Kind:
    """The steps of one kind.

    Attributes:
        verified: steps that were computed both ways.
        verified_until: the position up to which that is enough; numbers that seem linear may not be so for ever.
    """

    recorded: RecordedStep | None = None
    recordings: int = 0
    program: StepProgram | None = None
    verified: int = 0
    verified_until: int = 0
    given_up: bool = False

    def give_up(self) -> None:
        self.recorded = self.program = None
        self.given_up = True


class Continuation:
    """Steps of one token of each sequence, each after the other, in the program of the step before them.

    A decoding loop does nothing else to the cache between two of them: neither the arguments nor the model are looked at again, and the
    cache receives the tokens by `close` alone. A forward pass of another thread may end a continuation at any time, and so does a draft,
    or its end, as fewer experts run in it.
    """

    def __init__(self, replay: StepReplay, program: StepProgram, cache: Cache, buffers: CacheBuffers, first: int, count: int) -> None:
        self._replay = replay
        self.program = program
        self._cache = cache
        self.buffers = buffers
        self._first, self._count = first, count
        self.done = 0  # steps
        self._draft_settings = replay.draft_settings
        self._logits: NDArray[np.float32] = np.empty(program.logits_sizes, np.float32)
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
        started_ns, replay = time.perf_counter_ns(), self._replay
        if self._is_over():
            return None
        with replay.lock:
            if not self.program.is_bound(self.buffers):
                return None
            before = self.program.fed
            try:
                self.program.native.follow(self.position, tokens, self._logits)
            finally:  # Python raises an interrupt as soon as a native call returns
                replay.fed(self, before, started_ns)
        return self._logits_tensor

    def greedy(self, token: int, count: int, ends: Sequence[int]) -> list[int]:
        """Of one sequence: feed a token, the likeliest one after it, and so on; return the likeliest after each.

        At most `count`, none after one of `ends`, and as many as a user who interrupts them does not wait for; none at all where a whole
        forward pass is needed.
        """
        started_ns, replay = time.perf_counter_ns(), self._replay
        if self._is_over():
            return []
        with replay.lock:
            if not self.program.is_bound(self.buffers):
                return []
            before = self.program.fed
            most = 1 if replay.timeline is not None else min(count, self.left)  # a timeline has each step
            try:
                tokens: list[int] = self.program.native.greedy(self.position, token, most, ends, LONGEST_NS)
            finally:  # as above
                replay.fed(self, before, started_ns)
        return tokens

    def _is_over(self) -> bool:
        """Whether a forward pass is needed: at the end, and while another thread computes a step, which nothing waits for."""
        replay = self._replay
        return (
            self.left < 1
            or replay.lock.locked()
            or replay.draft_settings is not self._draft_settings
            or torch._C._len_torch_dispatch_stack() > 0
        )

    def close(self) -> None:
        """Let the cache have the tokens."""
        done, self.done, self._count = self.done, 0, 0
        if done:
            self.program.advance(self._cache, self.buffers, done)
            self._replay.continued(done)


def _memory(cache: Cache) -> CacheBuffers | None:
    """Return the memory of a cache that programs may write to; None for one that is not moegraft's own."""
    return None if getattr(cache, "offloading", False) else buffers_of(cache)


def _own_new(outputs: Any) -> None:
    """Take a cache that the model has made in its forward pass, where its memory can be moegraft's own."""
    cache = outputs.get(CACHE) if isinstance(outputs, ModelOutput) else None
    if isinstance(cache, DynamicCache) and is_library(type(cache)):
        own(cache)


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
