"""Rounds of drafting and verifying on a modelled machine: the real engine and the real schedules on the virtual clock.

Nothing is computed, so whether a drafted token is accepted is drawn, with a given chance. Rejected tokens of a draft are other tokens at
the same positions.

Drafts by an MTP layer run one more layer of the model's kind, which is the engine's last, and the head. The layer's state is shown to the
routers of all layers of the body, whose choices are right as often as those of the bundled model's MTP layer (`speculative_foresight.csv`).

The upper bounds of the gain are those of rounds in which no device ever waits (`DraftBound`). Each expert that a verification needs and
that has no slot when its round begins must come over the link, which works from the beginning of the round, or be computed by the CPU. That
can begin once a layer's rest is done, and takes longer for its first expert of a layer. The GPU computes the rest of every layer and the
other experts; a draft step takes the rest of one layer and its experts, as if all were resident. `least_round_ms` is the least time of
this, where experts can be divided at will and the work of all layers be done in any order. Experts have the tokens and the slots of
simulated rounds whose drafts are always accepted; of those in flight, the bytes that have landed count as resident. Plain steps take their
simulated time. What is missing when a round begins depends on the engine's cache; a better one would help plain decoding too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from support.virtual_device import Timed, Work

from harness.routing import MTP_NOISE, PREDICTION_NOISE, SPREAD
from harness.simulation import Simulation, _Counted, head_ms, rest_layer_ms
from moegraft.operators.offload.scheduler import LayerStep, Prediction
from moegraft.operators.routing_trace import Trace
from moegraft.operators.schedule import DraftSchedule, Round, Statistics

WORTHS = np.geomspace(0.01, 100, 81)  # of a ms of the link or the GPU, in ms of the CPU


@dataclass(frozen=True, slots=True)
class DraftWay:
    """One configuration of drafts by an MTP layer, which is the engine's last.

    Attributes:
        acceptance: the chance that a drafted token is accepted after accepted ones, which is also what the drafter expects of each.
        looks_ahead: whether the layer's states are shown to the routers of the body.
    """

    acceptance: float
    looks_ahead: bool = True


@dataclass(slots=True)
class Text:
    """The routing of the text's tokens, and of other tokens at the same positions."""

    real: Trace
    other: Trace


@dataclass(slots=True)
class Parts:
    """The terms of the formula, summed over the layers of one kind of step."""

    layers: int = 0
    experts: int = 0
    missing: int = 0

    def add(self, step: LayerStep, there: NDArray[np.bool_]) -> None:
        self.layers += 1
        self.experts += len(step.experts)
        self.missing += int((~there[step.experts]).sum())


@dataclass(slots=True)
class Played:
    """The result of a run, in ms of the virtual clock; `parts` by "plain", "draft" and "verify"."""

    took_ms: float = 0.0
    tokens: int = 0
    statistics: Statistics = field(default_factory=Statistics)
    parts: dict[str, Parts] = field(default_factory=lambda: {name: Parts() for name in ("plain", "draft", "verify")})
    least_ms: float = 0.0  # of all rounds
    schedule: str = ""

    @property
    def ms_per_token(self) -> float:
        return self.took_ms / self.tokens


