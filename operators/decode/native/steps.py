"""The decode steps of a model on the CPU as native programs: how StepReplay (../replay.py) records and runs them.

Two steps of a kind are recorded (record.py), then fitted to each other (fit.py) and turned into a program (lower.py, program.py). A kind is
a number of sequences and tokens, the form of the cache, which windows are full, and the position within a group of tokens where the model
pools them. `NativePasses` are steps that follow each other in programs.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, QuantizedCache
from transformers.utils.generic import ModelOutput

from moegraft.cpu_backend import Runtime
from moegraft.operators.base import CACHE, MAX_REPLAYED_SEQUENCES
from moegraft.operators.decode.cache import CacheBuffers, ForeignCacheError, StateName, buffers_of, cache_counts, cache_tensors, holder
from moegraft.operators.decode.loop import generate
from moegraft.operators.decode.native.fit import Boundaries, RecordedStep, fit
from moegraft.operators.decode.native.program import HIDDEN_STATES, OtherSizeError, StepProgram
from moegraft.operators.decode.native.record import NotRecordableError, Recorder
from moegraft.operators.decode.pages import PagedCache
from moegraft.operators.decode.replay import VERIFIED_STEPS, Forward, FrozenModel, Kind, Step, StepReplay
from moegraft.operators.decode.rollback import CachedPasses
from moegraft.operators.decode.states import is_past, past_tokens
from moegraft.operators.draft import DraftSettings, DraftSwitch
from moegraft.operators.sparsity import SparseLayers

logger = logging.getLogger(__name__)
MAX_TOKENS = 8  # of each sequence in a step; more is a prompt
RECORDINGS = 4  # of one kind before it is given up
MAX_CONTINUED = 64  # steps, after which a model is looked at again
_LONG = 1 << 30
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
        self._latest: tuple[weakref.ref[Cache], _Form, _Following] | None = None  # a step that others may follow
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
            or getattr(cache, "ragged", False)
            or torch._C._len_torch_dispatch_stack()  # something else is watching
        ):
            return None
        layers: list[Any] = cache.layers
        position = cache.get_seq_length() if layers else 0
        if position == 0 or any(getattr(layer, "record_past", False) for layer in layers):
            return None
        if isinstance(cache, QuantizedCache):
            return "keys and values of a quantised cache are restored in each step"
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
                    plain = plain and not getattr(model.config.get_text_config(), "sliding_window", None)  # a mask may have it alone
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
        position = step.position // step.period
        if kind.recorded is not None and kind.recorded.position == position:  # as at the end of equally long texts
            return plain(**step.inputs, **step.settings, **{CACHE: cache})
        buffers.hold(cache, (), step.inputs["input_ids"].shape[1], position, step.position)  # so that pages do not move meanwhile
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
        try:
            recorded = RecordedStep(position, recording, inputs, before, after, changed, _outputs(outputs, cache, recorder))
            recording.release((*inputs.values(), *before.values()))
            if first is None:
                kind.recorded = recorded
                return outputs
            started = time.perf_counter()
            end = step.position + step.inputs["input_ids"].shape[1]
            choices_grow = any(end < limit for limit in self._boundaries.choices)
            fitted = fit(first, recorded, buffers.sized_by_room(cache), choices_grow=choices_grow)
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
            if replay.goes_on and step.inputs.keys() <= {"input_ids", "position_ids", "states"} and step.period == 1:
                assert self._frozen is not None and self._boundaries is not None, "the step was described"
                regime = self._boundaries.regime(step.position, step.position + ids.shape[1])
                following = _Following(replay, self._frozen, ids.shape[1], regime, kind.verified_until)
                self._latest = weakref.ref(cache), _form(ids.numel(), step.inputs.get("states"), self.draft), following
        return outputs

    def tolerance(self, replay: StepProgram) -> float:
        return EXACT_TOLERANCE if replay.exact else ROUNDED_TOLERANCE

    def passes(self, cache: Cache) -> NativePasses:
        return NativePasses(cache, self)

    def latest(self, cache: Cache) -> tuple[_Form, _Following] | None:
        """Return the latest step, if others over `cache` may follow it; not to be asked twice."""
        if self.lock.locked():  # by another thread, or by a step in which this text is generated
            return None
        with self.lock:
            latest, self._latest = self._latest, None
            return None if latest is None or latest[0]() is not cache else latest[1:]

    def may_follow(self, following: _Following, position: int) -> bool:
        """Whether a program may compute the tokens at `position`, for all that is known of the model and of the program."""
        if following.frozen is not self._frozen or position > following.verified_until or self._boundaries is None:
            return False
        return self._boundaries.regime(position, position + following.tokens) == following.regime

    def fed(self, program: StepProgram, before: tuple[int, int], started_ns: int, position: int) -> int:
        """Count the steps that a program has run by itself since `before`, and the time that they took; return their number."""
        steps, kernel_ns = program.fed
        program.kernels_ns, done = kernel_ns - before[1], steps - before[0]
        self._count(program, started_ns, position + done - 1, done)
        return done

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


# Of a step: its tokens, the width of the states that it is given, and how experts draft in it.
_Form = tuple[int, int, DraftSettings | None]


def _form(tokens: int, states: torch.Tensor | None, draft: DraftSwitch) -> _Form:
    return tokens, 0 if states is None else states.shape[-1], draft.settings


@dataclass(frozen=True, slots=True)
class _Following:
    """A program whose steps may follow each other.

    Attributes:
        frozen: the state of the model for which it is.
        tokens: of each sequence in a step.
        regime: of the recorded steps: see `Boundaries`.
        verified_until: the last position of a step.
    """

    program: StepProgram
    frozen: FrozenModel
    tokens: int
    regime: object
    verified_until: int


class NativePasses(CachedPasses):
    """Passes over one cache that follow each other in native programs, without a forward pass of the model in between.

    A number of tokens is computed here once a pass over as many was replayed in the model (`note`). Between two passes nothing else happens
    to the cache but what this class does: neither the arguments nor the model are looked at again, for at most `MAX_CONTINUED` steps, and
    the cache receives the tokens by `close` alone. So passes that only append to it may go back: those that verify a draft are followed by
    others behind the tokens that stand. A forward pass of another thread may end them at any time.

    Attributes:
        length: tokens that are computed, and have not been taken back.
    """

    cache: Cache

    def __init__(self, cache: Cache, replay: NativePrograms) -> None:
        super().__init__(cache)
        self._replay = replay
        self._programs: dict[_Form, _Following] = {}
        self._program: StepProgram | None = None  # of the latest step since the cache had all tokens
        self._buffers: CacheBuffers | None = None
        self._left = 0  # steps until the model is looked at again
        self._held = 0  # tokens that the cache has
        self._window_end = 0
        self._fed = 0  # tokens since the cache had all of them
        self._marked = 0  # the length to which `rewind` returns
        self.length = cache.get_seq_length() if cache.layers else 0

    def follow(self, tokens: Sequence[int], states: torch.Tensor | None = None) -> torch.Tensor | None:
        started_ns, replay = time.perf_counter_ns(), self._replay
        following = self._following(_form(len(tokens), states, replay.draft))
        if following is None or self._buffers is None or (self._new_mark is not None and not following.program.rewinds):
            return None
        program = following.program
        with replay.lock:
            if not program.is_bound(self._buffers):
                return None
            before = program.fed
            try:
                logits, self.hidden_states = program.follow(self.length, tokens, states)
            finally:  # Python raises an interrupt as soon as a native call returns
                self._went_on(following, before, started_ns)
        return logits

    def greedy(self, token: int, count: int, ends: Sequence[int], *, hidden: bool) -> list[int]:
        started_ns, replay = time.perf_counter_ns(), self._replay
        following = self._following(_form(1, None, replay.draft))
        if following is None or self._buffers is None:
            return []
        program = following.program
        with replay.lock:
            if not program.is_bound(self._buffers):
                return []
            before = program.fed
            end = min(self.length + min(count, self._left), self._window_end, program.positions(self._buffers, self._held).stop)
            positions = range(self.length, self.length + 1 if replay.timeline is not None else end)  # a timeline has each step
            alike = len(list(itertools.takewhile(lambda each: replay.may_follow(following, each), positions)))
            states = program.states_of(alike) if hidden else None
            if hidden and states is None:
                return []
            into = None if states is None else states.view(torch.uint8).flatten()
            try:
                tokens: list[int] = program.native.greedy(self.length, token, alike, ends, LONGEST_NS, into)
            finally:  # as above
                self._went_on(following, before, started_ns)
            self.hidden_states = None if states is None else states[:, : len(tokens)]
            self.step_ns = program.native.step_ns
        return tokens

    def _following(self, form: _Form) -> _Following | None:
        """Return the program for the next step; None while another thread computes one, which nothing waits for."""
        replay, found = self._replay, self._programs.get(form)
        if found is None or self._left < 1 or replay.lock.locked() or torch._C._len_torch_dispatch_stack():
            return None
        if self._program is None and not self._begin(found.program):
            return None
        if self._buffers is None or not replay.may_follow(found, self.length):
            return None
        fits = self.length + found.tokens <= self._window_end and self.length in found.program.positions(self._buffers, self._held)
        return found if fits else None

    def _begin(self, program: StepProgram) -> bool:
        """Look at the cache, which has all tokens."""
        self._buffers = buffers = _memory(self.cache)
        self._held = self.length = self.cache.get_seq_length()
        layers = [layer for layer in self.cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
        left = [layer.sliding_window - 1 - layer.cumulative_length for layer in layers]  # until a window is full
        self._window_end = self._held + min((each for each in left if each >= 0), default=_LONG)
        try:
            return buffers is not None and program.rebind(self.cache, buffers, self._held)
        except ForeignCacheError:
            return False

    def _went_on(self, following: _Following, before: tuple[int, int], started_ns: int) -> None:
        steps = self._replay.fed(following.program, before, started_ns, self.length)
        if steps:
            self._program = following.program
            self.length += steps * following.tokens
            self._fed += steps * following.tokens
            self._left -= steps

    def _advance(self, length: int) -> None:
        """Let the cache have the computed tokens before `length`."""
        new, self._held = max(0, length - self._held), max(length, self._held)
        if self._program is not None and self._buffers is not None and new:
            self._program.advance(self.cache, self._buffers, new)

    def leave(self) -> None:
        if self._new_mark is not None and self._mark is None:
            self._advance(self._marked)
        super().leave()
        self.close()

    def note(self) -> bool:
        self._left, self.length = MAX_CONTINUED, self.cache.get_seq_length()
        latest = self._replay.latest(self.cache)
        if latest is not None:
            self._programs[latest[0]] = latest[1]
        return latest is not None

    def close(self) -> None:
        self._advance(self.length)
        self._program = None
        self._programs = {key: each for key, each in self._programs.items() if each.program.rewinds}  # others only follow their own steps
        fed, self._fed = self._fed, 0
        if fed:
            self._replay.continued(fed)

    def mark(self, longest: int, *, singly: bool) -> None:
        super().mark(longest, singly=singly)
        self._marked = self.length

    def rewind(self, keep: int = 0) -> None:
        if self._new_mark is None:
            return
        self.length = self._marked + keep
        if self._mark is not None:
            self.close()
            super().rewind(keep)


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
