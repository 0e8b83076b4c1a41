"""Decode steps of a whole model, captured where that is possible: one object a model, asked at every forward pass.

The first step on a cache runs layer by layer and is captured thereafter; the first of all is also replayed, and its logits compared,
before any other is trusted to a graph: it was captured a token later, so that a model which counts in Python goes wrong there. A step
is captured anew, and compared, when a sliding window becomes full. Whatever cannot be captured runs layer by layer, and the reason is
said once:

- drafts and their verification, whose tokens a step differ in number and in the experts that may run;
- texts that the server decodes together, whose cache grows and shrinks with each that comes and goes;
- prompts, and steps of more than `MOST_TOKENS` sequences, which gain more from a schedule for each layer;
- caches that grow or are quantised, recurrent states, and windows whose masks and positions the step is not given;
- experts without some of their neurons, several GPUs, and on an emulated device operators that it does not see.

No GPU has run this yet. Hooks on modules do not see replayed steps.

Which of two ways to decode is the faster here: a few tokens of each, timed as they are made.
"""

from __future__ import annotations

import logging
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from moegraft.operators.offload.captured import (
    Mark,
    StepGraph,
    advance,
    being_captured,
    fixed,
    grown,
    has_static_form,
    is_filled,
    names_a_cache,
    phase,
    places,
    why_not_static,
    why_unseen_positions,
)
from moegraft.operators.offload.devices.base import DeviceError

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel, StaticCache

    from moegraft.operators.offload.model_experts import ModelExperts


logger = logging.getLogger(__name__)
Way = Literal["eager", "graph"]
STEPS = 8  # of each way; the first one, which warms up, is not counted


class Trial:
    """Asked before every step that could go either way. A step takes from its beginning to that of the next one.

    Attributes:
        winner: None until both ways were timed.
    """

    def __init__(self) -> None:
        self.winner: Way | None = None
        self._times_ms: dict[Way, list[float]] = {"eager": [], "graph": []}
        self._running: tuple[Way, float] | None = None

    def next(self, now_ms: float) -> Way:
        """How the step that begins now is to be made."""
        if self.winner is not None:
            return self.winner
        if self._running is not None:
            way, began_ms = self._running
            self._times_ms[way].append(now_ms - began_ms)
        way = next((way for way, times in self._times_ms.items() if len(times) <= STEPS), "eager")
        if all(len(times) > STEPS for times in self._times_ms.values()):
            way = self.winner = self._faster()
        self._running = way, now_ms
        return way

    def pause(self) -> None:
        """Something else comes before the next step, whose time is not the last one's."""
        self._running = None

    def _faster(self) -> Way:
        eager_ms, graph_ms = (statistics.median(times[1:]) for times in self._times_ms.values())
        logger.info("a token takes %.2f ms layer by layer and %.2f ms as a captured step", eager_ms, graph_ms)
        return "graph" if graph_ms < eager_ms else "eager"


Forward = Callable[..., Any]
CACHE = "past_key_values"
MOST_TOKENS = 4  # sequences of a step: beyond, deciding layer by layer gains more than it costs (an estimate, no GPU has measured it)
DRAFTS = "tokens are drafted with fewer experts, and verified several at once"
TOLERANCE = 0.05  # of the logits' norm: bfloat16 sums in another order


class _Step:
    """A captured step: its inputs and outputs stay where they are."""

    def __init__(self, graph: StepGraph, forward: Forward, arguments: Mapping[str, Any]) -> None:
        self._graph = graph
        leaves, self._form = tree_flatten({name: value for name, value in arguments.items() if name != CACHE})
        self._inputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._outputs: Any = None

        def step() -> None:
            self._outputs = forward(**tree_unflatten(self._inputs, self._form), **{CACHE: arguments[CACHE]})

        with being_captured(arguments[CACHE]):
            graph.capture(step)

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        leaves, _ = tree_flatten({name: value for name, value in arguments.items() if name != CACHE})
        for kept, given in zip(self._inputs, leaves, strict=True):
            if isinstance(kept, torch.Tensor):
                kept.copy_(given, non_blocking=True)
        self._graph.replay()
        advance(arguments[CACHE])
        return _copied(self._outputs, arguments[CACHE])

    def release(self) -> None:
        self._outputs = None
        self._graph.release()


