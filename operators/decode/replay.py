"""Replay the decode steps of a model, as native programs on the CPU (native/steps.py) or as captured CUDA graphs (cuda_graph.py).

`StepReplay` computes every forward pass. The first steps of a kind run layer by layer, and are recorded or captured. What is made of them
is compared with the same steps layer by layer before its results are used. A step that cannot be replayed runs layer by layer, and the
reason is logged once.

A model is frozen once it is loaded. What is noticed all the same is stated in one list, `FrozenModel`; whoever changes anything else of a
model in use calls `model.moegraft.forget_steps()`.
"""

from __future__ import annotations

import logging
import math
import operator
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.utils.generic import ModelOutput

from moegraft.operators.base import CACHE, Operator
from moegraft.operators.decode.cache import adopt
from moegraft.operators.decode.last_layer import last_token_alone
from moegraft.operators.decode.pages import PagedCache
from moegraft.operators.decode.rollback import CachedPasses
from moegraft.operators.draft import DraftSwitch
from moegraft.operators.structure import hooked, is_library
from moegraft.operators.timeline import Timeline

logger = logging.getLogger(__name__)
Forward = Callable[..., Any]
VERIFIED_STEPS = 2  # of each kind, computed both ways: what counts in Python may be right in the first
MAX_KINDS = 32  # of which programs are kept, for each position in a group: a server's batch has two for each number of rows
MAX_CHANGES = 8  # of the model in one text, after which its steps are not recorded