class DraftSimulation:
    """Generation of a text with drafts, or by plain steps, over a `Simulation`'s engine."""

    def __init__(self, base: Simulation, text: Text, way: DraftWay | None, schedule: DraftSchedule | None, seed: int = 0) -> None:
        self._base = base
        self._text = text
        self._way = way
        self._schedule = schedule
        self._rng, self._accepting = np.random.default_rng(seed), np.random.default_rng(seed + 1)
        self._layers = base.model.layers - (way is not None)
        self._head_ms = head_ms(base.model, base.machine)
        self._compute = base.device.stream("compute")
        self.played = Played()

    def run(self, tokens: int) -> Played:
        place, played, device = 0, self.played, self._base.device
        start_ms = device.now_ms()
        while played.tokens < tokens:
            done = self._round(place)
            place += done.generated
            played.tokens += done.generated
            played.statistics.add(done)
            if self._schedule is not None:
                self._schedule.record(done)
        played.took_ms = device.now_ms() - start_ms
        played.schedule = self._schedule.state() if self._schedule is not None else ""
        return played

    def _round(self, place: int) -> Round:
        device = self._base.device
        start_ms, absent = device.now_ms(), self._absent()
        planned = self._schedule.plan(self._text.real.num_tokens) if self._schedule is not None else 0
        confidences: list[float] = []
        accepted, stands = 0, True
        while len(confidences) < planned:
            token = self._token(place + len(confidences), real=stands)
            confidence, stood = self._draft(token)
            confidences.append(confidence)
            stands = stands and stood
            accepted += stands
            assert self._schedule is not None, "only a schedule plans drafts"
            if not self._schedule.continues(confidences):
                break
        drafted_ms = device.now_ms()
        fed = [self._token(place + at, real=at <= accepted) for at in range(len(confidences) + 1)]
        self._pass(fed, "verify" if confidences else "plain")
        if confidences:
            self.played.least_ms += self._least_ms(fed, absent)
        judged = min(accepted + 1, len(confidences))
        return Round(confidences, judged, accepted, accepted + 1, drafted_ms - start_ms, device.now_ms() - drafted_ms)

    def _token(self, place: int, *, real: bool) -> Trace:
        trace = self._text.real if real else self._text.other
        return trace.part(place, place + 1)

    def _draft(self, token: Trace) -> tuple[float, bool]:
        """Run the MTP layer on one token; return its confidence and whether the token is accepted."""
        assert self._way is not None, "drafts have a configuration"
        self._layer(LayerStep.of(self._layers, token.chosen[:, self._layers], token.scores[:, self._layers]), 1, "draft")
        self._head()
        if self._way.looks_ahead:
            logits = np.log(token.scores[0, : self._layers])
            noisy = logits + SPREAD * MTP_NOISE * self._rng.normal(size=logits.shape)
            chosen = np.argsort(-noisy, axis=-1, kind="stable")[:, : self._base.model.top_k]
            self._base.engine.expect_verification([Prediction.of(layer, each[None]) for layer, each in enumerate(chosen)])
        return self._way.acceptance, bool(self._accepting.random() < self._way.acceptance)

    def _head(self) -> None:
        self._base.device.launch(self._compute, Timed(Work(cost_ms=self._head_ms)))
        self._compute.record().wait()

    def _pass(self, tokens: Sequence[Trace], kind: str) -> None:
        for layer in range(self._layers):
            chosen = np.concatenate([token.chosen[:, layer] for token in tokens])
            scores = np.concatenate([token.scores[:, layer] for token in tokens])
            self._layer(LayerStep.of(layer, chosen, scores, self._predictions(tokens, layer)), len(tokens), kind)
        self._head()

    def _layer(self, step: LayerStep, tokens: int, kind: str) -> None:
        device, engine = self._base.device, self._base.engine
        device.launch(self._compute, Timed(Work(cost_ms=rest_layer_ms(self._base.model, self._base.machine, tokens))))
        self._compute.record().wait()
        self.played.parts[kind].add(step, engine.cache.slots.slot_of(step.layer) >= 0)
        engine.run(step, _Counted(step.experts, step.loads, self._base.expert_bytes))

    def _absent(self) -> NDArray[np.float64]:
        """Return what has not landed of each expert, (L, E), as a share of it."""
        cache = self._base.engine.cache
        absent = (cache.slots.table < 0).astype(np.float64)
        for layer in range(len(absent)):
            for expert, transfer in cache.queue._in_flight[layer].items():
                absent[layer, expert] = 1 - transfer.landed_bytes / cache.queue.store.expert_bytes
        return absent

    def _least_ms(self, tokens: Sequence[Trace], absent: NDArray[np.float64]) -> float:
        """Return the least time of a round that verifies these tokens."""
        base, model, machine = self._base, self._base.model, self._base.machine
        size = model.expert_bytes(base.bits)
        steps = [LayerStep.of(layer, np.concatenate([each.chosen[:, layer] for each in tokens])) for layer in range(self._layers)]
        cpu_ms, gpu_ms = ([cost(step.loads, size, base.bits) for step in steps] for cost in (machine.cpu_ms, machine.gpu_ms))
        link_ms = [absent[step.layer, step.experts] * machine.transfer_ms(size) for step in steps]
        resident_ms = model.top_k * float(machine.gpu_ms(np.ones(1), size, base.bits)[0])
        draft_ms = rest_layer_ms(model, machine, 1) + resident_ms + self._head_ms
        rest_ms = (len(tokens) - 1) * draft_ms + self._layers * rest_layer_ms(model, machine, len(tokens)) + self._head_ms
        return least_round_ms(rest_ms, cpu_ms, gpu_ms, link_ms, machine.first_cpu_ms(size))

    def _predictions(self, tokens: Sequence[Trace], layer: int) -> list[Prediction]:
        depth = min(self._base.system.prefetch.depth(len(tokens)), len(PREDICTION_NOISE))
        later = range(layer + 1, min(layer + 1 + depth, self._base.model.layers))
        return [Prediction.of(each, np.concatenate([token.predicted[each - layer - 1, :, each] for token in tokens])) for each in later]