class DecodeSteps:
    """Of the layers in `groups`, whose engines are open by the first forward pass."""

    def __init__(self, groups: Sequence[ModelExperts]) -> None:
        self._groups = groups
        self._mode = "graph" if any(group.options.decode == "graph" for group in groups) else "auto"
        self._trial = Trial()
        self._said: set[str] = set()
        self._never: str | None = None  # why no step will be captured
        self._looked = False
        self._checked: set[object] = set()  # by which windows are full
        self._form: object = None
        self._step: _Step | None = None
        self._turn = threading.Lock()

    def forward(self, model: PreTrainedModel, plain: Forward, args: Sequence[Any], arguments: Mapping[str, Any], *, drafting: bool) -> Any:
        """`plain(*args, **arguments)`, the model's own forward pass, or what a replayed step gives for it."""
        ids = arguments.get("input_ids")
        single = isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.shape[1] == 1 and not args and not torch.is_grad_enabled()
        if not single or self._trial.winner == "eager" or not self._turn.acquire(blocking=False):
            self._trial.pause()
            return plain(*args, **arguments)
        try:
            reason = self._why_eager(model, arguments, drafting=drafting)
            if reason is not None:
                self._say(reason)
            elif self._mode == "auto" and self._trial.next(self._groups[0].engines[0].device.now_ms()) == "eager":
                reason = "measured"
            return plain(**arguments) if reason is not None else self._next(plain, arguments)
        finally:
            self._turn.release()

    def generation(self, model: PreTrainedModel, args: Sequence[Any], arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """`generate`'s arguments, with a static cache where steps may be captured and the caller names no other."""
        if not self._wants(model):
            return arguments
        if arguments.get(CACHE) is not None and why_not_static(arguments[CACHE]) is None:
            return {"disable_compile": True, **arguments}
        ids = args[0] if args else arguments.get("input_ids")
        many = not isinstance(ids, torch.Tensor) or len(ids) > MOST_TOKENS or arguments.get("num_beams", 1) > 1
        if many or names_a_cache(arguments, model.generation_config) or arguments.get("assistant_model") is not None:
            return arguments
        return {**arguments, "cache_implementation": "static", "disable_compile": True} if has_static_form(model.config) else arguments

    def fixed_cache(self, model: PreTrainedModel, cache: DynamicCache | None, tokens: int) -> DynamicCache | StaticCache | None:
        """What `cache` holds, with room for `tokens` in all, for one who passes caches to `generate`: a static one where steps may be
        captured, else `cache` itself."""
        if not self._wants(model) or not has_static_form(model.config):
            return cache
        return fixed(cache, model.config.get_text_config(decoder=True), tokens)

    def grown_cache(self, model: PreTrainedModel, cache: Any) -> Any:
        """`cache` as one that can grow and be cut: undoes `fixed_cache`."""
        return cache if why_not_static(cache) is not None else grown(cache, model.config.get_text_config(decoder=True))

    def _wants(self, model: PreTrainedModel) -> bool:
        return self._why_never(model) is None and self._trial.winner != "eager"

    def release(self) -> None:
        """Ends the captured step; the model computes no more."""
        step, self._step, self._form = self._step, None, None
        if step is not None:
            step.release()

    def _next(self, plain: Forward, arguments: Mapping[str, Any]) -> Any:
        form = _form(arguments)
        if self._step is not None and form == self._form:
            try:
                return self._step(arguments)
            except DeviceError as error:
                self.release()
                self._never = f"the device failed in a captured step: {error}"
                raise
        self.release()
        mark = None if form[-1] in self._checked else Mark(arguments[CACHE])
        expected = plain(**arguments)  # also the warm-up that a capture wants
        if phase(arguments[CACHE]) != form[-1]:
            return expected  # it filled a window: the steps that follow are of another kind
        try:
            self._step, self._form = self._captured(plain, arguments), form
        except RuntimeError as error:  # DeviceError among them, and memory that is not there
            self._never = str(error)
            self._say(self._never)
            return expected
        if mark is None:
            return expected
        self._checked.add(form[-1])
        return self._compared(expected, plain, arguments, mark)

    def _captured(self, plain: Forward, arguments: Mapping[str, Any]) -> _Step:
        group = self._groups[0]
        layers = group.layers
        shapes = {layer.last_call for layer in layers}
        shape = shapes.pop()
        if shapes or shape is None:
            raise DeviceError("the layers of this model are not all called alike")
        graph = StepGraph(group.engines[0], layers[0].parts, shape)
        for layer, captured in zip(layers, graph.layers, strict=True):
            layer.captured = threading.get_ident(), captured
        try:
            return _Step(graph, plain, arguments)
        finally:
            for layer in layers:
                layer.captured = None

    def _compared(self, expected: Any, plain: Forward, arguments: Mapping[str, Any], mark: Mark) -> Any:
        """What a captured step is worth, on the token that was just computed layer by layer."""
        assert self._step is not None, "compared after capture"
        mark.restore()
        try:
            found, right = (_logits(outputs).float() for outputs in (self._step(arguments), expected))
            error = float((found - right).norm() / right.norm())
            if error <= TOLERANCE:
                return expected
            self._never = f"a captured step gave logits that are {error:.1%} off"
        except (RuntimeError, ValueError) as failure:
            self._never = f"the first captured step failed: {failure}"
        self._say(self._never)
        self.release()
        mark.restore()
        return plain(**arguments)

    def _why_eager(self, model: PreTrainedModel, arguments: Mapping[str, Any], *, drafting: bool) -> str | None:
        never = self._why_never(model)
        if never is not None:
            return never
        if drafting:
            return DRAFTS
        if len(arguments["input_ids"]) > MOST_TOKENS:
            return f"a step of {len(arguments['input_ids'])} sequences is decided layer by layer; up to {MOST_TOKENS} are captured"
        cache = arguments.get(CACHE)
        return why_not_static(cache) or why_unseen_positions(arguments, cache) or (None if is_filled(cache) else "")

    def _why_never(self, model: PreTrainedModel) -> str | None:
        """Looked for once, when the model is whole."""
        if not self._looked:
            self._looked = True
            self._never = self._never or self._obstacle(model)
        return self._never

    def _obstacle(self, model: PreTrainedModel) -> str | None:
        engines = [engine for group in self._groups for engine in group.engines]
        if not engines or (self._mode == "auto" and engines[0].device.torch_device.type != "cuda"):
            return ""  # that all runs on the CPU was said; and on an emulated device nothing can be measured
        if len(engines) > 1 or len(self._groups) > 1:
            return "the layers are on several GPUs, or their experts of several kinds"
        own: Any = model  # torch types every attribute of a module as a tensor
        others = own.moegraft.operators  # those that leave their module in its place among them
        reason = next((operator.uncaptured for operator in others.values() if operator.uncaptured is not None), None)
        if reason is not None:
            return str(reason)
        group = self._groups[0]
        if any(layer.sparse for layer in group.layers):
            return "neurons are left out of experts"
        if engines[0].device.torch_device.type != "cuda" and len(others) > len(group.layers):
            return "other operators compute on the CPU, unseen by an emulated device"
        return None

    def _say(self, reason: str) -> None:
        if reason and reason not in self._said:
            self._said.add(reason)
            logger.log(logging.WARNING if self._mode == "graph" else logging.INFO, "decode steps run layer by layer: %s", reason)


def _form(arguments: Mapping[str, Any]) -> tuple[TreeSpec, list[object], object, object]:
    """What a captured step has fixed: forms of tensors, values of all else, the memory of the cache, and which windows are full."""
    leaves, spec = tree_flatten({name: value for name, value in arguments.items() if name != CACHE})
    fixed: list[object] = [(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return spec, fixed, places(arguments[CACHE]), phase(arguments[CACHE])


def _copied(outputs: Any, cache: Any) -> Any:
    """The outputs in memory of their own: the next step writes over what it was captured with."""
    if isinstance(outputs, dict):  # as transformers' outputs are
        return type(outputs)(**{name: cache if name == CACHE else _copied(value, cache) for name, value in outputs.items()})
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, outputs)


def _logits(outputs: Any) -> torch.Tensor:
    found = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    assert isinstance(found, torch.Tensor), "a causal model's outputs have logits"
    return found