class FrozenModel:
    """The state of a model that steps rely on, beside their arguments and the modes of PyTorch. A change is noticed at the next step.

    1. Each module has the same submodules, parameters and buffers, and runs the `forward` of its class.
    2. Their memory is at the same addresses, and nothing has written to it since.
    3. No module has forward hooks, except those that steps are known to bear.
    4. An attribute of a module that is None, or a tensor which a step reads as a constant, is still that.
    5. A module of another library, or of a class that derives from one's, such as an adapter, has the same attributes, or equal ones.

    `NativePrograms` compares the training flag, what a step reads of the configuration, and the thresholds of sparse experts by itself. Not
    noticed: attributes of the modules of PyTorch and transformers, and changes within lists, functions and objects that modules refer to.
    The steps of `NativePasses`, and those of MTP layers between two of the model's, are not looked at: a change between two tokens of
    one `generate` call may be noticed later.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        modules = list(model.modules())
        parts = [table for module in modules for table in (module._modules, module._parameters, module._buffers) if table]
        self._tables = [*parts, *(vars(module) for module in modules if not all(map(is_library, type(module).__mro__)))]
        self._copies = [dict(table) for table in self._tables]
        tensors = {id(each): each for table in parts for each in table.values() if isinstance(each, torch.Tensor)}
        self._tensors = list(tensors.values())
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        # Operators copy small vectors when they are loaded, and compute otherwise once one is edited.
        self._editable = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._versions = [tensor._version for tensor in self._editable]
        self._hooks = [table for module in modules for table in (module._forward_hooks, module._forward_pre_hooks)]
        self._own_hooks = [dict(table) for table in self._hooks], _global_hooks()
        self._modules = modules
        self._attributes: list[tuple[dict[str, Any], str, Any]]
        self._attributes = [(vars(module), "forward", vars(module).get("forward")) for module in modules]
        of_others = [vars(module) for module in modules if not isinstance(module, Operator)]
        self._attributes += [(table, name, None) for table in of_others for name, value in table.items() if value is None]
        self._columns = tuple(zip(*self._attributes, strict=True))  # compared in every step, without a loop in Python
        self.obstacle = "its modules have hooks" if hooked(self._hooks) else None

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

    def changed(self) -> bool:
        try:
            same = self._tables == self._copies  # what was not replaced is not compared further
        except Exception:  # noqa: BLE001 # as two tensors were compared, of which one replaced the other, or objects that cannot be
            same = False
        tables, names, values = self._columns
        return (
            not same
            or not all(map(operator.is_, map(dict.get, tables, names), values))
            or [tensor.data_ptr() for tensor in self._tensors] != self._addresses
            or [tensor._version for tensor in self._editable] != self._versions
            or ((self._hooks, _global_hooks()) != self._own_hooks and hooked(self._hooks) != (self.obstacle is not None))
        )


def _global_hooks() -> bool:
    return bool(nn.modules.module._has_any_global_hook())


@dataclass(frozen=True, slots=True)
class Step:
    """A forward pass that may be replayed.

    Attributes:
        kind: what its replay depends on.
        inputs: the tensors among its arguments, as far as the backend tells them apart.
        settings: the other arguments, but the cache.
        position: tokens in the cache; 0 where only a device has counted them.
        period: tokens of a group that the model pools, else 1.
    """

    kind: object
    cache: Cache
    inputs: Mapping[str, torch.Tensor]
    settings: Mapping[str, Any]
    position: int = 0
    period: int = 1


@dataclass(slots=True)
class Kind:
    """The steps of one kind.

    Attributes:
        recorded: what the backend has recorded so far, in `recordings` attempts.
        replay: of the steps; None as well where a backend has one for each cache.
        verified: steps that were computed both ways.
        verified_until: the position up to which that is enough; numbers that seem linear may not be so for ever.
    """

    recorded: Any = None  # the backend's own type, as of `replay`
    recordings: int = 0
    replay: Any = None
    verified: int = 0
    verified_until: int = 0
    given_up: bool = False


class StepReplay(ABC):
    """Computes the forward passes of one model, replaying steps where it can; the model calls `forward` for every one.

    A backend describes, records and runs steps; `CANNOT_RUN` and `DIFFERS` are its reasons to give a replay up, to be filled in with the
    error, and with the difference of the logits.

    Args:
        draft: the switch that is on while a draft is drawn.
        level: of the log, for steps that could not be replayed.
    """

    CANNOT_RUN: ClassVar[str]
    DIFFERS: ClassVar[str]

    def __init__(self, draft: DraftSwitch, level: int = logging.INFO) -> None:
        self.draft = draft
        self._level = level
        self.lock = threading.Lock()
        self._kinds: dict[object, Kind] = {}
        self._frozen: FrozenModel | None = None
        self._logged: set[str] = set()
        self._changes = 0  # of the model since a prompt or a replayed step
        self.replayed = 0  # steps
        self._replayed_ns = 0
        self.timeline: Timeline | None = None  # receives the steps, and the kernels of programs, while it is set

    @abstractmethod
    def describe(self, model: PreTrainedModel, arguments: Mapping[str, Any]) -> Step | str | None:
        """Return a step that may be replayed, or the reason why it is computed as usual; None for a prompt and other passes."""

    @abstractmethod
    def record(self, kind: Kind, step: Step, plain: Forward, frozen: FrozenModel) -> Any:
        """Compute a step as usual, and make or begin its replay."""

    @abstractmethod
    def bind(self, kind: Kind, step: Step) -> Any:
        """Return the replay that serves the cache of a step; None where one must be recorded."""

    @abstractmethod
    def run(self, kind: Kind, replay: Any, step: Step, *, keep: bool) -> Any:
        """Return the outputs of a replayed step; None where it must be computed as usual. `keep`: let the cache have the new tokens."""

    @abstractmethod
    def tolerance(self, replay: Any) -> float:
        """Return how far the logits of a replay may be from the model's, relative to their norm."""

    @abstractmethod
    def generate(self, model: PreTrainedModel, stock: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what `stock(*args, **kwargs)`, the model's `generate`, returns."""

    def compared(self) -> AbstractContextManager[None]:
        """Compute layer by layer as a replay does while the body runs both, one after the other."""
        return nullcontext()

    def passes(self, cache: Cache) -> CachedPasses:
        """Return the passes over a cache, some of which a backend computes without the model."""
        return CachedPasses(cache)

    def continued(self, tokens: int) -> None:
        """Note tokens that such passes have fed."""
        return

    def forward(
        self, model: PreTrainedModel, plain: Forward, args: Sequence[Any], arguments: Mapping[str, Any], *, between_steps: bool = False
    ) -> Any:
        """Return the result of `plain(*args, **arguments)`, the model's own forward pass, or of its replay.

        `between_steps`: whether `plain` computes a part of the model, before a step of all of it that will notice a change.
        """
        started_ns = time.perf_counter_ns()
        step = None if args else self.describe(model, arguments)
        if isinstance(step, str):
            self._log(step)
        if not isinstance(step, Step) or self.lock.locked():  # another thread computes a step, which nothing waits for
            self._changes = 0
            with last_token_alone(model, arguments if not args else {}):
                outputs = plain(*args, **arguments)
            if arguments.get(CACHE) is None and not args:
                _own_new(outputs)
            return outputs
        with self.lock:  # an interrupt right after `acquire` would leave it locked
            frozen = self._frozen if between_steps else None
            frozen = frozen or self._looked_at(model)
            outputs, replay = self._step(frozen, step, partial(plain, **arguments), plain)
            self._count(replay, started_ns, step.position)
            return outputs

    def _looked_at(self, model: PreTrainedModel) -> FrozenModel:
        """Return the state of the model, after the replays are freed where it has changed."""
        frozen = self._frozen
        if frozen is None or frozen.changed():
            self._changes += frozen is not None
            self.release()
            frozen = self._frozen = FrozenModel(model)
        return frozen

    def _step(self, frozen: FrozenModel, step: Step, usual: Callable[[], Any], plain: Forward) -> tuple[Any, Any]:
        """Return the outputs of a step, and the replay that computed them if one did."""
        obstacle = "the model changes from step to step" if self._changes > MAX_CHANGES else frozen.obstacle
        if obstacle is not None:
            self._log(obstacle)
            return usual(), None
        kind = self._kinds.pop(step.kind, None)
        if kind is None:
            kind = Kind()
            if isinstance(step.cache, PagedCache):
                weakref.finalize(step.cache, self._kinds.pop, step.kind, None)
        self._kinds[step.kind] = kind  # the latest last
        if len(self._kinds) > MAX_KINDS * step.period:
            del self._kinds[next(iter(self._kinds))]
        if kind.given_up:
            return usual(), None
        replay = self.bind(kind, step)
        if replay is None:
            self.draft.preparations += 1
            return self.record(kind, step, plain, frozen), None
        if step.position > kind.verified_until or kind.verified < VERIFIED_STEPS:
            self.draft.preparations += 1
            return self._verify(kind, replay, step, usual), None
        outputs = self.run(kind, replay, step, keep=True)
        if outputs is None:
            return usual(), None
        self._changes = 0
        return outputs, replay

    def _verify(self, kind: Kind, replay: Any, step: Step, usual: Callable[[], Any]) -> Any:
        """Compute a step both ways, and give its replay up where they differ."""
        found = failure = None
        with self.compared():
            try:
                found = self.run(kind, replay, step, keep=False)
            except OSError:  # a disk that fails is no reason to give replays up
                raise
            except (ValueError, RuntimeError) as error:
                failure = self.CANNOT_RUN.format(error)
            expected = usual()
        if found is not None:
            wanted = _logits(expected)
            off = float((_logits(found) - wanted).norm() / wanted.norm())
            logger.debug("a replayed step's logits differ by %.1e", off)
            if off <= self.tolerance(replay):
                kind.verified += 1
                kind.verified_until = max(kind.verified_until, 2 * step.position)
            else:
                failure = self.DIFFERS.format(off)
        if failure is not None:
            self.give_up(kind, failure)
        return expected

    def give_up(self, kind: Kind, reason: str) -> None:
        """Leave the steps of a kind to the model from now on."""
        kind.recorded = kind.replay = None
        kind.given_up = True
        self._log(reason)

    def _log(self, reason: str, level: int | None = None) -> None:
        """Log a reason once; an empty one need not be."""
        if reason and reason not in self._logged:
            self._logged.add(reason)
            logger.log(self._level if level is None else level, "decode steps run layer by layer: %s", reason)

    def _count(self, replay: Any, started_ns: int, position: int, steps: int = 1) -> None:
        """Count steps; `replay`: the one that computed them, or None where they were computed layer by layer."""
        took_ns = time.perf_counter_ns() - started_ns
        if replay is not None:
            self.replayed += steps
            self._replayed_ns += took_ns
        if self.timeline is not None:
            how = "layer by layer" if replay is None else "program"
            self.timeline.add("step", how, self.timeline.at(started_ns), self.timeline.at(started_ns + took_ns), position=position)

    def release(self) -> None:
        """Free the replays, which are recorded again where steps follow."""
        self._kinds.clear()
        self._frozen = None

    def statistics(self) -> dict[str, object]:
        """Return the number of replayed steps, their mean time `step_us`, and why other steps are computed as usual."""
        step_us = round(self._replayed_ns / (1e3 * max(self.replayed, 1)), 1)
        return {"replayed_steps": self.replayed, "step_us": step_us, "reasons": sorted(self._logged)}


def _own_new(outputs: Any) -> None:
    """Take a cache that the model has made in its forward pass, where its memory can be moegraft's own."""
    cache = outputs.get(CACHE) if isinstance(outputs, ModelOutput) else None
    if isinstance(cache, DynamicCache) and is_library(type(cache)):
        adopt(cache)


def _logits(outputs: Any) -> torch.Tensor:
    found: torch.Tensor = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    return found.float().nan_to_num(nan=math.nan, neginf=0.0)  # a head cannot draft all tokens
