"""The decode steps of a model on the CPU as native programs: how StepReplay (../replay.py) records and runs them.

Two steps of a kind are recorded (record.py), then fitted to each other (fit.py) and turned into a program (lower.py, program.py). A kind is
a number of sequences and tokens, the form of the cache, which windows are full, and the position within a group of tokens where the model
pools them. Tokens that follow each other in one program are a `Continuation`.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils.generic import ModelOutput

from moegraft.cpu_backend import Runtime
from moegraft.operators.base import MAX_REPLAYED_SEQUENCES
from moegraft.operators.decode.cache import (
    CacheBuffers,
    ForeignCacheError,
    StateName,
    buffers_of,
    cache_counts,
    cache_tensors,
    holder,
)
from moegraft.operators.decode.loop import generate
from moegraft.operators.decode.native.fit import Boundaries, RecordedStep, fit
from moegraft.operators.decode.native.program import HIDDEN_STATES, OtherSizeError, StepProgram
from moegraft.operators.decode.native.record import NotRecordableError, Recorder
from moegraft.operators.decode.pages import PagedCache
from moegraft.operators.decode.replay import CACHE, VERIFIED_STEPS, Forward, FrozenModel, Kind, Step, StepReplay
from moegraft.operators.decode.states import is_past, past_tokens
from moegraft.operators.draft import DraftSwitch
from moegraft.operators.sparsity import SparseLayers

logger = logging.getLogger(__name__)
MAX_TOKENS = 8  # of each sequence in a step; more is a prompt
RECORDINGS = 4  # of one kind before it is given up
MAX_CONTINUED = 64  # steps, after which a model is looked at again
LONGEST_NS = 50_000_000  # of steps without a look at signals
EXACT_TOLERANCE = 1e-5  # relative, of the logits, where nothing is quantised
ROUNDED_TOLERANCE = 2e-2  # 8-bit activations turn a last bit of a norm into 8e-3 (measured on tiny models)
_PLAIN_ARGUMENTS = {
    "use_cache": (True, None),
    "return_dict": (True, None),
    "output_attentions": (False, None),
    "output_hidden_states": (False, None, -1),
}
# Of a configuration, read in each forward pass; some are properties, over these members.
_SETTINGS = (
    *("output_attentions", "_output_attentions", "output_hidden_states", "output_router_logits", "use_cache"),
    *("_attn_implementation", "_attn_implementation_internal"),
)
_MOST_INPUT_NUMBERS = 1 << 16  # of a tensor that is copied for each step, as the states that an MTP layer reads


class NativePrograms(StepReplay):
    """Records steps, and runs them as native programs.

    Args:
        runtime: the runtime of the model's operators, whose kernel calls are recorded.
        sparse: the layers that leave neurons out, if there are any.
    """

    CANNOT_RUN = "a program cannot run: {}"
    DIFFERS = "a program's logits differ by {:.1e} from the model's"
    generate = generate

    def __init__(self, runtime: Runtime, draft: DraftSwitch, sparse: SparseLayers | None) -> None:
        super().__init__(draft)
        self._runtime = runtime
        self._sparse = sparse
        self._config: PretrainedConfig | None = None
        self._config_tables: list[dict[str, Any]] = []  # the members of the configuration and of its part about text
        self._boundaries: Boundaries | None = None
        self._latest: tuple[weakref.ref[Cache], StepProgram, int, int] | None = None  # a step that others may follow
        self._kernels_ns = 0

    def describe(self, model: PreTrainedModel, arguments: Mapping[str, Any]) -> Step | str | None:
        self._latest = None
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
            advice = "pass none to generate, or moegraft.injection.new_cache(model)"
            level = logging.WARNING if named == "a DynamicCache" else logging.INFO
            self._log(f"the cache is {named} that moegraft has not made: {advice}", level)
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
                if value not in _PLAIN_ARGUMENTS[name] and type(value) is not tuple:
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
        held = tuple((type(layer), past_tokens(layer) if ids.shape[1] > 1 else 0) for layer in layers)
        kind = shapes, tuple(settings.items()), full, regime, held, conditions, pages
        return Step(kind, cache, inputs, settings, position, self._boundaries.period)

    def _conditions(self, model: PreTrainedModel) -> object | None:
        """Return what any step of this thread depends on beside its arguments; None while a layer is observed."""
        form = () if self._sparse is None else self._sparse.form()
        if form is None:
            return None
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), model.training
        read = tuple([table.get(name) for table in self._config_tables for name in _SETTINGS])  # a configuration's own lookups take 2 us
        return modes, read, self.draft.settings, form

    def record(self, kind: Kind, step: Step, plain: Forward, frozen: FrozenModel) -> Any:
        cache, buffers = step.cache, _memory(step.cache)
        assert buffers is not None and self._boundaries is not None, "the step was described"
        recorder = Recorder(self._runtime)
        tensors = {name: value.clone(memory_format=torch.contiguous_format) for name, value in step.inputs.items()}
        inputs = {name: recorder.memory(value) for name, value in tensors.items()}
        counts = cache_counts(cache)
        with_past = step.inputs["input_ids"].shape[1] > 1

        def held() -> list[tuple[StateName, torch.Tensor]]:
            return [(name, value) for name, value in cache_tensors(cache) if with_past or not is_past(name)]

        copies: dict[int, torch.Tensor] = {}  # one for a tensor that the cache holds twice
        for name, value in held():
            # Tensors in the buffers of another kind's program have strides and sizes of memory that do not follow the position.
            moved = len(name) == 2 or name in buffers.tensors
            if moved and (not value.is_contiguous() or value.untyped_storage().nbytes() != value.nbytes):
                if id(value) not in copies:
                    copies[id(value)] = value.clone(memory_format=torch.contiguous_format)
                holder(cache, name)[name[-1]] = copies[id(value)]
        before = {name: recorder.memory(value) for name, value in held()}
        with recorder.recorded() as recording:
            outputs = plain(**tensors, **step.settings, **{CACHE: cache})
        after = {name: recorder.memory(value, produced=True) for name, value in held()}
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
            end = step.position + step.inputs["input_ids"].shape[1]
            choices_grow = any(end < limit for limit in self._boundaries.choices)
            fitted = fit(first, recorded, choices_grow=choices_grow)
            program = StepProgram(fitted, self._runtime, type(outputs), step.position, step.period)
        except (NotRecordableError, ValueError) as error:  # the latter: an operation that a program refuses
            if kind.recordings >= RECORDINGS:
                self.give_up(kind, str(error))
            elif first is not None:
                kind.recorded = recorded  # a window may have become full between the two
            return outputs
        kind.replay = program
        frozen.rely_on(fitted.constants.values())
        logger.debug("decode steps are native programs: %s, made in %.0f ms", program.describe(), 1e3 * (time.perf_counter() - started))
        return outputs

    def bind(self, kind: Kind, step: Step) -> StepProgram | None:
        return kind.replay  # type: ignore[no-any-return] # a program, or None

    def run(self, kind: Kind, replay: StepProgram, step: Step, *, keep: bool) -> Any:
        cache, ids = step.cache, step.inputs["input_ids"]
        buffers = _memory(cache)
        assert buffers is not None, "the step was described"
        put_back = replay.saved(cache) if replay.sized_by_values or not keep else None
        done = False
        try:
            outputs = replay.run(cache, buffers, step.inputs, step.position, advance=keep)
            done = keep
        except (ForeignCacheError, OtherSizeError) as error:
            self._log(str(error))
            if isinstance(error, OtherSizeError) and kind.verified < VERIFIED_STEPS:
                kind.replay = None  # its two recordings may have been of sizes that do not belong together
                kind.given_up = kind.recordings >= RECORDINGS
            return None
        except NotRecordableError as error:
            self.give_up(kind, str(error))
            return None
        finally:  # also after Ctrl-C
            if put_back is not None and not done:
                put_back()
        if keep:
            self.continued(ids.numel())
            if replay.goes_on and step.inputs.keys() <= {"input_ids", "position_ids"} and ids.shape[1] == step.period == 1:
                self._latest = weakref.ref(cache), replay, step.position, kind.verified_until
        return outputs

    def tolerance(self, replay: StepProgram) -> float:
        return EXACT_TOLERANCE if replay.exact else ROUNDED_TOLERANCE

    def continuation(self, cache: Cache | None) -> Continuation | None:
        if self.lock.locked():  # by another thread, or by a step in which this text is generated
            return None
        with self.lock:
            (latest, self._latest), boundaries = (self._latest, None), self._boundaries
            if latest is None or cache is None or latest[0]() is not cache or boundaries is None:
                return None
            _, program, before, verified_until = latest
            buffers, position = _memory(cache), before + 1
            assert buffers is not None, "a step over this cache was replayed"
            regime = boundaries.regime(before, position)
            following = range(position, min(verified_until + 1, position + MAX_CONTINUED))
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

    def continued(self, tokens: int) -> None:
        if self._sparse is not None:
            self._sparse.begin(tokens)

    def _count(self, replay: StepProgram | None, started_ns: int, position: int, steps: int = 1) -> None:
        super()._count(replay, started_ns, position, steps)
        if replay is not None:
            self._kernels_ns += replay.kernels_ns
            if self.timeline is not None:
                replay.add_spans(self.timeline)

    def release(self) -> None:
        super().release()
        self._latest = None

    def statistics(self) -> dict[str, object]:
        """Return those of any backend, the number of programs, and `outside_kernels_us`, the part of a step outside kernels."""
        outside = (self._replayed_ns - self._kernels_ns) / (1e3 * max(self.replayed, 1))
        programs = sum(kind.replay is not None for kind in self._kinds.values())
        return {**super().statistics(), "programs": programs, "outside_kernels_us": round(outside, 1)}


class Continuation:
    """Steps of one token of each sequence, each after the other, in the program of the step before them.

    A decoding loop does nothing else to the cache between two of them: neither the arguments nor the model are looked at again, and the
    cache receives the tokens by `close` alone. A forward pass of another thread may end a continuation at any time, and so does a draft,
    or its end, as fewer experts run in it.

    Attributes:
        hidden_states: those of the latest `step`, (B, 1, H); None where the program was recorded without them.
        step_ns: the time of each step of the latest `greedy`.
    """

    def __init__(self, replay: NativePrograms, program: StepProgram, cache: Cache, buffers: CacheBuffers, first: int, count: int) -> None:
        self._replay = replay
        self.program = program
        self._cache = cache
        self.buffers = buffers
        self._first, self._count = first, count
        self.done = 0  # steps
        self.hidden_states: torch.Tensor | None = None
        self.step_ns: Sequence[int] = ()
        self._draft_settings = replay.draft.settings
        self._logits: NDArray[np.float32] = np.empty(program.logits_sizes, np.float32)
        self._logits_tensor = torch.from_numpy(self._logits)

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
            self.hidden_states = self.program.hidden_states(self.position - 1, self.buffers.room)
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
            most = 1 if replay.timeline is not None else min(count, self._count - self.done)  # a timeline has each step
            try:
                tokens: list[int] = self.program.native.greedy(self.position, token, most, ends, LONGEST_NS)
            finally:  # as above
                replay.fed(self, before, started_ns)
            self.step_ns = self.program.native.step_ns
        return tokens

    def _is_over(self) -> bool:
        """Whether a forward pass is needed: at the end, and while another thread computes a step, which nothing waits for."""
        replay = self._replay
        return (
            self.done >= self._count
            or replay.lock.locked()
            or replay.draft.settings is not self._draft_settings
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


def _outputs(outputs: Any, cache: Any, recorder: Recorder) -> dict[str, Any]:
    """Return the outputs of a model with Memory for the logits, and for hidden states, if these were asked for after single layers.

    Raises:
        NotRecordableError: they have other tensors.
    """
    if not isinstance(outputs, ModelOutput) or not isinstance(outputs.get("logits"), torch.Tensor):
        raise NotRecordableError(f"the model returns {type(outputs).__name__}, not logits and a cache")
    found: dict[str, Any] = {}
    for name, value in outputs.items():
        if name == "logits":
            found[name] = recorder.memory(value, produced=True)
        elif name == HIDDEN_STATES and (len(value) == 1 or any(each is None for each in value)):
            states = [each for each in value if each is not None]
            found[name] = {number: recorder.memory(each, produced=True) for number, each in enumerate(states)}
        elif value is cache:
            found[name] = None
        else:
            raise NotRecordableError(f"the model returns {name} as well")
    return found
