"""Rounds of drafting and verifying on a modelled machine: the real engine and the real schedules on the virtual clock.

Nothing is computed, so the acceptance of a drafted token is drawn from a trained checkpoint's rates (`speculative_confidence.csv`) at the
share of the router's weight that the draft's experts have. The draft's routing differs from the full model's as much as that of the
checkpoint (`recall` in `speculative_drafts.csv`). Rejected tokens of a draft are other tokens at the same positions.

The upper bounds of the gain are those of rounds in which no device ever waits (`DraftBound`). For one layer, c0 is the time of everything
except experts, g of a resident expert on the GPU, c of an expert on the CPU, f the extra time of the CPU's first expert, and t the transfer
of one expert. A verification of n drafted tokens needs U(n + 1) distinct experts, of which M(n + 1) are missing:

- a draft step takes `c0 + r * g`, since all its r experts are resident;
- in a verification, the CPU computes some missing experts and the link transfers the others, both without a pause: `c0 + max(U * g, T)`
  with the least T for which `(T - f) / c + T / t >= M`.

Plain steps take their simulated time. M comes from the simulated verification of drafts of that length that are always accepted, with the
engine's cache and prefetches: better prefetches would help plain decoding as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from harness.record import read_rows
from harness.routing import PREDICTION_NOISE, SPREAD, ModelShape
from harness.simulation import Simulation, _Counted, rest_layer_ms
from moegraft.operators.decode.schedule import DraftSchedule, Round, Statistics
from moegraft.operators.offload.devices.base import Work
from moegraft.operators.offload.step import DraftStep, LayerStep, Prediction
from moegraft.operators.routing_trace import Trace

Experts = Literal["any", "resident"]
NOISES = np.linspace(0.0, 1.2, 13)
SAMPLE_TOKENS = 40


@dataclass(frozen=True, slots=True)
class DraftWay:
    """One configuration of drafts.

    Attributes:
        experts: the value of the option `experts` of `speculative_draft`.
        tolerance: 0 for lossless, or a tolerance that was measured with the checkpoint.
    """

    top_k: int
    experts: Experts
    tolerance: float = 0.0

    @property
    def resident(self) -> bool:
        """Whether only experts with a slot draft."""
        return self.experts != "any"


@dataclass(frozen=True, slots=True)
class _Point:
    """A measured configuration of the checkpoint; arrays are (B,), by bin of confidence."""

    kept_share: float
    recall: float
    confidences: NDArray[np.float64]
    judged: NDArray[np.float64]
    accepted: NDArray[np.float64]


class MeasuredDrafts:
    """The acceptance of the checkpoint's greedy drafts by the share of the router's weight that their experts kept."""

    def __init__(self, experts: Experts, tolerance: float) -> None:
        chosen = [row for row in read_rows("speculative_confidence") if _is(row, experts, tolerance)]
        ways = {(row["draft_top_k"], row["resident_ratio"]): row for row in read_rows("speculative_drafts") if _is(row, experts, tolerance)}
        found = []
        for (top_k, ratio), way in ways.items():
            bins = [row for row in chosen if (row["draft_top_k"], row["resident_ratio"]) == (top_k, ratio)]
            middle = [(float(row["confidence_from"]) + float(row["confidence_to"])) / 2 for row in bins]
            judged, accepted = (np.array([float(row[name]) for row in bins]) for name in ("judged", "accepted"))
            found.append(_Point(float(way["kept_share"]), float(way["recall"]), np.array(middle), judged, accepted))
        self._points = sorted(found, key=lambda point: point.kept_share)

    def draw(self, kept_share: float, rng: np.random.Generator) -> tuple[float, bool]:
        """Draw a token's confidence, and whether it is accepted, from the nearest configurations below and above, in proportion.

        Outside the measured shares, the outermost configuration is used, so that no draft is better than any measured one.
        """
        shares = [point.kept_share for point in self._points]
        above = min(int(np.searchsorted(shares, kept_share)), len(shares) - 1)
        low, high = self._points[max(above - 1, 0)], self._points[above]
        width = high.kept_share - low.kept_share
        towards = 1.0 if width <= 0 else np.clip((kept_share - low.kept_share) / width, 0, 1)
        point = high if rng.random() < towards else low
        at = int(rng.choice(len(point.judged), p=point.judged / point.judged.sum()))
        return float(point.confidences[at]), bool(rng.random() < point.accepted[at] / point.judged[at])

    def recall(self, kept_share: float) -> float:
        return float(np.interp(kept_share, [point.kept_share for point in self._points], [point.recall for point in self._points]))


class CertainDrafts(MeasuredDrafts):
    """Drafts whose tokens are always accepted, so that the cost of rounds does not depend on chance."""

    def draw(self, kept_share: float, rng: np.random.Generator) -> tuple[float, bool]:
        return 1.0, True


def _is(row: dict[str, str], experts: Experts, tolerance: float) -> bool:
    return row["experts"] == experts and float(row["tolerance"]) == tolerance and row["decoding"] == "greedy"


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
    kept: list[float] = field(default_factory=list)
    draft_demands: int = 0
    schedule: str = ""

    @property
    def ms_per_token(self) -> float:
        return self.took_ms / self.tokens


class DraftSimulation:
    """Generation of a text with drafts, or by plain steps, over a `Simulation`'s engine."""

    def __init__(
        self, base: Simulation, text: Text, way: DraftWay | None, schedule: DraftSchedule | None, seed: int = 0, *, certain: bool = False
    ) -> None:
        self._base = base
        self._text = text
        self._way = way
        self._schedule = schedule
        self._rng = np.random.default_rng(seed)
        drafts = CertainDrafts if certain else MeasuredDrafts
        self._measured = None if way is None else drafts(way.experts, way.tolerance)
        self._recalls = noise_recalls(base.model, text.real)
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
        start_ms = device.now_ms()
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
        judged = min(accepted + 1, len(confidences))
        return Round(confidences, judged, accepted, accepted + 1, drafted_ms - start_ms, device.now_ms() - drafted_ms)

    def _token(self, place: int, *, real: bool) -> Trace:
        trace = self._text.real if real else self._text.other
        return trace.part(place, place + 1)

    def _draft(self, token: Trace) -> tuple[float, bool]:
        """Run one draft step; return its confidence and whether the token is accepted."""
        way, slots = self._way, self._base.engine.cache.slots
        assert way is not None and self._measured is not None, "drafts have a configuration"
        kept: list[float] = []
        share = float(np.mean(self.played.kept[-8:])) if self.played.kept else 0.5
        noise = float(np.interp(-self._measured.recall(share), -self._recalls, NOISES))
        demanded = self._base.engine.cache.queue.statistics.demanded
        for layer in range(self._base.model.layers):
            there = slots.slot_of(layer) >= 0
            logits = np.log(token.scores[0, layer]) + SPREAD * noise * (self._rng.normal(size=len(there)) if layer else 0.0)
            order = np.argsort(-logits, kind="stable").astype(np.int64)
            whole = order[: self._base.model.top_k]
            few = (order[there[order]] if way.resident else whole)[: way.top_k]
            scores = np.exp(logits - logits.max())
            kept.append(float(scores[few].sum() / scores[whole].sum()))
            step = LayerStep.of(layer, few[None], None, self._predictions([token], layer), DraftStep(whole[None], way.top_k, way.resident))
            self._layer(step, 1, "draft")
        self.played.kept.append(float(np.mean(kept)))
        self.played.draft_demands += self._base.engine.cache.queue.statistics.demanded - demanded
        return self._measured.draw(self.played.kept[-1], self._rng)

    def _pass(self, tokens: Sequence[Trace], kind: str) -> None:
        for layer in range(self._base.model.layers):
            chosen = np.concatenate([token.chosen[:, layer] for token in tokens])
            scores = np.concatenate([token.scores[:, layer] for token in tokens])
            self._layer(LayerStep.of(layer, chosen, scores, self._predictions(tokens, layer)), len(tokens), kind)

    def _layer(self, step: LayerStep, tokens: int, kind: str) -> None:
        device, engine = self._base.device, self._base.engine
        device.launch(self._compute, None, Work("dense", cost_ms=rest_layer_ms(self._base.model, self._base.machine, tokens)))
        self._compute.record().wait()
        self.played.parts[kind].add(step, engine.cache.slots.slot_of(step.layer) >= 0)
        engine.run(step, _Counted())
        if step.layer == self._base.model.layers - 1:
            self._compute.record().wait()

    def _predictions(self, tokens: Sequence[Trace], layer: int) -> list[Prediction]:
        depth = min(self._base.system.prefetch.depth, len(PREDICTION_NOISE))
        later = range(layer + 1, min(layer + 1 + depth, self._base.model.layers))
        return [Prediction.of(each, np.concatenate([token.predicted[each - layer - 1, :, each] for token in tokens])) for each in later]