def least_round_ms(
    rest_ms: float,
    cpu_ms: Sequence[NDArray[np.float64]],
    gpu_ms: Sequence[NDArray[np.float64]],
    link_ms: Sequence[NDArray[np.float64]],
    first_cpu_ms: float,
) -> float:
    """Return a lower bound of the time of a round, by the duals of two linear programs: the CPU and the link, and the CPU and the GPU.

    For any worth w of a ms of the other device in ms of the CPU, no division of the work takes the CPU less than w times what the other
    one cannot do by the end, plus the sum over all layers of the least of `first_cpu_ms + sum(cpu_ms - w * other_ms)`, 0 included.

    Args:
        rest_ms: of the GPU's work that is no expert of the verification; the CPU has nothing to do meanwhile, and the link has.
        cpu_ms, gpu_ms, link_ms: of each expert of a layer alone, layer by layer; the link's is 0 for resident ones.
        first_cpu_ms: what the CPU takes once in each layer in which it computes.
    """
    least = rest_ms
    for other_ms, before_ms in ((link_ms, 0.0), (gpu_ms, rest_ms)):
        total = before_ms + sum(float(each.sum()) for each in other_ms)
        for worth in WORTHS:
            layers = zip(cpu_ms, other_ms, strict=True)
            by_cpu = sum(min(0.0, first_cpu_ms + float(np.minimum(0.0, cpu - worth * other).sum())) for cpu, other in layers)
            least = max(least, (worth * total + by_cpu + rest_ms) / (1 + worth))
    return least


@dataclass(frozen=True, slots=True)
class DraftBound:
    """The most that drafts can gain, by the ms of a plain step and the least ms of rounds that verify 1, 2, ... drafted tokens."""

    plain_ms: float
    round_ms: Sequence[float]

    def gain(self, acceptance: float, drafted: int) -> float:
        """Return the gain of drafts of `tokens` tokens that are each accepted with chance `acceptance` after accepted ones."""
        tokens = float(np.power(acceptance, np.arange(drafted + 1)).sum())
        return tokens * self.plain_ms / self.round_ms[drafted - 1]

    def best_gain(self, acceptance: float) -> float:
        """Return the gain of the best draft length."""
        return max(self.gain(acceptance, drafted) for drafted in range(1, len(self.round_ms) + 1))

    def acceptance_for(self, gain: float) -> float | None:
        """Return the least acceptance at which drafts of the best length reach the gain; None where none does."""
        return next((float(acceptance) for acceptance in np.linspace(0, 1, 201) if self.best_gain(float(acceptance)) >= gain), None)