def noise_recalls(model: ModelShape, trace: Trace) -> NDArray[np.float64]:
    """Return, for each of `NOISES`, the share of a token's experts that are still chosen, which falls with the noise."""
    rng = np.random.default_rng(0)
    logits = np.log(trace.scores[:SAMPLE_TOKENS])
    found = []
    for noise in NOISES:
        noisy = logits + SPREAD * noise * rng.normal(size=logits.shape)
        named = np.argsort(-noisy, axis=-1, kind="stable")[..., : model.top_k]
        chosen = trace.chosen[:SAMPLE_TOKENS]
        found.append(float((chosen[..., :, None] == named[..., None, :]).any(-1).mean()))
    return np.asarray(found)


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of one layer in ms.

    Attributes:
        plain: a step without drafts.
        rest: everything except experts, for 1, 2, ... tokens.
        gpu, cpu, first_cpu, link: one expert on the GPU, on the CPU, as the CPU's first, and its transfer.
    """

    plain: float
    rest: Sequence[float]
    gpu: float
    cpu: float
    first_cpu: float
    link: float


@dataclass(frozen=True, slots=True)
class Verification:
    """The mean numbers of needed and of missing experts of a layer."""

    experts: float
    missing: float


@dataclass(frozen=True, slots=True)
class DraftBound:
    """The most that drafts by `top_k` experts can gain; `verifications` are of 1, 2, ... drafted tokens."""

    costs: Costs
    verifications: Sequence[Verification]
    top_k: float

    @property
    def draft_ms(self) -> float:
        return self.costs.rest[0] + self.top_k * self.costs.gpu

    def verify_ms(self, drafted: int) -> float:
        costs, needed = self.costs, self.verifications[drafted - 1]
        together = (needed.missing + costs.first_cpu / costs.cpu) / (1 / costs.cpu + 1 / costs.link)
        busy = min(needed.missing * costs.link, together)  # a CPU may cost more than it saves
        return costs.rest[drafted] + max(needed.experts * costs.gpu, busy)

    def gain(self, acceptance: float, drafted: int) -> float:
        """Return the gain of drafts of `tokens` tokens that are each accepted with chance `acceptance` after accepted ones."""
        tokens = float(np.power(acceptance, np.arange(drafted + 1)).sum())
        return tokens * self.costs.plain / (drafted * self.draft_ms + self.verify_ms(drafted))

    def best_gain(self, acceptance: float) -> float:
        """Return the gain of the best draft length."""
        return max(self.gain(acceptance, drafted) for drafted in range(1, len(self.verifications) + 1))

    def acceptance_for(self, gain: float) -> float | None:
        """Return the least acceptance at which drafts of the best length reach the gain; None where none does."""
        return next((float(acceptance) for acceptance in np.linspace(0, 1, 201) if self.best_gain(float(acceptance)) >= gain), None)
